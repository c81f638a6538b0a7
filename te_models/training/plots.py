"""The curves of runs as PNG files, drawn with matplotlib, which is optional."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from te_models.errors import MissingPackage, needs
from te_models.files.atomic import replacing_file
from te_models.training.timing import Row

INK = "#111827"
MUTED = "#4b5563"
TRAIN = "#2563eb"
EVAL = "#d9480f"
RATE = "#7c3aed"
SPEED = "#0f766e"
# The share of the scale by which single losses may extend it: all but spikes are seen whole.
MOST_ROOM = 0.5


def plot_run(
    path: Path,
    rows: Sequence[Row],
    title: str,
    subtitle: str = "",
    first_eval_loss: float = math.nan,
) -> None:
    """Draw a run into a PNG: raw and smoothed loss with the evaluations, with learning rate and tokens/s below.

    Args:
        path: the file.
        rows: metrics of each step: step, loss, learning_rate, tokens_per_second and sometimes eval_loss and recipe;
            a line marks where the recipe changes.
        title, subtitle: lines above.
        first_eval_loss: loss of the evaluation before the first step; nan: there was none.
    """
    figure = new_figure((9, 6.4))
    figure.get_layout_engine().set(h_pad=0.08, w_pad=0.1, hspace=0.04)
    grid = figure.add_gridspec(2, 2, height_ratios=(2.6, 1))
    top = figure.add_subplot(grid[0, :])
    rate = figure.add_subplot(grid[1, 0])
    speed = figure.add_subplot(grid[1, 1])
    top.set_title(title, loc="left", fontsize=13, fontweight="bold", color=INK, pad=30)
    top.annotate(
        subtitle,
        (0, 1),
        (0, 12),
        "axes fraction",
        textcoords="offset points",
        fontsize=9.5,
        color=MUTED,
    )
    steps = [row["step"] for row in rows]
    loss = [row["loss"] for row in rows]
    _draw_loss(top, steps, loss, _evaluations(rows, first_eval_loss))
    for number, (step, name) in enumerate(recipes_of(rows)[1:]):
        _mark(top, step, name, number)
    _draw_rate(rate, steps, [row["learning_rate"] for row in rows])
    _draw_speed(speed, steps, [row["tokens_per_second"] for row in rows])
    for panel in (top, rate, speed):
        panel.set_xlim(0, max(steps))
        # Of the upper panel on the left: its legend is on the right.
        panel.set_xlabel("step", fontsize=9, color=MUTED, loc="left" if panel is top else "center")
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.grid(color="#e5e7eb", linewidth=0.8)
        panel.set_axisbelow(True)
        panel.tick_params(which="both", labelsize=8.5, colors=MUTED, length=0)
        panel.spines[["top", "right", "left"]].set_visible(False)
        panel.spines["bottom"].set_color("#9ca3af")
    save_figure(figure, path)


def _evaluations(rows: Sequence[Row], first_eval_loss: float) -> list[tuple[int, float]]:
    """Return step and loss of each evaluation; a loss that is not finite has no place in a plot."""
    points = []
    if math.isfinite(first_eval_loss):
        points.append((0, first_eval_loss))
    for row in rows:
        if math.isfinite(row.get("eval_loss", math.nan)):
            points.append((row["step"], row["eval_loss"]))
    return points


def _draw_rate(axes: Any, steps: Sequence[int], rates: Sequence[float]) -> None:
    """Draw the learning rate."""
    axes.plot(steps, rates, color=RATE, linewidth=1.5, **_point(steps))
    axes.set_title("learning rate", loc="left", fontsize=9, color=MUTED)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylim(bottom=0)


def _draw_speed(axes: Any, steps: Sequence[int], speeds: Sequence[float]) -> None:
    """Draw the tokens per second of each step, and their median."""
    axes.plot(steps, speeds, color=SPEED, alpha=0.3, linewidth=0.8, **_point(steps))
    typical = float(np.median(speeds))
    axes.axhline(typical, color=SPEED, linewidth=1.2)
    axes.set_title(f"tokens/s, median {typical:,.0f}", loc="left", fontsize=9, color=MUTED)
    # A few steps that are much faster, such as the last one of a short run, would flatten the curve.
    axes.set_ylim(0, 1.15 * float(np.quantile(speeds, 0.98)))
    axes.yaxis.set_major_formatter("{x:,.0f}")


def recipes_of(rows: Sequence[Row]) -> list[tuple[int, str]]:
    """Return the recipes of a run in order, each with its first step; none of rows that name none."""
    changes: list[tuple[int, str]] = []
    for row in rows:
        name = row.get("recipe")
        if name is not None and (not changes or changes[-1][1] != name):
            changes.append((row["step"], name))
    return changes


def _point(steps: Sequence[int]) -> dict[str, Any]:
    """Return the keywords that show a single step, through which no line can be drawn."""
    return dict(marker="o", markersize=5.5, clip_on=False, zorder=3) if len(steps) == 1 else {}


def _mark(axes: Any, step: int, recipe: str, number: int) -> None:
    """Mark the step from which on a run has another recipe; the names of several changes have a line each."""
    # Half a step to the left: between the last step of the old recipe and the first of the new one.
    axes.axvline(step - 0.5, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
    last = axes.dataLim.x1
    left = step - 0.5 > 0.85 * last  # the name would leave the plot
    below = 24 if step < 0.15 * last else 0  # the number of the first evaluation
    axes.annotate(
        recipe,
        (step - 0.5, 1),
        (-4 if left else 4, -4 - below - 12 * number),
        ("data", "axes fraction"),
        textcoords="offset points",
        ha="right" if left else "left",
        va="top",
        fontsize=8.5,
        color=MUTED,
    )


def _draw_loss(
    axes: Any, steps: Sequence[int], loss: Sequence[float], points: Sequence[tuple[int, float]]
) -> None:
    """Draw the training loss, and the evaluations with the first, the best and the last value written beside them."""
    smoothed = smooth(loss)
    point = _point(steps)
    axes.plot(steps, loss, color=TRAIN, alpha=0.25, linewidth=0.8, label="training", **point)
    axes.plot(steps, smoothed, color=TRAIN, linewidth=2, label="training, smoothed", **point)
    evaluated = [value for _, value in points]
    if points:
        axes.plot(
            [step for step, _ in points],
            evaluated,
            "o-",
            color=EVAL,
            linewidth=1,
            markersize=5.5,
            markeredgecolor="white",
            label="evaluation",
            clip_on=False,
            zorder=3,
        )
    _write_evaluations(axes, points)
    # Quantiles of the raw loss, so that a single spike does not set the scale.
    seen = np.concatenate([smoothed, evaluated, np.quantile(loss, [0.01, 0.99])])
    low = float(seen.min())
    high = float(seen.max())
    room = MOST_ROOM * (high - low)
    lowest = min(loss)
    peak = max(loss)
    if lowest >= low - room:
        low = min(low, lowest)
    if peak <= high + room:
        high = max(high, peak)
    else:
        _write_cut_peak(axes, steps[loss.index(peak)], peak)
    _scale_losses(axes, low, high)
    axes.set_ylabel("loss (nats per token)", fontsize=9, color=MUTED)
    # Below the axes, where it covers neither a curve nor a number.
    axes.legend(
        frameon=False,
        fontsize=9,
        labelcolor=INK,
        loc="upper right",
        bbox_to_anchor=(1, -0.07),
        ncols=3,
        borderaxespad=0,
    )


def _write_cut_peak(axes: Any, step: int, peak: float) -> None:
    """Write the highest loss at the upper edge, above its step, where the scale has no room for it."""
    axes.annotate(
        f"\u2191 {peak:.4g}",
        (step, 1),
        (0, 1),
        ("data", "axes fraction"),
        textcoords="offset points",
        ha="left",
        va="bottom",
        fontsize=8.5,
        color=TRAIN,
    )


def _write_evaluations(axes: Any, points: Sequence[tuple[int, float]]) -> None:
    """Write the first, the best and the last loss of an evaluation beside their points."""
    evaluated = [value for _, value in points]
    if not points:
        return
    style: dict[str, Any] = dict(
        textcoords="offset points", fontsize=9, color=EVAL, fontweight="bold"
    )
    box = dict(boxstyle="round,pad=0.15", facecolor="white", alpha=0.8, edgecolor="none")
    last = len(points) - 1
    best = int(np.argmin(evaluated))
    first_is_before = points[0][0] == 0
    if first_is_before:  # left of it are the ticks of the axis
        axes.annotate(f"{evaluated[0]:.3f}", points[0], (9, 3), ha="left", bbox=box, **style)
    if best != last and not (best == 0 and first_is_before):
        axes.annotate(
            f"{evaluated[best]:.3f}", points[best], (0, -15), ha="center", bbox=box, **style
        )
    if last > 0 or not first_is_before:
        # Right of the axes, where it covers no curve.
        axes.annotate(
            f"{evaluated[last]:.3f}",
            (1, evaluated[last]),
            (7, 0),
            ("axes fraction", "data"),
            ha="left",
            va="center",
            **style,
        )


def _scale_losses(axes: Any, low: float, high: float) -> None:
    """Give the axis of losses a logarithmic scale if they span more than a factor of 2.5, else a linear one."""
    if low > 0 and high > 2.5 * low:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.06, high * 1.08)
        axes.set_yticks(log_ticks(low / 1.06, high * 1.08))
        # The minor ticks that a logarithmic axis brings along have labels of their own.
        axes.set_yticks([], minor=True)
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        margin = 0.08 * (high - low) or 0.1
        axes.set_ylim(low - margin, high + margin)


def log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers between `low` and `high` whose labels do not touch on a logarithmic axis of a few inches.

    The roundest come first, and others where there is room.
    """
    ticks: list[float] = []
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    # From round to less round: later ones only fill what is left free.
    for digits in (1, 2, 5, 3, 4, 7, 6, 8, 1.5, 9, 2.5, 1.2):
        for decade in decades:
            tick = float(f"{digits}e{decade}")
            apart = all(
                abs(math.log(tick / other)) > 0.08 * math.log(high / low) for other in ticks
            )
            if low <= tick <= high and apart:
                ticks.append(tick)
    return sorted(ticks)


