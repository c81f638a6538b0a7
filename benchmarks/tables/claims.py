"""Tables of what the reports claim that this project answers, made again."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from benchmarks.tables.speed import step_rows
from benchmarks.tables.text import GIB, load, markdown, measured_on, prose, table
from te_models.optim import OPTIMIZERS
from te_models.training.plots import new_figure, save_figure

# Tokens per second that the report on FP8 and compilation expects, by shape and row.
EXPECTED = {
    ("454m", "bf16"): "650,000",
    ("454m", "delayed"): "850,000",
    ("454m", "torchao float8, not compiled"): "below 50,000",
    ("350m", "bf16"): "700,000",
    ("350m", "delayed"): "900,000",
}
# Shapes of the reported command -> the GPU that measured them.
SHAPES = {"350m": "h200", "454m": "h100"}
OPTIMIZED = ("124m", "1b")  # of optimizer_speed
PEERS = {"torch": "PyTorch BF16, compiled", "torchao": "torchao float8, compiled"}
# Shares of BF16's memory in the report on activation checkpointing: 74.3 of 76.2 % and 29.7 of 16.1 % of its GPU.
REPORTED = {("torchao", "none"): "0.975", ("torchao", "full"): "1.845"}
# Runs in step_h200.json beside compiled PyTorch.
NAMES = {
    "torchao": "torchao float8",
    "te-layer": "`te.TransformerLayer`, `delayed`",
    "te-models delayed+no_edges+graph": "te-models `delayed`",
    "te-models delayed+graph": "te-models `delayed`, first and last layer in BF16",
}


def compiled_rows(shape: str) -> dict[str, dict[str, Any]]:
    """Return the rows that were measured of one shape of the command on FP8 and compilation."""
    rows = load(f"compiled_fp8_{shape}_{SHAPES[shape]}")["rows"]
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
    results = [load(f"compiled_fp8_{shape}_{gpu}") for shape, gpu in SHAPES.items()]
    size = results[0]["size"]
    where = " ".join(
        f"{shape.upper()}: {measured_on(result)}"
        for shape, result in zip(SHAPES, results, strict=True)
    )
    about = prose(
        f"{size['gradient_accumulation']} x {size['batch_size']} x {size['seq_len']:,} tokens per step, gradient norm "
        f"and AdamW included. Medians of three steps after two. {where}"
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
    """Results of the reported command, in words."""
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
        if "torchao float8, not compiled" in speed:
            eager = speed["torchao float8, not compiled"] / speed["PyTorch BF16, not compiled"]
            line += f" torchao's FP8 without compilation has {eager:.2f} of the speed of PyTorch's BF16 without it."
        if "delayed, max-autotune" in speed:
            tuned = speed["delayed, max-autotune"] / speed["delayed"]
            line += f" `max-autotune` changes the speed of `delayed` by {tuned - 1:+.1%}."
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


def recomputation_peaks_of(shape: str, gpu: str = "h100") -> dict[tuple[str, bool, str], int]:
    """Return the measured peaks of a shape by recipe or peer, whether weights are FP8, and mode of recomputation."""
    rows = load(f"checkpoint_grid_{gpu}")["rows"][shape]
    return {(row["recipe"], row["fp8_params"], row["mode"]): row["peak"] for row in rows}


@table
def recomputation_peaks() -> str:
    """Peaks of BF16 and FP8 without and with full recomputation, here and in torchao."""
    result = load("checkpoint_grid_h100")
    speeds = {
        (row["recipe"], row["fp8_params"], row["mode"]): row["ms"]
        for row in result["rows"]["gated-1b"]
    }
    peaks = recomputation_peaks_of("gated-1b")
    lines = []
    for recipe, fp8_params in dict.fromkeys((key[0], key[1]) for key in peaks):
        name = PEERS.get(recipe, f"te-models `{recipe}`")
        base = "torch" if recipe in PEERS else "bf16"
        cells = [name, "FP8" if fp8_params else "BF16"]
        for mode in ("none", "full"):
            own = peaks[recipe, fp8_params, mode]
            reported = REPORTED.get((recipe, mode))
            cells.append(f"{own / GIB:.2f} GiB")
            cells.append(
                f"{own / peaks[base, False, mode]:.3f}" + (f" ({reported})" if reported else "")
            )
        none = speeds[recipe, fp8_params, "none"]
        cells.append(f"{speeds[recipe, fp8_params, 'full'] / none:.2f}x")
        lines.append(cells)
    header = (
        "run | weights | peak | to BF16 (report) | peak, full recomputation | to BF16 (report) | "
        "time, to no recomputation"
    )
    about = prose(
        f"`gated-1b`, forward and backward of 8 x 2,048 tokens, all layers in the recipe. {measured_on(result)}"
    )
    return f"{about}\n\n{markdown(header, lines)}"


@table
def recomputation_result() -> str:
    """Results of recomputation with FP8, in words."""
    peaks = recomputation_peaks_of("gated-1b")
    theirs = peaks["torchao", False, "full"] / peaks["torch", False, "full"]
    lines = [
        f"- The report is right about torchao: with full recomputation float8 takes {theirs:.3f} of BF16's peak, "
        f"without {peaks['torchao', False, 'none'] / peaks['torch', False, 'none']:.3f}."
    ]
    for recipe in ("delayed", "current"):
        ours = peaks[recipe, False, "full"]
        bf16 = peaks["bf16", False, "full"]
        fp8_weights = peaks[recipe, True, "full"] / bf16
        lines.append(
            f"- `{recipe}` with full recomputation takes {fp8_weights:.3f} of the peak of BF16 here with FP8 weights "
            f"(`--fp8-params`), and {ours / bf16:.3f} with BF16 weights, which is "
            f"{ours / peaks['torch', False, 'full']:.3f} of PyTorch's in BF16 and "
            f"{ours / peaks['torchao', False, 'full']:.3f} of torchao's in float8."
        )
    wide = recomputation_peaks_of("8B width, 4 layers", "h200")
    shares = [
        f"{wide[recipe, fp8, 'full'] / wide['bf16', False, 'full']:.3f}"
        for fp8 in (True, False)
        for recipe in ("delayed", "current")
    ]
    lines.append(
        f"- At 8B width (4 layers, 4 x 4,096 tokens, on an H200) it takes {shares[0]} and {shares[1]} with FP8 "
        f"weights, {shares[2]} and {shares[3]} with BF16 weights."
    )
    return "\n".join(lines)


@table
def recomputation_equal() -> str:
    """Bits of 200 steps under every mode of recomputation, beside a second run without."""
    result = load("checkpoint_parity_own_h200")
    exact = load("checkpoint_parity_deterministic_h200")
    lines = []
    for recipe in dict.fromkeys(row["recipe"] for row in result["rows"]):
        cells = []
        for document in (result, exact):
            own = [row for row in document["rows"] if row["recipe"] == recipe]
            cells.append(_equal([row for row in own if row["mode"] != "again"]))
            cells.append(_equal([row for row in own if row["mode"] == "again"]))
        lines.append([f"`{recipe}`", *cells])
    text = prose(
        f"{result['steps']} steps of four layers of 256, three micro-batches of 4 x {result['seq_len']} tokens each, "
        "with cuDNN's attention: modes `selective`, `full` and 2, with weights quantized in every micro-batch, once "
        "per step, and with FP8 weights. Equal: every loss, and every weight, gradient, scale and history after each "
        f"{result['every']}th step. {measured_on(result)}"
    )
    header = (
        "recipe | runs that equal the one without | second runs without that equal it | "
        "the same with `--deterministic` | second runs"
    )
    return f"{text}\n\n{markdown(header, lines)}"


@table
def recompute_detection() -> str:
    """The host's time to know that a pass is a recompute."""
    result = load("recompute_detection_h200")
    lines = []
    for recipe, row in result["rows"].items():
        lines.append(
            [
                f"`{recipe}`",
                f"{row['none_ms']:.0f} ms",
                f"{row['full_ms']:.0f} ms",
                f"{row['contexts_per_step']:.0f} x {row['context_us']:.0f} us",
                f"{row['frames_per_step']:.0f} x {row['frame_us']:.0f} us: {row['full_with_frames_ms']:.0f} ms",
                f"{row['walks_per_step']:.0f} x {row['walk_us']:,.0f} us: {row['full_with_walks_ms']:,.0f} ms",
            ]
        )
    about = prose(
        f"`gated-1b`, eager steps (forward and backward) of {result['settings']['batch_size']} x "
        f"{result['settings']['seq_len']:,} tokens; as a CUDA graph a step runs none of this again. "
        f"{measured_on(result)}"
    )
    header = (
        "recipe | step, `none` | step, `full` | contexts here | names of frames, in each linear: step with them | "
        "`inspect.stack()` in each linear: step with it"
    )
    return f"{about}\n\n{markdown(header, lines)}"


