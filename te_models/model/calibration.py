"""The first scales of a model under delayed scaling, from the amaxes of a batch (te_models.fp8.calibration)."""

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from te_models.config.recipe import SCHEMES, get_recipe
from te_models.distributed.gathers import wait_for_gathers
from te_models.errors import UsageError
from te_models.fp8.calibration import Measurement, ModuleScaling, unmeasured
from te_models.fp8.precision import model_precision
from te_models.fp8.scaling_state import DelayedRecipe
from te_models.model.decoder import Decoder
from te_models.model.output import step_loss


def calibrate(
    model: Decoder,
    batches: Sequence[Mapping[str, Tensor]],
    weights: Sequence[Tensor | float] | None = None,
    router_weights: Sequence[Tensor | float] | None = None,
) -> None:
    """Give every te.Linear in FP8 without scales the scales of a step on `batches`.

    See te_models.causal_lm.CausalLM.calibrate.
    """
    for batch in batches:
        if not isinstance(batch, Mapping):
            raise UsageError(
                f"a batch to calibrate on is a {type(batch).__name__}: give a dict, such as {{'input_ids': ids}}"
            )
    training = [batch.get("labels") is not None for batch in batches]
    delayed = _delayed(model) if model.recipe.stateful else {}
    # Scales that exist already, from a checkpoint for example, are kept.
    modules = unmeasured(list(delayed), model.amax_group, training=all(training))
    if not modules:
        return
    if not batches:
        raise UsageError(
            "calibration has no batches: give the batches of the first step, with labels"
        )
    if not all(training):
        if any(training):
            raise UsageError("some batches to calibrate on have labels: give all labels, or none")
        _calibrate_inference(model, batches, modules, delayed)
        return
    if weights is None:
        # As in a step over batches with equally many targets.
        weights = [1 / len(batches)] * len(batches)
    if router_weights is None:
        router_weights = weights
    measurement = Measurement(modules, model.device, _first(model, modules))
    device = model.device
    # Else the head and its loss run in chunks, which only a head in BF16 does.
    whole = model.precision.head.recipe is not None
    # A run draws the same numbers whether it calibrates or not.
    random = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with _in_bf16(model), measurement.running(), random, torch.enable_grad():
        for batch, weight, router_weight in zip(batches, weights, router_weights, strict=True):
            inputs = {name: value.to(device) for name, value in batch.items()}
            output = model(**inputs, return_logits=whole)
            factors = model.router_losses if model.training else None
            measurement.backward(step_loss(output, weight, router_weight, factors))
            # That ends at the first block in FP8, before which there may be others.
            wait_for_gathers(model)
    measurement.set_scales([delayed[module] for module in modules])


def _first(model: Decoder, modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules whose inputs may depend on no other's: in the first block with any, and outside the blocks.

    Within a block there are several: mixers beside each other may each scale the block's input.
    """
    blocks = {}
    for number, block in enumerate(model.layers):
        for module in block.modules():
            blocks[module] = number
    first = min((blocks[module] for module in modules if module in blocks), default=0)
    return [module for module in modules if blocks.get(module, first) == first]


def _calibrate_inference(
    model: Decoder,
    batches: Sequence[Mapping[str, Tensor]],
    modules: Sequence[nn.Module],
    delayed: Mapping[nn.Module, ModuleScaling],
) -> None:
    """Measure the scales of inputs and weights alone; inference uses no scales of gradients, which stay at 1."""
    measurement = Measurement(modules, model.device)
    with _in_bf16(model), measurement.running(), torch.no_grad():
        for batch in batches:
            model(**{name: value.to(model.device) for name, value in batch.items()})
    measurement.set_scales([delayed[module] for module in modules])


def _delayed(model: Decoder) -> dict[nn.Module, ModuleScaling]:
    """Return how the te.Linear modules under delayed scaling are scaled."""
    scalings: dict[nn.Module, ModuleScaling] = {}
    for name, module in model.named_modules():
        recipe = model.precision.recipe_of(name) if isinstance(module, model.te.LINEARS) else None
        if recipe is not None and SCHEMES[recipe.scheme].stateful:
            built = cast(DelayedRecipe, model.precision.te_recipe_of(name))
            scalings[module] = ModuleScaling(
                recipe, built, model.ep.amax_group(name, model.amax_group)
            )
    return scalings


@contextlib.contextmanager
def _in_bf16(model: Decoder) -> Iterator[None]:
    """Inside, run the model without FP8, and recompute each block, since BF16 stores twice as much for backward."""
    before = model.precision, model.activation_checkpointing
    model.precision = model_precision(model.te, get_recipe("bf16"), model.specs)
    model.activation_checkpointing = "full"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "You are using quantized weights without quantized compute"
            )
            yield
    finally:
        model.precision, model.activation_checkpointing = before
