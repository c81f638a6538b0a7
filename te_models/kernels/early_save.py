"""Save the input of an operation for its backward before the operation has run.

torch.utils.checkpoint stops a recompute at the last tensor that the first pass saved, and an autograd Function saves
its input only once its forward has run: a recompute that ends with SwiGLU would compute SwiGLU for nothing. Here the
input first passes through a node that only saves it (`save_early`), from which the operation reads it in backward
(`save_input`, `saved_input`). Since other operations can read that node too, a cheap output need not be saved at all
(`discarding`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from te_models.device.autograd import Context


class _EarlySave(torch.autograd.Function):
    """The identity, which saves its input."""

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        # Set once the saved tensor has been unpacked: torch.utils.checkpoint hands a recomputed tensor out only once.
        ctx.read = None
        # A view: an autograd Function that returned its input itself would mark it as changed.
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> Tensor:
        (dx,) = grads
        return dx


def save_early(x: Tensor) -> Tensor:
    """Save x now and return it; the forward of the next operation calls `save_input` for ctx.save_for_backward."""
    return _EarlySave.apply(x)


def save_input(
    ctx: Context, x: Tensor, recompute: Callable[[], Callable[[Tensor], Tensor]]
) -> None:
    """Call in the forward of an autograd Function of x to make x available in its backward.

    `recompute()`, called before the forward pass ends, returns the function that computes the output from x in
    backward.
    """
    ctx.source = x.grad_fn if type(x.grad_fn) is _EarlySave._backward_cls else None
    ctx.recompute = recompute
    if ctx.source is None:
        ctx.save_for_backward(x)


def saved_input(ctx: Context) -> Tensor:
    """Return x in the backward of that Function."""
    if ctx.source is None:
        return ctx.saved_tensors[0]
    x = ctx.source.read
    ctx.source.read = None
    return ctx.source.saved_tensors[0] if x is None else x


@contextlib.contextmanager
def discarding(y: Tensor) -> Iterator[None]:
    """Inside, operations do not save y, the output of one that called `save_input`: backward recomputes it."""
    node: Any = y.grad_fn
    # y was not computed from an input that was saved early.
    if getattr(node, "source", None) is None:
        yield
        return
    compute = node.recompute()
    this = _identity(y)

    def pack(tensor: Tensor) -> tuple[Tensor, int] | None:
        # None stands for y itself, which unpack computes again.
        return None if _identity(tensor) == this else (tensor, tensor._version)

    def unpack(saved: tuple[Tensor, int] | None) -> Tensor:
        if saved is not None:
            return unchanged(*saved)
        # Torch's checkpoint gives a recomputed tensor to one reader; SwiGLU is the next.
        if node.source.read is None:
            node.source.read = node.source.saved_tensors[0]
        # Inside backward: the recomputed value is only read.
        with torch.no_grad():
            return compute(node.source.read)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _identity(tensor: Tensor) -> tuple[int, torch.dtype, torch.Size]:
    """Return a key that identifies a tensor; a quantized tensor has no address of its own."""
    place = id(tensor) if hasattr(tensor, "quantize_") else tensor.data_ptr()
    return place, tensor.dtype, tensor.shape


def unchanged(tensor: Tensor, version: int) -> Tensor:
    """Return a saved tensor that still has this version; autograd does not check it where there are hooks."""
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a "
            f"{tensor.dtype} tensor {list(tensor.shape)} that was saved for backward"
        )
    return tensor
