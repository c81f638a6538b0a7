"""Time the products of a step of decoding with many tiles: milliseconds, and bytes of the weight per second.

    python -m benchmarks.decode_tiles --out benchmarks/results/decode_tiles_h200.json     # about 4 minutes

Each time is the median of replays of a CUDA graph, whose launches multiply different weights, so that none of them
lies in the L2 cache. A result is compared with the result of the tile in use: both sum the same products in another
order. Kernels are compiled first, in several processes.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from te_models.inspect.environment import environment, require_gpu
from te_models.kernels import decode_product_triton
from te_models.kernels.decode import MOST_ROWS, StepActivation, StepLinear, StepNorm
from te_models.kernels.decode_split_triton import SplitTile, parts_of

MODES = ("bf16", "delayed", "current")
LAUNCHES = 12  # of a graph, at least
REPLAYS = 9
COLD = 160 * 2**20  # bytes of weights in a graph: three times the L2 cache of an H200
PROGRAMS = (1, 132, 264, 396, 528)  # that a product is divided into
IN_USE = decode_product_triton._split_tile


@dataclass(frozen=True)
class Shape:
    """A te.Linear of a model, and what is computed with it."""

    model: str
    name: str
    width: int
    outputs: int  # a gate and the channels that it opens are both counted
    normed: bool = False
    gated: bool = False
    added: bool = False  # to the residual stream


SHAPES = (
    Shape("llama-3.1-8b", "qkv", 4096, 6144, normed=True),
    Shape("llama-3.1-8b", "out", 4096, 4096, added=True),
    Shape("llama-3.1-8b", "gate_up", 4096, 28672, normed=True, gated=True),
    Shape("llama-3.1-8b", "down", 14336, 4096, added=True),
    Shape("qwen3-1.7b", "qkv", 2048, 4096, normed=True),
    Shape("qwen3-1.7b", "out", 2048, 2048, added=True),
    Shape("qwen3-1.7b", "gate_up", 2048, 12288, normed=True, gated=True),
    Shape("qwen3-1.7b", "down", 6144, 2048, added=True),
)


def tile_in_use(shape: Shape, mode: str) -> SplitTile:
    """Return the tile that `product` takes."""
    return IN_USE(shape.gated, shape.normed, mode != "bf16")


class Case(NamedTuple):
    """One product to time."""

    shape: Shape
    mode: str
    tokens: int
    tile: SplitTile

    @property
    def in_use(self) -> bool:
        """Return whether decoding uses this tile."""
        return self.tile == tile_in_use(self.shape, self.mode)

    @property
    def bytes(self) -> int:
        """The size of the weight."""
        size = 2 if self.mode == "bf16" else 1
        return self.shape.width * self.shape.outputs * size


def split_tiles(shape: Shape, mode: str) -> list[SplitTile]:
    """Return the tile in use, and others that divide the product into a reasonable number of programs."""
    in_use = tile_in_use(shape, mode)
    width = 64 if mode == "bf16" else 128
    loops = [
        # outputs, channels of an iteration, warps, stages
        (64, width, 4, 4),
        (64, width, 4, 6),
        (64, 2 * width, 4, 3),
        (64, 2 * width, 4, 4),
        (128, width, 4, 4),
        (128, width, 8, 4),
    ]
    tiles = [in_use]
    for loop in loops:
        parts = set()
        for programs in PROGRAMS:
            tile = SplitTile(*loop, programs=programs)
            count = parts_of(tile, shape.width, shape.outputs // (1 + shape.gated))
            if count not in parts and tile != in_use:
                tiles.append(tile)
            parts.add(count)
    return tiles


def cases(shapes: list[Shape], modes: list[str], tokens: list[int]) -> list[Case]:
    """Return what is timed; the tile in use comes first of each shape, mode and number of tokens."""
    found = []
    for shape in shapes:
        for mode in modes:
            for count in tokens:
                for tile in split_tiles(shape, mode):
                    found.append(Case(shape, mode, count, tile))
    return found


def to_compile(timed: list[Case]) -> list[Case]:
    """Return one case of each kernel among these."""
    first: dict[tuple[object, ...], Case] = {}
    for case in timed:
        shape = case.shape
        parts = parts_of(case.tile, shape.width, shape.outputs // (1 + shape.gated))
        tile = case.tile._replace(programs=1)
        key = (shape.normed, shape.gated, shape.added, case.mode, tile, parts)
        first.setdefault(key, case)
    return list(first.values())


class Product:
    """A product of `tokens` tokens with each of several weights."""

    def __init__(self, case: Case, weights: int) -> None:
        shape = case.shape
        self.case = case
        factory: dict[str, Any] = dict(dtype=torch.bfloat16, device="cuda")
        rows = math.ceil(case.tokens / 8) * 8
        self.x = torch.randn(rows, shape.width, **factory)
        self.x[case.tokens :] = 0
        self.norm = None
        if shape.normed:
            self.norm = StepNorm(torch.ones(shape.width, **factory), 1e-5, False)
        self.activation = StepActivation("silu", True) if shape.gated else None
        self.residual = torch.randn(rows, shape.outputs, **factory) if shape.added else None
        self.operands = [self.operand() for _ in range(weights)]

    def operand(self) -> StepLinear:
        """Return another weight."""
        shape = self.case.shape
        weight = torch.randn(shape.outputs, shape.width, dtype=torch.bfloat16, device="cuda")
        if self.case.mode == "bf16":
            return StepLinear(weight * shape.width**-0.5)
        codes = (weight * 64).to(torch.float8_e4m3fn).view(torch.uint8)
        inverse = torch.full((1,), shape.width**-0.5 / 64, device="cuda")
        scale = torch.full((1,), 64.0, device="cuda") if self.case.mode == "delayed" else None
        return StepLinear(codes, None, inverse, scale)

    def __call__(self, operand: StepLinear, tile: SplitTile) -> Tensor:
        """Multiply, with this tile."""
        decode_product_triton._split_tile = lambda *kind: tile
        return decode_product_triton.product(
            self.x,
            operand,
            self.case.tokens,
            norm=self.norm,
            activation=self.activation,
            residual=self.residual,
        )


def compile_kernels(case: Case) -> None:
    """Compile the kernels of a case into Triton's cache on disk, in a process of its own."""
    product = Product(case, 1)
    try:
        product(product.operands[0], case.tile)
    except OutOfResources:
        return


