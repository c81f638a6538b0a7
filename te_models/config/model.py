"""The shape of a decoder: frozen, keyword-only, checked, with Hugging Face's field names. No torch."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, FrozenInstanceError, dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_type_hints

from te_models.config.checks import refuse, wrong_values
from te_models.config.deltanet import DeltaNetConfig
from te_models.config.latent import LatentConfig
from te_models.config.layer import LayerSpec, LinearSpec, PartSpec, Section, distinct, named_linears
from te_models.config.layers import MIXERS, MLPS, describe_layers
from te_models.config.moe import MoEConfig
from te_models.config.rope import Rope, Scaling, checked_scaling, checked_sliding_rope, frozen, rotary_mistakes
from te_models.errors import ConfigError, NamedFields, documented, field_values, unknown

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# Field -> its values.
CHOICES = {
    "attention_gate": ("elementwise", "headwise", "none"),
    "attention_gate_activation": ("sigmoid", "softplus"),
    "qk_norm_scope": ("head", "all_heads"),
    "norm_position": ("pre", "post", "both"),
    "hidden_act": ("silu", "gelu", "gelu_pytorch_tanh", "relu2"),
}

MAX_PARAMETERS = 2**60  # PyTorch counts bytes in 64 bits
MAX_LAYERS = 10_000  # planning a model loops over its layers
PER_LAYER = ("no_rope_layers", "layer_types", "mlp_layer_types")  # fields with one entry per layer
# Fields that are groups of fields; a file has the values of each by name.
GROUPS = {"linear_attention": DeltaNetConfig, "latent_attention": LatentConfig, "moe": MoEConfig}
# Fields of attention that latent attention does not compute -> the value that leaves them out.
NOT_LATENT = {
    "attention_gate": "none",
    "qk_norm": False,
    "attention_sinks": False,
    "attn_logit_softcapping": None,
    "query_scale_beta": None,
    "sliding_window": None,
    "no_rope_layers": None,
    "partial_rotary_factor": 1.0,
}


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
    rope_scaling: Scaling | None = documented(None, "Scaling of RoPE beyond the trained length.", hash=False)
    sliding_rope: Scaling | None = documented(
        None, "RoPE of the layers with a window, where it differs (Gemma 3, OLMo 3).", hash=False
    )
    rope_interleaved: bool = documented(False, "RoPE rotates neighboring channels instead of the two halves (GLM-4).")
    partial_rotary_factor: float = documented(1.0, "Share of a head's channels that RoPE rotates (Qwen3-Next).")
    no_rope_layers: tuple[int, ...] | None = documented(None, "One entry per layer: 1 with RoPE, 0 without (SmolLM3).")
    sliding_window: int | None = documented(None, "Number of keys that a query sees, itself included (Mistral).")
    layer_types: tuple[str, ...] | None = documented(
        None,
        'One entry per layer, "full_attention", "sliding_attention", "linear_attention" or "latent_attention"; None: '
        "the window applies to all, or all are latent.",
    )
    linear_attention: DeltaNetConfig | None = documented(
        None, "Sizes of the linear_attention layers, Gated DeltaNet (Qwen3.5, Qwen3-Next)."
    )
    latent_attention: LatentConfig | None = documented(
        None, "Sizes of multi-head latent attention, whose keys and values come from a latent (DeepSeek-V3)."
    )
    attention_gate: str = documented("elementwise", "Gate of the attention output: elementwise, headwise or none.")
    attention_gate_activation: str = documented("sigmoid", "Function of the gate: sigmoid or softplus (Laguna).")
    attention_bias: bool = documented(False, "Bias on q, k and v (Qwen2).")
    attention_output_bias: bool = documented(False, "Bias on o_proj.")
    attention_multiplier: float | None = documented(
        None, "Factor on the products of queries and keys; default: head_dim ** -0.5 (Granite, Gemma)."
    )
    attn_logit_softcapping: float | None = documented(None, "Cap of the attention logits (Gemma 2).")
    attention_sinks: bool = documented(
        False, "A trained logit per query head in the denominator of attention's softmax (gpt-oss)."
    )
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
    moe: MoEConfig | None = documented(None, "Experts in place of MLPs.")
    mlp_layer_types: tuple[str, ...] | None = documented(
        None, 'One entry per layer, "dense" or "sparse" (experts); None: all sparse with moe, else all dense.'
    )
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
        self._take_groups()
        refuse(wrong_values(self, ModelConfig))  # those of a subclass are its own to check
        refuse(_layer_mistakes(self))
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        if self.head_dim is None:
            latent, filled = self.latent_attention, self.hidden_size // self.num_attention_heads
            object.__setattr__(self, "head_dim", filled if latent is None else latent.qk_rope_head_dim)
        refuse(_mistakes(self))
        if self.rope_scaling is not None:
            pairs = int(self.head_dim * self.partial_rotary_factor) // 2
            object.__setattr__(self, "rope_scaling", checked_scaling(self.rope_scaling, pairs))
        if self.sliding_rope is not None:
            object.__setattr__(self, "sliding_rope", checked_sliding_rope(self.sliding_rope, self.head_dim))
        if self.num_parameters > MAX_PARAMETERS:
            raise ConfigError("these sizes make more than 2**60 parameters: choose smaller ones")

    def _take_groups(self) -> None:
        """Make tuples of lists, and groups of the dicts that stand for them."""
        values = field_values(self)
        for name in (*PER_LAYER, "eos_token_id"):
            if isinstance(values[name], list):
                object.__setattr__(self, name, tuple(values[name]))
        for name, group in GROUPS.items():
            if isinstance(values[name], Mapping):
                refuse(_missing(group, values[name], f"{name} lacks {{}}: give all that has no default"))
                object.__setattr__(self, name, group(**values[name]))

    def __setattr__(self, name: str, value: object) -> None:
        """Set a field once. Other names are allowed: transformers.Trainer sets `use_cache` on any model's config."""
        if name in self.__dataclass_fields__ and name in self.__dict__:
            raise FrozenInstanceError(f"cannot assign to field {name!r}: make another config with dataclasses.replace")
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
        return {
            f"layers.{depth}.{name}": vector
            for depth, layer in enumerate(self.layers)
            for name, vector in layer.divided_vectors.items()
        }

    @functools.cached_property
    def parts(self) -> list[PartSpec]:
        """The distinct mixers and MLPs of the layers."""
        return distinct(part for layer in self.layers for part in layer.parts)

    @property
    def dynamic(self) -> str:
        """Why no CUDA graph can contain a pass; "" if one can."""
        return next((part.dynamic for part in self.parts if part.dynamic), "")

    @property
    def head(self) -> LinearSpec:
        """The te.Linear of the head, which every rank has as a whole."""
        return LinearSpec("lm_head", self.hidden_size, (Section("logits", self.vocab_size, self.vocab_size, "head"),))

    @functools.cached_property
    def rope(self) -> Rope:
        """The rotary embedding of layers without a window, and of the others too where there is no `sliding_rope`."""
        return Rope(
            self.rope_theta, self.head_dim, self.partial_rotary_factor, self.max_position_embeddings,
            self.rope_interleaved, frozen(self.rope_scaling),
        )  # fmt: skip

    @functools.cached_property
    def window_rope(self) -> Rope:
        """The rotary embedding of layers with a window."""
        if self.sliding_rope is None:
            return self.rope
        scaling = dict(self.sliding_rope)
        theta, share = scaling.pop("rope_theta"), scaling.pop("partial_rotary_factor", 1.0)
        return dataclasses.replace(self.rope, theta=theta, share=share, stretching=frozen(scaling))

    @property
    def longest_sequence(self) -> int:
        """Positions per row: max_position_embeddings, or the stretched context of RoPE where that is longer."""
        return self.rope.longest_sequence

    @property
    def num_padding_parameters(self) -> int:
        """Parameters of rows that only pad a weight; nothing reads their output."""
        return sum(count * layer.num_padding_parameters for layer, count in Counter(self.layers).items())

    @property
    def num_parameters(self) -> int:
        """Parameters that the outputs depend on: those of a published model, without rows of padding."""
        tables = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        blocks = sum(count * layer.num_parameters for layer, count in Counter(self.layers).items())
        return tables + blocks + self.hidden_size

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token goes through: of its own experts only."""
        return self.num_parameters - sum(layer.num_parameters - layer.num_active_parameters for layer in self.layers)

    def with_layers(self, depths: Sequence[int]) -> ModelConfig:
        """Return the config of a model of these layers of this one, in this order."""
        own = {name: getattr(self, name) for name in PER_LAYER}
        own = {name: values and tuple(values[depth] for depth in depths) for name, values in own.items()}
        return dataclasses.replace(self, num_hidden_layers=len(depths), **own)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, resolved, as plain JSON values; those that a subclass adds are not saved with a model."""
        values = field_values(self)
        values |= {name: dataclasses.asdict(values[name]) for name in GROUPS if values[name] is not None}
        plain = {name: copy.deepcopy(values[name]) for name in config_fields()}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """Return the config with these fields; an unknown or missing one is a ConfigError."""
        check_names(values)
        refuse(_missing(cls, values, "the config lacks {}"))
        return cls(**values)


