"""Tables on a GPU by which one kernel works on many tensors, each program on a block of one of them."""

from collections.abc import Sequence

import torch
from torch import Tensor

# Bytes that a thread loads at a time, where all tensors of a launch are aligned to them.
VECTOR = 16


class TensorBlocks:
    """Blocks of several tensors, numbered over all of them, and where the tensors lie.

    Args:
        sizes: the number of elements of each tensor.
        block: elements of a block; the last block of a tensor may have fewer.
        device: where the tables are.

    Attributes:
        programs: the number of blocks.
        counts: the sizes, int64 [tensors].
        begins: the first block of each tensor, int64 [tensors].
        owners: the tensor that each block belongs to, int32 [blocks].
    """

    def __init__(self, sizes: Sequence[int], block: int, device: torch.device) -> None:
        counts = torch.tensor(sizes, dtype=torch.int64)
        blocks = -(-counts // block)
        self.programs = int(blocks.sum())
        self.counts = _copy(counts, device)
        self.begins = _copy(blocks.cumsum(0) - blocks, device)
        self.owners = _copy(torch.arange(len(counts)).int().repeat_interleave(blocks), device)
        self._device = device
        self._addresses: list[list[int]] = []
        self._places = torch.empty(0)

    def places(self, rows: Sequence[Sequence[Tensor | None]]) -> Tensor:
        """Return where tensors begin, int64 [rows, columns]: in elements, from the tensor of the first row.

        A kernel takes a fixed number of pointers, so it gets the first row's.

        Args:
            rows: for each size the tensors that have it; a column has tensors of one dtype, or None throughout.
        """
        addresses = []
        for row in rows:
            addresses.append([0 if tensor is None else tensor.data_ptr() for tensor in row])
        # Tensors are mostly where they were in the step before, and always in a replayed step.
        if addresses != self._addresses:
            self._addresses = addresses
            item_sizes = []
            for tensor in rows[0]:
                item_sizes.append(1 if tensor is None else tensor.element_size())
            distances = torch.tensor(addresses) - torch.tensor(addresses[0])
            places = distances.div(torch.tensor(item_sizes), rounding_mode="trunc")
            self._places = _copy(places, self._device)
        return self._places


def aligned(tensors: Sequence[Tensor | None]) -> bool:
    """Return whether tensors of one size begin at multiples of VECTOR bytes, and have a multiple of VECTOR elements."""
    for tensor in tensors:
        if tensor is not None and (tensor.numel() % VECTOR or tensor.data_ptr() % VECTOR):
            return False
    return True


def _copy(table: Tensor, device: torch.device) -> Tensor:
    """Copy a table to the device without waiting for it."""
    if device.type == "cuda":
        table = table.pin_memory()
    return table.to(device, non_blocking=True)
