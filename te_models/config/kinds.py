"""The kinds of layers by name. No torch.

te_models.config.layers adds the kinds of this project.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from te_models.config.layer import FeedforwardSpec, MixerSpec

# An entry of `layer_types` -> the function that describes the mixer of such a layer. It takes the fields of the config
# (te_models.config.fields.ModelFields) and the number of the layer.
MIXERS: dict[str, Callable[[Any, int], MixerSpec | None]] = {}

# The same for `mlp_layer_types` and the MLP.
MLPS: dict[str, Callable[[Any, int], FeedforwardSpec | None]] = {}
