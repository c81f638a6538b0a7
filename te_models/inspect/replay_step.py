"""A captured step, run once more under a recipe: in one process, or in this process's share of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from te_models.causal_lm import CausalLM
from te_models.config.recipe import SCHEMES, Recipe
from te_models.config.training import TrainConfig
from te_models.device.determinism import deterministic
from te_models.fp8.scaling_state import WIDTHS, delayed_states, fp8_max
from te_models.inspect.replay_report import StepRun
from te_models.interop.origin import TRAINED
from te_models.optim.gradients import Gradients
from te_models.recorder.record import Record
from te_models.saving.folder import load_folder
from te_models.training.captures import Capture
from te_models.training.parallel import Parallel
from te_models.training.recording import Recorder
from te_models.training.resume import saved_choices
from te_models.training.routers import weigh_losses
from te_models.training.step_passes import StepPasses

ALONE = Parallel()


def run_config(capture: Capture) -> TrainConfig:
    """Return the options of a captured run; those that this version does not know are left out."""
    known = {field.name for field in dataclasses.fields(TrainConfig)}
    fields = {name: value for name, value in capture.about["config"].items() if name in known}
    return TrainConfig(**fields)


def run_step(
    capture: Capture, recipe: Recipe, *, device: str, engine: str, shared: Parallel = ALONE
) -> StepRun:
    """Run a captured step under a recipe, on a model that is loaded anew, without an update.

    Args:
        capture: the step.
        recipe: under which it runs.
        device: where the model is.
        engine: "emulated" or "native".
        shared: this process's place among those that share the step, all of which call this; by default there is one.
    """
    own_recipe = capture.recipe.to_dict() == recipe.to_dict()
    alone = shared.ranks.world == 1
    calibrate = True  # another recipe has no scales yet
    if own_recipe:
        # Captures of earlier versions do not say it; then the state has all scales.
        calibrate = bool(capture.about.get("calibrates", False))
    config = _step_config(capture, alone, calibrate)
    # Anew for each run: a pass changes scales and histories.
    model = _load_model(
        capture,
        recipe,
        own_recipe=own_recipe,
        device=device,
        engine=engine,
        build=None if alone else shared.build,
    )
    weigh_losses(model, config)
    shared.prepare(model)
    count = int(capture.about["micro_batches"])
    gradients = shared.gradients(model, count)
    recorder = Recorder.of_run(model, shared, config, every=0)
    passes = StepPasses(model, gradients, shared, config, recorder)
    if alone:
        micro_batches = capture.micro_batches_of_one_process(joined=_joins_shares(capture, recipe))
    else:
        micro_batches = capture.shares[shared.data_rank]
    recorder.begin()
    # Stochastic rounding draws the numbers that the run drew; the caller's go on as if nothing had run.
    with torch.random.fork_rng(devices=[]), deterministic(config.deterministic):
        # A copy: torch 2.13 crashes on a row of a larger tensor.
        torch.set_rng_state(capture.random[shared.ranks.rank].clone())
        loss = passes.run(micro_batches, eager=True)
    loss = shared.sum_and_any(loss.reshape(1))[0]
    entry = recorder.end(capture.step)
    entry.wait()
    recorder.detach()
    norm = _gradient_norm(model, gradients, shared)
    passes.close()
    record = Record(
        tensors=recorder.tensors,
        steps=[capture.step],
        values=entry.values.numpy()[None],
        codes=entry.codes.numpy().view(np.uint64)[None],
    )
    return StepRun(loss=float(loss), grad_norm=float(norm), record=record)


def _step_config(capture: Capture, alone: bool, calibrate: bool) -> TrainConfig:
    """Return the options of the run for this one step; `alone` for one process, whatever the run had."""
    # The schedule has chosen the recipe of the step already.
    config = dataclasses.replace(run_config(capture), calibrate=calibrate, recipe_schedule="")
    if not alone:
        return config
    # One process computes the whole batch, and has no other to share layers with.
    return dataclasses.replace(
        config,
        parallel="none",
        tensor_parallel_size=0,
        expert_parallel_size=0,
        context_parallel_size=0,
        sequence_parallel=False,
        fp8_dispatch=False,
        cuda_graph=False,
    )


def _load_model(
    capture: Capture,
    recipe: Recipe,
    *,
    own_recipe: bool,
    device: str,
    engine: str,
    build: Callable[..., CausalLM] | None,
) -> CausalLM:
    """Return the model as it was before the step; `own_recipe` says whether `recipe` is the run's own."""
    saved = saved_choices(capture.state)
    fp8_params = bool(saved["fp8_params"])
    model = CausalLM.from_pretrained(
        capture.state,
        build=build,
        recipe=saved["recipe"] if own_recipe else recipe,
        fp8_params=fp8_params and own_recipe,
        device=device,
        engine=cast(Any, engine),  # for type checkers CausalLM lists the names
    )
    # A schedule has changed it for this step, as here.
    if model.recipe.to_dict() != recipe.to_dict():
        model.set_recipe(recipe)
    # Under another recipe the saved scales would be the wrong ones, or for a format that it does not use.
    if not own_recipe:
        _remake_scales(model)
    _train_adapters(model, capture)
    return model


