"""Tables of what the reports claim that this project answers, made again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.tables.speed import step_rows
from benchmarks.tables.text import GIB, load, markdown, measured_on, prose, table
from te_models.training.plots import new_figure, save_figure

# Tokens per second that the report on FP8 and compilation expects, by shape and row.
EXPECTED = {
    ("454m", "bf16"): "650,000",
    ("454m", "delayed"): "850,000",
    ("454m", "torchao float8, not compiled"): "below 50,000",
    ("350m", "bf16"): "700,000",
    ("350m", "delayed"): "900,000",
}
SHAPES = ("350m",)
OPTIMIZED = ("124m",)  # of optimizer_speed
# Runs in step_h200.json beside compiled PyTorch.
NAMES = {
    "torchao": "torchao float8",
    "te-layer": "`te.TransformerLayer`, `delayed`",
    "te-models delayed+no_edges+graph": "te-models `delayed`",
    "te-models delayed+graph": "te-models `delayed`, first and last layer in BF16",
}


def compiled_rows(shape: str) -> dict[str, dict[str, Any]]:
    """Return the rows that were measured of one shape of the command on FP8 and compilation."""
    rows = load(f"compiled_fp8_{shape}_h100")["rows"]
    return {name: row for name, row in rows.items() if "error" not in row}


@table
def compiled_fp8() -> str:
    """Whole steps of the reported command, by implementation."""
    lines = []
    for shape in SHAPES:
        rows = compiled_rows(shape)
        for name, row in rows.items():
            speed = row["tokens_per_second"]
            own = speed / rows["bf16"]["tokens_per_second"]
            theirs = speed / rows["PyTorch BF16, compiled"]["tokens_per_second"]
            lines.append(
                [
                    shape.upper(),
                    _named(name),
                    f"{speed:,.0f}",
                    f"{own:.2f}x",
                    f"{theirs:.2f}x",
                    f"{row['peak_bytes'] / GIB:.1f} GiB",
                    EXPECTED.get((shape, name), ""),
                ]
            )
    result = load("compiled_fp8_350m_h100")
    size = result["size"]
    about = prose(
        f"{size['gradient_accumulation']} x {size['batch_size']} x {size['seq_len']:,} tokens per step, gradient norm "
        f"and AdamW included. Medians of three steps after two. {measured_on(result)}"
    )
    header = (
        "shape | run | tokens/s | to `bf16` | to compiled PyTorch | peak memory | report, tokens/s"
    )
    return f"{about}\n\n{markdown(header, lines)}"


def _named(row: str) -> str:
    """Return the name of a row, with the recipe of ours as code."""
    name, comma, rest = row.partition(",")
    return f"te-models `{name}`{comma}{rest}" if name in ("bf16", "delayed", "current") else row


@table
def compiled_fp8_result() -> str:
    """What came out of the reported command, in words."""
    lines = []
    for shape in SHAPES:
        rows = compiled_rows(shape)
        speed = {name: row["tokens_per_second"] for name, row in rows.items()}
        line = (
            f"- {shape.upper()}: FP8 is {speed['delayed'] / speed['bf16']:.2f} times as fast as BF16 here, and "
            f"torchao's {speed['torchao float8, compiled'] / speed['PyTorch BF16, compiled']:.2f} times as fast as "
            "compiled PyTorch."
        )
        if "delayed, plain operations, no graph" in speed:
            plain = speed["delayed, plain operations, no graph"] / speed["bf16"]
            line += f" Without compilation and CUDA graphs FP8 has {plain:.2f} of the speed of BF16 with them."
        lines.append(line)
    return "\n".join(lines)


@table
def optimizer_speed() -> str:
    """The time of each optimizer's part of a step on a GPU."""
    lines = []
    about = ""
    for shape in OPTIMIZED:
        result = load(f"optimizer_speed_{shape}_h100")
        about = measured_on(result)
        rows = result["rows"]
        base = rows["adamw"]
        for name, row in rows.items():
            if "error" in row:
                continue
            kept = row["masters_bytes"] + row["state_bytes"]
            of_adamw = row["tokens_per_second"] / base["tokens_per_second"]
            peak = f"{row['peak_bytes'] / GIB:.2f} GiB"
            lines.append(
                [
                    f"`{result['preset']}`",
                    _optimizer(name),
                    f"{row['optimizer']:.1f} ms",
                    f"{row['tokens_per_second']:,.0f}",
                    f"{of_adamw - 1:+.1%}",
                    f"{row['state_bytes'] / result['parameters']:.2f}",
                    f"{kept / GIB:.2f} GiB",
                    peak,
                ]
            )
    header = (
        "model | optimizer | its part of a step | tokens/s | to `adamw` | state, bytes per parameter | with masters | "
        "peak of a step"
    )
    return f"{about}\n\n{markdown(header, lines)}"


def _optimizer(row: str) -> str:
    """Return the name of a row, the optimizer as code."""
    name, comma, rest = row.partition(",")
    return f"`{name}`{comma}{rest}"


def _grid_peaks(shape: str) -> dict[tuple[str, bool, str], int]:
    """Return the measured peaks of a shape by recipe, whether weights are FP8, and mode of recomputation."""
    rows = load("checkpoint_grid_h200")["rows"][shape]
    return {(row["recipe"], row["fp8_params"], row["mode"]): row["peak"] for row in rows}


