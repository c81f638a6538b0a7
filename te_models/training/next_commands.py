"""The commands to type after a run: use the trained model, export it, or train again."""

import math
import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from te_models.data.tokenizer_base import Tokenizer
from te_models.errors import DataError
from te_models.saving.checkpoint_choice import best_checkpoint
from te_models.serving.unchanged_base import UNCHANGED
from te_models.training.result import Result
from te_models.training.samples import Prompt
from te_models.training.settings import RUN_FILE, RunSettings

PROMPT = 60  # characters of a prompt in a suggested command


def recommended(result: Result, folder: Path) -> tuple[Path, str]:
    """Return the folder to go on with after a run, best/ if its loss is lower than the last one, and the reason."""
    best = best_checkpoint(folder, result.best_step)
    if best is not None and result.best_eval_loss < result.eval_loss:
        last = f"step {result.step}, the last, has {result.eval_loss:.4f}"
        return (
            best,
            f"step {result.best_step}, the lowest eval loss: {result.best_eval_loss:.4f}; {last}",
        )
    # Nothing was evaluated, so there is no loss to compare.
    if not math.isfinite(result.eval_loss):
        return folder, f"step {result.step}, the last"
    if result.best_step == result.step:
        return folder, f"step {result.step}, the last and the best"
    last = f"step {result.step}, the last, with an eval loss of {result.eval_loss:.4f}"
    if not result.best_step:
        return folder, last
    best_loss = f"{result.best_eval_loss:.4f}"
    return folder, f"{last}; step {result.best_step} had {best_loss} and was not saved"


def made_worse(result: Result, folder: Path) -> bool:
    """Return whether a run leaves no checkpoint with a lower evaluation loss than the model before training."""
    if not math.isfinite(result.first_eval_loss):
        return False  # nothing to compare with
    if best_checkpoint(folder, result.best_step) is not None:
        return False
    return not result.eval_loss <= result.first_eval_loss


def print_next(
    console: Console,
    folder: Path,
    tokenizer: Tokenizer,
    prompts: list[Prompt],
    format: str,
    result: Result,
    settings: RunSettings,
) -> None:
    """Print the next commands: talk to the model or continue a prompt, and export it in `format`, unless that is "".

    They take the checkpoint of the lowest evaluation loss of a run with this `result`, and say so. After a run that
    made the model worse, the next command is to train again with other settings.
    """
    title = Text("\nnext", "bold")
    if made_worse(result, folder):
        title.append(", since training made the model worse:", "not bold")
        commands = [_again(folder, result, settings)]
    else:
        model, reason = recommended(result, folder)
        title.append(f", with {reason}", "not bold")
        commands = _uses(model, folder, tokenizer, prompts, format)
    console.print(title, soft_wrap=True)
    for command, purpose in commands:
        line = f"  {shlex.join(command)}"
        comment = f"# {purpose}"
        if len(line) + 2 + len(comment) <= console.width or not console.is_terminal:
            console.print(line, Text(f"  {comment}", "dim"), soft_wrap=True, sep="")
            continue
        console.print(Text(f"  {comment}", "dim"))
        console.print(_broken(command, console.width), soft_wrap=True)


def _again(folder: Path, result: Result, settings: RunSettings) -> tuple[list[str], str]:
    """Return the command that repeats a run which made the model worse, and its purpose."""
    command = ["te-models", settings.command, str(folder / RUN_FILE)]
    if result.best_step:
        again = [*command, "--keep-best", "--out", f"{folder}-best"]
        return (
            again,
            f"again, keeping step {result.best_step}, which had {result.best_eval_loss:.4f}",
        )
    lower = f"{settings.train.learning_rate / 10:.3g}"
    again = [*command, "--learning-rate", lower, "--out", f"{folder}-{lower}"]
    return again, "again, with a tenth of the learning rate"


def _uses(
    model: Path, folder: Path, tokenizer: Tokenizer, prompts: list[Prompt], format: str
) -> list[tuple[list[str], str]]:
    """Return commands that use the trained model, each with its purpose."""
    if _conversations(tokenizer, prompts):
        first = ["te-models", "chat", "--model", str(model)]
    else:
        prompt = _example(tokenizer, prompts)
        first = ["te-models", "generate", "--model", str(model), "--prompt", prompt]
    commands = [(first, "try the model")]
    if format:
        export = ["te-models", "export", "--model", str(model), "--out", str(folder / "export")]
        export += ["--format", format]
        number = "BF16" if format == "bf16" else "FP8"
        purpose = f"write it for vLLM, SGLang or transformers, in {number}"
        if format == UNCHANGED:
            purpose = "write the base as it is, and the adapters beside it, for a server"
        commands.append((export, purpose))
    return commands


def _broken(command: Sequence[str], width: int) -> str:
    """Return a command in lines of at most `width`, if its words allow it, that a shell reads as one."""
    groups: list[list[str]] = [[]]
    for word in command:
        if word.startswith("--"):  # an option stays with its value
            groups.append([])
        groups[-1].append(word)
    lines = [" "]
    for group in groups:
        text = shlex.join(group)
        if len(lines[-1]) + len(text) + len("  \\") > width and lines[-1].strip():
            lines.append("     ")
        lines[-1] += f" {text}"
    return " \\\n".join(lines)


def _conversations(tokenizer: Tokenizer, prompts: list[Prompt]) -> bool:
    """Return whether a prompt begins as the chat template does; without prompts, whether there is a template."""
    try:
        rendered = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])
    except DataError:
        return False
    start = len(tokenizer.encode_prompt(""))  # ids that begin every text
    opening = tuple(rendered[start : start + 1])
    return not prompts or any(prompt.ids[start : start + 1] == opening for prompt in prompts)


def _example(tokenizer: Tokenizer, prompts: list[Prompt]) -> str:
    """Return the first line of a prompt, shortened; spaces at its end belong to what the model was trained on."""
    for prompt in prompts:
        for line in tokenizer.decode(prompt.ids).splitlines():
            if line.strip():
                return line.lstrip()[:PROMPT]
    return "Once"
