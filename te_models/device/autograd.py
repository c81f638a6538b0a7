"""Autograd: the type of what a Function keeps between its forward and its backward, and a switch for autocast."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from te_models.device.host import device_type


class Context:
    """PyTorch's `ctx`, for annotations, and something to put in its place. It takes any other attribute too."""

    saved_tensors: tuple[Any, ...] = ()  # a Tensor or None each
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Make `tensors` the `saved_tensors` of the backward."""
        self.saved_tensors = tensors

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: object) -> None: ...


def no_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """Disable torch.autocast for the device of `tensor`, so that it does not narrow FP32 GEMMs."""
    if not autocast_enabled(tensor):
        return nullcontext()
    return torch.autocast(device_type(tensor), enabled=False)


def autocast_enabled(tensor: Tensor) -> bool:
    """Return whether torch.autocast is enabled for the device of `tensor`; on meta it never is."""
    return not tensor.is_meta and torch.is_autocast_enabled(device_type(tensor))
