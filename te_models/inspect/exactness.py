"""The rules of `te-models doctor` about casts that are less exact than their format usually is.

One scale per tensor is enough where the tensor's own range fits the format: a poor cast then comes from a scale that
was made from other values, in the step before. Blocks with their own scales are needed where no single scale fits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch

from te_models.errors import plural
from te_models.inspect.findings import Finding, Rule, find_unexplained
from te_models.inspect.run_facts import Mask, RunFacts
from te_models.numerics.formats import FP8_MAX, TORCH_FP8, DType
from te_models.recorder.record import Floats

FINER_SCALES = (
    "finer scales (--recipe blockwise on Hopper, mxfp8 on Blackwell), or BF16 for this linear through the recipe's "
    "table precision"
)
LOWER_MARGIN = (
    "lower --margin, whose powers of two are missing at the other end of the format: 0 or 1 is usual; or --recipe "
    "current, whose scales have none"
)
# A share of values other than 0 that became zero or subnormal; of numbers of a normal distribution a hundredth does.
# Subnormal numbers have some bits left: of a normal distribution of which half is lost, they leave 32 dB in E4M3 and 26
# in E5M2, no less than the format does by itself.
LOST = 0.5
# Powers of two that a scale may leave unused above a tensor's largest magnitude.
UNUSED_BITS = 3.0
# dB below which a cast is worth a word, by format: LEEWAY below what numbers of a normal distribution have.
LEEWAY = 9.0
LEAST_SQNR = {DType.kFloat8E4M3: 22.0, DType.kFloat8E5M2: 16.0, DType.kFloat4E2M1: 11.0}
# dB at which no cast is of use, whatever its format: it clips most of the signal, or flushes it.
FAR_BELOW = 10.0
OFTEN = (
    0.1  # of the recorded steps in which something has to show that need not show in most of them
)
# The share of values other than 0 that became zero, at which the values below an outlier have LEAST_SQNR. The SQNR of
# the whole tensor does not show them, since the outlier is most of its signal. Numbers of a normal distribution with
# deviation 1, rounded to multiples of a step, have a noise of step^2 / 12: LEAST_SQNR is at steps of 0.275 and 0.549.
# What is below half a step is flushed.
LEAST_FLUSHED = {DType.kFloat8E4M3: 0.11, DType.kFloat8E5M2: 0.22}
# The share that is lost then: nearly all of a normal distribution, and less where a part of the rows or columns is
# large. But a tensor of gated values loses as many as there are closed gates, without harm, since each row and each
# column has open ones. A sigmoid's gate is closed from logits of -13 on in E4M3, which trained models have, and of -23
# in E5M2.
MOST_LOST = {DType.kFloat8E4M3: 0.75, DType.kFloat8E5M2: 0.5}


def below_usual(facts: RunFacts) -> Floats:
    """Return by how many dB each cast is less exact than LEAST_SQNR, [steps, tensors]; negative if it is not."""
    return _by_format(facts, LEAST_SQNR) - facts.record.sqnr()


def sqnr_by_own_amax(facts: RunFacts) -> Floats:
    """Return the dB that a scale by each tensor's own amax leaves at the least, [steps, tensors].

    A number x is rounded by at most half a unit in the last place, x eps / 2, or half a step of the subnormal numbers,
    whichever is more. So the sum of the squared errors is at most the sum of both, for any values. A scale that is
    a power of two may be half as large as the amax allows. NaN for other formats than FP8.
    """
    formats = facts.record.field("format")
    peak = facts.peak()
    bound = np.full_like(peak, np.nan)
    for number, kind in TORCH_FP8.items():
        format_info = torch.finfo(kind)
        step = format_info.smallest_normal * format_info.eps
        normal = (format_info.eps / 2) ** 2
        # Over the mean square: half a step is amax * step / (2 * largest number), and twice that by a power of two.
        with np.errstate(invalid="ignore", over="ignore"):
            subnormal = (peak * step / FP8_MAX[number]) ** 2
            decibels = -10 * np.log10(normal + subnormal)
        bound = np.where(formats == int(number), decibels, bound)
    return bound


def hides_loss(facts: RunFacts, lost: Floats, flushed: Floats) -> Mask:
    """Return where values below the largest ones are less exact than LEAST_SQNR, though the whole tensor may not be.

    Args:
        facts: the run.
        lost: the share of each tensor's values that is zero or subnormal after a cast, [steps, tensors].
        flushed: the share that is zero, [steps, tensors].

    Returns:
        bool [steps, tensors]; False in FP4, of which many values are subnormal in any tensor.
    """
    casts = _casts_of_share(facts)
    with np.errstate(invalid="ignore"):
        most = lost * casts > _by_format(facts, MOST_LOST)
        return np.asarray(most & (flushed * casts > _by_format(facts, LEAST_FLUSHED)))


def _casts_of_share(facts: RunFacts) -> Floats:
    """Return of how many casts one may have the whole share that is lost of a tensor in a step, [steps, tensors].

    The record adds up the casts of all processes and micro-batches. If their scales are far apart, those with a larger
    scale lose little: the shares are of the cast with the smallest scale, which is one of several. Else 1.
    """
    record = facts.record
    apart = record.field("scale_max") > 2.0**UNUSED_BITS * record.field("scale_min")
    # A cast with one scale counts as one block.
    return np.where(facts.one_scale() & apart, record.field("blocks"), 1.0)


def shares_by_own_amax(facts: RunFacts) -> tuple[Floats, Floats]:
    """Return the shares of values that a scale by each tensor's own amax loses, and flushes, [steps, tensors] each.

    Lost values are zero or subnormal. Where the recorded scale leaves powers of two unused, the tensor's own scale is
    larger and loses fewer values. The results are upper bounds then: the recorded shares, or only the share flushed to
    zero, where the own scale makes all recorded subnormal values normal. Where the recorded scale clips, the own scale
    is smaller. The results are estimates then: the shares grow with the threshold, as they do where magnitudes are
    spread evenly near zero.
    """
    formats = facts.record.field("format")
    room = facts.headroom()
    with np.errstate(invalid="ignore", over="ignore"):
        growth = np.where(room < 0, 2.0**-room, 1.0)
    flushed = facts.share_of_values("flushed")
    lost = facts.lost() * growth
    for number, kind in TORCH_FP8.items():
        # From half of the smallest subnormal number, below which values are flushed, to the smallest normal one.
        subnormal_bits = math.log2(2 / torch.finfo(kind).eps)
        lifted = (formats == int(number)) & (room >= subnormal_bits)
        lost = np.where(lifted, flushed, lost)
    return lost, flushed * growth


def _by_format(facts: RunFacts, figures: Mapping[DType, float]) -> Floats:
    """Return the figure of each cast's format, [steps, tensors]; NaN, below and above nothing, where there is none."""
    formats = facts.record.field("format")
    values = np.full_like(formats, np.nan)
    for number, value in figures.items():
        values[formats == int(number)] = value
    return values