@functools.cache
def config_fields() -> Mapping[str, object]:
    """Return name -> type of every field of ModelConfig, in order."""
    hints = get_type_hints(ModelConfig)
    return MappingProxyType({f.name: hints[f.name] for f in fields(ModelConfig)})


def check_names(names: Iterable[str]) -> None:
    """Raise a UsageError, which names the nearest, for a name that is no field of ModelConfig."""
    known = config_fields()
    refuse(unknown("config field", n, known, "help(te_models.ModelConfig)") for n in names if n not in known)


def _missing(kind: type[DataclassInstance], values: Mapping[str, object], line: str) -> Iterator[str]:
    """Yield `line` with the fields of `kind` that have no default and are not given."""
    if missing := [f.name for f in fields(kind) if f.default is MISSING and f.name not in values]:
        yield line.format(", ".join(missing))


def _layer_mistakes(config: ModelConfig) -> Iterator[str]:
    """Yield lines about groups and fields per layer: too many layers to plan, or an unknown kind of layer."""
    values = field_values(config)
    for name, group in GROUPS.items():
        if values[name] is not None and not isinstance(values[name], group):
            yield f"{name}={values[name]!r} is no group of fields: give a {group.__name__} or a dict"
    count = config.num_hidden_layers
    if count > MAX_LAYERS:
        yield f"num_hidden_layers={count} is too large: give {MAX_LAYERS} or fewer"
    allowed = {"no_rope_layers": (0, 1), "layer_types": tuple(MIXERS), "mlp_layer_types": tuple(MLPS)}
    for name in PER_LAYER:
        own = values[name] or ()
        if values[name] is not None and len(own) != count:
            yield f"{name} has {len(own)} entries for num_hidden_layers={count}"
        for value in own:
            if value not in allowed[name]:
                yield f"{name} holds {value!r}, which is not supported: choose from {allowed[name]}"
    needs = {kind: kind for kind in ("linear_attention", "latent_attention")} | {"sliding_attention": "sliding_window"}
    for kind, field in needs.items():
        if kind in (config.layer_types or ()) and values[field] is None:
            yield f"layer_types asks for {kind}: give {field}"
    if "sparse" in (config.mlp_layer_types or ()) and config.moe is None:
        yield "mlp_layer_types asks for sparse layers: give moe, their experts"
    if config.moe is not None and (config.mlp_bias or not config.mlp_gate):
        yield "experts have a gate, and a bias by moe.bias: leave out mlp_bias and mlp_gate"
    if config.moe is not None and config.moe.swiglu_limit is not None and config.hidden_act != "silu":
        yield f"moe.swiglu_limit clamps SwiGLU: leave out hidden_act={config.hidden_act!r}"
    ragged = config.hidden_size % config.num_attention_heads and config.latent_attention is None
    if config.head_dim is None and ragged:
        yield (
            f"hidden_size={config.hidden_size} is not a multiple of num_attention_heads={config.num_attention_heads}: "
            "change one of them or give head_dim"
        )


