"""The rows of fused weights, defined here and nowhere else. No torch.

    qkvg_proj.weight     [q: A*H | k: K*H | v: K*H | g]    g: A*H rows, A rows and padding, or none
    gate_up_proj.weight  [gate: F | up: F]                 [up: F] without a gate

A attention heads, K key/value heads, H head_dim, F intermediate_size.
"""

from __future__ import annotations

import functools
from itertools import accumulate
from typing import NamedTuple, Protocol

# Output rows of the headwise gate are padded to this: the widest alignment of a feature dimension that a recipe asks
# for (MXFP8 blocks of 32; Transformer Engine's get_align_size_for_quantization), so that one weight serves all recipes.
FEATURE_ALIGNMENT = 32


class Shape(Protocol):
    """The fields of ModelConfig that decide the rows."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def attention_gate(self) -> str: ...
    @property
    def mlp_gate(self) -> bool: ...


class Section(NamedTuple):
    """Consecutive rows of a fused weight that form one logical matrix."""

    name: str  # "q", "k", "v", "g" (the gate of attention), "gate" or "up" (of SwiGLU)
    used: int  # rows that hold parameters of the model
    stored: int  # rows in the weight, padding included


@functools.cache
def attention_sections(heads: int, kv_heads: int, head_dim: int, gate: str) -> tuple[Section, ...]:
    """Return the sections of a qkvg_proj with this many heads; `gate` is ModelConfig.attention_gate."""
    q, kv = heads * head_dim, kv_heads * head_dim
    used = {"elementwise": q, "headwise": heads, "none": 0}[gate]
    stored = -(-used // FEATURE_ALIGNMENT) * FEATURE_ALIGNMENT if gate == "headwise" else used
    return Section("q", q, q), Section("k", kv, kv), Section("v", kv, kv), Section("g", used, stored)


def qkvg_sections(shape: Shape) -> tuple[Section, ...]:
    """Return the sections of `qkvg_proj`."""
    return attention_sections(
        shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim, shape.attention_gate
    )


def gate_up_sections(shape: Shape) -> tuple[Section, ...]:
    """Return the sections of `gate_up_proj`."""
    size = shape.intermediate_size
    return tuple(Section(name, size, size) for name in (("gate", "up") if shape.mlp_gate else ("up",)))


FUSED = {"qkvg_proj": qkvg_sections, "gate_up_proj": gate_up_sections}


def stored_rows(sections: tuple[Section, ...]) -> list[int]:
    """Return the rows of each section, padding included."""
    return [section.stored for section in sections]


def first_rows(sections: tuple[Section, ...]) -> list[int]:
    """Return the first row of each section."""
    return [0, *accumulate(stored_rows(sections))][:-1]


def row_ranges(shape: Shape) -> dict[str, tuple[int, int]]:
    """Return section name -> (first row, rows used) in its fused weight."""
    return {
        section.name: (first, section.used)
        for sections in (make(shape) for make in FUSED.values())
        for section, first in zip(sections, first_rows(sections), strict=True)
    }


def linear_sizes(shape: Shape) -> dict[str, tuple[int, int]]:
    """Return name -> (inputs, outputs) of the four te.Linear of a block."""
    d, attention, hidden = shape.hidden_size, shape.num_attention_heads * shape.head_dim, shape.intermediate_size
    return {
        "qkvg_proj": (d, sum(stored_rows(qkvg_sections(shape)))),
        "o_proj": (attention, d),
        "gate_up_proj": (d, sum(stored_rows(gate_up_sections(shape)))),
        "down_proj": (hidden, d),
    }