@table
def recomputation_peaks() -> str:
    """Peaks of BF16 and FP8 without and with full recomputation, as shares of BF16's without."""
    lines = []
    for shape in load("checkpoint_grid_h200")["rows"]:
        peaks = _grid_peaks(shape)
        base = peaks["bf16", False, "none"]
        full = peaks["bf16", False, "full"]
        for recipe, fp8_params in dict.fromkeys((key[0], key[1]) for key in peaks):
            none = peaks[recipe, fp8_params, "none"]
            own = peaks[recipe, fp8_params, "full"]
            cells = [f"{none / GIB:.2f} GiB", f"{none / base:.1%}"]
            cells += [f"{own / GIB:.2f} GiB", f"{own / base:.1%}", f"{own / full:.3f}"]
            lines.append([shape, f"`{recipe}`", "FP8" if fp8_params else "BF16", *cells])
    header = (
        "model | recipe | weights | peak | of BF16's | peak, full recomputation | of BF16's without | "
        "of BF16's with it"
    )
    about = prose(
        "`gated-1b`, 8 x 2,048 tokens, and the 8B width, 4 x 4,096; forward and backward, all layers in the recipe. "
        f"{measured_on(load('checkpoint_grid_h200'))}"
    )
    return f"{about}\n\n{markdown(header, lines)}"


@table
def recomputation_result() -> str:
    """What came out of recomputation with FP8, in words."""
    lines = []
    for shape in load("checkpoint_grid_h200")["rows"]:
        peaks = _grid_peaks(shape)
        base = peaks["bf16", False, "full"]
        for recipe in ("delayed", "current"):
            with_bf16 = peaks[recipe, False, "full"] / base
            with_fp8 = peaks[recipe, True, "full"] / base
            lines.append(
                f"- {shape}: `{recipe}` with full recomputation takes {with_fp8:.3f} of BF16's peak with FP8 weights "
                f"(`--fp8-params`), and {with_bf16:.3f} with BF16 weights."
            )
    return "\n".join(lines)


@table
def fp8_speedup() -> str:
    """How many times as fast as BF16 each recipe is, at 1B and 8B width."""
    lines = []
    grid = load("checkpoint_grid_h200")["rows"]
    for shape, key in (("gated-1b", "1b"), ("8B width, 4 layers", "8b-width")):
        base = next(
            row["ms"] for row in grid[shape] if row["recipe"] == "bf16" and row["mode"] == "none"
        )
        for row in grid[shape]:
            if row["mode"] == "none" and row["recipe"] != "bf16":
                weights = ", FP8 weights" if row["fp8_params"] else ""
                lines.append(
                    [shape, f"te-models `{row['recipe']}`{weights}", "", f"{base / row['ms']:.2f}x"]
                )
        _, rows, _ = step_rows(key)
        for name, label in NAMES.items():
            if name in rows:
                lines.append([shape, label, f"{rows[name]['speed']:.2f}x", ""])
    header = "model | run | to compiled PyTorch in BF16 | to te-models `bf16`"
    about = prose(
        f"Forward and backward. {measured_on(load('checkpoint_grid_h200'))} The column beside PyTorch is of runs of "
        "2026-11-22, at equal FLOPs."
    )
    return f"{about}\n\n{markdown(header, lines)}"


@table
def optimizer_speed_result() -> str:
    """What came out of the times of optimizers, in words."""
    lines = []
    for shape in OPTIMIZED:
        result = load(f"optimizer_speed_{shape}_h100")
        rows = {name: row for name, row in result["rows"].items() if "error" not in row}
        parts = []
        if {"muon", "muon8bit"} <= rows.keys():
            speed = rows["muon8bit"]["tokens_per_second"] / rows["muon"]["tokens_per_second"]
            state = rows["muon8bit"]["state_bytes"] / rows["muon"]["state_bytes"]
            parts.append(
                f"8-bit Muon has {speed:.3f} of the speed of Muon, and {1 - state:.0%} less state in all"
            )
        if {"adamw", "adamw, in CPU memory"} <= rows.keys():
            offload = rows["adamw, in CPU memory"]["tokens_per_second"]
            share = offload / rows["adamw"]["tokens_per_second"]
            parts.append(f"AdamW in CPU memory has {share:.2f} of the speed of AdamW on the GPU")
        if "galore, rank 128, in backward" in rows:
            peaks = [rows[f"galore, rank 128{way}"]["peak_bytes"] for way in ("", ", in backward")]
            change = (peaks[1] - peaks[0]) / GIB
            parts.append(f"projecting in backward changes GaLore's peak by {change:+.2f} GiB")
        lines.append(f"- `{result['preset']}`: {'; '.join(parts)}.")
    return "\n".join(lines)


def draw_compiled_fp8(path: Path, shape: str) -> None:
    """Draw the tokens per second of each row of the command on FP8 and compilation."""
    rows = compiled_rows(shape)
    figure = new_figure((9, 0.9 + 0.35 * len(rows)))
    axes = figure.subplots()
    colors = [
        "C0" if name.partition(",")[0] in ("bf16", "delayed", "current") else "0.6" for name in rows
    ]
    speeds = [row["tokens_per_second"] for row in rows.values()]
    bars = axes.barh(list(rows), speeds, color=colors)
    axes.bar_label(bars, fmt="{:,.0f}", padding=4, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set(xlabel="tokens/s, whole steps", title=f"gated-896, {shape.upper()}, one H100")
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)
