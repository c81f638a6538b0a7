"""Generate the tables and plots of README.md and docs/ from benchmarks/results/*.json.

    python -m benchmarks.make_tables            # rewrite the tables
    python -m benchmarks.make_tables --plots    # draw the plots of docs/results/ as well

A table is between `<!-- generated: NAME -->` and `<!-- end -->`; NAME is a key of `TABLES`, which the modules of
benchmarks/tables/ fill. tests/test_docs.py fails if a file differs from what this script writes.
"""

from __future__ import annotations

import re
from pathlib import Path

import click

from benchmarks.gated_learning_rates import draw_columns
from benchmarks.gated_learning_rates import draw_results as draw_gated
from benchmarks.optimizer_study import draw_results as draw_optimizers
from benchmarks.soak import draw as draw_soak
from benchmarks.tables import (  # noqa: F401  they register their tables
    benches,
    buffers,
    checks,
    claims,
    expert_account,
    failures,
    formats,
    gpus,
    gradients,
    guide,
    heads,
    kinds,
    optimizer_losses,
    optimizers,
    readme_claims,
    several_gpus,
    speed,
    speed_map,
    split_sums,
    stored,
    studies,
    whole_steps,
)
from benchmarks.tables.speed import RUNS, precision_of
from benchmarks.tables.text import GIB, TABLES, load
from benchmarks.twin_curves import draw as draw_twins

ROOT = Path(__file__).resolve().parents[1]
MARKED = re.compile(r"(<!-- generated: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str) -> str:
    """Return Markdown `text` with every generated block rewritten."""
    return MARKED.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n\n{found[3]}", text)


def documents() -> list[Path]:
    """Return the files that may contain generated blocks."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def draw_plots(folder: Path) -> None:
    """Draw the plots of docs/results/ into `folder`."""
    from benchmarks.loss_curves import plot_losses
    from te_models.inspect.bench_report import plot_bench

    light = load("first_light_h200")
    run, gpu = light["run"], light["environment"]["gpu"]
    title = f"{run['preset']}, {run['batch_size']} x {run['seq_len']} tokens per step, {gpu}"
    curves = {name: data["metrics"] for name, data in light["recipes"].items()}
    plot_losses(folder / "first_light_h200.png", curves, title)
    bench = load("step_h200")["runs"][RUNS["1b"]]
    plot_bench(folder / "step_1b_h200.png", bench, f"gated-1b, 8 x 2048 tokens, {gpu}")
    for shape, measured in claims.SHAPES.items():
        claims.draw_compiled_fp8(folder / f"compiled_fp8_{shape}_{measured}.png", shape)
    for shape in claims.OPTIMIZED:
        claims.draw_optimizers(folder / f"optimizers_{shape}_h100.png", shape)
    claims.draw_divergence(folder / "divergence.png")
    optimizers.draw_memory_breakdown(folder / "memory_breakdown_h200.png")
    claims.draw_speedup(folder / "fp8_speedup_1b_h100.png")
    stored.draw_stored_bases(folder / "quantized_bases_h100.png")
    claims.draw_recomputation(folder / "recomputation_h100.png")
    gradients.draw_gradient_losses(folder / "gradient_losses.png")
    formats.draw_formats(folder / "format_loss.png")
    split_sums.draw_split_sums(folder / "split_sums.png")
    for name in speed_map.maps():
        card = name.removeprefix("speed_map_")
        speed_map.draw_speed_map(name, folder / f"small_models_{card}.png")
    draw_gated(load(studies.GATED), folder / f"{studies.GATED}.png")
    draw_columns(studies.qk_norm_columns(), folder / "gated_qk_norm_h200.png")
    draw_columns(studies.columns_124m(), folder / "gated_124m_h200.png")
    draw_optimizers(load(optimizer_losses.STUDY), folder / f"{optimizer_losses.STUDY}.png")
    failures.draw_no_speed_up(folder / "no_speed_up_h200.png")
    draw_grid(folder / "checkpoint_grid_h200.png")
    draw_soak(folder / "soak_h200.png", load("soak_h200"))
    draw_twins(folder / "twin_curves_h100.png", load("twin_curves_h100"))


def draw_grid(path: Path) -> None:
    """Draw peak memory against speed: a panel per model, a line per recipe, a point per mode."""
    from matplotlib.figure import Figure

    shapes, markers = (
        load("checkpoint_grid_h200")["rows"],
        {"none": "o", "selective": "s", "full": "^"},
    )
    figure = Figure(figsize=(6 * len(shapes), 4.5), dpi=150, layout="constrained")
    for axes, (name, rows) in zip(
        figure.subplots(1, len(shapes), squeeze=False)[0], shapes.items(), strict=True
    ):
        for variant in dict.fromkeys(map(precision_of, rows)):
            points = [row for row in rows if precision_of(row) == variant]
            x, y = (
                [row["peak"] / GIB for row in points],
                [row["tokens_per_second"] for row in points],
            )
            (line,) = axes.plot(
                x,
                y,
                "--" if variant[1] == "FP8" else "-",
                label=f"{variant[0]}, {variant[1]} weights",
            )
            for row, across, up in zip(points, x, y, strict=True):
                axes.plot(across, up, markers[row["mode"]], color=line.get_color())
        for mode, marker in markers.items():
            axes.plot([], [], marker, color="grey", label=mode)
        axes.set(
            title=name,
            xlabel="peak memory (GiB)",
            ylabel="tokens/s",
            xlim=(0, None),
            ylim=(0, None),
        )
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, ncols=2, loc="lower right")
    figure.savefig(path)


@click.command(help=__doc__)
@click.option("--plots", is_flag=True, help="Draw the plots of docs/results/ as well.")
def main(plots: bool) -> None:
    """Rewrite the generated blocks of README.md and docs/."""
    for path in documents():
        before = path.read_text()
        after = filled(before)
        if after != before:
            path.write_text(after)
            print(f"rewrote {path.relative_to(ROOT)}")
    if plots:
        draw_plots(ROOT / "docs" / "results")


if __name__ == "__main__":
    main()
