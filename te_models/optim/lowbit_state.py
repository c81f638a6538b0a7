"""The state of AdamW with moments in 8 bits (te_models.optim.lowbit), told without torchao, which is slow to import."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from te_models.optim.state_tensors import State, like, scalar

BLOCK = 256  # elements with one scale
SMALLEST = 4096  # elements of a tensor whose moments are quantized


class Codes(NamedTuple):
    """The dtype of a moment's elements, and the entries of the table that they index; 0: they are numbers."""

    dtype: torch.dtype
    table: int = 0


EIGHT_BIT_CODES = Codes(torch.uint8, table=256)
FP8_CODES = Codes(torch.float8_e4m3fn)


def lowbit_state(codes: Codes, view: Tensor, block: int = BLOCK) -> State:
    """Return the state of the tensor `view` after a step, as a template for `check_values`.

    Moments of tensors that are small, or no multiple of `block`, have the dtype of `view`.
    """
    moment: Tensor | dict[str, Tensor] = like(view)
    if view.numel() >= SMALLEST and view.numel() % block == 0:
        moment = dict(
            codes=like(view, dtype=codes.dtype),
            scale=like(view, view.numel() // block, dtype=torch.float32),
        )
        if codes.table:
            moment["qmap"] = like(view, codes.table, dtype=torch.float32)
    return dict(step=scalar(), exp_avg=moment, exp_avg_sq=moment)
