"""Held-out loss after fine-tuning one model under each recipe, from the same start on the same data.

    python benchmarks/recipe_finetune.py --out benchmarks/results/recipe_finetune_cpu.json

Every run takes the same steps on the same batches; only the recipe differs. On a CPU the emulated engine has
Transformer Engine's numbers.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from te_models.files.atomic import replace_text
from te_models.training.finetune import finetune
from te_models.training.run_settings import run_settings

RECIPES = "bf16,delayed,current,blockwise,mxfp8,nvfp4"


@click.command()
@click.option(
    "--model", default="gated-nano", show_default=True, help="The model that every run starts from."
)
@click.option("--data", default="python-docstrings", show_default=True, help="As finetune --data.")
@click.option("--recipes", default=RECIPES, show_default=True, help="Recipes, the reference first.")
@click.option("--steps", default=200, show_default=True, help="Optimizer steps of each run.")
@click.option("--batch-size", default=8, show_default=True, help="Sequences per step.")
@click.option("--seq-len", default=512, show_default=True, help="Tokens per sequence.")
@click.option("--learning-rate", default=3e-4, show_default=True, help="The peak of each run.")
@click.option("--eval-batches", default=32, show_default=True, help="Batches of held-out records.")
@click.option(
    "--seeds", default=1, show_default=True, help="Orders of the data, each under all recipes."
)
@click.option("--device", default="cpu", show_default=True, help="Where to run.")
@click.option(
    "--out", type=click.Path(path_type=Path), help="Where the JSON goes; rewritten after each run."
)
def main(
    model: str, data: str, recipes: str, seeds: int, device: str, out: Path | None, **training: Any
) -> None:
    """Fine-tune under every recipe, print the table, write the JSON."""
    from te_models.inspect.environment import environment

    about = {
        "environment": environment(),
        "model": Path(model).name,
        "data": data,
        "settings": training,
        "seeds": seeds,
    }
    rows: list[dict[str, Any]] = []
    for seed in range(seeds):
        for recipe in recipes.split(","):
            rows.append(run(model, data, recipe, seed, device, training))
            if out is not None:
                replace_text(out, json.dumps({**about, "rows": rows}, indent=1) + "\n")
    click.echo(table(rows))


def run(
    model: str, data: str, recipe: str, seed: int, device: str, training: dict[str, Any]
) -> dict[str, Any]:
    """Return the losses of one run, in nats per counted token."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        given = dict(
            model=model,
            data=(data,),
            recipe=recipe,
            device=device,
            out=f"{folder}/run",
            sample_tokens=0,
        )
        result = finetune(
            run_settings("finetune", {**given, **training, "seed": seed, "eval_every": 0})
        )
    if result.interrupted:
        raise click.Abort
    losses = {"before": result.first_eval_loss, "after": result.eval_loss, "training": result.loss}
    return {"recipe": recipe, "seed": seed, **losses, "seconds": time.perf_counter() - start}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the means over the seeds as Markdown; the first recipe is the reference."""
    names = list(dict.fromkeys(row["recipe"] for row in rows))
    lines = ["| recipe | held-out loss before | after | against the first |", "|---|---|---|---|"]
    mean = {
        (name, when): sum(row[when] for row in rows if row["recipe"] == name)
        / sum(r["recipe"] == name for r in rows)
        for name in names
        for when in ("before", "after")
    }
    for name in names:
        before, after = mean[name, "before"], mean[name, "after"]
        change = "" if name == names[0] else f"{100 * (after / mean[names[0], 'after'] - 1):+.2f} %"
        lines.append(f"| `{name}` | {before:.4f} | {after:.4f} | {change} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
