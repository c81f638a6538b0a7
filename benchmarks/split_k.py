"""Find in how many runs cuBLAS sums K in products of FP8 numbers, by the bits of results and by asking cuBLAS.

    python benchmarks/split_k.py bits --out benchmarks/results/split_k_bits_h100.json
    python benchmarks/split_k.py choices --out benchmarks/results/split_k_choices_h100.json      # needs mmaemu

`bits` computes products of each shape through te.Linear: forward, input gradients and weight gradients, with scales of
1. The first 16 rows and 32 columns of each are compared with the emulated tensor cores for each number of runs. The
result has, for each shape, the numbers of runs that equal the GPU in every bit of them; an empty list means that none
does. `differing` is the share of elements that differ from one run.

`choices` asks cuBLAS for the algorithm that it would take, without running it, and so for many more shapes. The package
mmaemu has the calls. Rows M, columns N and K are those of a product of [M, K] and [N, K].
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from te_models.engine.emulated.tensor_core import (
    PROMOTION_K,
    TENSOR_CORES,
    Factor,
    tensor_core_matmul,
)
from te_models.inspect.environment import environment, require_gpu

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
# Exponents of the smallest normal numbers, and the largest numbers.
FLOORS = {E4M3: -6, E5M2: -14}
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
NAMES = {E4M3: "e4m3", E5M2: "e5m2"}

BF16 = torch.bfloat16
FP32 = torch.float32
# Product -> formats of [M, K] and of [N, K], whether it is summed with split accumulators, and the result's dtype. With
# split accumulators runs differ in the order of FP32 additions alone, which BF16 seldom shows.
PRODUCTS: dict[str, tuple[torch.dtype, torch.dtype, bool, torch.dtype]] = {
    "forward": (E4M3, E4M3, False, BF16),
    "input gradient": (E5M2, E4M3, True, BF16),
    "input gradient in FP32": (E5M2, E4M3, True, FP32),
    "weight gradient in FP32": (E5M2, E4M3, True, FP32),
}

# Shapes of `bits`.
ROWS = (16, 32, 48, 64, 128, 256, 512, 1024)
COLUMNS = (32, 64, 96, 128, 256, 512, 1024, 2048)
INNER = (2048, 4096, 5120, 5632, 6144, 8192, 10240, 12288, 14336, 16384, 24576, 32768)
COMPARED = (
    min(ROWS),
    min(COLUMNS),
)  # rows and columns of each result, which all shapes of a K share
MOST_RUNS = 16

# Shapes of `choices`.
ASKED_ROWS = (
    8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 1024, 1536, 2048, 4096,
)  # fmt: skip
ASKED_COLUMNS = (
    16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 1024, 1536, 2048, 3072, 4096,
)  # fmt: skip
ASKED_INNER = (
    2048, 4096, 4608, 5120, 5136, 5248, 5376, 5472, 5504, 5632, 5760, 6144, 7168, 7680, 7808, 8064, 8192, 8320, 9216,
    10240, 10368, 10752, 11264, 12288, 13312, 13824, 14336, 16384, 18944, 20480, 22016, 24576, 28672, 32768, 49152,
    65536, 131072,
)  # fmt: skip
WORKSPACE = 32 << 20  # bytes that Transformer Engine and PyTorch give cuBLAS on Hopper
ALIGNMENT = 256  # bytes, of Transformer Engine's operands


def numbers(rows: int, k: int, dtype: torch.dtype) -> Tensor:
    """Return FP8 numbers [rows, k] whose largest is that of the format, so that current scaling has scales of 1."""
    largest = LARGEST[dtype]
    x = torch.randn(rows, k, device="cuda").mul_(8).clamp_(-largest, largest)
    x[0, 0] = largest
    return x.to(dtype)


def product(kind: str, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a [M, K] times b [N, K] transposed, [M, N] in `dtype`, as te.Linear computes it."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling

    def linear(weight: Tensor, x: Tensor) -> tuple[Any, Tensor]:
        outputs, inputs = weight.shape
        module = te.Linear(inputs, outputs, bias=False, params_dtype=dtype)
        with torch.no_grad():
            module.weight.copy_(weight)
        with te.fp8_autocast(enabled=True, fp8_recipe=Float8CurrentScaling()):
            return module, module(x)

    left = a.to(dtype)
    right = b.to(dtype)
    if kind == "forward":
        with torch.no_grad():
            return linear(right, left)[1]
    if kind.startswith("input gradient"):
        x = torch.zeros(len(a), len(b), device="cuda", dtype=dtype, requires_grad=True)
        _, out = linear(right.t(), x)
        out.backward(left)
        assert x.grad is not None
        return x.grad
    weight = torch.zeros(len(a), len(b), device="cuda", dtype=dtype)
    module, out = linear(weight, right.t().contiguous())
    out.backward(left.t().contiguous())
    return module.weight.grad


def emulated(a: Tensor, b: Tensor, promote: bool, dtype: torch.dtype) -> dict[int, Tensor]:
    """Return the compared part of a [M, K] times b [N, K] transposed for each number of runs, in `dtype`."""
    rows, columns = COMPARED
    left = Factor.of(a[:rows].float(), FLOORS[a.dtype])
    right = Factor.of(b[:columns].float(), FLOORS[b.dtype])
    products = {}
    for splits in range(1, min(MOST_RUNS, a.shape[1] // PROMOTION_K) + 1):
        total = tensor_core_matmul(left, right, promote, TENSOR_CORES["hopper"], splits)
        products[splits] = total.to(dtype)
    return products


@click.group(help=__doc__)
def main() -> None:
    """Find in how many runs cuBLAS sums K."""


@main.command()
@click.option("--largest", default=2**19, show_default=True, help="Largest M * N.")
@click.option("--out", type=click.Path(path_type=Path))
def bits(largest: int, out: Path | None) -> None:
    """Compare results with each number of runs, print a line per shape, and write the result."""
    require_gpu()
    torch.manual_seed(0)
    rows: dict[str, list[dict[str, Any]]] = {}
    for (kind, (left, right, promote, dtype)), k in itertools.product(PRODUCTS.items(), INNER):
        a = numbers(max(ROWS), k, left)
        b = numbers(max(COLUMNS), k, right)
        products = emulated(
            a, b, promote, dtype
        )  # once per K: the sums of an element depend on K alone
        for m, n in itertools.product(ROWS, COLUMNS):
            if m * n > largest:
                continue
            found = product(kind, a[:m], b[:n], dtype)[: COMPARED[0], : COMPARED[1]]
            runs = [splits for splits, expected in products.items() if torch.equal(expected, found)]
            differing = round((products[1] != found).float().mean().item(), 4)
            rows.setdefault(kind, []).append(dict(m=m, k=k, n=n, runs=runs, differing=differing))
        click.echo(
            f"{kind}, K = {k}: {[(row['m'], row['n'], row['runs']) for row in rows[kind] if row['k'] == k]}"
        )
        if out is not None:
            result = dict(environment=environment(), product="te.Linear", shapes=rows)
            out.write_text(json.dumps(result) + "\n")


@main.command()
@click.option("--out", required=True, type=click.Path(path_type=Path))
def choices(out: Path) -> None:
    """Ask cuBLAS for its choice in every shape, and write the numbers of runs."""
    require_gpu()
    from mmaemu.platform import cublaslt

    torch.zeros(16, 16, device="cuda").mm(torch.zeros(16, 16, device="cuda"))  # loads cuBLAS
    settings: dict[str, dict[str, Any]] = {}
    for kind, (left, right, promote, dtype) in PRODUCTS.items():
        settings[kind] = dict(
            fmt_a=NAMES[left],
            fmt_b=NAMES[right],
            fast=not promote,
            out_dtype=str(dtype).removeprefix("torch."),
        )
    settings["forward with a bias"] = settings["forward"] | dict(bias="bfloat16")
    # The same formats, and the same call, as an input gradient's.
    del settings["weight gradient in FP32"]
    tables: dict[str, dict[int, list[list[int]]]] = {}
    tiles: dict[str, dict[int, list[list[int]]]] = {}
    for name, setting in settings.items():
        tables[name] = {}
        tiles[name] = {}
        for k in ASKED_INNER:
            answers = []
            for m in ASKED_ROWS:
                answers.append([
                    cublaslt.heuristic(m, n, k, workspace_bytes=WORKSPACE, align=ALIGNMENT, **setting)
                    for n in ASKED_COLUMNS
                ])  # fmt: skip
            tables[name][k] = [[answer["splitK"] for answer in line] for line in answers]
            tiles[name][k] = [[answer["tile"] for answer in line] for line in answers]
        click.echo(
            f"{name}: {sum(runs > 1 for t in tables[name].values() for line in t for runs in line)} split"
        )
        result = dict(
            environment=environment(), cublaslt=cublaslt.version(), sms=cublaslt.device_sm_count(), m=ASKED_ROWS,
            n=ASKED_COLUMNS, splits=tables, tiles=tiles,
        )  # fmt: skip
        out.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