def _mistakes(config: ModelConfig) -> Iterator[str | Exception]:
    """Yield lines about values that are not allowed, alone or together."""
    for name, choices in CHOICES.items():
        if field_values(config)[name] not in choices:
            yield unknown(name, field_values(config)[name], choices)
    heads, shared, gate = config.num_attention_heads, config.num_key_value_heads, config.attention_gate_activation
    if heads % shared:
        yield f"num_attention_heads={heads} is not a multiple of num_key_value_heads={shared}"
    if config.latent_attention is not None:
        yield from _latent_mistakes(config, config.latent_attention)
    if config.head_dim % 2:
        yield f"head_dim={config.head_dim} is odd: rotary embeddings rotate pairs of channels"
    yield from rotary_mistakes(config.head_dim, config.partial_rotary_factor)
    if config.sliding_rope is not None and config.sliding_window is None:
        yield "sliding_rope is the RoPE of layers with a window: give sliding_window"
    if (config.query_scale_beta is None) != (config.query_scale_length is None):
        yield "query_scale_beta and query_scale_length belong together: give both or neither"
    if config.qk_norm_scope != "head" and not config.qk_norm:
        yield f"qk_norm_scope={config.qk_norm_scope!r} norms nothing without qk_norm=True"
    if gate != "sigmoid" and config.attention_gate == "none":
        yield f"attention_gate_activation={gate!r} without a gate: give attention_gate"


def _latent_mistakes(config: ModelConfig, sizes: LatentConfig) -> Iterator[str]:
    """Yield lines about values that do not fit latent attention."""
    for name, value in NOT_LATENT.items():
        if (own := field_values(config)[name]) != value:
            yield f"latent_attention computes no {name}={own!r}: give {value!r}"
    if config.num_key_value_heads != config.num_attention_heads:
        yield f"latent_attention has a key per query head: give num_key_value_heads={config.num_attention_heads}"
    if config.head_dim != sizes.qk_rope_head_dim:
        yield f"head_dim={config.head_dim} is not qk_rope_head_dim={sizes.qk_rope_head_dim}: leave it out"
    if config.attention_bias and sizes.q_lora_rank is None:
        yield "latent_attention without q_lora_rank has no attention_bias: give one of them, or neither"
