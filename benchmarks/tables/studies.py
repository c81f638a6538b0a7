"""Tables of studies of many runs: gated attention over learning rates."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.gated_learning_rates import (
    GATES,
    RATES,
    RECIPES,
    Runs,
    rates_of,
    uniform_share,
    values_by_rate,
)
from benchmarks.small_runs import spread
from benchmarks.tables.text import load, markdown, measured_on, prose, table

GATED = "gated_learning_rates_h200"
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
                cells.append(spread(found[rate]) if rate in found else "")
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
