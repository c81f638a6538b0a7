"""The matrix products of all experts in one launch each, in BF16 or FP8.

The experts' numbers of rows are read on the device, so that the host waits for nothing and a step can be one CUDA
graph. Shapes: E experts, R rows of all experts (te_models/kernels/groups.py); of a result's rows, those that belong to
no expert are left as they are. Sums are FP32, in ascending order: the bits are cuBLAS' for the shapes of models.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_models.kernels.groups import Groups


class Operand(NamedTuple):
    """A matrix per expert, BF16, or FP8 with its factors from data to values, FP32 [E].

    `data` holds them one below the other; with `places`, int64 [E], it is one of them, and matrix e begins places[e]
    elements behind it, a multiple of 8.
    """

    data: Tensor
    scale_inv: Tensor | None = None
    places: Tensor | None = None


class Tiles(NamedTuple):
    """The tile of a product: rows, columns, and how much of the sum is read at a time."""

    height: int
    width: int
    depth: int
    stages: int
    warps: int = 8


BF16 = Tiles(128, 256, 64, 3)
FP8 = Tiles(128, 256, 128, 3)
PRECISE = Tiles(
    128, 128, 128, 3, 4
)  # two programs per multiprocessor: one adds while the other multiplies
SUM = Tiles(64, 64, 1, 1, 4)
ABREAST = 8  # tiles above each other whose programs follow each other, so that they share what the L2 cache holds


@triton.jit
def _corner(t, high, across, ABREAST: tl.constexpr):
    """Return the row and the column of tile t, of `high` times `across`."""
    before = t // (ABREAST * across) * ABREAST
    size = tl.minimum(high - before, ABREAST)
    t = t % (ABREAST * across)
    return before + t % size, t // size


@triton.jit
def _rows_kernel(
    a, b, places, first, tiles, a_scale, b_scale, bias, out, width, depth, count,
    DOWN: tl.constexpr, EVEN: tl.constexpr, PRECISE: tl.constexpr, EXPERTS: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr, ABREAST: tl.constexpr,
):  # fmt: skip
    own = tl.program_id(0)
    across = tl.cdiv(width, WIDE)
    number = tl.arange(0, EXPERTS)
    ends = tl.load(tiles + number, number < count, 2**40) * across
    e = tl.sum((ends <= own).to(tl.int32), 0)
    if e >= count:
        return
    begin = tl.load(first + e)
    rows = (tl.load(first + e + 1) - begin).to(tl.int32)
    before = tl.load(tiles + tl.maximum(e - 1, 0), e > 0, 0).to(tl.int32)
    m, n = _corner(own - before * across, tl.cdiv(rows, HIGH), across, ABREAST)
    i = m * HIGH + tl.arange(0, HIGH)
    j = n * WIDE + tl.arange(0, WIDE)
    k = tl.arange(0, DEEP)
    row = i % rows
    column = j % width
    x = a + begin * depth + row.to(tl.int64)[:, None] * depth + k[None, :]
    at = (
        e.to(tl.int64) * width * depth if places is None else tl.multiple_of(tl.load(places + e), 8)
    )
    matrix = b + at
    if DOWN:  # the sum runs down the matrix [depth, width]
        w = matrix + k.to(tl.int64)[:, None] * width + column[None, :]
        step = DEEP * width
    else:
        w = matrix + column.to(tl.int64)[None, :] * depth + k[:, None]
        step = DEEP
    total = tl.zeros([HIGH, WIDE], tl.float32)
    for start in range(0, depth, DEEP):
        if EVEN:
            left = tl.load(x)
            right = tl.load(w)
        else:
            left = tl.load(x, k[None, :] < depth - start, 0.0)
            right = tl.load(w, k[:, None] < depth - start, 0.0)
        total = tl.dot(left, right, total, max_num_imprecise_acc=DEEP if PRECISE else None)
        x += DEEP
        w += step
    if a_scale is not None:
        total *= tl.load(a_scale + e) * tl.load(b_scale + e)
    if bias is not None:
        total += tl.load(bias + e * width + column).to(tl.float32)[None, :]
    y = out + begin * width + i.to(tl.int64)[:, None] * width + j[None, :]
    tl.store(y, total.to(out.dtype.element_ty), (i < rows)[:, None] & (j < width)[None, :])


@triton.jit
def _weights_kernel(
    a, b, first, turned, a_scale, b_scale, out, height, width,
    PRECISE: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr, ABREAST: tl.constexpr,
):  # fmt: skip
    high = tl.cdiv(height, HIGH)
    across = tl.cdiv(width, WIDE)
    e = tl.program_id(0) // (high * across)
    m, n = _corner(tl.program_id(0) % (high * across), high, across, ABREAST)
    begin = tl.load(first + e)
    rows = (tl.load(first + e + 1) - begin).to(tl.int32)
    i = m * HIGH + tl.arange(0, HIGH)
    j = n * WIDE + tl.arange(0, WIDE)
    k = tl.arange(0, DEEP)
    row = i % height
    column = j % width
    if (
        turned is not None
    ):  # FP8 matrices [height, apart] and [width, apart], of which `rows` are there
        rows = tl.multiple_of(rows, 16)
        here = tl.multiple_of(tl.load(turned + e), 128)
        apart = tl.multiple_of(tl.load(turned + e + 1) - here, 128)
        x = a + here * height + row.to(tl.int64)[:, None] * apart + k[None, :]
        y = b + here * width + column.to(tl.int64)[None, :] * apart + k[:, None]
        down = DEEP
        right = DEEP
    else:
        x = a + begin * height + k.to(tl.int64)[None, :] * height + row[:, None]
        y = b + begin * width + k.to(tl.int64)[:, None] * width + column[None, :]
        down = DEEP * height
        right = DEEP * width
    total = tl.zeros([HIGH, WIDE], tl.float32)
    whole = rows // DEEP * DEEP
    for _ in range(0, whole, DEEP):
        total = tl.dot(
            tl.load(x), tl.load(y), total, max_num_imprecise_acc=DEEP if PRECISE else None
        )
        x += down
        y += right
    if whole < rows:
        one = tl.load(x, k[None, :] < rows - whole, 0.0)
        other = tl.load(y, k[:, None] < rows - whole, 0.0)
        total = tl.dot(one, other, total, max_num_imprecise_acc=DEEP if PRECISE else None)
    if a_scale is not None:
        total *= tl.load(a_scale + e) * tl.load(b_scale + e)
    z = out + (e.to(tl.int64) * height + i[:, None]) * width + j[None, :]
    tl.store(z, total.to(out.dtype.element_ty), (i < height)[:, None] & (j < width)[None, :])


@triton.jit
def _sums_kernel(x, first, out, width, HIGH: tl.constexpr, WIDE: tl.constexpr):
    e = tl.program_id(1)
    column = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    begin = tl.load(first + e)
    inside = (column < width)[None, :]
    rows = (tl.load(first + e + 1) - begin).to(tl.int32)
    at = x + (begin + tl.arange(0, HIGH))[:, None] * width + column[None, :]
    total = tl.zeros([HIGH, WIDE], tl.float32)
    for start in range(0, rows, HIGH):
        there = (start + tl.arange(0, HIGH) < rows)[:, None] & inside
        total += tl.load(at, there, 0.0).to(tl.float32)
        at += HIGH * width
    tl.store(out + e * width + column, tl.sum(total, 0).to(out.dtype.element_ty), column < width)


def rows_times(
    a: Operand, b: Operand, groups: Groups, width: int, bias: Tensor | None = None, *,
    down: bool, precise: bool, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return each expert's rows of a [R, D] times its matrix of b, plus its row of `bias` [E, width]: [R, width].

    The sum is rounded to `dtype` once.

    The matrix is [width, D], transposed, or with `down` [D, width], which FP8 does not allow.
    `precise`: FP8 sums leave the tensor cores, which keep fewer bits, every 128 terms.
    """
    depth = a.data.shape[1]
    tiles = _tiles(a, precise)
    out = torch.empty(len(a.data), width, dtype=dtype, device=a.data.device)
    grid = (groups.high(tiles.height) * triton.cdiv(width, tiles.width),)
    with torch.cuda.device_of(out):
        _rows_kernel[grid](
            a.data, b.data, b.places, groups.first, groups.tiles(tiles.height), a.scale_inv, b.scale_inv,
            bias, out, width, depth, groups.experts, DOWN=down, EVEN=depth % tiles.depth == 0,
            EXPERTS=triton.next_power_of_2(groups.experts), **_options(tiles, a, precise),
        )  # fmt: skip
    return out