def _equal(rows: list[dict[str, Any]]) -> str:
    """Return how many rows are equal, and at which step the first of the others was found to differ."""
    others = [row["first_difference"] for row in rows if not all(row["same"].values())]
    found = f"{len(rows) - len(others)} of {len(rows)}"
    steps = [step for step in others if step is not None]
    return f"{found} (first seen at step {min(steps)})" if steps else found


def draw_recomputation(path: Path) -> None:
    """Draw the peaks of BF16 and FP8 without and with full recomputation, here and in torchao."""
    peaks = recomputation_peaks_of("gated-1b")
    runs = list(dict.fromkeys((key[0], key[1]) for key in peaks))
    names = []
    for recipe, fp8_params in runs:
        names.append(
            PEERS.get(recipe, f"te-models {recipe}") + (", FP8 weights" if fp8_params else "")
        )
    figure = new_figure((10, 0.9 + 0.35 * len(runs)))
    for axes, mode in zip(figure.subplots(1, 2, sharey=True), ("none", "full"), strict=True):
        values = [peaks[recipe, fp8_params, mode] / GIB for recipe, fp8_params in runs]
        colors = ["0.6" if recipe in PEERS else "C0" for recipe, _ in runs]
        axes.bar_label(axes.barh(names, values, color=colors), fmt="{:.2f}", padding=4, fontsize=8)
        axes.margins(x=0.15)
        axes.set(
            xlabel="peak, GiB", title="no recomputation" if mode == "none" else "full recomputation"
        )
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].invert_yaxis()
    save_figure(figure, path)


