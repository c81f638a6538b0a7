"""The end of a run that fails: a checkpoint of its last whole step, and never one with a NaN."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from te_models.distributed.control import Ranks
from te_models.distributed.dtensor import local
from te_models.errors import Diverged, SaveError, TeModelsError
from te_models.files.tensors import all_finite
from te_models.saving.run_folder import Checkpoints, step_name, step_of
from te_models.training.evaluation import KEPT
from te_models.training.metrics import MetricsLog

if TYPE_CHECKING:
    from te_models.training.trainer import Trainer

log = logging.getLogger(__name__)


def broken_tensor(tensors: Mapping[str, Mapping[str, Tensor]], ranks: Ranks) -> str | None:
    """Return the name of a tensor of a checkpoint with a NaN or an infinity, on any process, if there is one.

    No loader would accept such a checkpoint. All processes call this together.
    """
    broken = None
    for members in tensors.values():
        for name, tensor in members.items():
            if broken is None and not all_finite(local(tensor)):
                broken = name
    # A rank sees its own shards only, and all have to agree on whether the checkpoint is written.
    names = [name for name in ranks.gather(broken) if name is not None]
    return names[0] if names else None


def broken_line(name: str, step: int, checkpoints: Checkpoints, best: Checkpoints) -> str:
    """Return the line about a checkpoint that was not written, since the tensor of this name is broken.

    `checkpoints` are the run's own; `best` holds the model with its lowest evaluation loss.
    """
    latest = checkpoints.latest()
    best_latest = best.latest()
    if latest is not None:
        earlier = f"{latest} is the newest"
    elif best_latest is not None:
        earlier = f"there is no earlier one, but {best.root.parent} has the model of step {step_of(best_latest)}"
    else:
        earlier = "there is no earlier one"
    return f"after step {step} {name} has a NaN or an infinity, so no checkpoint of it was written; {earlier}"


@contextlib.contextmanager
def background_saves(checkpoints: Checkpoints, best: Checkpoints) -> Iterator[None]:
    """Wait for the saves under way when the run in the block ends. If the last checkpoint failed, so did the run."""
    try:
        yield
    # The error of the run goes on to the caller; one of a save must not take its place.
    except BaseException:
        for each in (checkpoints, best):
            with contextlib.suppress(SaveError):  # logged when it happened
                each.wait()
        raise
    checkpoints.wait()
    with contextlib.suppress(SaveError):  # logged too; the last checkpoint is there
        best.wait()


def save_failed_run(trainer: Trainer, error: Exception, metrics: MetricsLog) -> None:
    """Write a checkpoint of the last whole step of a run that `error` ends, and say so: in its message or in the log.

    Several processes save together, so they do where all of them fail at once: where the loss is not finite.
    """
    diverged = isinstance(error, Diverged)
    # Several processes save together: one that fails alone would wait in a save for the others.
    if isinstance(error, SaveError) or (trainer.parallel.ranks.world > 1 and not diverged):
        return
    # Some parameters may have their new values and others not: that is the state of no step.
    if trainer.updating:
        log.warning("the run failed within an update: step %d is not saved", trainer.result.step)
        return
    if not diverged and trainer.pending is not None:  # its update is queued
        with contextlib.suppress(Diverged):  # then the update changes nothing
            metrics.write(trainer.finish_pending())
    with contextlib.suppress(SaveError):  # logged when it happened
        trainer.checkpoints.wait()
    step = trainer.result.step
    latest = trainer.checkpoints.latest()
    if not step:
        return
    outcome = f"step {step} is saved in {trainer.out}, and --resume continues from it"
    if latest is None or latest.name != step_name(step):
        if trainer.begun is not None:
            trainer.starts.put_back(trainer.begun)
        try:
            trainer.save(interrupted=True)
        except (TeModelsError, RuntimeError) as failure:
            outcome = str(failure)
    if diverged:
        error.args = (str(error).replace(KEPT, f"{KEPT}; {outcome}"),)
    else:
        log.warning("the run failed; %s", outcome)
