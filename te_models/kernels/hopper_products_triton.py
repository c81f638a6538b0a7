"""The FP8 products of grouped_gemm_triton.py on Hopper, in Gluon: the same bits in about four fifths of the time.

A program per multiprocessor takes tile after tile. One of its warps copies operands to shared memory (TMA) while two
groups of four warps multiply, each one half of the tile's columns. For precise sums a group multiplies the upper and
the lower 64 rows of the tile one after the other, and adds while the other group is in the tensor cores.

Names in the kernels: shared memory has STAGES rooms for each operand, `a_room` [STAGES, BLOCK_M, BLOCK_K] and `b_room`
[STAGES, BLOCK_N, BLOCK_K] in FP8. A step is BLOCK_K terms of a tile's sum; steps are counted over all tiles of a
program, and step s uses room s % STAGES. The copying warp waits for the barrier `empty` of a room and fills it; groups
that multiply wait for its barrier `full`. Both barriers have a phase that changes each time a room is used, hence the
(step // STAGES) & 1 that they wait for.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from te_models.kernels.groups import Groups

BLOCK_M = 128  # rows of a tile
BLOCK_N = 256  # columns of a tile
BLOCK_K = 128  # terms of a sum that are copied at a time
STAGES = 4  # copies on their way, 48 KiB each
# Rows of tiles in a band. Tiles go down a band before they go right, so that programs that run at about the same time
# share what the L2 cache holds.
GROUP_M = gl.constexpr(8)
WARPS = 4  # of a group that multiplies
SHARES = 4  # programs per multiprocessor, one after the other, where other kernels run beside them
REGISTERS = gl.constexpr((240, 24))  # of a thread of the second group, and of the copying warp
FORMATS = {torch.float8_e4m3fn: gl.float8e4nv, torch.float8_e5m2: gl.float8e5}


@gluon.jit
def place_of_tile(t, tiles_m, tiles_n):
    """Return the row and the column of tile t, of `tiles_m` x `tiles_n` tiles, in bands of GROUP_M rows."""
    before = t // (GROUP_M * tiles_n) * GROUP_M
    size = gl.maximum(gl.minimum(tiles_m - before, GROUP_M), 1)
    t = t % (GROUP_M * tiles_n)
    return before + t % size, t // size


@gluon.jit
def first_tile(tiles, count, tiles_n):
    """Return this program's first tile, the number of all tiles, and the expert 0 with the first of its tiles and the
    first behind them, from which `next_tile` goes on.

    `tiles` int64 [count] are the rows of tiles that experts 0 to e have together, and each has `tiles_n` tiles.
    """
    last = gl.load(tiles + count - 1).to(gl.int32) * tiles_n
    tile = gl.program_id(0)
    end = gl.load(tiles).to(gl.int32) * tiles_n
    return tile, last, 0, 0, end


@gluon.jit
def next_tile(tile, e, before, end, tiles, tiles_n):
    """Return the expert of a tile, the first of its tiles and the first behind them, and the tile's row and column.

    `e`, `before` and `end` are what this returned for an earlier tile, or `first_tile`.
    """
    while end <= tile:
        e += 1
        before = end
        end = gl.load(tiles + e).to(gl.int32) * tiles_n
    m, n = place_of_tile(tile - before, (end - before) // tiles_n, tiles_n)
    return e, before, end, m, n


@gluon.jit
def weight_tile(tile, first, tiles_m, tiles_n):
    """Return the expert of a tile of weight gradients, the tile's row and column, and the rows of the expert.

    Each expert has `tiles_m` x `tiles_n` tiles; `first` int64 [E + 1] is where each begins.
    """
    e = tile // (tiles_m * tiles_n)
    m, n = place_of_tile(tile % (tiles_m * tiles_n), tiles_m, tiles_n)
    rows = (gl.load(first + e + 1) - gl.load(first + e)).to(gl.int32)
    return e, m, n, rows


@gluon.constexpr_function
def layout_of_sums(columns):
    """Return the layout of a sum of so many columns in the registers of a group of warps."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 32]
    )


