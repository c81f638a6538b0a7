"""The loss curves of several runs in one plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from te_models.training.plots import new_figure, save_figure, smooth


def plot_losses(path: Path, runs: Mapping[str, Sequence[Mapping[str, Any]]], title: str) -> None:
    """Draw the loss curves of `runs` (label -> rows with step, loss and sometimes eval_loss) into a PNG.

    With several runs a second panel shows the smoothed loss of each relative to the first, in percent.
    """
    curves = {label: smooth([row["loss"] for row in rows]) for label, rows in runs.items()}
    figure = new_figure((8, 4.5 if len(runs) == 1 else 6.5))
    axes = figure.subplots(
        min(2, len(runs)), 1, sharex=True, squeeze=False, height_ratios=(2, 1)[: len(runs)]
    )[:, 0]
    first = next(iter(curves.values()))
    for number, (label, rows) in enumerate(runs.items()):
        steps, style = [row["step"] for row in rows], dict(color=f"C{number}", linewidth=1.5)
        if len(runs) == 1:
            axes[0].plot(
                steps, [row["loss"] for row in rows], color="C0", alpha=0.25, linewidth=0.8
            )
        axes[0].plot(steps, curves[label], label=f"{label}, train (smoothed)", **style)
        if points := [(row["step"], row["eval_loss"]) for row in rows if "eval_loss" in row]:
            axes[0].plot(
                *zip(*points, strict=True),
                "o",
                color=f"C{number}",
                markersize=5,
                label=f"{label}, eval",
            )
        if len(runs) > 1:
            gap = [
                100 * (own / reference - 1)
                for own, reference in zip(curves[label], first, strict=False)
            ]
            axes[1].plot(steps[: len(gap)], gap, **style)
    top = max(
        curve[len(curve) // 25] for curve in curves.values()
    )  # the first fall would flatten the rest
    axes[0].set(title=title, ylabel="cross-entropy (nats per token)", ylim=(None, 1.05 * top))
    axes[0].legend(frameon=False, fontsize=8, ncols=2 if len(runs) > 1 else 1)
    if len(runs) > 1:
        axes[1].set(ylabel=f"loss relative to\n{next(iter(runs))} (%)", ylim=(-3, 3))
    axes[-1].set_xlabel("step")
    for panel in axes:
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)
