"""The kinds of layers, and the layers of a model. No torch.

A new kind is a subclass of te_models.config.layer.PartSpec with a row here, and a module with a row in
te_models.model.parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from te_models.config.attention import AttentionSpec
from te_models.config.deltanet import DeltaNetSpec
from te_models.config.latent import LatentAttentionSpec
from te_models.config.layer import FeedforwardSpec, LayerSpec, MixerSpec
from te_models.config.mlp import MLPSpec
from te_models.config.moe import MoESpec
from te_models.config.short_conv import ShortConvSpec

if TYPE_CHECKING:
    from te_models.config.model import ModelConfig

# An entry of `layer_types` -> the function that describes the mixer of such a layer, given a config and its number.
MIXERS: dict[str, Callable[[ModelConfig, int], MixerSpec]] = {
    "full_attention": AttentionSpec.of,
    "sliding_attention": AttentionSpec.of,
    "linear_attention": DeltaNetSpec.of,
    "latent_attention": LatentAttentionSpec.of,
    "conv": ShortConvSpec.of,
}

# The same for `mlp_layer_types` and the MLP.
MLPS: dict[str, Callable[[ModelConfig, int], FeedforwardSpec]] = {
    "dense": MLPSpec.of,
    "sparse": MoESpec.of,
}


def describe_layers(config: ModelConfig) -> tuple[LayerSpec, ...]:
    """Return the layers of a model, from its first to its last."""
    count = config.num_hidden_layers
    attention = "full_attention" if config.latent_attention is None else "latent_attention"
    mixers = config.layer_types or (attention,) * count
    mlps = config.mlp_layer_types or ("dense" if config.moe is None else "sparse",) * count
    return tuple(
        LayerSpec(MIXERS[mixer](config, layer), MLPS[mlp](config, layer), config.norm_position)
        for layer, (mixer, mlp) in enumerate(zip(mixers, mlps, strict=True))
    )
