"""FSDP2's gathers straight into the weights, and its sums straight from the gradients, without a buffer in between.

FSDP2 copies a unit's shards into one buffer, gathers it, and copies the weights out of it; gradients are copied into
another buffer before they are summed. With 1,024 weights of experts these copies move several times the bytes that the
links carry. Shards are rows, which lie in a weight one after the other, so a group of collectives, which NCCL launches
together, can read and write the tensors themselves. The numbers are the same: nothing is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group

from te_models.distributed.collectives import gather_into, gather_many, sum_many


class DirectGather:
    """Marks a unit of FSDP2 whose weights are gathered directly: for `FSDPModule.set_custom_all_gather`.

    A unit whose weights cannot be gathered so (`_are_plain`) is gathered through a buffer as ever, by the methods.
    """

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return memory for gathered weights."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather a buffer."""
        return gather_into(output_tensor, input_tensor, group, async_op)


class DirectSum:
    """Sums the gradients of a unit of FSDP2 where they lie: for `FSDPModule.set_custom_reduce_scatter`.

    FSDP2 asks for a buffer and copies gradients into it. It gets a tensor without memory of its own, which keeps the
    gradients (`_keep_gradients`) until FSDP2 lets go of it, after their sum.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._pending = 0  # elements of the gradients for whose sums the next tensor is

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return what stands for a buffer of gradients, and in the next call memory for their sums."""
        (count,) = size
        if count * self._ranks == self._pending:
            self._pending = 0
            return torch.empty(*size, dtype=dtype, device=device)
        self._pending = int(count)
        return torch.empty(1, dtype=dtype, device=device).expand(*size)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Write this process's shares of the gradients' sums or means to `output_tensor`, one after the other."""
        assert not async_op
        gradients: list[Tensor] = vars(input_tensor)["gradients"]
        ranks = group.size()
        shares = output_tensor.split([gradient.numel() // ranks for gradient in gradients])
        sum_many(list(shares), gradients, group, op)


def _are_plain(weights: Iterable[Any]) -> bool:
    """Return whether FSDP2 would gather these weights as they are: rows of one dtype, without extensions."""
    dtypes = set()
    for weight in weights:
        dtypes.add(weight._sharded_local_tensor.dtype)
        shard = weight._sharded_local_tensor
        if hasattr(shard, "fsdp_pre_all_gather") or weight.offload_to_cpu:
            return False
        if weight.param_dtype not in (None, shard.dtype) or weight.fsdp_placement.dim != 0:
            return False
        if weight.sharded_state != _fsdp_collectives.ShardedState.SHARDED:
            return False
    return len(dtypes) == 1


# FSDP2's own functions.
_gather = _fsdp_param_group.foreach_all_gather
_copy_out = _fsdp_param_group.foreach_all_gather_copy_out
_copy_in = _fsdp_collectives.foreach_reduce_scatter_copy_in


@torch.no_grad()
def _gather_directly(
    weights: list[Any],
    group: dist.ProcessGroup,
    async_op: bool,
    copy_in_stream: Any,
    gather_stream: Any,
    device: torch.device,
    communication: Any,
) -> Any:
    """Begin to gather weights, as FSDP2's foreach_all_gather does."""
    if not isinstance(communication, DirectGather) or async_op or not _are_plain(weights):
        return _gather(
            weights, group, async_op, copy_in_stream, gather_stream, device, communication
        )
    ranks = group.size()
    shards = []
    wholes = []
    for weight in weights:
        shard = weight._sharded_param_data
        weight.init_all_gather_outputs([shard.numel()], [shard.dtype], ranks, device)
        # Memory of the current stream, which uses and frees the weights.
        weight.alloc_all_gather_outputs()
        shards.append(shard)
        wholes.append(weight.all_gather_outputs[0])
    streams: Any = torch.get_device_module(device)
    # Until then the current stream may still use what had this memory before.
    gather_stream.wait_stream(streams.current_stream())
    # The same tensors had these values when autograd saved them.
    counted = tuple(whole for whole in wholes if not whole.is_inference())
    with (
        streams.stream(gather_stream),
        torch.autograd._unsafe_preserve_version_counter(counted),
    ):
        gather_many(wholes, shards, group)
        event = gather_stream.record_event()
    # Without sizes: nothing is to be copied out.
    return _fsdp_collectives.AllGatherResult(wholes[0], event, None, [], [], [])


@torch.no_grad()
def _wait_or_copy_out(gathered: Any, weights: list[Any], group: dist.ProcessGroup) -> None:
    """End a gather, as FSDP2's foreach_all_gather_copy_out does."""
    if gathered.all_gather_input_split_sizes:
        _copy_out(gathered, weights, group)
        return
    if gathered.all_gather_event is not None:
        streams: Any = torch.get_device_module(gathered.all_gather_output.device)
        streams.current_stream().wait_event(gathered.all_gather_event)


def _keep_gradients(gradients: list[Tensor], buffer: Tensor, ranks: int) -> None:
    """Copy gradients into a buffer, as FSDP2's foreach_reduce_scatter_copy_in does; DirectSum's only notes them."""
    if buffer.stride() != (0,):
        _copy_in(gradients, buffer, ranks)
        return
    kept = []
    for gradient in gradients:
        missing = -len(gradient) % ranks
        if missing:
            rows = gradient.new_zeros(missing, *gradient.shape[1:])
            gradient = torch.cat([gradient, rows])
        kept.append(gradient.to(buffer.dtype).contiguous().flatten())
    vars(buffer)["gradients"] = kept


def install() -> None:
    """Let FSDP2 find the functions of this module; they call its own for all units without the classes above."""
    functions: Any = _fsdp_param_group
    collectives: Any = _fsdp_collectives
    functions.foreach_all_gather = _gather_directly
    functions.foreach_all_gather_copy_out = _wait_or_copy_out
    collectives.foreach_reduce_scatter_copy_in = _keep_gradients