@gluon.jit
def store_sum(total, scale, bias, e, out, rows, i0, j0, width):
    """Store a sum by `scale` if there is one, plus the bias [E, width] if there is one, from row i0 and column j0 of
    out [rows, width] on."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    if scale is not None:
        total = total * scale
    if bias is not None:
        column = j0 + gl.arange(0, total.type.shape[1], gl.SliceLayout(0, total.type.layout))
        total += gl.load(bias + e * width + column, column < width, 0.0).to(gl.float32)[None, :]
    values = gl.convert_layout(total.to(out.dtype.element_ty), LAYOUT)
    i = i0 + gl.arange(0, total.type.shape[0], gl.SliceLayout(1, LAYOUT))
    j = j0 + gl.arange(0, total.type.shape[1], gl.SliceLayout(0, LAYOUT))
    at = out + i.to(gl.int64)[:, None] * width + j[None, :]
    gl.store(at, values, (i < rows)[:, None] & (j < width)[None, :])


@gluon.jit
def _copy(a, row, b, column, at, a_room, b_room, full, empty, step):
    """Copy BLOCK_K terms from `at` on into the room of this step, once both groups have read it.

    They are of BLOCK_M rows of a from `row` on, and of BLOCK_N rows of b from `column` on.
    """
    STAGES: gl.constexpr = a_room.shape[0]
    s = step % STAGES
    mbarrier.wait(empty.index(s), ((step // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(s), a.block_type.nbytes + b.block_type.nbytes)
    tma.async_copy_global_to_shared(a, [row, at], full.index(s), a_room.index(s))
    tma.async_copy_global_to_shared(b, [column, at], full.index(s), b_room.index(s))


@gluon.jit
def _multiply(top, low, part, a_room, b_room, full, empty, step, PRECISE: gl.constexpr):
    """Return the sums of the tile's upper and lower rows plus the products of this step, and free its room.

    `top` and `low` FP32 [BLOCK_M / 2, BLOCK_N / 2]: the columns of this group, 0 or 1 (`part`).
    """
    STAGES: gl.constexpr = a_room.shape[0]
    ROWS: gl.constexpr = a_room.shape[1] // 2
    COLUMNS: gl.constexpr = b_room.shape[1] // 2
    LAYOUT: gl.constexpr = top.type.layout
    s = step % STAGES
    mbarrier.wait(full.index(s), (step // STAGES) & 1)
    upper = a_room.index(s).slice(0, ROWS, 0)
    lower = a_room.index(s).slice(ROWS, ROWS, 0)
    right = b_room.index(s).slice(part * COLUMNS, COLUMNS, 0).permute((1, 0))
    if PRECISE:  # sums leave the tensor cores, which keep fewer bits
        zero = gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT)
        product = warpgroup_mma(upper, right, zero, use_acc=False, is_async=True)
        product = warpgroup_mma_wait(0, deps=[product])
        top += product
        product = warpgroup_mma(lower, right, zero, use_acc=False, is_async=True)
        product = warpgroup_mma_wait(0, deps=[product])
        mbarrier.arrive(empty.index(s), count=1)
        low += product
    else:
        top = warpgroup_mma(upper, right, top, is_async=True)
        low = warpgroup_mma(lower, right, low, is_async=True)
        top, low = warpgroup_mma_wait(0, deps=[top, low])
        mbarrier.arrive(empty.index(s), count=1)
    return top, low


@gluon.jit
def _copy_rows(a, b, first, tiles, width, depth, count, a_room, b_room, full, empty):
    """Copy what `_multiply_rows` multiplies; the arguments are explained in `_rows_kernel`."""
    BLOCK_M: gl.constexpr = a_room.shape[1]
    BLOCK_N: gl.constexpr = b_room.shape[1]
    BLOCK_K: gl.constexpr = a_room.shape[2]
    tiles_n = gl.cdiv(width, BLOCK_N)
    tile, last, e, before, end = first_tile(tiles, count, tiles_n)
    step = 0
    while tile < last:
        e, before, end, m, n = next_tile(tile, e, before, end, tiles, tiles_n)
        row = gl.load(first + e).to(gl.int32) + m * BLOCK_M
        column = e * width + n * BLOCK_N
        for start in range(0, depth, BLOCK_K):
            _copy(a, row, b, column, start, a_room, b_room, full, empty, step)
            step += 1
        tile += gl.num_programs(0)


@gluon.jit
def _multiply_rows(
    part,
    first,
    tiles,
    a_scale,
    b_scale,
    bias,
    out,
    width,
    depth,
    count,
    a_room,
    b_room,
    full,
    empty,
    PRECISE: gl.constexpr,
):
    """Multiply half of the columns of each tile, of which every expert has whole ones for its rows."""
    BLOCK_M: gl.constexpr = a_room.shape[1]
    BLOCK_N: gl.constexpr = b_room.shape[1]
    BLOCK_K: gl.constexpr = a_room.shape[2]
    SUM: gl.constexpr = layout_of_sums(BLOCK_N // 2)
    tiles_n = gl.cdiv(width, BLOCK_N)
    tile, last, e, before, end = first_tile(tiles, count, tiles_n)
    step = 0
    while tile < last:
        e, before, end, m, n = next_tile(tile, e, before, end, tiles, tiles_n)
        top = gl.zeros([BLOCK_M // 2, BLOCK_N // 2], gl.float32, SUM)
        low = gl.zeros([BLOCK_M // 2, BLOCK_N // 2], gl.float32, SUM)
        for _ in range(0, depth, BLOCK_K):
            top, low = _multiply(top, low, part, a_room, b_room, full, empty, step, PRECISE)
            step += 1
        scale = gl.load(a_scale + e) * gl.load(b_scale + e)
        begin = gl.load(first + e)
        rows = (gl.load(first + e + 1) - begin).to(gl.int32)
        y = out + begin * width
        i = m * BLOCK_M
        j = n * BLOCK_N + part * (BLOCK_N // 2)
        store_sum(top, scale, bias, e, y, rows, i, j, width)
        store_sum(low, scale, bias, e, y, rows, i + BLOCK_M // 2, j, width)
        tile += gl.num_programs(0)


@gluon.jit
def barriers(STAGES: gl.constexpr, READERS: gl.constexpr):
    """Return barriers in shared memory, int64 [STAGES, 1] twice: `full` tells that a room was filled, `empty` that all
    READERS, groups of warps, have read it.
    """
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=READERS)
    fence_async_shared()
    return full, empty


@gluon.jit
def _rows_kernel(
    # descriptors of the rows of all experts, and of their matrices [width, depth] below each other
    a,
    b,
    # where each expert begins, int64 [E + 1], and how many tiles end with it, int64 [E]
    first,
    tiles,
    # inverse scales, FP32 [E]
    a_scale,
    b_scale,
    # [E, width] or None, and the result [R, width]
    bias,
    out,
    # outputs, length of the sum, and E
    width,
    depth,
    count,
    STAGES: gl.constexpr,
    PRECISE: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Write tiles of the rows of experts times their matrices, in FP8 with a scale per expert."""
    a_room = gl.allocate_shared_memory(a.dtype, [STAGES] + a.block_type.shape, a.layout)
    b_room = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_type.shape, b.layout)
    full, empty = barriers(STAGES, 2)
    # Each partition and its arguments: one of four warps, which is this program's own, another, and a warp that copies.
    # fmt: off
    gl.warp_specialize(
        [
            (
                _multiply_rows,
                (
                    0, first, tiles, a_scale, b_scale, bias, out, width, depth, count,
                    a_room, b_room, full, empty, PRECISE,
                ),
            ),
            (
                _multiply_rows,
                (
                    1, first, tiles, a_scale, b_scale, bias, out, width, depth, count,
                    a_room, b_room, full, empty, PRECISE,
                ),
            ),
            (_copy_rows, (a, b, first, tiles, width, depth, count, a_room, b_room, full, empty)),
        ],
        [4, 1],
        REGISTERS,
    )
    # fmt: on


