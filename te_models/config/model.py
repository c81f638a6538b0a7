"""The shape of a decoder: frozen, keyword-only, checked, with Hugging Face's field names. No torch."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import FrozenInstanceError, dataclass, fields
from types import MappingProxyType
from typing import Any, get_type_hints

from te_models.config.attention import HeadSizes
from te_models.config.fields import PER_LAYER, ModelFields
from te_models.config.latent import LatentConfig
from te_models.config.layer import LayerSpec, LinearSpec, PartSpec, Section, distinct, named_linears
from te_models.config.layers import describe_layers
from te_models.config.rope import (
    checked_scaling,
    checked_sliding_rope,
    rotary_mistakes,
)
from te_models.config.settings import Settings, from_table, take_settings
from te_models.errors import ConfigError, field_values, refuse

MAX_PARAMETERS = 2**60  # PyTorch counts bytes in 64 bits
# Fields of attention that latent attention does not compute -> the value that leaves them out.
NOT_LATENT = {
    "attention_gate_activation": "sigmoid",
    "qk_norm": False,
    "value_norm": False,
    "sliding_heads": None,
    "keys_as_values": False,
    "attention_sinks": False,
    "attn_logit_softcapping": None,
    "sliding_window": None,
    "attention_chunk_size": None,
    "query_scale_rule": "position",
    "partial_rotary_factor": 1.0,
}


@dataclass(kw_only=True, unsafe_hash=True)  # frozen by __setattr__ below
class ModelConfig(ModelFields):
    """Shape of a gated-attention decoder. Sizes are counts of elements. te_models.config.fields lists the fields.

    `num_key_value_heads` defaults to `num_attention_heads` and `head_dim` to `hidden_size / num_attention_heads`. The
    gate of attention follows Qiu et al. 2025, arXiv 2505.06708: "elementwise" has one sigmoid gate per channel of the
    attention output, "headwise" one per head, "none" none (Llama, Qwen3, Mistral). `rope_scaling` is None or a row of
    ROPE_SCALINGS, such as {"rope_type": "linear", "factor": 2.0}; `sliding_rope` is the RoPE of the layers with a
    window, {"rope_theta": 10000.0}, where needed with "partial_rotary_factor" and the fields of a row of ROPE_SCALINGS.

    A block with `norm_position` "pre" computes x + f(norm(x)), with "post" x + norm(f(x)), and with "both"
    x + norm(f(norm(x))), for attention and for the MLP; with `parallel_residual` it computes
    x + attention(norm(x)) + mlp(norm(x)) with one norm. A cap c of logits l is c * tanh(l / c).

    Raises:
        ConfigError: an unknown keyword (the message names the nearest field), or values that do not fit each other.
    """

    def __post_init__(self) -> None:
        take_settings(self, ModelConfig)  # a subclass checks its own fields
        # First what the defaults below depend on, such as a width that the heads divide.
        refuse(_layer_mistakes(self), ConfigError)
        # Equal models have equal configs, so factors of 1 are stored as no factors.
        if self.mlp_multipliers == (1.0, 1.0):
            object.__setattr__(self, "mlp_multipliers", None)
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        if self.head_dim is None:
            head_dim = self.hidden_size // self.num_attention_heads
            if self.latent_attention is not None:
                head_dim = self.latent_attention.qk_rope_head_dim
            object.__setattr__(self, "head_dim", head_dim)
        # After the defaults, which these compare with each other.
        refuse(_mistakes(self), ConfigError)
        if self.rope_scaling is not None:
            pairs = int(self.head_dim * self.partial_rotary_factor) // 2
            object.__setattr__(self, "rope_scaling", checked_scaling(self.rope_scaling, pairs))
        if self.sliding_rope is not None:
            object.__setattr__(
                self,
                "sliding_rope",
                checked_sliding_rope(self.sliding_rope, self._sliding_head_dim),
            )
        if self.num_parameters > MAX_PARAMETERS:
            raise ConfigError("these sizes make more than 2**60 parameters: choose smaller ones")

    @property
    def _sliding_head_dim(self) -> int:
        """Channels per head of layers with a window."""
        return self.head_dim if self.sliding_heads is None else self.sliding_heads.head_dim

    def __setattr__(self, name: str, value: object) -> None:
        """Set a field once. Other names are allowed: transformers.Trainer sets `use_cache` on any model's config."""
        if name in self.__dataclass_fields__ and name in self.__dict__:
            advice = "make another config with dataclasses.replace"
            if name == "num_hidden_layers":  # by peft's SHADOW, which builds a smaller decoder
                advice += "; peft's SHADOW does not work with this model"
            # Not a frozen dataclass, which would refuse all names.
            raise FrozenInstanceError(f"cannot assign to field {name!r}: {advice}")
        object.__setattr__(self, name, value)

    @functools.cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The layers, from the first to the last; everything outside config asks these, not the fields."""
        return describe_layers(self)

    @functools.cached_property
    def linears(self) -> dict[str, LinearSpec]:
        """Name, such as "layers.0.self_attn.o_proj" -> te.Linear, of all layers in forward order."""
        return dict(named_linears(self.layers))

    @functools.cached_property
    def divided_vectors(self) -> dict[str, LinearSpec]:
        """Name, such as "layers.0.linear_attn.A_log" -> the vectors that tensor parallelism divides, of all layers."""
        vectors = {}
        for depth, layer in enumerate(self.layers):
            for name, vector in layer.divided_vectors.items():
                vectors[f"layers.{depth}.{name}"] = vector
        return vectors

    @functools.cached_property
    def parts(self) -> list[PartSpec]:
        """The distinct mixers and MLPs of the layers."""
        return distinct(part for layer in self.layers for part in layer.parts)

    @property
    def graph_obstacle(self) -> str:
        """Why no CUDA graph can contain a pass; "" if one can."""
        return next((part.graph_obstacle for part in self.parts if part.graph_obstacle), "")

    @property
    def head(self) -> LinearSpec:
        """The te.Linear of the head, which every rank has as a whole."""
        return LinearSpec(
            "lm_head",
            self.hidden_size,
            (Section("logits", self.vocab_size, self.vocab_size, "head"),),
        )

    @property
    def longest_sequence(self) -> int:
        """Positions per row: max_position_embeddings, or the stretched context of RoPE where that is longer."""
        return self.rope.longest_sequence

    @property
    def length_limit(self) -> str:
        """`longest_sequence` by the name of what sets it, for messages."""
        longest = self.longest_sequence
        if longest == self.max_position_embeddings:
            return f"max_position_embeddings={longest}"
        return f"the stretched limit of RoPE={longest}"

    @property
    def num_padding_parameters(self) -> int:
        """Parameters of rows that only pad a weight; nothing reads their output."""
        return sum(
            count * layer.num_padding_parameters for layer, count in Counter(self.layers).items()
        )

    @property
    def num_parameters(self) -> int:
        """Parameters that the outputs depend on, as a published model counts them: without rows of padding."""
        # Embedding and head: one table where they are tied.
        tables = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        blocks = sum(count * layer.num_parameters for layer, count in Counter(self.layers).items())
        inputs = 0
        if self.layer_inputs is not None:
            width = self.layer_inputs.width
            # A table [vocab_size, layers * width], a projection [layers * width, hidden_size] and a norm [width].
            rows = self.layer_inputs.vocab_size + self.hidden_size
            inputs = self.num_hidden_layers * width * rows + width
        final_norm = self.hidden_size
        return tables + blocks + inputs + final_norm

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token goes through: of its own experts only."""
        return self.num_parameters - sum(
            layer.num_parameters - layer.num_active_parameters for layer in self.layers
        )

    def with_layers(self, depths: Sequence[int]) -> ModelConfig:
        """Return the config of a model of these layers of this one, in this order."""
        per_layer = {}
        for name in PER_LAYER:
            values = getattr(self, name)
            if values:
                values = tuple(values[depth] for depth in depths)
            per_layer[name] = values
        return dataclasses.replace(self, num_hidden_layers=len(depths), **per_layer)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, resolved, as plain JSON values; those that a subclass adds are not saved with a model."""
        plain = {}
        for name in config_fields():
            value = getattr(self, name)
            if isinstance(value, Settings):
                value = {key: _plain(field) for key, field in field_values(value).items()}
            plain[name] = _plain(copy.deepcopy(value))
        return plain

    def document(self) -> dict[str, Any]:
        """Return the fields as config.json has them.

        RoPE that is stretched is in `rope_parameters`, as transformers 5 writes it: the base class of its configs, with
        which a Trainer that resumes reads the file, has no room for `rope_scaling` beside `rope_theta`, and warns of
        an empty one.
        """
        values = self.to_dict()
        scaling = values.pop("rope_scaling")
        if scaling is not None:
            values["rope_parameters"] = {"rope_theta": values.pop("rope_theta"), **scaling}
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """Return the config with these fields, or with a `document`'s; an unknown or missing one is a ConfigError."""
        values = dict(values)
        if "rope_parameters" in values:
            scaling = dict(values.pop("rope_parameters"))
            values |= {"rope_theta": scaling.pop("rope_theta", None), "rope_scaling": scaling}
        return from_table(cls, values, "the config")


