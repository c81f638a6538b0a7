"""The recipe of a decoder: chosen, checked against the model and the machine, and changed while the model lives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_models.config.options import RecipeOptions
from te_models.config.recipe import AUTO, Recipe, RecipeLike, get_recipe
from te_models.engine import check_support
from te_models.errors import UsageError
from te_models.fp8.kept_weights import forget_kept_weights
from te_models.fp8.precision import ModelPrecision, model_precision
from te_models.fp8.primary_weights import relink
from te_models.model.recipe_fit import auto_recipe, check_layers, check_sizes, say, suit_to_gpu

if TYPE_CHECKING:
    from te_models.model.decoder_recipe import DecoderRecipe


def choose(
    model: DecoderRecipe,
    recipe: RecipeLike,
    fields: RecipeOptions,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Recipe, str]:
    """Return the recipe that is asked for, and for "auto" the reason for the choice, which is logged; else "".

    `device` and `dtype` are the model's, which may have no parameters yet.
    """
    if recipe != AUTO:
        return suit_to_gpu(get_recipe(recipe, **fields), model.engine), ""
    chosen, reason = auto_recipe(
        model.config,
        model.engine,
        device,
        layers=model.specs,
        dtype=dtype,
        fp8_params=model.fp8_params,
        **fields,
    )
    say(f"recipe auto: {chosen.name} ({reason})")
    return chosen, reason


def checked(model: DecoderRecipe, recipe: Recipe) -> ModelPrecision:
    """Return the precision that a recipe gives a model, if it can run here; else raise a UsageError."""
    check_support(model.te, model.engine, recipe)
    check_layers(model.config, recipe)
    model.tp.check_recipe(recipe)
    model.ep.check_recipe(recipe, model.fp8_params)
    check_sizes(model.specs, model.config.vocab_size, recipe, model.tp.each)
    precision = model_precision(model.te, recipe, model.specs, model.ep.divides)
    for name in model.stored_linears:
        runs = model.te.runs_stored_experts(precision.te_recipe_of(name))
        if model.config.linears[name].experts and not runs:
            raise UsageError(model.te.STORED_RECIPES)
    return precision


def check_stored(model: DecoderRecipe) -> None:
    """Raise a UsageError for what a model cannot be whose weights stay as a release stores them."""
    advice = "or load it with base_weights='dequantized'"
    if model.fp8_params:
        raise UsageError(
            "fp8_params=True quantizes weights by the recipe, and base_weights='stored' leaves them as their "
            "release has them: leave one of them out"
        )
    if model.tp.size > 1 or model.ep.size > 1:
        raise UsageError(
            "base_weights='stored' needs each whole linear on every process, with its scales: use --parallel ddp, "
            f"{advice}"
        )


def change(model: DecoderRecipe, new: ModelPrecision, reason: str) -> None:
    """Give a live model another precision, with its scales where both recipes have some."""
    old = model.recipe
    # Copied before the reset below drops it.
    keep = model.copied_fp8_state() if new.recipe.stateful else {}
    forget_kept_weights(model)
    for module in model.modules():
        if isinstance(module, model.te.LINEARS):
            model.te.reset_fp8_state(module)
    model.precision = new
    model.recipe_reason = reason
    # FP8 weights refer to the quantizers of their module, which the reset replaced.
    relink(model, new.te_recipe_of)
    if keep:
        model.take_fp8_state(keep, old)
