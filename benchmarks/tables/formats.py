"""The table and the plot of losses by FP8 format."""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.tables.text import load, markdown, measured_on, prose, table
from te_models.training.plots import new_figure, save_figure


def _relative() -> dict[str, list[float]]:
    """Return the held-out loss of each format over BF16's of the same seed, less 1, of seeds that all have."""
    rows = load("format_loss_cpu")["rows"]
    seeds = [seed for seed in rows["bf16"] if all(seed in row for row in rows.values())]
    return {
        name: [row[seed] / rows["bf16"][seed] - 1 for seed in seeds] for name, row in rows.items()
    }


@table
def format_loss() -> str:
    """Held-out loss under each FP8 format."""
    result = load("format_loss_cpu")
    lines = []
    for name, relative in _relative().items():
        losses = list(result["rows"][name].values())[: len(relative)]
        recipe, comma, form = name.partition(", ")
        lines.append(
            [
                f"`{recipe}`",
                form,
                f"{statistics.mean(losses):.4f}",
                f"{statistics.mean(relative):+.2%}",
                ", ".join(f"{value:+.2%}" for value in relative),
            ]
        )
    run = result["run"]
    about = prose(
        f"`gated-nano` cut to three layers of 64, {run['steps']} steps of {run['batch_size']} x {run['seq_len']} "
        f"bytes of Python's documentation, all layers in the recipe, emulated engine. {measured_on(result)}"
    )
    header = "recipe | formats | held-out loss, nats per byte | to `bf16` | each seed"
    return f"{about}\n\n{markdown(header, lines)}"


def draw_formats(path: Path) -> None:
    """Draw the loss of each format to BF16's, a point for each seed."""
    found = {name: values for name, values in _relative().items() if name != "bf16"}
    figure = new_figure((8, 3.5))
    axes = figure.subplots()
    for place, values in enumerate(found.values()):
        axes.scatter([100 * value for value in values], [place] * len(values), s=18, color="C0")
        axes.scatter(100 * statistics.mean(values), place, marker="|", s=200, color="C1")
    axes.axvline(0.0, color="0.6", linewidth=1)
    axes.set_yticks(range(len(found)), list(found))
    axes.invert_yaxis()
    axes.set(xlabel="held-out loss relative to bf16 (%), each seed and their mean")
    axes.grid(alpha=0.3)
    save_figure(figure, path)
