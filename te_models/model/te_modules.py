"""te.Linear and te.RMSNorm with the options that every layer of a model shares."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from te_models.config.model import ModelConfig


def linear(te: ModuleType, inputs: int, outputs: int, *, bias: bool = False, split: Any = None, **factory: Any) -> Any:
    """Return a te.Linear whose weight has no values yet: Decoder.init_weights, or a loader, gives all of them.

    `split` is from TensorParallel.linear; the sizes are then those of the whole layer.
    """
    place = dict(params_dtype=factory["dtype"], device=factory["device"])
    return te.Linear(inputs, outputs, bias=bias, init_method=_leave_empty, **place, **(split or {}))


def _leave_empty(weight: Tensor) -> None:
    """Leave a new weight without values. A function of the module, so that models can be pickled."""


def norm_options(config: ModelConfig) -> dict[str, Any]:
    """Return the arguments of every te.RMSNorm of a model, besides its size, device and dtype."""
    return dict(eps=config.rms_norm_eps, zero_centered_gamma=config.zero_centered_norm)


def pad_rows(x: Tensor, rows: int) -> Tensor:
    """Return x [n, D] with rows of zeros appended up to [rows, D]; x itself if it has enough."""
    return x if x.shape[0] == rows else F.pad(x, (0, 0, 0, rows - x.shape[0]))
