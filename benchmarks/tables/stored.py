"""Tables of releases that are tuned as they are stored, beside bases in BF16 and FP8."""

from __future__ import annotations

from pathlib import Path

from benchmarks.tables.text import load, markdown, measured_on, prose, table
from te_models.training.plots import new_figure, save_figure

NAMES = {"gpt-oss-120b": "gpt-oss-120b", "qwen3.6-35b-a3b": "Qwen3.6-35B-A3B"}
FORMS = {"mxfp4": "MXFP4", "nvfp4": "NVFP4"}


@table
def stored_base_speed() -> str:
    """Tokens per second and peaks of steps with adapters over each base."""
    result = load("stored_base_h100")
    lines = []
    for row in result["rows"]:
        base = (
            FORMS[row["form"]] + ", as stored" if row["base"] == "stored" else row["base"].upper()
        )
        layers = f"{row['layers']} of {row['of_layers']}"
        cells = [NAMES[row["shape"]], layers, base, f"`{row['recipe']}`"]
        if "error" in row:
            lines.append([*cells, row["error"], "", "", f"{row.get('planned_gib', '')}"])
            continue
        alike = {}
        for other in result["rows"]:
            if other["shape"] == row["shape"] and other.get("layers") == row["layers"]:
                alike[other["base"], other["recipe"]] = other
        of_bf16 = alike.get(("bf16", "bf16"))
        ratio = "" if of_bf16 is None else f"{row['tokens_per_s'] / of_bf16['tokens_per_s']:.2f}x"
        lines.append(
            [
                *cells,
                f"{row['tokens_per_s']:,.0f}",
                ratio,
                f"{row['peak_gib']:.1f} GiB",
                f"{row['planned_gib']:.1f} GiB",
            ]
        )
    row = result["rows"][0]
    about = prose(
        f"{row['tokens']:,} tokens per step, adapters of rank {row['rank']} on "
        "attention and on every expert, 8-bit AdamW, full recomputation; forward, backward and update. "
        f"{measured_on(result)}"
    )
    header = (
        "shape | layers | base | recipe | tokens/s | to the BF16 base in `bf16` | peak | planned"
    )
    return f"{about}\n\n{markdown(header, lines)}"


@table
def stored_base_losses() -> str:
    """Losses over a stored base beside losses over its dequantized values."""
    result = load("stored_base_losses_h100")
    lines = []
    for run in result["runs"]:
        for name, row in run["rows"].items():
            lines.append(
                [
                    f"{name}, {FORMS[row['form']]}",
                    f"`{run['recipe']}`",
                    f"{row['first']:.4f} to {row['last']:.4f}",
                    f"{row['worst_difference']:.4%}",
                    f"{row['equal_steps']} of {row['compared_steps']}",
                ]
            )
    about = prose(
        "Small models of these kinds, four layers of 128, on the text of Python's standard library. "
        f"{measured_on(result)}"
    )
    header = "model | recipe | loss | largest difference | steps with the same loss in every bit"
    return f"{about}\n\n{markdown(header, lines)}"


def draw_stored_bases(path: Path) -> None:
    """Draw the tokens per second and the peak of each base."""
    rows = [row for row in load("stored_base_h100")["rows"] if "error" not in row]
    names = []
    for row in rows:
        base = FORMS[row["form"]] if row["base"] == "stored" else row["base"].upper()
        names.append(f"{NAMES[row['shape']]}, {row['layers']} layers, {base}, {row['recipe']}")
    colors = ["C0" if row["base"] == "stored" else "0.6" for row in rows]
    figure = new_figure((10, 0.9 + 0.35 * len(rows)))
    panels = (("tokens_per_s", "tokens/s", "{:,.0f}"), ("peak_gib", "peak, GiB", "{:.1f}"))
    for axes, (key, label, form) in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
        bars = axes.barh(names, [row[key] for row in rows], color=colors)
        axes.bar_label(bars, fmt=form, padding=4, fontsize=8)
        axes.margins(x=0.2)
        axes.set(xlabel=label)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].invert_yaxis()
    save_figure(figure, path)
