"""Attention as data: heads, gate, window and rotary embedding of one layer. No torch.

    qkvg_proj.weight  [q: A*H | k: K*H | v: K*H | g]    g: A*H rows, A rows and padding, or none

A attention heads, K key/value heads, H head_dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from te_models.config.layer import (
    FEATURE_ALIGNMENT,
    LayerSpec,
    LinearSpec,
    MixerSpec,
    Section,
)
from te_models.config.rope import Rope
from te_models.config.settings import Settings, count

# Head dimensions for which cuDNN's causal attention is the fastest kernel, forward and backward: on an H100 or H200 by
# benchmarks/attention_kernels.py, and on GPUs that were not measured.
CUDNN_DIMS = (32, 48, 64, 80, 96, 112, 128, 160, 192, 256)
CUDNN_DIMS_ANYWHERE = (64, 128)
# The widest heads of FlashAttention and cuDNN, and of kernels/span_attention_triton.py.
WIDEST_FLASH = 256
WIDEST_SPANS = 512


@dataclass(frozen=True, kw_only=True)
class HeadSizes(Settings):
    """Number and width of the heads of one kind of layer, under the names of ModelConfig.

    Raises:
        ConfigError: a size is no positive whole number.
    """

    prefix = "sliding_heads."
    num_attention_heads: int = count(dataclasses.MISSING, "Number of query heads.")
    num_key_value_heads: int = count(dataclasses.MISSING, "Number of key and value heads.")
    head_dim: int = count(dataclasses.MISSING, "Channels per head.")


class Heads(NamedTuple):
    """The division of the output of qkvg_proj: [q: query*dim | k: key*dim | v: key*dim | gate].

    With `keys_as_values` it has no v, and with `reuses_keys`, of another layer, neither k nor v.
    """

    query: int
    key: int
    dim: int
    gate: str  # "elementwise", "headwise" or "none", as ModelConfig.attention_gate
    keys_as_values: bool = False
    reuses_keys: bool = False

    @property
    def q_size(self) -> int:
        """Channels of all query heads."""
        return self.query * self.dim

    @property
    def kv_size(self) -> int:
        """Channels of all key (or value) heads."""
        return self.key * self.dim

    @property
    def sections(self) -> tuple[Section, ...]:
        """The output rows of qkvg_proj."""
        used = {"elementwise": self.q_size, "headwise": self.query, "none": 0}[self.gate]
        headwise = self.gate == "headwise"
        keys = 0 if self.reuses_keys else self.kv_size
        values = 0 if self.keys_as_values else keys
        # One row per head is no multiple that FP8 takes: rows of padding follow.
        stored = -(-used // FEATURE_ALIGNMENT) * FEATURE_ALIGNMENT if headwise else used
        return (
            Section("q", self.q_size, self.q_size),
            Section("k", keys, keys),
            Section("v", values, values),
            Section("g", used, stored, "gate" if headwise else "hidden"),
        )

    @property
    def gate_size(self) -> int:
        """Output rows of the gate: one per channel, one per head (padded to the FP8 alignment), or none."""
        return self.sections[-1].stored


class QueryScale(NamedTuple):
    """The scale of a query by the tokens before it: 1 + beta * log(1 + count // length)."""

    beta: float
    length: int
    by_slot: bool = False  # the count is one more than the slots before the query, padding included


class SeenKeys(NamedTuple):
    """The keys up to its own that a query sees: the newest `window`, or the ones in its `chunk`; both None: all."""

    window: int | None = None
    chunk: int | None = None


@dataclass(frozen=True)
class SoftmaxAttentionSpec(MixerSpec):
    """A mixer with queries, keys and values, of whatever origin. ModelConfig documents the fields."""

    heads: Heads  # on which attention runs
    bias: bool = False
    output_bias: bool = False
    multiplier: float | None = None
    softcap: float | None = None
    sinks: bool = False
    query_scale: QueryScale | None = None
    window: int | None = None  # keys that a query sees, itself included; None: all before it
    rope: Rope | None = None  # None: queries and keys are not rotated
    # Tokens of a chunk, of which a query sees its own; None: there are none.
    chunk: int | None = None

    @property
    def seen(self) -> SeenKeys:
        """The keys that a query sees; a pass makes one mask for each."""
        return SeenKeys(self.window, self.chunk)

    @property
    def needs_spans(self) -> bool:
        """Return whether no kernel of PyTorch's computes this attention fast, even of all keys before a query."""
        return self.sinks or self.softcap is not None or self.heads.dim > WIDEST_FLASH

    @property
    def pair_channels(self) -> int:
        """Return the channels of a key and a value of one head, with which a query and its score are multiplied."""
        return 2 * self.heads.dim

    def rows_obstacle(self, ranks: int) -> str:
        return ""  # each rank gathers the keys of whole rows

    name: ClassVar[str] = "self_attn"
    title: ClassVar[str] = "attention"
    keeps = "keys and values"


@dataclass(frozen=True)
class AttentionSpec(SoftmaxAttentionSpec):
    """Gated attention."""

    gate_activation: str = "sigmoid"
    qk_norm: str = "none"  # "head", "all_heads" or "none"
    norm_weights: bool = True
    norm_after_rope: bool = False
    value_norm: bool = False
    lends_keys: bool = False  # keys and values, to later layers of its kind

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        out = (Section("o", self.hidden_size, self.hidden_size),)
        return (
            LinearSpec("qkvg_proj", self.hidden_size, self.heads.sections, "column", self.bias),
            LinearSpec("o_proj", self.heads.q_size, out, "row", self.output_bias, residual=True),
        )

    @property
    def vectors(self) -> Mapping[str, int]:
        """The sinks, and the norms of queries and keys."""
        vectors = {"sinks": self.heads.query} if self.sinks else {}
        if not self.norm_weights:
            return vectors
        if self.qk_norm == "head":
            vectors |= {"q_norm": self.heads.dim}
            return vectors if self.heads.reuses_keys else vectors | {"k_norm": self.heads.dim}
        if self.qk_norm == "all_heads":
            return vectors | {"q_norm": self.heads.q_size, "k_norm": self.heads.kv_size}
        return vectors

    @property
    def divided_vectors(self) -> Mapping[str, tuple[Section, ...]]:
        """The sinks of the heads that a rank has."""
        return (
            {"sinks": (Section("heads", self.heads.query, self.heads.query),)} if self.sinks else {}
        )

    @property
    def obstacles(self) -> tuple[str, ...]:
        """The fields whose values the fused attention kernels do not compute (te_models.kernels.gated_attention)."""
        # The scale of a query is a factor of its rotary table, which a part of the channels does not read.
        partial = self.rope is not None and self.rope.size != self.heads.dim
        obstacles = {
            "query_scale_beta": partial and self.query_scale is not None,
            "head_dim": self.heads.dim > WIDEST_FLASH,
            "keys_as_values": self.heads.keys_as_values,
            "shared_key_layers": self.heads.reuses_keys or self.lends_keys,
            "qk_norm_after_rope": self.qk_norm != "none" and self.norm_after_rope,
            "value_norm": self.value_norm,
        }
        return tuple(name for name, is_set in obstacles.items() if is_set)

    @property
    def features(self) -> Mapping[str, int]:
        heads = {
            "num_attention_heads * head_dim": self.heads.q_size,
            "q, k, v and gate": self.linears[0].outputs,
        }
        return {"hidden_size": self.hidden_size, **heads}

    @property
    def divided(self) -> Mapping[str, int]:
        return {"num_attention_heads": self.heads.query, "num_key_value_heads": self.heads.key}

    def local(self, ranks: int) -> AttentionSpec:
        heads = self.heads._replace(query=self.heads.query // ranks, key=self.heads.key // ranks)
        return dataclasses.replace(self, heads=heads)

    def parallel_obstacle(self, sequence: bool) -> str:
        if self.heads.reuses_keys or self.lends_keys:
            return (
                "tensor parallelism does not divide shared_key_layers: use FSDP2 (--parallel fsdp)"
            )
        if self.qk_norm == "all_heads":
            return "qk_norm_scope='all_heads' needs the heads of all ranks: build the model without tp_mesh"
        if sequence and self.output_bias:
            return "sequence_parallel=True supports no attention_output_bias: use sequence_parallel=False"
        return ""

    def state_bytes(self, batch: int, slots: int, element: int) -> int:
        if self.heads.reuses_keys:
            return 0
        return 2 * batch * slots * self.heads.kv_size * element

    @property
    def copies_queries(self) -> bool:
        """True if norms or RoPE make new queries and keys before attention runs on them."""
        return self.rope is not None or self.qk_norm != "none"


def window(layer: LayerSpec) -> int | None:
    """Return the number of keys that a query of this layer sees, itself included; None for all, or no attention.

    Of several attentions beside each other the first counts.
    """
    for mixer in layer.mixers:
        if isinstance(mixer, SoftmaxAttentionSpec):
            return mixer.window
    return None
