"""The precision of a model's te.Linears, decided by te_models.config.precision, with the engine's recipe objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType

from torch import Tensor, nn

from te_models.config.layer import LayerSpec, depth_of
from te_models.config.precision import HEAD, Precision, precisions
from te_models.config.recipe import SCHEMES, EngineRecipe, Recipe
from te_models.fp8.primary_weights import quantize_weights_alike
from te_models.fp8.scaling_state import convert_scales, load_fp8_state


@dataclass(frozen=True)
class ModelPrecision:
    """A model's recipe, and what each of its te.Linears runs in.

    Attributes:
        recipe: the model's recipe.
        te_recipe: the engine's object of it; None for BF16.
        linears: name in the model -> precision.
        te_recipes: name in the model -> the engine's object of its recipe; None for BF16.
        layers: the layers inside the autocast of `te_recipe`.
        others: the names of te.Linears that run in something else than what surrounds them, or share their amaxes with
            other processes.
    """

    recipe: Recipe
    te_recipe: EngineRecipe | None
    linears: Mapping[str, Precision]
    te_recipes: Mapping[str, EngineRecipe | None]
    layers: range
    others: tuple[str, ...]

    @property
    def head(self) -> Precision:
        """The precision of the output head."""
        return self.linears[HEAD]

    def known(self, name: str) -> str:
        """Return the te.Linear of the model that the module `name` is, or is inside of: an adapter's base layer is."""
        while name and name not in self.linears:
            name = name.rpartition(".")[0]
        return name

    def recipe_of(self, name: str) -> Recipe | None:
        """Return the recipe of a te.Linear by the name of its module; None for BF16."""
        known = self.known(name)
        return self.linears[known].recipe if known else None

    def te_recipe_of(self, name: str) -> EngineRecipe | None:
        """Return the engine's object of that recipe."""
        return self.te_recipes.get(self.known(name))

    def quantizes_weights_as(self, other: ModelPrecision) -> bool:
        """Return whether both quantize the weight of every te.Linear in the same way."""
        return all(
            quantize_weights_alike(precision.recipe, other.linears[name].recipe)
            for name, precision in self.linears.items()
        )


def take_scales(
    model: nn.Module,
    state: Mapping[str, Tensor],
    now: ModelPrecision,
    then: Mapping[str, Precision],
) -> int:
    """Load FP8 state (`fp8_state`) of te.Linears with the precisions `then` into `model`; return how many were used.

    Scales are converted to the recipes that the te.Linears have `now`. State of one that has no use for it is ignored.

    Raises:
        CheckpointError: a tensor does not fit the model; nothing was written.
    """

    def stateful(name: str) -> bool:
        recipe = now.recipe_of(name)
        return recipe is not None and SCHEMES[recipe.scheme].stateful

    accepted = {}
    for name, tensor in state.items():
        module = name.rsplit(".", 2)[0]  # <module>.scaling_fwd.scale
        if stateful(module):
            accepted[name] = tensor
    load_fp8_state(model, accepted, now.te_recipe_of)
    if accepted:
        convert_scales(model, lambda name: then[now.known(name)].recipe, now.recipe_of)
    return len(accepted)


def model_precision(
    te: ModuleType,
    recipe: Recipe,
    layers: tuple[LayerSpec, ...],
    divided: Callable[[str], bool] = lambda name: False,
) -> ModelPrecision:
    """Return the precision of a model of these layers; errors are as in te_models.config.precision.

    `divided(name)`: whether other processes than the model's share the amaxes of a te.Linear.
    """
    linears = precisions(recipe, layers)
    # One object per recipe, since modules compare it with the one that they ran under before.
    # Also those that the recipe's table `precision` names.
    built = {one.name: one.build(te) for one in recipe.in_use}
    te_recipe = built.get(recipe.name)
    fp8_layers = recipe.fp8_layers(len(layers))

    te_recipes: dict[str, EngineRecipe | None] = {}
    others = []
    for name, precision in linears.items():
        default = None if precision.recipe is None else built[precision.recipe.name]
        te_recipes[name] = default
        if name == HEAD:
            inside = recipe.head_in_fp8
        else:
            inside = depth_of(name) in fp8_layers
        around = te_recipe if inside else None
        # Compared by identity: `built` makes one object per recipe.
        if default is not around or (recipe.stateful and divided(name)):
            others.append(name)
    return ModelPrecision(
        recipe=recipe,
        te_recipe=te_recipe,
        linears=linears,
        te_recipes=te_recipes,
        layers=fp8_layers,
        others=tuple(others),
    )
