"""FSDP2's sum of gradients over the processes with FP8 on the wire: a quarter of FP32's bytes, half of BF16's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from te_models.distributed.collectives import all_to_all
from te_models.numerics.sent_blocks import pack, sum_into


class FP8ReduceScatter:
    """A reduce-scatter for `FSDPModule.set_custom_reduce_scatter`, which sends E4M3 with a scale for each 128 elements.

    Every process sends each other one the gradients of what that one owns, once. The owner adds them in FP32, its own
    after the same rounding, so that a sum does not depend on who owns it. A ring would round partial sums again at each
    process.
    """

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return memory for gradients or their sums."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        """Write this process's share of the sum, or mean, of `input_tensor` [ranks * n] to `output_tensor` [n]."""
        mean = op == dist.ReduceOp.AVG  # of a model that no Trainer has prepared
        assert mean or op == dist.ReduceOp.SUM, op
        assert not async_op
        # [ranks, n]: row r goes to rank r, which owns its sum.
        rows = input_tensor.view(group.size(), -1)
        sum_into(output_tensor, all_to_all(pack(rows), group))
        if mean:
            output_tensor.div_(group.size())
