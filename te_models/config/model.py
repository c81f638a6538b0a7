"""The shape of a decoder: frozen, keyword-only, checked, with Hugging Face's field names. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import MISSING, FrozenInstanceError, dataclass, fields
from typing import Any, get_type_hints

from te_models.config.layout import qkvg_sections, stored_rows
from te_models.errors import ConfigError, NamedFields, documented, field_values, unknown

LAYER_TYPES = ("full_attention", "sliding_attention")
# Field -> its values.
CHOICES = {
    "attention_gate": ("elementwise", "headwise", "none"),
    "attention_gate_activation": ("sigmoid", "softplus"),
    "qk_norm_scope": ("head", "all_heads"),
    "norm_position": ("pre", "post", "both"),
    "hidden_act": ("silu", "gelu", "gelu_pytorch_tanh", "relu2"),
}

# Kind of RoPE scaling -> (required, optional) fields beside `rope_type`; te_models.model.rope computes them.
ROPE_SCALINGS = {
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor",),
        ("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
         "truncate"),
    ),
    "longrope": (("short_factor", "long_factor"), ("original_max_position_embeddings", "factor", "attention_factor")),
}  # fmt: skip

MAX_PARAMETERS = 2**60  # PyTorch counts bytes in 64 bits
MAX_LAYERS = 10_000  # planning a model loops over its layers


@dataclass(kw_only=True, unsafe_hash=True)  # frozen by __setattr__ below
class ModelConfig(NamedFields):
    """Shape of a gated-attention decoder. Sizes are counts of elements.

    `num_key_value_heads` defaults to `num_attention_heads` and `head_dim` to `hidden_size / num_attention_heads`. The
    gate of attention is that of Qiu et al. 2025, arXiv 2505.06708: "elementwise" has one sigmoid gate per channel of
    the attention output, "headwise" one per head, "none" none (Llama, Qwen3, Mistral). `rope_scaling` is None or a row
    of ROPE_SCALINGS, such as {"rope_type": "linear", "factor": 2.0}; `sliding_rope` is that of the layers with a
    window, {"rope_theta": 10000.0}, where needed with "partial_rotary_factor" and the fields of a row of ROPE_SCALINGS.

    A block with `norm_position` "pre" computes x + f(norm(x)), with "post" x + norm(f(x)), and with "both"
    x + norm(f(norm(x))), for attention and for the MLP. A cap c of logits l is c * tanh(l / c).

    Raises:
        ConfigError: an unknown keyword (the message names the nearest field), or values that do not fit each other.
    """

    vocab_size: int = documented(MISSING, "Number of token ids.")
    hidden_size: int = documented(MISSING, "Width of the residual stream.")
    intermediate_size: int = documented(MISSING, "Width of the MLP.")
    num_hidden_layers: int = documented(MISSING, "Number of blocks.")
    num_attention_heads: int = documented(MISSING, "Number of query heads.")
    num_key_value_heads: int = documented(None, "Number of key and value heads; default: one per query head.")
    head_dim: int = documented(None, "Channels per head; default: hidden size / query heads.")
    max_position_embeddings: int = documented(4096, "Longest sequence.")
    rms_norm_eps: float = documented(1e-5, "Epsilon of every RMSNorm.")
    rope_theta: float = documented(10000.0, "Base of the RoPE frequencies.")
    rope_scaling: Mapping[str, Any] | None = documented(None, "Scaling of RoPE beyond the trained length.", hash=False)
    sliding_rope: Mapping[str, Any] | None = documented(
        None, "RoPE of the layers with a window, where it differs (Gemma 3, OLMo 3).", hash=False
    )
    rope_interleaved: bool = documented(False, "RoPE rotates neighboring channels instead of the two halves (GLM-4).")
    partial_rotary_factor: float = documented(1.0, "Share of a head's channels that RoPE rotates (Qwen3-Next).")
    no_rope_layers: tuple[int, ...] | None = documented(None, "One entry per layer: 1 with RoPE, 0 without (SmolLM3).")
    sliding_window: int | None = documented(None, "Number of keys that a query sees, itself included (Mistral).")
    layer_types: tuple[str, ...] | None = documented(
        None, 'One entry per layer, "full_attention" or "sliding_attention"; None: the window applies to all.'
    )
    attention_gate: str = documented("elementwise", "Gate of the attention output: elementwise, headwise or none.")
    attention_gate_activation: str = documented("sigmoid", "Function of the gate: sigmoid or softplus (Laguna).")
    attention_bias: bool = documented(False, "Bias on q, k and v (Qwen2).")
    attention_output_bias: bool = documented(False, "Bias on o_proj.")
    attention_multiplier: float | None = documented(
        None, "Factor on the products of queries and keys; default: head_dim ** -0.5 (Granite, Gemma)."
    )
    attn_logit_softcapping: float | None = documented(None, "Cap of the attention logits (Gemma 2).")
    query_scale_beta: float | None = documented(
        None, "Scale queries by 1 + beta * log(1 + position // query_scale_length) (Ministral 3)."
    )
    query_scale_length: int | None = documented(None, "Positions that query_scale_beta leaves as they are.")
    qk_norm: bool = documented(False, "RMSNorm on q and k (Qwen3).")
    qk_norm_scope: str = documented("head", "Scope of qk_norm: each head, or all_heads together (OLMo 2).")
    norm_position: str = documented(
        "pre", "RMSNorm of attention and MLP: pre (their input), post (their output) or both."
    )
    zero_centered_norm: bool = documented(False, "Store gamma - 1 in every norm (Qwen3-Next).")
    hidden_act: str = documented("silu", "Activation of the MLP: silu, gelu, gelu_pytorch_tanh or relu2.")
    mlp_gate: bool = documented(True, "Gate the MLP, act(gate) * up; without, act(up) (Arcee).")
    mlp_bias: bool = documented(False, "Bias on the projections of the MLP.")
    embedding_multiplier: float = documented(1.0, "Factor on the embeddings (Granite, Gemma).")
    residual_multiplier: float = documented(
        1.0, "Factor on the outputs of attention and MLP before the residual addition (Granite)."
    )
    logits_scaling: float = documented(1.0, "Divisor of the logits (Granite).")
    final_logit_softcapping: float | None = documented(None, "Cap of the logits (Gemma 2).")
    tie_word_embeddings: bool = documented(False, "Share one table between embedding and head.")
    initializer_range: float = documented(0.02, "Standard deviation of initial weights.")
    bos_token_id: int | None = documented(None, "Token id that begins a text.")
    eos_token_id: int | tuple[int, ...] | None = documented(None, "Token id that ends a text; may be several.")
    pad_token_id: int | None = documented(None, "Token id of padding.")

    def __post_init__(self) -> None:
        values = field_values(self)
        for name in ("no_rope_layers", "layer_types", "eos_token_id"):
            if isinstance(values[name], list):
                object.__setattr__(self, name, tuple(values[name]))
        _check_types(self)
        _check_layers(self)
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ConfigError(
                    f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads="
                    f"{self.num_attention_heads}: change one of them or give head_dim"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        for name, choices in CHOICES.items():
            if values[name] not in choices:
                raise unknown(name, values[name], choices)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim} is odd: rotary embeddings rotate pairs of channels")
        _check_rotary_size(self.head_dim, self.partial_rotary_factor)
        if self.rope_scaling is not None:
            object.__setattr__(self, "rope_scaling", _checked_scaling(self.rope_scaling, self.rotary_size // 2))
        if self.sliding_rope is not None:
            object.__setattr__(self, "sliding_rope", _checked_sliding_rope(self))
        self._with_sliding_rope = self._sliding()
        _check_pairs(self)
        if self.num_parameters > MAX_PARAMETERS:
            raise ConfigError("these sizes make more than 2**60 parameters: choose smaller ones")

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field once. Other names are allowed: transformers.Trainer sets `use_cache` on any model's config."""
        if name in self.__dataclass_fields__ and name in self.__dict__:
            raise FrozenInstanceError(f"cannot assign to field {name!r}: make another config with dataclasses.replace")
        object.__setattr__(self, name, value)

    @property
    def q_size(self) -> int:
        """Channels of all query heads."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Channels of all key (or value) heads."""
        return self.num_key_value_heads * self.head_dim

    @property
    def qkvg_size(self) -> int:
        """Output channels of the fused projection of queries, keys, values and gate."""
        return sum(stored_rows(qkvg_sections(self)))

    @property
    def gate_size(self) -> int:
        """Output rows of the gate: one per channel, one per head (padded to the FP8 alignment), or none."""
        return qkvg_sections(self)[-1].stored

    @property
    def rotary_size(self) -> int:
        """Channels of a head that RoPE rotates."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def longest_sequence(self) -> int:
        """Positions per row: max_position_embeddings, or the stretched context of RoPE where that is longer.

        The factor of dynamic NTK is relative to max_position_embeddings, that of YaRN and LongRoPE to the original
        context.
        """
        limit, scaling = self.max_position_embeddings, self.rope_scaling or {}
        if scaling.get("rope_type") not in ("dynamic", "yarn", "longrope"):
            return limit
        original = scaling.get("original_max_position_embeddings", limit)
        return max(limit, int(original * scaling.get("factor", 1)))

    @property
    def sliding(self) -> ModelConfig:
        """The config whose RoPE the layers with a window use: this one, or one with `sliding_rope` in its place."""
        return self._with_sliding_rope or self

    def _sliding(self) -> ModelConfig | None:
        """Return the config with `sliding_rope` in the place of RoPE; None without one."""
        if self.sliding_rope is None:
            return None
        scaling = dict(self.sliding_rope)
        own = {"rope_theta": scaling.pop("rope_theta")}
        own["partial_rotary_factor"] = scaling.pop("partial_rotary_factor", 1.0)
        return dataclasses.replace(self, sliding_rope=None, rope_scaling=scaling or None, **own)

    @property
    def attention_obstacles(self) -> tuple[str, ...]:
        """The fields whose values the fused attention kernels do not support (te_models.kernels.gated_attention)."""
        partial = any(c.rotary_size != c.head_dim for c in (self, self.sliding))
        found = {
            "qk_norm": self.qk_norm,
            "partial_rotary_factor": partial,
            "rope_interleaved": self.rope_interleaved,
            "attention_multiplier": self.attention_multiplier is not None,
            "attn_logit_softcapping": self.attn_logit_softcapping is not None,
            "query_scale_beta": self.query_scale_beta is not None,
            "attention_gate_activation": self.attention_gate != "none" and self.attention_gate_activation != "sigmoid",
        }
        return tuple(name for name, given in found.items() if given)

    @property
    def mlp_obstacles(self) -> tuple[str, ...]:
        """The fields whose values the fused SwiGLU kernels do not support."""
        found = {"hidden_act": self.hidden_act != "silu", "mlp_gate": not self.mlp_gate, "mlp_bias": self.mlp_bias}
        return tuple(name for name, given in found.items() if given)

    def has_rope(self, layer: int) -> bool:
        """Return whether this layer rotates its queries and keys."""
        return self.no_rope_layers is None or bool(self.no_rope_layers[layer])

    def window(self, layer: int) -> int | None:
        """Return the number of keys that a query of this layer sees, itself included; None for all before it."""
        slides = self.layer_types is None or self.layer_types[layer] == "sliding_attention"
        return self.sliding_window if slides else None

    @property
    def num_padding_parameters(self) -> int:
        """Parameters of the rows that pad the headwise gate to the FP8 alignment; nothing reads their output."""
        rows = sum(section.stored - section.used for section in qkvg_sections(self))
        return self.num_hidden_layers * rows * (self.hidden_size + self.attention_bias)

    @property
    def num_parameters(self) -> int:
        """Parameters that the outputs depend on: those of a published model, without the padding of a headwise gate."""
        d, q, mlp = self.hidden_size, self.q_size, self.intermediate_size * (2 if self.mlp_gate else 1)
        rows = sum(section.used for section in qkvg_sections(self))
        normed = 2 * self.head_dim if self.qk_norm_scope == "head" else q + self.kv_size
        attention = d * rows + q * d + rows * self.attention_bias + d * self.attention_output_bias
        hidden = d * mlp + self.intermediate_size * d + (mlp + d) * self.mlp_bias
        norms = self.qk_norm * normed + d * (4 if self.norm_position == "both" else 2)
        tables = self.vocab_size * d * (1 if self.tie_word_embeddings else 2)
        return tables + self.num_hidden_layers * (attention + hidden + norms) + d

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, resolved, as plain JSON values; those that a subclass adds are not saved with a model."""
        values = dataclasses.asdict(self)
        values = {name: values[name] for name in config_fields()}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """Return the config with these fields; an unknown or missing one is a ConfigError."""
        known = config_fields()
        for name in values:
            if name not in known:
                raise unknown("config field", name, known, "help(te_models.ModelConfig)")
        required = [f.name for f in fields(cls) if f.default is MISSING]
        if missing := [name for name in required if name not in values]:
            raise ConfigError(f"the config lacks {', '.join(missing)}")
        return cls(**values)


