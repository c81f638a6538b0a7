"""First light: the same fine-tuning run under several recipes, one after the other, with one seed and one data order.

python benchmarks/first_light.py run --out benchmarks/results/first_light_h200.json     # on a GPU
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from te_models.training.metrics import read_metrics

RUN = dict(
    preset="gated-124m", steps=400, batch_size=32, seq_len=1024, learning_rate=3e-4, warmup_steps=30
)
RUN |= dict(eval_every=50, eval_batches=16, seed=0, sample_tokens=0)


@click.group()
def cli() -> None:
    """Run the comparison."""


@cli.command()
@click.option("--recipes", default="bf16,delayed,current,blockwise", show_default=True)
@click.option("--out", required=True, type=click.Path(path_type=Path))
@click.option(
    "--set", "changes", multiple=True, metavar="FIELD=VALUE", help="Change a field of the run."
)
def run(recipes: str, out: Path, changes: tuple[str, ...]) -> None:
    """Train once per recipe, each in its own process through the command line, and collect the metrics."""
    from te_models.inspect.environment import environment

    fields = {**RUN, **dict(change.split("=", 1) for change in changes)}
    result: dict[str, Any] = {"environment": environment(), "run": fields, "recipes": {}}
    for recipe in recipes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            flags = [f"--{name.replace('_', '-')}={value}" for name, value in fields.items()]
            command = [
                sys.executable,
                "-m",
                "te_models",
                "pretrain",
                *flags,
                "--recipe",
                recipe,
                "--out",
                folder,
            ]
            subprocess.run(command, check=True)
            rows = read_metrics(Path(folder) / "metrics.jsonl")
            saved = json.loads(
                next(Path(folder).glob("checkpoints/step-*/training.json")).read_text()
            )["result"]
            result["recipes"][recipe] = {**saved, "checkpoint": None, "metrics": rows}
    out.write_text(json.dumps(result))


if __name__ == "__main__":
    cli()
