"""FP8 of many matrices below each other, each with a scale of its own, in three launches instead of three per matrix.

The matrices are rows [R, K] of experts, or their weights. A scale is that of its matrix' largest magnitude (current
scaling); the bits are those of Transformer Engine's casts, one matrix at a time. Matrix e has rows first[e] to
first[e + 1], a multiple of 4. A program finds its matrix by the number of tiles of those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_models.kernels.handover_triton import raise_amax, store_fp8

ROWS, COLUMNS = 64, 64  # of a tile


class Matrices(NamedTuple):
    """Matrices with `columns` columns: their rows, and where each begins.

    `first` and `tiles` are int64 [E + 1] and [E] on the device: the first row of each, and the tiles above each other
    of it and those before it. `places` are int64 [E], the address of each; None: they lie below each other in `data`.
    """

    data: Tensor
    first: Tensor
    tiles: Tensor
    high: int  # tiles above each other, of all
    columns: int
    places: Tensor | None

    @classmethod
    def of_rows(cls, x: Tensor, rows: list[int]) -> Matrices:
        """Return the experts' parts of contiguous x [R, K]."""
        return cls._of(x, rows, None)

    @classmethod
    def of_weights(cls, weights: Sequence[Tensor]) -> Matrices:
        """Return contiguous weights [O, K] of one dtype."""
        places = torch.tensor([weight.data_ptr() for weight in weights]).to(weights[0].device, non_blocking=True)
        return cls._of(weights[0], [len(weight) for weight in weights], places)

    @classmethod
    def _of(cls, data: Tensor, rows: list[int], places: Tensor | None) -> Matrices:
        counts = torch.tensor([0, *rows])
        both = torch.stack((counts.cumsum(0), ((counts + ROWS - 1) // ROWS).cumsum(0)))
        first, tiles = both.to(data.device, non_blocking=True)
        return cls(data, first, tiles[1:], int(both[1, -1]), data.shape[1], places)


@triton.jit
def _matrix(data, first, tiles, places, columns, count, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Return this program's matrix: its number, address, first row among all, rows, and the first group of its tile."""
    own = tl.program_id(0)
    number = tl.arange(0, EXPERTS)
    ends = tl.load(tiles + number, number < count, 2**40)
    e = tl.sum((ends <= own).to(tl.int32), 0)
    begin = tl.load(first + e)
    rows = tl.load(first + e + 1) - begin
    before = tl.where(e > 0, tl.load(tiles + tl.maximum(e - 1, 0)), 0)
    if places is not None:
        address = tl.load(places + e).to(tl.pointer_type(data.dtype.element_ty))
    else:
        address = data + begin * columns
    return e, address, begin, rows, (own - before) * (ROWS // 4)


@triton.jit
def _load_rows(address, i, j, rows, columns):
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    return tl.load(address + i[:, None] * columns + j[None, :], inside, 0.0).to(tl.float32)


@triton.jit
def _amax_kernel(
    data, first, tiles, places, amax, columns, count,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    e, address, _, rows, group = _matrix(data, first, tiles, places, columns, count, EXPERTS, ROWS)
    i = group * 4 + tl.arange(0, ROWS)
    j = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    raise_amax(amax + e, tl.abs(_load_rows(address, i, j, rows, columns)))


@triton.jit
def _cast_kernel(
    data, first, tiles, places, scale, out, transposed, columns, count,
    E5M2: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    e, address, begin, rows, group = _matrix(data, first, tiles, places, columns, count, EXPERTS, ROWS)
    group += tl.arange(0, ROWS // 4)
    i = 4 * group
    j = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    a, b = _load_rows(address, i, j, rows, columns), _load_rows(address, i + 1, j, rows, columns)
    c, d = _load_rows(address, i + 2, j, rows, columns), _load_rows(address, i + 3, j, rows, columns)
    at = begin * columns
    store_fp8(a, b, c, d, tl.load(scale + e), group, j, rows, columns, out + at, transposed + at, columns, E5M2)


class FP8Matrices(NamedTuple):
    """FP8 of `Matrices`, uint8: data [R, K], and `transposed`, whose matrices [K, rows] follow each other in memory.

    scale_inv FP32 [E, 1] are the factors from data to values, 16 bytes apart, since cuBLASLt reads no others.
    """

    data: Tensor
    transposed: Tensor
    scale_inv: Tensor


def cast(given: Matrices, e5m2: bool, scale_of: Callable[[Tensor], Tensor]) -> FP8Matrices:
    """Cast matrices by the scales FP32 [E] that `scale_of` makes of their largest magnitudes."""
    count, rows = len(given.tiles), int(given.data.shape[0]) if given.places is None else 0
    device = given.data.device
    if given.places is not None:
        rows = count * len(given.data)
    amax = torch.zeros(count, device=device)
    data, transposed = (torch.empty(rows, given.columns, dtype=torch.uint8, device=device) for _ in range(2))
    grid = (given.high, triton.cdiv(given.columns, COLUMNS))
    sizes: dict[str, Any] = dict(EXPERTS=triton.next_power_of_2(count), ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4)
    table = (given.data, given.first, given.tiles, given.places)
    with torch.cuda.device_of(given.data):
        if given.high:
            _amax_kernel[grid](*table, amax, given.columns, count, **sizes)
        scale = scale_of(amax)
        if given.high:
            _cast_kernel[grid](*table, scale, data, transposed, given.columns, count, E5M2=e5m2, **sizes)
    inverse = scale.new_ones(count, 4)[:, :1]
    return FP8Matrices(data, transposed, inverse.div_(scale[:, None]))
