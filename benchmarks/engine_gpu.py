"""te.Linear on the emulated engine against nn.Linear in BF16, forward and backward, on a GPU.

    python benchmarks/engine_gpu.py OUT.json

"bf16" is the emulated te.Linear without a recipe. Each recipe runs with the Triton kernels and without them ("plain"). Times are medians of 20 passes that take turns, each
from an idle device to an idle device, so that launches count.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from engine_cpu import RECIPES

import te_models.engine.emulated as te
from te_models.engine.emulated import recipe as R
from te_models.engine.emulated.fused import fused
from te_models.environment import environment

REFERENCE = "nn.Linear bf16"
SHAPES = ((512, 1024, 1024), (8192, 4096, 4096))  # rows, in, out


def passes(rows: int, n_in: int, n_out: int) -> dict[str, Callable[[], None]]:
    """A forward and backward under each recipe, with the kernels and ("plain") without."""
    x = torch.randn(rows, n_in, device="cuda").bfloat16().requires_grad_()
    g = torch.randn(rows, n_out, device="cuda").bfloat16()
    reference = torch.nn.Linear(n_in, n_out, bias=False, device="cuda", dtype=torch.bfloat16)
    made: dict[str, Callable[[], None]] = {REFERENCE: lambda: reference(x).backward(g)}
    for name, recipe in RECIPES.items():
        for kernels in (True, False) if recipe is not None else (True,):
            layer = te.Linear(n_in, n_out, bias=False, params_dtype=torch.bfloat16, device="cuda")
            made[name if kernels else f"{name} plain"] = partial(one_pass, layer, recipe, x, g, kernels)
    return made


def one_pass(layer: te.Linear, recipe: R.Recipe | None, x: torch.Tensor, g: torch.Tensor, kernels: bool) -> None:
    """Forward under the recipe (None: no autocast) and backward."""
    with fused(kernels):
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = layer(x)
        y.backward(g)


def timed(made: dict[str, Callable[[], None]], rounds: int = 20, warm_up: int = 5) -> dict[str, float]:
    """Median seconds of each pass; the passes take turns."""
    times: dict[str, list[float]] = {name: [] for name in made}
    for i in range(warm_up + rounds):
        for name, run in made.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            torch.cuda.synchronize()
            if i >= warm_up:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Print the ratios and write them."""
    found = {}
    for shape in SHAPES:
        seconds = timed(passes(*shape))
        found["x".join(map(str, shape))] = {
            name: {"ms": round(value * 1e3, 4), "ratio_to_nn_linear": round(value / seconds[REFERENCE], 3)}
            for name, value in seconds.items()
        }
    for shape, rows in found.items():
        for name, row in rows.items():
            print(f"{shape:16} {name:16} {row['ms']:9.3f} ms  {row['ratio_to_nn_linear']:6.2f} x {REFERENCE}")
    Path(sys.argv[1]).write_text(json.dumps({"environment": environment(), "linear": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
