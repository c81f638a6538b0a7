"""Triton's autotuning over many processes, for packages whose kernels have hundreds of variants.

An autotuner compiles its variants one after the other: minutes for Kimi Delta Attention. Here each process begins at
another place of every autotuner's list, so that together they fill Triton's cache of compiled kernels, and a process
that starts after them finds nearly all variants there.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from typing import Any


def compile_together(
    step: Callable[..., None], arguments: Sequence[Any], processes: int, seconds: float
) -> float:
    """Run `step(*arguments)` once in each of several processes, which divide the variants; return the seconds it took.

    Args:
        step: a function of a module, which launches the kernels; what it raises ends its process alone.
        arguments: of `step`, picklable.
        processes: how many.
        seconds: a process that takes longer is stopped; what it compiled by then stays in the cache.
    """
    begun = time.monotonic()
    spawn = multiprocessing.get_context("spawn")
    workers = []
    for share in range(processes):
        worker = spawn.Process(
            target=_run_share, args=(step, tuple(arguments), share / processes), daemon=True
        )
        worker.start()
        workers.append(worker)
    for worker in workers:
        worker.join(max(0.0, begun + seconds - time.monotonic()))
        worker.kill()
    return time.monotonic() - begun


def _run_share(step: Callable[..., None], arguments: tuple[Any, ...], begin: float) -> None:
    """Run `step` with every autotuner beginning at this fraction of its list."""
    from triton.runtime.autotuner import Autotuner

    run = Autotuner.run
    turned: set[int] = set()

    def turned_run(self: Any, *given: Any, **options: Any) -> Any:
        if id(self) not in turned:
            turned.add(id(self))
            first = int(len(self.configs) * begin)
            self.configs = self.configs[first:] + self.configs[:first]
        return run(self, *given, **options)

    Autotuner.run = turned_run
    step(*arguments)
