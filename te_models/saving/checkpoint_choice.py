"""The choice of a checkpoint of a run for a command, with the reason as a line for its user."""

import math
import shlex
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from te_models.errors import CheckpointError, DataError
from te_models.files.formats import list_some, read_json
from te_models.recorder.record import check_folder
from te_models.saving.run_folder import LATEST, Checkpoints, step_of

METRICS = "metrics.jsonl"  # in the folder of a run, a line per step
ADAPTER_FOLDER = "adapter"  # in the folder of a run, or of a base that was exported with them
ADAPTER_CONFIG = "adapter_config.json"  # in a folder of adapters, as peft writes it
BEST = "best"  # the folder in a run's with the checkpoint of the lowest evaluation loss


class Losses(NamedTuple):
    """Evaluation losses of a run, in nats per token: the last, before training, and the lowest with its step.

    A step of 0 says that no evaluation after a step was better than the one before training.
    """

    last: float
    before: float
    best: float
    best_step: int


def holds_model(folder: Path) -> bool:
    """Return whether a folder itself holds a model, which a command reads before any run in that folder."""
    return (folder / "config.json").exists()


def describe_content(folder: Path) -> str:
    """Return what a folder itself holds: "a model", "adapters" or "".

    A run is not started there: some readers would take the folder for the one, and some for the other.
    """
    if holds_model(folder):
        return "a model"
    return "adapters" if (folder / ADAPTER_CONFIG).exists() else ""


def check_run(run: str | PathLike[str]) -> None:
    """Raise a DataError for a folder that is not there, or that holds a model or adapters and no run."""
    check_folder(run)
    folder = Path(run)
    if (folder / METRICS).exists():
        return
    if content := describe_content(folder):
        raise DataError(f"{run} holds {content} and no run: give the folder of a run, its --out")


def describe_choice(name: str | Path) -> str | None:
    """Return a line that says which checkpoint of a run stands for `name`; None if there is nothing to choose.

    `name` is the folder of a run, of which the newest checkpoint is taken, or best/ in it. For a model with a folder of
    adapters in it, such as an export with --format stored, the line says that the model is taken alone.
    """
    folder = Path(name)
    adapters = folder / ADAPTER_FOLDER
    if holds_model(folder) and (adapters / ADAPTER_CONFIG).is_file():
        return (
            f"{folder}: without the adapters in it: --model {shlex.quote(str(adapters))} takes both"
        )
    if folder.name == BEST and only_best(folder.parent) is not None:
        step = step_of(Checkpoints(folder / "checkpoints").all()[-1])
        return f"{folder}: step {step:,}, the one with the lowest eval loss; the run ended before its first save"
    if not (folder / "checkpoints").is_dir() or holds_model(folder):
        return None
    latest_checkpoint = Checkpoints(folder / "checkpoints").latest()
    if latest_checkpoint is None:
        return None
    step = step_of(latest_checkpoint)
    if folder.name == BEST and (folder.parent / "checkpoints" / LATEST).is_file():
        return f"{folder}: step {step:,}, {_why_best(folder.parent, step)}"
    line = f"{folder}: step {step:,}, the last"
    losses = read_losses(latest_checkpoint)
    if losses is None:
        return line
    best = best_checkpoint(folder, losses.best_step)
    if losses.best_step == step:
        return f"{line} and the best, with an eval loss of {losses.best:.4f}"
    if losses.best_step and best is not None and losses.last == losses.best:
        # The evaluation of the best step was the last one, as where Ctrl-C ended the run after it.
        return (
            f"{line}, which was not evaluated; step {losses.best_step:,} has the lowest eval loss, "
            f"{losses.best:.4f}: --model {shlex.quote(str(best))} takes it"
        )
    if losses.best_step and best is not None:
        return (
            f"{line}, with an eval loss of {losses.last:.4f}; step {losses.best_step:,} has {losses.best:.4f}: "
            f"--model {shlex.quote(str(best))} takes it"
        )
    if losses.best_step:
        return (
            f"{line}, with an eval loss of {losses.last:.4f}; step {losses.best_step:,} had {losses.best:.4f} and "
            "was not saved"
        )
    if losses.last > losses.before:
        return f"{line}, with an eval loss of {losses.last:.4f}, more than the {losses.before:.4f} before training"
    return line


def _why_best(run: Path, step: int) -> str:
    # The losses are in the newest checkpoint, which knows of all evaluations.
    latest_checkpoint = Checkpoints(run / "checkpoints").latest()
    losses = None if latest_checkpoint is None else read_losses(latest_checkpoint)
    if latest_checkpoint is None or losses is None or losses.best_step != step:
        return "the one with the lowest eval loss"
    last = step_of(latest_checkpoint)
    if last == step:
        return f"the last and the best, with an eval loss of {losses.best:.4f}"
    return f"with the lowest eval loss, {losses.best:.4f}; the last, step {last:,}, has {losses.last:.4f}"


def best_checkpoint(run: Path, best_step: int) -> Path | None:
    """Return best/ in the folder of a run if it holds the checkpoint of this step."""
    saved = Checkpoints(run / BEST / "checkpoints").latest()
    return run / BEST if saved is not None and step_of(saved) == best_step else None


def only_best(run: Path) -> Path | None:
    """Return best/ in the folder of a run that ended before its first save, but after an evaluation; else None."""
    best = Checkpoints(run / BEST / "checkpoints").latest()
    is_run = (run / METRICS).is_file()
    saved = holds_model(run) or Checkpoints(run / "checkpoints").latest() is not None
    return run / BEST if best is not None and is_run and not saved else None


def describe_missing_checkpoint(folder: Path) -> str:
    """Return what a folder of a run without a checkpoint, or of several runs, has; "" for any other folder."""
    best = only_best(folder)
    if best is not None:
        return f"has no checkpoint of the run; {best} has the model of its lowest evaluation loss"
    if (folder / METRICS).is_file():
        return "is the folder of a run that has no checkpoint: a run saves its first after some minutes, or at its end"
    if runs := runs_in(folder):
        return f"holds runs: give one of them ({list_some(runs)})"
    return ""


def runs_in(folder: Path) -> list[str]:
    """Return the folders of runs in `folder` that have a checkpoint."""
    return [str(latest.parent.parent) for latest in sorted(folder.glob(f"*/checkpoints/{LATEST}"))]


def read_losses(checkpoint: Path) -> Losses | None:
    """Return the losses of the run whose last checkpoint this is; None where they are not known."""
    try:
        result = read_json(checkpoint / "training.json")["result"]
        last, before, best = (_number(result.get(name)) for name in NAMES)
        best_step = int(result.get("best_step", 0))
    except (CheckpointError, OSError, LookupError, TypeError, ValueError, AttributeError):
        return None
    return None if math.isnan(last) else Losses(last, before, best, best_step)


NAMES = ("eval_loss", "first_eval_loss", "best_eval_loss")


def _number(value: object) -> float:
    """Return a number; NaN and infinities, which JSON has not, are written in words."""
    return float(value) if isinstance(value, int | float) else math.nan
