"""te.LayerNorm without its bias: statistics, weight and product in FP32, one rounding at the end."""

import torch
from torch import Tensor

from te_models.device.autograd import Context
from te_models.engine.emulated.layernorm_kernels import input_gradient, row_multiple, statistics
from te_models.engine.emulated.norm import NormModule
from te_models.engine.emulated.rmsnorm_kernels import weight_gradient


class _LayerNorm(torch.autograd.Function):
    """`y = gamma * (r * (x - mean(x)))` with `r = rsqrt(var(x) + eps)`; saves x, its mean and r."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
        """Return the norm of x `[T, H]` with a weight `[H]` of the same dtype."""
        y, mean, r = _normalized(x, weight, eps, zero_centered)
        ctx.save_for_backward(x, mean, r, weight)
        ctx.zero_centered = zero_centered
        return y

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return `dx = r * (g dy - y_hat * mean(g dy y_hat) - mean(g dy))` and `dgamma = sum(dy * y_hat)`."""
        (grad,) = grads
        x, mean, r, weight = ctx.saved_tensors
        gamma = weight.float() + 1 if ctx.zero_centered else weight.float()
        dy = grad.float()
        y_hat = (x.float() - mean).mul_(r)
        dx = dw = None
        if ctx.needs_input_grad[1]:
            dw = weight_gradient(dy, x, y_hat).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            dx = input_gradient(dy, gamma, x, y_hat, r).to(x.dtype)
        return dx, dw, None, None


def _normalized(
    x: Tensor, weight: Tensor, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the norm of x `[T, H]`, and mean and r, FP32 `[T, 1]`."""
    # Contiguous, since a traced graph can view only that.
    wide = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    mean, r = statistics(x, wide, eps)
    gamma = weight.float() + 1 if zero_centered else weight.float()
    return wide.sub_(mean).mul_(r).mul_(gamma).to(x.dtype), mean, r


class LayerNormWithoutBias(NormModule):
    """Layer normalization over the trailing dimensions with a weight alone.

    It does not take Transformer Engine's "first module" flag: native.LayerNormWithoutBias calls te.LayerNorm's kernels.
    """

    @property
    def row_multiple(self) -> int:
        """The number of rows whose multiples all have one kernel."""
        return row_multiple(self.weight.numel(), self.weight.dtype)

    def normalized(self, x: Tensor, gamma: Tensor) -> Tensor:
        """Return `gamma * r * (x - mean)` of x [T, H]."""
        y, _, _ = _normalized(x, gamma, self.eps, self.zero_centered_gamma)
        return y

    def tracked(self, x: Tensor, gamma: Tensor, requires_grad: bool) -> Tensor:
        """Return the same for autograd."""
        return _LayerNorm.apply(x, gamma, self.eps, self.zero_centered_gamma)
