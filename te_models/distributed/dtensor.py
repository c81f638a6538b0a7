"""Tensors that lie in pieces on several ranks (DTensors of FSDP2): from the whole to this rank's piece and back.

FSDP2 cuts every parameter along its first dimension as torch.chunk does; a rank beyond the last chunk holds no rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor; the tensor itself if it is no DTensor."""
    with torch.no_grad():  # to_local() would else make a view, for a gradient that nobody takes
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def pieces(own: Tensor, like: Tensor) -> Tensor:
    """The tensor that is cut up as `like` is and of which this rank's piece is `own`."""
    if not isinstance(like, DTensor):
        return own
    place: dict[str, Any] = dict(shape=like.shape, stride=like.stride(), run_check=False)
    return DTensor.from_local(own, like.device_mesh, like.placements, **place)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank; for a DTensor that is a collective of the ranks that share it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shares(like: Tensor) -> list[int]:
    """How many rows of a DTensor each rank holds."""
    assert isinstance(like, DTensor)
    count, world = len(like), like.device_mesh.size()
    most = -(-count // world)
    return [min(most, max(0, count - rank * most)) for rank in range(world)]


def piece(full: Tensor, like: Tensor) -> Tensor:
    """This rank's rows of `full`, cut as `like` is; nothing is sent, and nothing else of `full` is read."""
    if not isinstance(like, DTensor):
        return full
    (placement,) = like.placements
    if not isinstance(placement, Shard):
        return full
    chunks = full.chunk(like.device_mesh.size(), placement.dim)
    rank = like.device_mesh.get_local_rank()
    return chunks[rank] if rank < len(chunks) else full.narrow(placement.dim, 0, 0)


def cut(full: Tensor, like: Tensor) -> Tensor:
    """`full` as a tensor of the same kind, device and cut as `like`, for the state that an optimizer keeps of it."""
    if not isinstance(like, DTensor) or full.shape != like.shape:
        return full
    return pieces(piece(full, like).to(like.to_local().device).clone(), like)


@torch.no_grad()
def put(target: Tensor, full: Tensor) -> None:
    """Copy this rank's piece of `full` into `target`, in the dtype of `target`."""
    local(target).copy_(piece(full, target))


@contextmanager
def filling(target: Tensor) -> Iterator[Tensor]:
    """Gives a tensor to write all values of `target` into: itself, or a whole one of which the piece is then kept.

    Every rank draws all random numbers, so that a model starts with the same values on any number of ranks.
    """
    if not isinstance(target, DTensor):
        yield target
        return
    full = torch.empty(target.shape, dtype=target.dtype, device=target.to_local().device)
    yield full
    put(target, full)