@gluon.jit
def _copy_transposed(a, b, first, aligned_first, height, width, count, a_room, b_room, full, empty):
    """Copy what `_multiply_transposed` multiplies; the arguments are explained in `_weights_kernel`."""
    BLOCK_M: gl.constexpr = a_room.shape[1]
    BLOCK_N: gl.constexpr = b_room.shape[1]
    BLOCK_K: gl.constexpr = a_room.shape[2]
    tiles_m = gl.cdiv(height, BLOCK_M)
    tiles_n = gl.cdiv(width, BLOCK_N)
    step = 0
    for tile in range(gl.program_id(0), count * tiles_m * tiles_n, gl.num_programs(0)):
        e, m, n, rows = weight_tile(tile, first, tiles_m, tiles_n)
        aligned_begin = gl.load(aligned_first + e).to(gl.int32)
        for start in range(0, rows, BLOCK_K):
            _copy(
                a,
                m * BLOCK_M,
                b,
                n * BLOCK_N,
                aligned_begin + start,
                a_room,
                b_room,
                full,
                empty,
                step,
            )
            step += 1


@gluon.jit
def _multiply_transposed(
    part,
    first,
    a_scale,
    b_scale,
    out,
    height,
    width,
    count,
    a_room,
    b_room,
    full,
    empty,
    PRECISE: gl.constexpr,
):
    """Multiply half of the columns of each tile; a sum runs over an expert's rows, and the zeros behind them."""
    BLOCK_M: gl.constexpr = a_room.shape[1]
    BLOCK_N: gl.constexpr = b_room.shape[1]
    BLOCK_K: gl.constexpr = a_room.shape[2]
    SUM: gl.constexpr = layout_of_sums(BLOCK_N // 2)
    tiles_m = gl.cdiv(height, BLOCK_M)
    tiles_n = gl.cdiv(width, BLOCK_N)
    step = 0
    for tile in range(gl.program_id(0), count * tiles_m * tiles_n, gl.num_programs(0)):
        e, m, n, rows = weight_tile(tile, first, tiles_m, tiles_n)
        top = gl.zeros([BLOCK_M // 2, BLOCK_N // 2], gl.float32, SUM)
        low = gl.zeros([BLOCK_M // 2, BLOCK_N // 2], gl.float32, SUM)
        for _ in range(0, rows, BLOCK_K):
            top, low = _multiply(top, low, part, a_room, b_room, full, empty, step, PRECISE)
            step += 1
        scale = gl.load(a_scale + e) * gl.load(b_scale + e)
        z = out + e.to(gl.int64) * height * width
        i = m * BLOCK_M
        j = n * BLOCK_N + part * (BLOCK_N // 2)
        store_sum(top, scale, None, e, z, height, i, j, width)
        store_sum(low, scale, None, e, z, height, i + BLOCK_M // 2, j, width)


@gluon.jit
def _weights_kernel(
    # descriptors of both transposed copies, [height, pitch] and [width, pitch]
    a,
    b,
    # where each expert begins, in rows and in the transposed copies
    first,
    aligned_first,
    # inverse scales FP32 [E]
    a_scale,
    b_scale,
    # gradient of the weights [E, height, width]
    out,
    height,
    width,
    count,
    STAGES: gl.constexpr,
    PRECISE: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Write tiles of the gradients of experts' weights, in FP8 with a scale per expert."""
    a_room = gl.allocate_shared_memory(a.dtype, [STAGES] + a.block_type.shape, a.layout)
    b_room = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_type.shape, b.layout)
    full, empty = barriers(STAGES, 2)
    # fmt: off
    gl.warp_specialize(
        [
            (
                _multiply_transposed,
                (0, first, a_scale, b_scale, out, height, width, count, a_room, b_room, full, empty, PRECISE),
            ),
            (
                _multiply_transposed,
                (1, first, a_scale, b_scale, out, height, width, count, a_room, b_room, full, empty, PRECISE),
            ),
            (_copy_transposed, (a, b, first, aligned_first, height, width, count, a_room, b_room, full, empty)),
        ],
        [4, 1],
        REGISTERS,
    )
    # fmt: on


def hopper_rows_times(
    a: Tensor,
    b: Tensor,
    groups: Groups,
    bias: Tensor | None,
    out: Tensor,
    *,
    a_scale: Tensor,
    b_scale: Tensor,
    precise: bool,
) -> None:
    """Write each expert's rows of a [R, D] times its matrix of b, [width, D], transposed, into out [R, width].

    Args:
        b: the matrices of all experts, one below the other, in any shape.
        bias: [E, width] or None.
        a_scale, b_scale: the inverse scales of a and b, FP32 [E] each.
        precise: sums leave the tensor cores, which keep fewer bits, every 128 terms.
    """
    depth = a.shape[1]
    width = out.shape[1]
    # Transposed weights come with the shape of the weights.
    b = b.view(groups.experts * width, depth)
    with torch.cuda.device_of(out):
        _rows_kernel[(programs(out),)](
            a=_described(a, BLOCK_M),
            b=_described(b, BLOCK_N),
            first=groups.first,
            tiles=groups.tiles(BLOCK_M),
            a_scale=a_scale,
            b_scale=b_scale,
            bias=bias,
            out=out,
            width=width,
            depth=depth,
            count=groups.experts,
            STAGES=STAGES,
            PRECISE=precise,
            num_warps=WARPS,
            enable_fp_fusion=False,  # cuBLAS rounds the scaled sum before it adds the bias
        )


def hopper_weights_from(
    a: Tensor,
    b: Tensor,
    groups: Groups,
    out: Tensor,
    *,
    a_scale: Tensor,
    b_scale: Tensor,
    precise: bool,
) -> None:
    """Write each expert's rows of a, transposed, times its rows of b into out [E, height, width].

    a [height, P] and b [width, P] are transposed copies (`FP8Matrices.transposed`); see `hopper_rows_times`.
    """
    experts, height, width = out.shape
    with torch.cuda.device_of(out):
        _weights_kernel[(programs(out),)](
            a=_described(a, BLOCK_M),
            b=_described(b, BLOCK_N),
            first=groups.first,
            aligned_first=groups.aligned.first,
            a_scale=a_scale,
            b_scale=b_scale,
            out=out,
            height=height,
            width=width,
            count=experts,
            STAGES=STAGES,
            PRECISE=precise,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )


def programs(out: Tensor) -> int:
    """Return how many programs divide the tiles of a product: one per multiprocessor of the device of `out`.

    Of several processes each has more: collectives beside the product take some multiprocessors, and a program that
    starts only when another ends would double its time.
    """
    count = torch.cuda.get_device_properties(out.device).multi_processor_count
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return count * SHARES if several else count


def _described(data: Tensor, rows: int) -> TensorDescriptor:
    """Return the copy engine's description of a matrix, of which it copies [rows, BLOCK_K] at a time."""
    block = [rows, BLOCK_K]
    layout = gl.NVMMASharedLayout.get_default_for(block, FORMATS[data.dtype])
    return TensorDescriptor(data, list(data.shape), [data.shape[1], 1], block, layout)