@functools.cache
def config_fields() -> Mapping[str, object]:
    """Return name -> type of every field of ModelConfig, in order."""
    hints = get_type_hints(ModelConfig)
    return MappingProxyType({f.name: hints[f.name] for f in fields(ModelConfig)})


def _plain(value: object) -> object:
    """Return a tuple as a list, and everything else as it is."""
    return list(value) if isinstance(value, tuple) else value


def _layer_mistakes(config: ModelConfig) -> Iterator[str]:
    """Yield lines about fields per layer: too many layers to plan, or a kind of layer without its group of fields."""
    values = field_values(config)
    layers = config.num_hidden_layers
    for name in PER_LAYER:
        if values[name] is not None and len(values[name]) != layers:
            yield f"{name} has {len(values[name])} entries for num_hidden_layers={layers}"
    # Kind of layer -> the field, or the group of fields, without which it has no sizes.
    needs = {
        "linear_attention": "linear_attention",
        "latent_attention": "latent_attention",
        "mamba2": "mamba2",
        "kda": "kda",
        "sliding_attention": "sliding_window",
        "chunked_attention": "attention_chunk_size",
        "conv": "short_conv",
        "parallel": "parallel_mixers",
    }
    kinds = config.layer_types or ()
    if "parallel" in kinds and config.parallel_mixers is not None:
        kinds += config.parallel_mixers.mixers
    for kind, field in needs.items():
        if kind in kinds and values[field] is None:
            yield f"layer_types asks for {kind}: give {field}"
    factors = config.mlp_multipliers
    if factors is not None and len(factors) != 2:
        yield f"mlp_multipliers has {len(factors)} entries: give one for the gate and one for the output"
    cannot_scale = config.moe is not None or not config.mlp_gate or any(config.mlp_limits or ())
    if factors is not None and cannot_scale:
        yield "mlp_multipliers scale MLPs with a gate: leave them out with moe, mlp_gate=False and mlp_limits"
    if "sparse" in (config.mlp_layer_types or ()) and config.moe is None:
        yield "mlp_layer_types asks for sparse layers: give moe, their experts"
    if config.moe is not None and config.mlp_bias:
        yield "experts have a bias by moe.bias: leave out mlp_bias"
    if config.moe is not None and config.moe.swiglu_limit is not None and not config.mlp_gate:
        yield "moe.swiglu_limit clamps SwiGLU, which has a gate: leave out mlp_gate"
    mixers = config.layer_types or ("full_attention",) * layers
    mlps = config.mlp_layer_types or ("dense",) * layers
    for number, both in enumerate(zip(mixers, mlps, strict=False)):
        if both == ("mlp", "none"):
            yield f"layer {number} has neither a mixer nor an MLP: change layer_types or mlp_layer_types"
    if (
        config.moe is not None
        and config.moe.swiglu_limit is not None
        and config.hidden_act != "silu"
    ):
        yield f"moe.swiglu_limit clamps SwiGLU: leave out hidden_act={config.hidden_act!r}"
    # Only where head_dim follows from the two: with latent attention it is qk_rope_head_dim.
    divides = config.hidden_size % config.num_attention_heads == 0
    if config.head_dim is None and config.latent_attention is None and not divides:
        yield (
            f"hidden_size={config.hidden_size} is not a multiple of num_attention_heads={config.num_attention_heads}: "
            "change one of them or give head_dim"
        )


