"""The layout of a record: its fields and the names of its tensors. See docs/internals/recorder.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

OPERANDS = ("input", "weight", "grad_output")  # the three FP8 tensors of a te.Linear

# The fields that casts count, in the order in which kernels know them; docs/internals/recorder.md defines each.
FIELDS = (
    "amax",
    "scale_min",
    "scale_max",
    "scale_age",  # steps since the amax was measured that gave the scale
    "elements",
    "zeros",
    "saturated",
    "flushed",  # not 0 before the cast, 0 after it
    "subnormal",
    "nonfinite",
    "signal",  # the sum of the squares before the cast
    "noise",  # the sum of the squares of the changes that the cast made
    "blocks",  # blocks that have a scale of their own and a value other than 0
    "block_log2",  # over these blocks, the sum of log2(scale)
    "block_log2_squares",
    "format",  # Transformer Engine's number of the format
)
# Fields of the steps since the last recorded one, from the histories of delayed scaling.
BETWEEN = ("amax_between", "amax_between_age")
RECORDED_FIELDS = (*FIELDS, *BETWEEN)
INDEX = {name: place for place, name in enumerate(RECORDED_FIELDS)}
# How a field of several micro-batches or ranks becomes one; all others are sums.
LARGEST = ("amax", "scale_max", "scale_age", "format")
SMALLEST = ("scale_min",)


@dataclass(frozen=True)
class RecordedTensor:
    """The name of one recorded tensor.

    Attributes:
        linear: the name of its te.Linear in the model.
        operand: one of OPERANDS.
        expert: the number of its expert in the whole model; None for a te.Linear.
    """

    linear: str
    operand: str
    expert: int | None = None

    @property
    def name(self) -> str:
        """Its full name, such as "layers.3.mlp.down_proj.experts.5.weight"."""
        expert = "" if self.expert is None else f".experts.{self.expert}"
        return f"{self.linear}{expert}.{self.operand}"

    @property
    def layer(self) -> int | None:
        """The number of its block; None outside the blocks."""
        parts = self.linear.split(".")
        # "layers" may come after other parts, such as the name of a wrapper.
        for before, part in zip(parts, parts[1:], strict=False):
            if before == "layers" and part.isdigit():
                return int(part)
        return None

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> RecordedTensor:
        """Return the tensor of an entry of layout.json.

        Raises:
            KeyError, ValueError: the entry lacks a key, or has an unknown operand.
        """
        if entry["operand"] not in OPERANDS:
            raise ValueError(f"{entry['operand']!r} is no operand")
        expert = entry["expert"]
        expert = None if expert is None else int(expert)
        return cls(str(entry["linear"]), str(entry["operand"]), expert)

    def to_dict(self) -> dict[str, object]:
        """Return the entry of this tensor in layout.json."""
        return {
            "name": self.name,
            "linear": self.linear,
            "layer": self.layer,
            "operand": self.operand,
            "expert": self.expert,
        }
