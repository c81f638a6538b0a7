"""Terminal output of a run: a summary before the first step, and the outcome after the last."""

import functools
import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from te_models.causal_lm import CausalLM
from te_models.config.moe import places_of_experts
from te_models.config.recipe import Recipe
from te_models.config.training import TrainConfig
from te_models.data.dataset import TokenDataset
from te_models.data.streaming import StreamingDataset
from te_models.device.choice import computing_device
from te_models.errors import plural
from te_models.kernels.dispatch import compile_status
from te_models.planning.expected_speed import expected_speed
from te_models.planning.memory_plan import unit_for
from te_models.planning.precision_plan import PRECISION_NAMES
from te_models.planning.printable import Terminal
from te_models.saving.checkpoint_choice import best_checkpoint
from te_models.training.cuda_graph import step_obstacle
from te_models.training.metrics import read_metrics
from te_models.training.plots import plot_run, recipes_of, try_drawing
from te_models.training.preflight import MemoryCheck
from te_models.training.progress import TimeLeft, duration
from te_models.training.result import Result
from te_models.training.settings import RUN_FILE

LOG_WIDTH = 100  # characters of a line where the output is not a terminal, and COLUMNS is not set
PADDING = 4  # characters around the two columns of a table


def run_console(quiet: bool = False) -> Terminal:
    """Return the console of a run: of the terminal's width or COLUMNS, or of LOG_WIDTH where the output is a file."""
    # Rich takes 80 columns for a file, and would break paths in a log.
    known = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal()
    return Terminal(quiet=quiet, width=None if known else LOG_WIDTH)


def summary(
    model: CausalLM,
    dataset: TokenDataset | StreamingDataset,
    config: TrainConfig,
    start: int,
    processes: str = "",
    command: str = "finetune",
    memory: MemoryCheck | None = None,
    first_recipe: Recipe | None = None,
    batch_shares: int = 1,
) -> Table:
    """Return the settings in force as a table, to print before the first step.

    Args:
        model: the model that the run trains.
        dataset: its data.
        config: its options.
        start: the number of steps taken before a resume; 0 in a new run.
        processes: how processes share the run (Parallel.describe); "": there is one.
        command: "pretrain" or "finetune".
        memory: whether the run fits into memory; None: not planned.
        first_recipe: the recipe of the run's first step; None: the model's.
        batch_shares: the number of processes, or groups of them, that divide the rows of a batch.
    """
    # (steps taken before a recipe, its name), the first one included.
    recipes = [(0, (first_recipe or model.recipe).name), *config.recipe_changes]
    recipe_now = recipes[0][1]
    later = ""
    for steps_before, name in recipes:
        if steps_before <= start:
            recipe_now = name
        else:
            later += f", from step {steps_before + 1} on {name}"
    recipe = recipe_now
    if model.recipe.name == recipe_now:
        # With its scheme and fields, which are known of the model's recipe alone.
        recipe = _recipe(model)
    rows = {
        "parameters": _parameters(model),
        "device": str(model.device),
        "engine": f"{model.engine} ({model.engine_reason})",
        "recipe": f"{recipe}{later}",
        "linears": _linears(model),
        "attention": f"{model.attention_kernel()}, {model.config.attention_gate.replace('none', 'no')} gate",
        **speed_rows(model, config),
        "activation checkpointing": f"{model.activation_checkpointing}"
        f"{', other activations in CPU memory' if model.activation_offload else ''}",
        "optimizer": f"{config.optimizer}, learning rate {config.learning_rate:g} ({config.schedule})"
        f"{_optimizer_options(config)}"
        f"{', state in CPU memory' if config.optimizer_offload else ''}",
        "tokens per step": f"{config.tokens_per_step:,} ({config.batch_size} x {config.seq_len} tokens"
        f" x {plural(config.gradient_accumulation, 'micro-batch', 'micro-batches')})",
        "data": dataset.describe(),
        "processes": processes or "one",
        "steps": f"{start + 1} to {config.steps}" if start else f"{config.steps}",
        "tokens": _tokens(dataset, config, start),
        "memory": "not planned for this run" if memory is None else str(memory),
        "speed": expected_line(
            model,
            config,
            start=start,
            recipe=recipe_now,
            batch_shares=batch_shares,
            gpu=_gpu_of(model),
        ),
    }
    return table_of(rows, f"te-models {command}")


def _gpu_of(model: CausalLM) -> str | None:
    """Return the name of the GPU that a model trains on with Transformer Engine; None: it does not."""
    if model.engine != "native":
        return None
    return torch.cuda.get_device_name(computing_device(model.device))


