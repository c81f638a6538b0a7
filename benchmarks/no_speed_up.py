"""Causes that take away what FP8 saves, planted one by one, and the change that brings it back.

    python -m benchmarks.no_speed_up --out benchmarks/results/no_speed_up_h200.json
    python -m benchmarks.no_speed_up --tiny --out tiny.json                            # anywhere: does it work?

Whole steps of six layers of gated-1b's width, all in the recipe `delayed`, beside `bf16` without the cause: without
Transformer Engine, without fused and compiled operations and CUDA graphs, and with few tokens. Of each run its speed,
and what it prints about these things in its first lines.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks.timed_steps import TINY, build_run, time_steps, write_rows
from te_models import ModelConfig, get_preset
from te_models.inspect.environment import environment, require_gpu
from te_models.training.report import speed_rows

LAYERS = 6
SIZE = dict(batch_size=8, seq_len=2048)
FEW = dict(batch_size=1, seq_len=512)
ALL_FP8 = dict(recipe="delayed", num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0)
# Name of the row -> options of the model and of the run.
ROWS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bf16": (dict(recipe="bf16"), SIZE),
    "delayed": (ALL_FP8, SIZE),
    "delayed, without Transformer Engine": (dict(**ALL_FP8, engine="emulated"), SIZE),
    "delayed, plain operations": (
        dict(**ALL_FP8, compile=False, fused=False),
        dict(**SIZE, cuda_graph=False),
    ),
    "bf16, few tokens": (dict(recipe="bf16"), FEW),
    "delayed, few tokens": (ALL_FP8, FEW),
}


def measure(name: str, config: ModelConfig, tiny: bool) -> dict[str, Any]:
    """Return the speed of the row `name`, and what a run says in its first lines."""
    model_options, training = ROWS[name]
    if tiny:
        training = {**training, "batch_size": 2, "seq_len": 64}
    run = build_run(config, model_options, training)
    found = time_steps(run, warm_up=5, rounds=3, steps=3)
    model = run.trainer.model
    found["said"] = {
        "engine": f"{model.engine} ({model.engine_reason})",
        **speed_rows(model, run.trainer.config),
    }
    run.close()
    return found


@click.command()
@click.option("--tiny", is_flag=True, help="A small shape anywhere: a test, not a measurement.")
@click.option("--out", required=True, type=click.Path(path_type=Path))
def main(tiny: bool, out: Path) -> None:
    """Measure every row, and write the results after each."""
    if not tiny:
        require_gpu()
    shape: dict[str, Any] = TINY if tiny else dict(num_hidden_layers=LAYERS)
    config = get_preset("gated-1b", **shape)
    about = dict(environment=environment(), layers=LAYERS, size=SIZE, few=FEW)
    measures = {name: partial(measure, name, config, tiny) for name in ROWS}
    for name, row in write_rows(measures, about, out):
        speed = row.get("error") or f"{row['tokens_per_second']:,.0f} tokens/s"
        print(name, speed, row.get("said"), flush=True)


if __name__ == "__main__":
    main()
