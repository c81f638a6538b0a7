"""Tables of studies of many runs: gated attention over learning rates."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gated_learning_rates import (
    GATES,
    RATES,
    RECIPES,
    Runs,
    of_kind,
    rates_of,
    uniform_share,
    values_by_rate,
)
from benchmarks.small_runs import spread
from benchmarks.tables.text import load, markdown, measured_on, prose, table

GATED = "gated_learning_rates_h200"
FURTHER = "gated_learning_rates_more_h200"
CONTROL = "none-bf16-0.002-0"  # trained in both, to compare machines and texts by
BEST = 2e-3  # the best rate of all gates and recipes, which the tables are about


def means(runs: Runs, gate: str, recipe: str, value: str) -> dict[float, float]:
    """Return the mean of a value over seeds by learning rate."""
    found = values_by_rate(runs, gate, recipe, value)
    return {rate: statistics.mean(values) for rate, values in found.items()}


def interpolated_best(losses: Mapping[float, float]) -> float:
    """Return the rate at the bottom of the parabola through the losses of the best rate and its two neighbours.

    The parabola is over the logarithm of the rate. A best rate without two neighbours is returned itself.
    """
    rates = list(losses)
    at = min(range(len(rates)), key=lambda number: losses[rates[number]])
    if at in (0, len(rates) - 1):
        return rates[at]
    below, best, above = rates[at - 1 : at + 2]
    down = math.log(below / best)  # negative
    up = math.log(above / best)
    rise_down = losses[below] - losses[best]
    rise_up = losses[above] - losses[best]
    # The bottom of a x^2 + b x through (down, rise_down), (0, 0) and (up, rise_up) is at -b / 2a.
    slope = rise_up * down**2 - rise_down * up**2
    curvature = rise_down * up - rise_up * down
    return best * math.exp(-slope / (2 * curvature))


def rates_table(result: Mapping[str, Any], seeds: str) -> str:
    """Return the held-out loss of each gate and recipe that a result has, at each learning rate."""
    runs = result["runs"]
    lines = []
    for recipe in RECIPES:
        for gate in GATES:
            found = values_by_rate(runs, gate, recipe, "held_out")
            if not found:
                continue
            cells = [f"`{recipe}`", gate]
            for rate in rates_of(runs):
                cells.append(losses_cell(found.get(rate)))
            best = interpolated_best(means(runs, gate, recipe, "held_out"))
            lines.append([*cells, f"{best:.2e}".replace("e-03", "e-3")])
    rates = " | ".join(f"{rate:g}" for rate in rates_of(runs))
    settings = result["settings"]
    tokens = settings["steps"] * settings["batch_size"] * settings["seq_len"]
    about = prose(
        f"Held-out loss in nats per token at each learning rate, {seeds}; {len(runs)} runs of {tokens:,} tokens. "
        f"{measured_on(result)}"
    )
    return f"{about}\n\n{markdown(f'recipe | gate | {rates} | best rate, interpolated', lines)}"


@table
def gated_rates() -> str:
    """Held-out loss of each gate and recipe over the learning rate."""
    return rates_table(load(GATED), "mean and standard deviation of three seeds")


@table
def gated_stability() -> str:
    """Losses, largest activations and attention on the first token, for each gate and recipe."""
    runs = load(GATED)["runs"]
    lines = []
    for recipe in RECIPES:
        for gate in GATES:
            activations = means(runs, gate, recipe, "largest_activation")
            shares = means(runs, gate, recipe, "first_token")
            spikes = means(runs, gate, recipe, "spikes")
            loss = means(runs, gate, recipe, "loss")
            cells = [f"`{recipe}`", gate, f"{loss[BEST]:.3f}"]
            cells += [f"{activations[rate]:,.0f}" for rate in (1e-3, BEST, 4e-3, 1.6e-2)]
            cells += [f"{100 * shares[rate]:.2f} %" for rate in (1e-3, BEST)]
            cells += [f"{spikes[rate]:.1f}" for rate in (BEST, 8e-3)]
            lines.append(cells)
    header = (
        "recipe | gate | last 20 training losses at 0.002 | largest activation at 0.001 | at 0.002 | at 0.004 | "
        "at 0.016 | attention on the first token at 0.001 | at 0.002 | spikes per run at 0.002 | at 0.008"
    )
    return markdown(header, lines)


@table
def gated_result() -> str:
    """Results of the study of gates, in words."""
    runs = load(GATED)["runs"]
    lost = sum(run["diverged"] is not None for run in runs.values())
    lines = [f"- Runs that diverged: {lost} of {len(runs)}."]
    best: dict[str, list[float]] = {gate: [] for gate in GATES}
    for recipe in RECIPES:
        for gate in GATES:
            losses = means(runs, gate, recipe, "held_out")
            best[gate].append(interpolated_best(losses))
    said = [f"{gate} {statistics.mean(rates):.2e}" for gate, rates in best.items()]
    lines.append(
        f"- Interpolated best rates, means of the recipes: {', '.join(said).replace('e-03', 'e-3')}."
    )
    for rate in RATES:
        parts = []
        for gate in GATES[1:]:
            differences = []
            for recipe in RECIPES:
                plain = means(runs, "none", recipe, "held_out")[rate]
                differences.append(means(runs, gate, recipe, "held_out")[rate] - plain)
            parts.append(f"{gate} {min(differences):+.3f} to {max(differences):+.3f}")
        lines.append(
            f"- Held-out loss minus the one without a gate at {rate:g}, range over recipes: {', '.join(parts)}."
        )
    ratios = []
    for recipe in RECIPES:
        for gate in GATES[1:]:
            plain = means(runs, "none", recipe, "largest_activation")[BEST]
            ratios.append(means(runs, gate, recipe, "largest_activation")[BEST] / plain)
    lines.append(
        f"- Largest activation with a gate at {BEST:g}: {min(ratios):.2f} to {max(ratios):.2f} of the one without."
    )
    lines.append(f"- The first token's share, if all got the same: {100 * uniform_share():.2f} %.")
    return "\n".join(lines)


KIND_NAMES = {"": "20M without `qk_norm`", "qknorm": "20M with `qk_norm`", "124m": "`gated-124m`"}


def not_trained(document: Mapping[str, Any]) -> str:
    """Return a line with the runs that a study lacks, by kind, recipe, gates and seeds; nothing where it has all."""
    gates_of: dict[tuple[str, str, str, str], list[str]] = {}
    for name in document["missing"]:
        gate, recipe, rate, seed, *kind = name.split("-")
        gates_of.setdefault(("".join(kind), recipe, rate, seed), []).append(gate)
    rates_of_runs: dict[tuple[str, str, str, str], list[str]] = {}
    for (kind, recipe, rate, seed), gates in gates_of.items():
        which = "" if len(gates) == len(GATES) else " and ".join(gates)
        rates_of_runs.setdefault((kind, recipe, which, seed), []).append(rate)
    parts = []
    for (kind, recipe, which, seed), rates in rates_of_runs.items():
        about = [KIND_NAMES[kind], f"`{recipe}`", *([which] if which else [])]
        parts.append(f"{', '.join(about)}, seed {seed}: {' and '.join(rates)}")
    if not parts:
        return ""
    return f"\n- Not trained, for want of time: {'; '.join(parts)}."


def same_seeds(study: Runs, other: Runs) -> Runs:
    """Return the runs of a study that another one has under the same names: gates, recipes, rates and seeds."""
    return {name: run for name, run in study.items() if name in other}


def compared_rows(kinds: Mapping[str, Runs]) -> list[list[str]]:
    """Return rows of recipe, gate, kind of run and the held-out loss at each learning rate that any kind has."""
    rates = sorted({rate for runs in kinds.values() for rate in rates_of(runs)})
    rows = []
    for recipe in RECIPES:
        for gate in GATES:
            for kind, runs in kinds.items():
                found = values_by_rate(runs, gate, recipe, "held_out")
                if not found:
                    continue
                cells = [losses_cell(found.get(rate)) for rate in rates]
                rows.append([f"`{recipe}`", gate, kind, *cells])
    return rows


def qk_norm_runs() -> dict[str, Runs]:
    """Return the runs without and with qk_norm, of the same gates, recipes, rates and seeds."""
    normed = of_kind(load(FURTHER)["runs"], "qknorm")
    return {"no": same_seeds(load(GATED)["runs"], normed), "yes": normed}


@table
def gated_qk_norm() -> str:
    """Held-out loss and stability with and without qk_norm."""
    kinds = qk_norm_runs()
    rates = " | ".join(f"{rate:g}" for rate in rates_of(kinds["yes"]))
    losses = markdown(f"recipe | gate | `qk_norm` | {rates}", compared_rows(kinds))
    about = prose(
        f"Held-out loss at each learning rate, without and with `qk_norm`, from the same seeds: one, or the mean and "
        f"standard deviation of three. {measured_on(load(FURTHER))}"
    )
    return f"{about}\n\n{losses}\n\n{inside_table(kinds, (2e-3, 4e-3, 1.6e-2))}"


def inside_table(kinds: Mapping[str, Runs], rates: Sequence[float]) -> str:
    """Return the largest activation and the first token's attention of each gate, recipe and kind at some rates."""
    lines = []
    for recipe in RECIPES:
        for gate in GATES:
            for kind, runs in kinds.items():
                activations = means(runs, gate, recipe, "largest_activation")
                shares = means(runs, gate, recipe, "first_token")
                spikes = means(runs, gate, recipe, "spikes")
                if not activations:
                    continue
                cells = [f"`{recipe}`", gate, kind]
                for rate in rates:
                    cells.append(number(activations.get(rate), "{:,.0f}"))
                for found, form in ((shares, "{:.2%}"), (spikes, "{:.1f}")):
                    for rate in rates[:2]:
                        cells.append(number(found.get(rate), form))
                lines.append(cells)
    header = ["recipe | gate | `qk_norm`"]
    header += [f"largest activation at {rates[0]:g}", *(f"at {rate:g}" for rate in rates[1:])]
    header += [f"attention on the first token at {rates[0]:g}", f"at {rates[1]:g}"]
    header += [f"spikes per run at {rates[0]:g}", f"at {rates[1]:g}"]
    return markdown(" | ".join(header), lines)


