"""The smallest change of a run's options that makes its memory fit, found with the memory plan."""

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from te_models.errors import UsageError
from te_models.planning.memory_plan import MemoryPlan
from te_models.planning.parameter_bytes import has_masters

MOST = 4  # changes at once
LEAST_SEQ_LEN = 256  # sequences are not shortened below this to save memory

Options = Mapping[str, Any]  # fields of te_models.planning.planned_run.PlannedRun
Value = tuple[tuple[str, ...], dict[str, Any]]  # flags, and their keywords
Plan = Callable[..., MemoryPlan]  # of the run, given keywords that differ from its own


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

    def needed(values: Sequence[Value]) -> float:
        try:
            return plan(
                **{name: value for _, keywords in values for name, value in keywords.items()}
            ).peak.total
        except UsageError:
            return math.inf

    def least(chosen: Sequence[list[Value]]) -> float:
        # The last value of a lever saves most, but FP8 primary weights cannot do without masters.
        nothing: list[Value] = [((), {})]
        ends = []
        for values in chosen:
            if "optimizer_options" in values[-1][1]:
                ends.append((values[:-1] or nothing) + values[-1:])
            else:
                ends.append(values[-1:])
        return min(needed(values) for values in itertools.product(*ends))

    possible = _levers(options, plan().recipe.quantized, processes, own_options)
    levers = [values for values in possible if not fixed or not values[-1][1].keys() & set(fixed)]
    # FP32 sums of gradients come with smaller micro-batches, so these may need more
    without = [values for values in levers if "batch_size" not in values[-1][1]]
    if min(least(levers), least(without)) > available:
        return None
    for count in range(1, min(MOST, len(levers)) + 1):
        for chosen in itertools.combinations(levers, count):
            if least(chosen) > available:
                continue  # not even with the strongest value of each
            for values in itertools.product(*chosen):
                if (peak := needed(values)) <= available:
                    return Change(tuple(flag for flags, _ in values for flag in flags), int(peak))
    return None


def _levers(
    options: Options, quantized: bool, processes: int, own_options: str
) -> Iterator[list[Value]]:
    """Yield the changes that are possible, each as a list of values from the mildest on."""
    modes = ("none", "selective", "full")
    mode = options["activation_checkpointing"]
    if stronger := modes[modes.index(mode) + 1 :] if mode in modes else ("full",):
        yield [
            (("--activation-checkpointing", m), dict(activation_checkpointing=m)) for m in stronger
        ]
    batch = options["batch_size"]
    gpus = options["gpus"]
    # Parts of a batch: GPUs that share layers, or the tokens of rows, have one of them together.
    undivided = options.get("tensor_parallel_size", 1) * options.get("context_parallel_size", 1)
    shares = max(1, gpus // undivided)
    parts = options["gradient_accumulation"]
    if smaller := _divisors(batch // shares)[1:]:
        values: list[Value] = []
        for size in smaller:
            current = dict(
                batch_size=size * shares, gradient_accumulation=parts * (batch // shares // size)
            )
            all_rows = str(current["batch_size"] * processes)
            accumulation = str(current["gradient_accumulation"])
            arguments = ("--batch-size", all_rows, "--gradient-accumulation", accumulation)
            values.append((arguments, current))
        yield values
    masters = has_masters(options["optimizer_options"])
    if not options["fp8_params"] and quantized and (masters or options["lora_rank"]):
        yield [(("--fp8-params",), dict(fp8_params=True))]
    name = options["optimizer"]
    if name in ("adamw", "adamw8bit", "adamwfp8") and masters and not options["lora_rank"]:
        lowbit = "adamw8bit" if name == "adamw" else name
        flags = ("--optimizer", lowbit) if name == "adamw" else ()
        text = ",".join(filter(None, (own_options, "stochastic_rounding=true")))
        rounded = {**options["optimizer_options"], "stochastic_rounding": True}
        narrow = (
            (*flags, "--optimizer-options", text),
            dict(optimizer=lowbit, optimizer_options=rounded),
        )
        yield [(flags, dict(optimizer=lowbit)), narrow] if flags else [narrow]
    if not options["optimizer_offload"] and not options["lora_rank"] and gpus == 1:
        yield [(("--optimizer-offload",), dict(optimizer_offload=True))]
    if not options["activation_offload"]:
        yield [(("--activation-offload",), dict(activation_offload=True))]
    if not options["lora_rank"]:
        yield [(("--lora", "16"), dict(lora_rank=16))]
    lengths = []
    for part in (2, 4, 8):
        if options["seq_len"] // part >= LEAST_SEQ_LEN:
            lengths.append(options["seq_len"] // part)
    if lengths:
        yield [(("--seq-len", str(length)), dict(seq_len=length)) for length in lengths]


def _divisors(number: int) -> list[int]:
    """Return the divisors of a number in descending order; of a very large one, only the largest and the smallest."""
    small = [size for size in range(1, min(math.isqrt(number), 10_000) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)}, reverse=True)
