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
from te_models.inspect.environment import environment
from te_models.kernels.grouped_gemm_triton import Operand, Tiles, rows_times, weights_from
from te_models.kernels.groups import Groups

# experts, rows, the inputs and outputs of gate_up_proj, and the inputs of down_proj
SHAPES = {"olmoe": (64, 98304, 2048, 2048, 1024), "gpt-oss": (32, 32768, 2880, 5760, 2880)}
E4M3 = torch.float8_e4m3fn
BF16_TILES = [
    Tiles(128, 256, 64, stages, 8, tma) for tma, stages in ((False, 3), (True, 3), (True, 4))
] + [Tiles(256, 128, 64, 4, 8, True), Tiles(128, 128, 64, 4, 4, True)]
FP8_TILES = [
    Tiles(128, 256, 128, stages, 8, tma) for tma, stages in ((False, 3), (True, 3), (True, 4))
] + [Tiles(256, 128, 128, 3, 8, True), Tiles(128, 128, 128, 4, 4, True)]
PRECISE_TILES = [
    Tiles(128, 128, 128, 3, 4, False),
    Tiles(128, 128, 128, 3, 4, True),
    Tiles(128, 128, 128, 3, 8, True),
    Tiles(128, 128, 128, 5, 8, True),
    Tiles(128, 256, 128, 3, 16, True),
    Tiles(256, 128, 128, 3, 16, True),
    Tiles(64, 256, 128, 4, 8, True),
]


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
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn(rows, outputs, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(experts * outputs, inputs, device="cuda", dtype=torch.bfloat16)
    tokens = torch.randn(rows // 8, inputs, device="cuda", dtype=torch.bfloat16)
    source = torch.randint(0, len(tokens), (rows,), device="cuda")
    places = torch.arange(experts, device="cuda") * outputs * inputs
    bf16: dict[str, Any] = dict(precise=False, dtype=torch.bfloat16)
    flops = 2.0 * rows * inputs * outputs
    found: dict[str, tuple[float, list[Tiles], Callable[[Tiles], Tensor]]] = {
        "bf16 forward": (flops, BF16_TILES, lambda t: rows_times(Operand(x), Operand(w), groups, outputs, down=False, tiles=t, **bf16)),
        "bf16 forward, gathered": (flops, BF16_TILES[:1], lambda t: rows_times(Operand(tokens), Operand(w, places=places), groups, outputs, down=False, source=source, tiles=t, **bf16)),
        "bf16 dx": (flops, BF16_TILES, lambda t: rows_times(Operand(dy), Operand(w), groups, inputs, down=True, tiles=t, **bf16)),
        "bf16 dw": (flops, BF16_TILES, lambda t: weights_from(Operand(dy), Operand(x), groups, outputs, inputs, tiles=t, **bf16)),
        "bf16 dw, gathered": (flops, BF16_TILES[:1], lambda t: weights_from(Operand(dy), Operand(tokens), groups, outputs, inputs, source=source, tiles=t, **bf16)),
    }  # fmt: skip
    for name, (wide, out) in {"": (inputs, outputs), " down": (hidden, inputs)}.items():
        a, b = Operand(bytes_like(rows, wide), one), Operand(bytes_like(experts * out, wide), one)
        g, h = (Operand(bytes_like(n, groups.apart.most), one) for n in (out, wide))
        flops = 2.0 * rows * wide * out
        for precise in (False, True):
            tiles = PRECISE_TILES if precise else FP8_TILES
            how: dict[str, Any] = dict(precise=precise, dtype=torch.bfloat16)
            label = f"fp8{name}{', precise' if precise else ''}"
            found[f"{label} rows"] = (flops, tiles, lambda t, a=a, b=b, out=out, how=how: rows_times(a, b, groups, out, down=False, tiles=t, **how))  # fmt: skip
            found[f"{label} dw"] = (flops, tiles, lambda t, g=g, h=h, out=out, wide=wide, how=how: weights_from(g, h, groups, out, wide, tiles=t, **how))  # fmt: skip
    return found


@click.command()
@click.option("--shapes", default=",".join(SHAPES), show_default=True)
@click.option("--out", type=click.Path(path_type=Path))
def main(shapes: str, out: Path | None) -> None:
    """Measure every product with every tile."""
    result: dict[str, Any] = {"environment": environment(), "rows": []}
    for shape in shapes.split(","):
        for name, (flops, tiles, run) in products(shape).items():
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
