"""Advice about a recipe as it is printed: its reasons, the te.Linears that it treats apart, and what was tried."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rich.console import Group
from rich.table import Table
from rich.text import Text

from te_models.config.recipe import Recipe, get_recipe
from te_models.errors import plural
from te_models.inspect.advice import LOST
from te_models.inspect.replay_report import Variant, plain
from te_models.planning.printable import Printable


@dataclass(frozen=True)
class LinearAdvice:
    """A te.Linear that should not stay in the precision in which it ran.

    Attributes:
        linear: its name.
        precision: the recommended one, a name of a recipe or "bf16".
        tensor: the tensor that shows it most.
        lost: the largest share of that tensor's values that became zero or subnormal; NaN where that is unknown.
        peak: its largest magnitude over its root mean square in that step; NaN likewise.
        sqnr: the lowest SQNR of its cast in dB; NaN likewise.
        steps: the number of recorded steps that show it.
        work: its share of the operations of all recorded te.Linears.
    """

    linear: str
    precision: str
    tensor: str
    lost: float
    peak: float
    sqnr: float
    steps: int
    work: float

    def __str__(self) -> str:
        figures = []
        if self.lost > LOST:
            figures.append(f"{self.lost:.0%} is flushed to zero or subnormal")
        if math.isfinite(self.peak) and self.lost > LOST:
            figures.append(f"its largest value is {self.peak:.3g} times the root mean square")
        if math.isfinite(self.sqnr) and self.lost <= LOST:
            figures.append(f"the cast leaves {self.sqnr:.0f} dB")
        seen = ", ".join(figures)
        return f"{self.tensor}: {seen} (in {plural(self.steps, 'recorded step')})"


@dataclass(frozen=True)
class RecipeAdvice(Printable):
    """The advice about the recipe of a model, from the record of a run. Print it, or take `to_dict`.

    Attributes:
        run: the folder of the run.
        recorded: its recipe, the first one under a schedule.
        later: the names of those that follow in recorded steps.
        by_numbers: the recipe that the recorded numbers speak for.
        recipe: the recipe to train with: `by_numbers`, or "bf16" where FP8 does not pay.
        reasons: why `by_numbers` differs from `recorded`, or that nothing speaks against it.
        linears: te.Linears with a precision of their own in the advice.
        in_bf16: te.Linears that ran in BF16, about which the record has nothing.
        notes: findings that no recipe heals.
        pays: whether FP8 saves time at this size; None where no card is known.
        speed: the figure behind `pays`; "" without one.
        tried: a captured step of the run again, under BF16, `recorded` and `by_numbers`.
        steps, tensors: of the record.
    """

    width: ClassVar[int] = 120
    run: str
    recorded: Recipe
    by_numbers: Recipe
    recipe: Recipe
    reasons: tuple[str, ...]
    linears: tuple[LinearAdvice, ...]
    in_bf16: tuple[str, ...]
    notes: tuple[str, ...]
    pays: bool | None
    speed: str
    steps: int
    tensors: int
    later: tuple[str, ...] = ()
    tried: tuple[Variant, ...] = field(default=())

    @property
    def headline(self) -> str:
        """The advised recipe in a line."""
        return f"recipe auto: {described(self.recipe)}, by the record of {self.run}"

    def __rich__(self) -> Group:
        """Return the lines of the advice, and a table of what was tried."""
        parts: list[Text | Table] = [Text(self.headline, "bold")]
        recipes = ", then ".join([described(self.recorded), *self.later])
        summary = f"{self.steps} recorded steps of {self.tensors} tensors under {recipes}"
        parts.append(Text(summary))
        parts += [Text(f"- {reason}") for reason in self.reasons]
        for one in self.linears:
            parts.append(
                Text(f"- {one.linear} in {one.precision} ({one.work:.1%} of the work): {one}")
            )
        if self.in_bf16:
            names = ", ".join(by_layer(self.in_bf16))
            parts.append(
                Text(f"- nothing is recorded of what ran in BF16 and stays there: {names}")
            )
        if self.speed:
            parts.append(Text(f"- {self.speed}"))
        parts += [Text(f"- no matter of the recipe: {note}") for note in self.notes]
        if self.tried:
            parts.append(tried_table(self.tried))
        return Group(*parts)

    def to_dict(self) -> dict[str, Any]:
        """Return the advice as plain JSON values; numbers that JSON lacks are None."""
        return {
            "run": self.run,
            "recipe": self.recipe.to_dict(),
            "recorded": self.recorded.to_dict(),
            "later": list(self.later),
            "by_numbers": self.by_numbers.to_dict(),
            "reasons": list(self.reasons),
            "linears": [plain(vars(one)) for one in self.linears],
            "in_bf16": list(self.in_bf16),
            "notes": list(self.notes),
            "pays": self.pays,
            "speed": self.speed,
            "steps": self.steps,
            "tensors": self.tensors,
            "tried": [plain(vars(one)) for one in self.tried],
        }


def described(recipe: Recipe) -> str:
    """Return a recipe's name, with its table of precisions and what differs from its defaults."""
    fields = []
    if recipe.quantized:
        usual = get_recipe(recipe.name).to_dict() if recipe.name != "custom" else {}
        for name, value in recipe.to_dict().items():
            if name not in ("name", "scheme", "precision") and usual.get(name, value) != value:
                fields.append(f"{name}={value}")
    fields += [f"{pattern}={used}" for pattern, used in recipe.precision.items()]
    return f"{recipe.name} ({', '.join(fields)})" if fields else recipe.name


def by_layer(names: Sequence[str]) -> list[str]:
    """Return te.Linears as "layer 3 (qkvg_proj, o_proj)", and those outside the blocks by their names."""
    layers: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        layer = f"layer {parts[1]}" if parts[0] == "layers" else name
        layers.setdefault(layer, [])
        if parts[0] == "layers":
            layers[layer].append(parts[-1])
    lines = []
    for layer, linears in layers.items():
        lines.append(f"{layer} ({', '.join(linears)})" if linears else layer)
    return lines


def tried_table(tried: Sequence[Variant]) -> Table:
    """Return a table of a step under several recipes."""
    table = Table(title="a captured step again", title_justify="left", box=None)
    table.add_column("under", overflow="fold")
    for column in ("finite", "loss", "gradient norm", "mean SQNR", "lowest SQNR"):
        table.add_column(column, justify="right")
    for one in tried:
        if one.finite is None:
            table.add_row(one.name, one.reason)
            continue
        lowest = min(one.layers.values(), default=math.nan)
        table.add_row(
            one.name,
            "yes" if one.finite else "no",
            f"{one.loss:.6g}",
            f"{one.grad_norm:.4g}",
            "" if math.isnan(one.sqnr) else f"{one.sqnr:.1f} dB",
            "" if math.isnan(lowest) else f"{lowest:.1f} dB",
        )
    return table
