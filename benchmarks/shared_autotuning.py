"""Triton's autotuning in a minute, for packages whose kernels have hundreds of variants.

An autotuner compiles and times its variants one after the other: Kimi Delta Attention's take many minutes. Here many
processes first compile a share of the variants each, and time none of them: timings of processes that share a GPU
would be as slow as they are wrong. Then one process, alone on the GPU, times them all. Triton keeps both the compiled
kernels and the chosen variants on disk, where later processes find them.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from typing import Any

# Their kernels' chosen variants are reported.
PACKAGES = ("fla", "mamba_ssm")
# A launch is repeated for this many milliseconds before and while a variant is timed.
WARM_UP_MS = 5
TIMED_MS = 20


def tune_together(
    step: Callable[..., None],
    name: str,
    processes: int,
    compile_seconds: float,
    time_seconds: float,
) -> dict[str, Any]:
    """Compile the kernels that `step(name)` launches in many processes, then time their variants in one.

    Args:
        step: a function of a module, which launches the kernels; what it raises ends its process alone.
        name: its argument.
        processes: how many compile; they share the GPU's memory.
        compile_seconds: a process that compiles for longer is stopped; what it compiled by then stays on disk.
        time_seconds: the same for the process that times; a kernel whose variants were all timed keeps the result.

    Returns:
        The seconds that both took, and under "chosen" the fastest variant of each kernel.
    """
    # Read by Triton in every process that starts from here: timings of all packages' kernels are kept.
    os.environ["TRITON_CACHE_AUTOTUNING"] = "1"
    spawn = multiprocessing.get_context("spawn")
    begun = time.monotonic()
    workers = [
        spawn.Process(target=_compile_share, args=(step, name, share, processes), daemon=True)
        for share in range(processes)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(max(0.0, begun + compile_seconds - time.monotonic()))
        worker.kill()
    compiled = time.monotonic()
    ours, theirs = spawn.Pipe()
    worker = spawn.Process(target=_time_all, args=(step, name, theirs), daemon=True)
    worker.start()
    theirs.close()
    chosen = {}
    try:
        if ours.poll(time_seconds):
            chosen = ours.recv()
    except EOFError:
        pass
    worker.kill()
    return {
        "compile_seconds": compiled - begun,
        "time_seconds": time.monotonic() - compiled,
        "chosen": chosen,
    }


def _compile_share(step: Callable[..., None], name: str, share: int, processes: int) -> None:
    """Run `step`; of each kernel's variants compile those of this share, and choose any that runs."""
    from triton.runtime.autotuner import Autotuner

    prune = Autotuner.prune_configs
    bench = Autotuner._bench
    left: dict[int, int] = {}
    runs: set[int] = set()

    def rotated(self: Any, options: dict[str, Any]) -> list[Any]:
        configs = prune(self, options)
        first = len(configs) * share // processes
        left[id(self)] = math.ceil(len(configs) / processes)
        runs.discard(id(self))
        return configs[first:] + configs[:first]

    def compiled(self: Any, *given: Any, config: Any, **options: Any) -> list[float]:
        if left[id(self)] <= 0 and id(self) in runs:
            return [2.0] * 3
        left[id(self)] -= 1
        took = bench(self, *given, config=config, **options)
        if took[0] < math.inf:
            runs.add(id(self))
        return took

    def once(call: Callable[[], None], **options: Any) -> list[float]:
        call()
        return [1.0] * 3

    def never_kept(self: Any, key: Any, configs: Any, run: Callable[[], None]) -> bool:
        run()
        return False

    Autotuner.prune_configs = rotated
    Autotuner._bench = compiled
    Autotuner.do_bench = property(lambda self: once)
    Autotuner.check_disk_cache = never_kept
    step(name)


def _time_all(step: Callable[..., None], name: str, connection: Any) -> None:
    """Run `step` with its kernels' variants timed; send the fastest of each kernel."""
    import triton
    from triton.runtime.autotuner import Autotuner

    def timed(call: Callable[[], None], **options: Any) -> Any:
        return triton.testing.do_bench(call, warmup=WARM_UP_MS, rep=TIMED_MS, **options)

    Autotuner.do_bench = property(lambda self: timed)
    step(name)
    chosen = {}
    for module_name in [module for module in sys.modules if module.split(".")[0] in PACKAGES]:
        for kernel in list(vars(sys.modules[module_name]).values()):
            while hasattr(kernel, "fn") and not isinstance(kernel, Autotuner):
                kernel = kernel.fn
            if isinstance(kernel, Autotuner) and kernel.cache:
                key = f"{kernel.base_fn.__module__}.{kernel.base_fn.__name__}"
                chosen[key] = sorted({str(config) for config in kernel.cache.values()})
    connection.send(chosen)
