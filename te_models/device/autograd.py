"""Autograd: the type of what a Function keeps between its forward and its backward, a switch for autocast, and a check
of backward passes."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from te_models.device.host import device_type
from te_models.errors import UsageError


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


def refuse_second_derivatives(outputs: Iterable[Tensor]) -> None:
    """Let a backward from `outputs` that records a graph of its own (create_graph=True) raise a UsageError.

    The backward of a te.Linear works on quantized values and in place, so its own derivative would end in an error
    about views, or be wrong.
    """
    # A traced graph takes no hooks, and compiled functions refuse a second derivative themselves.
    if torch.compiler.is_compiling():
        return
    for output in outputs:
        if output.requires_grad:
            output.register_hook(_refuse_recorded_backward)


def _refuse_recorded_backward(gradient: Tensor) -> None:
    # A backward runs with grad enabled only under create_graph=True.
    if torch.is_grad_enabled():
        raise UsageError(
            "create_graph=True asks for derivatives of the gradients, which a te-models model does not have: leave it "
            "out, or use transformers' model for second derivatives"
        )
