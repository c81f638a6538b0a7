"""Results of te_models.inspect.bench as a table, a plot and a JSON file."""

import functools
import json
from pathlib import Path

from rich.table import Table

from te_models.files.atomic import replace_text
from te_models.files.formats import Document, Fields
from te_models.planning.memory_plan import unit_for
from te_models.training.plots import new_figure, save_figure, try_drawing


def bench_table(result: Fields) -> Table:
    """Return a result of te_models.inspect.bench as a table."""
    title = f"forward + backward, {_conditions(result)}"
    columns = ["ms", "spread", "tokens/s", "TFLOP/s", "speed"]
    if result["roofline"]:
        columns.append("of roofline")
    peaks = [row["peak_gib"] * 2**30 for row in result["rows"] if row["peak_gib"] is not None]
    unit, size = unit_for(max(peaks, default=0))
    if peaks:
        columns.append(f"peak {unit}")
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for name in (*columns, "loss"):
        table.add_column(name, justify="right")
    table.caption = (
        f"spread: between the quartiles; speed: relative to {result['reference']} at equal FLOPs"
    )
    table.caption_justify = "left"
    for row in result["rows"]:
        low, high = row["ms_quartiles"]
        name = row["name"].replace("+", " +")  # where a narrow terminal may break it
        spread = f"{100 * (high - low) / row['ms']:.1f} %"
        cells = [name, f"{row['ms']:.2f}", spread, f"{row['tokens_per_second']:,.0f}"]
        cells += [f"{row['model_tflops']:.1f}", f"{row['speed']:.2f}x"]
        if result["roofline"]:
            cells.append(f"{row['of_roofline']:.2f}")
        if row["peak_gib"] is not None:
            cells.append(f"{row['peak_gib'] * 2**30 / size:.2f}")
        cells.append(f"{row['loss']:.3f}")
        table.add_row(*cells)
    if result["roofline"]:
        parts = []
        for name, part in result["roofline"].items():
            if name != "total" and part:
                parts.append(f"{name} {part:.1f}")
        table.caption += (
            f"\nroofline at equal FLOPs {result['roofline']['total']:.1f} ms: {', '.join(parts)}"
        )
    return table


def _conditions(result: Document) -> str:
    """Return the size of a step, and the device and versions that it ran on."""
    settings = result["settings"]
    environment = result["environment"]
    place = environment.get("gpu", "CPU: the emulated engine's numbers, not a GPU's speed")
    return f"batch {settings['batch_size']} x {settings['seq_len']} tokens, {place}"


def write_bench(result: dict[str, object], out: str, title: str) -> str:
    """Write bench.json and bench.png into the folder `out`; return the plot's path, or why it was not drawn."""
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / "bench.json", json.dumps(result, indent=1) + "\n")
    plot = folder / "bench.png"
    return try_drawing(plot, functools.partial(plot_bench, plot, result, title))


def plot_bench(path: Path, result: Document, title: str) -> None:
    """Draw a result of te_models.inspect.bench: milliseconds per step with quartiles, and peak memory where known."""
    rows = result["rows"]
    peaks = [row["peak_gib"] * 2**30 for row in rows if row["peak_gib"] is not None]
    panels = 2 if len(peaks) == len(rows) else 1
    unit, size = unit_for(max(peaks, default=0))
    figure = new_figure((4 + 4 * panels, 2.0 + 0.4 * len(rows)))
    axes = figure.subplots(1, panels, sharey=True, squeeze=False)[0]
    names = []
    colors = []
    below = []
    above = []
    for row in rows:
        names.append(row["name"])
        # Peers in gray.
        colors.append("C0" if row["name"].startswith("te-models") else "0.6")
        low, high = row["ms_quartiles"]
        below.append(abs(row["ms"] - low))
        above.append(abs(row["ms"] - high))
    bars = axes[0].barh(names, [row["ms"] for row in rows], xerr=[below, above], color=colors)
    axes[0].bar_label(bars, [f"{row['ms']:.1f}" for row in rows], padding=4, fontsize=8)
    axes[0].set(xlabel="forward + backward (ms)")
    figure.suptitle(f"{title}\n{_conditions(result)}", x=0.01, ha="left", fontsize=10)
    if result["roofline"]:
        axes[0].axvline(
            result["roofline"]["total"], color="C3", linewidth=1, linestyle="--", label="roofline"
        )
        axes[0].legend(frameon=False, fontsize=8)
    if panels == 2:
        memory = axes[1].barh(names, [peak / size for peak in peaks], color=colors)
        axes[1].bar_label(memory, fmt="%.1f", padding=4, fontsize=8)
        axes[1].set(xlabel=f"peak memory ({unit})")
    axes[0].invert_yaxis()
    for panel in axes:
        panel.margins(x=0.15)
        panel.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)