def config_fields() -> dict[str, Any]:
    """Return name -> type of every field of ModelConfig, in order."""
    hints = get_type_hints(ModelConfig)
    return {f.name: hints[f.name] for f in fields(ModelConfig)}


def _check_types(config: ModelConfig) -> None:
    """Require positive ints for sizes, positive floats for rates and bools for flags, also from a hand-written file."""
    values = field_values(config)
    for f in fields(ModelConfig):  # those of a subclass are its own to check
        value, kind = values[f.name], str(f.type)
        if value is None and (f.default is None):
            continue
        if kind.startswith("bool"):
            good = isinstance(value, bool)
        elif kind.startswith("int"):
            smallest = 0 if f.name.endswith("_token_id") else 1
            several = value if isinstance(value, tuple) and "tuple" in kind else (value,)
            good = all(isinstance(v, int) and not isinstance(v, bool) and v >= smallest for v in several)
        elif kind.startswith("float"):
            good = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")
        elif kind.startswith("Mapping"):
            good = isinstance(value, Mapping)
        else:
            good = isinstance(value, tuple if kind.startswith("tuple") else str)
        if not good:
            raise ConfigError(f"{f.name}={value!r} is not a valid {kind.split(' ')[0]}: give a positive {kind}")


def _check_layers(config: ModelConfig) -> None:
    """Require a number of layers that can be planned, and a known kind for each in fields that name one."""
    if config.num_hidden_layers > MAX_LAYERS:
        raise ConfigError(f"num_hidden_layers={config.num_hidden_layers} is too large: give {MAX_LAYERS} or fewer")
    per_layer = {"no_rope_layers": (config.no_rope_layers, (0, 1)), "layer_types": (config.layer_types, LAYER_TYPES)}
    for name, (values, allowed) in per_layer.items():
        if values is None:
            continue
        if len(values) != config.num_hidden_layers:
            raise ConfigError(f"{name} has {len(values)} entries for num_hidden_layers={config.num_hidden_layers}")
        for value in values:
            if value not in allowed:
                raise ConfigError(f"{name} holds {value!r}, which is not supported: choose from {allowed}")
    if config.layer_types and "sliding_attention" in config.layer_types and config.sliding_window is None:
        raise ConfigError("layer_types asks for sliding_attention: give sliding_window")