def weights_from(
    a: Operand,
    b: Operand,
    groups: Groups,
    height: int,
    width: int,
    *,
    precise: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Return each expert's rows of a [R, height], transposed, times those of b [R, width]: [E, height, width].

    In FP8 `data` holds the transposed matrices (FP8Matrices.transposed).
    """
    tiles = _tiles(a, precise)
    out = torch.empty(groups.experts, height, width, dtype=dtype, device=a.data.device)
    grid = (groups.experts * triton.cdiv(height, tiles.height) * triton.cdiv(width, tiles.width),)
    with torch.cuda.device_of(out):
        _weights_kernel[grid](
            a.data, b.data, groups.first, None if a.scale_inv is None else groups.apart.first, a.scale_inv, b.scale_inv,
            out, height, width, **_options(tiles, a, precise),
        )  # fmt: skip
    return out


def sums_of_rows(x: Tensor, groups: Groups) -> Tensor:
    """Return the sum of each expert's rows of x [R, width], in FP32 and rounded once: [E, width]."""
    out = x.new_empty(groups.experts, x.shape[1])
    with torch.cuda.device_of(x):
        grid = (triton.cdiv(x.shape[1], SUM.width), groups.experts)
        _sums_kernel[grid](
            x, groups.first, out, x.shape[1], HIGH=SUM.height, WIDE=SUM.width, num_warps=SUM.warps
        )
    return out


def _tiles(a: Operand, precise: bool) -> Tiles:
    if a.scale_inv is None:
        return BF16
    return PRECISE if precise else FP8


def _options(tiles: Tiles, a: Operand, precise: bool) -> dict[str, Any]:
    return dict(
        HIGH=tiles.height, WIDE=tiles.width, DEEP=tiles.depth, ABREAST=ABREAST, num_stages=tiles.stages,
        num_warps=tiles.warps, PRECISE=precise and a.scale_inv is not None,
        enable_fp_fusion=False,  # cuBLAS rounds the scaled sum before it adds the bias
    )  # fmt: skip
