"""Tables of the study of optimizers: the loss of 1,000 steps at 124M."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.optimizer_study import (
    OPTIMIZERS,
    TWINS,
    best_rate,
    held_out_losses,
    missing_runs,
)
from benchmarks.small_runs import spread
from benchmarks.tables.text import load, markdown, measured_on, prose, table

STUDY = "optimizer_study_h200"


def best_losses(document: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the held-out losses at its best rate, of all seeds, of each optimizer that has run at all its rates."""
    best = {}
    for name in OPTIMIZERS:
        losses = held_out_losses(document["runs"], name)
        searched = losses.keys() >= set(document["rates"])
        if searched or (losses and name in TWINS):
            best[name] = losses[best_rate(losses)]
    return best


@table
def optimizer_study() -> str:
    """Held-out loss after 1,000 steps under each optimizer."""
    document = load(STUDY)
    runs = document["runs"]
    by_optimizer = {name: held_out_losses(runs, name) for name in OPTIMIZERS}
    rates = sorted({rate for losses in by_optimizer.values() for rate in losses})
    base = best_losses(document).get("adamw")
    lines = []
    for name, losses in by_optimizer.items():
        if not losses:
            continue
        best = best_rate(losses)
        cells = [f"`{name}`"]
        cells += [spread(losses[rate]) if rate in losses else "" for rate in rates]
        change = statistics.mean(losses[best]) - statistics.mean(base) if base else None
        cells += [f"{best:g}", "" if change is None else f"{change:+.3f}"]
        lines.append(cells)
    columns = " | ".join(f"{rate:g}" for rate in rates)
    settings = document["settings"]
    tokens = settings["batch_size"] * settings["seq_len"]
    about = prose(
        f"Held-out loss in nats per token of `{document['preset']}` under `delayed` after {settings['steps']:,} "
        f"steps of {tokens:,} tokens at each learning rate, of one seed; at the best rate the mean and standard "
        f"deviation of three. One with 8-bit state has the best rate of the same in FP32. "
        f"{measured_on(document)}"
    )
    return f"{about}\n\n{markdown(f'optimizer | {columns} | best rate | to `adamw`', lines)}"


@table
def optimizer_study_result() -> str:
    """Results of the study of optimizers, in words, and which runs were not trained."""
    document = load(STUDY)
    best = best_losses(document)
    lines = []
    for name, other, said in (
        ("muon8bit", "muon", "8-bit Muon minus Muon"),
        ("adamw8bit", "adamw", "AdamW of 8 bits minus AdamW"),
        ("muon", "adamw", "Muon minus AdamW"),
        ("galore", "adamw", "GaLore minus AdamW"),
    ):
        if name in best and other in best:
            change = statistics.mean(best[name]) - statistics.mean(best[other])
            lines.append(f"- {said}, each at its best rate: {change:+.4f} nats.")
    lost = [name for name, run in document["runs"].items() if run["diverged"] is not None]
    listed = f" ({', '.join(lost)})" if lost else ""
    lines.append(f"- Runs that diverged: {len(lost)} of {len(document['runs'])}{listed}.")
    missing = missing_runs(document)
    if missing:
        names = ", ".join(f"`{name}`" for name in missing)
        lines.append(f"- Not trained, for want of time: {names}.")
    return "\n".join(lines)
