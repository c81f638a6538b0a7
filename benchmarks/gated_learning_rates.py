"""Does gated attention allow a higher learning rate? Gates, recipes, learning rates and seeds on real text.

    python benchmarks/gated_learning_rates.py run --folder lr --out gated_learning_rates.json     # on one GPU or more
    python benchmarks/gated_learning_rates.py run --tiny --folder lr --out lr.json       # anywhere: does it work?
    python benchmarks/gated_learning_rates.py more --folder lr --out gated_learning_rates_more.json
    python benchmarks/gated_learning_rates.py draw lr.json --out lr.png

About 20 million parameters and 30 million tokens for each run, or with --size 124m gated-124m and 10 million. Called
again with the same folder it goes on with the runs that are missing. `more` trains what was chosen after the first
study: gated-124m, qk_norm, and rates near the best one. After training each model is looked at: the largest activation
between its blocks, and the share of attention that goes to the first token of a text.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from benchmarks.small_runs import CORPUS, SmallRun, run_study
from te_models import CausalLM
from te_models.inspect.environment import environment
from te_models.model.attention import GatedAttention

GATES = ("none", "headwise", "elementwise")
RECIPES = ("bf16", "delayed", "current")
RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
SEEDS = (0, 1, 2)
VOCABULARY = 4096
SHAPE_20M = dict(
    hidden_size=384,
    intermediate_size=1024,
    num_hidden_layers=9,
    num_attention_heads=6,
    num_key_value_heads=6,
)
STEPS = dict(
    steps=1831, batch_size=32, seq_len=512, warmup_steps=100, eval_every=0, eval_batches=16
)
STEPS_124M = {**STEPS, "steps": 600}
# What `more` trains, in this order; the first run is one of the study again, to compare machines and texts by.
FURTHER: tuple[dict[str, Any], ...] = (
    dict(size="20m", norms=[False], recipes=["bf16"], rates=[2e-3], seeds=[0], gates=["none"]),
    dict(size="124m", norms=[False], recipes=["delayed"], rates=[1e-3, 2e-3, 4e-3], seeds=[0]),
    dict(size="20m", norms=[True], recipes=["bf16"], rates=RATES, seeds=[0]),
    dict(size="20m", norms=[True], recipes=["delayed"], rates=[2e-3, 4e-3, 1.6e-2], seeds=[0]),
    dict(size="124m", norms=[False], recipes=["delayed"], rates=[5e-4], seeds=[0]),
    dict(size="20m", norms=[False], recipes=["bf16"], rates=[1.4e-3, 2.8e-3], seeds=[0]),
    dict(size="20m", norms=[True], recipes=["bf16"], rates=[2e-3, 4e-3], seeds=[1, 2]),
    dict(size="20m", norms=[True], recipes=["delayed"], rates=[1e-3, 8e-3], seeds=[0]),
    dict(size="124m", norms=[False], recipes=["delayed"], rates=[8e-3, 1.6e-2], seeds=[0]),
    dict(size="20m", norms=[False], recipes=["bf16"], rates=[1.4e-3, 2.8e-3], seeds=[1, 2]),
)
TINY = dict(steps=4, batch_size=2, seq_len=64, warmup_steps=1, eval_every=0, eval_batches=1)
KINDS = (
    "",
    "qknorm",
    "124m",
)  # at the end of a run's name: 20M without qk_norm, 20M with it, gated-124m without it
Runs = Mapping[str, Mapping[str, Any]]
# Rows of the plot from the top: a value of a run, the name of its axis, and its scale; "near" shows the least losses.
DRAWN = (
    ("held_out", "held-out loss", "linear"),
    ("held_out", "the same, near the best", "near"),
    ("largest_activation", "largest activation", "log"),
    ("first_token", "attention on the first token", "linear"),
)
NEAR = 0.4  # nats above the least loss
LOOKED_AT = 256  # tokens of each row
WARM = 16  # queries before this one have few tokens to attend to


def runs(
    size: str,
    norms: Sequence[bool],
    recipes: Sequence[str],
    rates: Sequence[float],
    seeds: Sequence[int],
    tiny: bool,
    gates: Sequence[str] = GATES,
) -> list[SmallRun]:
    """Return every run, all of a seed before those of the next, so that a study cut short has whole seeds."""
    made = []
    settings = settings_of(size, tiny)
    shape: dict[str, Any] = {"name": "gated-nano", **SHAPE_20M, "vocab_size": VOCABULARY}
    if size == "124m":
        shape = {"name": "gated-124m"}
    if tiny:
        shape = {"name": "gated-nano", "num_hidden_layers": 3, "vocab_size": VOCABULARY}
    for norm, seed, rate, recipe, gate in itertools.product(norms, seeds, rates, recipes, gates):
        model = {**shape, "recipe": recipe}
        model |= {"attention_gate": gate, "qk_norm": norm}
        config = {**settings, "learning_rate": rate, "seed": seed}
        kind = ("-qknorm" if norm else "") + ("-124m" if size == "124m" else "")
        name = f"{gate}-{recipe}-{rate:g}-{seed}{kind}"
        made.append(SmallRun(name=name, model=model, config=config, look=look))
    return made


def settings_of(size: str, tiny: bool) -> dict[str, Any]:
    """Return the fields of TrainConfig that all runs have."""
    if tiny:
        return TINY
    return STEPS if size == "20m" else STEPS_124M


@contextmanager
def watched(model: CausalLM) -> Iterator[dict[str, float]]:
    """Note the largest activation between blocks, and the mean share of attention on the first token, of each pass."""
    found = {"largest_activation": 0.0, "first_token": 0.0}
    shares: list[float] = []

    def note(block: Any, inputs: Any, output: Tensor) -> None:
        found["largest_activation"] = max(found["largest_activation"], float(output.abs().max()))

    def attend(self: GatedAttention, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        group = q.shape[1] // k.shape[1]
        keys = k.repeat_interleave(group, dim=1).float()
        scores = q.float() @ keys.mT * self.spec.heads.dim**-0.5  # [B, A, S, S]
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1)
        shares.append(float(weights[..., WARM:, 0].mean()))
        return own(self, q, k, v, mask)

    own = GatedAttention._attention
    hooks = [block.register_forward_hook(note) for block in model.layers]
    GatedAttention._attention = attend  # type: ignore[method-assign]
    try:
        with model.unfused():
            yield found
    finally:
        GatedAttention._attention = own  # type: ignore[method-assign]
        for hook in hooks:
            hook.remove()
    found["first_token"] = sum(shares) / max(1, len(shares))


@torch.no_grad()
def look(model: CausalLM, ids: Tensor) -> dict[str, float]:
    """Return what `watched` notes of a trained model, in BF16, over rows of ids, int64 [B, S]."""
    model.set_recipe("bf16")
    model.eval()
    with watched(model) as found:
        model(ids[:, :LOOKED_AT].to(model.device))
    return {name: round(value, 4) for name, value in found.items()}


@click.group()
def main() -> None:
    """Train, collect and draw."""


@main.command()
@click.option("--folder", required=True, type=click.Path(path_type=Path), help="Of all runs.")
@click.option("--out", required=True, type=click.Path(path_type=Path))
@click.option("--size", type=click.Choice(["20m", "124m"]), default="20m")
@click.option("--qk-norm", type=click.Choice(["no", "yes", "both"]), default="no")
@click.option("--recipes", default=",".join(RECIPES), show_default=True)
@click.option("--rates", default=",".join(map(str, RATES)), show_default=True)
@click.option("--seeds", default=",".join(map(str, SEEDS)), show_default=True)
@click.option("--per-gpu", default=3, show_default=True, help="Worker processes on each GPU.")
@click.option("--seconds", default=3600.0, show_default=True, help="Nothing runs after this time.")
@click.option("--mps", is_flag=True, help="Let the workers of a GPU share it by NVIDIA's MPS.")
@click.option("--tiny", is_flag=True, help="A few steps of a small shape: a test of this program.")
def run(
    folder: Path,
    out: Path,
    size: str,
    qk_norm: str,
    recipes: str,
    rates: str,
    seeds: str,
    per_gpu: int,
    seconds: float,
    mps: bool,
    tiny: bool,
) -> None:
    """Train what is missing, and write the results of all finished runs whenever one ends."""
    norms = {"no": (False,), "yes": (True,), "both": (False, True)}[qk_norm]
    tried = [float(rate) for rate in rates.split(",")]
    asked = runs(
        size,
        norms,
        recipes=recipes.split(","),
        rates=tried[:1] if tiny else tried,
        seeds=[int(seed) for seed in seeds.split(",")],
        tiny=tiny,
    )
    about = dict(environment=environment(), size=size, settings=settings_of(size, tiny))
    run_study(
        asked,
        folder,
        out,
        about,
        text_bytes=1_000_000 if tiny else CORPUS,
        per_gpu=per_gpu,
        seconds=seconds,
        mps=mps,
    )


@main.command()
@click.option("--folder", required=True, type=click.Path(path_type=Path), help="Of all runs.")
@click.option("--out", required=True, type=click.Path(path_type=Path))
@click.option("--per-gpu", default=3, show_default=True, help="Worker processes on each GPU.")
@click.option("--seconds", default=3600.0, show_default=True, help="Nothing runs after this time.")
@click.option("--mps", is_flag=True, help="Let the workers of a GPU share it by NVIDIA's MPS.")
@click.option("--tiny", is_flag=True, help="A few steps of a small shape: a test of this program.")
def more(folder: Path, out: Path, per_gpu: int, seconds: float, mps: bool, tiny: bool) -> None:
    """Train the runs of `FURTHER` that are missing, and write all that are finished whenever one ends."""
    asked = []
    for part in FURTHER:
        asked += runs(**part, tiny=tiny)
    settings = {size: settings_of(size, tiny) for size in ("20m", "124m")}
    run_study(
        asked,
        folder,
        out,
        dict(environment=environment(), settings=settings),
        text_bytes=1_000_000 if tiny else CORPUS,
        per_gpu=per_gpu,
        seconds=seconds,
        mps=mps,
    )


@main.command()
@click.argument("results", type=click.Path(exists=True, path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path))
def draw(results: Path, out: Path) -> None:
    """Draw what the runs found over the learning rate."""
    draw_results(json.loads(results.read_text()), out)


def of_kind(runs: Runs, kind: str) -> Runs:
    """Return the runs of one of `KINDS` by the names that runs of the first kind have."""
    found = {}
    for name, run in runs.items():
        # A name is gate, recipe, rate and seed, and the kind after them.
        parts = name.split("-")
        if "-".join(parts[4:]) == kind:
            found["-".join(parts[:4])] = run
    return found


def rates_of(runs: Iterable[str]) -> list[float]:
    """Return the learning rates in the names of runs, the lowest first."""
    # A rate such as 1e-3 is written 0.001, without a dash.
    return sorted({float(name.split("-")[2]) for name in runs})


def values_by_rate(runs: Runs, gate: str, recipe: str, value: str) -> dict[float, list[float]]:
    """Return a value of all seeds' finished runs by learning rate; of one that diverged it is infinite."""
    found: dict[float, list[float]] = {}
    for rate in rates_of(runs):
        start = f"{gate}-{recipe}-{rate:g}-"
        for name, run in runs.items():
            if name.startswith(start):
                lost = run["diverged"] is not None or value not in run
                found.setdefault(rate, []).append(math.inf if lost else run[value])
    return found


