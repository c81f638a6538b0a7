"""Conversion between whole tensors and the shards of DTensors (FSDP2).

FSDP2 splits every parameter along its first dimension as torch.chunk does; ranks beyond the last chunk hold no rows.
Below, `like` is a DTensor that says how to split, or an ordinary tensor, which is not split.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor; any other tensor is returned as it is."""
    if not isinstance(
        tensor, DTensor
    ):  # before any context, which the thousands of tensors of a step would notice
        return tensor
    with torch.no_grad():  # to_local() would otherwise make a view for autograd
        return tensor.to_local()


def from_shard(shard: Tensor, like: Tensor) -> Tensor:
    """Return the DTensor that is split as `like` is and whose shard on this rank is `shard`."""
    if not isinstance(like, DTensor):
        return shard
    place: dict[str, Any] = dict(shape=like.shape, stride=like.stride(), run_check=False)
    return DTensor.from_local(shard, like.device_mesh, like.placements, **place)


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor on every rank; for a DTensor this is a collective of the ranks that share it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shares(like: Tensor) -> list[int]:
    """Return the number of rows of a DTensor on each rank."""
    assert isinstance(like, DTensor)
    count = len(like)
    world = like.device_mesh.size()
    most = -(-count // world)
    return [min(most, max(0, count - rank * most)) for rank in range(world)]


def shard_of(full: Tensor, like: Tensor) -> Tensor:
    """Return this rank's rows of `full`, split as `like` is. Sends nothing and reads nothing else of `full`."""
    if not isinstance(like, DTensor):
        return full
    (placement,) = like.placements
    if not isinstance(placement, Shard):
        return full
    chunks = full.chunk(like.device_mesh.size(), placement.dim)
    rank = like.device_mesh.get_local_rank()
    return chunks[rank] if rank < len(chunks) else full.narrow(placement.dim, 0, 0)


def shard_like(full: Tensor, like: Tensor) -> Tensor:
    """Return `full` as a DTensor on the device of `like` and split as it is, for optimizer state of its shape."""
    if not isinstance(like, DTensor) or full.shape != like.shape:
        return full
    # A copy: a shard is a view, which would keep the whole tensor in memory.
    return from_shard(shard_of(full, like).to(like.to_local().device).clone(), like)


@torch.no_grad()
def write_shard(target: Tensor, full: Tensor) -> None:
    """Copy this rank's rows of `full` into `target`, in the dtype of `target`."""
    local(target).copy_(shard_of(full, target))


@contextmanager
def filling(target: Tensor) -> Iterator[Tensor]:
    """Yield a tensor for all values of `target`: itself, or a whole one of which each rank keeps its shard.

    Every rank draws all random numbers, so that a model starts with the same values on any number of ranks.
    """
    if not isinstance(target, DTensor):
        yield target
        return
    full = torch.empty(target.shape, dtype=target.dtype, device=target.to_local().device)
    yield full
    write_shard(target, full)
