"""The time of each optimizer's part of a step, whole steps per second, state and peak, at 124M and at 1B.

    python -m benchmarks.optimizer_speed --shape 124m --out benchmarks/results/optimizer_speed_124m_h100.json
    python -m benchmarks.optimizer_speed --shape 1b --out benchmarks/results/optimizer_speed_1b_h100.json
    python -m benchmarks.optimizer_speed --tiny --out tiny.json                        # anywhere: does it work?

The optimizer's part is the norm of the gradients, clipping and the update, by events on the GPU's queue, of each step.
`galore` computes new projectors in one of 200 steps: its own row is of the steps between, and one of steps that all do.
Its projections in backward are no part of the optimizer's time, but of the tokens per second. Master weights and state
are the bytes after a step.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.timed_steps import DEVICE, TINY, attempt, build_run, time_steps
from te_models import ModelConfig, get_preset
from te_models.inspect.environment import environment
from te_models.optim.state_tensors import bytes_in

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "124m": ("gated-124m", dict(batch_size=16, seq_len=1024)),
    "1b": ("gated-1b", dict(batch_size=8, seq_len=2048)),
}
# Name of the row -> optimizer, its options, and whether masters and state are in CPU memory.
ROWS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "adamw": ("adamw", {}, False),
    "adamw8bit": ("adamw8bit", {}, False),
    "muon": ("muon", {}, False),
    "muon8bit": ("muon8bit", {}, False),
    "galore, rank 128": ("galore", {}, False),
    "galore, rank 128, in backward": ("galore", {"in_backward": True}, False),
    "galore, rank 128, new projectors": ("galore", {"refresh": 1}, False),
    "adamwfp8": ("adamwfp8", {}, False),
    "adamw8bit, no masters": ("adamw8bit", {"stochastic_rounding": True}, False),
    "muon8bit, rest adamw8bit": ("muon8bit", {"rest": "adamw8bit"}, False),
    "adamw, in CPU memory": ("adamw", {}, True),
}
WARM_UP, ROUNDS, STEPS = 5, 3, 4


def measure(name: str, config: ModelConfig, size: dict[str, int]) -> dict[str, Any]:
    """Return times, bytes and peak of the row `name`."""
    optimizer, options, offload = ROWS[name]
    training: dict[str, Any] = dict(
        optimizer=optimizer, optimizer_options=options, optimizer_offload=offload, **size
    )
    run = build_run(config, dict(recipe="delayed"), training)
    found = time_steps(run, WARM_UP, ROUNDS, STEPS)
    found["optimizer"] = statistics.median(found["optimizer_ms"][WARM_UP:])
    saved = run.trainer.optimizer.state_dict()
    found["masters_bytes"] = bytes_in(saved["masters"])
    found["state_bytes"] = bytes_in(saved["state"])
    run.close()
    return found


@click.command()
@click.option("--shape", type=click.Choice(list(SHAPES)), default="124m", show_default=True)
@click.option("--seconds", default=120.0, show_default=True, help="No row starts after this time.")
@click.option("--only", default=";".join(ROWS), help="Rows, divided by semicolons; all.")
@click.option("--tiny", is_flag=True, help="A small shape anywhere: a test, not a measurement.")
@click.option("--out", required=True, type=click.Path(path_type=Path))
def main(shape: str, seconds: float, only: str, tiny: bool, out: Path) -> None:
    """Measure every optimizer, and write the results after each."""
    if DEVICE.type == "cpu" and not tiny:
        raise click.UsageError("there is no CUDA device here: use --tiny to try the program")
    begun = time.monotonic()
    preset, size = SHAPES[shape]
    config = get_preset(preset)
    if tiny:
        config = get_preset(preset, **TINY)
        size = dict(batch_size=2, seq_len=64)
    rows: dict[str, Any] = {}
    document = dict(
        environment=environment(), preset=preset, recipe="delayed", size=size, rows=rows
    )
    for name in only.split(";"):
        if time.monotonic() - begun > seconds:
            rows[name] = {"error": "no time was left"}
            continue
        with torch._dynamo.config.patch(recompile_limit=64):
            rows[name] = attempt(lambda name=name: measure(name, config, size))
        document["seconds"] = round(time.monotonic() - begun, 1)
        document["parameters"] = config.num_parameters
        out.write_text(json.dumps(document, indent=1) + "\n")
        row = rows[name]
        if "error" not in row:
            speed = row["tokens_per_second"]
            print(
                f"{name:34} {speed:10,.0f} tokens/s, optimizer {row['optimizer']:8.2f} ms",
                flush=True,
            )


if __name__ == "__main__":
    main()