def uniform_share() -> float:
    """Return the share of attention that the first token would get if all tokens got the same."""
    return statistics.mean(1 / (query + 1) for query in range(WARM, LOOKED_AT))


def draw_results(document: Mapping[str, Any], out: Path) -> None:
    """Draw the runs of a study, a column for each kind and recipe that it has."""
    columns = {}
    for kind in KINDS:
        runs = of_kind(document["runs"], kind)
        for recipe in RECIPES:
            if any(f"-{recipe}-" in name for name in runs):
                columns[f"{recipe}, {kind}" if kind else recipe] = (runs, recipe)
    draw_columns(columns, out)


def draw_columns(columns: Mapping[str, tuple[Runs, str]], out: Path) -> None:
    """Draw the values of `DRAWN` over the learning rate: a column for each title, a line for the mean of each gate.

    Points are seeds. Crosses at the top edge are runs that diverged. Runs that are missing are left out. A single
    column is drawn as a row.

    Args:
        columns: title -> runs by name, and the recipe whose runs are drawn.
        out: file of the plot.
    """
    from te_models.training.plots import new_figure, save_figure

    if len(columns) > 1:
        figure = new_figure((3.4 * len(columns) + 0.6, 2.2 * len(DRAWN) + 0.4))
        panels = figure.subplots(len(DRAWN), len(columns), sharex=True, sharey="row", squeeze=False)
    else:
        figure = new_figure((3.1 * len(DRAWN), 2.9))
        panels = figure.subplots(1, len(DRAWN), squeeze=False).T
    rates = sorted({rate for runs, _ in columns.values() for rate in rates_of(runs)})
    for row, (value, label, scale) in zip(panels, DRAWN, strict=True):
        for axes, (runs, recipe) in zip(row, columns.values(), strict=True):
            for number, gate in enumerate(GATES):
                found = values_by_rate(runs, gate, recipe, value)
                _draw_gate(axes, found, f"C{number}", f"gate: {gate}")
            axes.set(xscale="log", yscale="log" if scale == "log" else "linear")
            axes.set_xticks(rates, [f"{1000 * rate:g}" for rate in rates])
            axes.minorticks_off()
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
            if value == "first_token":
                axes.axhline(uniform_share(), color="gray", linestyle=":")
        row[0].set_ylabel(label)
        if scale == "near":
            least = min(_finite_values(columns, value))
            row[0].set_ylim(least - 0.03, least + NEAR)
    for axes, title in zip(panels[0], columns, strict=True):
        axes.set_title(title)
    for axes in panels[-1] if len(columns) > 1 else panels[:, 0]:
        axes.set_xlabel("learning rate, in thousandths")
    panels[0, 0].legend(frameon=False, fontsize=8)
    shares = panels[-1, 0]
    shares.set_ylim(0, max(shares.get_ylim()[1], 1.25 * uniform_share()))
    shares.text(rates[0], 1.08 * uniform_share(), "equal shares", color="gray", fontsize=8)
    figure.align_ylabels()
    save_figure(figure, out)


def _finite_values(columns: Mapping[str, tuple[Runs, str]], value: str) -> list[float]:
    """Return a value of all drawn runs that did not diverge."""
    found = []
    for runs, recipe in columns.values():
        for gate in GATES:
            for values in values_by_rate(runs, gate, recipe, value).values():
                found += [number for number in values if math.isfinite(number)]
    return found


def _draw_gate(axes: Any, found: Mapping[float, list[float]], color: str, label: str) -> None:
    """Draw the runs of one gate under one recipe."""
    rates, means = [], []
    for rate, values in found.items():
        finite = [value for value in values if math.isfinite(value)]
        axes.scatter([rate] * len(finite), finite, s=9, color=color, alpha=0.5, linewidths=0)
        if finite:
            rates.append(rate)
            means.append(statistics.mean(finite))
        if len(finite) < len(values):
            axes.plot(
                [rate],
                [0.98],
                "x",
                color=color,
                transform=axes.get_xaxis_transform(),
                clip_on=False,
            )
    axes.plot(rates, means, marker="o", markersize=4, color=color, label=label)


if __name__ == "__main__":
    main()
