"""Metrics of a run for TensorBoard, Weights & Biases and trackio, through their own libraries, beside metrics.jsonl."""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from te_models.config.data import split_names
from te_models.errors import check_known, needs
from te_models.training.callback import Callback
from te_models.training.timing import Row
from te_models.training.trainer import Trainer

PROJECT = "te-models"  # where Weights & Biases and trackio file the run


@dataclass(frozen=True)
class Run:
    """A run as loggers see it: its folder, an id that a resume does not change, and its settings."""

    folder: Path
    id: str
    settings: Mapping[str, object]

    @property
    def name(self) -> str:
        """The name that a list of runs shows."""
        return f"{self.folder.name}-{self.id}"


class Logger(Callback):
    """Sends the metrics of each step to a library: numbers by name, and the step."""

    def __init__(
        self, send: Callable[[dict[str, float], int], None], close: Callable[[], None]
    ) -> None:
        self.send, self.close = send, close

    def on_step(self, trainer: Trainer, row: Row) -> None:
        """Send all numbers of the row."""
        numbers = {
            name: value
            for name, value in row.items()
            if isinstance(value, (int, float)) and name != "step"
        }
        self.send(numbers, row["step"])


def _library(name: str) -> Any:
    """Import the library of a logger."""
    module, oldest, _ = LOGGERS[name]
    with needs(f"--log {name}", name, oldest, name):
        return importlib.import_module(module)


def _to_tensorboard(run: Run) -> Logger:
    writer = _library("tensorboard").SummaryWriter(str(run.folder / "tensorboard"))

    def send(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return Logger(send, writer.close)


def _to_wandb(run: Run) -> Logger:
    named: dict[str, object] = dict(project=PROJECT, id=run.id, name=run.name, dir=str(run.folder))
    own = _library("wandb").init(**named, config=dict(run.settings), resume="allow")
    return Logger(lambda values, step: own.log(values, step=step), own.finish)


def _to_trackio(run: Run) -> Logger:
    own = _library("trackio").init(
        project=PROJECT, name=run.name, config=dict(run.settings), resume="allow"
    )
    return Logger(lambda values, step: own.log(values, step=step), own.finish)


LOGGERS: dict[
    str, tuple[str, str, Callable[[Run], Logger]]
] = {  # name -> module, oldest version, start of a run
    "tensorboard": ("torch.utils.tensorboard", "2.15", _to_tensorboard),
    "wandb": ("wandb", "0.17", _to_wandb),
    "trackio": ("trackio", "0.2", _to_trackio),
}


def check_loggers(names: str) -> list[str]:
    """Return the names in "name,name", whose libraries can be imported."""
    wanted = split_names(names)
    for name in wanted:
        check_known("logger", name, LOGGERS)
        _library(name)
    return wanted


@contextlib.contextmanager
def open_loggers(names: list[str], run: Run) -> Iterator[list[Callback]]:
    """Start these loggers, and close them when the run ends for any reason."""
    with contextlib.ExitStack() as stack:
        started: list[Callback] = []
        for name in names:
            logger = LOGGERS[name][2](run)
            stack.callback(logger.close)
            started.append(logger)
        yield started
