"""A gated-attention decoder in FP64, written from the documentation of ModelConfig: the judge of random models.

It sees one document at a time, token by token in full, without masks, padding, caches or kernels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from te_models.config.model import ModelConfig

Weights = Mapping[str, Tensor]
ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: x.relu() ** 2,
}


def logits_of(config: ModelConfig, weights: Weights, ids: Tensor) -> Tensor:
    """Return the logits [S, V] of one document, ids int64 [S]; `weights` are the model's, by name, in FP64."""
    x = weights["embed_tokens.weight"][ids] * config.embedding_multiplier  # [S, D]
    for layer in range(config.num_hidden_layers):
        x = _block(config, weights, f"layers.{layer}.", layer, x)
    x = _norm(config, weights, "norm", x)
    table = "embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return _capped(x @ weights[table].T / config.logits_scaling, config.final_logit_softcapping)


def _block(config: ModelConfig, weights: Weights, name: str, layer: int, x: Tensor) -> Tensor:
    parts = (
        ("input_layernorm", "attention_output_norm", lambda h: _attention(config, weights, name, layer, h)),
        ("post_attention_layernorm", "mlp_output_norm", lambda h: _mlp(config, weights, name, h)),
    )
    for before, after, part in parts:
        h = x if config.norm_position == "post" else _norm(config, weights, name + before, x)
        h = part(h)
        h = h if config.norm_position == "pre" else _norm(config, weights, name + after, h)
        x = x + config.residual_multiplier * h
    return x


def _attention(config: ModelConfig, weights: Weights, name: str, layer: int, x: Tensor) -> Tensor:
    heads, keys, dim, length = config.num_attention_heads, config.num_key_value_heads, config.head_dim, len(x)
    gates = {"elementwise": heads * dim, "headwise": heads, "none": 0}[config.attention_gate]
    qkvg = _linear(weights, f"{name}self_attn.qkvg_proj", x)
    q, k, v, rest = qkvg.split([heads * dim, keys * dim, keys * dim, qkvg.shape[1] - (heads + 2 * keys) * dim], dim=1)
    if config.qk_norm and config.qk_norm_scope == "all_heads":
        q, k = (_norm(config, weights, f"{name}self_attn.{which}_norm", t) for which, t in (("q", q), ("k", k)))
    q, k, v = (t.reshape(length, -1, dim) for t in (q, k, v))  # [S, heads, H]
    if config.qk_norm and config.qk_norm_scope == "head":
        q, k = (_norm(config, weights, f"{name}self_attn.{which}_norm", t) for which, t in (("q", q), ("k", k)))
    if config.no_rope_layers is None or config.no_rope_layers[layer]:
        q, k = _rotated(config, q), _rotated(config, k)
    if config.query_scale_beta is not None and config.query_scale_length is not None:
        steps = torch.arange(length) // config.query_scale_length
        q = q * (1 + config.query_scale_beta * torch.log1p(steps.double()))[:, None, None]
    factor = config.attention_multiplier or dim**-0.5
    slides = config.layer_types is None or config.layer_types[layer] == "sliding_attention"
    window = config.sliding_window if slides and config.sliding_window else length
    query, key = torch.arange(length)[:, None], torch.arange(length)[None]
    sees = (key <= query) & (key > query - window)  # [S, S]
    out = []
    for head in range(heads):
        own = head // (heads // keys)
        scores = _capped(q[:, head] @ k[:, own].T * factor, config.attn_logit_softcapping)
        weights_of_keys = scores.masked_fill(~sees, -math.inf).exp()
        extra = weights[f"{name}self_attn.sinks"][head].exp() if config.attention_sinks else 0.0
        out.append(weights_of_keys / (weights_of_keys.sum(1, keepdim=True) + extra) @ v[:, own])
    mixed = torch.stack(out, dim=1)  # [S, A, H]
    if gates:
        gate = rest[:, :gates].reshape(length, heads, -1)
        mixed = mixed * (gate.sigmoid() if config.attention_gate_activation == "sigmoid" else F.softplus(gate))
    return _linear(weights, f"{name}self_attn.o_proj", mixed.flatten(1))


def _rotated(config: ModelConfig, x: Tensor) -> Tensor:
    """Return x [S, heads, H] with its first channels turned by the angles of its positions, pair by pair."""
    size = int(config.head_dim * config.partial_rotary_factor)
    out = list(x.unbind(2))
    for pair in range(size // 2):
        one, other = (2 * pair, 2 * pair + 1) if config.rope_interleaved else (pair, pair + size // 2)
        angle = torch.arange(len(x)).double()[:, None] * config.rope_theta ** (-2 * pair / size)
        a, b = x[..., one], x[..., other]
        out[one], out[other] = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
    return torch.stack(out, dim=2)


def _mlp(config: ModelConfig, weights: Weights, name: str, x: Tensor) -> Tensor:
    up = _linear(weights, f"{name}mlp.gate_up_proj", x)
    activation = ACTIVATIONS[config.hidden_act]
    hidden = activation(up)
    if config.mlp_gate:
        gate, up = up.chunk(2, dim=1)
        hidden = activation(gate) * up
    return _linear(weights, f"{name}mlp.down_proj", hidden)


def _linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    out = x @ weights[f"{name}.weight"].T
    return out + weights[f"{name}.bias"] if f"{name}.bias" in weights else out


def _norm(config: ModelConfig, weights: Weights, name: str, x: Tensor) -> Tensor:
    gain = weights[f"{name}.weight"] + config.zero_centered_norm
    return gain * x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()


def _capped(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)
