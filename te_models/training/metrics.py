"""What a run leaves to look at: metrics.jsonl, one object a step, and the loss curve as a PNG."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from te_models.errors import MissingPackage, needs


class MetricsLog:
    """metrics.jsonl of a run, written line by line; opening it at step N drops what was logged after N."""

    def __init__(self, path: Path | None, after_step: int = 0) -> None:
        """`path` None: nothing is written, as on every process of a run but the first."""
        self.file = None
        if path is None:
            return
        kept = [row for row in read_metrics(path) if row["step"] <= after_step] if path.exists() else []
        fresh = path.with_suffix(".tmp")
        fresh.write_text("".join(json.dumps(row) + "\n" for row in kept))
        os.replace(fresh, path)
        self.file = path.open("a", buffering=1)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one step; it must have a "step"."""
        if self.file is not None:
            self.file.write(json.dumps(dict(row)) + "\n")

    def close(self) -> None:
        """Close the file."""
        if self.file is not None:
            self.file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All rows of a metrics.jsonl; a last line cut short by a kill is left out."""
    rows = []
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            rows.append(json.loads(line))
    return rows


def plot_losses(path: Path, runs: Mapping[str, Sequence[Mapping[str, Any]]], title: str) -> None:
    """Draw the loss curves of `runs` (label -> rows with step, loss and now and then eval_loss) into a PNG.

    With several runs a second panel shows each one's smoothed loss against the first's, in percent.
    """
    smooth = {label: _smooth([row["loss"] for row in rows]) for label, rows in runs.items()}
    figure = _figure((8, 4.5 if len(runs) == 1 else 6.5))
    axes = figure.subplots(min(2, len(runs)), 1, sharex=True, squeeze=False, height_ratios=(2, 1)[: len(runs)])[:, 0]
    first = next(iter(smooth.values()))
    for number, (label, rows) in enumerate(runs.items()):
        steps, style = [row["step"] for row in rows], dict(color=f"C{number}", linewidth=1.5)
        if len(runs) == 1:
            axes[0].plot(steps, [row["loss"] for row in rows], color="C0", alpha=0.25, linewidth=0.8)
        axes[0].plot(steps, smooth[label], label=f"{label}, train (smoothed)", **style)
        if points := [(row["step"], row["eval_loss"]) for row in rows if "eval_loss" in row]:
            axes[0].plot(*zip(*points, strict=True), "o", color=f"C{number}", markersize=5, label=f"{label}, eval")
        if len(runs) > 1:
            gap = [100 * (own / reference - 1) for own, reference in zip(smooth[label], first, strict=False)]
            axes[1].plot(steps[: len(gap)], gap, **style)
    start = max(
        curve[len(curve) // 25] for curve in smooth.values()
    )  # the fall from the very start would flatten the rest
    axes[0].set(title=title, ylabel="cross-entropy (nats a token)", ylim=(None, 1.05 * start))
    axes[0].legend(frameon=False, fontsize=8, ncols=2 if len(runs) > 1 else 1)
    if len(runs) > 1:
        axes[1].set(ylabel=f"loss against\n{next(iter(runs))} (%)", ylim=(-3, 3))
    axes[-1].set_xlabel("step")
    for panel in axes:
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    _write(figure, path)


def plot_bench(path: Path, result: Mapping[str, Any], title: str) -> None:
    """Draw what te_models.inspect.bench measured: milliseconds a step, with quartiles, and peak memory where it is known."""
    rows = result["rows"]
    memory = [row["peak_gib"] for row in rows]
    panels = 1 if None in memory else 2
    figure = _figure((4 + 4 * panels, 1.6 + 0.4 * len(rows)))
    axes = figure.subplots(1, panels, sharey=True, squeeze=False)[0]
    names = [row["name"] for row in rows]
    colors = ["C0" if name.startswith("te-models") else "0.6" for name in names]
    spread = [
        [row["ms"] - row["ms_quartiles"][0] for row in rows],
        [row["ms_quartiles"][1] - row["ms"] for row in rows],
    ]
    bars = axes[0].barh(names, [row["ms"] for row in rows], xerr=spread, color=colors)
    axes[0].bar_label(bars, [f"{row['ms']:.1f}" for row in rows], padding=4, fontsize=8)
    axes[0].set(xlabel="forward + backward (ms)", title=title)
    if result["roofline"]:
        axes[0].axvline(result["roofline"]["total"], color="C3", linewidth=1, linestyle="--", label="roofline")
        axes[0].legend(frameon=False, fontsize=8)
    if panels == 2:
        axes[1].bar_label(axes[1].barh(names, memory, color=colors), fmt="%.1f", padding=4, fontsize=8)
        axes[1].set(xlabel="peak memory (GiB)")
    axes[0].invert_yaxis()
    for panel in axes:
        panel.margins(x=0.15)
        panel.spines[["top", "right"]].set_visible(False)
    _write(figure, path)


def drawn(path: Path, draw: Callable[[], None]) -> str:
    """Where `draw` put its figure, or why there is none: what was measured is kept without matplotlib too."""
    try:
        draw()
    except MissingPackage as error:
        return f"not drawn: {error}"
    return str(path)


def _figure(size: tuple[float, float]) -> Any:
    """An empty figure of so many inches."""
    with needs("drawing", "matplotlib", "3.8", "train"):
        from matplotlib.figure import Figure  # noqa: PLC0415  optional, and slow to import
    return Figure(figsize=size, dpi=130, layout="constrained")


def _write(figure: Any, path: Path) -> None:
    """The figure as a PNG, which is there as a whole or not at all."""
    fresh = path.with_suffix(".tmp.png")
    figure.savefig(fresh)
    os.replace(fresh, path)


def _smooth(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Exponential moving average without the bias of its start."""
    out, average = [], 0.0
    for count, value in enumerate(values, start=1):
        average = weight * average + (1 - weight) * value
        out.append(average / (1 - weight**count))
    return out
