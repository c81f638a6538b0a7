"""Tables and plot of gradients that travel in fewer bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.tables.text import load, markdown, measured_on, prose, table
from te_models.training.plots import new_figure, save_figure

# Dtypes of sums over two GPUs that were measured -> bytes that travel per gradient.
SENT = {"float32": "4", "bfloat16": "2", "float8": "1.01"}
# Runs of 500 steps that differ in the dtype of sums.
LOSSES = ("reduce_dtypes_cpu",)


@table
def gradient_dtypes() -> str:
    """Steps on two GPUs whose gradients are sent in FP32, BF16 and FP8."""
    lines = []
    results = {dtype: load(f"reduce_1b_{dtype}_h200_x2") for dtype in SENT}
    base = results["float32"]["rows"][0]["tokens_per_second"]
    for dtype, result in results.items():
        row = result["rows"][0]
        lines.append(
            [
                f"`{dtype}`",
                SENT[dtype],
                f"{row['ms']:.1f} ms",
                f"{row['tokens_per_second']:,.0f}",
                f"{row['tokens_per_second'] / base:.3f}x",
                f"{row['peak_gib']:.1f} GiB",
            ]
        )
    settings = results["float32"]["settings"]
    about = prose(
        f"`gated-1b` under `{settings['recipe']}`, FSDP2, {settings['batch_size']} x {settings['seq_len']:,} tokens on "
        f"each GPU, one micro-batch per step. {measured_on(results['float32']).replace('on one ', 'on two ', 1)}"
    )
    header = "`--reduce-dtype` | bytes sent per gradient | step | tokens/s of both | to `float32` | peak per GPU"
    return f"{about}\n\n{markdown(header, lines)}"


@table
def gradient_losses() -> str:
    """Losses of runs that differ in how gradients travel."""
    lines = []
    result: dict[str, Any] = {}
    for name in LOSSES:
        result = load(name)
        settings = result["settings"]
        base = result["rows"]["float32"]
        for dtype, row in result["rows"].items():
            if "error" in row:
                continue
            lines.append(
                [
                    f"`{settings['preset']}`, `{settings['recipe']}`, {settings['steps']} steps",
                    "`float32`, again" if dtype == "again" else f"`{dtype}`",
                    f"{row['loss']:.4f}",
                    f"{row['held_out']:.4f}",
                    f"{row['held_out'] / base['held_out'] - 1:+.3%}",
                ]
            )
    about = prose(f"Two processes, one micro-batch per step, one seed. {measured_on(result)}")
    header = "run | `--reduce-dtype` | last 20 losses | held-out loss | to `float32`"
    return f"{about}\n\n{markdown(header, lines)}"


def draw_gradient_losses(path: Path) -> None:
    """Draw how far the losses with gradients in BF16 and in FP8 are from FP32's, over steps."""
    result = load(LOSSES[0])
    base = result["rows"]["float32"]["curve"]
    steps = [result["settings"]["steps"] * i / len(base) for i in range(len(base))]
    figure = new_figure((8, 3.5))
    axes = figure.subplots()
    for dtype, row in result["rows"].items():
        if dtype not in ("float32", "again") and "curve" in row:
            differences = [
                100 * (own / of_fp32 - 1) for own, of_fp32 in zip(row["curve"], base, strict=True)
            ]
            axes.plot(steps, differences, label=dtype)
    axes.set(xlabel="step", ylabel="loss relative to float32 (%)", title="smoothed training loss")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    save_figure(figure, path)
