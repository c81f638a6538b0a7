"""Collectives along one dimension of a tensor, under names that every supported version of torch has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# torch 2.13 renamed both.
_ALL_GATHER = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor
_REDUCE_SCATTER = getattr(torch.distributed, "reduce_scatter_single", None) or torch.distributed.reduce_scatter_tensor


def all_gather(x: Tensor, group: Any, dim: int = 0) -> Tensor:
    """The tensors of all ranks, of one shape, one after the other along `dim`."""
    x = x.movedim(dim, 0).contiguous()
    out = x.new_empty(torch.distributed.get_world_size(group) * x.shape[0], *x.shape[1:])
    _ALL_GATHER(out, x, group=group)
    return out.movedim(0, dim)


def all_reduce(x: Tensor, group: Any) -> Tensor:
    """The sum of all ranks' tensors; x may be overwritten."""
    x = x.contiguous()
    torch.distributed.all_reduce(x, group=group)
    return x


def reduce_scatter(x: Tensor, group: Any) -> Tensor:
    """This rank's share of the rows of the sum of all ranks' tensors."""
    size = torch.distributed.get_world_size(group)
    if x.shape[0] % size:
        raise ValueError(f"sequence parallelism divides {x.shape[0]} rows between {size} ranks: pad the rows")
    out = x.new_empty(x.shape[0] // size, *x.shape[1:])
    _REDUCE_SCATTER(out, x.contiguous(), group=group)
    return out
