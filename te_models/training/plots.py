"""Loss curves as PNG files, drawn with matplotlib, which is optional."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from te_models.errors import MissingPackage, needs


def plot_losses(path: Path, runs: Mapping[str, Sequence[Mapping[str, Any]]], title: str) -> None:
    """Draw the loss curves of `runs` (label -> rows with step, loss and sometimes eval_loss) into a PNG.

    With several runs a second panel shows the smoothed loss of each relative to the first, in percent.
    """
    smooth = {label: _smooth([row["loss"] for row in rows]) for label, rows in runs.items()}
    figure = new_figure((8, 4.5 if len(runs) == 1 else 6.5))
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
    top = max(curve[len(curve) // 25] for curve in smooth.values())  # the first fall would flatten the rest
    axes[0].set(title=title, ylabel="cross-entropy (nats per token)", ylim=(None, 1.05 * top))
    axes[0].legend(frameon=False, fontsize=8, ncols=2 if len(runs) > 1 else 1)
    if len(runs) > 1:
        axes[1].set(ylabel=f"loss relative to\n{next(iter(runs))} (%)", ylim=(-3, 3))
    axes[-1].set_xlabel("step")
    for panel in axes:
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)


def try_drawing(path: Path, draw: Callable[[], None]) -> str:
    """Draw into `path`; return the path, or why it was not drawn: results must not be lost for want of matplotlib."""
    try:
        draw()
    except MissingPackage as error:
        return f"not drawn: {error}"
    return str(path)


def new_figure(size: tuple[float, float]) -> Any:
    """Return an empty figure of this size in inches.

    Raises:
        MissingPackage: matplotlib is missing or too old.
    """
    with needs("drawing", "matplotlib", "3.8", "train"):
        from matplotlib.figure import Figure  # noqa: PLC0415  optional, and slow to import
    return Figure(figsize=size, dpi=130, layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Write the figure as a PNG, atomically."""
    fresh = path.with_suffix(".tmp.png")
    figure.savefig(fresh)
    os.replace(fresh, path)


def _smooth(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Return the exponential moving average, corrected for its start."""
    out, average = [], 0.0
    for count, value in enumerate(values, start=1):
        average = weight * average + (1 - weight) * value
        out.append(average / (1 - weight**count))
    return out
