"""The rules about tensors whose values saturate: gradients, and inputs and weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from te_models.errors import plural
from te_models.inspect.exactness import (
    FAR_BELOW,
    FINER_SCALES,
    UNUSED_BITS,
    no_single_scale,
    too_wide,
)
from te_models.inspect.findings import Finding, Rule, find_unexplained
from te_models.inspect.run_facts import Mask, RunFacts

# A share of saturated elements that no healthy run has: a scale of the tensor's own amax saturates nothing, and one of
# the step before only the few elements that grew (2.1 % at the most in the first steps of a tiny model).
SATURATED = 0.03
LASTING = 3  # recorded steps in a row in which few values are far beyond the format


def gradient_saturates(facts: RunFacts, rule: Rule) -> Iterator[Finding]:
    """Find gradients of outputs that saturate."""
    yield from _find_saturated(facts, rule, facts.operand("grad_output"))


def input_or_weight_saturates(facts: RunFacts, rule: Rule) -> Iterator[Finding]:
    """Find inputs and weights that saturate."""
    yield from _find_saturated(facts, rule, facts.operand("input", "weight"))


def _find_saturated(facts: RunFacts, rule: Rule, operands: Mask) -> Iterator[Finding]:
    """Find tensors of some operands, bool [tensors], of which more saturates than in a healthy run, or for longer."""
    share = facts.record.share("saturated")
    far_beyond = _far_beyond(facts) & (share > 0) & operands
    where = (share > SATURATED) & operands
    # Where few values stay far beyond the format, a gradient's scale does not follow. In inputs they are an outlier,
    # which has a rule of its own.
    where |= _in_a_row(facts, far_beyond) & facts.operand("grad_output")
    where[:, list(facts.explained)] = False
    origin = where | far_beyond
    # A few tokens of an expert may saturate in a step of a healthy run, whose next scale fits again. So where anything
    # goes on to saturate, nothing else is the cause.
    goes_on = _in_a_row(facts, origin, cut_off=True)
    lasting_steps = np.flatnonzero((where & goes_on).any(1))
    if len(lasting_steps):
        origin = goes_on
        passing = where.any(0) & ~goes_on.any(0)
        facts.explained.update(int(tensor) for tensor in np.flatnonzero(passing))
        where[: lasting_steps[0]] = False
    # No single scale holds such a tensor in most of the steps in which it saturates: a newer scale would not clip its
    # large values, and lose its small ones.
    clipped = where | far_beyond
    wide = (clipped & no_single_scale(facts)).sum(0) > clipped.sum(0) / 2

    def say(step: int, tensor: int) -> str:
        words = _saturation_words(facts, step, tensor)
        if wide[tensor]:
            words += f"; {too_wide(facts, step, tensor)}"
        return words

    names = [tensor.name for tensor in facts.tensors]
    for finding in find_unexplained(facts, rule, where, share, say, origin=origin):
        if wide[names.index(finding.tensor)]:
            finding = replace(finding, change=FINER_SCALES)
        yield finding


def _far_beyond(facts: RunFacts) -> Mask:
    """Return where a tensor's largest values are far beyond the largest number of its cast, [steps, tensors].

    If there are few of them, less than SATURATED saturates, however large they are.
    """
    with np.errstate(invalid="ignore"):
        beyond_scale = facts.headroom() < -UNUSED_BITS
        # The headroom is of a step's smallest scale. Of several micro-batches the first may have had a far larger one,
        # and then only the exactness shows it.
        inexact = facts.record.sqnr() < FAR_BELOW
    return np.asarray(beyond_scale | inexact)


def _saturation_words(facts: RunFacts, step: int, tensor: int) -> str:
    """Return the words for a tensor that saturates in a step; both are indices."""
    share = facts.record.share("saturated")
    age = facts.record.field("scale_age")[step, tensor]
    amax = facts.record.field("amax")[step, tensor]
    words = f"{facts.tensors[tensor].name}: {share[step, tensor]:.1%} saturates in step {facts.steps[step]}"
    above = facts.steps[share[:, tensor] > SATURATED]
    if len(above) and above[0] < facts.steps[step]:
        words += f", and more than {SATURATED:.1%} since step {above[0]}"
    old = "of this step" if age == 0 else f"{plural(int(age), 'step')} old"
    return f"{words}; its scale is {old}, its amax {amax:.3g}"


def _in_a_row(facts: RunFacts, where: Mask, cut_off: bool = False) -> Mask:
    """Return where tensors show something in LASTING recorded steps in a row, [steps, tensors].

    Steps in which an expert had no tokens neither count nor end a row. With `cut_off` a row may also reach the last
    step with fewer: more may have followed.
    """
    lasting = np.zeros_like(where)
    for tensor in np.flatnonzero(where.any(0)):
        steps = np.flatnonzero(facts.record.counted[:, tensor])
        shown = where[steps, tensor]
        continued = np.append(shown, [cut_off] * (LASTING - 1))
        begins = np.all(np.lib.stride_tricks.sliding_window_view(continued, LASTING), axis=1)
        in_row = np.zeros_like(shown)
        for later in range(LASTING):
            in_row[later:] |= begins[: len(shown) - later]
        lasting[steps, tensor] = in_row
    return lasting
