"""Advice from the record of a run: rules that look at its statistics, each with a cause and a change to try.

`te-models doctor` prints what they find, the report of a run shows it, and docs/guide/troubleshooting.md lists them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import numpy as np
from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from te_models.errors import plural
from te_models.inspect.exactness import (
    INEXACT,
    LATE_SCALE,
    LOST,
    UNUSED_BITS,
    hides_loss,
)
from te_models.inspect.findings import Finding, Rule, find_unexplained, with_first_cause
from te_models.inspect.learning_rate import find_learning_rate
from te_models.inspect.run_facts import Mask, RunFacts, read_facts
from te_models.inspect.saturation import (
    SATURATED,
    gradient_saturates,
    input_or_weight_saturates,
)
from te_models.inspect.spike_rule import SPIKE
from te_models.planning.printable import Printable
from te_models.recorder.layout import INDEX
from te_models.recorder.record import Floats
from te_models.training.timing import Row

__all__ = ["RULES", "Diagnosis", "Finding", "Rule", "RunFacts", "diagnose", "read_facts"]

JUMP_BITS = 3.0  # by which a scale may not change from one step to the next while the amax stays
DEAD_STEPS = 3
# The growth of a largest value that makes it an outlier: training by itself changes it less in a few steps.
GROWTH = 16.0
# By this much at least an outlier also raises the largest value over the root mean square. A channel of K cannot raise
# it by more than the square root of K.
PEAK_GROWTH = 2.0
# The change to try where scales per block do not keep outliers apart.
OUTLIER_IN_BLOCKS = (
    "blocks do not help where nearly each has such a value: keep this linear in BF16 through the recipe's table "
    "precision"
)


def _nonfinite(facts: RunFacts, rule: Rule) -> Iterator[Finding]:
    """The first NaN or infinity: of the tensor that the guard found, else of the one that the record shows."""
    first_bad = facts.first_nonfinite()
    for event in facts.events:
        if event["event"] != "nonfinite" or not event.get("tensor"):
            continue
        name = str(event["tensor"])
        facts.explained.update(i for i, tensor in enumerate(facts.tensors) if tensor.name == name)
        message = f"{name}: the first NaN or infinite value of step {event['step']} is here{_answer(event)}"
        yield rule.finding(int(event["step"]), message, tensor=name, tensors=(name,))
        return
    counts = facts.record.field("nonfinite")
    where = counts > 0
    if not where.any():
        if first_bad is not None:
            message = f"{first_bad['message']}; no tensor of a te.Linear had such a value before"
            yield rule.finding(int(first_bad["step"]), message)
        return
    first = int(np.flatnonzero(where.any(1))[0])
    order = np.flatnonzero(where[first])
    # A NaN spreads to all that is computed from it: the first tensor is the nearest to its cause.
    worst = facts.first_computed(order)
    names = tuple(facts.tensors[i].name for i in order)
    # Tensors of later steps too, which the same NaN has reached.
    facts.explained.update(int(i) for i in np.flatnonzero(where.any(0)))
    name = facts.tensors[worst].name
    number = int(counts[first, worst])
    message = f"{name}: {number:,} values are NaN or infinite in step {facts.steps[first]}, the first that has any"
    yield rule.finding(int(facts.steps[first]), message, tensor=name, tensors=names)


def _answer(event: Row) -> str:
    """Return the words for what the guard did about a bad step, if the run went on."""
    if event["action"] == "demote":
        return f"; {event['demoted']} runs in BF16 since"
    if event["action"] == "skip":
        return "; the data of the step was left out"
    if event["action"] == "rewind":
        return f"; the run went back to step {event['to']}"
    return ""


def _uncalibrated(facts: RunFacts, rule: Rule) -> Iterator[Finding]:
    """Values that are lost under a scale of 1, since no amax was measured before the cast."""
    # Under delayed scaling an age below 0 says that no amax has been seen.
    never_measured = facts.record.counted & (facts.record.values[:, :, INDEX["scale_age"]] < 0)
    never_measured &= facts.under_schemes("DelayedScaling")
    lost = facts.lost()
    saturated = facts.record.share("saturated")
    where = never_measured & ((lost > LOST) | (saturated > SATURATED))

    def say(step: int, tensor: int) -> str:
        return (
            f"{facts.tensors[tensor].name}: {_worse(lost, saturated, step, tensor)} in step {facts.steps[step]}, "
            "with a scale that was never measured"
        )

    yield from find_unexplained(facts, rule, where, np.maximum(lost, saturated), say)


def _jumped(facts: RunFacts, rule: Rule) -> Iterator[Finding]:
    """Scales that no longer fit, though the tensors did not change: of most tensors in one step."""
    room = facts.headroom()
    # A jump needs two steps.
    if len(room) < 2:
        return
    with np.errstate(divide="ignore", invalid="ignore"):
        # [steps - 1, tensors], in powers of two, as the headroom is.
        grown = np.abs(np.diff(np.log2(facts.record.field("amax")), axis=0))
    wrong = (
        (np.abs(np.diff(room, axis=0)) > JUMP_BITS) & (grown < 1) & (np.abs(room[1:]) > JUMP_BITS)
    )
    counted = np.isfinite(room[1:])
    # A scale that was never measured, as after a change of the recipe, is another rule's.
    wrong &= facts.record.values[1:, :, INDEX["scale_age"]] >= 0
    # One tensor may jump by itself; half of all in one step have a common cause, such as a load of other scales.
    many = wrong.sum(1) >= np.maximum(counted.sum(1) / 2, 1)
    where = np.zeros_like(room, bool)
    where[1:] = wrong & many[:, None]

    def say(step: int, tensor: int) -> str:
        factor = 2.0 ** abs(room[step, tensor] - room[step - 1, tensor])
        return (
            f"{facts.tensors[tensor].name}: its scale changed by a factor of {factor:.3g} before step "
            f"{facts.steps[step]}, and its values did not"
        )

    yield from find_unexplained(facts, rule, where, np.abs(room), say)


def _clipped_between(facts: RunFacts, rule: Rule) -> Iterator[Finding]:
    """Single steps between recorded ones whose values were far beyond the scale of the recorded step before."""
    amax = facts.record.field("amax")
    if len(amax) < 2:
        return
    between = facts.record.field("amax_between")
    ages = facts.record.field("amax_between_age")
    with np.errstate(divide="ignore", invalid="ignore"):
        # The largest magnitude that the scale of the recorded step before represents.
        represents = amax * 2.0 ** facts.headroom()
        beyond = np.full_like(amax, np.nan)
        beyond[1:] = between[1:] / represents[:-1]
        # Where values grow over the steps between, so does the recorded step's amax, and the scale follows them.
        calm = np.full_like(amax, np.nan)
        calm[1:] = np.fmax(amax[1:], amax[:-1])
        where = (beyond >= GROWTH) & (between >= GROWTH * calm)

    def say(step: int, tensor: int) -> str:
        clipped = int(facts.steps[step] - ages[step, tensor])
        return (
            f"{facts.tensors[tensor].name}: its largest value was {between[step, tensor]:.3g} in step {clipped}, "
            f"which is not recorded; that is {beyond[step, tensor]:.3g} times what the scale of step "
            f"{facts.steps[step - 1]} represents, so the cast clipped it"
        )

    yield from find_unexplained(facts, rule, where, beyond, say)


def _stale(facts: RunFacts, rule: Rule) -> Iterator[Finding]:
    """Scales of an amax long past, under delayed scaling with the largest amax of the history."""
    room = facts.headroom()
    ages = facts.record.field("scale_age")
    lost = facts.lost()

    def say(step: int, tensor: int) -> str:
        return (
            f"{facts.tensors[tensor].name}: {lost[step, tensor]:.1%} is flushed to zero or subnormal in step "
            f"{facts.steps[step]}; its scale is {plural(int(ages[step, tensor]), 'step')} old and leaves "
            f"{room[step, tensor]:.0f} of the format's powers of two unused"
        )

    # What a margin leaves unused is not for the age of the scale.
    where = (room - facts.margin() > UNUSED_BITS) & (ages > 1) & (lost > LOST)
    where &= facts.under_schemes("DelayedScaling")
    yield from find_unexplained(facts, rule, where, lost, say, origin=_much(where, lost))


def _outlier(facts: RunFacts, rule: Rule) -> Iterator[Finding]:
    """Few values far above the others, which take the scale of all: it fits, and most values are too small for it."""
    lost = facts.lost()
    peak = facts.peak()

    def say(step: int, tensor: int) -> str:
        return (
            f"{facts.tensors[tensor].name}: {lost[step, tensor]:.0%} is flushed to zero or subnormal in step "
            f"{facts.steps[step]} though its scale fits; the largest value is {peak[step, tensor]:.3g} times the root "
            "mean square"
        )

    where = outliers(facts)
    blocks = ~facts.one_scale()
    names = [tensor.name for tensor in facts.tensors]
    origin = _much(where, lost) | _grown(facts)
    for finding in find_unexplained(facts, rule, where, lost, say, origin=origin):
        if blocks[:, names.index(finding.tensor)].any():
            yield replace(finding, change=OUTLIER_IN_BLOCKS)
        else:
            yield finding


def _much(where: Mask, size: Floats) -> Mask:
    """Return where tensors show something that at some time is at least half as much as of any, [steps, tensors]."""
    most = np.where(where, np.nan_to_num(size), 0.0).max(0, initial=0.0)
    return where & (most >= 0.5 * most.max(initial=0.0))


def _grown(facts: RunFacts) -> Mask:
    """Return where a tensor's largest value has grown far beyond what it was, and beyond the others, [steps, tensors].

    A product of two tensors with an outlier has a larger one, and shows it sooner than the tensor where it began.
    """
    amax = facts.record.field("amax")
    amax = np.where(amax > 0, amax, np.nan)
    peak = facts.peak()
    with np.errstate(invalid="ignore"):
        grown = amax >= GROWTH * np.fmin.accumulate(amax, axis=0)
        # A tensor that grows as a whole has no outlier. Where the peak is unknown, the amax decides.
        as_a_whole = peak < PEAK_GROWTH * np.fmin.accumulate(peak, axis=0)
    return np.asarray(grown & ~as_a_whole)


def outliers(facts: RunFacts) -> Mask:
    """Return where scales fit and most values are too small for them all the same, bool [steps, tensors].

    Where the largest values saturate, a fitting scale would lose even more. The scale of a block always fits.
    """
    fits = (facts.headroom() <= UNUSED_BITS) | ~facts.one_scale()
    return fits & hides_loss(facts, facts.lost(), facts.share_of_values("flushed"))


def _dead(facts: RunFacts, rule: Rule) -> Iterator[Finding]:
    """Tensors that are zero in all of the last recorded steps."""
    elements = facts.record.field("elements")
    zero = (facts.record.field("amax") == 0) & (elements > 0)
    # Too few steps to tell a dead tensor from one that was zero by chance.
    if len(zero) < DEAD_STEPS:
        return
    # Steps of a streak that lasts to the end: a tensor that was zero for a while and lives again is no finding.
    always = np.logical_and.accumulate(zero[::-1], axis=0)[::-1]
    always &= always.sum(0) >= DEAD_STEPS

    def say(step: int, tensor: int) -> str:
        count = int(always[:, tensor].sum())
        return (
            f"{facts.tensors[tensor].name}: every value is zero in the last {count} recorded steps"
        )

    # Zeros in a weight are the cause of the others. Without them the first linear is nearest to the cause of missing
    # inputs, and the deepest one to the cause of missing gradients.
    count = zero.shape[1]
    depth = np.arange(count, dtype=float)
    nearest = np.where(facts.operand("grad_output"), depth, -depth)
    # Above every depth.
    nearest[facts.operand("weight")] += 2 * count
    yield from find_unexplained(facts, rule, always, nearest[None], say)


def _worse(lost: Floats, saturated: Floats, step: int, tensor: int) -> str:
    if saturated[step, tensor] > SATURATED:
        return f"{saturated[step, tensor]:.1%} saturates"
    return f"{lost[step, tensor]:.1%} is flushed to zero or subnormal"


# In this order; a tensor that one rule explains is left out by those that follow.
RULES: tuple[Rule, ...] = (
    Rule(
        key="nonfinite",
        symptom="a NaN or an infinity in a tensor",
        change="look at this linear's weights and data; --on-nan demote keeps its layer in BF16 and goes on, --on-nan "
        "skip leaves out the data; if it comes back under --recipe bf16, FP8 is not the cause",
        shown_by="nonfinite",
        look=_nonfinite,
    ),
    Rule(
        key="uncalibrated",
        symptom="values saturate or vanish under a scale that was never measured (`delayed`)",
        change="calibrate the first scales: leave out --no-calibrate, in a loop of your own call "
        "model.calibrate(batch) before the first step; or take --recipe current",
        shown_by="sqnr",
        look=_uncalibrated,
    ),
    Rule(
        key="wrong-scale",
        symptom="most scales jump between two steps, and the tensors do not, as after a resume with other FP8 state",
        change="resume from a checkpoint with its own fp8_state.safetensors, calibrate again, or take --recipe "
        "current, which has no state",
        shown_by="scale",
        look=_jumped,
    ),
    Rule(
        key="stale-scale",
        symptom="a scale from an old, larger amax leaves the values too small (`delayed`)",
        change="shorten --amax-history-len, take --amax-compute-algo most_recent, or --recipe current",
        shown_by="scale_age",
        look=_stale,
    ),
    Rule(
        key="gradient-overflow",
        symptom="gradients saturate",
        change="--recipe current takes the scale from the gradient itself; or --margin 1 for headroom, a lower "
        "--learning-rate, or a longer --warmup-steps",
        shown_by="saturated",
        look=gradient_saturates,
    ),
    Rule(
        key="saturation",
        symptom="an input or a weight saturates",
        change="--recipe current takes the scale from the tensor itself; or --margin 1 for headroom, or "
        "--amax-compute-algo most_recent, whose scales are one step old",
        shown_by="saturated",
        look=input_or_weight_saturates,
    ),
    Rule(
        key="clipped-between",
        symptom="a single step between two recorded ones had far larger values than its scale represents (`delayed`)",
        change="look at the data of that step; --record 1 shows such a step whole; --recipe current takes the scale "
        "from the tensor itself and clips nothing",
        shown_by="amax_between",
        look=_clipped_between,
    ),
    Rule(
        key="outlier",
        symptom="few values are far above all others and take the scale with them",
        change="scales per block keep an outlier to its block: --recipe blockwise on Hopper, mxfp8 on Blackwell; or "
        "keep this linear in BF16 through the recipe's table precision",
        shown_by="flushed",
        look=_outlier,
    ),
    Rule(
        key="dead",
        symptom="a tensor is zero in every recorded step of late",
        change="this is no matter of FP8: look at the weights between this linear and the loss (a matrix of zeros, a "
        "gate that is closed, frozen parameters)",
        shown_by="amax",
        look=_dead,
    ),
    Rule(
        key="learning-rate",
        symptom="the loss rises again while the weights grow, or under steps that are large for them; or a NaN comes "
        "before it could rise",
        change="lower --learning-rate, or warm up longer (--warmup-steps); try --recipe bf16 for a few steps to see "
        "that FP8 is not the cause",
        shown_by="amax",
        look=find_learning_rate,
    ),
    LATE_SCALE,
    INEXACT,
    SPIKE,
)


@dataclass(frozen=True)
class Diagnosis(Printable):
    """All findings in a run, by the step in which they begin. Print it, or take `to_dict`."""

    width: ClassVar[int] = 100
    steps: int
    tensors: int
    findings: tuple[Finding, ...]

    def __rich__(self) -> Group:
        """Return a paragraph per finding."""
        lines: list[Text | Padding] = []
        for finding in self.findings:
            lines.append(Text(f"step {finding.step}, {finding.rule}", "bold"))
            lines.append(Padding.indent(Text(finding.message), 2))
            lines.append(Padding.indent(Text(f"try: {finding.change}"), 2))
            lines.append(Text())
        if not lines:
            lines.append(
                Text(f"nothing stands out in {self.steps} recorded steps of {self.tensors} tensors")
            )
        return Group(*lines)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        findings = [asdict(finding) for finding in self.findings]
        return {"steps": self.steps, "tensors": self.tensors, "findings": findings}


def diagnose(facts: RunFacts, rules: Sequence[Rule] = RULES) -> Diagnosis:
    """Return what the rules find in a run."""
    # Facts may be diagnosed twice, as for advice and then for the report.
    facts.explained.clear()
    findings: list[Finding] = []
    # In their order: each marks the tensors that it explains, which those after it leave out. A run that ended before
    # the first recorded step has metrics and events alone.
    for rule in rules:
        findings += rule.look(facts, rule)
    findings.sort(key=lambda finding: finding.step)
    findings = with_first_cause(findings, "learning-rate")
    counted = int(facts.record.counted.any(0).sum())
    return Diagnosis(len(facts.record.steps), counted, tuple(findings))
