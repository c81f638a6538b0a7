"""A rule about the record of a run, and what it finds. The rules themselves are in te_models.inspect.advice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from te_models.errors import plural
from te_models.inspect.run_facts import Mask, RunFacts
from te_models.recorder.record import Floats


@dataclass(frozen=True)
class Finding:
    """One observation of a rule, with its advice.

    Attributes:
        rule: the key of the rule.
        tensor: the tensor that it is about, the worst of several; "" if it is about the run.
        step: the first step in which it shows.
        message: what was seen, with figures, and the likely cause.
        change: what to change.
        tensors: the names of all tensors that show it.
    """

    rule: str
    tensor: str
    step: int
    message: str
    change: str
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rule:
    """A rule.

    Attributes:
        key: its name.
        symptom: what it looks for, for the documentation.
        change: what to change.
        shown_by: the statistic in which a reader sees it (te_models.inspect.record_report.STATISTICS).
        look: yields what it finds in a run.
    """

    key: str
    symptom: str
    change: str
    shown_by: str
    look: Callable[[RunFacts, Rule], Iterator[Finding]]

    def finding(
        self, step: int, message: str, tensor: str = "", tensors: tuple[str, ...] = ()
    ) -> Finding:
        """Return a finding of this rule, with its advice; the arguments are fields of Finding."""
        return Finding(
            rule=self.key,
            tensor=tensor,
            step=step,
            message=message,
            change=self.change,
            tensors=tensors,
        )


def find_unexplained(
    facts: RunFacts,
    rule: Rule,
    where: Mask,
    size: Floats,
    say: Callable[[int, int], str],
    origin: Mask | None = None,
) -> Iterator[Finding]:
    """Yield one finding about the tensors that another rule has not explained.

    Args:
        facts: the run.
        rule: the rule that looks.
        where: in which steps each tensor shows it, bool [steps, tensors].
        size: how much of it, [steps, tensors]; the tensor with the most is named.
        say: returns the message for (index of the step, index of the tensor) of its worst step.
        origin: where each tensor may be the one from which it spreads, [steps, tensors]. Of those in the first step
            the first one computed is named, if there are any.
    """
    where = where.copy()
    # One cause per tensor: a scale that is too old also saturates, and the second finding would only repeat the first.
    explained = list(facts.explained)
    where[:, explained] = False
    if not where.any():
        return
    first = int(np.flatnonzero(where.any(1))[0])
    # A candidate by `origin` alone may be another rule's too.
    facts.explained.update(int(one) for one in np.flatnonzero(where.any(0)))
    named = None
    if origin is not None:
        candidates = origin[first].copy()
        candidates[explained] = False
        if candidates.any():
            named = facts.first_computed(np.flatnonzero(candidates))
            where[first, named] = True
    shown = np.flatnonzero(where.any(0))
    # NaN stands for an unknown count; argmax would take it for the largest.
    sizes = np.where(where, np.nan_to_num(size, nan=-np.inf), -np.inf)
    if named is None:
        named = int(np.unravel_index(int(sizes.argmax()), sizes.shape)[1])
    names = tuple(facts.tensors[one].name for one in shown)
    others = ""
    if len(names) > 1:
        others = f" (and in {plural(len(names) - 1, 'other tensor')})"
    message = say(int(sizes[:, named].argmax()), named) + others
    step = int(facts.steps[first])
    yield rule.finding(step, message, tensor=facts.tensors[named].name, tensors=names)


def with_first_cause(findings: Sequence[Finding], cause: str) -> list[Finding]:
    """Return the findings, of which all later than the one of rule `cause` say that it is to be mended first.

    A cause of the whole run, such as a learning rate that is too high, shows in many tensors afterwards.
    """
    begun = min((finding.step for finding in findings if finding.rule == cause), default=None)
    marked = []
    for finding in findings:
        if begun is not None and finding.step > begun:
            first = (
                f"first mend the {cause} of step {begun}, from which this may follow; otherwise "
            )
            finding = replace(finding, change=first + finding.change)
        marked.append(finding)
    return marked