def _mistakes(config: ModelConfig) -> Iterator[str]:
    """Yield lines about values that do not fit each other."""
    heads = config.num_attention_heads
    key_value_heads = config.num_key_value_heads
    gate = config.attention_gate_activation
    if heads % key_value_heads:
        yield f"num_attention_heads={heads} is not a multiple of num_key_value_heads={key_value_heads}"
    if config.latent_attention is not None:
        yield from _latent_mistakes(config, config.latent_attention)
    if config.head_dim % 2:
        yield f"head_dim={config.head_dim} is odd: rotary embeddings rotate pairs of channels"
    # Below: fields that have no effect without another one are refused, since they were meant to have one.
    yield from rotary_mistakes(config.head_dim, config.partial_rotary_factor)
    if config.shared_key_layers is not None:
        yield from _shared_key_mistakes(config, config.shared_key_layers)
    if any(size <= 0 for size in config.intermediate_sizes or ()):
        yield "intermediate_sizes are widths: give numbers above 0"
    if config.layer_inputs is not None and config.layer_inputs.vocab_size < config.vocab_size:
        yield (
            f"layer_inputs.vocab_size={config.layer_inputs.vocab_size} is less than vocab_size={config.vocab_size}: "
            "each token needs a row"
        )
    if config.sliding_heads is not None:
        yield from _sliding_head_mistakes(config, config.sliding_heads)
    if config.sliding_rope is not None and config.sliding_window is None:
        yield "sliding_rope is the RoPE of layers with a window: give sliding_window"
    if (config.query_scale_beta is None) != (config.query_scale_length is None):
        yield "query_scale_beta and query_scale_length belong together: give both or neither"
    if config.parallel_residual and config.norm_position != "pre":
        yield f"parallel_residual has one norm, of the layer's input: leave out norm_position={config.norm_position!r}"
    if config.parallel_residual and config.moe is not None and config.moe.separate_norms:
        yield "parallel_residual has one norm, of the layer's input: leave out moe.separate_norms"
    if config.query_scale_rule != "position" and config.query_scale_beta is None:
        yield f"query_scale_rule={config.query_scale_rule!r} scales nothing: give query_scale_beta"
    chunked = "chunked_attention" in (config.layer_types or ())
    if config.attention_chunk_size is not None and not chunked:
        yield "attention_chunk_size is the size of chunks in chunked_attention layers: give layer_types"
    if config.qk_norm_layers != "all" and not config.qk_norm:
        yield f"qk_norm_layers={config.qk_norm_layers!r} norms nothing without qk_norm=True"
    if config.qk_norm_scope != "head" and not config.qk_norm:
        yield f"qk_norm_scope={config.qk_norm_scope!r} norms nothing without qk_norm=True"
    limits = (*(config.expert_limits or ()), *(config.mlp_limits or ()))
    if any(limits) and (config.hidden_act != "silu" or not config.mlp_gate or config.mlp_bias):
        yield "expert_limits and mlp_limits bound SwiGLU without biases: leave out hidden_act, mlp_gate and mlp_bias"
    if any(limit < 0 for limit in limits):
        yield "expert_limits and mlp_limits are bounds: give numbers above 0, or 0 for none"
    if not config.qk_norm and (config.qk_norm_after_rope or not config.qk_norm_weights):
        yield "qk_norm_weights and qk_norm_after_rope belong to qk_norm: give qk_norm=True"
    if config.qk_norm_scope != "head" and config.qk_norm_after_rope:
        yield "qk_norm_after_rope norms each head: leave out qk_norm_scope"
    if config.qk_norm_scope != "head" and not config.qk_norm_weights:
        yield "qk_norm_weights=False norms each head: leave out qk_norm_scope"
    if gate != "sigmoid" and config.attention_gate == "none":
        yield f"attention_gate_activation={gate!r} without a gate: give attention_gate"


