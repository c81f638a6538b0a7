"""The layers of a model: which values of its config each kind of layer is described by. No torch.

A new kind is a subclass of te_models.config.layer.PartSpec with a function and a row here, and a module with a row in
te_models.model.parts.
"""

from __future__ import annotations

import math

from te_models.config.attention import AttentionSpec, Heads, QueryScale
from te_models.config.deltanet import DeltaNetSpec
from te_models.config.fields import ModelFields
from te_models.config.kda import KDASpec
from te_models.config.kinds import MIXERS, MLPS
from te_models.config.latent import LatentAttentionSpec
from te_models.config.layer import LayerSpec
from te_models.config.layer_inputs import LayerInputSpec
from te_models.config.mamba2 import Mamba2Spec
from te_models.config.mlp import MLPSpec
from te_models.config.moe import MoESpec
from te_models.config.parallel import ParallelSpec
from te_models.config.short_conv import ShortConvSpec


def describe_layers(config: ModelFields) -> tuple[LayerSpec, ...]:
    """Return the layers of a model, from its first to its last."""
    count = config.num_hidden_layers
    # Without kinds per layer all layers are alike, and the groups of fields say what they are.
    attention = "full_attention" if config.latent_attention is None else "latent_attention"
    mixers = config.layer_types or (attention,) * count
    mlps = config.mlp_layer_types or ("dense" if config.moe is None else "sparse",) * count
    return tuple(
        LayerSpec(
            mixer=MIXERS[mixer](config, layer),
            mlp=MLPS[mlp](config, layer),
            norm_position=config.norm_position,
            scaled=config.layer_scale,
            post_norm_eps=config.post_norm_eps,
            input=layer_input(config),
            norm_type=config.norm_type,
            parallel_residual=config.parallel_residual,
        )
        for layer, (mixer, mlp) in enumerate(zip(mixers, mlps, strict=True))
    )


def full_attention(config: ModelFields, layer: int) -> AttentionSpec:
    """Return the attention of this layer to all keys; without `layer_types` the window applies to all layers."""
    return _attention(config, layer, config.sliding_window if config.layer_types is None else None)


def sliding_attention(config: ModelFields, layer: int) -> AttentionSpec:
    """Return the attention of this layer to the keys of a window."""
    return _attention(config, layer, config.sliding_window)


def chunked_attention(config: ModelFields, layer: int) -> AttentionSpec:
    """Return the attention of this layer to the keys of a chunk."""
    return _attention(config, layer, None, config.attention_chunk_size)


def _attention(
    config: ModelFields, layer: int, window: int | None, chunk: int | None = None
) -> AttentionSpec:
    """Return the attention of this layer."""
    # Layers with a window may have a RoPE and heads of their own (Gemma).
    rope = config.rope if window is None else config.window_rope
    sizes = config if window is None or config.sliding_heads is None else config.sliding_heads
    return AttentionSpec(
        hidden_size=config.hidden_size,
        heads=Heads(
            query=sizes.num_attention_heads,
            key=sizes.num_key_value_heads,
            dim=sizes.head_dim,
            gate=config.attention_gate,
            keys_as_values=config.keys_as_values and window is None,
            reuses_keys=reuses_keys(config, layer),
        ),
        lends_keys=_lends_keys(config, layer),
        gate_activation=config.attention_gate_activation,
        bias=config.attention_bias,
        output_bias=config.attention_output_bias,
        qk_norm=config.qk_norm_scope if _norms_heads(config, layer) else "none",
        norm_weights=config.qk_norm_weights,
        norm_after_rope=config.qk_norm_after_rope,
        value_norm=config.value_norm,
        multiplier=config.attention_multiplier,
        softcap=config.attn_logit_softcapping,
        sinks=config.attention_sinks,
        query_scale=_query_scale(config, layer),
        window=window,
        chunk=chunk,
        rope=rope if _rotates(config, layer) else None,
    )


def reuses_keys(config: ModelFields, layer: int) -> bool:
    """Return whether this layer has the keys and values of the last one of its kind that has its own."""
    return config.shared_key_layers is not None and bool(config.shared_key_layers[layer])


def _lends_keys(config: ModelFields, layer: int) -> bool:
    """Return whether this layer is the last of its kind with keys of its own, before others that reuse them."""
    reuses_keys = config.shared_key_layers
    if reuses_keys is None or reuses_keys[layer]:
        return False
    kinds = config.layer_types or ("",) * config.num_hidden_layers
    later = [n for n in range(layer + 1, len(kinds)) if kinds[n] == kinds[layer]]
    return bool(later) and all(reuses_keys[n] for n in later)


def layer_input(config: ModelFields) -> LayerInputSpec | None:
    """Return the part of a layer that reads its input; None without one."""
    if config.layer_inputs is None:
        return None
    return LayerInputSpec(config.hidden_size, config.layer_inputs.width, config.hidden_act)


