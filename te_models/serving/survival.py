"""The part of a model's tuning that is left after its weights were quantized.

A tuned weight W = B + D, with B of the base model. Written in a format it is q(W), and the base would be q(B). Of the
change D, q(W) - q(B) is left: its component along D, relative to D, is the share that survives. It is 0 where every
weight rounds to the number that the base's rounds to, which happens where the base was quantized in that format and the
change is small beside the distance of its numbers, and around 1 where nothing is lost on average. The error is what
q(W) - q(B) and D differ by, relative to D.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from te_models.files.formats import Fields

LITTLE = 0.9  # a share below this is worth a word of advice


@dataclass(frozen=True)
class WeightChange:
    """The change of one weight.

    Attributes:
        name: Hugging Face's name of the module.
        share: the share of the change that survives.
        error: norm of what the surviving change and the change differ by, relative to the change.
        along: the inner product of the change and of what survives.
        size: the squared norm of the change.
    """

    name: str
    share: float
    error: float
    along: float
    size: float


@dataclass(frozen=True)
class Survival:
    """The changes of all weights that the format rounds and that differ from the base's."""

    changes: tuple[WeightChange, ...]

    @property
    def share(self) -> float:
        """The share of the change of all weights together that survives; 1 if no weight changed."""
        size = sum(change.size for change in self.changes)
        # Weighted by the size of each change: a weight that hardly moved says little.
        return sum(change.along for change in self.changes) / size if size else 1.0

    @property
    def worst(self) -> WeightChange | None:
        """The change of which least survives."""
        return min(self.changes, key=lambda change: change.share, default=None)

    def lines(self, rounding: str) -> list[str]:
        """Return what a user should know, a line each."""
        if self.worst is None:
            return ["no weight that the format rounds differs from the base's"]
        # A format that holds the tuned weights exactly.
        if all(change.share == 1 for change in self.changes):
            return [f"all of the tuning's change of {len(self.changes)} weights survives"]
        lines = [
            f"{self.share:.1%} of the tuning's change of {len(self.changes)} weights survives; least in "
            f"{self.worst.name}: {self.worst.share:.1%}"
        ]
        if self.share < LITTLE and rounding == "nearest":
            lines.append(
                "--rounding stochastic loses none of it on average; parity says what that costs"
            )
        return lines

    def to_dict(self) -> Fields:
        """Return plain JSON values."""
        changes = {
            change.name: {"share": change.share, "error": change.error} for change in self.changes
        }
        return {"share": self.share, "changes": changes}


def change_of(
    name: str, base: Tensor, tuned: Tensor, base_left: Tensor, left: Tensor
) -> WeightChange | None:
    """Return the change of one weight; None if it did not change.

    Args:
        name: Hugging Face's name of its module.
        base: values [out, in] of the base model.
        tuned: those after tuning.
        base_left: the same of the base once it is quantized.
        left: the same of the tuned model once it is quantized.
    """
    change = tuned.double() - base.double()
    size = change.square().sum().item()
    # A frozen weight has no change that could survive.
    if not size:
        return None
    # Against the base in the same format: its own rounding is no loss of the tuning.
    survives = left.double() - base_left.double()
    # The share is a projection on the change: rounding that points elsewhere is in the error alone.
    along = (survives * change).sum().item()
    error = (survives - change).square().sum().sqrt().item()
    return WeightChange(name, along / size, error / size**0.5, along, size)
