"""A te.Linear whose weight stays as a release stores it, on any engine: its values exist while a product reads them.

Autograd would keep the values from forward to backward, of all linears together. Here it keeps the stored form, and
the values are made again when backward asks for them. The module is marked as one that FSDP2 shards,
which makes it save the weight rather than FP8 copies of it, and quantize it again in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from te_models.numerics.stored import StoredWeight


def linear_with_remade_weight(
    forward: Callable[..., Any], module: nn.Module, inp: Tensor, **options: Any
) -> Any:
    """Return forward(inp, **options) of a te.Linear whose weight is a StoredWeight, which stays what autograd keeps.

    An FP8 copy of the weight is never cached, so `is_first_microbatch` changes nothing.
    """
    stored = module._parameters["weight"]
    assert isinstance(stored, StoredWeight)
    values = nn.Parameter(stored.dequantize(), requires_grad=False)
    address = values.data_ptr()

    def pack(tensor: Tensor) -> Tensor | StoredWeight:
        same = tensor.data_ptr() == address and tensor.shape == stored.shape
        return stored if same else tensor

    def unpack(saved: Tensor) -> Tensor:
        return saved.dequantize() if isinstance(saved, StoredWeight) else saved

    module._parameters["weight"] = values
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return forward(inp, **options)
    finally:
        module._parameters["weight"] = stored