def _shared_key_mistakes(config: ModelConfig, flags: tuple[int, ...]) -> Iterator[str]:
    """Yield lines about layers that have no keys of their own."""
    if config.qk_norm_scope != "head":
        yield "shared_key_layers need norms of each head: leave out qk_norm_scope"
    if config.latent_attention is not None:
        yield "latent_attention computes no shared_key_layers: leave them out"
    # Kind of layer -> the newest layer of it with keys of its own, from which later ones of the kind take theirs.
    lenders: dict[str, int] = {}
    reused: set[str] = set()
    kinds = config.layer_types or ("full_attention",) * config.num_hidden_layers
    for layer, (kind, flag) in enumerate(zip(kinds, flags, strict=True)):
        if flag and kind not in ("full_attention", "sliding_attention"):
            yield f"layer {layer} is {kind}, which has no keys: give 0 in shared_key_layers"
        elif flag and kind not in lenders:
            yield f"layer {layer} reuses the keys of an earlier layer of {kind}, and there is none"
        elif not flag and kind in reused:
            yield f"layer {layer} has keys of its own after others of {kind} that reuse them: give 1"
        if flag:
            reused.add(kind)
        else:
            lenders[kind] = layer


def _sliding_head_mistakes(config: ModelConfig, sizes: HeadSizes) -> Iterator[str]:
    """Yield lines about heads of layers with a window that do not fit."""
    if config.sliding_window is None:
        yield "sliding_heads are the heads of layers with a window: give sliding_window"
    if sizes.num_attention_heads % sizes.num_key_value_heads:
        yield (
            f"sliding_heads.num_attention_heads={sizes.num_attention_heads} is not a multiple of "
            f"num_key_value_heads={sizes.num_key_value_heads}"
        )
    if sizes.head_dim % 2:
        yield f"sliding_heads.head_dim={sizes.head_dim} is odd: rotary embeddings rotate pairs of channels"
    # Without a RoPE of their own these layers rotate as the others do.
    if config.sliding_rope is None:
        yield from rotary_mistakes(sizes.head_dim, config.partial_rotary_factor)


def _latent_mistakes(config: ModelConfig, sizes: LatentConfig) -> Iterator[str]:
    """Yield lines about values that do not fit latent attention."""
    for name, value in NOT_LATENT.items():
        if (actual := field_values(config)[name]) != value:
            yield f"latent_attention computes no {name}={actual!r}: give {value!r}"
    if config.num_key_value_heads != config.num_attention_heads:
        yield f"latent_attention has a key per query head: give num_key_value_heads={config.num_attention_heads}"
    if config.head_dim != sizes.qk_rope_head_dim:
        yield f"head_dim={config.head_dim} is not qk_rope_head_dim={sizes.qk_rope_head_dim}: leave it out"
    if config.attention_gate == "elementwise":
        yield "latent_attention computes no attention_gate='elementwise': give 'headwise' or 'none'"
    if config.attention_gate != "none" and config.attention_bias:
        yield "latent_attention with a gate has no attention_bias: leave it out"
    if config.attention_bias and sizes.q_lora_rank is None:
        yield "latent_attention without q_lora_rank has no attention_bias: give one of them, or neither"