@table
def fp8_speedup() -> str:
    """How many times as fast as BF16 each recipe is, at 1B and 8B width."""
    lines = []
    for gpu in ("H100", "H200"):
        for shape, rows in load(f"checkpoint_grid_{gpu.lower()}")["rows"].items():
            times = {}
            for row in rows:
                if row["mode"] == "none":
                    times[row["recipe"], row["fp8_params"]] = row["ms"]
            for (recipe, fp8_params), ms in times.items():
                if recipe == "torch":
                    continue
                weights = ", FP8 weights" if fp8_params else ""
                name = PEERS.get(recipe, f"te-models `{recipe}`{weights}")
                theirs = f"{times['torch', False] / ms:.2f}x" if ("torch", False) in times else ""
                ours = "" if recipe in PEERS else f"{times['bf16', False] / ms:.2f}x"
                lines.append([shape, gpu, name, theirs, ours])
    for shape, key in (("gated-1b", "1b"), ("8B width, 4 layers", "8b-width")):
        _, rows, _ = step_rows(key)
        for name, label in NAMES.items():
            if name in rows:
                lines.append([shape, "H200", label, f"{rows[name]['speed']:.2f}x", ""])
    header = "model | GPU | run | to compiled PyTorch in BF16 | to te-models `bf16`"
    about = prose(
        f"Forward and backward. {measured_on(load('checkpoint_grid_h100'))} On one H200 on 2026-11-21 and, beside "
        "PyTorch at equal FLOPs, on 2026-11-22."
    )
    return f"{about}\n\n{markdown(header, lines)}"


@table
def divergence_advice() -> str:
    """Planted causes of divergence, and the loss with the advised change and with another."""
    result = load("divergence_advice_cpu")
    lines = []
    for advice, row in result["rows"].items():
        shown = {}
        for name in ("advised", "other"):
            changed = {}
            for key, value in row[name].items():
                if row["options"].get(key) != value:
                    changed[key] = value
            shown[name] = ", ".join(f"`{key}={value}`" for key, value in changed.items())
        means = {name: statistics.mean(values) for name, values in row["distances"].items()}
        lines.append(
            [
                row["cause"],
                f"{means['healthy']:+.3f}",
                f"{means['planted']:+.3f}",
                advice,
                f"{means['advised']:+.3f}",
                shown["other"],
                f"{means['other']:+.3f}",
            ]
        )
    where = result["environment"]
    seeds = len(next(iter(result["rows"].values()))["distances"]["healthy"])
    about = prose(
        f"`{result['model']}` under `delayed`, trained on for {result['steps']} steps of 4 x 64 tokens, {seeds} seeds; "
        f"mean loss of the last {result['last']} steps above BF16's with the same cause, in nats per token. On the "
        f"emulated engine, {where['cpu']}, torch {where['torch'].split('+')[0]}, {where['date']}."
    )
    header = "planted | without it | with it | the report's advice | with the advice | another change | with that"
    return f"{about}\n\n{markdown(header, lines)}"


@table
def optimizer_speed_result() -> str:
    """Results of the times of optimizers, in words."""
    lines = []
    for shape in OPTIMIZED:
        result = load(f"optimizer_speed_{shape}_h100")
        rows = {name: row for name, row in result["rows"].items() if "error" not in row}
        parts = []
        muon = rows["muon"]
        for name, said in (
            ("muon8bit", "8-bit Muon"),
            ("muon8bit, rest adamw8bit", "with 8-bit AdamW for the rest as well"),
        ):
            speed = rows[name]["tokens_per_second"] / muon["tokens_per_second"]
            saved = 1 - rows[name]["state_bytes"] / muon["state_bytes"]
            parts.append(f"{said}: {speed - 1:+.1%} throughput to Muon, {saved:.1%} less state")
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


