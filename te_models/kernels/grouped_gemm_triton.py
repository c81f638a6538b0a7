"""The matrix products of all experts in one launch each, in BF16 or FP8.

The experts' numbers of rows are read on the device, so that the host waits for nothing and a step can be one CUDA
graph. Shapes: E experts, R rows of all experts (te_models/kernels/groups.py); of a result's rows, those that belong to
no expert are left as they are. Sums are FP32, in ascending order: the bits are cuBLAS' for the shapes of models. On
Hopper FP8 goes to hopper_products_triton.py, which has the same bits.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from te_models.kernels.groups import LINE, Groups
from te_models.kernels.hopper_products_triton import hopper_rows_times, hopper_weights_from


class ExpertMatrices(NamedTuple):
    """A matrix per expert, BF16, or FP8 with its factors from data to values, FP32 [E].

    `data` holds them one below the other; with `places`, int64 [E], it is one of them, and matrix e begins places[e]
    elements behind it, a multiple of 8.
    """

    data: Tensor
    scale_inv: Tensor | None = None
    places: Tensor | None = None


class Tiles(NamedTuple):
    """The tile of a product: rows, columns, and how much of the sum is read at a time.

    `tma`: whether the copy engine of Hopper reads whole tiles of rows and matrices (TMA), where they allow it.
    """

    height: int
    width: int
    depth: int
    stages: int
    warps: int = 8
    tma: bool = True


BF16 = Tiles(128, 256, 64, 3)
FP8 = Tiles(128, 256, 128, 3)
# Two programs per multiprocessor: one adds while the other multiplies.
PRECISE = Tiles(128, 128, 128, 3, 4)
# With the copy engine there is room for one more, where rows begin at whole lines (benchmarks/expert_products.py).
MORE_STAGES = 1
SUM = Tiles(64, 64, 1, 1, 4)
ABREAST = 8  # tiles above each other whose programs follow each other, so that they share what the L2 cache holds


@triton.jit
def _corner(t, high, across, ABREAST: tl.constexpr):
    """Return the row and the column of tile t, of `high` times `across`."""
    before = t // (ABREAST * across) * ABREAST
    size = tl.maximum(tl.minimum(high - before, ABREAST), 1)
    t = t % (ABREAST * across)
    return before + t % size, t // size


@triton.jit
def own_tile(
    # where each expert begins, int64 [E + 1], and how many tiles end with it, int64 [E]
    first,
    tiles,
    # columns of the result, and E
    width,
    count,
    EXPERTS: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    ABREAST: tl.constexpr,
):
    """Return this program's expert, its first row and number of rows, and the row and column of the tile.

    A program behind the last tile gets expert `count`.
    """
    tile = tl.program_id(0)
    across = tl.cdiv(width, WIDE)
    number = tl.arange(0, EXPERTS)
    ends = tl.load(tiles + number, number < count, 2**40) * across
    e = tl.sum((ends <= tile).to(tl.int32), 0)
    there = tl.minimum(e, count - 1)
    begin = tl.load(first + there)
    rows = (tl.load(first + there + 1) - begin).to(tl.int32)
    before = tl.load(tiles + tl.maximum(e - 1, 0), e > 0, 0).to(tl.int32)
    m, n = _corner(tile - before * across, tl.cdiv(rows, HIGH), across, ABREAST)
    return e, begin, rows, m, n


@triton.jit
def store_rows(
    # the sum, FP32 [HIGH, WIDE]
    total,
    # inverse scales FP32 [E], or None in BF16
    a_scale,
    b_scale,
    # [E, width] or None
    bias,
    # [R, width]
    out,
    # the tile: expert, its first row and number of rows, tile row and tile column
    e,
    begin,
    rows,
    m,
    n,
    width,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Store a tile of a product, by both scales and plus the bias where there are any."""
    i = m * HIGH + tl.arange(0, HIGH)
    j = n * WIDE + tl.arange(0, WIDE)
    if a_scale is not None:
        total *= tl.load(a_scale + e) * tl.load(b_scale + e)
    if bias is not None:
        total += tl.load(bias + e * width + j, j < width, 0.0).to(tl.float32)[None, :]
    y = out + begin * width + i.to(tl.int64)[:, None] * width + j[None, :]
    tl.store(y, total.to(out.dtype.element_ty), (i < rows)[:, None] & (j < width)[None, :])


