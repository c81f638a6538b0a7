"""Tables of optimizers: their bytes, the memory of a run of a report, and short losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.tables.text import GIB, load, markdown, measured_on, table
from te_models.config.presets import get_preset
from te_models.config.recipe import get_recipe
from te_models.optim import OPTIMIZERS
from te_models.planning.memory_plan import Memory, plan_memory
from te_models.training.plots import new_figure, save_figure


@table
def optimizer_bytes() -> str:
    """Bytes per parameter of every optimizer, from the table of optimizers."""
    rows = ([f"`{name}`", optimizer.description] for name, optimizer in OPTIMIZERS.items())
    return markdown("optimizer | state", rows)


@table
def optimizer_memory() -> str:
    """Measured bytes of optimizer state."""
    result = load("optimizer_memory_cpu")
    base = result["rows"]["adamw"]["total_bytes"]
    rows = (
        [f"`{name.split(',')[0]}`{name[len(name.split(',')[0]):]}", f"{r['masters_bytes'] / GIB:.2f} GiB",
         f"{r['state_bytes'] / GIB:.2f} GiB", f"{r['state_bytes'] / result['parameters']:.2f}",
         f"{r['total_bytes'] / GIB:.2f} GiB", f"{1 - r['total_bytes'] / base:.0%}" if name != "adamw" else ""]
        for name, r in result["rows"].items()
    )  # fmt: skip
    header = "optimizer | masters | state | state, bytes per parameter | total with weights and gradients | saved"
    about = f"{result['parameters']:,} parameters with BF16 weights and gradients, on a CPU."
    return f"{about}\n\n{markdown(header, rows)}"


# GB that the report of this run gives for each part of a step of 4 sequences: with FP32 everywhere, with 8-bit state of
# the optimizer, and as it expects them with FP8 activations too.
REPORTED = {
    "report, FP32": {
        "weights": "1.1",
        "optimizer": "2.2",
        "gradients": "1.1",
        "activations": "4 to 8",
        "peak": "20 to 30",
    },
    "report, 8 bits": {
        "weights": "1.1",
        "optimizer": "0.3",
        "gradients": "1.1",
        "activations": "4 to 8",
        "peak": "18 to 26",
    },
    "report, FP8 expected": {
        "weights": "1.1",
        "optimizer": "0.3",
        "gradients": "0.6",
        "activations": "2 to 4",
        "peak": "12 to 16",
    },
}
PLANS: dict[str, dict[str, Any]] = {
    "FP32, `adamw`": dict(recipe="bf16", dtype_bytes=4, optimizer="adamw"),
    "BF16, `adamw`": dict(recipe="bf16", optimizer="adamw"),
    "BF16, `muon8bit`": dict(
        recipe="bf16", optimizer="muon8bit", optimizer_options={"rest": "adamw8bit"}
    ),
    "`delayed`, `muon8bit`": dict(
        recipe="delayed", optimizer="muon8bit", optimizer_options={"rest": "adamw8bit"}
    ),
}


PARTS = (
    "weights",
    "fp8_weight_copies",
    "optimizer",
    "gradients",
    "activations",
    "logits",
    "activation_gradients",
    "workspace",
)


def planned_peaks() -> list[Memory]:
    """Return the plan of the moment of the peak under each of `PLANS`."""
    config = get_preset("d20-e3-full")
    peaks = []
    for options in PLANS.values():
        rest = dict(options)
        recipe = get_recipe(rest.pop("recipe"))
        peaks.append(plan_memory(config, recipe, batch_size=4, seq_len=2048, **rest).peak)
    return peaks


def part_label(name: str) -> str:
    """Return the name of a part of the plan as text."""
    return name.replace("_", " ").replace("fp8", "FP8")


@table
def memory_breakdown() -> str:
    """Memory of the run d20-e3-full beside the breakdowns in its report."""
    peaks = planned_peaks()
    blank = [""] * len(REPORTED)
    rows = []
    for name in PARTS:
        sizes = [f"{peak.parts()[name] / 1e9:.2f}" for peak in peaks]
        rows.append([part_label(name), *(each.get(name, "") for each in REPORTED.values()), *sizes])
    rows.append(["**peak, planned**", *blank, *(f"**{peak.total / 1e9:.2f}**" for peak in peaks)])
    result = load("memory_breakdown_h200")
    measured = [result["rows"][name]["peak_bytes"] for name in PLANS]
    reported = [each["peak"] for each in REPORTED.values()]
    rows.append(["**peak, measured**", *reported, *(f"**{peak / 1e9:.2f}**" for peak in measured)])
    errors = [peak.total / found - 1 for peak, found in zip(peaks, measured, strict=True)]
    rows.append(["plan to measurement", *blank, *(f"{error:+.1%}" for error in errors)])
    speeds = [result["rows"][name]["tokens_per_second"] for name in PLANS]
    rows.append(["tokens/s", *blank, *(f"{speed:,.0f}" for speed in speeds)])
    header = " | ".join(["GB", *REPORTED, *PLANS])
    return f"{measured_on(result)}\n\n{markdown(header, rows)}"


def draw_memory_breakdown(path: Path) -> None:
    """Draw the planned parts at the peak of each of `PLANS`, one on the other, and the measured peaks."""
    peaks = planned_peaks()
    measured = load("memory_breakdown_h200")["rows"]
    names = [name.replace("`", "") for name in PLANS]
    figure = new_figure((8, 4))
    axes = figure.subplots()
    bottoms = [0.0] * len(peaks)
    for part in PARTS:
        sizes = [peak.parts()[part] / 1e9 for peak in peaks]
        if max(sizes) < 0.01:
            continue
        axes.bar(names, sizes, bottom=bottoms, label=part_label(part), width=0.6)
        bottoms = [bottom + size for bottom, size in zip(bottoms, sizes, strict=True)]
    found = [measured[name]["peak_bytes"] / 1e9 for name in PLANS]
    axes.plot(names, found, "k_", markersize=40)
    axes.plot(
        [], [], "k_", markersize=12, label="peak, measured"
    )  # the same, as short as the legend
    axes.set(ylabel="GB at the peak", title="d20-e3-full, 4 x 2,048 tokens")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    save_figure(figure, path)


@table
def optimizer_loss() -> str:
    """Loss of short runs per optimizer."""
    found = load("optimizer_loss_cpu")["optimizers"]
    rows = (
        [
            f"`{name}`",
            f"{r['eval_loss']:.4f}",
            f"{100 * (r['eval_loss'] / found['adamw']['eval_loss'] - 1):+.2f} %",
        ]
        for name, r in found.items()
    )
    return markdown("optimizer | eval loss (nats per byte) | relative to `adamw`", rows)
