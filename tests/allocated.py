"""The memory that a piece of work takes on the CPU, as PyTorch's allocator counts it."""

import gc
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Allocated(NamedTuple):
    """The result of a piece of work, and the bytes that it held: `most` at one time, and `left` at its end."""

    result: Any
    most: int
    left: int


def allocated(work: Callable[[], Any]) -> Allocated:
    """Run `work` and return what it returned with the bytes of all tensors that it made on the CPU, views once."""
    gc.collect()  # what was there before is freed before
    with torch.profiler.profile(profile_memory=True) as profiler:
        result = work()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    sums = list(itertools.accumulate(changes, initial=0))
    return Allocated(result, max(sums), sums[-1])