def expected_line(
    model: CausalLM,
    config: TrainConfig,
    start: int,
    recipe: str,
    batch_shares: int,
    gpu: str | None,
) -> str:
    """Return the expected speed and duration of the remaining steps, with the measurement behind them, or why neither.

    Args:
        model: of the run.
        config: of the run.
        start: steps taken before.
        recipe: the name of the recipe that is in force.
        batch_shares: as for `summary`.
        gpu: the name of the GPU; None: the run is on a CPU or the emulated engine.
    """
    first_known = start + TimeLeft.SKIPPED + TimeLeft.MEASURED
    later = (
        f"estimated after step {first_known}"
        if config.steps > first_known
        else "too few steps to estimate"
    )
    if gpu is None:
        return f"no figure for the {model.engine} engine on {model.device.type}; {later}"
    if model.tp.size > 1 or model.ep.size > 1:
        return f"no figure for divided layers; {later}"
    lora = model.num_parameters(only_trainable=True) < model.num_parameters()
    expected = expected_speed(
        gpu,
        model.config,
        recipe,
        config.batch_size // batch_shares,
        config.seq_len,
        lora=lora,
        recompute=model.activation_checkpointing,
        gpus=batch_shares,
    )
    if expected is None:
        return f"nothing is measured near this size under {recipe} on {gpu}; {later}"
    # Two digits: the figure comes from another size or GPU than the run's.
    speed = float(f"{expected.tokens_per_second:.2g}")
    tokens = (config.steps - start) * config.tokens_per_step
    whole = duration(tokens / expected.tokens_per_second)
    return f"about {speed:,.0f} tokens/s, {whole} without evaluations; {expected.basis}"


def _tokens(dataset: TokenDataset | StreamingDataset, config: TrainConfig, start: int) -> str:
    """Return how many tokens the run trains on, and how many epochs that is."""
    tokens = (config.steps - start) * config.tokens_per_step
    if not isinstance(dataset, TokenDataset):
        return f"{tokens:,}"
    windows = (config.steps - start) * config.batch_size * config.gradient_accumulation
    epochs = f"{float(f'{windows / dataset.windows_in(1):.2g}'):,.10g}"  # two digits: "0.041", "3.1", "390"
    return f"{tokens:,}, {epochs} epoch{'' if epochs == '1' else 's'}"


def _recipe(model: CausalLM) -> str:
    """Return the recipe's name and, if it has any, its scheme and fields."""
    recipe = model.recipe
    if recipe.scheme == "none":
        return recipe.name
    fields = recipe.to_dict()
    scheme = fields.pop("scheme")
    del fields["name"]
    listed = ", ".join(f"{name}={value}" for name, value in fields.items())
    return f"{recipe.name} ({scheme}: {listed})"


def _linears(model: CausalLM) -> str:
    """Return how many linears run in FP8, by its formats, and how many in the model's dtype."""
    plan = model.plan()
    formats: dict[str, None] = {}  # as an ordered set
    for linear in model.precision.linears.values():
        if linear.recipe is not None:
            formats[linear.recipe.formats] = None
    dtype = str(model.dtype).removeprefix("torch.")
    high = PRECISION_NAMES[dtype]
    return f"{plan.count('FP8')} in {' and '.join(formats) or 'FP8'}, {plan.count(high)} in {high}"


def _optimizer_options(config: TrainConfig) -> str:
    """Return ", name=value" per option that was given, with spaces at which a narrow terminal can break the line."""
    options = config.optimizer_options
    if not options:
        return ""
    if isinstance(options, str):
        return ", " + ", ".join(part.strip() for part in options.split(","))
    return "".join(f", {name}={value}" for name, value in options.items())


def _parameters(model: CausalLM) -> str:
    """Return the number of parameters and, if only some are trained, of those."""
    all = model.num_parameters()
    trained = model.num_parameters(only_trainable=True)
    part = f", {trained:,} of them trained" if trained < all else ""
    return f"{all:,} in {str(model.dtype).removeprefix('torch.')}{part}"


def speed_rows(model: CausalLM, config: TrainConfig) -> dict[str, str]:
    """Return whether operations are compiled and the step is a CUDA graph, or why not; and the experts of each rank."""
    obstacle = step_obstacle(model, config)
    ranks = max(model.ep.size, config.expert_parallel_size)
    experts = {"experts": places_of_experts(model.config.layers, ranks)} if ranks > 1 else {}
    return experts | {
        "compiled": compile_status(model.compile_mode, computing_device(model.device).type),
        "CUDA graph": f"off, because {obstacle}" if obstacle else "forward and backward",
    }