def _often_below(facts: RunFacts) -> Mask:
    """Return where casts are less exact than LEAST_SQNR, of tensors that are so often, [steps, tensors].

    That is in most recorded steps, or far less exact in some of them. One odd step says nothing.
    """
    sqnr = facts.record.sqnr()
    below = below_usual(facts) > 0
    known = np.isfinite(sqnr).sum(0)
    often = below.sum(0) > known / 2
    often |= (sqnr < FAR_BELOW).sum(0) >= np.maximum(2, OFTEN * known)
    return np.asarray(below & often[None])


def _often_unused(facts: RunFacts) -> Mask:
    """Return where scales leave powers of two unused and values are lost, of tensors where that is usual, as above.

    The loss shows in the SQNR only where the largest values suffer too.
    """
    unused = (facts.headroom() > UNUSED_BITS) & (facts.lost() > LOST)
    often = unused.sum(0) > np.isfinite(facts.lost()).sum(0) / 2
    return np.asarray(unused & often[None])


def _own_scale_holds(facts: RunFacts) -> Mask:
    """Return where one scale by a tensor's own amax holds its values, [steps, tensors]; False where that is unknown."""
    exact = sqnr_by_own_amax(facts) >= _by_format(facts, LEAST_SQNR)
    return np.asarray(exact & ~hides_loss(facts, *shares_by_own_amax(facts)))