def latent_attention(config: ModelFields, layer: int) -> LatentAttentionSpec:
    """Return the latent attention of this layer."""
    sizes = config.latent_attention
    assert sizes is not None
    multiplier = config.attention_multiplier
    if multiplier is None:
        # YaRN makes attention over more keys as sharp as before: the factor of queries times the factor of keys.
        scaling = config.rope.scaling or {}
        stretch = max(scaling.get("factor", 1), 1)
        sharpness = 1 + 0.1 * scaling.get("mscale_all_dim", 0) * math.log(stretch)
        multiplier = sizes.qk_head_dim**-0.5 * sharpness**2
    heads = config.num_attention_heads
    return LatentAttentionSpec(
        hidden_size=config.hidden_size,
        heads=Heads(query=heads, key=heads, dim=sizes.width, gate=config.attention_gate),
        bias=config.attention_bias,
        output_bias=config.attention_output_bias,
        multiplier=multiplier,
        query_scale=_query_scale(config, layer),
        rope=config.rope if _rotates(config, layer) else None,
        sizes=sizes,
    )


def _rotates(config: ModelFields, layer: int) -> bool:
    """Return whether this layer has RoPE."""
    return config.no_rope_layers is None or bool(config.no_rope_layers[layer])


def _norms_heads(config: ModelFields, layer: int) -> bool:
    """Return whether this layer norms queries and keys."""
    return config.qk_norm and (config.qk_norm_layers == "all" or _rotates(config, layer))


def _query_scale(config: ModelFields, layer: int) -> QueryScale | None:
    """Return the scale of queries in this layer; None without one."""
    beta = config.query_scale_beta
    length = config.query_scale_length
    if beta is None or length is None:
        return None
    if config.query_scale_rule == "position":
        return QueryScale(beta, length)
    return None if _rotates(config, layer) else QueryScale(beta, length, by_slot=True)


def linear_attention(config: ModelFields, layer: int) -> DeltaNetSpec:
    """Return the linear attention of this layer."""
    assert config.linear_attention is not None
    return DeltaNetSpec(
        hidden_size=config.hidden_size,
        sizes=config.linear_attention,
        activation=config.hidden_act,
    )


def short_convolution(config: ModelFields, layer: int) -> ShortConvSpec:
    """Return the convolution of this layer."""
    assert config.short_conv is not None
    return ShortConvSpec(
        hidden_size=config.hidden_size,
        channels=config.hidden_size,
        sizes=config.short_conv,
    )


def kda(config: ModelFields, layer: int) -> KDASpec:
    """Return the Kimi Delta Attention of this layer."""
    assert config.kda is not None
    return KDASpec(hidden_size=config.hidden_size, sizes=config.kda, activation=config.hidden_act)


def mamba2(config: ModelFields, layer: int) -> Mamba2Spec:
    """Return the state space of this layer."""
    assert config.mamba2 is not None
    return Mamba2Spec(hidden_size=config.hidden_size, sizes=config.mamba2)


def parallel(config: ModelFields, layer: int) -> ParallelSpec:
    """Return the mixers of this layer, beside each other."""
    kinds = config.parallel_mixers
    assert kinds is not None
    before = kinds.input_multipliers
    after = kinds.output_multipliers
    assert before is not None and after is not None  # the config has filled them
    mixers = []
    for kind in kinds.mixers:
        mixer = MIXERS[kind](config, layer)
        assert mixer is not None
        mixers.append(mixer)
    return ParallelSpec(
        hidden_size=config.hidden_size,
        mixers=tuple(mixers),
        input_multipliers=before,
        output_multipliers=after,
    )


def nothing(config: ModelFields, layer: int) -> None:
    """Return None: this layer has no such part."""


def dense(config: ModelFields, layer: int) -> MLPSpec:
    """Return the MLP of this layer."""
    return MLPSpec(
        hidden_size=config.hidden_size,
        intermediate_size=(
            config.intermediate_size
            if config.intermediate_sizes is None
            else config.intermediate_sizes[layer]
        ),
        activation=config.hidden_act,
        gate=config.mlp_gate,
        bias=config.mlp_bias,
        limit=_limit(config.mlp_limits, layer),
        multipliers=config.mlp_multipliers,
    )


def sparse(config: ModelFields, layer: int) -> MoESpec:
    """Return the experts of this layer."""
    assert config.moe is not None
    return MoESpec(
        hidden_size=config.hidden_size,
        experts=config.moe,
        activation=config.hidden_act,
        gate=config.mlp_gate,
        limit=_limit(config.expert_limits, layer),
        shared_limit=_limit(config.mlp_limits, layer),
    )


def _limit(limits: tuple[float, ...] | None, layer: int) -> float | None:
    """Return the bound of a layer, None without one."""
    return None if limits is None else limits[layer] or None


# The kinds of layers, by the names that a config uses. The module of each is in te_models.model.parts, under the class
# of its description. To add one: docs/internals/design.md, "Add a kind of layer".
MIXERS.update(
    full_attention=full_attention,
    sliding_attention=sliding_attention,
    chunked_attention=chunked_attention,
    linear_attention=linear_attention,
    latent_attention=latent_attention,
    conv=short_convolution,
    mamba2=mamba2,
    kda=kda,
    parallel=parallel,
    mlp=nothing,
)
MLPS.update(
    dense=dense,
    sparse=sparse,
    none=nothing,
)
