"""Callbacks of a run: at the end of a step, after an evaluation and at a save."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from te_models.training.timing import Row

if TYPE_CHECKING:
    from te_models.training.trainer import Trainer


class Callback:
    """Methods that a run calls on every process. A subclass overrides those it needs; by default they do nothing.

    On a GPU the next step is already queued when `on_step` is called, except before an evaluation or a save: a change
    of the model takes effect in the step after that. `trainer.stop()` ends the run after the step that follows.
    """

    def on_step(self, trainer: Trainer, row: Row) -> None:
        """Take the metrics of a finished step, as in metrics.jsonl."""

    def on_eval(self, trainer: Trainer, row: Row) -> None:
        """Take the metrics of a step after which the model was evaluated, including "eval_loss"."""

    def on_save(self, trainer: Trainer, folder: Path) -> None:
        """Take the folder of a checkpoint; before the end of the run it may still be incomplete."""
