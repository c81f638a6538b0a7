"""Gated attention, SwiGLU and the decoder block, built from te.Linear and te.RMSNorm alone.

`te` is an engine (te_models.engine): Transformer Engine or its emulation; these layers read the same with either.

Shapes: B batch, S sequence, N = B*S tokens padded up to the recipe's alignment, D hidden_size, A attention heads,
K key/value heads, H head_dim, F intermediate_size.

Activations are [N, D], tokens padded with rows of zeros. A row of zeros stays one through every layer here (no bias but
the one on q, k, v, which attention cuts off), and so do its gradients, hence padding changes no amax, no scale and no
weight gradient. The padding inside a batch of unequal prompts is kept at zero in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from te_models.checkpointing import Recompute
from te_models.config import ModelConfig
from te_models.kernels import Kernels
from te_models.kernels.attention import causal_attention
from te_models.tensor_parallel import TensorParallel


class Tokens(NamedTuple):
    """What the layers must know of the tokens in a batch, computed once for all of them."""

    batch: int
    seq: int
    cos: Tensor  # [S, R] or [B, S, R], R channels rotated, in the dtype of the activations
    sin: Tensor
    cache: KVCache | None
    masks: dict[int | None, Tensor | None]  # sliding window -> which keys are seen (kernels.attention.attention_mask)
    real: Tensor | None  # bool [B*S, 1], False at padding inside the batch; None where there is none
    recompute: Recompute  # which activations are kept for backward


class KVCache:
    """Keys and values of the positions seen so far, one pair a layer, allocated once.

    Memory: 2 * layers * B * K * max_length * H elements of `dtype`.
    """

    def __init__(self, config: ModelConfig, batch: int, max_length: int, device: torch.device, dtype: torch.dtype):
        shape = (config.num_hidden_layers, 2, batch, config.num_key_value_heads, max_length, config.head_dim)
        self.buffer = torch.zeros(shape, device=device, dtype=dtype)
        self.length = 0
        self._mask: Tensor | None = None  # bool [B, max_length], once a position was padding

    def mask(self, new: Tensor | None, seq: int) -> Tensor | None:
        """Which of the positions so far and the `seq` newest are real: bool [B, length + S], or None for all.

        `new` bool [B, S] says it of the newest; None: all of them. To be called once a forward, before `append`.
        """
        if new is None and self._mask is None:
            return None
        if self._mask is None:
            batch, max_length = self.buffer.shape[2], self.buffer.shape[4]
            self._mask = torch.ones(batch, max_length, dtype=torch.bool, device=self.buffer.device)
        end = self.length + seq
        if new is not None:
            self._mask[:, self.length : end] = new
        return self._mask[:, :end]

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v [B, K, S, H] of the newest positions; returns all keys and values so far, [B, K, length+S, H].

        `length` moves on when the last layer has stored, so that every layer of one forward sees the same.
        """
        end = self.length + k.shape[-2]
        keys, values = self.buffer[layer]
        keys[:, :, self.length : end] = k
        values[:, :, self.length : end] = v
        if layer == len(self.buffer) - 1:
            self.length = end
        return keys[:, :, :end], values[:, :, :end]