@triton.jit
def _rows_kernel(
    # rows of all experts [R, depth], or tokens, of which `source` names one for each row
    a,
    b,
    # elements from the first matrix to each, or None where they lie below each other
    places,
    source,
    # number of tokens: whoever points behind them reads zeros
    tokens,
    # where each expert begins, int64 [E + 1], and how many tiles end with it, int64 [E]
    first,
    tiles,
    # inverse scales FP32 [E], or None in BF16
    a_scale,
    b_scale,
    # [E, width] or None, and the result [R, width]
    bias,
    out,
    # outputs, length of the sum, and E
    width,
    depth,
    count,
    # matrices are [depth, width] rather than [width, depth]; depth is whole tiles; FP32 sums
    DOWN: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISE: tl.constexpr,
    EXPERTS: tl.constexpr,
    # the tile: rows, columns, and how much of the sum is read at a time
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    DEEP: tl.constexpr,
    ABREAST: tl.constexpr,
):
    e, begin, rows, m, n = own_tile(first, tiles, width, count, EXPERTS, HIGH, WIDE, ABREAST)
    if e >= count:
        return
    k = tl.arange(0, DEEP)
    row = (m * HIGH + tl.arange(0, HIGH)) % rows
    column = (n * WIDE + tl.arange(0, WIDE)) % width
    if source is None:
        x = a + begin * depth + row.to(tl.int64)[:, None] * depth + k[None, :]
    else:
        token = tl.load(source + begin + row)
        there = (token < tokens)[:, None]
        x = a + tl.where(token < tokens, token, 0)[:, None] * depth + k[None, :]
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
            left = tl.load(x) if source is None else tl.load(x, there, 0.0)
            right = tl.load(w)
        else:
            inside = k[None, :] < depth - start
            left = tl.load(x, inside if source is None else inside & there, 0.0)
            right = tl.load(w, k[:, None] < depth - start, 0.0)
        total = tl.dot(left, right, total, max_num_imprecise_acc=DEEP if PRECISE else None)
        x += DEEP
        w += step
    store_rows(total, a_scale, b_scale, bias, out, e, begin, rows, m, n, width, HIGH, WIDE)


@triton.jit
def _rows_by_tma_kernel(
    a,
    b,
    # where each expert begins, int64 [E + 1], and how many tiles end with it, int64 [E]
    first,
    tiles,
    # inverse scales FP32 [E], or None in BF16
    a_scale,
    b_scale,
    # [E, width] or None, and the result [R, width]
    bias,
    out,
    # outputs, length of the sum, and E
    width,
    depth,
    count,
    DOWN: tl.constexpr,
    PRECISE: tl.constexpr,
    EXPERTS: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    DEEP: tl.constexpr,
    ABREAST: tl.constexpr,
):
    """Multiply as `_rows_kernel` does; a and b describe the rows of all experts, and their matrices below each other.

    A tile may contain rows of the next expert, which are not stored, and zeros behind the last column.
    """
    e, begin, rows, m, n = own_tile(first, tiles, width, count, EXPERTS, HIGH, WIDE, ABREAST)
    if e >= count:
        return
    row = begin.to(tl.int32) + m * HIGH
    column = n * WIDE
    total = tl.zeros([HIGH, WIDE], tl.float32)
    for start in range(0, depth, DEEP):
        left = a.load([row, start])
        right = (
            b.load([e * depth + start, column]) if DOWN else b.load([e * width + column, start]).T
        )
        total = tl.dot(left, right, total, max_num_imprecise_acc=DEEP if PRECISE else None)
    store_rows(total, a_scale, b_scale, bias, out, e, begin, rows, m, n, width, HIGH, WIDE)


@triton.jit
def _store_weights(
    total, a_scale, b_scale, out, e, m, n, height, width, HIGH: tl.constexpr, WIDE: tl.constexpr
):
    i = m * HIGH + tl.arange(0, HIGH)
    j = n * WIDE + tl.arange(0, WIDE)
    if a_scale is not None:
        total *= tl.load(a_scale + e) * tl.load(b_scale + e)
    z = out + (e.to(tl.int64) * height + i[:, None]) * width + j[None, :]
    tl.store(z, total.to(out.dtype.element_ty), (i < height)[:, None] & (j < width)[None, :])


