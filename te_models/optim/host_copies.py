"""Copies between a GPU's gradients and weights and masters in CPU memory.

They pass through pinned memory, which PyTorch keeps for the next step: memory that is mapped anew in every step takes
longer to map than the update takes. Half as many bytes travel where gradients and weights are in BF16, since dtypes
are converted on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def to_host(tensors: Iterable[Tensor], dtypes: Sequence[torch.dtype] | None = None) -> list[Tensor]:
    """Return copies of a GPU's tensors in CPU memory, each in its dtype of `dtypes` (None: its own); waits for them."""
    copies = []
    for tensor in tensors:
        copies.append(_pinned(tensor, tensor.dtype))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    if dtypes is None:
        return copies
    converted = []
    for copy, dtype in zip(copies, dtypes, strict=True):
        converted.append(copy if copy.dtype == dtype else _pinned(copy, dtype))
    return converted


def to_device(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy values in CPU memory into tensors of a GPU, rounded to their dtype, without waiting."""
    for tensor, value in zip(tensors, values, strict=True):
        # Rounded on the CPU. The pinned memory is not used again before the copy has ended.
        tensor.copy_(_pinned(value, tensor.dtype), non_blocking=True)


def pinned_room(tensor: Tensor) -> Tensor:
    """Return pinned memory for a tensor of this shape and dtype, with any values."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=torch.cuda.is_available())


def _pinned(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy in pinned memory, which is complete once a GPU that has the tensor has caught up."""
    room = torch.empty(tensor.shape, dtype=dtype, pin_memory=torch.cuda.is_available())
    return room.copy_(tensor, non_blocking=True)
