"""Curves of a run: smoothing without lag, and what a plot shows."""

import importlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fewer import every

from benchmarks.loss_curves import plot_losses
from te_models.training import plots
from te_models.training.plots import plot_run, recipes_of, smooth

pytest.importorskip("matplotlib")


def rows(count: int) -> list[dict[str, Any]]:
    found = [
        dict(
            step=step,
            loss=3 - step / count,
            learning_rate=1e-3 / step,
            tokens_per_second=1000.0 + step,
        )
        for step in range(1, count + 1)
    ]
    for row in found:
        if row["step"] % 5 == 0:
            row["eval_loss"] = row["loss"] + 0.1
    return found


@pytest.mark.parametrize("count", [1, 2, 3, 50, 400])
def test_a_straight_line_stays_as_it_is_to_its_ends(count: int) -> None:
    line = 3 - 0.01 * np.arange(count)
    np.testing.assert_allclose(smooth(line), line, atol=1e-9)


@pytest.mark.parametrize("place", [0, 1, 7, 20, 39])
def test_each_value_is_a_weighted_line_fit_around_it(place: int) -> None:
    values, width = np.random.default_rng(0).normal(size=40), 2.5
    steps = np.arange(40) - place
    near = np.abs(steps) <= math.ceil(3 * width)
    weights = np.sqrt(np.exp(-0.5 * (steps[near] / width) ** 2))
    expected = np.polynomial.polynomial.polyfit(steps[near], values[near], 1, w=weights)[0]
    assert smooth(values, width)[place] == pytest.approx(expected, abs=1e-9)


def test_no_smoothed_value_leaves_the_values_around_it() -> None:
    """Beside a jump the line of the fit goes below the first value, which is the lowest."""
    diverged = [6.5, 348.9, 752.9, 1022.3, 876.0, 766.2]
    assert smooth(diverged)[0] == 6.5
    jump = np.where(np.arange(400) < 200, 1.0, 50.0)
    assert smooth(jump).min() == 1.0 and smooth(jump).max() == 50.0


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are drawn, instead of files."""
    found: list[Any] = []
    monkeypatch.setattr(plots, "save_figure", lambda figure, path: found.append(figure))
    return found


@pytest.mark.parametrize("first", [3.25, math.nan])
def test_a_run_shows_loss_evaluations_rate_and_speed(
    first: float, figures: list[Any], tmp_path: Path
) -> None:
    plot_run(tmp_path / "loss.png", rows(20), "nano · current · text", "better", first)
    top, rate, speed = figures[0].axes
    raw, smoothed, evaluations = top.lines
    assert (
        list(raw.get_ydata()) == [row["loss"] for row in rows(20)]
        and len(smoothed.get_ydata()) == 20
    )
    expected = [(0, first)] * (first == first) + [
        (step, 3 - step / 20 + 0.1) for step in (5, 10, 15, 20)
    ]
    np.testing.assert_allclose(evaluations.get_xydata(), expected)
    assert top.get_title(loc="left") == "nano · current · text" and "better" in [
        t.get_text() for t in top.texts
    ]
    assert rate.lines[0].get_ydata()[0] == 1e-3 and "median 1,010" in speed.get_title(loc="left")
    assert top.get_ylim()[0] < 2 and top.get_ylim()[1] > (3.25 if first == first else 3)


def test_a_large_fall_is_drawn_on_a_logarithmic_axis(figures: list[Any], tmp_path: Path) -> None:
    plot_run(tmp_path / "loss.png", rows(20), "", "", 11.0)
    plot_run(tmp_path / "loss.png", rows(20), "", "", 3.0)
    assert [figure.axes[0].get_yscale() for figure in figures] == ["log", "linear"]


def test_the_highest_of_ordinary_losses_is_seen_whole(figures: list[Any], tmp_path: Path) -> None:
    """The 99 % quantile of 40 losses lies below the largest one."""
    found = rows(40)
    found[7]["loss"] = 3.4
    plot_run(tmp_path / "loss.png", found, "", "", 3.1)
    assert figures[0].axes[0].get_ylim()[1] > 3.4


def test_a_spike_sets_no_scale_and_is_written(figures: list[Any], tmp_path: Path) -> None:
    found = rows(400)
    found[200]["loss"] = 40.0
    plot_run(tmp_path / "loss.png", found, "", "", 3.1)
    top = figures[0].axes[0]
    assert top.get_ylim()[1] < 20
    assert [text.xy[0] for text in top.texts if "40" in text.get_text()] == [201]


def overlap(boxes: list[Any]) -> bool:
    return any(a.overlaps(b) for n, a in enumerate(boxes) for b in boxes[:n])


@pytest.mark.parametrize(
    ("first", "last"), every(4, [11.0, 7.0, 3.0, 300.0], [2.9, 1.2, 0.9, 0.05, 0.0003])
)
def test_numbers_do_not_overlap(
    first: float, last: float, figures: list[Any], tmp_path: Path
) -> None:
    """Nor does the legend cover one; whatever the range of the losses, the axis has some."""
    agg = importlib.import_module("matplotlib.backends.backend_agg")
    found = rows(40)
    for row in found:
        row["loss"] = first * (last / first) ** (row["step"] / 40)
        row.pop("eval_loss", None)
    found[-1]["eval_loss"] = last
    plot_run(tmp_path / "loss.png", found, "title", "subtitle", first)
    canvas = agg.FigureCanvasAgg(figures[0])
    canvas.draw()
    top, drawn = figures[0].axes[0], canvas.get_renderer()
    low, high = top.get_ylim()
    ticks = [
        label.get_window_extent(drawn)
        for label, place in zip(top.get_yticklabels(), top.get_yticks(), strict=True)
        if low <= place <= high and label.get_text()
    ]
    assert len(ticks) >= 4 and not overlap(ticks)
    legend = top.get_legend().get_window_extent(drawn)
    texts = [text.get_window_extent(drawn) for text in (*top.texts, *top.get_xticklabels())]
    assert not any(legend.overlaps(box) for box in (*texts, *ticks, top.bbox))


def test_a_change_of_recipe_is_marked(figures: list[Any], tmp_path: Path) -> None:
    found = rows(40)
    for row in found:
        row["recipe"] = "current" if row["step"] < 31 else "bf16"
    plot_run(tmp_path / "loss.png", found, "title")
    top = figures[0].axes[0]
    assert list(top.lines[-1].get_xdata()) == [30.5, 30.5]
    assert "bf16" in [text.get_text() for text in top.texts]
    assert recipes_of(found) == [(1, "current"), (31, "bf16")]


def test_a_single_step_is_a_point(figures: list[Any], tmp_path: Path) -> None:
    plot_run(tmp_path / "loss.png", rows(1), "title")
    assert all(panel.lines[0].get_marker() == "o" for panel in figures[0].axes)


@pytest.mark.parametrize("count", [1, 12])
def test_files_are_written(count: int, tmp_path: Path) -> None:
    plot_run(tmp_path / "loss.png", rows(count), "title", "subtitle", 3.0)
    plot_losses(tmp_path / "both.png", {"a": rows(count), "b": rows(count)}, "title")
    for name in ("loss.png", "both.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert len(list(tmp_path.iterdir())) == 2