@triton.jit
def _weights_kernel(
    # gradient of the outputs and inputs of all experts: rows in 16 bits, or transposed copies in FP8
    a,
    b,
    # tokens of the inputs for each row, or None, and how many there are
    source,
    tokens,
    # where each expert begins, in rows and in the transposed copies, whose rows are `pitch` long
    first,
    aligned_first,
    pitch,
    # inverse scales FP32 [E], or None in BF16
    a_scale,
    b_scale,
    # gradient of the weights [E, height, width]
    out,
    height,
    width,
    PRECISE: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    DEEP: tl.constexpr,
    ABREAST: tl.constexpr,
):
    high = tl.cdiv(height, HIGH)
    across = tl.cdiv(width, WIDE)
    e = tl.program_id(0) // (high * across)
    m, n = _corner(tl.program_id(0) % (high * across), high, across, ABREAST)
    begin = tl.load(first + e)
    rows = (tl.load(first + e + 1) - begin).to(tl.int32)
    k = tl.arange(0, DEEP)
    row = (m * HIGH + tl.arange(0, HIGH)) % height
    column = (n * WIDE + tl.arange(0, WIDE)) % width
    if aligned_first is not None:  # FP8 matrices [height, pitch] and [width, pitch]
        rows = tl.cdiv(rows, DEEP) * DEEP  # zeros follow the last
        aligned_begin = tl.multiple_of(tl.load(aligned_first + e), 128)
        x = a + aligned_begin + row.to(tl.int64)[:, None] * pitch + k[None, :]
        y = b + aligned_begin + column.to(tl.int64)[None, :] * pitch + k[:, None]
        down = DEEP
        right = DEEP
    else:
        x = a + begin * height + k.to(tl.int64)[None, :] * height + row[:, None]
        y = b + column[None, :]
        if source is None:
            y += begin * width + k.to(tl.int64)[:, None] * width
        down = DEEP * height
        right = DEEP * width
    total = tl.zeros([HIGH, WIDE], tl.float32)
    whole = rows // DEEP * DEEP
    for start in range(0, whole, DEEP):
        if source is None:
            other = tl.load(y)
            y += right
        else:
            token = tl.load(source + begin + start + k)
            other = tl.load(y + token[:, None] * width, (token < tokens)[:, None], 0.0)
        total = tl.dot(tl.load(x), other, total, max_num_imprecise_acc=DEEP if PRECISE else None)
        x += down
    if whole < rows:
        one = tl.load(x, k[None, :] < rows - whole, 0.0)
        if source is None:
            other = tl.load(y, k[:, None] < rows - whole, 0.0)
        else:
            token = tl.load(source + begin + whole + k, k < rows - whole, tokens)
            other = tl.load(y + token[:, None] * width, (token < tokens)[:, None], 0.0)
        total = tl.dot(one, other, total, max_num_imprecise_acc=DEEP if PRECISE else None)
    _store_weights(total, a_scale, b_scale, out, e, m, n, height, width, HIGH, WIDE)