def rotary_tables(config: ModelConfig, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cos, sin) [..., R] of the integer positions [...]; angles in FP32, the tables in `dtype`."""
    channel = torch.arange(0, config.rotary_size, 2, device=positions.device, dtype=torch.float32)
    frequency = scale_frequencies(1.0 / config.rope_theta ** (channel / config.rotary_size), config.rope_scaling)
    angle = positions.float().unsqueeze(-1) * frequency
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def scale_frequencies(frequency: Tensor, scaling: Mapping[str, Any] | None) -> Tensor:
    """RoPE's angular frequencies, FP32, stretched to longer contexts as `ModelConfig.rope_scaling` says.

    "linear" divides all by `factor`. "llama3" leaves wavelengths below original / high_freq_factor alone, divides those
    above original / low_freq_factor by `factor`, and interpolates between the two.
    """
    if scaling is None:
        return frequency
    if scaling["rope_type"] == "linear":
        return frequency / scaling["factor"]
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequency / scaling["factor"] + kept * frequency


def linear(te: ModuleType, inputs: int, outputs: int, *, bias: bool = False, split: Any = None, **factory: Any) -> Any:
    """A te.Linear whose weight has no values yet: CausalLM.init_weights, or a loader, gives all of them.

    `split` is from TensorParallel.linear; the sizes are then those of the whole layer.
    """
    place = dict(params_dtype=factory["dtype"], device=factory["device"])
    return te.Linear(inputs, outputs, bias=bias, init_method=lambda weight: None, **place, **(split or {}))


def norm_options(config: ModelConfig) -> dict[str, Any]:
    """The arguments of every te.RMSNorm of a model, beside its size, device and dtype."""
    return dict(eps=config.rms_norm_eps, zero_centered_gamma=config.zero_centered_norm)


class GatedAttention(nn.Module):
    """o_proj(sigmoid(g) * attention(rope(q), rope(k), v)) with q, k, v and the gate g from one GEMM.

    Qiu et al. 2025, arXiv 2505.06708 (their best position, after attention and before the output projection).
    The rows of `qkvg_proj.weight` are [q: A*H | k: K*H | v: K*H | g: A*H, A (padded), or none], with the A and K of
    this rank's `config` under tensor parallelism.
    """

    def __init__(
        self, config: ModelConfig, layer: int, te: ModuleType, kernels: Kernels, tp: TensorParallel, **factory: Any
    ) -> None:
        super().__init__()
        self.config, self.layer, self.kernels, self.tp = config, layer, kernels, tp
        column, row, d = (
            factory | {"split": tp.linear("column")},
            factory | {"split": tp.linear("row")},
            config.hidden_size,
        )
        self.qkvg_proj = linear(te, d, tp.size * config.qkvg_size, bias=config.attention_bias, **column)
        self.o_proj = linear(te, tp.size * config.q_size, d, **row)
        if config.qk_norm:
            self.q_norm = te.RMSNorm(config.head_dim, **norm_options(config), **factory)
            self.k_norm = te.RMSNorm(config.head_dim, **norm_options(config), **factory)

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        """x [N, D] -> [N, D]."""
        config = self.config
        qkvg = self.qkvg_proj(x)
        rows = len(qkvg)  # of all ranks, where x has this rank's alone
        qkvg = qkvg[: tokens.batch * tokens.seq].unflatten(0, (tokens.batch, tokens.seq))
        q, k, v, g = qkvg.split((config.q_size, config.kv_size, config.kv_size, config.gate_size), dim=-1)
        q, k, v = (rearrange(t, "b s (a h) -> b s a h", h=config.head_dim) for t in (q, k, v))
        if config.qk_norm:
            q, k = (self.tp.norm(norm, t, partial=True) for norm, t in ((self.q_norm, q), (self.k_norm, k)))
        if config.has_rope(self.layer):
            q, k = (self._rotated(t, tokens) for t in (q, k))
        q, k, v = (rearrange(t, "b s a h -> b a s h") for t in (q, k, v))
        if tokens.cache is not None:
            k, v = tokens.cache.append(self.layer, k, v)
        mask = tokens.masks.get(config.window(self.layer))
        out = self._gated(rearrange(causal_attention(q, k, v, mask), "b a s h -> (b s) a h"), g.flatten(0, 1))
        if tokens.real is not None:
            out = out * tokens.real
        return self.o_proj(pad_rows(out, rows))

    def _rotated(self, x: Tensor, tokens: Tokens) -> Tensor:
        """x [B, S, heads, H] with RoPE on the first R channels of each head."""
        size = self.config.rotary_size
        if size == self.config.head_dim:
            return self.kernels.rope(x, tokens.cos, tokens.sin)
        return torch.cat((self.kernels.rope(x[..., :size], tokens.cos, tokens.sin), x[..., size:]), dim=-1)

    def _gated(self, out: Tensor, g: Tensor) -> Tensor:
        """out [B*S, A, H], g [B*S, gate_size] -> [B*S, A*H]."""
        if self.config.attention_gate == "elementwise":
            return self.kernels.gate(out.flatten(-2), g)
        if self.config.attention_gate == "headwise":
            return self.kernels.gate(out, g[:, : self.config.num_attention_heads, None]).flatten(-2)
        return out.flatten(-2)


class SwiGLU(nn.Module):
    """down_proj(silu(gate) * up) with gate and up from one GEMM; rows of `gate_up_proj.weight` are [gate: F | up: F]."""

    def __init__(
        self, config: ModelConfig, te: ModuleType, kernels: Kernels, tp: TensorParallel, **factory: Any
    ) -> None:
        super().__init__()
        self.kernels = kernels
        d, f = config.hidden_size, tp.size * config.intermediate_size
        self.gate_up_proj = linear(te, d, 2 * f, split=tp.linear("column"), **factory)
        self.down_proj = linear(te, f, d, split=tp.linear("row"), **factory)

    def hidden(self, x: Tensor) -> Tensor:
        """x [N, D] -> the input of down_proj [N, F]."""
        return self.kernels.swiglu(self.gate_up_proj(x))

    def forward(self, x: Tensor) -> Tensor:
        """x [N, D] -> [N, D]."""
        return self.down_proj(self.hidden(x))


class Block(nn.Module):
    """A pre-norm decoder block::

    x -+- RMSNorm - GatedAttention -+-> + -+- RMSNorm - SwiGLU -+-> +
       +----------------------------+      +--------------------+

    `config` is that of the rank's share of the heads and channels (TensorParallel.local).
    """

    def __init__(
        self, config: ModelConfig, layer: int, te: ModuleType, kernels: Kernels, tp: TensorParallel, **factory: Any
    ) -> None:
        super().__init__()
        self.tp = tp
        self.fp8_enabled = te.FP8GlobalStateManager.is_fp8_enabled
        self.in_fp8 = False  # set by the model, which knows its recipe
        self.input_layernorm = te.RMSNorm(config.hidden_size, **norm_options(config), **factory)
        self.self_attn = GatedAttention(config, layer, te, kernels, tp, **factory)
        self.post_attention_layernorm = te.RMSNorm(config.hidden_size, **norm_options(config), **factory)
        self.mlp = SwiGLU(config, te, kernels, tp, **factory)

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        """x [N, D] -> [N, D]."""
        if self.in_fp8 and not self.fp8_enabled():
            raise RuntimeError(
                "an FP8 block ran outside the model's autocast: it was called by itself, or recomputed by a checkpoint "
                "round it; use activation_checkpointing='full' instead"
            )
        x = x + self.self_attn(self.tp.norm(self.input_layernorm, x, self.tp.scatters), tokens)
        return x + self.mlp.down_proj(tokens.recompute.part(self.mlp, self._mlp_hidden, x))

    def _mlp_hidden(self, x: Tensor) -> Tensor:
        return self.mlp.hidden(self.tp.norm(self.post_attention_layernorm, x, self.tp.scatters))


def pad_rows(x: Tensor, rows: int) -> Tensor:
    """x [n, D] with rows of zeros appended up to [rows, D]; x itself when nothing is missing."""
    return x if x.shape[0] == rows else F.pad(x, (0, 0, 0, rows - x.shape[0]))
