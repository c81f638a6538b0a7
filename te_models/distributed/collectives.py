"""Collectives along one dimension of a tensor, under names that every supported version of torch has."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from te_models.distributed.planned_ranks import PlannedRanks, world_size
from te_models.errors import UsageError

# torch 2.13 renamed both functions and warns about the old names; older versions have only those.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(x: Tensor, group: dist.ProcessGroup | None, dim: int = 0) -> Tensor:
    """Return the tensors of all ranks, which have one shape, concatenated along `dim`."""
    # The collective concatenates along the first dimension of contiguous memory.
    x = x.movedim(dim, 0).contiguous()
    out = x.new_empty(world_size(group) * x.shape[0], *x.shape[1:])
    if not isinstance(group, PlannedRanks):
        _ALL_GATHER(out, x, group=group)
    return out.movedim(0, dim)


def all_reduce(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the sum of the tensors of all ranks; `x` may be overwritten."""
    x = x.contiguous()
    if not isinstance(group, PlannedRanks):
        dist.all_reduce(x, group=group)
    return x


def all_reduce_max(x: Tensor, group: dist.ProcessGroup | None) -> None:
    """Write the largest of the ranks' values of `x` into it."""
    if not isinstance(group, PlannedRanks):
        dist.all_reduce(x, dist.ReduceOp.MAX, group=group)


def largest(values: Sequence[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    """Return the largest of all ranks' values, of tensors of one dimension, in one collective."""
    # One message for all tensors, whose latency counts more than their few bytes.
    largest_values = torch.cat(list(values))
    if dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.all_reduce(largest_values, dist.ReduceOp.MAX, group=group)
    return list(largest_values.split([len(one) for one in values]))


def all_to_all(
    x: Tensor,
    group: dist.ProcessGroup | None,
    sent: list[int] | None = None,
    received: list[int] | None = None,
) -> Tensor:
    """Return the rows that the ranks send to this one, in the order of ranks.

    The rows of `x` go to the ranks in their order: `sent` of them to each, and `received` come from each; None: equally
    many to and from all.
    """
    out = x.new_empty(x.shape[0] if received is None else sum(received), *x.shape[1:])
    x = x.contiguous()
    if not isinstance(group, PlannedRanks):
        dist.all_to_all_single(out, x, received, sent, group=group)
    return out


def reduce_scatter(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return this rank's share of the rows of the sum of the tensors of all ranks."""
    size = world_size(group)
    if x.shape[0] % size:
        raise UsageError(
            f"sequence parallelism divides {x.shape[0]} rows between {size} ranks: pad the rows"
        )
    out = x.new_empty(x.shape[0] // size, *x.shape[1:])
    x = x.contiguous()
    if not isinstance(group, PlannedRanks):
        _REDUCE_SCATTER(out, x, group=group)
    return out
