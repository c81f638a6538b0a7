"""The products of experts on a GPU with tiles of every kind: milliseconds and TFLOP/s, and whether the bits are equal.

    python benchmarks/expert_products.py --out benchmarks/results/expert_products_h100.json    # about 2 minutes

Rows are divided among experts at random, as a fresh router does. "pointers" reads operands as any GPU can, "tma" by
Hopper's copy engine.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from te_models.files.atomic import first_line
from te_models.inspect.environment import environment, require_gpu
from te_models.kernels.expert_block_products_triton import block_rows_times, block_weights_from
from te_models.kernels.expert_blocks_triton import cast_blocks, cast_weight_blocks
from te_models.kernels.expert_cast_triton import Matrices
from te_models.kernels.grouped_gemm_triton import ExpertMatrices, Tiles, rows_times, weights_from
from te_models.kernels.groups import Groups

# experts, rows, the inputs and outputs of gate_up_proj, and the inputs of down_proj
SHAPES = {"olmoe": (64, 98304, 2048, 2048, 1024), "gpt-oss": (32, 32768, 2880, 5760, 2880)}
E4M3 = torch.float8_e4m3fn
BF16_TILES = [
    Tiles(128, 256, 64, 3, 8, False),
    Tiles(128, 256, 64, 3, 8, True),
    Tiles(128, 256, 64, 4, 8, True),
    Tiles(256, 128, 64, 4, 8, True),
]
FP8_TILES = [
    Tiles(128, 256, 128, 3, 8, False),
    Tiles(128, 256, 128, 3, 8, True),
    Tiles(128, 256, 128, 4, 8, True),
    Tiles(256, 128, 128, 3, 8, True),
]
PRECISE_TILES = [
    Tiles(128, 128, 128, 3, 4, False),
    Tiles(128, 128, 128, 3, 4, True),
    Tiles(128, 128, 128, 4, 8, True),
    Tiles(128, 256, 128, 3, 16, True),
]
BLOCK_TILES = [
    Tiles(128, 128, 128, stages, warps) for stages, warps in ((3, 4), (3, 8), (4, 8), (6, 8))
] + [Tiles(64, 128, 128, 3, 4), Tiles(64, 128, 128, 4, 4)]


def groups_of(experts: int, rows: int) -> Groups:
    """Return random numbers of rows, multiples of 16."""
    made = torch.Generator().manual_seed(0)
    share = torch.rand(experts, generator=made) + 0.5
    counts = (share / share.sum() * rows).int() // 16 * 16
    return Groups.of(counts.tolist(), torch.device("cuda"))


def bytes_like(*shape: int) -> Tensor:
    """Return FP8 data of random values."""
    return torch.randn(*shape, device="cuda").to(E4M3)


def timed(run: Callable[[], Tensor]) -> float:
    """Return the median milliseconds of seven calls, which follow each other."""
    run()
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in times)


def products(shape: str) -> dict[str, tuple[float, list[Tiles], Callable[[Tiles], Tensor]]]:
    """Return name -> FLOPs, tiles to try, and the product as a function of the tile."""
    experts, rows, inputs, outputs, hidden = SHAPES[shape]
    groups = groups_of(experts, rows)
    rows = groups.most
    one = torch.ones(experts, device="cuda")
    high = ExpertMatrices(torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16))
    slopes = ExpertMatrices(torch.randn(rows, outputs, device="cuda", dtype=torch.bfloat16))
    w = ExpertMatrices(torch.randn(experts * outputs, inputs, device="cuda", dtype=torch.bfloat16))
    tokens = ExpertMatrices(torch.randn(rows // 8, inputs, device="cuda", dtype=torch.bfloat16))
    source = torch.randint(0, rows // 8, (rows,), device="cuda")
    bf16: dict[str, Any] = dict(precise=False, dtype=torch.bfloat16)
    found: dict[str, tuple[float, list[Tiles], Callable[[Tiles], Tensor]]] = {}

    def times(
        a: ExpertMatrices, b: ExpertMatrices, width: int, **how: Any
    ) -> Callable[[Tiles], Tensor]:
        return lambda tiles: rows_times(a, b, groups, width, tiles=tiles, **how)

    def sums(
        a: ExpertMatrices, b: ExpertMatrices, *sizes: int, **how: Any
    ) -> Callable[[Tiles], Tensor]:
        return lambda tiles: weights_from(a, b, groups, *sizes, tiles=tiles, **how)

    flops = 2.0 * rows * inputs * outputs
    run = times(high, w, outputs, down=False, **bf16)
    found["bf16 forward"] = flops, BF16_TILES, run
    run = times(tokens, w, outputs, down=False, source=source, **bf16)
    found["bf16 forward, gathered"] = flops, BF16_TILES[:1], run
    found["bf16 dx"] = flops, BF16_TILES, times(slopes, w, inputs, down=True, **bf16)
    found["bf16 dw"] = flops, BF16_TILES[:1], sums(slopes, high, outputs, inputs, **bf16)
    for label, wide, out in (("", inputs, outputs), (" down", hidden, inputs)):
        a = ExpertMatrices(bytes_like(rows, wide), one)
        b = ExpertMatrices(bytes_like(experts * out, wide), one)
        of_out, of_in = (
            ExpertMatrices(bytes_like(n, groups.aligned.most), one) for n in (out, wide)
        )
        flops = 2.0 * rows * wide * out
        for precise in (False, True):
            tiles = PRECISE_TILES if precise else FP8_TILES
            how: dict[str, Any] = dict(precise=precise, dtype=torch.bfloat16)
            name = f"fp8{label}{', precise' if precise else ''}"
            found[f"{name} rows"] = flops, tiles, times(a, b, out, down=False, **how)
            found[f"{name} dw"] = flops, tiles[:1], sums(of_out, of_in, out, wide, **how)
    if inputs % 128 == 0:
        x = cast_blocks(Matrices(high.data, groups))[0]
        dy = cast_blocks(Matrices(slopes.data, groups))[0]
        places = torch.arange(experts, device="cuda") * outputs * inputs
        weights = cast_weight_blocks(w.data[:outputs], places)
        how = dict(dtype=torch.bfloat16)

        def block_rows(tiles: Tiles) -> Tensor:
            return block_rows_times(x, weights, groups, backward=False, tiles=tiles, **how)

        def block_weights(tiles: Tiles) -> Tensor:
            return block_weights_from(dy, x, groups, tiles=tiles, **how)

        flops = 2.0 * rows * inputs * outputs
        found["blocks rows"] = flops, BLOCK_TILES, block_rows
        found["blocks dw"] = flops, BLOCK_TILES, block_weights
    return found


@click.command()
@click.option("--shapes", default=",".join(SHAPES), show_default=True)
@click.option("--only", default="", help="Products with this in their names.")
@click.option("--out", type=click.Path(path_type=Path))
def main(shapes: str, only: str, out: Path | None) -> None:
    """Measure every product with every tile."""
    require_gpu()
    result: dict[str, Any] = {"environment": environment(), "rows": []}
    for shape in shapes.split(","):
        for name, (flops, tiles, run) in products(shape).items():
            if only not in name:
                continue
            first = None
            for tile in tiles:
                row: dict[str, Any] = dict(shape=shape, product=name, tiles=tile._asdict())
                try:
                    value = run(tile)
                    first = value if first is None else first
                    row["equal"] = torch.equal(value, first)
                    row["ms"] = timed(lambda run=run, tile=tile: run(tile))
                    row["tflops"] = round(flops / row["ms"] / 1e9, 1)
                except Exception as error:  # a tile that does not fit, by any name
                    row["error"] = f"{type(error).__name__}: {first_line(error)}"[:160]
                result["rows"].append(row)
                text = f"{row.get('ms', 0):8.3f} ms {row.get('tflops', 0):7} TFLOP/s equal {row.get('equal')}"
                click.echo(f"{shape:8} {name:24} {tuple(tile)!s:34} {text} {row.get('error', '')}")
                if out is not None:
                    out.write_text(json.dumps(result, indent=1) + "\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
