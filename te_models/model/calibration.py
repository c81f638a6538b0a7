"""The first scales of a model under delayed scaling, from the amaxes of a batch (te_models.fp8.calibration)."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from te_models.config.recipe import get_recipe
from te_models.errors import UsageError
from te_models.fp8.calibration import Measurement, unmeasured
from te_models.model.decoder import Decoder


def calibrate(
    model: Decoder, batches: Sequence[Mapping[str, Tensor]], weights: Sequence[Tensor | float] | None = None
) -> None:
    """Give every te.Linear in FP8 that has no scales yet those of a step on `batches`.

    See te_models.causal_lm.CausalLM.calibrate.
    """
    modules = unmeasured(_fp8_linears(model)) if model.recipe.stateful else []
    if not modules:
        return
    if not batches:
        raise UsageError("calibration has no batches: give those of the first step, with labels")
    weights = [1 / len(batches)] * len(batches) if weights is None else weights
    found, device = Measurement(modules, model.device), model.device
    whole = model.recipe.head_in_fp8  # else the head and its loss run in chunks, which only a head in BF16 does
    random = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with _in_bf16(model), found.running(), random, torch.enable_grad():
        for batch, weight in zip(batches, weights, strict=True):
            loss = model(**{name: value.to(device) for name, value in batch.items()}, return_logits=whole).loss
            if loss is None:
                raise UsageError("a batch to calibrate on needs labels: gradients have scales too")
            found.backward(loss * weight)
    found.set_scales(model.recipe, model.te_recipe, model.amax_group)


def _fp8_linears(model: Decoder) -> list[nn.Module]:
    """Return the te.Linear modules that the model's recipe runs in FP8."""
    parts = [model.layers[layer] for layer in model.fp8_layers]
    if model.recipe.head_in_fp8:
        parts.append(model.lm_head)
    return [module for part in parts for module in part.modules() if isinstance(module, model.te.LINEARS)]


@contextlib.contextmanager
def _in_bf16(model: Decoder) -> Iterator[None]:
    """Inside, run the model without FP8, and recompute each block, since BF16 stores twice as much for backward."""
    before = model.recipe, model.te_recipe, model.activation_checkpointing
    model.recipe, model.te_recipe, model.activation_checkpointing = get_recipe("bf16"), None, "full"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "You are using quantized weights without quantized compute")
            yield
    finally:
        model.recipe, model.te_recipe, model.activation_checkpointing = before