@table
def gated_124m() -> str:
    """Held-out loss, largest activation and attention on the first token of gated-124m."""
    document = load(FURTHER)
    runs = of_kind(document["runs"], "124m")
    forms = {"held_out": "{:.3f}", "largest_activation": "{:,.0f}", "first_token": "{:.2%}"}
    lines = []
    for rate in rates_of(runs):
        cells = [f"{rate:g}"]
        for value, form in forms.items():
            for gate in GATES:
                found = means(runs, gate, "delayed", value)
                cells.append(number(found.get(rate), form))
        lines.append(cells)
    header = ["learning rate"]
    for said in ("held-out loss", "largest activation", "attention on the first token"):
        header += [f"{said}: {GATES[0]}", *GATES[1:]]
    settings = document["settings"]["124m"]
    tokens = settings["steps"] * settings["batch_size"] * settings["seq_len"]
    about = prose(
        f"`gated-124m` under `delayed`, {tokens:,} tokens, one seed: held-out loss in nats per token, largest "
        f"activation and the first token's share of attention. {measured_on(document)}"
    )
    return f"{about}\n\n{markdown(' | '.join(header), lines)}"


def number(value: float | None, form: str) -> str:
    """Return a value as text: empty where there was no run, and "diverged" where a run diverged."""
    if value is None:
        return ""
    return form.format(value) if math.isfinite(value) else "diverged"


