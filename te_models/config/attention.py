"""Attention as data: heads, gate, window and rotary embedding of one layer. No torch.

    qkvg_proj.weight  [q: A*H | k: K*H | v: K*H | g]    g: A*H rows, A rows and padding, or none

A attention heads, K key/value heads, H head_dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from te_models.config.chunk_sizes import FP32
from te_models.config.layer import (
    FEATURE_ALIGNMENT,
    LayerSpec,
    LinearSpec,
    MixerSpec,
    Section,
    Step,
    Tape,
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

    With `keys_as_values` it has no v.
    """

    query: int
    key: int
    dim: int
    gate: str  # "elementwise", "headwise" or "none", as ModelConfig.attention_gate
    keys_as_values: bool = False

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
        values = 0 if self.keys_as_values else self.kv_size
        stored = -(-used // FEATURE_ALIGNMENT) * FEATURE_ALIGNMENT if headwise else used
        return (
            Section("q", self.q_size, self.q_size),
            Section("k", self.kv_size, self.kv_size),
            Section("v", values, values),
            Section("g", used, stored, "gate" if headwise else "hidden"),
        )

    @property
    def gate_size(self) -> int:
        """Output rows of the gate: one per channel, one per head (padded to the FP8 alignment), or none."""
        return self.sections[-1].stored


@dataclass(frozen=True)
class SoftmaxAttentionSpec(MixerSpec):
    """A mixer with queries, keys and values, of whatever origin. ModelConfig documents the fields."""

    heads: Heads  # on which attention runs
    bias: bool = False
    output_bias: bool = False
    multiplier: float | None = None
    softcap: float | None = None
    sinks: bool = False
    query_scale: tuple[float, int] | None = None
    window: int | None = None  # keys that a query sees, itself included; None: all before it
    rope: Rope | None = None  # None: queries and keys are not rotated

    @property
    def needs_spans(self) -> bool:
        """Return whether no kernel of PyTorch's computes this attention fast, even of all keys before a query."""
        return self.sinks or self.softcap is not None or self.heads.dim > WIDEST_FLASH

    name: ClassVar[str] = "self_attn"
    title: ClassVar[str] = "attention"
    keeps = "keys and values"

    @staticmethod
    def _copies(tape: Tape) -> bool:
        """Return whether attention runs on FP32 copies, as kernels/sdpa.py does on a CPU."""
        return not tape.cuda and tape.element < FP32


@dataclass(frozen=True)
class AttentionSpec(SoftmaxAttentionSpec):
    """Gated attention."""

    gate_activation: str = "sigmoid"
    qk_norm: str = "none"  # "head", "all_heads" or "none"
    norm_weights: bool = True
    norm_after_rope: bool = False
    value_norm: bool = False

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
        found = {"sinks": self.heads.query} if self.sinks else {}
        if not self.norm_weights:
            return found
        if self.qk_norm == "head":
            return found | {"q_norm": self.heads.dim, "k_norm": self.heads.dim}
        if self.qk_norm == "all_heads":
            return found | {"q_norm": self.heads.q_size, "k_norm": self.heads.kv_size}
        return found

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
        found = {
            "query_scale_beta": partial and self.query_scale is not None,
            "head_dim": self.heads.dim > WIDEST_FLASH,
            "keys_as_values": self.heads.keys_as_values,
            "qk_norm_after_rope": self.qk_norm != "none" and self.norm_after_rope,
            "value_norm": self.value_norm,
        }
        return tuple(name for name, given in found.items() if given)

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
        if self.qk_norm == "all_heads":
            return "qk_norm_scope='all_heads' needs the heads of all ranks: build the model without tp_mesh"
        if sequence and self.output_bias:
            return "sequence_parallel=True supports no attention_output_bias: use sequence_parallel=False"
        return ""

    def flops(self, tokens: int, length: int) -> float:
        """Return the FLOPs of the te.Linears, of the products of queries and keys, and of the sums of values.

        Each query sees half of the keys on average, also under a window.
        """
        return super().flops(tokens, length) + 2.0 * tokens * length * self.heads.q_size

    def state_bytes(self, batch: int, slots: int, element: int) -> int:
        return 2 * batch * slots * self.heads.kv_size * element

    # The memory of a training step. T tokens, N rows.

    def steps(self, tape: Tape) -> list[Step]:
        """Return qkvg_proj, attention, gate and o_proj."""
        into, out = self.linears
        # Without a gate the input of o_proj is attention's output, unless rows are padded in between.
        unpadded = tape.rows == tape.tokens
        shared = (
            self.heads.gate == "none"
            and unpadded
            and not self._copies(tape)
            and not self._composes(tape)
        )
        if self.fuses(tape):
            between = [self._fused(tape)]
        else:
            between = self._attention(tape) + (
                [] if self.heads.gate == "none" else [self._gate(tape)]
            )
        return [tape.linear(into), *between, tape.linear(out, shared=shared)]

    def slides(self, tape: Tape) -> bool:
        """Return whether the window hides keys at this length."""
        return self.window is not None and self.window < tape.seq_len

    def fuses(self, tape: Tape) -> bool:
        """Return whether attention, RoPE and gate are one operation, as kernels/gated_attention.py decides on GPUs."""
        cudnn = self.heads.dim in CUDNN_DIMS and tape.seq_len >= 128 and tape.element == 2
        in_spans = self.slides(tape) or self.needs_spans
        kernel = self._spans(tape) if in_spans else tape.fused and cudnn
        return kernel and not self.obstacles

    def _spans(self, tape: Tape) -> bool:
        """Return whether windows are spans of keys, for kernels/span_attention_triton.py, rather than masks."""
        return tape.fused and tape.element == 2 and self.heads.dim <= WIDEST_SPANS

    def _composes(self, tape: Tape) -> bool:
        """Return whether attention is kernels/composed_attention.py."""
        return (self.softcap is not None or self.sinks) and not self._spans(tape)

    def _bytes(self, tape: Tape) -> tuple[int, int, int, int]:
        """Return the bytes of q, of k (or v), of the gate, and of the whole output of qkvg_proj."""
        sizes = (self.heads.q_size, self.heads.kv_size, self.heads.gate_size)
        q, kv, gate = (tape.tokens * size * tape.element for size in sizes)
        return q, kv, gate, tape.rows * self.linears[0].outputs * tape.element

    def _fused(self, tape: Tape) -> Step:
        """Return the kernel that saves the projection, attention's output and one FP32 per query and head."""
        q, kv, _, whole = self._bytes(tape)
        statistics = tape.tokens * self.heads.query * FP32
        summed = tape.tokens * self.heads.q_size * FP32  # dq is summed in FP32
        ungated = 0 if self.heads.gate == "none" else q  # the gradient of what the gate multiplies
        normed = 0 if self.qk_norm == "none" else q + kv  # made again for backward
        return Step(
            "attention",
            whole + q + statistics,
            consumes=q,
            produces=whole,
            scratch=ungated + q + 2 * kv + summed + normed,
        )

    @property
    def copies_queries(self) -> bool:
        """True if norms or RoPE make new queries and keys before attention runs on them."""
        return self.rope is not None or self.qk_norm != "none"

    def _attention(self, tape: Tape) -> list[Step]:
        """Return the operations between qkvg_proj and the gate, in forward order.

        q, k, v and the gate are views of the output of qkvg_proj, which lives as long as one of them is saved; where
        q and k are made anew, v and the gate are copied. SDPA saves q, k, v, its output and one FP32 per query and
        head.
        """
        heads = self.heads
        q, kv, gate, whole = self._bytes(tape)
        split = [Step("split of q, k, v, gate", consumes=q + 2 * kv + gate, produces=whole)]
        if self.qk_norm != "none":  # te.RMSNorm makes the heads contiguous and saves those
            normed = heads.query + heads.key if self.qk_norm == "head" else 2
            saved = q + kv + tape.tokens * normed * FP32
            split.append(Step("q_norm, k_norm", saved, consumes=q + kv, produces=q + kv))
        if self.value_norm:
            saved = kv + tape.tokens * heads.key * FP32
            split.append(Step("v_norm", saved, consumes=kv, produces=kv))
        # RoPE is linear in its input: it saves only the tables, which all layers share.
        if self.rope is not None:
            split.append(Step("rope", consumes=q + kv, produces=q + kv))
        own = 0
        if self.rope is not None or self.qk_norm != "none":
            own = q + kv
        elif self.query_scale is not None:
            own = q
        gated = heads.gate != "none" and (tape.compiled or self.gate_activation == "softplus")
        kept = kv + gate * gated if self.copies_queries else whole
        summed = tape.tokens * heads.q_size * FP32  # dq is summed in FP32
        grads = Step("attention", consumes=q, produces=q + 2 * kv, scratch=summed)
        if self._composes(tape):  # saves q, k and v; of one row of the batch it makes FP32 scores
            square = heads.query * tape.seq_len**2 * FP32
            return [*split, grads._replace(saved=kept + own, scratch=4 * square)]
        saved = tape.tokens * heads.query * FP32 + self._mask(tape)
        if not self._copies(tape):
            return [*split, grads._replace(saved=saved + kept + own + q)]
        # FP32 copies of q, k and v; only the gate may still need the output of qkvg_proj.
        saved += tape.tokens * 2 * (heads.q_size + heads.kv_size) * FP32
        if gated:
            saved += gate if self.copies_queries else whole
        return [*split, grads._replace(saved=saved)]

    def _mask(self, tape: Tape) -> int:
        """Return the bytes of the mask of a sliding window, which SDPA saves in the dtype of the activations."""
        if not self.slides(tape) or self._spans(tape):
            return 0
        return tape.seq_len**2 * (tape.element if tape.cuda else FP32)

    def _gate(self, tape: Tape) -> Step:
        """Return x * sigmoid(g): saves x and g, which attention saves too; uncompiled it saves sigmoid(g) as well."""
        q, _, gate, _ = self._bytes(tape)
        saved = 0
        if not tape.compiled:
            saved += (
                q
                if self.heads.gate == "elementwise"
                else tape.tokens * self.heads.query * tape.element
            )
        if self._copies(tape) or self._composes(tape):
            saved += (
                q  # attention's output, which attention itself does not save, or not in this dtype
            )
        consumed = tape.rows * self.heads.q_size * tape.element
        return Step("gate", saved, consumes=consumed, produces=q + gate)


def window(layer: LayerSpec) -> int | None:
    """Return the number of keys that a query of this layer sees, itself included; None for all, or no attention."""
    return layer.mixer.window if isinstance(layer.mixer, SoftmaxAttentionSpec) else None
