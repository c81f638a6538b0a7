"""The result of a replayed step: its tables, its verdict, and how close two runs of a tensor are."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from te_models.errors import plural
from te_models.planning.printable import Printable
from te_models.recorder.layout import RecordedTensor
from te_models.recorder.record import Record

# How far amax and scales usually are from the record where GEMMs add in another order: a sixteenth, one bit more than
# E4M3 keeps. Shares differ by up to 1 %, the SQNR by 1 dB. No bound holds for every tensor: a flipped last bit of BF16
# changes one code of E4M3 in sixteen, by a whole step, so that after some four casts the roundings of two runs are
# independent.
BOUND = 1 / 16  # relative, of amax and scale
SHARE_BOUND = 0.01  # absolute, of the shares of saturated and flushed elements
SQNR_BOUND = 1.0  # dB
WORST = 12  # tensors that the table lists


@dataclass(frozen=True)
class TensorNumbers:
    """The statistics of one tensor in one run of a step; NaN where something was not counted."""

    amax: float
    scale: float
    saturated: float
    flushed: float
    nonfinite: float
    sqnr: float
    codes: int


@dataclass(frozen=True)
class TensorComparison:
    """One tensor as it was recorded, and as the replay has it.

    Attributes:
        tensor: its name.
        recorded, replayed: its statistics.
        equal: whether all quantized data are the same, by their hash.
        within: whether amax, scale, shares and SQNR are within the stated bounds.
    """

    tensor: RecordedTensor
    recorded: TensorNumbers
    replayed: TensorNumbers
    equal: bool
    within: bool


@dataclass(frozen=True)
class Variant:
    """The step under another recipe.

    Attributes:
        name: what was changed.
        finite: whether loss, gradient norm and every tensor were finite; None: it could not run.
        loss: of the step.
        grad_norm: before clipping.
        bad_tensors: those with a NaN or an infinity.
        layers: layer -> the lowest SQNR of its tensors in dB; no entry for layers in BF16.
        sqnr: the mean SQNR over all tensors in dB; NaN in BF16.
        reason: why it could not run.
    """

    name: str
    finite: bool | None = None
    loss: float = math.nan
    grad_norm: float = math.nan
    bad_tensors: tuple[str, ...] = ()
    layers: dict[int, float] = dataclasses.field(default_factory=dict)
    sqnr: float = math.nan
    reason: str = ""


@dataclass(frozen=True)
class StepRun:
    """One run of the step: its loss, the norm of its gradient, and the record of its tensors."""

    loss: float
    grad_norm: float
    record: Record


@dataclass(frozen=True)
class Replay(Printable):
    """A replayed step. Print it for tables; `to_dict` returns plain JSON values.

    Attributes:
        run: the folder of the run.
        step: the step.
        device, engine, processes: of the replay.
        recorded_on: device and engine of the run, and its processes if there were several.
        recorded_processes: how many these were.
        recorded_loss: of the run's metrics; NaN if it was not finite, None for a step that has none there.
        first, second: the two runs here; `second` None: it was left out.
        tensors: comparisons with the record.
        uncompared: why there are none, or "".
        variants: the same step under other recipes.
    """

    width: ClassVar[int] = 130
    run: str
    step: int
    device: str
    engine: str
    processes: int
    recorded_on: str
    recorded_processes: int
    recorded_loss: float | None
    first: StepRun
    second: StepRun | None
    tensors: list[TensorComparison]
    uncompared: str
    variants: list[Variant]

    @property
    def place(self) -> str:
        """Device and engine of the replay, and its processes if there were several."""
        return place_name(self.device, self.engine, self.processes)

    @property
    def repeatable(self) -> bool | None:
        """True if both runs here are equal in every bit; None without a second one."""
        if self.second is None:
            return None
        return same_run(self.first, self.second)

    @property
    def verdict(self) -> str:
        """The result of the comparison, in a sentence."""
        if self.repeatable is False:
            return (
                "two runs of the step on this device differ: its hardware is faulty, or a kernel adds in no fixed "
                "order (try --deterministic)"
            )
        if not self.tensors:
            return "; ".join(
                [f"no tensor is compared: {self.uncompared}", *self._without_tensors()]
            )
        # The first one of a step is nearest to the cause of the others.
        different = [one for one in by_computation(self.tensors) if not one.equal]
        outside = [one for one in different if not one.within]
        if not different:
            same = "every tensor has the recorded bits: the step does the same again"
            if math.isfinite(self.first.loss) and math.isfinite(self.first.grad_norm):
                return same
            return (
                f"{same}, so its cause is in the model, the data or the recipe, not in the hardware"
            )
        # Other devices add in another order, and so do several processes: only with one of the same kind does a
        # difference point to a fault.
        same_kind = self.recorded_on == self.place
        if same_kind and self.repeatable:
            return (
                f"two runs of the step here are equal, and {len(different)} of {len(self.tensors)} tensors differ from "
                f"the record of the same kind of device, from {different[0].tensor.name} on: a fault of the hardware "
                "while the run went, or another version of the software"
            )
        if outside:
            line = (
                f"{len(outside)} of {len(self.tensors)} tensors are outside the bounds, from "
                f"{outside[0].tensor.name} on"
            )
        else:
            line = (
                f"{len(self.tensors) - len(different)} of {len(self.tensors)} tensors have the recorded bits, and the "
                "others are within the bounds for sums in another order"
            )
        if self.processes != self.recorded_processes:
            line += (
                f"; {plural(self.processes, 'process', 'processes')} here in place of {self.recorded_processes}, whose "
                "scales and sums are others"
            )
        return line

    def _without_tensors(self) -> Iterator[str]:
        """Yield what a replay shows of a step whose tensors are not compared."""
        if self.recorded_loss is not None:
            if np.array_equal(self.first.loss, self.recorded_loss, equal_nan=True):
                yield "the loss is the recorded one"
            else:
                yield f"the loss is {self.first.loss - self.recorded_loss:+.2g} off the recorded one"
        if self.repeatable:
            yield "two runs of the step here are equal"

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain JSON values; numbers that JSON lacks are None."""
        runs = [self.first] if self.second is None else [self.first, self.second]
        return plain(
            {
                "run": self.run,
                "step": self.step,
                "device": self.device,
                "engine": self.engine,
                "processes": self.processes,
                "recorded_on": self.recorded_on,
                "recorded_loss": self.recorded_loss,
                "runs": [{"loss": one.loss, "grad_norm": one.grad_norm} for one in runs],
                "repeatable": self.repeatable,
                "verdict": self.verdict,
                "bounds": {"amax": BOUND, "scale": BOUND, "share": SHARE_BOUND, "sqnr": SQNR_BOUND},
                "tensors": [
                    {
                        **one.tensor.to_dict(),
                        "equal": one.equal,
                        "within": one.within,
                        "recorded": dataclasses.asdict(one.recorded),
                        "replayed": dataclasses.asdict(one.replayed),
                    }
                    for one in self.tensors
                ],
                "what_if": [dataclasses.asdict(one) for one in self.variants],
            }
        )

    def __rich__(self) -> Group:
        """Return the tables."""
        parts: list[Any] = [Text(f"step {self.step} of {self.run}, on {self.place}")]
        recorded = "" if self.recorded_loss is None else f" (recorded {self.recorded_loss:.6g})"
        parts.append(
            Text(f"loss {self.first.loss:.6g}{recorded}, gradient norm {self.first.grad_norm:.4g}")
        )
        if self.tensors:
            parts += [self._layers(), *self._worst()]
        if any(one.finite is not None for one in self.variants):
            parts.append(self._what_if())
        for one in self.variants:
            if one.finite is None:
                parts.append(Text(f"{one.name} did not run: {one.reason}"))
        parts.append(Text(self.verdict))
        return Group(*parts)

    def _layers(self) -> Table:
        """Return a row per layer: tensors with the recorded bits, the largest difference, and the lowest SQNR."""
        table = Table(title="layers, as recorded and replayed", title_justify="left", box=None)
        for column in ("layer", "equal bits", "within", "amax differs", "lowest SQNR", "recorded"):
            table.add_column(column, justify="left" if column == "layer" else "right")
        for layer, members in by_layer(self.tensors):
            equal = sum(one.equal for one in members)
            within = sum(one.within for one in members)
            largest = max(relative(one.recorded.amax, one.replayed.amax) for one in members)
            lowest = lowest_of(one.replayed.sqnr for one in members)
            recorded = lowest_of(one.recorded.sqnr for one in members)
            table.add_row(
                "head" if layer is None else str(layer),
                f"{equal} of {len(members)}",
                f"{within} of {len(members)}",
                f"{100 * largest:.3g} %",
                f"{lowest:.1f} dB",
                f"{recorded:.1f} dB",
            )
        return table

    def _worst(self) -> Iterator[Table]:
        outside = [one for one in by_computation(self.tensors) if not one.within]
        if not outside:
            return
        table = Table(title="tensors outside the bounds", title_justify="left", box=None)
        for column in ("tensor", "statistic", "replayed", "recorded"):
            table.add_column(column, justify="left" if column == "tensor" else "right")
        for one in outside[:WORST]:
            for name in outside_bounds(one.recorded, one.replayed):
                replayed, recorded = getattr(one.replayed, name), getattr(one.recorded, name)
                table.add_row(one.tensor.name, name, f"{replayed:.4g}", f"{recorded:.4g}")
        yield table

    def _what_if(self) -> Table:
        table = Table(title="what if", title_justify="left", box=None)
        table.add_column("the step under", overflow="fold")
        for column in ("finite", "loss", "gradient norm", "SQNR"):
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("lowest in", justify="right", overflow="fold")
        for one in self.variants:
            if one.finite is None:
                continue  # a line below the table says why
            lowest = ""
            if one.layers:
                layer = min(one.layers, key=lambda number: one.layers[number])
                lowest = f"layer {layer}, {one.layers[layer]:.1f} dB"
            table.add_row(
                one.name,
                "yes" if one.finite else "no",
                f"{one.loss:.6g}",
                f"{one.grad_norm:.4g}",
                "" if math.isnan(one.sqnr) else f"{one.sqnr:.1f} dB",
                lowest if one.finite else ", ".join(one.bad_tensors[:2]),
            )
        return table


