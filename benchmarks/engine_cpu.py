"""te.Linear on the emulated engine against nn.Linear in FP32, forward and backward, on this machine's CPU.

    python benchmarks/engine_cpu.py [IN OUT ROWS]

All layers take turns within one run, so that a busy machine slows all of them; the table gives medians and ratios.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

import te_models.engine.emulated as te
from te_models.engine.emulated import recipe as R

RECIPES: dict[str, R.Recipe | None] = {
    "bf16": None,
    "delayed": R.DelayedScaling(),
    "current": R.Float8CurrentScaling(),
    "blockwise": R.Float8BlockScaling(),
    "mxfp8": R.MXFP8BlockScaling(),
    "nvfp4": R.NVFP4BlockScaling(),
}


def passes(n_in: int, n_out: int, rows: int) -> dict[str, Callable[[], None]]:
    """One forward and backward of nn.Linear ("fp32") and of te.Linear under each recipe, with BF16 parameters."""
    x, g = torch.randn(rows, n_in), torch.randn(rows, n_out)
    plain, x32 = nn.Linear(n_in, n_out), x.clone().requires_grad_()
    made: dict[str, Callable[[], None]] = {"fp32": lambda: plain(x32).backward(g)}
    for name, recipe in RECIPES.items():
        layer = te.Linear(n_in, n_out, params_dtype=torch.bfloat16)
        made[name] = partial(one_pass, layer, recipe, x.bfloat16().requires_grad_(), g.bfloat16())
    return made


def one_pass(layer: te.Linear, recipe: R.Recipe | None, x: torch.Tensor, g: torch.Tensor) -> None:
    """Forward under the recipe (None: no autocast) and backward."""
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = layer(x)
    y.backward(g)


def timed(
    made: dict[str, Callable[[], None]], rounds: int, warm_up: int = 2
) -> dict[str, list[float]]:
    """Seconds of each pass, ascending; the passes take turns."""
    times: dict[str, list[float]] = {name: [] for name in made}
    for i in range(warm_up + rounds):
        for name, run in made.items():
            start = time.perf_counter()
            run()
            if i >= warm_up:
                times[name].append(time.perf_counter() - start)
    return {name: sorted(values) for name, values in times.items()}


def main() -> None:
    """Print the table."""
    sizes = [int(value) for value in sys.argv[1:4]] or [1024, 1024, 512]
    seconds = {
        name: statistics.median(times) for name, times in timed(passes(*sizes), rounds=15).items()
    }
    print(f"in={sizes[0]} out={sizes[1]} rows={sizes[2]} threads={torch.get_num_threads()}")
    for name, value in seconds.items():
        print(f"{name:10} {value * 1e3:8.2f} ms  {value / seconds['fp32']:5.2f} x nn.Linear FP32")


if __name__ == "__main__":
    main()
