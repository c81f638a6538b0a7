"""te.Linear on the emulated engine against nn.Linear in BF16, forward and backward, on a GPU.

    python benchmarks/engine_gpu.py OUT.json

"bf16" is the emulated te.Linear without a recipe. Each recipe runs with the Triton kernels and without them ("plain").
Times are medians of passes in turns with nn.Linear's, each from an idle device to an idle device, so that launches
count: `ms`, of which the host was busy for `host_ms`; `ratio` is to nn.Linear's in the same turns. `launches` are the
kernels, copies and fills of one pass, `waits` how often the host waited for the device within it.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from engine_cpu import RECIPES
from torch.profiler import ProfilerActivity, profile

import te_models.engine.emulated as te
from te_models.engine.emulated import recipe as R
from te_models.inspect.environment import environment, require_gpu
from te_models.numerics.fused import fused

REFERENCE = "nn.Linear bf16"
SHAPES = ((512, 1024, 1024), (8192, 4096, 4096))  # rows, in, out
LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaMemcpy", "cudaMemset")


def one_pass(
    layer: te.Linear, recipe: R.Recipe | None, x: torch.Tensor, g: torch.Tensor, kernels: bool
) -> None:
    """Forward under the recipe (None: no autocast) and backward."""
    with fused(kernels):
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = layer(x)
        y.backward(g)


def timed(
    runs: list[Callable[[], None]], rounds: int = 30, warm_up: int = 5
) -> list[tuple[float, float]]:
    """Median seconds of each run, and of its part on the host; the runs take turns."""
    times: list[list[tuple[float, float]]] = [[] for _ in runs]
    for i in range(warm_up + rounds):
        for run, found in zip(runs, times, strict=True):
            torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            host = time.perf_counter() - start
            torch.cuda.synchronize()
            if i >= warm_up:
                found.append((time.perf_counter() - start, host))
    return [
        tuple(statistics.median(column) for column in zip(*found, strict=True)) for found in times
    ]


def counted(run: Callable[[], None]) -> dict[str, int]:
    """Launches and waits of one run."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        run()
    calls = {event.key: event.count for event in found.key_averages()}
    return {
        "launches": sum(count for name, count in calls.items() if name.startswith(LAUNCHES)),
        "waits": sum(
            count
            for name, count in calls.items()
            if name.startswith(("cudaStreamSync", "cudaEventSync"))
        ),
    }


def measured(rows: int, n_in: int, n_out: int) -> dict[str, dict[str, Any]]:
    """A row for each recipe, with the kernels and ("plain") without."""
    x = torch.randn(rows, n_in, device="cuda").bfloat16().requires_grad_()
    g = torch.randn(rows, n_out, device="cuda").bfloat16()
    plain = torch.nn.Linear(n_in, n_out, bias=False, device="cuda", dtype=torch.bfloat16)
    reference, found = (lambda: plain(x).backward(g)), {}
    for name, recipe in RECIPES.items():
        for kernels in (True, False) if recipe is not None else (True,):
            layer = te.Linear(n_in, n_out, bias=False, params_dtype=torch.bfloat16, device="cuda")
            run = partial(one_pass, layer, recipe, x, g, kernels)
            (base, base_host), (seconds, host) = timed([reference, run])
            row = {
                "ms": round(seconds * 1e3, 4),
                "host_ms": round(host * 1e3, 4),
                "ratio": round(seconds / base, 3),
            }
            found.setdefault(
                REFERENCE,
                {"ms": round(base * 1e3, 4), "host_ms": round(base_host * 1e3, 4), "ratio": 1.0},
            )
            found[name if kernels else f"{name} plain"] = row | counted(run)
            te.reset_fp8_state(
                layer
            )  # else its scales would be updated in the other recipes' passes
    return {REFERENCE: found.pop(REFERENCE) | counted(reference)} | found


def main() -> None:
    """Print the rows and write them."""
    require_gpu()
    found = {"x".join(map(str, shape)): measured(*shape) for shape in SHAPES}
    for shape, rows in found.items():
        for name, row in rows.items():
            print(
                f"{shape:16} {name:16} " + "  ".join(f"{key} {value}" for key, value in row.items())
            )
    Path(sys.argv[1]).write_text(
        json.dumps({"environment": environment(), "linear": found}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