def print_table(console: Console, table: Table) -> None:
    """Print a table. A log, unlike a terminal, may have lines that are longer, so that no path in it is broken."""
    width = console.width
    if not console.is_terminal:
        names, values = table.columns
        longest = max(len(word) for value in values.cells for word in str(value).split())
        console.width = max(width, max(len(str(name)) for name in names.cells) + longest + PADDING)
    console.print(table)
    console.width = width


def table_of(rows: Mapping[str, str], title: str | None = None) -> Table:
    """Return names and values as a table; where a long path does not fit, it is wrapped rather than cut."""
    table = Table(
        "",
        Column(overflow="fold"),
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        show_header=False,
    )
    for name, value in rows.items():
        table.add_row(Text(name, "dim"), value)
    return table


def print_outcome(
    console: Console,
    result: Result,
    config: TrainConfig,
    *,
    command: str,
    folder: Path,
    written: Mapping[str, str],
) -> None:
    """Print the losses before and after, the speed, and the files written; after Ctrl-C, how to continue the run.

    Args:
        console: the console to print to.
        result: the result of the run.
        config: its options.
        command: "pretrain" or "finetune".
        folder: the folder of the run.
        written: further files, by what they are.
    """
    if result.interrupted:
        again = shlex.join(["te-models", command, "--resume", str(folder)])
        console.print(
            f"interrupted: step {result.step} is saved; `{again}` continues from it", soft_wrap=True
        )
        return
    change = result.first_eval_loss - result.eval_loss
    if math.isnan(result.first_eval_loss) and math.isnan(result.eval_loss):  # no evaluation
        rows = {"loss": f"{result.loss:.4f} nats per token, in the last step"}
    else:
        direction = "lower" if change >= 0 else "higher"
        rows = {
            "eval loss before": f"{result.first_eval_loss:.4f} nats per token",
            "eval loss after": f"{result.eval_loss:.4f} ({abs(change):.4f} {direction})",
            "perplexity": f"{_exp(result.first_eval_loss)} before, {_exp(result.eval_loss)} after",
        }
    if math.isfinite(result.tokens_per_second):  # not of a run that only had to write files
        rows["speed"] = f"{result.tokens_per_second:,.0f} tokens/s"
    if result.peak_memory is not None:
        unit, size = unit_for(result.peak_memory)
        rows["peak memory"] = f"{result.peak_memory / size:.2f} {unit}"
    if result.stopped_early:
        patience = plural(config.patience, "evaluation")
        rows["stopped early"] = (
            f"at step {result.step} of {config.steps}: no lower eval loss in {patience}"
        )
    if result.best_step not in (0, result.step):
        best = best_checkpoint(folder, result.best_step)
        saved = "not saved: --keep-best does" if best is None else f"saved in {best}"
        rows["best eval loss"] = f"{result.best_eval_loss:.4f} at step {result.best_step}, {saved}"
    elif change < 0:
        rows["best eval loss"] = (
            f"{result.first_eval_loss:.4f}, before the first step: training made the model worse"
        )
    rows |= {
        "checkpoint": str(result.checkpoint),
        "metrics": str(folder / "metrics.jsonl"),
        "settings": str(folder / RUN_FILE),
        **written,
    }
    print_table(console, table_of(rows))


def _exp(loss: float) -> str:
    if loss < 100:
        return f"{math.exp(loss):,.2f}"
    if loss == loss:
        return "infinite"
    return "unknown"


def draw_run(
    result: Result, folder: Path, *, model: str, recipe: str, data: Sequence[str], note: str
) -> str:
    """Draw the curves of a run into loss.png in its folder; return the file's path, or why it was not drawn.

    Args:
        result: the result of the run.
        folder: the folder of the run, with its metrics.
        model: the name of the model.
        recipe: the name of the present recipe, for a run whose metrics name none.
        data: the names of the data; empty: the default data.
        note: ends the subtitle, "<n> steps of <note>".
    """
    path = folder / "loss.png"
    rows = read_metrics(folder / "metrics.jsonl")
    if not rows:
        return "not drawn: no step was taken"
    names = data or ("Python's documentation and sources",)
    # Of the metrics, since a run may change its recipe on the way.
    recipes = " then ".join(name for _, name in recipes_of(rows)) or recipe
    title = f"{model} · {recipes} · {', '.join(Path(name).name or name for name in names)}"
    losses = f"evaluation loss {result.first_eval_loss:.4f} before, {result.eval_loss:.4f} after; "
    if math.isnan(result.eval_loss):
        losses = ""
    subtitle = f"{losses}{plural(result.step, 'step')} of {note}"
    return try_drawing(
        path, functools.partial(plot_run, path, rows, title, subtitle, result.first_eval_loss)
    )
