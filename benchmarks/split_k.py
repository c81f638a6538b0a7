"""Find in how many runs cuBLAS sums K: forward products of Transformer Engine beside the emulated tensor cores.

    python benchmarks/split_k.py [--out RESULT.json] [--te]

For each shape a product of FP8 numbers, scales of 1, is computed on the GPU, through torch._scaled_mm or with --te
through te.Linear (whose workspace is larger). Its first 16 rows and 32 columns are compared with the emulated tensor
cores for each number of runs. The result has, for each shape, the numbers of runs that equal the GPU in every bit of
them; an empty list means that none does. `differing` is the share of elements that differ from one run.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from te_models.engine.emulated.tensor_core import (
    PROMOTION_K,
    TENSOR_CORES,
    Factor,
    tensor_core_matmul,
)
from te_models.inspect.environment import environment, require_gpu

ROWS = (16, 32, 64, 128, 256)
INNER = (1024, 2048, 4096, 8192, 16384)
COLUMNS = (32, 64, 128, 256, 512, 1024)
LARGEST = 2**27  # products of a shape: larger ones fill the GPU without a split
MOST_RUNS = 16
COMPARED = (
    min(ROWS),
    min(COLUMNS),
)  # rows and columns of each result, which all shapes of a K share
FLOOR = -6  # the exponent of E4M3's smallest normal number


def numbers(rows: int, k: int) -> Tensor:
    """Return FP8 numbers [rows, k] whose largest is that of the format, so that current scaling has scales of 1."""
    x = torch.randn(rows, k, device="cuda").mul_(8).clamp_(-448, 448)
    x[0, 0] = 448.0
    return x.to(torch.float8_e4m3fn)


def by_torch(a: Tensor, b: Tensor) -> Tensor:
    """Return a [M, K] times b [N, K] transposed, BF16 [M, N]."""
    one = torch.ones((), device="cuda")
    return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)


def by_te(a: Tensor, b: Tensor) -> Tensor:
    """Return the same product as te.Linear computes it."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling

    module = te.Linear(b.shape[1], b.shape[0], bias=False, params_dtype=torch.bfloat16)
    with torch.no_grad():
        module.weight.copy_(b.bfloat16())
        with te.fp8_autocast(enabled=True, fp8_recipe=Float8CurrentScaling()):
            return module(a.bfloat16())


def emulated(a: Tensor, b: Tensor) -> dict[int, Tensor]:
    """Return the compared part of a [M, K] times b [N, K] transposed for each number of runs, BF16."""
    rows, columns = COMPARED
    left = Factor.of(a[:rows].float(), FLOOR)
    right = Factor.of(b[:columns].float(), FLOOR)
    products = {}
    for splits in range(1, min(MOST_RUNS, a.shape[1] // PROMOTION_K) + 1):
        product = tensor_core_matmul(left, right, False, TENSOR_CORES["hopper"], splits)
        products[splits] = product.bfloat16()
    return products


def main() -> None:
    """Compare, print a table, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--te", action="store_true", help="through te.Linear")
    options = parser.parse_args()
    require_gpu()
    compute = by_te if options.te else by_torch
    console = Console()
    torch.manual_seed(0)
    rows = []
    for k in INNER:
        a = numbers(max(ROWS), k)
        b = numbers(max(COLUMNS), k)
        products = emulated(a, b)  # once per K: the sums of an element depend on K alone
        for m, n in itertools.product(ROWS, COLUMNS):
            if m * k * n > LARGEST:
                continue
            out = compute(a[:m], b[:n])[: COMPARED[0], : COMPARED[1]]
            found = [splits for splits, product in products.items() if torch.equal(product, out)]
            differing = (products[1] != out).float().mean().item()
            rows.append(dict(m=m, k=k, n=n, runs=found, differing=round(differing, 4)))
            console.print(f"{m:5} x {k:6} x {n:5}: {found}")
    if options.out:
        how = "te.Linear" if options.te else "torch._scaled_mm"
        result = dict(environment=environment(), product=how, shapes=rows)
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