def losses_cell(losses: Sequence[float] | None) -> str:
    """Return the mean and spread of the seeds' losses, or how many of them diverged."""
    if losses is None:
        return ""
    lost = sum(not math.isfinite(loss) for loss in losses)
    return f"{lost} of {len(losses)} diverged" if lost else spread(losses)


def near_runs() -> Runs:
    """Return BF16 runs at 20M without qk_norm at rates near the best one, of the seeds that all rates have."""
    further = of_kind(load(FURTHER)["runs"], "")
    study = load(GATED)["runs"]
    seeds = {name.rpartition("-")[2] for name in further if "-0.0014-" in name}
    near = dict(further)
    for name, run in study.items():
        gate, recipe, rate, seed = name.split("-")
        if recipe == "bf16" and seed in seeds and float(rate) <= 4e-3:
            near[name] = run
    return near


@table
def gated_near() -> str:
    """Held-out loss at rates between those of the study, near the best."""
    runs = near_runs()
    rates = rates_of(runs)
    lines = []
    for gate in GATES:
        found = values_by_rate(runs, gate, "bf16", "held_out")
        if not found:
            continue
        cells = [losses_cell(found.get(rate)) for rate in rates]
        best = interpolated_best({rate: statistics.mean(found[rate]) for rate in found})
        of_seeds = []
        for seed in sorted({name.rpartition("-")[2] for name in runs}):
            own = {name: run for name, run in runs.items() if name.endswith(f"-{seed}")}
            of_seeds.append(interpolated_best(means(own, gate, "bf16", "held_out")))
        said = [f"{rate:.2e}".replace("e-03", "e-3") for rate in (best, *sorted(of_seeds))]
        lines.append([gate, *cells, said[0], ", ".join(said[1:])])
    columns = " | ".join(f"{rate:g}" for rate in rates)
    return markdown(f"gate | {columns} | best rate, interpolated | of each seed", lines)


