"""Check that the sizes of a model suit the GEMMs of a recipe."""

from __future__ import annotations

from te_models.config.layer import LayerSpec
from te_models.config.model import ModelConfig
from te_models.config.recipe import Recipe
from te_models.errors import ConfigError


def check_sizes(layers: tuple[LayerSpec, ...], config: ModelConfig, recipe: Recipe, each: str) -> None:
    """Require every feature dimension of an FP8 GEMM to be a multiple of the recipe's alignment.

    Args:
        layers: one rank's share of the layers.
        config: the whole model's config.
        recipe: the recipe.
        each: appended to a size in messages, to say that it is per rank.

    Raises:
        ConfigError: a size is not; the message names it.
    """
    sizes: dict[str, int] = {}
    for layer in layers:
        for part in layer.parts:
            sizes |= part.features
    if recipe.lm_head == "fp8":
        sizes["vocab_size"] = config.vocab_size
    for name, size in sizes.items():
        if size % recipe.feature_alignment:
            raise ConfigError(
                f"{name}={size}{each} is not a multiple of {recipe.feature_alignment}, which the GEMMs of recipe "
                f"{recipe.name!r} need: change it or use recipe='bf16'"
            )
