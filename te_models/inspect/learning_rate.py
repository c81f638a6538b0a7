"""The rule of `te-models doctor` that finds a learning rate which is too high for the weights."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from te_models.inspect.findings import Finding, Rule
from te_models.inspect.run_facts import RunFacts
from te_models.recorder.record import Floats

LOSS_RISE = 0.5  # of the way from its lowest value back to its first one
LOSS_LEAP = 0.5  # above its lowest value so far, as a share of that
LEARNED = 0.02  # by which a loss has to fall below its first value for a run to have learned something, as a share
WEIGHT_GROWTH = 1.5  # of the root mean square of half of the weights
WEIGHT_LEAP = 4.0  # the same, for which nothing else has to speak
LEAP_STEPS = 10  # within which they leap
# A learning rate, which is about what a step of AdamW changes in a weight, as a share of the weights' root mean square.
LARGE_STEP = 0.1


def find_learning_rate(facts: RunFacts, rule: Rule) -> Iterator[Finding]:
    """Yield a finding for a run whose loss, or whose weights where it ended before that, speak for a rate too high."""
    losses = np.array([row["loss"] for row in facts.rows], float)
    # Shorter runs have no curve.
    finding = _rise(facts, rule, losses) if len(losses) >= 4 else None
    if finding is None:
        finding = _weight_leap(facts, rule, losses)
    if finding is not None:
        yield finding


def _rise(facts: RunFacts, rule: Rule, losses: Floats) -> Finding | None:
    """Return a finding for a loss that goes back up, to the end of the run or to a peak, under large steps."""
    width = max(1, len(losses) // 10)
    # A single spike is no divergence, so a tenth of the run is averaged; at the start, the losses that there are: the
    # first step may be the only one before a divergence.
    start = np.cumsum(losses[: width - 1]) / np.arange(1, width)
    smooth = np.append(start, np.convolve(losses, np.ones(width) / width, mode="valid"))
    numbers = np.array([int(row["step"]) for row in facts.rows])
    end = len(smooth) - 1
    lowest = int(np.nanargmin(smooth)) if np.isfinite(smooth).any() else 0
    fell = smooth[0] - smooth[lowest]
    rose = smooth[-1] - smooth[lowest]
    diverged = not np.isfinite(losses[-1]) or rose > max(
        LOSS_RISE * fell, 0.05 * abs(smooth[lowest])
    )
    if not diverged:
        # The highest loss above the lowest one before it.
        so_far = np.fmin.accumulate(smooth)
        rises = np.nan_to_num(smooth - so_far, nan=-np.inf)
        end = int(rises.argmax())
        lowest = int(np.nanargmin(smooth[: end + 1]))
        if rises[end] <= LOSS_LEAP * abs(smooth[lowest]):
            return None
    step = int(numbers[lowest])
    rise = f"the loss rose from {smooth[lowest]:.4g} after step {step} to {smooth[end]:.4g}"
    if not facts.recipe.quantized:
        # Of a run in BF16 no weight is recorded. FP8 cannot be its cause, and a loss above the first one is no noise.
        if smooth[end] <= (1 + LOSS_LEAP) * smooth[0]:
            return None
        return rule.finding(step, f"{rise}, without any FP8")
    if not facts.record.steps:
        return None
    if diverged:
        sizes = _weight_sizes(facts, int(facts.steps[0]), int(facts.steps[-1]))
    else:
        # Within these steps: over a long run weights grow without harm.
        sizes = _weight_sizes(facts, int(numbers[lowest]), int(numbers[end]))
    growth = _largest_growth(sizes)
    if growth >= WEIGHT_GROWTH:
        message = f"{rise}, while half of the weights grew by a factor of {growth:.2f} or more"
        return rule.finding(step, message)
    # Weights that grew before the first record do not show it, nor those that weight decay then shrank.
    rates = [float(row.get("learning_rate", 0)) for row in facts.rows[lowest : end + 1]]
    share = max(rates) / _median(sizes[:1]) if len(sizes) else 0.0
    # Over the whole record: the loss may leap and come back between two records.
    if share >= LARGE_STEP and _move(_weight_sizes(facts, 0, int(facts.steps[-1]))):
        message = (
            f"{rise}, while the learning rate, {max(rates):.3g}, was {share:.2g} times the root mean square of half of "
            "the weights or more"
        )
        return rule.finding(step, message)
    return None


def _weight_leap(facts: RunFacts, rule: Rule, losses: Floats) -> Finding | None:
    """Return a finding for weights that a few steps made anew, in a run that has learned nothing; None for others.

    The first such steps may be the last ones, so that the loss had no time to rise: a NaN ends it, or it stays where
    it was since every gradient is zero.
    """
    bad = facts.first_nonfinite()
    # The first step computes with weights that no update has changed.
    if bad is not None and bad["step"] <= 1:
        return None
    if len(losses) and losses[-1] < (1 - LEARNED) * losses[0]:
        return None
    rates = [float(row.get("learning_rate", 0)) for row in facts.rows]
    most = max(rates, default=0.0)
    end = "" if bad is None else f", before the NaN or infinity of step {bad['step']}"
    steps = facts.steps
    for place in range(len(steps) - 1):
        if steps[place + 1] - steps[place] > LEAP_STEPS:
            continue
        sizes = _weight_sizes(facts, int(steps[place]), int(steps[place + 1]))
        growth = _largest_growth(sizes)
        if growth >= (WEIGHT_LEAP if bad is None else WEIGHT_GROWTH):
            message = (
                f"half of the weights grew by a factor of {growth:.3g} or more between steps {steps[place]} and "
                f"{steps[place + 1]}, under a learning rate of {most:.3g}{end}"
            )
            return rule.finding(int(steps[place]), message)
    if bad is None or not facts.rows:
        return None
    # Without such records the event has what the guard measured.
    first = int(facts.rows[0]["step"])
    growth = float(bad.get("weight_growth") or 0)
    size = float(bad.get("weight_rms") or math.inf)
    if growth >= WEIGHT_GROWTH:
        message = (
            f"the median of the weights' root mean squares grew by a factor of {growth:.3g} since the run began, under "
            f"a learning rate of {most:.3g}{end}"
        )
        return rule.finding(first, message)
    if most >= LARGE_STEP * size:
        message = (
            f"the learning rate, {most:.3g}, was {most / size:.2g} times the root mean square of half of the weights "
            f"or more{end}"
        )
        return rule.finding(first, message)
    return None


def _weight_sizes(facts: RunFacts, first: int, last: int) -> Floats:
    """Return the root mean squares of the weights in the records of and around two steps, [steps, weights].

    Without any weights there are no steps either.
    """
    weights = facts.rms()[:, facts.operand("weight")]
    # A weight that was not recorded in some step would compare different sets.
    weights = weights[:, np.isfinite(weights).all(0)]
    if not weights.size:
        return np.empty((0, 0))
    steps = facts.steps
    start = max(0, int(np.searchsorted(steps, first, side="right")) - 1)
    stop = min(len(steps) - 1, int(np.searchsorted(steps, last)))
    return weights[start : stop + 1]


def _largest_growth(sizes: Floats) -> float:
    """Return the median growth of the weights from the first record to where it is largest; NaN without any."""
    if not len(sizes):
        return float("nan")
    with np.errstate(divide="ignore", invalid="ignore"):
        growth = sizes / sizes[:1]
    return max(_median(row) for row in growth)


def _move(sizes: Floats) -> bool:
    """Return whether half of the weights change between records; those below adapters do not."""
    with np.errstate(divide="ignore", invalid="ignore"):
        change = sizes.max(0) / sizes.min(0) - 1
    return _median(change) > 0.01


def _median(values: Floats) -> float:
    """Return the median of the values other than NaN; NaN if there are none, as for weights that are all zero."""
    known = values[~np.isnan(values)]
    return float(np.median(known)) if known.size else float("nan")
