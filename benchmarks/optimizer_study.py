"""The loss of 1,000 steps of gated-124m under each optimizer, on real text, from three seeds.

    python -m benchmarks.optimizer_study run --folder optimizers --out optimizer_study.json     # on one GPU or more
    python -m benchmarks.optimizer_study run --tiny --folder optimizers --out tiny.json       # anywhere: does it work?
    python -m benchmarks.optimizer_study draw optimizer_study.json --out optimizer_study.png

Every optimizer trains at several learning rates from one seed, since they do not suit all alike; where the best of them
is the lowest or the highest, at the next one as well; and at its best rate from the other seeds. One with 8-bit state
trains at the best rate of the same optimizer in FP32. Called again with the same folder it goes on with the runs that
are missing.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.small_runs import CORPUS, SmallRun, run_study, spread
from benchmarks.tables.text import markdown
from te_models.inspect.environment import environment

Runs = Mapping[str, Mapping[str, Any]]
# The slowest first, so that none begins alone at the end.
OPTIMIZERS = ("muon", "muon8bit", "galore", "adamw8bit", "adamw")
# With 8-bit state -> the same in FP32.
TWINS = {"muon8bit": "muon", "adamw8bit": "adamw"}
RATES = (1e-3, 2e-3, 5e-4)
RATE_LIMITS = (1.25e-4, 8e-3)  # none below or above is tried
SEEDS = (0, 1, 2)
PRESET = "gated-124m"
STEPS = dict(steps=1000, batch_size=8, seq_len=512, warmup_steps=100, eval_every=0, eval_batches=16)
TINY_MODEL = dict(name="gated-nano", num_hidden_layers=3, vocab_size=4096)
TINY = dict(steps=4, batch_size=2, seq_len=64, warmup_steps=1, eval_every=0, eval_batches=1)


def run_of(optimizer: str, rate: float, seed: int, tiny: bool) -> SmallRun:
    """Return the run of an optimizer at a learning rate from a seed; `tiny`: a few steps of a small shape."""
    model: dict[str, Any] = {**(TINY_MODEL if tiny else {"name": PRESET}), "recipe": "delayed"}
    config: dict[str, Any] = {**(TINY if tiny else STEPS)}
    config |= {"optimizer": optimizer, "learning_rate": rate, "seed": seed}
    return SmallRun(name=f"{optimizer}-{rate:g}-{seed}", model=model, config=config)


def first_runs(rates: Sequence[float], seed: int, tiny: bool) -> list[SmallRun]:
    """Return the runs at every rate from one seed, of every optimizer but those with 8-bit state."""
    searched = [name for name in OPTIMIZERS if name not in TWINS]
    pairs = itertools.product(searched, rates)
    return [run_of(optimizer, rate, seed, tiny) for optimizer, rate in pairs]


def runs_that_follow(
    results: Runs, rates: Sequence[float], seeds: Sequence[int], tiny: bool
) -> list[SmallRun]:
    """Return the runs that the results call for, for each optimizer that has run at all rates from the first seed.

    Where its best rate is at an end of the rates that it has run at: the run at half or at twice that rate. Else the
    runs from the other seeds at its best rate, and there from all seeds of its twin with 8-bit state.
    """
    following = []
    for optimizer in OPTIMIZERS:
        if optimizer in TWINS:
            continue
        losses = losses_of_seed(results, optimizer, seeds[0])
        if not set(losses) >= set(rates):
            continue
        best = min(losses, key=lambda rate: losses[rate])
        next_rate = best
        if best == min(losses):
            next_rate = best / 2
        elif best == max(losses):
            next_rate = best * 2
        if next_rate != best and RATE_LIMITS[0] <= next_rate <= RATE_LIMITS[1]:
            following.append(run_of(optimizer, next_rate, seeds[0], tiny))
        else:
            following += [run_of(optimizer, best, seed, tiny) for seed in seeds[1:]]
            for twin, name in TWINS.items():
                if name == optimizer:
                    following += [run_of(twin, best, seed, tiny) for seed in seeds]
    return following


def losses_of_seed(results: Runs, optimizer: str, seed: int) -> dict[float, float]:
    """Return an optimizer's held-out losses from one seed by learning rate, infinite where it diverged."""
    losses = {}
    for name, result in results.items():
        # A rate such as 5e-4 is written 0.0005, without a dash.
        own, rate, own_seed = name.split("-")
        if own == optimizer and int(own_seed) == seed:
            lost = result["diverged"] is not None
            losses[float(rate)] = math.inf if lost else result["held_out"]
    return losses


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
    tried = [float(rate) for rate in rates.split(",")]
    all_seeds = [int(seed) for seed in seeds.split(",")]
    about = dict(
        environment=environment(),
        preset=PRESET,
        settings=TINY if tiny else STEPS,
        rates=tried,
        seeds=all_seeds,
    )
    results = run_study(
        first_runs(tried, all_seeds[0], tiny),
        folder,
        out,
        about,
        text_bytes=1_000_000 if tiny else CORPUS,
        per_gpu=per_gpu,
        seconds=seconds,
        mps=mps,
        follow=lambda found: runs_that_follow(found, tried, all_seeds, tiny),
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


def missing_runs(document: Mapping[str, Any]) -> list[str]:
    """Return the names of the runs that a study lacks, also those that its results call for and that never began."""
    runs = document["runs"]
    missing = list(document["missing"])
    following = runs_that_follow(runs, document["rates"], document["seeds"], tiny=False)
    for run in following:
        if run.name not in runs and run.name not in missing:
            missing.append(run.name)
    return missing


@main.command()
@click.argument("results", type=click.Path(exists=True, path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path))
def draw(results: Path, out: Path) -> None:
    """Draw held-out loss over the learning rate, and the training loss over steps at each optimizer's best rate."""
    draw_results(json.loads(results.read_text()), out)


def draw_results(document: Mapping[str, Any], out: Path) -> None:
    """Draw a study as the command `draw` says."""
    from te_models.training.plots import new_figure, save_figure

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
