"""Transformer Engine's te.Linear for PyTorch's interface, and with weights as a release stores them.

A part of te_models.engine.native.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformer_engine.pytorch import Linear
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from te_models.engine.remade_weight import linear_with_remade_weight
from te_models.engine.torch_linear import TorchLinear, padded_product
from te_models.numerics.stored import StoredWeight


class LinearOfTorch(Linear, TorchLinear):
    """A te.Linear that is a torch.nn.Linear too, and takes sequences [B, S, in] under FP8."""

    def forward(self, inp: Tensor, *args: Any, **options: Any) -> Tensor:
        """Return the output [..., out] for inp [..., in]; options as in te.Linear."""
        enabled = FP8GlobalStateManager.is_fp8_enabled()
        return padded_product(super().forward, inp, enabled, *args, **options)


class StoredLinear(Linear):
    """A te.Linear whose weight stays as a release stores it (te_models.engine.remade_weight)."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._is_fsdp2 = True

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None, **options: Any) -> Any:
        """Return the output [..., out] for inp [..., in]; options as te.Linear has them."""
        if not isinstance(self._parameters["weight"], StoredWeight):  # merged
            return super().forward(inp, is_first_microbatch=is_first_microbatch, **options)
        return linear_with_remade_weight(super().forward, self, inp, **options)
