"""The smallest change of a run's options that makes its memory fit, found with the memory plan."""

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from te_models.errors import UsageError
from te_models.planning.memory_plan import MemoryPlan
from te_models.planning.parameter_bytes import has_masters

MOST = 4  # changes at once
LEAST_SEQ_LEN = 256  # sequences are not shortened below this to save memory

Options = Mapping[str, Any]  # fields of te_models.planning.planned_run.PlannedRun
Plan = Callable[..., MemoryPlan]  # of the run, given keywords that differ from its own


class Value(NamedTuple):
    """A value of a lever: the flags that choose it on the command line, and the keywords of the plan that change."""

    flags: tuple[str, ...]
    keywords: dict[str, Any]


# A change that can be made in several degrees, from the mildest on; the last one usually saves most.
Lever = list[Value]
UNCHANGED = Value(flags=(), keywords={})


@dataclass(frozen=True)
class Change:
    """Options that make a run fit, and the memory that it then needs."""

    flags: tuple[str, ...]  # as on the command line, such as ("--activation-checkpointing", "full")
    peak: int  # predicted bytes on each GPU

    def __str__(self) -> str:
        return " ".join(self.flags)


def smallest_change(
    plan: Plan,
    options: Options,
    available: int,
    fixed: Collection[str] = (),
    processes: int = 1,
    own_options: str = "",
) -> Change | None:
    """Return the fewest changes of `options` that make the peak fit into `available` bytes; None if there are none.

    Among equally many changes, the cheapest come first: recomputing activations, smaller micro-batches with the same
    number of tokens per step, FP8 primary weights, an 8-bit optimizer (with FP32 masters, then without), host memory,
    and last changes of the run itself: adapters instead of all weights, shorter sequences.

    Args:
        plan: makes the plan of the run from keywords of plan_memory that differ from its own.
        options: the run's own keywords.
        available: bytes on each device.
        fixed: keywords that this run cannot change.
        processes: processes that share a batch without sharing weights; `options` are of one of them.
        own_options: options of the optimizer as the user gave them, "name=value,name=value".
    """

    def peak_with(values: Sequence[Value]) -> float:
        """Return the bytes that the run needs with these changes; infinity if they do not go together."""
        changed: dict[str, Any] = {}
        for value in values:
            changed |= value.keywords
        try:
            return plan(**changed).peak.total
        except UsageError:
            return math.inf

    def lowest_peak(chosen: Sequence[Lever]) -> float:
        """Return the bytes that the run needs with the strongest value of each lever."""
        strongest = []
        for lever in chosen:
            candidates = lever[-1:]
            if "optimizer_options" in lever[-1].keywords:
                # The last value leaves out FP32 masters, without which there are no FP8 primary weights: try both.
                candidates = (lever[:-1] or [UNCHANGED]) + candidates
            strongest.append(candidates)
        return min(peak_with(values) for values in itertools.product(*strongest))

    levers = []
    for lever in _levers(options, plan().recipe.quantized, processes, own_options):
        if not lever[-1].keywords.keys() & set(fixed):
            levers.append(lever)
    # FP32 sums of gradients come with smaller micro-batches, so these may need more.
    at_this_batch = [lever for lever in levers if "batch_size" not in lever[-1].keywords]
    if min(lowest_peak(levers), lowest_peak(at_this_batch)) > available:
        return None
    for count in range(1, min(MOST, len(levers)) + 1):
        for chosen in itertools.combinations(levers, count):
            if lowest_peak(chosen) > available:
                continue
            for values in itertools.product(*chosen):
                peak = peak_with(values)
                if peak <= available:
                    flags = itertools.chain.from_iterable(value.flags for value in values)
                    return Change(tuple(flags), int(peak))
    return None


def _levers(options: Options, quantized: bool, processes: int, own_options: str) -> Iterator[Lever]:
    """Yield the changes that are possible, the cheapest first."""
    recompute = _recompute_modes(options["activation_checkpointing"])
    if recompute:
        yield recompute
    batches = _smaller_batches(options, processes)
    if batches:
        yield batches
    masters = has_masters(options["optimizer_options"])
    if not options["fp8_params"] and quantized and (masters or options["lora_rank"]):
        yield [Value(("--fp8-params",), dict(fp8_params=True))]
    if masters and not options["lora_rank"]:
        smaller_state = _smaller_state(options, own_options)
        if smaller_state:
            yield smaller_state
    if not options["optimizer_offload"] and not options["lora_rank"] and options["gpus"] == 1:
        yield [Value(("--optimizer-offload",), dict(optimizer_offload=True))]
    if not options["activation_offload"]:
        yield [Value(("--activation-offload",), dict(activation_offload=True))]
    if not options["lora_rank"]:
        yield [Value(("--lora", "16"), dict(lora_rank=16))]
    lengths = []
    for part in (2, 4, 8):
        length = options["seq_len"] // part
        if length >= LEAST_SEQ_LEN:
            lengths.append(Value(("--seq-len", str(length)), dict(seq_len=length)))
    if lengths:
        yield lengths


def _recompute_modes(mode: str | int) -> Lever:
    """Return the modes of activation checkpointing that recompute more than `mode`."""
    modes = ("none", "selective", "full")
    stronger = modes[modes.index(mode) + 1 :] if mode in modes else ("full",)
    lever = []
    for name in stronger:
        flags = ("--activation-checkpointing", name)
        lever.append(Value(flags, dict(activation_checkpointing=name)))
    return lever


def _smaller_batches(options: Options, processes: int) -> Lever:
    """Return smaller micro-batches, with as many more of them per step."""
    # Parts of a batch: GPUs that share layers, or the tokens of rows, have one of them together.
    undivided = options.get("tensor_parallel_size", 1) * options.get("context_parallel_size", 1)
    shares = max(1, options["gpus"] // undivided)
    rows = options["batch_size"] // shares  # sequences of one share
    lever = []
    for smaller in _divisors(rows)[1:]:
        batch_size = smaller * shares
        accumulation = options["gradient_accumulation"] * (rows // smaller)
        flags = (
            "--batch-size",
            str(batch_size * processes),
            "--gradient-accumulation",
            str(accumulation),
        )
        keywords = dict(batch_size=batch_size, gradient_accumulation=accumulation)
        lever.append(Value(flags, keywords))
    return lever


def _smaller_state(options: Options, own_options: str) -> Lever:
    """Return AdamW with states of 8 bits, then without FP32 masters too; nothing for another optimizer."""
    name = options["optimizer"]
    if name not in ("adamw", "adamw8bit", "adamwfp8"):
        return []
    lever = []
    lowbit = name
    flags: tuple[str, ...] = ()
    if name == "adamw":
        lowbit = "adamw8bit"
        flags = ("--optimizer", lowbit)
        lever.append(Value(flags, dict(optimizer=lowbit)))
    rounded = {**options["optimizer_options"], "stochastic_rounding": True}
    rounded_text = ",".join(filter(None, (own_options, "stochastic_rounding=true")))
    lever.append(
        Value(
            (*flags, "--optimizer-options", rounded_text),
            dict(optimizer=lowbit, optimizer_options=rounded),
        )
    )
    return lever


def _divisors(number: int) -> list[int]:
    """Return the divisors of a number in descending order; of a very large one, only the largest and the smallest."""
    small = [size for size in range(1, min(math.isqrt(number), 10_000) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)}, reverse=True)
