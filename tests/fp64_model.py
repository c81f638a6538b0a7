"""A gated-attention decoder in FP64, written from the documentation of ModelConfig: the judge of random models.

It sees one document at a time, token by token in full, without masks, padding, caches or kernels.
"""

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
    x = _stream_norm(config, weights, "norm", x)
    table = "embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return _capped(x @ weights[table].T / config.logits_scaling, config.final_logit_softcapping)


def _block(config: ModelConfig, weights: Weights, name: str, layer: int, x: Tensor) -> Tensor:
    parts = (
        (
            "input_layernorm",
            "attention_output_norm",
            lambda h: _attention(config, weights, name, layer, h),
        ),
        ("post_attention_layernorm", "mlp_output_norm", lambda h: _mlp(config, weights, name, h)),
    )
    if config.parallel_residual:
        h = _stream_norm(config, weights, f"{name}input_layernorm", x)
        return x + config.residual_multiplier * sum(part(h) for _, _, part in parts)
    for before, after, part in parts:
        h = x if config.norm_position == "post" else _stream_norm(config, weights, name + before, x)
        h = part(h)
        h = h if config.norm_position == "pre" else _stream_norm(config, weights, name + after, h)
        x = x + config.residual_multiplier * h
    return x


def _attention(config: ModelConfig, weights: Weights, name: str, layer: int, x: Tensor) -> Tensor:
    """q, k and v, from the input or from latents, attention of each head, the gate, the last projection."""
    name, length = f"{name}self_attn.", len(x)
    q, k, v, gate = (_heads if config.latent_attention is None else _latents)(
        config, weights, name, layer, x
    )
    if config.query_scale_beta is not None and config.query_scale_length is not None:
        steps = torch.arange(length) // config.query_scale_length
        q = q * (1 + config.query_scale_beta * torch.log1p(steps.double()))[:, None, None]
    factor = config.attention_multiplier or q.shape[2] ** -0.5
    slides = config.layer_types is None or config.layer_types[layer] == "sliding_attention"
    window = config.sliding_window if slides and config.sliding_window else length
    query, key = torch.arange(length)[:, None], torch.arange(length)[None]
    sees = (key <= query) & (key > query - window)  # [S, S]
    out = []
    for head in range(q.shape[1]):
        own = head // (q.shape[1] // k.shape[1])
        scores = _capped(q[:, head] @ k[:, own].T * factor, config.attn_logit_softcapping)
        weights_of_keys = scores.masked_fill(~sees, -math.inf).exp()
        extra = weights[f"{name}sinks"][head].exp() if config.attention_sinks else 0.0
        out.append(weights_of_keys / (weights_of_keys.sum(1, keepdim=True) + extra) @ v[:, own])
    mixed = torch.stack(out, dim=1)  # [S, A, H]
    if gate is not None:
        mixed = mixed * (
            gate.sigmoid() if config.attention_gate_activation == "sigmoid" else F.softplus(gate)
        )
    return _linear(weights, f"{name}o_proj", mixed.flatten(1))