@table
def gated_further_result() -> str:
    """Results of the runs with qk_norm and at 124M, in words, and which were not trained."""
    document = load(FURTHER)
    runs = document["runs"]
    lost = [name for name, run in runs.items() if run["diverged"] is not None]
    lines = [f"- Runs that diverged: {len(lost)} of {len(runs)}{_listed(lost)}."]
    control = runs.get(CONTROL)
    if control is not None:
        change = control["held_out"] - load(GATED)["runs"][CONTROL]["held_out"]
        lines.append(f"- A run of the study trained again: held-out loss {change:+.4f}.")
    normed = of_kind(runs, "qknorm")
    for recipe in RECIPES:
        lines += _against_no_gate(normed, recipe, f"`{recipe}`, `qk_norm`")
    for kind, recipe in (("qknorm", "bf16"), ("qknorm", "delayed"), ("124m", "delayed")):
        best = [f"{gate} {best_said(of_kind(runs, kind), gate, recipe)}" for gate in GATES]
        lines.append(f"- {KIND_NAMES[kind]}, `{recipe}`, best rate: {', '.join(best)}.")
    lines += _against_no_gate(of_kind(runs, "124m"), "delayed", "`gated-124m`, `delayed`")
    return "\n".join(lines) + not_trained(document)


def best_said(runs: Runs, gate: str, recipe: str) -> str:
    """Return the best rate of a gate, interpolated, or that it is the lowest or the highest that was tried."""
    losses = means(runs, gate, recipe, "held_out")
    best = min(losses, key=lambda rate: losses[rate])
    if best == min(losses):
        return f"{best:g} (the lowest tried)"
    if best == max(losses):
        return f"{best:g} (the highest tried)"
    return f"{interpolated_best(losses):.2e}".replace("e-0", "e-")


def _listed(names: Sequence[str]) -> str:
    return f" ({', '.join(names)})" if names else ""


def _against_no_gate(runs: Runs, recipe: str, about: str) -> list[str]:
    """Return a line with the losses of each gate minus those without one, at each rate that both have; or none."""
    plain = means(runs, "none", recipe, "held_out")
    parts = []
    for gate in GATES[1:]:
        gated = means(runs, gate, recipe, "held_out")
        changes = []
        for rate in plain:
            if rate in gated and math.isfinite(plain[rate]) and math.isfinite(gated[rate]):
                changes.append(f"{gated[rate] - plain[rate]:+.3f} at {rate:g}")
        if changes:
            parts.append(f"{gate} {', '.join(changes)}")
    if not parts:
        return []
    return [f"- {about}, held-out loss minus the one without a gate: {'; '.join(parts)}."]


def qk_norm_columns() -> dict[str, tuple[Runs, str]]:
    """Return the columns of the plot of qk_norm: each recipe without it and with it."""
    columns = {}
    for recipe in RECIPES:
        for kind, runs in qk_norm_runs().items():
            if any(f"-{recipe}-" in name for name in runs):
                columns[f"{recipe}, qk_norm: {kind}"] = (runs, recipe)
    return columns


def columns_124m() -> dict[str, tuple[Runs, str]]:
    """Return the only column of the plot of gated-124m."""
    return {"gated-124m, delayed": (of_kind(load(FURTHER)["runs"], "124m"), "delayed")}
