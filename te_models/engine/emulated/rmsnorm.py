"""te.RMSNorm: statistics, weight and product in FP32, one rounding at the end."""

import torch
from torch import Tensor

from te_models.device.autograd import Context
from te_models.engine.emulated.autocast import FP8GlobalStateManager
from te_models.engine.emulated.delayed_scaling import ScaleRegistry
from te_models.engine.emulated.norm import NormModule
from te_models.engine.emulated.rmsnorm_kernels import (
    input_gradient,
    reciprocal_rms,
    row_multiple,
    weight_gradient,
)


class _RMSNorm(torch.autograd.Function):
    """`y = gamma * (r * x)` with `r = rsqrt(mean(x^2) + eps)` [T, 1]; saves x [T, H] and r."""

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        weight: Tensor,
        eps: float,
        zero_centered: bool,
        updates: ScaleRegistry | None,
    ) -> Tensor:
        """Return `gamma * r * x` of x `[T, H]` and weight `[H]`, of one dtype."""
        y, r = _normalized(x, weight, eps, zero_centered)
        ctx.save_for_backward(x, r, weight)
        ctx.zero_centered = zero_centered
        ctx.updates = updates
        return y

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return `dx = r * (g dy - y_hat * mean(g dy y_hat))` and `dgamma = sum(dy * y_hat)`."""
        (grad,) = grads
        x, r, weight = ctx.saved_tensors
        gamma = weight.float() + 1 if ctx.zero_centered else weight.float()
        dy = grad.float()
        y_hat = x.to(torch.float32, copy=True).mul_(r)
        dx = dw = None
        if ctx.needs_input_grad[1]:
            dw = weight_gradient(dy, x, y_hat).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            dx = input_gradient(dy, gamma, x, y_hat, r).to(x.dtype)
        if ctx.updates is not None:
            FP8GlobalStateManager.update_backward(ctx.updates)
        return dx, dw, None, None, None


def _normalized(
    x: Tensor, weight: Tensor, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """Return `gamma * r * x` of x `[T, H]` and weight `[H]`, of one dtype, and r FP32 `[T, 1]`."""
    # Contiguous, since a traced graph can view only that.
    wide = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    r = reciprocal_rms(x, wide, eps)
    gamma = weight.float() + 1 if zero_centered else weight.float()
    return wide.mul_(r).mul_(gamma).to(x.dtype), r


class RMSNorm(NormModule):
    """Root mean square normalization over the trailing dimensions."""

    @property
    def row_multiple(self) -> int:
        """The number of rows whose multiples all have one kernel."""
        return row_multiple(self.weight.numel())

    def normalized(self, x: Tensor, gamma: Tensor) -> Tensor:
        """Return `gamma * r * x` of x [T, H]."""
        y, _ = _normalized(x, gamma, self.eps, self.zero_centered_gamma)
        return y

    def tracked(self, x: Tensor, gamma: Tensor, requires_grad: bool) -> Tensor:
        """Return `normalized` with a backward pass."""
        # Without FP8 of its own, the module still takes the "first module" flag and with it the backward update.
        first = requires_grad and FP8GlobalStateManager.is_first_fp8_module()
        updates = FP8GlobalStateManager.quantization_state.scales if first else None
        return _RMSNorm.apply(x, gamma, self.eps, self.zero_centered_gamma, updates)
