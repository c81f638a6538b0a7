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
class LoggedRun:
    """A run as loggers see it: its folder, an id that a resume does not change, and its settings."""

    folder: Path
    id: str
    settings: Mapping[str, object]

    @property
    def name(self) -> str:
        """The name that a list of runs shows."""
        return f"{self.folder.name}-{self.id}"


@dataclass(frozen=True)
class Logger:
    """One library's record of a run: `send` takes numbers by name, and the step."""

    send: Callable[[dict[str, float], int], None]
    close: Callable[[], None]


class Loggers(Callback):
    """A callback that sends the numbers of each step to the libraries with these names.

    Raises:
        UsageError: an unknown name.
        MissingPackage: a library cannot be imported.
    """

    def __init__(self, names: str) -> None:
        self.names = split_names(names)
        self.started: list[Logger] = []
        for name in self.names:
            # Imported now, so that a missing library is an error before data and weights are read.
            check_known("logger", name, LOGGERS)
            _library(name)

    @contextlib.contextmanager
    def open(self, run: LoggedRun) -> Iterator[None]:
        """Start a record of the run in each library, and close it when the block ends for any reason."""
        with contextlib.ExitStack() as stack:
            for name in self.names:
                # Its end is registered before the next one starts, which may fail.
                logger = LOGGERS[name].start(run)
                stack.callback(logger.close)
                self.started.append(logger)
            yield

    def on_step(self, trainer: Trainer, row: Row) -> None:
        """Send all numbers of the row."""
        numbers = {}
        for name, value in row.items():
            # The recipe's name and the list of experts' shares are no curves; metrics.jsonl has them.
            if isinstance(value, (int, float)) and name != "step":
                numbers[name] = value
        for logger in self.started:
            logger.send(numbers, row["step"])


def _library(name: str) -> Any:
    """Import the library of a logger."""
    with needs(f"--log {name}", name, LOGGERS[name].oldest, name):
        return importlib.import_module(LOGGERS[name].module)


def _to_tensorboard(run: LoggedRun) -> Logger:
    writer = _library("tensorboard").SummaryWriter(str(run.folder / "tensorboard"))

    def send(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return Logger(send, writer.close)


def _to_wandb(run: LoggedRun) -> Logger:
    # With "allow" a known id goes on with its record, as a resumed run does, and a new id begins one.
    record = _library("wandb").init(
        project=PROJECT,
        id=run.id,
        name=run.name,
        dir=str(run.folder),
        config=dict(run.settings),
        resume="allow",
    )
    return Logger(lambda values, step: record.log(values, step=step), record.finish)


def _to_trackio(run: LoggedRun) -> Logger:
    # It takes no id: the name, which holds the id, finds the record of a resumed run.
    record = _library("trackio").init(
        project=PROJECT, name=run.name, config=dict(run.settings), resume="allow"
    )
    return Logger(lambda values, step: record.log(values, step=step), record.finish)


@dataclass(frozen=True)
class Library:
    """A library that records runs: its module, the oldest version that works, and the start of a record."""

    module: str
    oldest: str
    start: Callable[[LoggedRun], Logger]


LOGGERS = {
    "tensorboard": Library("torch.utils.tensorboard", "2.15", _to_tensorboard),
    "wandb": Library("wandb", "0.17", _to_wandb),
    "trackio": Library("trackio", "0.2", _to_trackio),
}
