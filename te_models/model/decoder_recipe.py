"""The recipe of a live decoder: changes of it, and saving and loading of its scales."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import Unpack

from te_models.config.layer import LayerSpec
from te_models.config.options import RecipeOptions
from te_models.config.precision import precisions
from te_models.config.recipe import Recipe, RecipeLike
from te_models.device.choice import computing_device
from te_models.errors import UsageError
from te_models.fp8.precision import ModelPrecision, take_scales
from te_models.fp8.scaling_state import fp8_state
from te_models.model import live_recipe
from te_models.model.decoder_facts import DecoderFacts
from te_models.model.expert_parallel import ExpertParallel
from te_models.model.tensor_parallel import TensorParallel


class DecoderRecipe(DecoderFacts):
    """A decoder whose recipe can change between two passes.

    Attributes:
        specs: the descriptions of its layers, as this rank holds them.
        tp: the ranks that share each of its linears.
        ep: the ranks that share its experts, each with the scales of its own.
        fp8_params: the weights of its FP8 layers are stored in FP8.
        stored_linears: names of the linears whose weights stay as a release stores them.
        recipe_reason: why "auto" chose the recipe; "" for a recipe that was asked for.
    """

    specs: tuple[LayerSpec, ...]
    tp: TensorParallel
    ep: ExpertParallel
    fp8_params: bool
    stored_linears: frozenset[str]
    recipe_reason: str

    def set_recipe(self, recipe: RecipeLike, **recipe_options: Unpack[RecipeOptions]) -> None:
        """Change the recipe of the live model. Weights and gradients stay; the next forward runs under the new recipe.

        Between two stateful recipes the scales and histories are converted; otherwise they start afresh. FP8 primary
        weights are left unchanged, so a recipe that needs another kind of FP8 raises a UsageError.
        """
        device = computing_device(self.device)
        chosen, reason = live_recipe.choose(self, recipe, recipe_options, device, self.dtype)
        live_recipe.change(self, self.check_change(chosen), reason)

    def copied_fp8_state(self) -> dict[str, Tensor]:
        """Return a copy of every scale and amax history, as `fp8_state` names them; every save takes them from here.

        Forward passes change the live tensors, evaluations for a moment too: passes of other threads wait. Ranks that
        share experts call it together.
        """
        with self.te.region_lock(self, self.recipe.quantized):
            state = fp8_state(self) if self.recipe.stateful else {}
            return self.ep.whole_scales({name: tensor.clone() for name, tensor in state.items()})

    def take_fp8_state(self, state: dict[str, Tensor], old: Recipe) -> int:
        """Load the scales and histories that `fp8_state` returned under the recipe `old`; return how many were used.

        State of te.Linears that have no use for it now is ignored. If one does not fit, raise a ValueError before
        anything is written.
        """
        return take_scales(
            self, self.ep.own_scales(state), self.precision, precisions(old, self.specs)
        )

    def check_change(self, recipe: Recipe) -> ModelPrecision:
        """Return the precision that the live model would have under another recipe, if it can change to it."""
        new = self._checked(recipe)
        if self.fp8_params and not self.precision.quantizes_weights_as(new):
            raise UsageError(
                f"the FP8 primary weights were made for recipe {self.recipe.name!r} and its layers, and "
                f"{new.recipe.name!r} needs others: save the model and load it with from_pretrained(folder, "
                "recipe=..., fp8_params=True)"
            )
        return new

    def _checked(self, recipe: Recipe) -> ModelPrecision:
        """Return the precision that a recipe gives this model, if it can run here."""
        return live_recipe.checked(self, recipe)