def _check_rotary_size(head_dim: int, factor: float) -> None:
    """Require RoPE to rotate pairs of channels."""
    size = int(head_dim * factor)
    if size < 2 or size % 2 or size > head_dim:
        raise ConfigError(
            f"partial_rotary_factor={factor} rotates {size} of head_dim={head_dim} channels: it must be an even number "
            "from 2 to head_dim"
        )


def _check_pairs(config: ModelConfig) -> None:
    """Require both of any two fields that only work together."""
    if (config.query_scale_beta is None) != (config.query_scale_length is None):
        raise ConfigError("query_scale_beta and query_scale_length belong together: give both or neither")
    if config.qk_norm_scope != "head" and not config.qk_norm:
        raise ConfigError(f"qk_norm_scope={config.qk_norm_scope!r} norms nothing without qk_norm=True")
    if config.attention_gate_activation != "sigmoid" and config.attention_gate == "none":
        raise ConfigError(
            f"attention_gate_activation={config.attention_gate_activation!r} without a gate: give attention_gate"
        )


def _checked_sliding_rope(config: ModelConfig) -> dict[str, Any]:
    """Return `sliding_rope` with a base, if needed a share of rotated channels, and a row of ROPE_SCALINGS or none."""
    scaling = dict(config.sliding_rope or {})
    if config.sliding_window is None:
        raise ConfigError("sliding_rope is the RoPE of layers with a window: give sliding_window")
    own = {name: scaling.pop(name) for name in ("rope_theta", "partial_rotary_factor") if name in scaling}
    if "rope_theta" not in own:
        raise ConfigError("sliding_rope lacks rope_theta")
    for name, value in own.items():
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise ConfigError(f"sliding_rope: {name}={value!r} is not a positive number")
    if own.get("partial_rotary_factor") == 1.0:
        del own["partial_rotary_factor"]
    if scaling.get("rope_type", scaling.get("type")) == "default":
        scaling = {name: value for name, value in scaling.items() if name not in ("rope_type", "type")}
    share = own.get("partial_rotary_factor", 1.0)
    _check_rotary_size(config.head_dim, share)
    pairs = int(config.head_dim * share) // 2
    return {**own, **(_checked_scaling(scaling, pairs) if scaling else {})}