@table
def optimizer_offload() -> str:
    """AdamW in CPU memory at 1B, which an H200 measured with its host idle."""
    result = load("optimizer_speed_1b_h200")
    rows = result["rows"]
    size = result["size"]
    lines = []
    for name in ("adamw", "adamw, in CPU memory"):
        row = rows[name]
        lines.append(
            [
                _optimizer(name),
                f"{row['optimizer']:,.0f} ms",
                f"{row['tokens_per_second']:,.0f}",
                f"{row['peak_bytes'] / GIB:.2f} GiB",
            ]
        )
    rest = statistics.median(rows["adamw"]["seconds"]) - rows["adamw"]["optimizer"] / 1e3
    update = rows["adamw, in CPU memory"]["optimizer"] / 1e3
    shape = f"{size['batch_size']} x {size['seq_len']:,} tokens"
    about = f"{measured_on(result)} `{result['preset']}`, {shape} per update."
    # An update of `update` seconds takes a fifth of the time of n micro-batches of `rest` seconds each.
    enough = math.ceil(update / (0.2 * rest))
    return (
        f"{about}\n\n{markdown('optimizer | its part of a step | tokens/s | peak', lines)}\n\n"
        f"An update takes the time of {update / rest:.0f} such micro-batches, so it costs a run 20 % from "
        f"{enough} micro-batches per update on."
    )


def draw_divergence(path: Path) -> None:
    """Draw the loss above BF16's with each planted cause: without a change, with the advised one, with another."""
    rows = load("divergence_advice_cpu")["rows"]
    changes = {
        "healthy": "without the cause",
        "planted": "with the cause",
        "advised": "with the advised change",
        "other": "with another change",
    }
    figure = new_figure((8, 4))
    axes = figure.subplots()
    width = 0.8 / len(changes)
    for number, (key, label) in enumerate(changes.items()):
        heights = [statistics.mean(row["distances"][key]) for row in rows.values()]
        places = [place + (number - 1.5) * width for place in range(len(rows))]
        bars = axes.bar(places, heights, width, label=label)
        axes.bar_label(bars, fmt="{:+.3f}", fontsize=7, padding=2)
    axes.set_xticks(range(len(rows)), [f"advice:\n{advice}" for advice in rows])
    axes.set(yscale="log", ylabel="loss above BF16's, nats per token")
    axes.margins(y=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    save_figure(figure, path)


def draw_compiled_fp8(path: Path, shape: str) -> None:
    """Draw the tokens per second of each row of the command on FP8 and compilation."""
    speeds = {name: row["tokens_per_second"] for name, row in compiled_rows(shape).items()}
    ours = ("bf16", "delayed", "current")
    title = f"gated-896, {shape.upper()}, one {SHAPES[shape].upper()}"
    _draw_bars(path, speeds, ours, "tokens/s, whole steps", title)


def draw_optimizers(path: Path, shape: str) -> None:
    """Draw the tokens per second of whole steps under each optimizer."""
    result = load(f"optimizer_speed_{shape}_h100")
    speeds = {}
    for name, row in result["rows"].items():
        if "error" not in row:
            speeds[name] = row["tokens_per_second"]
    size = result["size"]
    title = f"{result['preset']}, {size['batch_size']} x {size['seq_len']:,} tokens, one H100"
    _draw_bars(path, speeds, tuple(OPTIMIZERS), "tokens/s, whole steps", title)


def draw_speedup(path: Path) -> None:
    """Draw the milliseconds of forward and backward at 1B, here and in other libraries."""
    times = {}
    for row in load("checkpoint_grid_h100")["rows"]["gated-1b"]:
        if row["mode"] == "none":
            weights = ", FP8 weights" if row["fp8_params"] else ""
            times[PEERS.get(row["recipe"], f"{row['recipe']}{weights}")] = row["ms"]
    ours = ("bf16", "delayed", "current")
    _draw_bars(
        path, times, ours, "forward and backward, ms", "gated-1b, 8 x 2,048 tokens, one H100"
    )


def _draw_bars(
    path: Path, values: dict[str, float], ours: tuple[str, ...], label: str, title: str
) -> None:
    """Draw a bar for each value; those whose name begins, up to a comma, with one of `ours` are in color."""
    figure = new_figure((9, 0.9 + 0.35 * len(values)))
    axes = figure.subplots()
    colors = ["C0" if name.partition(",")[0] in ours else "0.6" for name in values]
    bars = axes.barh(list(values), list(values.values()), color=colors)
    axes.bar_label(bars, fmt="{:,.0f}", padding=4, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set(xlabel=label, title=title)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)
