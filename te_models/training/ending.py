"""The end of a run: what came of it, where everything is, and what to type next."""

from __future__ import annotations

import functools
import math
import shlex
from pathlib import Path

from rich.console import Console
from rich.text import Text

from te_models.causal_lm import CausalLM
from te_models.data.tokenizer import Tokenizer
from te_models.errors import DataError
from te_models.training.metrics import read_metrics
from te_models.training.plots import plot_run, try_drawing
from te_models.training.report import table_of
from te_models.training.samples import Prompt
from te_models.training.settings import RUN_FILE, RunSettings
from te_models.training.trainer import Result

PROMPT = 60  # characters of a prompt in a command to type


def print_outcome(console: Console, result: Result, settings: RunSettings, folder: Path, curve: str) -> None:
    """Print the losses before and after, the speed, and where everything is; after Ctrl-C, how to go on."""
    if result.interrupted:
        again = shlex.join(["te-models", settings.command, "--resume", str(folder)])
        console.print(f"interrupted: step {result.step} is saved; `{again}` continues from it", highlight=False)
        return
    change = result.first_eval_loss - result.eval_loss
    rows = {
        "eval loss before": f"{result.first_eval_loss:.4f} nats per token",
        "eval loss after": f"{result.eval_loss:.4f} ({abs(change):.4f} {'lower' if change >= 0 else 'higher'})",
        "perplexity": f"{_exp(result.first_eval_loss)} before, {_exp(result.eval_loss)} after",
        "speed": f"{result.tokens_per_second:,.0f} tokens/s",
    }
    if result.peak_memory is not None:
        rows["peak memory"] = f"{result.peak_memory / 2**30:.2f} GiB"
    if result.best_step not in (0, result.step):
        rows["best eval loss"] = f"{result.best_eval_loss:.4f} at step {result.best_step}"
    rows |= {
        "checkpoint": str(result.checkpoint),
        "metrics": str(folder / "metrics.jsonl"),
        "settings": str(folder / RUN_FILE),
        "loss curve": curve,
    }
    console.print(table_of(rows), highlight=False)


def _exp(loss: float) -> str:
    return f"{math.exp(loss):,.2f}" if loss < 100 else "infinite" if loss == loss else "unknown"


def draw_run(result: Result, settings: RunSettings, folder: Path, model: CausalLM, tokens_per_step: int) -> str:
    """Draw the run into loss.png; return its path, or why it was not drawn."""
    path, rows = folder / "loss.png", read_metrics(folder / "metrics.jsonl")
    if not rows:
        return "not drawn: no step was taken"
    data = settings.data.get("data") or "Python's documentation and sources"
    names = [data] if isinstance(data, str) else [str(name) for name in data]
    title = f"{settings.label} · {model.recipe.name} · {', '.join(Path(name).name or name for name in names)}"
    losses = f"evaluation loss {result.first_eval_loss:.4f} before, {result.eval_loss:.4f} after; "
    subtitle = f"{losses}{result.step:,} steps of {tokens_per_step:,} tokens; {settings.command}"
    return try_drawing(path, functools.partial(plot_run, path, rows, title, subtitle, result.first_eval_loss))


def print_next(console: Console, folder: Path, tokenizer: Tokenizer, prompts: list[Prompt]) -> None:
    """Print the two commands that one would type next: talk to the model or continue a prompt, and export it."""
    first = ["te-models", "generate", "--model", str(folder), "--prompt", _example(tokenizer, prompts)]
    try:
        tokenizer.chat_template()
    except DataError:
        pass
    else:
        first = ["te-models", "chat", "--model", str(folder)]
    export = ["te-models", "export", "--model", str(folder), "--out", str(folder / "export")]
    console.print(Text("\nnext", "bold"))
    for command, purpose in ((first, "try the model"), (export, "write it for vLLM, SGLang or transformers, in FP8")):
        console.print(
            f"  {shlex.join(command)}", Text(f"  # {purpose}", "dim"), highlight=False, soft_wrap=True, sep=""
        )


def _example(tokenizer: Tokenizer, prompts: list[Prompt]) -> str:
    """Return the first line of a prompt, shortened."""
    lines = [line for prompt in prompts for line in tokenizer.decode(prompt.ids).splitlines() if line.strip()]
    return lines[0].strip()[:PROMPT] if lines else "Once"
