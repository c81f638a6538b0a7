"""Terminal output of a run: a summary before the first step, progress, and the outcome."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from te_models.causal_lm import CausalLM
from te_models.config.training import TrainConfig
from te_models.data.dataset import TokenDataset
from te_models.data.streaming import StreamingDataset
from te_models.training.cuda_graph import step_obstacle
from te_models.training.trainer import Result


def summary(
    model: CausalLM,
    dataset: TokenDataset | StreamingDataset,
    config: TrainConfig,
    start: int,
    processes: str = "",
    command: str = "finetune",
) -> Table:
    """Return the configuration in force as a table; `processes` describes how several processes share the run."""
    plan = model.plan()
    recipe = ", ".join(f"{k}={v}" for k, v in model.recipe.to_dict().items() if k not in ("name", "scheme"))
    table = Table(title=f"te-models {command}", title_justify="left", title_style="bold", box=None, show_header=False)
    _add_columns(table)
    rows = {
        "parameters": f"{sum(p.numel() for p in model.parameters()):,} in {str(model.dtype).removeprefix('torch.')}",
        "device": str(model.device),
        "engine": f"{model.engine} ({model.engine_reason})",
        "recipe": f"{model.recipe.name} ({model.recipe.scheme}: {recipe})",
        "linears": f"{plan.count('FP8')} in {model.recipe.formats if plan.count('FP8') else 'FP8'}, "
        f"{plan.count('BF16')} in BF16",
        "attention": f"{model.attention_kernel()}, {model.config.attention_gate} gate",
        **speed_rows(model, config),
        "activation checkpointing": f"{model.activation_checkpointing}"
        f"{', other activations in CPU memory' if model.activation_offload else ''}",
        "optimizer": f"{config.optimizer}, learning rate {config.learning_rate:g} ({config.schedule})"
        f"{f', {config.optimizer_options}' if config.optimizer_options else ''}"
        f"{', state in CPU memory' if config.optimizer_offload else ''}",
        "tokens per step": f"{config.tokens_per_step:,} ({config.batch_size} x {config.seq_len} tokens"
        f" x {config.gradient_accumulation} micro-batches)",
        "data": dataset.describe(),
        "processes": processes or "one",
        "steps": f"{start + 1} to {config.steps}" if start else f"{config.steps}",
    }
    for name, value in rows.items():
        table.add_row(Text(name, "dim"), value)
    return table


def speed_rows(model: CausalLM, config: TrainConfig) -> dict[str, str]:
    """Return whether operations are compiled and the step is a CUDA graph, or why not."""
    obstacle = step_obstacle(model, config, config.parallel)
    return {
        "compiled": model.compile_status,
        "CUDA graph": f"off, because {obstacle}" if obstacle else "forward and backward",
    }


@contextmanager
def progress(console: Console, config: TrainConfig, start: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Show a progress bar with loss, tokens/s and time left; yield the function that takes each step's metrics.

    If the output is no terminal, print only evaluations, one per line.
    """
    columns = (
        TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("loss {task.fields[loss]}"),
        TextColumn("{task.fields[speed]} tokens/s"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("train", total=config.steps, completed=start, loss="-", speed="-")

        def show(row: dict[str, Any]) -> None:
            bar.update(task, completed=row["step"], loss=f"{row['loss']:.3f}", speed=f"{row['tokens_per_second']:,.0f}")
            if "eval_loss" in row:
                console.print(
                    f"step {row['step']:>6}  loss {row['loss']:.4f}  eval loss {row['eval_loss']:.4f}  "
                    f"{row['tokens_per_second']:,.0f} tokens/s",
                    highlight=False,
                )

        yield show


def outcome(result: Result) -> Table:
    """Return the outcome of a run as a table."""
    table = Table(box=None, show_header=False)
    _add_columns(table)
    rows = {
        "eval loss before": f"{result.first_eval_loss:.4f} nats per token",
        "eval loss after": f"{result.eval_loss:.4f} ({result.first_eval_loss - result.eval_loss:.4f} lower)",
        "speed": f"{result.tokens_per_second:,.0f} tokens/s",
    }
    if result.peak_memory is not None:
        rows["peak memory"] = f"{result.peak_memory / 2**30:.2f} GiB"
    rows["checkpoint"] = str(result.checkpoint)
    for name, value in rows.items():
        table.add_row(Text(name, "dim"), value)
    return table


def _add_columns(table: Table) -> None:
    """Add the columns of names and values; a long path is wrapped rather than cut."""
    table.add_column()
    table.add_column(overflow="fold")
