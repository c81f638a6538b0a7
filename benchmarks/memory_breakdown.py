"""Measured peaks of the run d20-e3-full: a training step of 4 x 2,048 tokens under several dtypes and optimizers.

    python -m benchmarks.memory_breakdown --out benchmarks/results/memory_breakdown_h100.json
    python -m benchmarks.memory_breakdown --tiny --out tiny.json                       # anywhere: does it work?

The plan of the same steps is the table "memory-breakdown" of benchmarks/tables/optimizers.py, which has their names.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.tables.optimizers import PLANS
from benchmarks.timed_steps import TINY, build_run, time_steps, write_rows
from te_models import ModelConfig, get_preset
from te_models.inspect.environment import environment, require_gpu

DTYPES = {2: torch.bfloat16, 4: torch.float32}


def measure(options: dict[str, Any], config: ModelConfig, size: dict[str, int]) -> dict[str, Any]:
    """Return the peak and the speed of a step with the options of one of PLANS."""
    model_options = dict(recipe=options["recipe"], dtype=DTYPES[options.get("dtype_bytes", 2)])
    training = dict(
        optimizer=options["optimizer"], optimizer_options=options.get("optimizer_options", {})
    )
    run = build_run(config, model_options, {**size, **training})
    found = time_steps(run, warm_up=5, rounds=1, steps=2)
    run.close()
    return found


@click.command()
@click.option("--tiny", is_flag=True, help="A small shape anywhere: a test, not a measurement.")
@click.option("--out", required=True, type=click.Path(path_type=Path))
def main(tiny: bool, out: Path) -> None:
    """Measure each, and write the results after each."""
    if not tiny:
        require_gpu()
    config = get_preset("d20-e3-full", **(TINY if tiny else {}))
    size = dict(batch_size=2, seq_len=64) if tiny else dict(batch_size=4, seq_len=2048)
    about = dict(environment=environment(), size=size)
    measures = {name: partial(measure, options, config, size) for name, options in PLANS.items()}
    for name, row in write_rows(measures, about, out):
        print(name, row.get("peak_bytes"), row.get("error"), flush=True)


if __name__ == "__main__":
    main()