def rows_times(
    a: ExpertMatrices,
    b: ExpertMatrices,
    groups: Groups,
    width: int,
    bias: Tensor | None = None,
    *,
    down: bool,
    precise: bool,
    dtype: torch.dtype,
    source: Tensor | None = None,
    tiles: Tiles | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return each expert's rows of a [R, D] times its matrix of b, plus its row of `bias` [E, width]: [R, width].

    The sum is rounded to `dtype` once.

    Args:
        down: whether the matrix is [D, width], which FP8 does not allow; otherwise [width, D], transposed.
        precise: FP8 sums leave the tensor cores, which keep fewer bits, every 128 terms.
        source: int64 [R], the row of a [T, D] of each row; zeros for T.
        tiles: the tile; None: the one for this product.
        out: where the rows of these experts are written, [R, width] in `dtype`; None: memory of its own.
    """
    depth = a.data.shape[1]
    count = groups.experts
    if out is None:
        out = torch.empty(groups.most, width, dtype=dtype, device=a.data.device)
    scales = _scales_on_hopper(a, b) if tiles is None and source is None else None
    if scales is not None:
        hopper_rows_times(a.data, b.data, scales, groups, bias, out, precise=precise)
        return out
    tiles = tiles or _tiles_of_rows(a, width, precise)
    grid = (groups.most_tiles(tiles.height) * triton.cdiv(width, tiles.width),)
    last_arguments = (
        groups.first,
        groups.tiles(tiles.height),
        a.scale_inv,
        b.scale_inv,
        bias,
        out,
        width,
        depth,
        count,
    )
    options = dict(DOWN=down, EXPERTS=triton.next_power_of_2(count), **_options(tiles, a, precise))
    one_expert = not down or depth % tiles.depth == 0  # in each tile of b
    in_place = source is None and b.places is None
    with torch.cuda.device_of(out):
        if tiles.tma and one_expert and in_place and by_tma(a.data, b.data):
            rows, columns = (count * depth, width) if down else (count * width, depth)
            shape = [tiles.depth, tiles.width] if down else [tiles.width, tiles.depth]
            _rows_by_tma_kernel[grid](
                _described(a.data, len(a.data), depth, [tiles.height, tiles.depth]),
                _described(b.data, rows, columns, shape),
                *last_arguments,
                **options,
            )
        else:
            _rows_kernel[grid](
                a.data,
                b.data,
                b.places,
                source,
                len(a.data),
                *last_arguments,
                EVEN=depth % tiles.depth == 0,
                **options,
            )
    return out


def weights_from(
    a: ExpertMatrices,
    b: ExpertMatrices,
    groups: Groups,
    height: int,
    width: int,
    *,
    precise: bool,
    dtype: torch.dtype,
    source: Tensor | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """Return each expert's rows of a [R, height], transposed, times its rows of b [R, width]: [E, height, width].

    In FP8 `data` holds the transposed matrices (FP8Matrices.transposed). With `source`, int64 [R], b is [T, width], and
    row r of it is row source[r], zeros for T.
    """
    out = torch.empty(groups.experts, height, width, dtype=dtype, device=a.data.device)
    scales = _scales_on_hopper(a, b) if tiles is None else None
    if scales is not None:
        hopper_weights_from(a.data, b.data, scales, groups, out, precise=precise)
        return out
    tiles = tiles or _tiles(a, precise)
    grid = (groups.experts * triton.cdiv(height, tiles.height) * triton.cdiv(width, tiles.width),)
    fp8 = a.scale_inv is not None
    aligned_first, pitch = (groups.aligned.first, groups.aligned.most) if fp8 else (None, 0)
    options = _options(tiles, a, precise)
    with torch.cuda.device_of(out):
        _weights_kernel[grid](
            a=a.data,
            b=b.data,
            source=source,
            tokens=len(b.data),
            first=groups.first,
            aligned_first=aligned_first,
            pitch=pitch,
            a_scale=a.scale_inv,
            b_scale=b.scale_inv,
            out=out,
            height=height,
            width=width,
            **options,
        )
    return out


def by_tma(*operands: Tensor) -> bool:
    """Return whether the copy engine can read tiles of these matrices: on Hopper, with rows of 16 bytes."""
    return all(
        (not x.is_cuda or torch.cuda.get_device_capability(x.device)[0] == 9)
        and x.data_ptr() % 16 == 0
        and x.shape[-1] * x.element_size() % 16 == 0
        and x.numel() > 0
        for x in operands
    )


def _scales_on_hopper(a: ExpertMatrices, b: ExpertMatrices) -> tuple[Tensor, Tensor] | None:
    """Return the factors of FP8 matrices that kernels in Gluon can multiply; None for others."""
    if a.scale_inv is None or b.scale_inv is None or b.places is not None:
        return None
    if not a.data.is_cuda or not by_tma(a.data, b.data):
        return None
    return a.scale_inv, b.scale_inv


def _described(data: Tensor, rows: int, columns: int, block: list[int]) -> TensorDescriptor:
    """Return the copy engine's description of a matrix [rows, columns] that begins with `data`."""
    return TensorDescriptor(data, [rows, columns], [columns, 1], block)


def _tiles(a: ExpertMatrices, precise: bool) -> Tiles:
    if a.scale_inv is None:
        return BF16
    return PRECISE if precise else FP8


def _tiles_of_rows(a: ExpertMatrices, width: int, precise: bool) -> Tiles:
    """Return the tile of `rows_times`.

    The copy engine is slower than pointers where rows of a tile do not begin at whole lines of memory, or where the
    last tile of a row is half empty; not with tiles of `PRECISE`, which wait for additions.
    """
    tiles = _tiles(a, precise)
    if a.scale_inv is not None and precise:
        return tiles
    lines = a.data.shape[1] * a.data.element_size() % LINE == 0
    if lines and width % tiles.width == 0:
        return tiles._replace(stages=tiles.stages + MORE_STAGES)
    return tiles._replace(tma=False)


def _options(tiles: Tiles, a: ExpertMatrices, precise: bool) -> dict[str, Any]:
    return dict(
        HIGH=tiles.height,
        WIDE=tiles.width,
        DEEP=tiles.depth,
        ABREAST=ABREAST,
        num_stages=tiles.stages,
        num_warps=tiles.warps,
        PRECISE=precise and a.scale_inv is not None,
        enable_fp_fusion=False,  # cuBLAS rounds the scaled sum before it adds the bias
    )
