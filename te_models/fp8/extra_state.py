"""The scales and amax histories of a te module as one tensor, the `_extra_state` that CausalLM has in its state_dict.

FP32 [1 + length, 3 or 5]: row 0 holds the scales, the rows below the amax history; 3 columns are for the forward pass,
then 2 for the backward pass (te_models.fp8.scaling_state). A te.GroupedLinear has as many for each expert. Transformer
Engine itself stores a pickle there, which it refuses to load.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from te_models.errors import CheckpointError
from te_models.fp8.scaling_state import DIRECTIONS, WIDTHS

EXTRA = "_extra_state"


def extra_states(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the scales and amax histories of each module as one tensor, by the name that it has in a state_dict.

    `state` has them by their names in te_models.fp8.scaling_state.
    """
    states = {}
    for owner in sorted({name.rsplit(".", 2)[0] for name in state}):
        columns = []
        for way in DIRECTIONS:
            scale = state.get(f"{owner}.{way}.scale")  # [slots]
            if scale is not None:
                history = state[f"{owner}.{way}.amax_history"]  # [length, slots]
                columns.append(torch.cat((scale[None], history)))
        states[f"{owner}.{EXTRA}"] = torch.cat(columns, dim=1)
    return states


def read_extra_tensor(owner: str, value: Tensor, gemms: int) -> dict[str, Tensor]:
    """Return the scales and histories of the module `owner`, of so many GEMMs, by their names in fp8.scaling_state."""
    widths = [WIDTHS[way] * gemms for way in DIRECTIONS]
    if value.dim() != 2 or len(value) < 2 or value.shape[1] not in (widths[0], sum(widths)):
        raise CheckpointError(
            f"the {EXTRA} of {owner} holds no scales with their histories ({list(value.shape)})"
        )
    # An FP8 state has columns for backward once a backward has run.
    parts = value.split(widths if value.shape[1] == sum(widths) else widths[:1], dim=1)
    tensors = {}
    for way, part in zip(DIRECTIONS, parts, strict=False):
        # strict=False above: a model saved before its first backward has the forward columns only.
        tensors |= {f"{owner}.{way}.scale": part[0], f"{owner}.{way}.amax_history": part[1:]}
    return tensors
