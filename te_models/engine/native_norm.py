"""te.LayerNorm without a bias, by Transformer Engine's kernels; a part of te_models.engine.native."""

from __future__ import annotations

from typing import Any

import torch
import transformer_engine.pytorch  # noqa: F401  makes transformer_engine_torch known
import transformer_engine_torch as tex
from torch import Tensor
from transformer_engine.pytorch import LayerNorm
from transformer_engine.pytorch.constants import TE_DType

from te_models.device.autograd import Context


class _LayerNorm(torch.autograd.Function):
    """te.LayerNorm's kernels with a bias of zeros, which is no parameter."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
        """Return the norm of x [T, H] with a weight [H] of the same dtype."""
        y, mean, inverse = _layernorm(x, weight, eps, zero_centered)
        ctx.zero_centered = zero_centered
        ctx.save_for_backward(x, weight, mean, inverse)
        return y

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and of the weight."""
        (dy,) = grads
        x, weight, mean, inverse = ctx.saved_tensors
        # Positional, as Transformer Engine itself calls it: the last two are multiprocessors to leave free, and whether
        # the weight is zero-centred.
        dx, dweight, _ = tex.layernorm_bwd(
            dy.contiguous(), x, mean, inverse, weight, 0, ctx.zero_centered
        )
        return dx, dweight, None, None


def _layernorm(
    x: Tensor, weight: Tensor, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return te.LayerNorm of x [T, H] without a bias, and mean and 1 / standard deviation, FP32 [T]."""
    zeros = torch.zeros_like(weight)  # the kernels need a bias
    # Positional, as Transformer Engine itself calls it: out (None: a new tensor), quantizer, dtype of the output,
    # multiprocessors to leave free, zero-centred weight.
    y, mean, inverse = tex.layernorm_fwd(
        x, weight, zeros, eps, None, None, TE_DType[x.dtype], 0, zero_centered
    )
    return y, mean, inverse


class LayerNormWithoutBias(LayerNorm):
    """te.LayerNorm whose only parameter is its weight."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_parameter("bias", None)

    def reset_parameters(self, defer_init: bool | None = None) -> None:
        """Set gamma to 1, in a new parameter, on the default CUDA device if it was on meta."""
        if self._parameters.get("bias") is not None:  # in the constructor, which makes both
            super().reset_parameters()
            return
        old = self.weight
        device = torch.device("cuda") if old.is_meta else old.device
        fill = torch.zeros_like if self.zero_centered_gamma else torch.ones_like
        self.weight = torch.nn.Parameter(fill(old, device=device))

    def forward(self, input_: Tensor) -> Tensor:
        """Normalize a tensor [..., H], in the weight's dtype or torch.autocast's."""
        dtype = self.weight.dtype
        if torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
        weight = self.weight.to(dtype)
        x = input_.to(dtype).contiguous().view(-1, weight.numel())
        if torch.is_grad_enabled():
            y = _LayerNorm.apply(x, weight, self.eps, self.zero_centered_gamma)
        else:
            y, _, _ = _layernorm(x, weight, self.eps, self.zero_centered_gamma)
        return y.view(input_.shape)