def place_name(device: str, engine: str, processes: int) -> str:
    """Return a device and an engine in words, and how many processes shared a step if there were several."""
    place = f"{device}, {engine}"
    return place if processes == 1 else f"{place}, {processes} processes"


def by_computation(tensors: Sequence[TensorComparison]) -> list[TensorComparison]:
    """Return tensors in the order in which a step computes them: forward through the model, then gradients backward."""
    forward = [one for one in tensors if one.tensor.operand != "grad_output"]
    gradients = [one for one in tensors if one.tensor.operand == "grad_output"]
    return forward + gradients[::-1]


def within(then: TensorNumbers, now: TensorNumbers) -> bool:
    """Return whether two statistics of a tensor are as close as sums in another order leave them."""
    return not outside_bounds(then, now)


def outside_bounds(then: TensorNumbers, now: TensorNumbers) -> list[str]:
    """Return the names of the statistics that are further apart than sums in another order leave them."""
    names = []
    for name in ("amax", "scale"):
        if not relative(getattr(then, name), getattr(now, name)) <= BOUND:
            names.append(name)
    for name in ("saturated", "flushed"):
        if abs(getattr(then, name) - getattr(now, name)) > SHARE_BOUND:
            names.append(name)
    if (then.nonfinite > 0) != (now.nonfinite > 0):
        names.append("nonfinite")
    # Equal infinities have no difference, and a NaN was not counted.
    if then.sqnr != now.sqnr and abs(then.sqnr - now.sqnr) > SQNR_BOUND:
        names.append("sqnr")
    return names


