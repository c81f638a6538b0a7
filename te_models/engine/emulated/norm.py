"""The base of te.RMSNorm and te.LayerNorm: options, the parameter, shapes and dtypes."""

import warnings
from abc import abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from te_models.device.host import device_type
from te_models.engine.emulated.extra_state import EmptyExtraState


class NormModule(EmptyExtraState):
    """A normalization over the trailing dimensions with a weight; the output has the weight's dtype.

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
    @abstractmethod
    def row_multiple(self) -> int:
        """The number of rows whose multiples all have one kernel."""

    @abstractmethod
    def normalized(self, x: Tensor, gamma: Tensor) -> Tensor:
        """Return x [T, H] normalized, times gamma [H], of one dtype; nothing is tracked."""

    @abstractmethod
    def tracked(self, x: Tensor, gamma: Tensor, requires_grad: bool) -> Tensor:
        """Return the same for autograd; `requires_grad` says whether the input or the weight does."""

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
            y = self.normalized(x, gamma)
            return y if y.ndim == len(shape) else y.view(shape)
        return self.tracked(x, gamma, input_.requires_grad or weight.requires_grad).view(shape)

    def extra_repr(self) -> str:
        """Return the shape and the options."""
        centered = ", zero_centered_gamma=True" if self.zero_centered_gamma else ""
        return f"{tuple(self.weight.shape)}, eps={self.eps}{centered}"
