"""AdamW on tensors in CPU memory, block by block, so that values pass through the cores' caches once.

Bytes that an update moves between memory and cores, per parameter in BF16:

    tensor       one pass            a pass for each operation
    gradient      2 read              2 read, 4 written in FP32; 4 read, 4 written clipped; 4 read by the update
    master        4 read, 4 written   4 read, 4 written by the update; 4 read to be rounded
    moments       8 read, 8 written   8 read, 8 written
    parameter     2 written           2 written
    sum          28                  48

A core may also read what it is about to overwrite: 2 bytes more in one pass (the parameter), and 6 otherwise (the FP32
gradient, too).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from te_models.optim.state_tensors import Group

# Elements of a block: so many per thread, whose FP32 gradients take 2 MiB, but at least so many in all. On one core
# (EPYC 9005) blocks of 2**18 to 2**21 elements took the same time within 5 %, smaller ones longer. Threads wait for
# each other after each operation on a block, for milliseconds where other work has their cores: so blocks are large.
THREAD_BLOCK = 2**19
LEAST_BLOCK = 2**21
# Tensors are divided at multiples of this. PyTorch's kernel computes the last elements of a tensor, fewer than a vector
# of 16, one by one, which may round otherwise: they must stay the last ones.
VECTOR = 16


class Tensors(NamedTuple):
    """The tensors of one parameter, or a piece of each, contiguous and of one shape.

    Attributes:
        gradient: in any floating dtype; it is not written.
        master: FP32, updated in place.
        first: the first moment, FP32, updated in place.
        second: the second moment, FP32, updated in place.
        step: FP32 scalar, the number of this step.
        parameter: gets the new master, rounded to its dtype; None where the master is all.
    """

    gradient: Tensor
    master: Tensor
    first: Tensor
    second: Tensor
    step: Tensor
    parameter: Tensor | None

    def piece(self, start: int, stop: int) -> Tensors:
        """Return views of the elements [start, stop), of one dimension."""
        parameter = self.parameter
        return Tensors(
            gradient=self.gradient.view(-1)[start:stop],
            master=self.master.view(-1)[start:stop],
            first=self.first.view(-1)[start:stop],
            second=self.second.view(-1)[start:stop],
            step=self.step,
            parameter=None if parameter is None else parameter.view(-1)[start:stop],
        )


def update_in_blocks(
    tensors: Sequence[Tensors], group: Group, factor: Tensor | None, bad: Tensor | None
) -> None:
    """Update masters, moments and parameters; every bit is as if each operation had a pass of its own.

    Args:
        tensors: the tensors of the parameters that have a gradient.
        group: their options, as torch.optim.AdamW has them.
        factor: multiplies the gradients, FP32 scalar on the CPU; None: 1.
        bad: if this FP32 scalar is 1, nothing changes; None: 0.
    """
    size = max(LEAST_BLOCK, THREAD_BLOCK * torch.get_num_threads())
    room = torch.empty(size, dtype=torch.float32)
    for block in _blocks(tensors, size):
        _update_block(block, room, group, factor, bad)


def _update_block(
    block: Sequence[Tensors], room: Tensor, group: Group, factor: Tensor | None, bad: Tensor | None
) -> None:
    """Update the pieces of a block, whose FP32 gradients are written to `room`."""
    beta1, beta2 = group["betas"]
    torch._fused_adamw_(
        [piece.master for piece in block],
        _fp32_gradients(block, room, factor),
        [piece.first for piece in block],
        [piece.second for piece in block],
        [],
        [piece.step for piece in block],
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
        found_inf=bad,
    )
    parameters = []
    masters = []
    for piece in block:
        if piece.parameter is not None:
            parameters.append(piece.parameter)
            masters.append(piece.master)
    if parameters:
        torch._foreach_copy_(parameters, masters)


def _fp32_gradients(block: Sequence[Tensors], room: Tensor, factor: Tensor | None) -> list[Tensor]:
    """Return the gradients of a block in FP32, times `factor`, in `room` where they are not what they were."""
    gradients = []
    converted = []
    in_other_dtypes = []
    end = 0
    for piece in block:
        gradient = piece.gradient
        begin = end
        end += gradient.numel()
        part = room[begin:end].view(gradient.shape)
        if gradient.dtype != torch.float32:
            converted.append(part)
            in_other_dtypes.append(gradient)
        elif factor is not None:
            torch.mul(gradient, factor, out=part)
        else:
            part = gradient
        gradients.append(part)
    if converted:
        torch._foreach_copy_(converted, in_other_dtypes)
        if factor is not None:
            # Not by the kernel's `grad_scale`: it divides, which has other bits than a product.
            torch._foreach_mul_(converted, factor)
    return gradients


def _blocks(tensors: Sequence[Tensors], most: int) -> Iterator[list[Tensors]]:
    """Yield the tensors, or pieces of large ones, in blocks of at most `most` elements, in order.

    Small tensors share a block: starting an operation takes as long as computing thousands of elements.
    """
    block: list[Tensors] = []
    room = most
    for whole in tensors:
        size = whole.master.numel()
        start = 0
        while start < size:
            stop = min(size, start + room)
            if stop < size:
                stop -= stop % VECTOR
            if stop > start:
                # A whole tensor is taken as it is: to make views of many small ones takes longer than to update them.
                block.append(whole if stop - start == size else whole.piece(start, stop))
                room -= stop - start
                start = stop
            else:  # the room is smaller than a vector
                yield block
                block = []
                room = most
    if block:
        yield block
