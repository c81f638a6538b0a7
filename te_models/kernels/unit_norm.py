"""RMSNorm without weights: division by the root mean square, in plain PyTorch, computed in FP32."""

import torch
from torch import Tensor

from te_models.device.autograd import Context


class _UnitNorm(torch.autograd.Function):
    """See unit_norm. Saves its input and one FP32 per row, as te.RMSNorm does."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, eps: float) -> Tensor:
        """Return x / rms(x), of the dtype of x."""
        x = x.contiguous()
        inverse = (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, inverse)
        return (x.float() * inverse).to(x.dtype)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of x."""
        x, inverse = ctx.saved_tensors
        slope = grads[0].float()
        unit = x.float() * inverse
        change = slope - unit * (slope * unit).mean(-1, keepdim=True)
        return (change * inverse).to(x.dtype), None


def unit_norm(x: Tensor, eps: float) -> Tensor:
    """Return x [..., H] / sqrt(mean(x^2) + eps) over the last dimension; zeros remain zeros."""
    return _UnitNorm.apply(x, eps)