def relative(then: float, now: float) -> float:
    """Return the difference of two numbers over the larger one; 0 for two equal ones."""
    if then == now or (math.isnan(then) and math.isnan(now)):
        return 0.0
    size = max(abs(then), abs(now))
    return abs(then - now) / size if math.isfinite(size) else math.inf


def same_run(one: StepRun, other: StepRun) -> bool:
    """Return whether two runs of a step are equal in loss, norm, and the bits of every tensor."""
    losses = np.array_equal(
        [one.loss, one.grad_norm], [other.loss, other.grad_norm], equal_nan=True
    )
    return losses and np.array_equal(one.record.codes, other.record.codes)


def by_layer(
    tensors: Sequence[TensorComparison],
) -> Iterator[tuple[int | None, list[TensorComparison]]]:
    """Yield each layer with the comparisons of its tensors, in the order of the model."""
    layers: dict[int | None, list[TensorComparison]] = {}
    for one in tensors:
        layers.setdefault(one.tensor.layer, []).append(one)
    yield from layers.items()


def lowest_of(values: Iterator[float]) -> float:
    """Return the smallest number; NaN without any."""
    return min((value for value in values if not math.isnan(value)), default=math.nan)


def plain(value: Any) -> Any:
    """Return a value as JSON has it: NaN and infinities as None."""
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return (
        replace(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
    )
