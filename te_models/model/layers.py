"""Gated attention, SwiGLU and the decoder block, built from te.Linear and te.RMSNorm alone.

`te` is an engine (te_models.engine): Transformer Engine or its emulation; these layers read the same with either.

Shapes: B batch, S sequence, N = B*S tokens padded up to the recipe's alignment, D hidden_size, A attention heads,
K key/value heads, H head_dim, F intermediate_size.

Activations are [N, D], tokens padded with rows of zeros. A row of zeros stays one through every layer here (no bias but
the one on q, k, v, which attention cuts off), and so do its gradients, hence padding changes no amax, no scale and no
weight gradient. The padding inside a batch of unequal prompts is kept at zero in the same way.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from te_models.config.model import ModelConfig
from te_models.kernels.dispatch import Kernels
from te_models.kernels.gated_attention import Heads, attention_core, can_fuse
from te_models.kernels.sdpa import causal_attention
from te_models.model.forward_context import Tokens
from te_models.model.tensor_parallel import TensorParallel


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
        self.heads = Heads(
            config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.attention_gate
        )
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
        qkvg = self.kernels.linear(self.qkvg_proj, x, **tokens.weights)
        out = self._fused(qkvg, tokens) if self._fusible(qkvg, tokens) else self._mixed(qkvg, tokens)
        # Rows of all ranks, where x has this rank's alone.
        return self.kernels.linear(self.o_proj, pad_rows(out, len(qkvg)), **tokens.weights)

    def _fusible(self, qkvg: Tensor, tokens: Tokens) -> bool:
        """Whether the model asked for one operation, and these tokens need no mask but the causal one."""
        masked = tokens.real is not None or tokens.masks.get(self.config.window(self.layer)) is not None
        asked = self.kernels.attention is not None and tokens.cache is None and not masked
        return asked and can_fuse(self.config, tokens.seq, qkvg.device, qkvg.dtype)

    def _fused(self, qkvg: Tensor, tokens: Tokens) -> Tensor:
        """As `_mixed`, in one operation."""
        assert self.kernels.attention is not None
        cos, sin = (tokens.cos, tokens.sin) if self.config.has_rope(self.layer) else (None, None)
        place = (tokens.batch, tokens.seq, self.heads, self.kernels.attention)
        return attention_core(qkvg, cos, sin, *place, self.kernels.targets(self.qkvg_proj, self.o_proj))

    def _mixed(self, qkvg: Tensor, tokens: Tokens) -> Tensor:
        """qkvg [N, Q] -> the input of o_proj [B*S, A*H]."""
        config = self.config
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
        mask = tokens.masks[config.window(self.layer)]
        out = self._gated(rearrange(causal_attention(q, k, v, mask), "b a s h -> (b s) a h"), g.flatten(0, 1))
        return out if tokens.real is None else out * tokens.real

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

    def hidden(self, x: Tensor, **weights: bool | None) -> Tensor:
        """x [N, D] -> the input of down_proj [N, F]."""
        gate_up = self.kernels.linear(self.gate_up_proj, x, **weights)
        return self.kernels.swiglu(gate_up, self.gate_up_proj, self.down_proj)

    def forward(self, x: Tensor) -> Tensor:
        """x [N, D] -> [N, D]."""
        return self.kernels.linear(self.down_proj, self.hidden(x))


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
        self.kernels, self.tp = kernels, tp
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
        h, x = self._normed(self.input_layernorm, x, None, self.self_attn.qkvg_proj)
        mixed = self.self_attn(h, tokens)
        hidden, x = tokens.recompute.part(self.mlp, self._mlp_hidden, x, mixed, tokens)
        with tokens.recompute.remade(hidden):
            return x + self.kernels.linear(self.mlp.down_proj, hidden, **tokens.weights)

    def _mlp_hidden(self, x: Tensor, mixed: Tensor | None, tokens: Tokens) -> tuple[Tensor, Tensor]:
        h, x = self._normed(self.post_attention_layernorm, x, mixed, self.mlp.gate_up_proj)
        return self.mlp.hidden(h, **tokens.weights), x

    def _normed(self, norm: nn.Module, x: Tensor, delta: Tensor | None, consumer: nn.Module) -> tuple[Tensor, Tensor]:
        """The input of the te.Linear `consumer`, and x + delta."""
        if self.tp.size > 1:
            x = x if delta is None else x + delta
            return self.tp.norm(norm, x, self.tp.scatters), x
        return self.kernels.norm(norm, x, delta, consumer)


def pad_rows(x: Tensor, rows: int) -> Tensor:
    """x [n, D] with rows of zeros appended up to [rows, D]; x itself when nothing is missing."""
    return x if x.shape[0] == rows else F.pad(x, (0, 0, 0, rows - x.shape[0]))
