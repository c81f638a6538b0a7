"""A gated-attention decoder in FP64, written from the documentation of ModelConfig: the judge of random models.

It sees one document at a time, token by token in full, without masks, padding, caches or kernels.
"""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from fp64_mixers import ACTIVATIONS, RECURRENT, rms
from torch import Tensor

from te_models.config.model import ModelConfig

Weights = Mapping[str, Tensor]
# The kind of attention -> keys and values of the last layer that has its own; all others are left out.
Shared = dict[str, tuple[Tensor, Tensor]]


def logits_of(config: ModelConfig, weights: Weights, ids: Tensor) -> Tensor:
    """Return the logits [S, V] of one document, ids int64 [S]; `weights` are the model's, by name, in FP64."""
    x = weights["embed_tokens.weight"][ids] * config.embedding_multiplier  # [S, D]
    inputs = _inputs_of_layers(config, weights, ids, x)
    shared: Shared = {}
    for layer in range(config.num_hidden_layers):
        name = f"layers.{layer}."
        x = _block(config, weights, name, layer, x, shared)
        if inputs is not None:
            gate = _linear(weights, f"{name}layer_input.input_gate_proj", x)
            own = ACTIVATIONS[config.hidden_act](gate) * inputs[:, layer]
            out = _linear(weights, f"{name}layer_input.input_out_proj", own)
            x = x + _norm(config, weights, f"{name}layer_input.norm", out)
        if config.layer_scale:
            x = x * weights[f"{name}layer_scalar"]
    x = _stream_norm(config, weights, "norm", x)
    table = "embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return _capped(x @ weights[table].T / config.logits_scaling, config.final_logit_softcapping)


def _inputs_of_layers(
    config: ModelConfig, weights: Weights, ids: Tensor, x: Tensor
) -> Tensor | None:
    """Return the second inputs of all layers [S, L, P], from the tokens and their embeddings; None without any."""
    if config.layer_inputs is None:
        return None
    width = config.layer_inputs.width
    own = weights["layer_inputs.table.weight"][ids] * width**0.5
    projected = _linear(weights, "layer_inputs.context_proj", x) / config.hidden_size**0.5
    projected, own = (t.reshape(len(ids), -1, width) for t in (projected, own))
    return (_norm(config, weights, "layer_inputs.norm", projected) + own) / 2**0.5


