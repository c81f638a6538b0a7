"""The kinds of layers, and the layers of a model. No torch.

A new kind is a subclass of te_models.config.layer.PartSpec with a row here, and a module with a row in
te_models.model.parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from te_models.config.attention import AttentionSpec
from te_models.config.deltanet import DeltaNetSpec
from te_models.config.layer import LayerSpec, MixerSpec
from te_models.config.mlp import MLPSpec

if TYPE_CHECKING:
    from te_models.config.model import ModelConfig

# An entry of `layer_types` -> the function that describes the mixer of such a layer, given a config and its number.
MIXERS: dict[str, Callable[[ModelConfig, int], MixerSpec]] = {
    "full_attention": AttentionSpec.of,
    "sliding_attention": AttentionSpec.of,
    "linear_attention": DeltaNetSpec.of,
}


def describe_layers(config: ModelConfig) -> tuple[LayerSpec, ...]:
    """Return the layers of a model, from its first to its last."""
    kinds = config.layer_types or ("full_attention",) * config.num_hidden_layers
    return tuple(
        LayerSpec(MIXERS[kind](config, layer), MLPSpec.of(config, layer), config.norm_position)
        for layer, kind in enumerate(kinds)
    )
