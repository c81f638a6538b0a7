"""Experts divided between two GPUs beside one GPU: the losses of the same run, from the command line.

    python benchmarks/expert_parallel.py --out benchmarks/results/expert_parallel_h100_x2.json   # 2 minutes
    python benchmarks/expert_parallel.py --tiny --out losses.json                              # two processes on a CPU

`gated-moe-nano` on Python's own documentation, the same batches in every run. "rows in FP8" sends tokens to the GPUs of
their experts in FP8 (`--fp8-dispatch`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click

from te_models.training.metrics import read_metrics

RUN = ["--preset", "gated-moe-nano", "--seq-len", "512", "--batch-size", "8", "--eval-every", "0"]
RUN += ["--sample-tokens", "0", "--no-keep-best", "--schedule", "constant", "--warmup-steps", "2"]
TWO = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
WAYS = {
    "one process": ([], []),
    "fsdp": (TWO, ["--parallel", "fsdp"]),
    "fsdp+ep": (TWO, ["--parallel", "fsdp+ep"]),
    "fsdp+ep, rows in FP8": (TWO, ["--parallel", "fsdp+ep", "--fp8-dispatch"]),
}
RECIPES = ("bf16", "current", "delayed")


@click.command()
@click.option("--out", required=True, type=click.Path(path_type=Path))
@click.option("--steps", default=16, show_default=True)
@click.option("--tiny", is_flag=True, help="A small model on the CPU: a test of this program.")
def main(out: Path, steps: int, tiny: bool) -> None:
    """Train under every recipe, in every way."""
    small = [
        "--device",
        "cpu",
        "--engine",
        "emulated",
        "--hidden-size",
        "96",
        "--seq-len",
        "32",
        "--batch-size",
        "4",
    ]

    def losses(name: tuple[str, str]) -> list[float]:
        recipe, way = name
        launch, flags = WAYS[way]
        run = [
            *RUN,
            "--steps",
            str(2 if tiny else steps),
            *(small if tiny else []),
            "--recipe",
            recipe,
            *flags,
        ]
        place = Path(folder, f"{recipe} {way}")
        done = subprocess.run(
            [sys.executable, *launch, "-m", "te_models", "pretrain", *run, "--out", str(place)]
        )
        if done.returncode:
            raise click.ClickException(f"{recipe}, {way}: exit code {done.returncode}")
        return [row["loss"] for row in read_metrics(place / "metrics.jsonl") if "loss" in row]

    names = [(recipe, way) for recipe in RECIPES for way in WAYS]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1 if tiny else 4) as pool:
        found = dict(zip(names, pool.map(losses, names), strict=True))
    from te_models.inspect.environment import environment

    result: dict[str, Any] = {
        "environment": environment(),
        "run": RUN,
        "losses": {},
        "largest_difference": {},
    }
    for (recipe, way), own in found.items():
        one = found[recipe, "one process"]
        result["losses"][f"{recipe}, {way}"] = own
        off = max(abs(a / b - 1) for a, b in zip(own, one, strict=True))
        result["largest_difference"][f"{recipe}, {way}"] = off
    click.echo(json.dumps(result["largest_difference"], indent=1))
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