def _gradient_norm(model: CausalLM, gradients: Gradients, shared: Parallel) -> Tensor:
    """Return the norm of all gradients, over the processes that share them."""
    trained: list[Tensor] = []
    trained_gradients: list[Tensor] = []
    for parameter in model.parameters():
        # Sums of several micro-batches, or processes, know nothing of frozen parameters.
        gradient = gradients.of(parameter) if parameter.requires_grad else None
        if gradient is not None:
            trained.append(parameter)
            trained_gradients.append(gradient)
    return shared.norm(trained, trained_gradients)


def _joins_shares(capture: Capture, recipe: Recipe) -> bool:
    """Return whether one process takes the shares of several as one batch, and not one after another.

    The recipes without a state scale each process's activations by themselves, so that shares apart have the scales of
    the run. Scales of `delayed` serve all processes until the end of a micro-batch, and experts that processes divide
    get the tokens of all of them.
    """
    return recipe.stateful or capture.about["config"].get("parallel") == "fsdp+ep"


def _train_adapters(model: CausalLM, capture: Capture) -> None:
    """Let adapters, which are loaded to be used, train: in the model's dtype, with dropout that their file may lack."""
    adapters = [parameter for name, parameter in model.named_parameters() if ".lora_" in name]
    if not adapters:
        return
    from te_models.training.lora_run import cast_adapters  # noqa: PLC0415  needs peft

    for parameter in adapters:
        parameter.requires_grad_(True)
    cast_adapters(model)
    trained = load_folder(capture.state, [], optional=[TRAINED]).documents.get(TRAINED)
    facts = trained.get("lora") if isinstance(trained, dict) else None
    dropout = facts["dropout"] if isinstance(facts, dict) else 0.0
    if not dropout:
        return
    for module in model.modules():
        layers: Any = getattr(module, "lora_dropout", {})
        for name in layers:
            layers[name] = nn.Dropout(dropout)


@torch.no_grad()
def _remake_scales(model: CausalLM) -> None:
    """Make delayed scales anew from the histories that the model has, by the rules of its own recipe."""
    for name, state in delayed_states(model).items():
        owner, _, direction = name.rpartition(".")
        recipe = model.precision.recipe_of(owner)
        if recipe is None or not SCHEMES[recipe.scheme].stateful or len(state.amax_history) < 2:
            continue
        # Row 0 is the maximum of the step that is under way.
        history = state.amax_history[1:]
        uses_newest = recipe.fields["amax_compute_algo"] == "most_recent"
        used = history[-1] if uses_newest else history.amax(0)
        largest = fp8_max(recipe, direction) * 2.0 ** -recipe.fields["margin"]
        usable = (used > 0) & used.isfinite()
        state.scale.copy_(torch.where(usable, largest / used, state.scale))
        assert len(state.scale) % WIDTHS[direction] == 0