def _checked_scaling(scaling: Mapping[str, Any], pairs: int) -> dict[str, Any]:
    """Return `rope_scaling` with exactly the fields of its type; a ConfigError names a field that is not supported."""
    kind = scaling.get("rope_type", scaling.get("type"))
    if not isinstance(kind, str) or kind not in ROPE_SCALINGS:
        raise ConfigError(f"rope_scaling of type {kind!r} is not supported: choose from {', '.join(ROPE_SCALINGS)}")
    required, optional = ROPE_SCALINGS[kind]
    known = required + optional
    given = {name: scaling[name] for name in scaling if name not in ("rope_type", "type") and scaling[name] is not None}
    given = {name: value for name, value in given.items() if not (name.startswith("mscale") and value == 0)}  # as None
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"rope_scaling of type {kind!r} with {name}={value!r} is not supported: it takes {known}")
        _check_scaling_field(name, value, pairs)
    if missing := [name for name in required if name not in given]:
        raise ConfigError(f"rope_scaling of type {kind!r} lacks {', '.join(missing)}")
    return {"rope_type": kind, **{name: given[name] for name in known if name in given}}


def _check_scaling_field(name: str, value: Any, pairs: int) -> None:
    """Require a positive number, a flag for `truncate`, or a list with one number per pair of rotated channels."""
    if name == "truncate":
        if not isinstance(value, bool):
            raise ConfigError(f"rope_scaling: truncate={value!r} is not true or false")
        return
    several = name in ("short_factor", "long_factor")
    if several and (not isinstance(value, (list, tuple)) or len(value) != pairs):
        raise ConfigError(
            f"rope_scaling: {name} is not a list of {pairs} numbers, one for each pair of rotated channels"
        )
    for number in value if several else (value,):
        if not isinstance(number, (int, float)) or isinstance(number, bool) or not 0 < number < float("inf"):
            raise ConfigError(f"rope_scaling: {name}={number!r} is not a positive number")