def _block(
    config: ModelConfig, weights: Weights, name: str, layer: int, x: Tensor, shared: Shared
) -> Tensor:
    kind = config.layer_types[layer] if config.layer_types else ""
    parts = (
        (
            "input_layernorm",
            "attention_output_norm",
            lambda h: _mixer(config, weights, name, kind, layer, h, shared),
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


def _mixer(
    config: ModelConfig,
    weights: Weights,
    name: str,
    kind: str,
    layer: int,
    x: Tensor,
    shared: Shared,
) -> Tensor:
    """The mixer of a layer of this kind; "" where all layers have attention."""
    if kind == "parallel":
        beside = config.parallel_mixers
        assert beside is not None
        total = torch.zeros_like(x)
        seen: list[str] = []
        factors = zip(beside.input_multipliers or (), beside.output_multipliers or (), strict=True)
        for one, (before, after) in zip(beside.mixers, factors, strict=True):
            module = RECURRENT[one][0] if one in RECURRENT else "self_attn"
            seen.append(module)
            number = seen.count(module)
            prefix = f"{name}parallel.{module}{'' if number == 1 else f'_{number}'}."
            total = total + after * _alone(config, weights, prefix, one, layer, before * x, shared)
        return total
    module = RECURRENT[kind][0] if kind in RECURRENT else "self_attn"
    return _alone(config, weights, f"{name}{module}.", kind, layer, x, shared)


def _alone(
    config: ModelConfig,
    weights: Weights,
    name: str,
    kind: str,
    layer: int,
    x: Tensor,
    shared: Shared,
) -> Tensor:
    if kind in RECURRENT:
        return RECURRENT[kind][1](config, weights, name, x)
    return _attention(config, weights, name, kind, layer, x, shared)


def _attention(
    config: ModelConfig,
    weights: Weights,
    name: str,
    kind: str,
    layer: int,
    x: Tensor,
    shared: Shared,
) -> Tensor:
    """q, k and v, from the input or from latents, attention of each head, the gate, the last projection."""
    length = len(x)
    slides = kind in ("", "sliding_attention") and config.sliding_window is not None
    if config.latent_attention is None:
        q, k, v, gate = _heads(config, weights, name, slides, layer, x, shared.get(kind))
        shared[kind] = k, v
    else:
        q, k, v, gate = _latents(config, weights, name, layer, x)
    if config.query_scale_beta is not None and config.query_scale_length is not None:
        steps = torch.arange(length) // config.query_scale_length
        q = q * (1 + config.query_scale_beta * torch.log1p(steps.double()))[:, None, None]
    factor = config.attention_multiplier or q.shape[2] ** -0.5
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
    config: ModelConfig,
    weights: Weights,
    name: str,
    slides: bool,
    layer: int,
    x: Tensor,
    lent: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return q, k and v [S, heads, H] and the gate [S, A, H or 1], all rows of one projection.

    A layer that shares keys has `lent` ones, and a layer with keys as values no rows of values.
    """
    sizes = config.sliding_heads if slides and config.sliding_heads is not None else config
    heads, keys, dim = sizes.num_attention_heads, sizes.num_key_value_heads, sizes.head_dim
    gates = {"elementwise": heads * dim, "headwise": heads, "none": 0}[config.attention_gate]
    qkvg = _linear(weights, f"{name}qkvg_proj", x)
    reuses = config.shared_key_layers is not None and bool(config.shared_key_layers[layer])
    alike = config.keys_as_values and not slides
    rows = [heads * dim, 0 if reuses else keys * dim, 0 if reuses or alike else keys * dim]
    q, k, v, rest = qkvg.split([*rows, qkvg.shape[1] - sum(rows)], dim=1)
    v = k if alike else v
    if config.qk_norm and config.qk_norm_scope == "all_heads":
        q, k = (
            _norm(config, weights, f"{name}{which}_norm", t) for which, t in (("q", q), ("k", k))
        )
    q, k, v = (t.reshape(len(x), -1, dim) for t in (q, k, v))
    turns = config.no_rope_layers is None or bool(config.no_rope_layers[layer])

    def prepared(heads: Tensor, norm: str) -> Tensor:
        """Return queries or keys with their norm and RoPE."""
        after = config.qk_norm_after_rope
        if turns and after:
            heads = _rotated(config, heads, slides)
        if config.qk_norm and config.qk_norm_scope == "head":
            heads = (
                _norm(config, weights, f"{name}{norm}", heads)
                if config.qk_norm_weights
                else rms(heads, config.rms_norm_eps)
            )
        return _rotated(config, heads, slides) if turns and not after else heads

    q = prepared(q, "q_norm")
    if reuses:
        assert lent is not None
        k, v = lent
    else:
        k = prepared(k, "k_norm")
        v = rms(v, config.rms_norm_eps) if config.value_norm else v
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


def _rotated(config: ModelConfig, x: Tensor, slides: bool = False) -> Tensor:
    """Return x [S, heads, H] with its first channels turned by the angles of its positions, pair by pair."""
    own = config.sliding_rope if slides else None
    theta, share = config.rope_theta, config.partial_rotary_factor
    if own is not None:
        theta, share = own["rope_theta"], own.get("partial_rotary_factor", 1.0)
    size = int(x.shape[2] * share)
    out = list(x.unbind(2))
    for pair in range(size // 2):
        one, other = (
            (2 * pair, 2 * pair + 1) if config.rope_interleaved else (pair, pair + size // 2)
        )
        angle = torch.arange(len(x)).double()[:, None] * theta ** (-2 * pair / size)
        a, b = x[..., one], x[..., other]
        out[one], out[other] = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
    return torch.stack(out, dim=2).to(x.dtype)


def _mlp(config: ModelConfig, weights: Weights, name: str, x: Tensor) -> Tensor:
    """The MLP of a layer, or its experts if it has a router."""
    if f"{name}mlp.router.weight" in weights:
        return _experts(config, weights, f"{name}mlp.", x)
    inside, outside = config.mlp_multipliers or (1.0, 1.0)
    up = _linear(weights, f"{name}mlp.gate_up_proj", x)
    if config.mlp_gate:
        gate, up = up.chunk(2, dim=-1)
        up = torch.cat((inside * gate, up), dim=-1)
    return outside * _linear(weights, f"{name}mlp.down_proj", _activated(config, up))


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
