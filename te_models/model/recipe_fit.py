"""Check that the sizes of a model suit the GEMMs of a recipe."""

from __future__ import annotations

from te_models.config.model import ModelConfig
from te_models.config.recipe import Recipe


def check_sizes(config: ModelConfig, recipe: Recipe, each: str) -> None:
    """Require every feature dimension of an FP8 GEMM to be a multiple of the recipe's alignment.

    Args:
        config: the config of one rank's heads and channels.
        recipe: the recipe.
        each: appended to a size in messages, to say that it is per rank.

    Raises:
        ValueError: a size is not; the message names it.
    """
    sizes = dict(hidden_size=config.hidden_size, intermediate_size=config.intermediate_size)
    sizes |= {"num_attention_heads * head_dim": config.q_size, "q, k, v and gate": config.qkvg_size}
    if recipe.lm_head == "fp8":
        sizes["vocab_size"] = config.vocab_size
    for name, size in sizes.items():
        if size % recipe.feature_alignment:
            raise ValueError(
                f"{name}={size}{each} is not a multiple of {recipe.feature_alignment}, which the GEMMs of recipe "
                f"{recipe.name!r} need: change it or use recipe='bf16'"
            )
