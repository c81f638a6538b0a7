"""Room for the gradient of a projection whose output several operations read, each some of its columns.

Autograd would write the gradient of each part into a tensor of its own and copy them together. Operations that are
given a `Slot` write their columns where they belong, and the gradient of `split` is the whole, without their copy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_models.device.autograd import Context


class GradientRoom:
    """The gradient of one tensor [N, W] in parts of `sizes` columns, made when the first part is asked for."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self.whole: Tensor | None = None
        self.handed_out: set[int] = set()

    def part(self, number: int, like: Tensor) -> Tensor:
        """Return part `number` without values, in the shape [..., columns], dtype and device of `like`.

        A tensor of another width is no part of the whole: it gets memory of its own.
        """
        rows = like.shape[:-1]
        if like.shape[-1] != self.sizes[number]:
            return torch.empty(like.shape, dtype=like.dtype, device=like.device)
        shape = (rows.numel(), sum(self.sizes))
        # An operation whose backward runs again must not write over a gradient that somebody may still hold.
        if self.whole is None or number in self.handed_out or self.whole.shape != shape:
            self.whole = torch.empty(shape, dtype=like.dtype, device=like.device)
            self.handed_out = set()
        self.handed_out.add(number)
        return self.whole.view(*rows, -1).split(self.sizes, dim=-1)[number]

    def take(self, parts: Sequence[Tensor]) -> Tensor | None:
        """Return the whole [N, W] with these gradients as its parts, and forget it; None if none is in its place.

        Parts that operations without a slot have made are copied into it.
        """
        whole = self.whole
        self.whole = None
        self.handed_out = set()
        if whole is None:
            return None
        places = whole.split(self.sizes, dim=-1)
        there = [_is_same(part, place) for part, place in zip(parts, places, strict=True)]
        alike = all(part.shape == place.shape for part, place in zip(parts, places, strict=True))
        if not any(there) or not alike:
            return None
        for part, place, is_there in zip(parts, places, there, strict=True):
            if not is_there:
                place.copy_(part)
        return whole


def _is_same(one: Tensor, two: Tensor) -> bool:
    """Return whether two tensors are the same numbers in memory; of tensors without data, whether they may be."""
    if one.shape != two.shape or one.stride() != two.stride() or one.dtype != two.dtype:
        return False
    if one.is_meta:
        return one._base is two._base and one.storage_offset() == two.storage_offset()
    return one.data_ptr() == two.data_ptr()


class Slot(NamedTuple):
    """The place of one part in a room."""

    room: GradientRoom
    number: int


def empty(slot: Slot | None, like: Tensor) -> Tensor:
    """Return room for a gradient of the shape, dtype and device of `like`, whose last dimension is contiguous."""
    if slot is None:
        return torch.empty(like.shape, dtype=like.dtype, device=like.device)
    return slot.room.part(slot.number, like)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, room: GradientRoom) -> tuple[Tensor, ...]:
        ctx.room = room
        return x.split(room.sizes, dim=-1)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        whole = ctx.room.take(grads)
        return torch.cat(grads, dim=-1) if whole is None else whole, None


def split(x: Tensor, room: GradientRoom) -> tuple[Tensor, ...]:
    """Return the parts of x [N, W]; their gradients may have been written into `room`."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return x.split(room.sizes, dim=-1)
    return _Split.apply(x, room)


def without_slot(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function for callers that give a slot, of which it makes no use."""
    # A partial, so that a model with these kernels can be pickled.
    return functools.partial(_dropping_slot, function)


def _dropping_slot(
    function: Callable[..., Any], *args: Any, slot: Slot | None = None, **options: Any
) -> Any:
    return function(*args, **options)
