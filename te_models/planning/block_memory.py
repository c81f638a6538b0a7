"""The blocks of a model that have the same memory in a training step, of which the memory plan measures one."""

from __future__ import annotations

from typing import NamedTuple

from te_models.config.layer import LayerSpec
from te_models.config.model import ModelConfig
from te_models.config.precision import precisions
from te_models.config.recipe import Recipe
from te_models.config.recompute_modes import recomputes_block, recomputes_mlp
from te_models.planning.training import StepSetting


class BlockMemory(NamedTuple):
    """Everything that the memory of a block depends on, beside the setting of the step.

    Attributes:
        layer: the description of the block.
        recipes: the name of the recipe of each of its linears; None: BF16.
        stored: the linears whose weights stay as a release stores them.
        fp8: whether it runs inside the model's autocast.
        recomputed, mlp_recomputed: whether backward recomputes the block, or its MLP.
        input_held: whether `Decoder._decode` holds its input while it runs.
        first: whether it is the first block: nothing before it has a gradient, and nothing follows its backward.
    """

    layer: LayerSpec
    recipes: tuple[str | None, ...]
    stored: frozenset[str]
    fp8: bool
    recomputed: bool
    mlp_recomputed: bool
    input_held: bool
    first: bool


def first_with_same_memory(
    config: ModelConfig, recipe: Recipe, setting: StepSetting
) -> tuple[int, ...]:
    """Return for each layer the first one that has the same memory, so that only that one is measured."""
    by_linear = precisions(recipe, config.layers)
    fp8_layers = recipe.fp8_layers(len(config.layers))
    count = len(config.layers)
    stored_linears = frozenset() if setting.stored is None else setting.stored.linears
    first: dict[BlockMemory, int] = {}
    same = []
    for depth, layer in enumerate(config.layers):
        recipes = []
        stored = set()
        for name in layer.linears:
            full_name = f"layers.{depth}.{name}"
            linear_recipe = by_linear[full_name].recipe
            recipes.append(None if linear_recipe is None else linear_recipe.name)
            if full_name in stored_linears:
                stored.add(name)
        fp8 = depth in fp8_layers
        memory = BlockMemory(
            layer=layer,
            recipes=tuple(recipes),
            stored=frozenset(stored),
            fp8=fp8,
            recomputed=recomputes_block(setting.mode, depth),
            mlp_recomputed=recomputes_mlp(setting.mode, depth, count, fp8, setting.fp8_params),
            input_held=depth in (fp8_layers.start, fp8_layers.stop),
            first=depth == 0,
        )
        same.append(first.setdefault(memory, depth))
    return tuple(same)
