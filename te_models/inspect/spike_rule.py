"""The rule of `te-models doctor` about spikes of the loss or the gradient norm, on which the guard acted."""

from __future__ import annotations

from collections.abc import Iterator

from te_models.errors import plural
from te_models.inspect.findings import Finding, Rule
from te_models.inspect.run_facts import RunFacts


def find_spikes(facts: RunFacts, rule: Rule) -> Iterator[Finding]:
    """Yield one finding for the spikes of a run, about the first of them."""
    spikes = [event for event in facts.events if event["event"] == "spike"]
    if not spikes:
        return
    first = spikes[0]
    # The tensor is the least exact one of that step, which need not be the cause: other rules may still find it.
    name = str(first.get("tensor") or "")
    message = str(first.get("message", ""))
    if len(spikes) > 1:
        message += f" (and {plural(len(spikes) - 1, 'later spike')})"
    tensors = (name,) if name else ()
    yield rule.finding(int(first["step"]), message, tensor=name, tensors=tensors)


SPIKE = Rule(
    key="spike",
    symptom="the guard met a loss or a gradient norm far above those before it (--spike-bound)",
    change="look at the data of that step, which --on-nan skip leaves out; if spikes go on, lower --learning-rate or "
    "warm up longer (--warmup-steps); te-models replay --step N --what-if bf16 tells whether FP8 is the cause",
    shown_by="amax",
    look=find_spikes,
)