def no_single_scale(facts: RunFacts) -> Mask:
    """Return where not even a scale by a tensor's own amax holds its values, [steps, tensors]."""
    known = np.isfinite(sqnr_by_own_amax(facts))
    return np.asarray(known & ~_own_scale_holds(facts))


def too_wide(facts: RunFacts, step: int, tensor: int) -> str:
    """Return the words for a tensor that no single scale holds; both are indices."""
    peak = facts.peak()[step, tensor]
    return f"the largest value is {peak:.3g} times the root mean square, and no single scale holds both"


def _late_scale(facts: RunFacts, rule: Rule) -> Iterator[Finding]:
    """Tensors cast poorly by the scale of another step, though in most of these steps their own scale would fit."""
    if not len(facts.steps):
        return
    sqnr = facts.record.sqnr()
    lost = facts.lost()
    own = sqnr_by_own_amax(facts)
    room = facts.headroom()
    margin = facts.margin()
    ages = facts.record.field("scale_age")
    # The tensor's own scale would use the unused powers of two, whatever it holds then.
    unused = _often_unused(facts)
    poor = _often_below(facts) | unused
    late = poor & (ages != 0) & (_own_scale_holds(facts) | unused)
    mostly = late.sum(0) > poor.sum(0) / 2
    where = late & mostly[None]

    def say(step: int, tensor: int) -> str:
        age = int(ages[step, tensor])
        old = "was never measured" if age < 0 else f"is {plural(age, 'step')} old"
        bits = room[step, tensor]
        misfit = f"represents {2.0**bits:.2g} of its largest value"
        if bits >= 0:
            misfit = f"leaves {bits:.0f} of the format's powers of two unused"
        if by_margin[tensor]:
            misfit += f", for a margin of {margin[step, tensor]}"
        small = ""
        if lost[step, tensor] > LOST:
            small = f" and makes {lost[step, tensor]:.0%} zero or subnormal"
        return (
            f"{facts.tensors[tensor].name}: the cast leaves a signal of {sqnr[step, tensor]:.0f} dB over its noise in "
            f"step {facts.steps[step]}{small}, and the tensor's own scale would leave at least "
            f"{math.floor(own[step, tensor])}; this one {old} and {misfit}"
        )

    # Without the margin, no more is unused than scales may leave.
    by_margin = (where & (room > UNUSED_BITS) & (room - margin <= UNUSED_BITS)).any(0)
    size = np.where(unused, 100 * lost, below_usual(facts))
    places = {tensor.name: place for place, tensor in enumerate(facts.tensors)}
    for finding in find_unexplained(facts, rule, where, size, say):
        if by_margin[places[finding.tensor]]:
            finding = replace(finding, change=LOWER_MARGIN)
        yield finding


def _inexact(facts: RunFacts, rule: Rule) -> Iterator[Finding]:
    """Tensors that are cast less exactly than their format usually casts, whatever the cause."""
    if not len(facts.steps):
        return
    sqnr = facts.record.sqnr()
    usual = _by_format(facts, LEAST_SQNR) + LEEWAY
    wide = facts.one_scale() & no_single_scale(facts)

    def say(step: int, tensor: int) -> str:
        reason = ""
        if wide[step, tensor]:
            reason = f"; {too_wide(facts, step, tensor)}"
        return (
            f"{facts.tensors[tensor].name}: the cast leaves a signal of {sqnr[step, tensor]:.0f} dB over its noise in "
            f"step {facts.steps[step]}, where this format usually leaves {usual[step, tensor]:.0f}{reason}"
        )

    yield from find_unexplained(facts, rule, _often_below(facts), below_usual(facts), say)


LATE_SCALE = Rule(
    key="late-scale",
    symptom="a cast is less exact than its format usually is, or makes most values zero or subnormal, under a scale of "
    "a step before or with a large margin, and the tensor's own scale would hold it (`delayed`)",
    change="--recipe current takes the scale from the tensor itself, whose range the format holds: blocks are not "
    "needed",
    shown_by="sqnr",
    look=_late_scale,
)
INEXACT = Rule(
    key="inexact",
    symptom="a cast is less exact than its format usually is",
    change=FINER_SCALES,
    shown_by="sqnr",
    look=_inexact,
)
