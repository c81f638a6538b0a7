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
    """The tile of a product, and how its kernel is compiled.

    Attributes:
        height, width: rows and columns of the result that a program computes.
        depth: terms of the sum that are read at a time.
        stages: copies to shared memory on their way.
        warps: of a program.
        tma: whether the copy engine of Hopper reads whole tiles of rows and matrices (TMA), where they allow it.
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
# Rows of tiles whose programs follow each other, so that they share what the L2 cache holds.
GROUP_M = 8


@triton.jit
def place_of_tile(t, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Return the row and the column of tile t, of `tiles_m` x `tiles_n` tiles, in bands of GROUP_M rows."""
    before = t // (GROUP_M * tiles_n) * GROUP_M
    size = tl.maximum(tl.minimum(tiles_m - before, GROUP_M), 1)
    t = t % (GROUP_M * tiles_n)
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Return this program's expert, its first row and number of rows, and the row and column of the tile.

    A program behind the last tile gets expert `count`.
    """
    tile = tl.program_id(0)
    tiles_n = tl.cdiv(width, BLOCK_N)
    number = tl.arange(0, EXPERTS)
    ends = tl.load(tiles + number, number < count, 2**40) * tiles_n
    e = tl.sum((ends <= tile).to(tl.int32), 0)
    readable = tl.minimum(
        e, count - 1
    )  # an expert whose rows a program behind the last tile can read
    begin = tl.load(first + readable)
    rows = (tl.load(first + readable + 1) - begin).to(tl.int32)
    before = tl.load(tiles + tl.maximum(e - 1, 0), e > 0, 0).to(tl.int32)
    m, n = place_of_tile(tile - before * tiles_n, tl.cdiv(rows, BLOCK_M), tiles_n, GROUP_M)
    return e, begin, rows, m, n


@triton.jit
def store_rows(
    # the sum, FP32 [BLOCK_M, BLOCK_N]
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Store a tile of a product, by both scales and plus the bias where there are any."""
    i = m * BLOCK_M + tl.arange(0, BLOCK_M)
    j = n * BLOCK_N + tl.arange(0, BLOCK_N)
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Write a tile of one expert's rows times its matrix; see `rows_times`."""
    e, begin, rows, m, n = own_tile(first, tiles, width, count, EXPERTS, BLOCK_M, BLOCK_N, GROUP_M)
    if e >= count:
        return
    k = tl.arange(0, BLOCK_K)
    row = (m * BLOCK_M + tl.arange(0, BLOCK_M)) % rows
    column = (n * BLOCK_N + tl.arange(0, BLOCK_N)) % width
    if source is None:
        x = a + begin * depth + row.to(tl.int64)[:, None] * depth + k[None, :]
    else:
        token = tl.load(source + begin + row)
        is_token = (token < tokens)[:, None]
        x = a + tl.where(token < tokens, token, 0)[:, None] * depth + k[None, :]
    if places is None:
        matrix = b + e.to(tl.int64) * width * depth
    else:
        matrix = b + tl.multiple_of(tl.load(places + e), 8)
    if DOWN:  # the sum runs down the matrix [depth, width]
        w = matrix + k.to(tl.int64)[:, None] * width + column[None, :]
        step = BLOCK_K * width
    else:
        w = matrix + column.to(tl.int64)[None, :] * depth + k[:, None]
        step = BLOCK_K
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, depth, BLOCK_K):
        if EVEN:
            if source is None:
                left = tl.load(x)
            else:
                left = tl.load(x, is_token, 0.0)
            right = tl.load(w)
        else:
            inside = k[None, :] < depth - start
            if source is not None:
                inside = inside & is_token
            left = tl.load(x, inside, 0.0)
            right = tl.load(w, k[:, None] < depth - start, 0.0)
        total = tl.dot(left, right, total, max_num_imprecise_acc=BLOCK_K if PRECISE else None)
        x += BLOCK_K
        w += step
    store_rows(total, a_scale, b_scale, bias, out, e, begin, rows, m, n, width, BLOCK_M, BLOCK_N)


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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Multiply as `_rows_kernel` does; a and b describe the rows of all experts, and their matrices below each other.

    A tile may contain rows of the next expert, which are not stored, and zeros behind the last column.
    """
    e, begin, rows, m, n = own_tile(first, tiles, width, count, EXPERTS, BLOCK_M, BLOCK_N, GROUP_M)
    if e >= count:
        return
    row = begin.to(tl.int32) + m * BLOCK_M
    column = n * BLOCK_N
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, depth, BLOCK_K):
        left = a.load([row, start])
        if DOWN:
            right = b.load([e * depth + start, column])
        else:
            right = b.load([e * width + column, start]).T
        total = tl.dot(left, right, total, max_num_imprecise_acc=BLOCK_K if PRECISE else None)
    store_rows(total, a_scale, b_scale, bias, out, e, begin, rows, m, n, width, BLOCK_M, BLOCK_N)


@triton.jit
def _store_weights(
    total,
    a_scale,
    b_scale,
    out,
    e,
    m,
    n,
    height,
    width,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Store a tile of expert e's gradient [height, width], by both scales where there are any."""
    i = m * BLOCK_M + tl.arange(0, BLOCK_M)
    j = n * BLOCK_N + tl.arange(0, BLOCK_N)
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Write a tile of the gradient of one expert's weight, a sum over its rows; see `weights_from`."""
    tiles_m = tl.cdiv(height, BLOCK_M)
    tiles_n = tl.cdiv(width, BLOCK_N)
    e = tl.program_id(0) // (tiles_m * tiles_n)
    m, n = place_of_tile(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
    begin = tl.load(first + e)
    rows = (tl.load(first + e + 1) - begin).to(tl.int32)
    k = tl.arange(0, BLOCK_K)
    row = (m * BLOCK_M + tl.arange(0, BLOCK_M)) % height
    column = (n * BLOCK_N + tl.arange(0, BLOCK_N)) % width
    if aligned_first is not None:  # FP8 matrices [height, pitch] and [width, pitch]
        rows = tl.cdiv(rows, BLOCK_K) * BLOCK_K  # zeros follow the last
        aligned_begin = tl.multiple_of(tl.load(aligned_first + e), 128)
        x = a + aligned_begin + row.to(tl.int64)[:, None] * pitch + k[None, :]
        y = b + aligned_begin + column.to(tl.int64)[None, :] * pitch + k[:, None]
        x_step = BLOCK_K
        y_step = BLOCK_K
    else:
        x = a + begin * height + k.to(tl.int64)[None, :] * height + row[:, None]
        y = b + column[None, :]
        if source is None:
            y += begin * width + k.to(tl.int64)[:, None] * width
        x_step = BLOCK_K * height
        y_step = BLOCK_K * width
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    whole = rows // BLOCK_K * BLOCK_K  # rows that fill steps of BLOCK_K; the others need a mask
    for start in range(0, whole, BLOCK_K):
        if source is None:
            right = tl.load(y)
            y += y_step
        else:
            token = tl.load(source + begin + start + k)
            right = tl.load(y + token[:, None] * width, (token < tokens)[:, None], 0.0)
        total = tl.dot(tl.load(x), right, total, max_num_imprecise_acc=BLOCK_K if PRECISE else None)
        x += x_step
    if whole < rows:
        left = tl.load(x, k[None, :] < rows - whole, 0.0)
        if source is None:
            right = tl.load(y, k[:, None] < rows - whole, 0.0)
        else:
            token = tl.load(source + begin + whole + k, k < rows - whole, tokens)
            right = tl.load(y + token[:, None] * width, (token < tokens)[:, None], 0.0)
        total = tl.dot(left, right, total, max_num_imprecise_acc=BLOCK_K if PRECISE else None)
    _store_weights(total, a_scale, b_scale, out, e, m, n, height, width, BLOCK_M, BLOCK_N)


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
    if tiles is None and source is None and _on_hopper(a, b):
        assert a.scale_inv is not None and b.scale_inv is not None
        hopper_rows_times(
            a.data,
            b.data,
            groups,
            bias,
            out,
            a_scale=a.scale_inv,
            b_scale=b.scale_inv,
            precise=precise,
        )
        return out
    tiles = tiles or _tiles_of_rows(a, width, precise)
    grid = (groups.most_tiles(tiles.height) * triton.cdiv(width, tiles.width),)
    shared_arguments: dict[str, Any] = dict(
        first=groups.first,
        tiles=groups.tiles(tiles.height),
        a_scale=a.scale_inv,
        b_scale=b.scale_inv,
        bias=bias,
        out=out,
        width=width,
        depth=depth,
        count=count,
        DOWN=down,
        EXPERTS=triton.next_power_of_2(count),
        **_options(tiles, a, precise),
    )
    # Each tile of b has to be of one expert, and the rows of both operands where the copy engine expects them.
    one_expert = not down or depth % tiles.depth == 0
    in_place = source is None and b.places is None
    with torch.cuda.device_of(out):
        if tiles.tma and one_expert and in_place and by_tma(a.data, b.data):
            if down:
                described_b = _described(
                    b.data, count * depth, width, block=[tiles.depth, tiles.width]
                )
            else:
                described_b = _described(
                    b.data, count * width, depth, block=[tiles.width, tiles.depth]
                )
            _rows_by_tma_kernel[grid](
                a=_described(a.data, len(a.data), depth, block=[tiles.height, tiles.depth]),
                b=described_b,
                **shared_arguments,
            )
        else:
            _rows_kernel[grid](
                a=a.data,
                b=b.data,
                places=b.places,
                source=source,
                tokens=len(a.data),
                EVEN=depth % tiles.depth == 0,
                **shared_arguments,
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
    if tiles is None and _on_hopper(a, b):
        assert a.scale_inv is not None and b.scale_inv is not None
        hopper_weights_from(
            a.data,
            b.data,
            groups,
            out,
            a_scale=a.scale_inv,
            b_scale=b.scale_inv,
            precise=precise,
        )
        return out
    tiles = tiles or _tiles(a, precise)
    grid = (groups.experts * triton.cdiv(height, tiles.height) * triton.cdiv(width, tiles.width),)
    # FP8 operands are transposed copies, in which experts begin at other places than in rows.
    aligned_first = None
    pitch = 0
    if a.scale_inv is not None:
        aligned_first = groups.aligned.first
        pitch = groups.aligned.most
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
            **_options(tiles, a, precise),
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


def _on_hopper(a: ExpertMatrices, b: ExpertMatrices) -> bool:
    """Return whether kernels in Gluon can multiply these matrices: FP8, one below the other, on Hopper."""
    if a.scale_inv is None or b.scale_inv is None or b.places is not None:
        return False
    return a.data.is_cuda and by_tma(a.data, b.data)


def _described(data: Tensor, rows: int, columns: int, block: list[int]) -> TensorDescriptor:
    """Return the copy engine's description of a matrix [rows, columns] that begins with `data`."""
    return TensorDescriptor(data, [rows, columns], [columns, 1], block)


def _tiles(a: ExpertMatrices, precise: bool) -> Tiles:
    """Return the tile of a product with `a`."""
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
    """Return the sizes that a kernel is compiled for, and the compiler's options."""
    return dict(
        BLOCK_M=tiles.height,
        BLOCK_N=tiles.width,
        BLOCK_K=tiles.depth,
        GROUP_M=GROUP_M,
        num_stages=tiles.stages,
        num_warps=tiles.warps,
        PRECISE=precise and a.scale_inv is not None,
        enable_fp_fusion=False,  # cuBLAS rounds the scaled sum before it adds the bias
    )