def milliseconds(run: Callable[[], object], launches: int) -> float:
    """Return the median time of one of the launches that `run` makes, in a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(REPLAYS + 1):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / launches)
    return statistics.median(times[1:])


def time_tile(product: Product, case: Case, exact: Tensor) -> dict[str, Any]:
    """Return a row of the result: the time of the case's tile, and its distance from the result of the tile in use."""
    tile = case.tile
    found = product(product.operands[0], tile)
    distance = float((found.double() - exact).norm() / exact.norm())

    def multiply_all() -> None:
        for operand in product.operands:
            product(operand, tile)

    ms = milliseconds(multiply_all, len(product.operands))
    return dict(
        model=case.shape.model,
        shape=case.shape.name,
        mode=case.mode,
        tokens=case.tokens,
        tile=list(tile),
        in_use=case.in_use,
        ms=ms,
        gigabytes_per_second=case.bytes / ms / 1e6,
        distance=distance,
    )


def describe(row: dict[str, Any]) -> str:
    """Return the line of a row."""
    case = f"{row['model']:12} {row['shape']:8} {row['mode']:8} {row['tokens']:2}"
    tile = f"{row['tile']!s:22} {'in use' if row['in_use'] else '':6}"
    return (
        f"{case} {tile} {row['ms']:.4f} ms {row['gigabytes_per_second']:5.0f} GB/s, "
        f"distance {row['distance']:.5f}"
    )


def best_per_layer(rows: list[dict[str, Any]]) -> list[str]:
    """Return lines with the sums of the products of a layer, by the tiles in use and by the fastest."""
    lines = []
    kinds = sorted({(row["model"], row["mode"], row["tokens"]) for row in rows})
    for model, mode, tokens in kinds:
        own: dict[str, float] = {}
        best: dict[str, dict[str, Any]] = {}
        for row in rows:
            if (row["model"], row["mode"], row["tokens"]) != (model, mode, tokens):
                continue
            shape = row["shape"]
            if row["in_use"]:
                own[shape] = row["ms"]
            if shape not in best or row["ms"] < best[shape]["ms"]:
                best[shape] = row
        total = sum(row["ms"] for row in best.values())
        lines.append(
            f"layer {model} {mode} {tokens}: in use {sum(own.values()):.4f}, best {total:.4f} ms"
        )
        for shape, row in best.items():
            lines.append(f"    in use {own[shape]:.4f}; best {describe(row)}")
    return lines


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--models", default="llama-3.1-8b,qwen3-1.7b", show_default=True)
@click.option("--modes", default="bf16,delayed", show_default=True, help="Of " + ", ".join(MODES))
@click.option("--tokens", default="4,8,16", show_default=True)
@click.option("--processes", default=14, show_default=True, help="That compile kernels.")
def main(out: Path, models: str, modes: str, tokens: str, processes: int) -> None:
    """Measure, print and write."""
    require_gpu()
    shapes = [shape for shape in SHAPES if shape.model in models.split(",")]
    counts = [int(count) for count in tokens.split(",")]
    if not all(2 < count <= MOST_ROWS for count in counts):
        raise click.UsageError(f"--tokens takes numbers from 3 to {MOST_ROWS}.")
    timed = cases(shapes, modes.split(","), counts)
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        pool.map(compile_kernels, to_compile(timed), chunksize=1)
    rows: list[dict[str, Any]] = []
    product: Product | None = None
    exact = torch.empty(0)
    for case in timed:
        if case.in_use:
            del product
            product = Product(case, max(LAUNCHES, math.ceil(COLD / case.bytes)))
            exact = product(product.operands[0], case.tile).double()
        assert product is not None
        try:
            row = time_tile(product, case, exact)
        except OutOfResources:
            continue
        rows.append(row)
        print(describe(row), flush=True)
    print("\n".join(best_per_layer(rows)))
    document = dict(environment=environment(), rows=rows)
    out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
