"""FP8 of the weights of all experts: equal matrices, one launch for each copy and for their largest magnitudes.

The straight copy reads and writes memory in order. The transposed one goes through tiles whose rows and columns are
whole lines of memory on both sides.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_models.kernels.expert_cast_triton import FP8Matrices
from te_models.kernels.expert_scales_triton import Delayed, scale_of, scales_and_launches
from te_models.kernels.fp8_tiles_triton import raise_amax, store_fp8
from te_models.numerics.fp8_triton import encode_four

# Of a program that goes through memory in order: the values that it casts, or only measures, and its warps.
VALUES = 8192
MEASURED = 16384
FLAT_WARPS = 8
# Of a program that transposes: the rows and columns of its tile, and its warps.
ROWS = 128
COLUMNS = 64
TILE_WARPS = 4
SIDE = 64  # rows and columns of a tile of bytes that are transposed without a cast


class EqualMatrices(NamedTuple):
    """Matrices [O, K] of which `data` is one; matrix e begins places[e] elements behind it, a multiple of 8.

    places are int64 [E], and O * K is a multiple of 16.
    """

    data: Tensor
    places: Tensor


@triton.jit
def _flat_kernel(
    # the first matrix, and where each is
    data,
    places,
    # delayed scales, or measured amaxes, with one stride; `factors` [2, E] get inverse scale and scale
    scales,
    amax,
    stride,
    factors,
    # FP8 of all matrices as words of four bytes
    out,
    # values of a matrix, and E
    size,
    count,
    # whether amaxes are raised, and nothing else is done
    MEASURES: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Cast VALUES values of one matrix to FP8, or raise its amax if MEASURES."""
    e = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0)
    begin = place * VALUES
    at = data + tl.multiple_of(tl.load(places + e), 8) + begin + tl.arange(0, VALUES)
    values = tl.load(at, begin + tl.arange(0, VALUES) < size, 0.0)
    if MEASURES:
        raise_amax(amax + e, tl.abs(tl.reshape(values, [1, VALUES]).to(tl.float32)))
        return
    scale = scale_of(e, scales, amax, stride, False)
    if place == 0:
        tl.store(factors + e, tl.div_rn(tl.full((), 1.0, tl.float32), scale))
        tl.store(factors + count + e, scale)
    # Of four values that follow each other: first and third, second and fourth.
    even, odd = tl.split(tl.reshape(values, [VALUES // 4, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    a = a.to(tl.float32)
    b = b.to(tl.float32)
    c = c.to(tl.float32)
    d = d.to(tl.float32)
    word = encode_four(a * scale, b * scale, c * scale, d * scale, False)
    n = begin // 4 + tl.arange(0, VALUES // 4)
    tl.store(out + e * (size // 4) + n, word, n < size // 4)
    if scales is not None:
        largest = tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))
        raise_amax(amax + e * stride, tl.reshape(largest, [1, VALUES // 4]))


@triton.jit
def _load(address, i, j, rows, columns):
    """Return rows i and columns j of a matrix [rows, columns] in FP32; zeros outside."""
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    return tl.load(address + i[:, None] * columns + j[None, :], inside, 0.0).to(tl.float32)


@triton.jit
def _cast_transposed_kernel(
    # the first matrix [rows, columns], and where each is
    data,
    places,
    # FP32 [E]
    scales,
    # uint8: matrices [columns, rows], one after the other
    transposed,
    rows,
    columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Cast a tile of one matrix to FP8 by a known scale, and store it transposed."""
    e = tl.program_id(2).to(tl.int64)
    address = data + tl.multiple_of(tl.load(places + e), 8)
    scale = tl.load(scales + e)
    group = tl.program_id(1) * (ROWS // 4) + tl.arange(0, ROWS // 4)
    i = 4 * group
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    a = _load(address, i, j, rows, columns)
    b = _load(address, i + 1, j, rows, columns)
    c = _load(address, i + 2, j, rows, columns)
    d = _load(address, i + 3, j, rows, columns)
    transposed += e * (rows.to(tl.int64) * columns)
    store_fp8(
        a=a,
        b=b,
        c=c,
        d=d,
        scale=scale,
        group=group,
        j=j,
        rows=rows,
        columns=columns,
        data=None,
        transposed=transposed,
        stride=columns,
        E5M2=False,
    )


@triton.jit
def _transpose_kernel(data, places, out, rows, columns, SIZE: tl.constexpr):
    """Transpose a tile of one matrix [rows, columns] of bytes; the results lie one after the other in `out`."""
    e = tl.program_id(2).to(tl.int64)
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    j = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    matrix = data + tl.multiple_of(tl.load(places + e), 8)
    values = tl.load(matrix + i[:, None] * columns + j[None, :], inside)
    at = out + e * rows * columns + j[:, None] * rows + i[None, :]
    tl.store(at, tl.trans(values), (j < columns)[:, None] & (i < rows)[None, :])


def cast_equal(
    matrices: EqualMatrices, delayed: Delayed | None = None, *, transpose: bool
) -> FP8Matrices:
    """Return matrices in E4M3, cast by `delayed` scales, else each by its largest magnitude.

    The result has data [E * O, K] and, with `transpose`, the transposed matrices [K, O] one after the other.
    """
    rows, columns = matrices.data.shape
    count = len(matrices.places)
    device = matrices.data.device
    data = torch.empty(count * rows, columns, dtype=torch.uint8, device=device)
    factors = torch.empty(2, count, device=device)
    scales, amax, launches = scales_and_launches(delayed, None, count, device)
    with torch.cuda.device_of(data):
        for measures in launches:
            values = MEASURED if measures else VALUES
            _flat_kernel[(triton.cdiv(rows * columns, values), count)](
                data=matrices.data,
                places=matrices.places,
                scales=scales,
                amax=amax,
                stride=amax.stride(0),
                factors=factors,
                out=data.view(torch.int32),
                size=rows * columns,
                count=count,
                MEASURES=measures,
                VALUES=values,
                num_warps=FLAT_WARPS,
            )
    inverse, scale = factors.unbind()
    transposed_data = None
    if transpose:
        transposed_data = cast_equal_transposed(matrices, scale)
    return FP8Matrices(data, transposed_data, scale_inv=inverse, scale=scale)


def cast_equal_transposed(matrices: EqualMatrices, scale: Tensor) -> Tensor:
    """Return the transposed matrices of `cast_equal`, cast by the scales FP32 [E]: uint8 [E * O, K] in memory order.

    Each is [K, O]; the result has the shape of the straight copy, and products view it.
    """
    rows, columns = matrices.data.shape
    count = len(matrices.places)
    out = torch.empty(count * rows, columns, dtype=torch.uint8, device=matrices.data.device)
    grid = (triton.cdiv(columns, COLUMNS), triton.cdiv(rows, ROWS), count)
    with torch.cuda.device_of(out):
        _cast_transposed_kernel[grid](
            data=matrices.data,
            places=matrices.places,
            scales=scale,
            transposed=out,
            rows=rows,
            columns=columns,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            num_warps=TILE_WARPS,
        )
    return out


def transposed(data: Tensor, places: Tensor) -> Tensor:
    """Return bytes of equal matrices [O, K], the first of which is `data`, transposed: uint8 [E, K, O]."""
    rows, columns = data.shape
    count = len(places)
    out = torch.empty(count, columns, rows, dtype=torch.uint8, device=data.device)
    grid = (triton.cdiv(rows, SIDE), triton.cdiv(columns, SIDE), count)
    with torch.cuda.device_of(data):
        _transpose_kernel[grid](data, places, out, rows, columns, SIZE=SIDE)
    return out