def _heads(
    config: ModelConfig, weights: Weights, name: str, layer: int, x: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return q, k and v [S, heads, H] and the gate [S, A, H or 1], all rows of one projection."""
    heads, keys, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    gates = {"elementwise": heads * dim, "headwise": heads, "none": 0}[config.attention_gate]
    qkvg = _linear(weights, f"{name}qkvg_proj", x)
    q, k, v, rest = qkvg.split(
        [heads * dim, keys * dim, keys * dim, qkvg.shape[1] - (heads + 2 * keys) * dim], dim=1
    )
    if config.qk_norm and config.qk_norm_scope == "all_heads":
        q, k = (
            _norm(config, weights, f"{name}{which}_norm", t) for which, t in (("q", q), ("k", k))
        )
    q, k, v = (t.reshape(len(x), -1, dim) for t in (q, k, v))
    if config.qk_norm and config.qk_norm_scope == "head":
        q, k = (
            _norm(config, weights, f"{name}{which}_norm", t) for which, t in (("q", q), ("k", k))
        )
    if config.no_rope_layers is None or config.no_rope_layers[layer]:
        q, k = _rotated(config, q), _rotated(config, k)
    return q, k, v, rest[:, :gates].reshape(len(x), heads, -1) if gates else None


def _latents(
    config: ModelConfig, weights: Weights, name: str, layer: int, x: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return q and k [S, A, M + P], v [S, A, V] and the gate [S, A, 1], from one latent each for q and for k and v."""
    sizes, heads = config.latent_attention, config.num_attention_heads
    assert sizes is not None
    parts = [
        sizes.q_lora_rank or heads * sizes.qk_head_dim,
        sizes.kv_lora_rank,
        sizes.qk_rope_head_dim,
    ]
    every = _linear(weights, f"{name}qkv_a_proj", x)
    q, kv, turned = every[:, : sum(parts)].split(parts, dim=1)
    gate = None
    if config.attention_gate == "headwise":
        gate = every[:, sum(parts) :][:, :heads, None]
    if sizes.q_lora_rank:
        q = _linear(
            weights,
            f"{name}q_b_proj",
            _norm(config, weights, f"{name}q_a_layernorm", q, sizes.norm_eps),
        )
    kv = _linear(
        weights,
        f"{name}kv_b_proj",
        _norm(config, weights, f"{name}kv_a_layernorm", kv, sizes.norm_eps),
    )
    q, kv = (t.reshape(len(x), heads, -1) for t in (q, kv))
    plain, last = q.split([sizes.qk_nope_head_dim, sizes.qk_rope_head_dim], dim=2)
    k, v = kv.split([sizes.qk_nope_head_dim, sizes.v_head_dim], dim=2)
    turned = turned[:, None]
    if config.no_rope_layers is None or config.no_rope_layers[layer]:
        last, turned = _rotated(config, last), _rotated(config, turned)
    same = turned.expand(-1, heads, -1)
    return torch.cat([plain, last], dim=2), torch.cat([k, same], dim=2), v, gate


def _rotated(config: ModelConfig, x: Tensor) -> Tensor:
    """Return x [S, heads, H] with its first channels turned by the angles of its positions, pair by pair."""
    size = int(config.head_dim * config.partial_rotary_factor)
    out = list(x.unbind(2))
    for pair in range(size // 2):
        one, other = (
            (2 * pair, 2 * pair + 1) if config.rope_interleaved else (pair, pair + size // 2)
        )
        angle = torch.arange(len(x)).double()[:, None] * config.rope_theta ** (-2 * pair / size)
        a, b = x[..., one], x[..., other]
        out[one], out[other] = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
    return torch.stack(out, dim=2)


def _mlp(config: ModelConfig, weights: Weights, name: str, x: Tensor) -> Tensor:
    """The MLP of a layer, or its experts if it has a router."""
    if f"{name}mlp.router.weight" in weights:
        return _experts(config, weights, f"{name}mlp.", x)
    return _linear(
        weights,
        f"{name}mlp.down_proj",
        _activated(config, _linear(weights, f"{name}mlp.gate_up_proj", x)),
    )


def _activated(config: ModelConfig, up: Tensor, clamped: bool = False) -> Tensor:
    """Return the input of the projection down."""
    if not config.mlp_gate:
        return ACTIVATIONS[config.hidden_act](up)
    gate, up = up.chunk(2, dim=-1)
    if clamped and config.moe is not None and config.moe.swiglu_limit is not None:
        gate, up = (
            gate.clamp(max=config.moe.swiglu_limit),
            up.clamp(-config.moe.swiglu_limit, config.moe.swiglu_limit),
        )
        return (up + 1) * gate * (config.moe.swiglu_alpha * gate).sigmoid()
    return ACTIVATIONS[config.hidden_act](gate) * up


def _experts(config: ModelConfig, weights: Weights, name: str, x: Tensor) -> Tensor:
    """One token at a time: its experts, each with its weight, and the expert of all tokens."""
    moe = config.moe
    assert moe is not None
    logits, out = _linear(weights, f"{name}router", x), []
    scores = logits.sigmoid() if moe.router_scores == "sigmoid" else logits.softmax(1)
    for token, own in zip(x, scores, strict=True):
        ranked = own.detach() + (weights[f"{name}expert_bias"].detach() if moe.expert_bias else 0.0)
        size = len(own) // moe.n_group
        groups = [list(range(first, first + size)) for first in range(0, len(own), size)]
        best = sorted(groups, key=lambda g: -sum(sorted(ranked[g].tolist())[-moe.group_scores :]))
        allowed = [
            expert for group in best[: moe.topk_group if moe.n_group > 1 else 1] for expert in group
        ]
        chosen = sorted(allowed, key=lambda expert: -ranked[expert].item())[
            : moe.num_experts_per_tok
        ]
        total = own[chosen].sum() if moe.norm_topk_prob else 1.0
        answers = []
        for expert in chosen:
            hidden = _activated(
                config, _linear(weights, f"{name}gate_up_proj", token, str(expert)), clamped=True
            )
            answers.append(
                own[expert] / total * _linear(weights, f"{name}down_proj", hidden, str(expert))
            )
        out.append(moe.routed_scaling_factor * torch.stack(answers).sum(0))
    mixed = torch.stack(out)
    if moe.shared_expert_intermediate_size:
        hidden = _activated(config, _linear(weights, f"{name}shared_gate_up_proj", x), clamped=True)
        gate = (
            _linear(weights, f"{name}shared_gate", x).sigmoid() if moe.shared_expert_gate else 1.0
        )
        mixed = mixed + gate * _linear(weights, f"{name}shared_down_proj", hidden)
    return mixed


def _linear(weights: Weights, name: str, x: Tensor, expert: str = "") -> Tensor:
    out = x @ weights[f"{name}.weight{expert}"].T
    return out + weights[f"{name}.bias{expert}"] if f"{name}.bias{expert}" in weights else out


def _stream_norm(config: ModelConfig, weights: Weights, name: str, x: Tensor) -> Tensor:
    """A norm of the residual stream; LayerNorm is RMSNorm of the centered input."""
    centered = x - x.mean(-1, keepdim=True) if config.norm_type == "layer" else x
    return _norm(config, weights, name, centered)


def _norm(
    config: ModelConfig, weights: Weights, name: str, x: Tensor, eps: float | None = None
) -> Tensor:
    gain = weights[f"{name}.weight"] + config.zero_centered_norm
    return (
        gain
        * x
        / (x.square().mean(-1, keepdim=True) + (config.rms_norm_eps if eps is None else eps)).sqrt()
    )


def _capped(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)
