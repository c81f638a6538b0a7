"""The parts of a run and the checks that come before its first step: data, optimizer, documents, room on the disk."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from te_models.causal_lm import CausalLM
from te_models.config.settings import by_name
from te_models.config.training import TrainConfig
from te_models.data.dataset import TokenDataset
from te_models.data.own_batches import OwnBatches, checked_batch
from te_models.data.streaming import StreamingDataset
from te_models.errors import UsageError, plural
from te_models.files.formats import Fields, render_json
from te_models.optim import build_optimizer, projected_in_backward
from te_models.optim.master import MasterWeights
from te_models.saving.checkpoint_choice import describe_content
from te_models.saving.run_folder import Checkpoints, step_of
from te_models.training.callback import Callback
from te_models.training.evaluation import Batch
from te_models.training.parallel import Parallel
from te_models.training.preflight import check_disk
from te_models.training.routers import check_router_losses
from te_models.training.run_model import ModelSource

if TYPE_CHECKING:
    from te_models.training.trainer import Trainer


def check_arguments(out: object, config: object, callbacks: object) -> None:
    """Raise UsageError for an argument of a Trainer that has the wrong type; warn of a warm-up without an end."""
    if not isinstance(out, str | os.PathLike):
        raise UsageError(f"out is {out!r}: give the folder of the run")
    if not isinstance(config, TrainConfig):
        raise UsageError(
            f"config is a {type(config).__name__}: give te_models.TrainConfig(steps=...)"
        )
    if not isinstance(callbacks, Sequence):
        raise UsageError(f"callbacks is a {type(callbacks).__name__}: give a list")
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise UsageError(
                "callbacks are instances of subclasses of te_models.Callback; on_step= takes a function"
            )
    _warn_of_warmup(config)


def _warn_of_warmup(config: TrainConfig) -> None:
    """Warn of a warm-up that is longer than the run, whose learning rate never gets to its peak."""
    warmup = config.warmup_steps  # below 1 a share of the run, and never longer
    if warmup > config.steps:
        warnings.warn(
            f"warmup_steps={warmup:g} is more than steps={config.steps}: the run ends within its warm-up, at "
            f"{config.steps / warmup:.0%} of learning_rate={config.learning_rate:g}",
            stacklevel=5,  # the caller of Trainer
        )


def check_before_build(source: ModelSource, config: TrainConfig) -> None:
    """Raise UsageError for options that the model to build has no use for, before data and weights are read.

    A Trainer refuses them too, but only once the model is there.
    """
    check_router_losses(source.shape, config)
    check_demotion(config, bool(source.options.get("fp8_params")))


def check_model(model: CausalLM, config: TrainConfig) -> None:
    """Raise UsageError if no parameter of the model is trained, or the guard could not do what `on_nan` says."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(
            "every parameter of the model is frozen: let some require gradients, or add adapters (add_lora)"
        )
    check_demotion(config, model.fp8_params)


def check_demotion(config: TrainConfig, fp8_params: bool) -> None:
    """Raise UsageError if layers are to move to BF16 (on_nan="demote") and with `fp8_params` have no BF16 weights."""
    if config.on_nan == "demote" and fp8_params:
        raise UsageError(
            "on_nan='demote' moves a layer to BF16, and with fp8_params=True there are no BF16 weights for it: choose "
            "on_nan='skip' or 'rewind', or leave out fp8_params"
        )


def open_training_data(
    dataset: TokenDataset | StreamingDataset | Iterable[Mapping[str, Tensor]],
    model: CausalLM,
    config: TrainConfig,
    parallel: Parallel,
) -> TokenDataset | StreamingDataset | OwnBatches:
    """Return the dataset, or the batches of the user's own as one whose position checkpoints hold."""
    if isinstance(dataset, TokenDataset | StreamingDataset):
        model.add_stop_tokens(dataset.ends)
        return dataset
    sizes = {
        "batch_size": config.batch_size // parallel.data_world,
        "seq_len": config.seq_len,
    }
    chosen = by_name(config)
    defaults = by_name(TrainConfig())
    # A size that was left at its default asks for nothing: the batches have whatever size they have.
    expected = {name: size for name, size in sizes.items() if chosen[name] != defaults[name]}
    return OwnBatches(dataset, config.seed, parallel.ranks, expected)


def evaluation_batches(
    batches: Iterable[Mapping[str, Tensor]] | None, patience: int
) -> list[Batch]:
    """Return the batches to evaluate on, checked; raise UsageError for a run with `patience` and without any."""
    checked = []
    for number, batch in enumerate(() if batches is None else batches, 1):
        checked.append(checked_batch(batch, f"evaluation batch {number}"))
    if patience and not checked:
        raise UsageError(f"patience={patience} counts evaluations: give eval_batches too")
    return checked


def optimizer_of_run(model: CausalLM, config: TrainConfig, parallel: Parallel) -> MasterWeights:
    """Return the optimizer over the model's parameters, or over this process's shards of them."""
    projected = projected_in_backward(config.optimizer, config.optimizer_options, model)
    return build_optimizer(
        config.optimizer,
        model,
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        options=config.optimizer_options,
        offload=config.optimizer_offload,
        owners=parallel.owners(),
        gradients=parallel.gradients(model, config.gradient_accumulation, projected),
        norm=parallel.norm,
    )


def rendered_documents(documents: Mapping[str, object]) -> Fields:
    """Return the documents as bytes of files, made once: to serialize a tokenizer takes about a second."""
    rendered: Fields = {}
    for name, document in documents.items():
        if not isinstance(document, bytes):
            document = render_json(document, name)
        rendered[name] = document
    return rendered


def check_folder(trainer: Trainer, resume: bool) -> None:
    """Raise UsageError if a new run would replace what its folder holds, or the disk has no room for a checkpoint."""
    step = trainer.result.step
    if not resume and not step:
        _refuse_to_replace(trainer.out, trainer.checkpoints)
    if step < trainer.config.steps:
        _check_room(trainer)


def _refuse_to_replace(out: Path, checkpoints: Checkpoints) -> None:
    """Raise UsageError if `out` has a run that a new one would replace, or a model or adapters."""
    latest = checkpoints.latest()
    if latest is not None:
        steps = plural(step_of(latest), "step")
        raise UsageError(
            f"{out} already holds a run of {steps}: continue it with run(resume=True), or give another out"
        )
    content = describe_content(out)
    if content:
        raise UsageError(f"{out} already holds {content}: give another out")


def _check_room(trainer: Trainer) -> None:
    """Raise UsageError if the first checkpoint certainly does not fit on the disk."""
    config = trainer.config
    size = trainer.optimizer.state_bytes()
    for parameter in trainer.model.parameters():
        # A run that trains adapters saves these alone: the frozen weights are in the folder that they came from.
        if parameter.requires_grad or trainer.saved is None:
            size += parameter.numel() * parameter.element_size()
    checkpoints = config.keep_last if config.save_every != 0 else 1
    check_disk(trainer.out, size, checkpoints)
