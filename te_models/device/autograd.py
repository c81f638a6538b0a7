"""The type of what an autograd Function keeps between its forward and its backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor


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
