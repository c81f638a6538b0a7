"""A hybrid and its dense twin: as many parameters, the same data, in BF16 and FP8.

    python benchmarks/twin_curves.py --out benchmarks/results/twin_curves_h100.json      # on a GPU
    python benchmarks/twin_curves.py --tiny --out twins.json                             # anywhere: does it work?

Both are gated-124m; the hybrid has three Gated DeltaNet layers to one of gated attention. All runs share the GPU, so
they are no measure of speed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from te_models import get_preset
from te_models.training.metrics import read_metrics
from te_models.training.plots import new_figure, save_figure, smooth

RUN = dict(
    preset="gated-124m", steps=500, batch_size=16, seq_len=1024, learning_rate=6e-4, warmup_steps=50
)
RUN |= dict(eval_every=100, eval_batches=16, seed=0, sample_tokens=0)
TINY = dict(
    preset="gated-nano",
    steps=4,
    batch_size=2,
    seq_len=64,
    eval_every=2,
    eval_batches=1,
    warmup_steps=1,
)
KINDS = ("linear_attention",) * 3 + ("full_attention",)
# Six heads of 128: a DeltaNet layer of width 768 then has the weights of gated attention with twelve heads of 64.
HEADS = dict(num_key_heads=6, num_value_heads=6, key_head_dim=128, value_head_dim=128)
HYBRID = dict(layer_types=list(KINDS) * 3, linear_attention=HEADS)
TINY_HYBRID = dict(num_hidden_layers=4, layer_types=list(KINDS), linear_attention=HEADS)
RECIPES = ("bf16", "current", "delayed")


@click.command()
@click.option("--out", required=True, type=click.Path(path_type=Path))
@click.option("--tiny", is_flag=True, help="A few steps of a small shape: a test of this program.")
def main(out: Path, tiny: bool) -> None:
    """Train all runs at once, each in its own process through the command line, and collect their metrics."""
    from te_models.inspect.environment import environment

    run = RUN | TINY if tiny else RUN
    twins: dict[str, dict[str, Any]] = {"dense": {}, "hybrid": TINY_HYBRID if tiny else HYBRID}
    result: dict[str, Any] = {
        "environment": environment(),
        "run": run,
        "parameters": {},
        "runs": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        started = {}
        for twin, shape in twins.items():
            result["parameters"][twin] = get_preset(str(run["preset"]), **shape).num_parameters
            for recipe in RECIPES:
                file = Path(folder, f"{twin}-{recipe}.toml")
                file.write_text(toml({"shape": shape}))
                flags = [f"--{name.replace('_', '-')}={value}" for name, value in run.items()]
                command = [
                    sys.executable,
                    "-m",
                    "te_models",
                    "pretrain",
                    str(file),
                    *flags,
                    "--recipe",
                    recipe,
                ]
                command += ["--out", str(file.with_suffix(""))]
                started[f"{twin} {recipe}"] = file.with_suffix(""), subprocess.Popen(command)
        for name, (place, process) in started.items():
            if process.wait() != 0:
                raise click.ClickException(f"{name} ended with {process.returncode}")
            kept = ("step", "loss", "grad_norm", "eval_loss")
            rows = read_metrics(place / "metrics.jsonl")
            result["runs"][name] = [{key: row[key] for key in kept if key in row} for row in rows]
    out.write_text(json.dumps(result) + "\n")


def draw(path: Path, result: dict[str, Any]) -> None:
    """Draw the losses of all runs, and below them how far each FP8 run is from BF16 of the same model."""
    figure = new_figure((8, 6.5))
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    losses = {
        name: smooth([row["loss"] for row in rows if "loss" in row])
        for name, rows in result["runs"].items()
    }
    for name, curve in losses.items():
        twin, recipe = name.split()
        style: dict[str, Any] = dict(
            color=f"C{RECIPES.index(recipe)}", linestyle="-" if twin == "hybrid" else "--"
        )
        steps = range(1, len(curve) + 1)
        top.plot(steps, curve, label=f"{twin}, {recipe}", linewidth=1.5, **style)
        if recipe != "bf16":
            reference = losses[f"{twin} bf16"]
            gap = [100 * (own / other - 1) for own, other in zip(curve, reference, strict=True)]
            below.plot(steps, gap, linewidth=1.2, **style)
    title = "gated-124m and a hybrid of as many parameters, " + result["environment"].get(
        "gpu", "CPU"
    )
    top.set(title=title, ylabel="cross-entropy (nats per token)", ylim=(None, 3))
    top.legend(frameon=False, fontsize=8, ncols=2)
    below.set(xlabel="step", ylabel="loss relative to BF16\nof the same model (%)", ylim=(-3, 3))
    for axes in (top, below):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)


def toml(tables: dict[str, dict[str, Any]]) -> str:
    """Return the tables as TOML; values are numbers, strings, lists of them, or tables of numbers."""
    lines = []
    for title, values in tables.items():
        lines.append(f"[{title}]")
        for name, value in values.items():
            inline = (
                ", ".join(f"{key} = {size}" for key, size in value.items())
                if isinstance(value, dict)
                else ""
            )
            lines.append(f"{name} = {{ {inline} }}" if inline else f"{name} = {json.dumps(value)}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
