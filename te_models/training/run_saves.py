"""The checkpoints that a run writes: the state of its next step, and the model of the best evaluation so far."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from te_models.errors import Diverged
from te_models.files.formats import Fields
from te_models.fp8.region import saving
from te_models.optim.state_tensors import bytes_in
from te_models.saving.pretrained import model_content
from te_models.saving.run_folder import Checkpoints, step_of
from te_models.saving.sharded import ShardedCheckpoints, shared_amaxes
from te_models.training.facts import facts_now
from te_models.training.failed_run import broken_line, broken_tensor
from te_models.training.optimizer_state import optimizer_names
from te_models.training.parallel import reshard
from te_models.training.preflight import available_memory
from te_models.training.resume import run_choices
from te_models.training.run_file import rewrite_recipe
from te_models.training.run_state import checkpoint_content, load_checkpoint
from te_models.training.settings import RUN_FILE
from te_models.training.timing import Row

if TYPE_CHECKING:
    from te_models.training.trainer import Trainer

SAVE_RETRY_PAUSES = (1.0, 5.0)  # seconds before a failed save is tried again
SAVE_PAUSE = 300.0  # seconds between checkpoints where save_every is not given
# Of a run's time that these take at most: a large model on a slow disk saves more rarely.
SAVE_SHARE = 0.05


def checkpoints_in(trainer: Trainer, folder: Path, keep_last: int | None) -> Checkpoints:
    """Return a writer of checkpoints of this run in `folder`; of several processes each writes its shards.

    It keeps the newest `keep_last` of them; None: all.
    """
    ranks = trainer.parallel.ranks
    if ranks.world == 1:
        return Checkpoints(folder, keep_last=keep_last, retry_pauses=SAVE_RETRY_PAUSES)
    return ShardedCheckpoints(
        folder,
        ranks=ranks,
        model=trainer.model,
        names=optimizer_names(trainer.optimizer, trainer.model),
        fetch=trainer.optimizer.fetch,
        keep_last=keep_last,
        retry_pauses=SAVE_RETRY_PAUSES,
    )


def content_of_model(trainer: Trainer) -> tuple[dict[str, dict[str, Tensor]], Fields]:
    """Return the part of a checkpoint that is a saved model."""
    # A forward pass without backward, such as an evaluation's, leaves the weights of FSDP2 gathered. And since the last
    # update of scales each rank may have recorded other amaxes, of which a checkpoint holds one set.
    reshard(trainer.model)
    shared_amaxes(trainer.model)
    trainer.model.origin = replace(trainer.model.origin, trained=facts_now(trainer))
    if trainer.saved is not None:
        return trainer.saved.content()
    return model_content(
        trainer.model,
        trainer.model.origin,
        trainer.optimizer.masters_by_id(),
        parts=trainer.parallel.sharded,
    )


def wants_save(trainer: Trainer) -> bool:
    """Return whether it is long since the last checkpoint of a run without save_every, by the first process' clock."""
    if trainer.config.save_every is not None or not trainer.parallel.ranks.first:
        return False
    # At least five minutes, and twenty times what the last save took.
    pause = max(SAVE_PAUSE, trainer.checkpoints.seconds / SAVE_SHARE)
    return time.monotonic() - trainer.saved_at > pause


def write_checkpoint(trainer: Trainer, blocking: bool) -> Path:
    """Write a checkpoint of everything that the next step depends on; return its folder.

    Raises:
        Diverged: a tensor is not finite; the message names it and the newest checkpoint that is.
        SaveError: it cannot be written.
    """
    step = trainer.result.step
    with saving(trainer.model):
        tensors, documents = checkpoint_content(trainer)
        broken = broken_tensor(tensors, trainer.parallel.ranks)
        if broken is not None:
            raise Diverged(broken_line(broken, step, trainer.checkpoints, trainer.best))
        if not blocking and trainer.config.save_every is None:
            # A save in the background copies all to host memory. Nobody asked for this save, so it must not use up
            # memory that the user counts on.
            size = sum(bytes_in(members) for members in tensors.values())
            blocking = 2 * size > available_memory(torch.device("cpu"))
        return trainer.checkpoints.save(
            step,
            tensors,
            documents,
            blocking=blocking,
            copy_later=not blocking,
        )


def reserve_room(trainer: Trainer) -> None:
    """Set aside host memory for checkpoints that are written in the background, so that the first is no slower."""
    tensors, documents = checkpoint_content(trainer)
    trainer.checkpoints.reserve(tensors, documents)


def newest_step(trainer: Trainer) -> int:
    """Return the step of the newest checkpoint, once a save under way is done."""
    trainer.checkpoints.wait()
    return step_of(trainer.checkpoints.to_resume())


def rewind(trainer: Trainer) -> int:
    """Load the newest checkpoint into the run in progress, but for the place in the data; return its step."""
    load_checkpoint(trainer, trainer.checkpoints.to_resume(), with_data=False)
    return trainer.result.step


def keep_recipe(trainer: Trainer) -> None:
    """Write the recipe of the run's first step into run.toml, once layers of it stay in BF16."""
    path = trainer.out / RUN_FILE
    if trainer.parallel.ranks.first and path.is_file():
        rewrite_recipe(path, trainer.schedule.first)


def note_evaluation(trainer: Trainer, row: Row) -> None:
    """Save the model after the best evaluation so far, and end a run that no longer improves."""
    result = trainer.result
    config = trainer.config
    step = row["step"]
    # All processes decide by one number: each has the same loss but for the order of its sums.
    loss = trainer.parallel.ranks.gather(row["eval_loss"])[0]
    if loss < min(result.best_eval_loss, result.first_eval_loss):  # the second may be a NaN
        result.best_eval_loss = loss
        result.best_step = step
        result.evaluations_since_best = 0
        if config.keep_best:
            _save_best(trainer, step)
    else:
        result.evaluations_since_best += 1
        enough = config.patience and result.evaluations_since_best >= config.patience
        if enough and step < config.steps:
            trainer.stopping = True
            result.stopped_early = True
    for callback in trainer.callbacks:
        callback.on_eval(trainer, row)


def _save_best(trainer: Trainer, step: int) -> None:
    """Save the model in the background as best/, the model with the lowest evaluation loss so far."""
    tensors, documents = trainer.saved_model()
    # A tensor that became NaN since the evaluation ends the run in the next step, with a better explanation.
    if broken_tensor(tensors, trainer.parallel.ranks) is None:
        documents = {**documents, "run": run_choices(trainer.model), **trainer.documents}
        trainer.best.save(step, tensors, documents, blocking=False)
