"""Matrices as GEMMs take them: data with inverse scales, two-dimensional views of tensors, and padding of scales."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from te_models.numerics.formats import DType

if TYPE_CHECKING:
    pass


class Operand(NamedTuple):
    """A matrix as a GEMM takes it: `values * scale`, both FP32; scale is None (1) or `[1]`.

    `narrow`: every value is a BF16 number, so that a GEMM with BF16 inputs computes the same products.
    """

    values: Tensor
    scale: Tensor | None
    narrow: bool

    @property
    def t(self) -> Operand:
        """The transposed operand."""
        return Operand(self.values.t(), self.scale, self.narrow)


class FP8Matrix(NamedTuple):
    """A matrix for a tensor core: `data` FP8 [rows, K], contracted over K, and its inverse scales.

    `scale` is FP32 [1] for the whole tensor, or [rows, ceil(K/128)].
    """

    data: Tensor
    scale: Tensor

    @property
    def per_tensor(self) -> bool:
        """True if the whole tensor has one scale."""
        return self.scale.ndim == 1

    def first(self, rows: int) -> FP8Matrix:
        """Return its first rows."""
        if rows == len(self.data):
            return self
        return FP8Matrix(self.data[:rows], self.scale if self.per_tensor else self.scale[:rows])

    @property
    def floor(self) -> int:
        """The exponent of the format's smallest normal number."""
        return -6 if self.data.dtype == torch.float8_e4m3fn else -14


class BlockScaled(NamedTuple):
    """A matrix of blocks with scales.

    FP8: `data` uint8 `[M, K]` with one scale, FP32 or an E8M0 byte, per `block` of elements. FP4: two values per byte
    along the block, scales as E4M3 bytes, one row of them per row or column, and a common factor `amax` [1] / `top`.
    """

    data: Tensor
    scale: Tensor
    block: tuple[int, int]
    dtype: DType
    amax: Tensor | None = None
    top: float = 1.0


def as_matrix(tensor: Tensor) -> Tensor:
    """Return `[..., K]` as `[M, K]`, with few calls of torch: each costs the host of a GPU microseconds."""
    if tensor.ndim == 2:
        return tensor
    return tensor.reshape(tensor.shape[:-1].numel(), tensor.shape[-1] if tensor.ndim else 1)


def rows_first(tensor: Tensor) -> Tensor:
    """Return `[K, ...]` as `[M, K]`."""
    return tensor.t() if tensor.ndim == 2 else as_matrix(tensor.movedim(0, -1))


def rows_last(tensor: Tensor) -> Tensor:
    """Return `[..., K]` as `[K, ...]`."""
    return tensor.t() if tensor.ndim == 2 else tensor.movedim(-1, 0)


def like(matrix: Tensor, tensor: Tensor) -> Tensor:
    """Return `[M, K]` in the shape of `tensor`."""
    return matrix if tensor.ndim == 2 else matrix.view(tensor.shape)


def pad_to(scale: Tensor, *multiples: int) -> Tensor:
    """Return `scale` contiguous, with its dimensions zero-padded to whole multiples; one of no rows stays so."""
    # F.pad takes (before, after) of each dimension, the last dimension first.
    pad: list[int] = []
    for size, step in zip(reversed(scale.shape), reversed(multiples), strict=True):
        pad += [0, -size % max(step, 1)]
    if any(pad):
        return torch.nn.functional.pad(scale, pad)
    return scale if scale.is_contiguous() else scale.contiguous()
