"""The table and the plot of products whose K cuBLAS splits: what GPUs did, and the rule of the emulated engine."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.tables.text import load, markdown, measured_on, prose, table
from te_models.engine.emulated.split_sums import RUN, is_known, runs_of_k
from te_models.training.plots import new_figure, save_figure

H100, H200 = "split_k_h100", "split_k_bits_h200"
# Of an H100: through te.Linear's forward and torch._scaled_mm. K -> whether each shape has the rule's runs.
Found = dict[int, list[bool]]


def h100_by_k() -> tuple[Found, dict[int, float]]:
    """Return which shapes of an H100 follow the rule, by K, and the share of elements that differ from one run."""
    follows: Found = defaultdict(list)
    differing: dict[int, float] = {}
    for rows in load(H100)["shapes"].values():
        for row in rows:
            m, k, n = row["m"], row["k"], row["n"]
            if is_known(m, k, n):
                follows[k].append(row["runs"] == [runs_of_k(m, k, n)])
                differing[k] = max(differing.get(k, 0.0), row["differing"])
    return follows, differing


def h200_by_k() -> tuple[Found, dict[int, set[int]]]:
    """Return which shapes of an H200 follow the rule, by K, and the numbers of runs that were found."""
    follows: Found = defaultdict(list)
    runs: dict[int, set[int]] = defaultdict(set)
    for m, k, n, found in load(H200)["shapes"]:
        if is_known(m, k, n):
            follows[k].append(found == runs_of_k(m, k, n))
            runs[k].add(found)
    return follows, runs


@table
def split_sums() -> str:
    """Products of few outputs and a long K: how many follow the rule of the engine."""
    h100, differing = h100_by_k()
    h200, _ = h200_by_k()
    lines = []
    for k in sorted({*h100, *h200}):
        share = f"{differing[k]:.0%}" if k in differing else ""
        lines.append(
            [f"{k:,}", str(runs_of_k(16, k, 32)), _count(h100.get(k)), _count(h200.get(k)), share]
        )
    results: list[dict[str, Any]] = [load(H100), load(H200)]
    about = prose(
        f"FP8 products with sums that the rule knows, compared in every bit. {' '.join(map(measured_on, results))}"
    )
    header = (
        "K | runs by the rule | H100: products that have them | H200 | "
        "elements that one run would give other bits"
    )
    return f"{about}\n\n{markdown(header, lines)}"


def _count(found: list[bool] | None) -> str:
    return "" if found is None else f"{sum(found)} of {len(found)}"


def draw_split_sums(path: Path) -> None:
    """Draw the number of runs over K: the rule, and what an H200 did."""
    _, runs = h200_by_k()
    figure = new_figure((7, 3.5))
    axes = figure.subplots()
    steps = range(1024, max(runs) + 1, 128)
    axes.plot(
        steps,
        [runs_of_k(16, k, 16) for k in steps],
        color="0.6",
        label=f"(K - 1) / {RUN:,}, at least 1",
    )
    for number, (k, found) in enumerate(sorted(runs.items())):
        axes.plot([k] * len(found), sorted(found), "oC0", label="" if number else "bits of an H200")
    axes.set(xlabel="K", ylabel="runs")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    save_figure(figure, path)
