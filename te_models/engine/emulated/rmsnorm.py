"""te.RMSNorm: statistics, weight and product in FP32, one rounding at the end."""

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from te_models.device.autograd import Context
from te_models.device.host import device_type
from te_models.engine.emulated.autocast import FP8GlobalStateManager
from te_models.engine.emulated.delayed_scaling import ScaleRegistry
from te_models.engine.emulated.module import EmptyExtraState
from te_models.engine.emulated.rmsnorm_kernels import (
    input_gradient,
    reciprocal_rms,
    row_multiple,
    weight_gradient,
)


class _RMSNorm(torch.autograd.Function):
    """`y = gamma * (r * x)` with `r = rsqrt(mean(x^2) + eps)`; saves x and r."""

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


class RMSNorm(EmptyExtraState):
    """Root mean square normalization over the trailing dimensions; the output has the weight's dtype.

    Under torch.autocast the computation and the output have autocast's dtype.
    """

    def __init__(
        self,
        normalized_shape: Iterable[int] | int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        sm_margin: int = 0,
    ) -> None:
        """Make a norm; `zero_centered_gamma` stores gamma - 1, and `params_dtype` and `hidden_size` are deprecated
        names."""
        super().__init__()
        if hidden_size is not None:
            warnings.warn(
                "hidden_size is deprecated: use normalized_shape", DeprecationWarning, stacklevel=2
            )
            if normalized_shape is None:
                normalized_shape = hidden_size
        if params_dtype is not None:
            warnings.warn("params_dtype is deprecated: use dtype", DeprecationWarning, stacklevel=2)
            if dtype is None:
                dtype = params_dtype
        if normalized_shape is None:
            raise ValueError(
                "normalized_shape is missing: give the size of the dimension to normalize over"
            )
        shape = (
            (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        )
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.sequence_parallel = sequence_parallel
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        if self.weight.device.type != "meta":
            self.reset_parameters()

    @property
    def row_multiple(self) -> int:
        """The number of rows whose multiples all have one kernel."""
        return row_multiple(self.weight.numel())

    def reset_parameters(self) -> None:
        """Set gamma to 1, in a new parameter, on the default device if it was on meta."""
        old = self.weight
        device = torch.get_default_device() if old.device.type == "meta" else old.device
        fill = torch.zeros_like if self.zero_centered_gamma else torch.ones_like
        self.weight = nn.Parameter(fill(old, device=device))

    def forward(self, input_: Tensor) -> Tensor:
        """Normalize a tensor whose trailing dimensions are the weight's."""
        weight = self.weight
        shape = input_.shape
        if shape[len(shape) - weight.ndim :] != weight.shape:
            raise ValueError(
                f"Input tensor (shape={tuple(shape)}) and weight tensor (shape={tuple(weight.shape)}) "
                "are not compatible"
            )
        device = device_type(input_)
        dtype = (
            torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        )
        x = input_.to(dtype)
        gamma = weight.to(dtype)
        # The kernels know matrices [rows, columns]; leading dimensions are rows, trailing ones of the weight columns.
        if (x.ndim, gamma.ndim) != (2, 1):
            x = x.reshape(-1, gamma.numel())
            gamma = gamma.reshape(-1)
        if not torch.is_grad_enabled():
            y, _ = _normalized(x, gamma, self.eps, self.zero_centered_gamma)
            return y if y.ndim == len(shape) else y.view(shape)
        # Without FP8 of its own, the module still takes the "first module" flag and with it the backward update.
        tracked = input_.requires_grad or weight.requires_grad
        first = tracked and FP8GlobalStateManager.is_first_fp8_module()
        updates = FP8GlobalStateManager.quantization_state.scales if first else None
        y = _RMSNorm.apply(x, gamma, self.eps, self.zero_centered_gamma, updates)
        return y.view(shape)

    def extra_repr(self) -> str:
        """Return the shape and the options."""
        centered = ", zero_centered_gamma=True" if self.zero_centered_gamma else ""
        return f"{tuple(self.weight.shape)}, eps={self.eps}{centered}"
