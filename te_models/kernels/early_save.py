"""What an operation needs of its input in backward, saved before the operation has run.

torch.utils.checkpoint stops a recompute at the last tensor that the first pass saved. An autograd Function saves its input
only once its forward has run, so a checkpoint that ends with SwiGLU would compute SwiGLU again for nothing. Here the input
passes through a node that does nothing but save it, and the operation reads it there; see `keep` and `kept`.

Since the node can be read by anybody, an operation's output need not be kept either where it is cheap: see `remade`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


class _Held(torch.autograd.Function):
    """The identity; saves its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """x of any shape -> x."""
        ctx.save_for_backward(x)
        ctx.read = None
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:  # type: ignore[override]
        """The gradient as it is."""
        return dx


def held(x: Tensor) -> Tensor:
    """x, saved at once; the next operation's forward calls `keep` in place of ctx.save_for_backward."""
    return _Held.apply(x)


def keep(ctx: Any, x: Tensor, again: Callable[[], Callable[[Tensor], Tensor]]) -> None:
    """In the forward of an autograd Function of x: have x there in backward.

    `again()`, called before the forward pass ends, gives what makes its output once more of x in backward.
    """
    ctx.source = x.grad_fn if type(x.grad_fn) is _Held._backward_cls else None  # type: ignore[attr-defined]
    ctx.again = again
    if ctx.source is None:
        ctx.save_for_backward(x)


def kept(ctx: Any) -> Tensor:
    """In its backward: x."""
    if ctx.source is None:
        return ctx.saved_tensors[0]
    x, ctx.source.read = ctx.source.read, None
    return ctx.source.saved_tensors[0] if x is None else x


@contextlib.contextmanager
def remade(y: Tensor) -> Iterator[None]:
    """Inside, an operation that saves y, which came of one that called `keep`, saves nothing: backward computes y again."""
    node: Any = y.grad_fn
    if getattr(node, "source", None) is None:
        yield
        return
    again, this = node.again(), _place(y)

    def pack(tensor: Tensor) -> tuple[Tensor, int] | None:
        return None if _place(tensor) == this else (tensor, tensor._version)

    def unpack(saved: tuple[Tensor, int] | None) -> Tensor:
        if saved is not None:
            return _unchanged(*saved)
        if node.source.read is None:  # a checkpoint gives what it made again to one reader, and SwiGLU is the next
            node.source.read = node.source.saved_tensors[0]
        with torch.no_grad():
            return again(node.source.read)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """What tells whether two tensors are one; a quantized tensor's memory is that of several others."""
    place = id(tensor) if hasattr(tensor, "quantize_") else tensor.data_ptr()
    return place, tensor.dtype, tensor.shape


def _unchanged(tensor: Tensor, version: int) -> Tensor:
    """The tensor; autograd's own check for changes is off where there are hooks."""
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a "
            f"{tensor.dtype} tensor {list(tensor.shape)}"
        )
    return tensor
