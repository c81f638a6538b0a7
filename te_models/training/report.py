"""What a run says of itself on the terminal: a summary before the first step, progress, and the result."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from te_models.causal_lm import CausalLM
from te_models.config.training import TrainConfig
from te_models.data.dataset import TokenDataset
from te_models.data.streaming import StreamingDataset
from te_models.files.atomic import replace_text
from te_models.training.metrics import drawn, plot_bench
from te_models.training.trainer import Result


def summary(
    model: CausalLM, dataset: TokenDataset | StreamingDataset, config: TrainConfig, start: int, processes: str = ""
) -> Table:
    """The configuration in force, before the first step; `processes` says how several of them share the run."""
    plan = model.plan()
    recipe = ", ".join(f"{k}={v}" for k, v in model.recipe.to_dict().items() if k not in ("name", "scheme"))
    table = Table(title="te-models finetune", title_justify="left", title_style="bold", box=None, show_header=False)
    rows = {
        "parameters": f"{sum(p.numel() for p in model.parameters()):,} in {str(model.dtype).removeprefix('torch.')}",
        "device": str(model.device),
        "engine": f"{model.engine} ({model.engine_reason})",
        "recipe": f"{model.recipe.name} ({model.recipe.scheme}: {recipe})",
        "linears": f"{plan.count('FP8')} in {model.recipe.formats if plan.count('FP8') else 'FP8'}, "
        f"{plan.count('BF16')} in BF16",
        "attention": f"{model.attention_kernel()}, {model.config.attention_gate} gate",
        "compile": "elementwise operations" if model.compiled else "off",
        "activation checkpointing": f"{model.activation_checkpointing}"
        f"{', the rest in the memory of the CPU' if model.activation_offload else ''}",
        "optimizer": f"{config.optimizer}, learning rate {config.learning_rate:g}"
        f"{f', {config.optimizer_options}' if config.optimizer_options else ''}"
        f"{', state in the memory of the CPU' if config.optimizer_offload else ''}",
        "tokens a step": f"{config.tokens_per_step:,} ({config.batch_size} x {config.seq_len} tokens"
        f" x {config.gradient_accumulation} micro-batches)",
        "data": dataset.describe(),
        "processes": processes or "one",
        "steps": f"{start + 1} to {config.steps}" if start else f"{config.steps}",
    }
    for name, value in rows.items():
        table.add_row(f"[dim]{name}[/dim]", value)
    return table


@contextmanager
def progress(console: Console, config: TrainConfig, start: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A progress bar with loss, tokens/s and time left; yields what is to be told of each step's metrics.

    Where the output is no terminal, evaluations alone are printed, a line each.
    """
    columns = (
        TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("loss {task.fields[loss]}"),
        TextColumn("{task.fields[speed]} tokens/s"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("train", total=config.steps, completed=start, loss="-", speed="-")

        def tell(row: dict[str, Any]) -> None:
            bar.update(task, completed=row["step"], loss=f"{row['loss']:.3f}", speed=f"{row['tokens_per_second']:,.0f}")
            if "eval_loss" in row:
                console.print(
                    f"step {row['step']:>6}  loss {row['loss']:.4f}  eval loss {row['eval_loss']:.4f}  "
                    f"{row['tokens_per_second']:,.0f} tokens/s",
                    highlight=False,
                )

        yield tell


def outcome(result: Result) -> Table:
    """What the run ended with."""
    table = Table(box=None, show_header=False)
    rows = {
        "eval loss before": f"{result.first_eval_loss:.4f} nats a token",
        "eval loss after": f"{result.eval_loss:.4f} ({result.first_eval_loss - result.eval_loss:.4f} lower)",
        "speed": f"{result.tokens_per_second:,.0f} tokens/s",
    }
    if result.peak_memory is not None:
        rows["peak memory"] = f"{result.peak_memory / 2**30:.2f} GiB"
    rows["checkpoint"] = str(result.checkpoint)
    for name, value in rows.items():
        table.add_row(f"[dim]{name}[/dim]", value)
    return table


def bench_table(result: dict[str, Any]) -> Table:
    """What te_models.inspect.bench measured."""
    settings = result["settings"]
    where = result["environment"].get("gpu", "CPU: the emulated engine's numbers, not a GPU's speed")
    table = Table(
        title=f"forward + backward, batch {settings['batch_size']} x {settings['seq_len']} tokens, {where}",
        title_justify="left", box=None,
    )  # fmt: skip
    columns = ["", "ms", "(quartiles)", "tokens/s", "model TFLOP/s", f"speed against {result['reference']}"]
    columns += ["of roofline"] if result["roofline"] else []
    columns += ["peak GiB"] if result["rows"][0]["peak_gib"] is not None else []
    for column in [*columns, "loss"]:
        table.add_column(column, justify="right" if column else "left")
    for row in result["rows"]:
        low, high = row["ms_quartiles"]
        cells = [row["name"], f"{row['ms']:.2f}", f"{low:.2f} to {high:.2f}", f"{row['tokens_per_second']:,.0f}"]
        cells += [f"{row['model_tflops']:.1f}", f"{row['speed']:.2f}x"]
        cells += [f"{row['of_roofline']:.2f}"] if result["roofline"] else []
        cells += [f"{row['peak_gib']:.2f}"] if row["peak_gib"] is not None else []
        table.add_row(*cells, f"{row['loss']:.3f}")
    if result["roofline"]:
        parts = ", ".join(f"{name} {result['roofline'][name]:.1f}" for name in ("gemm", "attention", "memory"))
        table.caption = f"roofline {result['roofline']['total']:.1f} ms: {parts}; speed and roofline at equal FLOPs"
    return table


def write_bench(result: dict[str, Any], out: str, title: str) -> str:
    """Write bench.json and bench.png into the folder `out`; returns where the plot is, or why there is none."""
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / "bench.json", json.dumps(result, indent=1) + "\n")
    plot = folder / "bench.png"
    return drawn(plot, lambda: plot_bench(plot, result, title))
