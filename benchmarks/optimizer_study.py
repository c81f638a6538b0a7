"""The loss of 1,000 steps of gated-124m under each optimizer, on real text, from three seeds.

    python -m benchmarks.optimizer_study run --folder optimizers --out optimizer_study.json     # on one GPU or more
    python -m benchmarks.optimizer_study run --tiny --folder optimizers --out tiny.json       # anywhere: does it work?
    python -m benchmarks.optimizer_study draw optimizer_study.json --out optimizer_study.png

Every optimizer has several learning rates, since they do not suit all alike, and each of those three seeds. Called
again with the same folder it goes on with the runs that are missing.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from benchmarks.small_runs import SmallRun, run_study, spread
from benchmarks.tables.text import markdown
from te_models.inspect.environment import environment

Runs = Mapping[str, Mapping[str, Any]]
# The slowest first, so that none begins alone at the end.
OPTIMIZERS = ("muon", "muon8bit", "galore", "adamw8bit", "adamw")
RATES = (1e-3, 2e-3, 5e-4)
SEEDS = (0, 1, 2)
CORPUS = 40_000_000  # bytes, more than the 4.1 million tokens of a run
PRESET = "gated-124m"
STEPS = dict(steps=1000, batch_size=8, seq_len=512, warmup_steps=100, eval_every=0, eval_batches=16)
TINY_MODEL = dict(name="gated-nano", num_hidden_layers=3, vocab_size=4096)
TINY = dict(steps=4, batch_size=2, seq_len=64, warmup_steps=1, eval_every=0, eval_batches=1)


def runs(rates: list[float], seeds: list[int], tiny: bool) -> list[SmallRun]:
    """Return every run: all seeds of the first rate, then of the next."""
    made = []
    for rate, seed, optimizer in itertools.product(rates, seeds, OPTIMIZERS):
        model: dict[str, Any] = {**(TINY_MODEL if tiny else {"name": PRESET}), "recipe": "delayed"}
        config = {**(TINY if tiny else STEPS)}
        config |= {"optimizer": optimizer, "learning_rate": rate, "seed": seed}
        made.append(SmallRun(name=f"{optimizer}-{rate:g}-{seed}", model=model, config=config))
    return made


@click.group()
def main() -> None:
    """Train, collect and draw."""


@main.command()
@click.option("--folder", required=True, type=click.Path(path_type=Path), help="Of all runs.")
@click.option("--out", required=True, type=click.Path(path_type=Path))
@click.option("--rates", default=",".join(map(str, RATES)), show_default=True)
@click.option("--seeds", default=",".join(map(str, SEEDS)), show_default=True)
@click.option("--per-gpu", default=3, show_default=True, help="Worker processes on each GPU.")
@click.option("--seconds", default=3600.0, show_default=True, help="Nothing runs after this time.")
@click.option("--mps", is_flag=True, help="Let the workers of a GPU share it by NVIDIA's MPS.")
@click.option("--tiny", is_flag=True, help="A few steps of a small shape: a test of this program.")
def run(
    folder: Path,
    out: Path,
    rates: str,
    seeds: str,
    per_gpu: int,
    seconds: float,
    mps: bool,
    tiny: bool,
) -> None:
    """Train what is missing, and write the results of all finished runs whenever one ends."""
    asked = runs([float(rate) for rate in rates.split(",")], list(map(int, seeds.split(","))), tiny)
    about = dict(environment=environment(), preset=PRESET, settings=TINY if tiny else STEPS)
    results = run_study(
        asked,
        folder,
        out,
        about,
        text_bytes=1_000_000 if tiny else CORPUS,
        per_gpu=per_gpu,
        seconds=seconds,
        mps=mps,
    )
    print(losses_table(results))


def held_out_losses(runs: Runs, optimizer: str) -> dict[float, list[float]]:
    """Return the held-out losses of an optimizer's runs that did not diverge, by learning rate, the lowest first."""
    found: dict[float, list[float]] = {}
    for name, result in runs.items():
        # A rate such as 5e-4 is written 0.0005, without a dash.
        own, rate, _ = name.split("-")
        if own == optimizer and result["diverged"] is None:
            found.setdefault(float(rate), []).append(result["held_out"])
    return dict(sorted(found.items()))


def best_rate(losses: Mapping[float, list[float]]) -> float:
    """Return the learning rate whose seeds have the lowest mean."""
    return min(losses, key=lambda rate: statistics.mean(losses[rate]))


def losses_table(runs: Runs) -> str:
    """Return a Markdown table of the held-out losses: a row for each optimizer, a column for each learning rate."""
    losses = {name: held_out_losses(runs, name) for name in OPTIMIZERS}
    rates = sorted({rate for found in losses.values() for rate in found})
    lines = []
    for name, found in losses.items():
        if not found:
            continue
        cells = [f"`{name}`"]
        for rate in rates:
            cells.append(spread(found[rate]) if rate in found else "")
        lines.append([*cells, f"{best_rate(found):g}"])
    columns = " | ".join(f"{rate:g}" for rate in rates)
    return markdown(f"optimizer | {columns} | best rate", lines)


@main.command()
@click.argument("results", type=click.Path(exists=True, path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path))
def draw(results: Path, out: Path) -> None:
    """Draw held-out loss over the learning rate, and the training loss over steps at each optimizer's best rate."""
    from te_models.training.plots import new_figure, save_figure

    document = json.loads(results.read_text())
    runs = document["runs"]
    figure = new_figure((10, 4))
    left, right = figure.subplots(1, 2)
    lowest = []
    for number, name in enumerate(OPTIMIZERS):
        losses = held_out_losses(runs, name)
        if not losses:
            continue
        color = f"C{number}"
        dashes = "--" if "8bit" in name else "-"  # the curves of 32 and 8 bits may coincide
        means = [statistics.mean(values) for values in losses.values()]
        left.plot(list(losses), means, f"o{dashes}", markersize=4, color=color)
        for rate, values in losses.items():
            left.scatter([rate] * len(values), values, s=9, color=color, alpha=0.5, linewidths=0)
        best = best_rate(losses)
        curve = mean_curve(runs, f"{name}-{best:g}-")
        steps = [document["settings"]["steps"] * (at + 1) / len(curve) for at in range(len(curve))]
        right.plot(steps, curve, dashes, color=color, label=f"{name}, {best:g}")
        lowest.append(curve[-1])
    rates = sorted({float(name.split("-")[1]) for name in runs})
    left.set(xscale="log", xlabel="learning rate", ylabel="held-out loss (nats per token)")
    left.set_xticks(rates, [f"{rate:g}" for rate in rates])
    left.minorticks_off()
    right.set(xlabel="step", ylabel="training loss, smoothed")
    right.set_ylim(min(lowest) - 0.1, min(lowest) + 2)  # without the first steps, which are alike
    right.legend(frameon=False, fontsize=8, title="at its best rate")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, out)


def mean_curve(runs: Runs, start: str) -> list[float]:
    """Return the mean over seeds of the training curves of the runs whose name begins with `start`."""
    curves = []
    for name, result in runs.items():
        if name.startswith(start) and result["diverged"] is None:
            curves.append(result["curve"])
    return [statistics.mean(values) for values in zip(*curves, strict=True)]


if __name__ == "__main__":
    main()
