"""The state of a run in a checkpoint: everything that the next step depends on, written and read back."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from te_models.files.formats import Fields, flatten_state
from te_models.fp8.primary_weights import drop_initial_values
from te_models.fp8.scaling_state import divide_gradient_amaxes
from te_models.saving.adapters import facts_in
from te_models.saving.load_model import read_training_state
from te_models.saving.sharded import cut_optimizer_state
from te_models.training.check_state import (
    check_patience,
    check_structure,
    check_trained,
    gradient_factor,
    random_states,
    read_random_state,
    read_result,
)
from te_models.training.facts import resumed_facts
from te_models.training.optimizer_state import optimizer_names, optimizer_state, trained_names
from te_models.training.resume import run_choices
from te_models.training.step_start import RandomState

if TYPE_CHECKING:
    from te_models.training.trainer import Trainer


def checkpoint_content(trainer: Trainer) -> tuple[dict[str, dict[str, Tensor]], Fields]:
    """Return the tensors and documents of a checkpoint."""
    tensors, documents = trainer.saved_model()
    start = trainer.begun
    ranks = trainer.parallel.ranks
    if start is None:
        random = RandomState.now(trainer.device)
        position = trainer.data.state_dict()
    else:
        # The step that follows has begun, and failed: it is to begin again as it did, on the same batches.
        random = start.random
        position = trainer.starts.whole_data(start)
    state = {
        "optimizer": optimizer_state(trainer.optimizer, trainer.model),
        "dataset": position,
        "rng": random_states(random.cpu, ranks),
        "cuda_rng": None if random.cuda is None else random_states(random.cuda, ranks),
        "result": asdict(trainer.result),
        # The gradients that the scales were measured on, over the same gradients in one process.
        "gradient_factor": 1,
        "trained": trained_names(trainer.optimizer, trainer.model),
    }
    tensors["training"], documents["training"] = flatten_state(state)
    return tensors, {**documents, "run": run_choices(trainer.model), **trainer.documents}


def load_checkpoint(trainer: Trainer, checkpoint: Path, with_data: bool) -> None:
    """Load a checkpoint into a run; without `with_data` the run stays at its place in the data.

    Raises:
        ValueError: it is of another model, optimizer or data.
    """
    trainer.schedule.take(checkpoint)
    if trainer.saved is None:
        training = read_training_state(trainer.model, checkpoint)
    else:
        training = trainer.saved.read(checkpoint)
    # Read and compare all of it first, so that a checkpoint that is refused has changed nothing.
    state = training.state
    names = trained_names(trainer.optimizer, trainer.model)
    check_trained(state.get("trained"), names, checkpoint)
    optimizer = _own_optimizer_state(trainer, state["optimizer"])
    trainer.optimizer.check_state_dict(optimizer)
    random = read_random_state(state, checkpoint, trainer.parallel.ranks.rank, trainer.device)
    result = read_result(state["result"])
    factor = gradient_factor(state, trainer.out, trainer.parallel)
    check_patience(result, trainer.config.patience)
    check_structure(state["dataset"], trainer.data.state_dict(), "dataset")
    if with_data:
        # The last that may refuse, before it changes anything.
        trainer.data.load_state_dict(state["dataset"])
    # From here on nothing refuses: weights, scales, masters and random numbers, in any order.
    training.write()
    if factor != 1:
        divide_gradient_amaxes(trainer.model, factor)
    trainer.optimizer.load_state_dict(optimizer)
    drop_initial_values(trainer.model)
    random.restore(trainer.device)
    trainer.result = replace(result, stopped_early=False, signal=0)
    trainer.saved_step = trainer.result.step
    trainer.facts = resumed_facts(trainer.facts, facts_in(checkpoint))


def _own_optimizer_state(trainer: Trainer, saved: Fields) -> Fields:
    """Return this process's part of an optimizer's saved state: where FSDP2 shards it, the shards."""
    saved = trainer.optimizer.without_equal_masters(saved)
    if not trainer.parallel.sharded or trainer.parallel.owners() is not None:
        return saved
    names = optimizer_names(trainer.optimizer, trainer.model)
    masters = {
        "state": trainer.optimizer.masters,
        "masters": [master for _, master in trainer.optimizer.saved_masters],
    }
    return cut_optimizer_state(saved, masters, trainer.model, names)