def try_drawing(path: Path, draw: Callable[[], None]) -> str:
    """Draw into `path`; return the path, or why it was not drawn: results must not be lost if matplotlib is missing."""
    try:
        draw()
    except MissingPackage as error:
        return f"not drawn: {error}"
    return str(path)


def new_figure(size: tuple[float, float]) -> Any:
    """Return an empty figure of this size in inches."""
    with needs("drawing", "matplotlib", "3.8", "train"):
        from matplotlib.figure import Figure  # noqa: PLC0415  optional, and slow to import
    return Figure(figsize=size, dpi=130, layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Write the figure as a PNG, atomically."""
    with replacing_file(path) as fresh:
        figure.savefig(fresh)


def smooth(values: Sequence[float], width: float | None = None) -> NDArray[np.float64]:
    """Return values smoothed without lag: a straight line fitted around each of them, weighted by a Gaussian.

    The fit is centered, so that a bend stays where it is. At the ends it uses the values on one side
    and follows their slope (local linear regression: Fan and Gijbels 1996), where an average would lag. `width` is the
    standard deviation of the weights in steps; None: a 50th of the steps, at least one. No result is outside the values
    that it is fitted to, where a line beside a jump would leave them.
    """
    y = np.asarray(values, dtype=np.float64)
    if width is None:
        width = max(1.0, len(y) / 50)
    reach = math.ceil(3 * width)
    offsets = np.arange(-reach, reach + 1)
    kernel = np.exp(-0.5 * (offsets / width) ** 2)

    def moment(power: int, of: NDArray[np.float64]) -> NDArray[np.float64]:
        # Reversed, since a convolution reverses it again; cut to the values, without the tails of "full".
        return np.convolve(of, (kernel * offsets**power)[::-1])[reach : reach + len(of)]

    # The normal equations of a line around each step: s are weighted sums of the offsets' powers 0, 1 and 2, t of the
    # values times the powers 0 and 1.
    ones = np.ones_like(y)
    s0 = moment(0, ones)
    s1 = moment(1, ones)
    s2 = moment(2, ones)
    t0 = moment(0, y)
    t1 = moment(1, y)
    spread = s0 * s2 - s1**2
    # A spread of zero is one step alone, through which no line goes: its own average then.
    fitted = np.where(spread > 1e-9, s2 * t0 - s1 * t1, t0) / np.where(spread > 1e-9, spread, s0)
    # NaN beside the ends, which the minimum and the maximum below leave out.
    padded = np.pad(y, reach, constant_values=np.nan)
    near = np.lib.stride_tricks.sliding_window_view(padded, len(offsets))
    return np.clip(fitted, np.nanmin(near, axis=1), np.nanmax(near, axis=1))
