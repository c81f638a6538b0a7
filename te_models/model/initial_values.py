"""The initial values of a decoder's parameters."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from te_models.config.model import ModelConfig
from te_models.model.block import Block
from te_models.model.expert_parallel import scratch

if TYPE_CHECKING:
    from te_models.model.decoder import Decoder


@torch.no_grad()
def set_initial_values(model: Decoder) -> None:
    """Set every initial value: normal(0, initializer_range), the scales of norms 1, biases 0.

    The projections back into the residual stream are divided by sqrt(2 * layers) (Radford et al. 2019).
    """
    config = model.config
    std = config.initializer_range
    residual = std / math.sqrt(2 * len(model.specs))
    model.tp.check_same_random_state(model.device)
    # Every parameter in the order of an undivided model: ranks draw the numbers of each other's experts and rows too,
    # and throw them away, so that one seed gives one model however it is divided.
    for name, parameter in model.ep.every(model.named_parameters(), scratch):
        with model.tp.filling(name, parameter, config, model.keeps_initial_values) as values:
            if name.startswith("layers."):
                _, layer, rest = name.split(".", 2)
                cast(Block, model.layers[int(layer)]).initialize(rest, values, std, residual)
                _clear_padding(config, name, values)
            elif name == "layer_inputs.norm.weight":
                values.fill_(0.0 if config.zero_centered_norm else 1.0)
            elif name == "norm.weight":
                plain = config.plain_final_norm or not config.zero_centered_norm
                values.fill_(1.0 if plain else 0.0)
            else:
                values.normal_(0.0, std)
    model.tp.mark(model, config)


def _clear_padding(config: ModelConfig, name: str, values: Tensor) -> None:
    """Set the rows of a weight that only pad it to 0, as in a loaded model: they may not decide a scale."""
    linear = config.linears.get(name.rpartition(".")[0])
    if linear is None or values.ndim == 1:
        return
    for section, rows in zip(linear.sections, values.split(linear.rows), strict=True):
        rows[section.used :] = 0
