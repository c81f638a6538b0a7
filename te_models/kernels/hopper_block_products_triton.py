"""The products of expert_block_products_triton.py on Hopper, in Gluon, with the same bits.

hopper_products_triton.py explains how the copying warp and the groups that multiply share rooms of shared memory.

Groups of four warps share a tile by its rows: each multiplies 64 of them, and scales and adds while others are in the
tensor cores.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from te_models.kernels.groups import Groups
from te_models.kernels.hopper_products_triton import (
    WARPS,
    barriers,
    first_tile,
    layout_of_sums,
    next_tile,
    programs,
    store_sum,
    weight_tile,
)

PARTS = 3  # groups of warps that multiply
ROWS = 64  # of a tile, per group
BLOCK_N = 128  # columns of a tile
BLOCK_K = 128  # terms of a sum, which share a scale
STAGES = 4  # copies on their way, 40 KiB each
# Of a thread of the second and the third group, and of the copying warp.
REGISTERS = gl.constexpr((160, 160, 24))
OPTIONS: dict[str, Any] = dict(PARTS=PARTS, STAGES=STAGES, num_warps=WARPS)


@gluon.jit
def _numbers(room, LAYOUT: gl.constexpr):
    """Return the numbers FP32 [SIZE] of a room [1, SIZE] in shared memory that a copy has filled."""
    SIZE: gl.constexpr = room.shape[1]
    line = room._reinterpret(gl.float32, [SIZE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return line.load(LAYOUT)


@gluon.jit
def _copy_rows(
    a, b, a_inv, first, tiles, width, depth, count, a_room, b_room, a_inv_room, full, empty
):
    """Copy what `_multiply_rows` multiplies; the arguments are explained in `_rows_kernel`.

    Rooms of a and its scales are [STAGES * PARTS, ROWS, BLOCK_K] and [STAGES * PARTS, 1, ROWS], one per group of warps;
    b has [STAGES, BLOCK_N, BLOCK_K], which all groups read.
    """
    STAGES: gl.constexpr = b_room.shape[0]
    PARTS: gl.constexpr = a_room.shape[0] // STAGES
    ROWS: gl.constexpr = a_room.shape[1]
    BLOCK_N: gl.constexpr = b_room.shape[1]
    BLOCK_K: gl.constexpr = a_room.shape[2]
    SIZE: gl.constexpr = PARTS * (a.block_type.nbytes + a_inv.block_type.nbytes)
    tiles_n = gl.cdiv(width, BLOCK_N)
    tile, last, e, before, end = first_tile(tiles, count, tiles_n)
    step = 0
    while tile < last:
        e, before, end, m, n = next_tile(tile, e, before, end, tiles, tiles_n)
        row = gl.load(first + e).to(gl.int32) + m * (PARTS * ROWS)
        column = e * width + n * BLOCK_N
        for start in range(0, depth, BLOCK_K):
            s = step % STAGES
            filled = full.index(s)
            mbarrier.wait(empty.index(s), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(filled, SIZE + b.block_type.nbytes)
            tma.async_copy_global_to_shared(b, [column, start], filled, b_room.index(s))
            for part in gl.static_range(PARTS):
                i = row + part * ROWS
                own_room = s * PARTS + part
                tma.async_copy_global_to_shared(a, [i, start], filled, a_room.index(own_room))
                line = a_inv_room.index(own_room)
                tma.async_copy_global_to_shared(a_inv, [start // BLOCK_K, i], filled, line)
            step += 1
        tile += gl.num_programs(0)


@gluon.jit
def _multiply_rows(
    part,
    first,
    tiles,
    b_inv,
    steps,
    bias,
    out,
    width,
    depth,
    count,
    a_room,
    b_room,
    a_inv_room,
    full,
    empty,
):
    """Multiply some rows of each tile, of which every expert has whole ones for its rows."""
    STAGES: gl.constexpr = b_room.shape[0]
    PARTS: gl.constexpr = a_room.shape[0] // STAGES
    ROWS: gl.constexpr = a_room.shape[1]
    BLOCK_N: gl.constexpr = b_room.shape[1]
    BLOCK_K: gl.constexpr = a_room.shape[2]
    SUM: gl.constexpr = layout_of_sums(BLOCK_N)
    tiles_n = gl.cdiv(width, BLOCK_N)
    tile, last, e, before, end = first_tile(tiles, count, tiles_n)
    step = 0
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, SUM)
    while tile < last:
        e, before, end, m, n = next_tile(tile, e, before, end, tiles, tiles_n)
        total = gl.zeros([ROWS, BLOCK_N], gl.float32, SUM)
        right_inv = b_inv + e * steps[0] + n * BLOCK_N // BLOCK_K * steps[1]
        for _ in range(0, depth, BLOCK_K):
            s = step % STAGES
            own_room = s * PARTS + part
            by = gl.load(right_inv)
            right_inv += steps[2]
            mbarrier.wait(full.index(s), (step // STAGES) & 1)
            left = a_room.index(own_room)
            right = b_room.index(s).permute((1, 0))
            product = warpgroup_mma(left, right, zero, use_acc=False, is_async=True)
            of_rows = _numbers(a_inv_room.index(own_room), gl.SliceLayout(1, SUM)) * by
            product = warpgroup_mma_wait(0, deps=[product])
            mbarrier.arrive(empty.index(s), count=1)
            total += product * of_rows[:, None]
            step += 1
        begin = gl.load(first + e)
        rows = (gl.load(first + e + 1) - begin).to(gl.int32)
        i = (m * PARTS + part) * ROWS
        store_sum(total, None, bias, e, out + begin * width, rows, i, n * BLOCK_N, width)
        tile += gl.num_programs(0)


@gluon.jit
def _rows_kernel(
    # descriptors of the rows of all experts, of their matrices [width, depth] below each other, and of the rows' scales
    a,
    b,
    a_inv,
    # where each expert begins, int64 [E + 1], and how many tiles end with it, int64 [E]
    first,
    tiles,
    # inverse scales of the matrices, and their strides over experts, rows and columns
    b_inv,
    step_e,
    step_n,
    step_k,
    # [E, width] or None, and the result [R, width]
    bias,
    out,
    # outputs, length of the sum, and E
    width,
    depth,
    count,
    PARTS: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Write tiles of the rows of experts times their matrices, in FP8 with scales of blocks."""
    a_room = gl.allocate_shared_memory(a.dtype, [STAGES * PARTS] + a.block_type.shape, a.layout)
    b_room = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_type.shape, b.layout)
    a_inv_room = gl.allocate_shared_memory(
        a_inv.dtype, [STAGES * PARTS] + a_inv.block_type.shape, a_inv.layout
    )
    full, empty = barriers(STAGES, PARTS)
    steps = (step_e, step_n, step_k)
    # Each partition and its arguments: one of four warps, which is this program's own, others, and a warp that copies.
    # fmt: off
    gl.warp_specialize(
        [
            (
                _multiply_rows,
                (
                    0, first, tiles, b_inv, steps, bias, out, width, depth, count,
                    a_room, b_room, a_inv_room, full, empty,
                ),
            ),
            (
                _multiply_rows,
                (
                    1, first, tiles, b_inv, steps, bias, out, width, depth, count,
                    a_room, b_room, a_inv_room, full, empty,
                ),
            ),
            (
                _multiply_rows,
                (
                    2, first, tiles, b_inv, steps, bias, out, width, depth, count,
                    a_room, b_room, a_inv_room, full, empty,
                ),
            ),
            (
                _copy_rows,
                (a, b, a_inv, first, tiles, width, depth, count, a_room, b_room, a_inv_room, full, empty),
            ),
        ],
        [4, 4, 1],
        REGISTERS,
    )
    # fmt: on


@gluon.jit
def _copy_transposed(
    a,
    b,
    a_inv,
    b_inv,
    first,
    aligned_first,
    height,
    width,
    count,
    a_room,
    b_room,
    a_inv_room,
    b_inv_room,
    full,
    empty,
):
    """Copy what `_multiply_transposed` multiplies.

    Rooms are as in `_copy_rows`; `b_inv_room` are those of the inverse scales of b.
    """
    STAGES: gl.constexpr = b_room.shape[0]
    PARTS: gl.constexpr = a_room.shape[0] // STAGES
    ROWS: gl.constexpr = a_room.shape[1]
    BLOCK_N: gl.constexpr = b_room.shape[1]
    BLOCK_K: gl.constexpr = a_room.shape[2]
    LEFT: gl.constexpr = PARTS * (a.block_type.nbytes + a_inv.block_type.nbytes)
    SIZE: gl.constexpr = LEFT + b.block_type.nbytes + b_inv.block_type.nbytes
    tiles_m = gl.cdiv(height, PARTS * ROWS)
    tiles_n = gl.cdiv(width, BLOCK_N)
    step = 0
    for tile in range(gl.program_id(0), count * tiles_m * tiles_n, gl.num_programs(0)):
        e, m, n, rows = weight_tile(tile, first, tiles_m, tiles_n)
        aligned_begin = gl.load(aligned_first + e).to(gl.int32)
        for start in range(0, rows, BLOCK_K):
            s = step % STAGES
            at = aligned_begin + start
            filled = full.index(s)
            mbarrier.wait(empty.index(s), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(filled, SIZE)
            j = n * BLOCK_N
            tma.async_copy_global_to_shared(b, [j, at], filled, b_room.index(s))
            tma.async_copy_global_to_shared(b_inv, [at // BLOCK_K, j], filled, b_inv_room.index(s))
            for part in gl.static_range(PARTS):
                i = (m * PARTS + part) * ROWS
                own_room = s * PARTS + part
                tma.async_copy_global_to_shared(a, [i, at], filled, a_room.index(own_room))
                line = a_inv_room.index(own_room)
                tma.async_copy_global_to_shared(a_inv, [at // BLOCK_K, i], filled, line)
            step += 1


@gluon.jit
def _multiply_transposed(
    part, first, out, height, width, count, a_room, b_room, a_inv_room, b_inv_room, full, empty
):
    """Multiply some rows of each tile; a sum runs over an expert's rows, and the zeros behind them."""
    STAGES: gl.constexpr = b_room.shape[0]
    PARTS: gl.constexpr = a_room.shape[0] // STAGES
    ROWS: gl.constexpr = a_room.shape[1]
    BLOCK_N: gl.constexpr = b_room.shape[1]
    BLOCK_K: gl.constexpr = a_room.shape[2]
    SUM: gl.constexpr = layout_of_sums(BLOCK_N)
    tiles_m = gl.cdiv(height, PARTS * ROWS)
    tiles_n = gl.cdiv(width, BLOCK_N)
    step = 0
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, SUM)
    for tile in range(gl.program_id(0), count * tiles_m * tiles_n, gl.num_programs(0)):
        e, m, n, rows = weight_tile(tile, first, tiles_m, tiles_n)
        total = gl.zeros([ROWS, BLOCK_N], gl.float32, SUM)
        for _ in range(0, rows, BLOCK_K):
            s = step % STAGES
            own_room = s * PARTS + part
            mbarrier.wait(full.index(s), (step // STAGES) & 1)
            left = a_room.index(own_room)
            right = b_room.index(s).permute((1, 0))
            product = warpgroup_mma(left, right, zero, use_acc=False, is_async=True)
            of_rows = _numbers(a_inv_room.index(own_room), gl.SliceLayout(1, SUM))
            product = warpgroup_mma_wait(0, deps=[product])
            of_columns = _numbers(b_inv_room.index(s), gl.SliceLayout(0, SUM))
            total += product * (of_rows[:, None] * of_columns[None, :])
            mbarrier.arrive(empty.index(s), count=1)
            step += 1
        z = out + e.to(gl.int64) * height * width
        i = (m * PARTS + part) * ROWS
        store_sum(total, None, None, e, z, height, i, n * BLOCK_N, width)


@gluon.jit
def _weights_kernel(
    # descriptors of both transposed copies, [height, pitch] and [width, pitch], and of their scales
    a,
    b,
    a_inv,
    b_inv,
    # where each expert begins, in rows and in the transposed copies
    first,
    aligned_first,
    # gradient of the weights [E, height, width]
    out,
    height,
    width,
    count,
    PARTS: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Write tiles of the gradients of experts' weights, in FP8 with scales of blocks."""
    a_room = gl.allocate_shared_memory(a.dtype, [STAGES * PARTS] + a.block_type.shape, a.layout)
    b_room = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_type.shape, b.layout)
    a_inv_room = gl.allocate_shared_memory(
        a_inv.dtype, [STAGES * PARTS] + a_inv.block_type.shape, a_inv.layout
    )
    b_inv_room = gl.allocate_shared_memory(
        b_inv.dtype, [STAGES] + b_inv.block_type.shape, b_inv.layout
    )
    full, empty = barriers(STAGES, PARTS)
    # fmt: off
    gl.warp_specialize(
        [
            (
                _multiply_transposed,
                (0, first, out, height, width, count, a_room, b_room, a_inv_room, b_inv_room, full, empty),
            ),
            (
                _multiply_transposed,
                (1, first, out, height, width, count, a_room, b_room, a_inv_room, b_inv_room, full, empty),
            ),
            (
                _multiply_transposed,
                (2, first, out, height, width, count, a_room, b_room, a_inv_room, b_inv_room, full, empty),
            ),
            (
                _copy_transposed,
                (
                    a, b, a_inv, b_inv, first, aligned_first, height, width, count,
                    a_room, b_room, a_inv_room, b_inv_room, full, empty,
                ),
            ),
        ],
        [4, 4, 1],
        REGISTERS,
    )
    # fmt: on


def hopper_block_rows_times(
    a: Tensor,
    a_inv: Tensor,
    b: Tensor,
    b_inv: Tensor,
    groups: Groups,
    bias: Tensor | None,
    out: Tensor,
    *,
    backward: bool,
) -> None:
    """Write each expert's rows of a [R, D] times its matrix of b [E * width, D], transposed, into out [R, width].

    Args:
        a_inv: the inverse scales of the rows, FP32 [D / 128, R].
        b_inv: the inverse scales of the weights [E, O / 128, K / 128], whichever of the two the sum runs along.
        bias: [E, width] or None.
        backward: whether the sum runs along O.
    """
    # The sum runs along the columns of the weights, or in backward along their rows.
    step_e, row_step, column_step = b_inv.stride()
    if backward:
        step_n = column_step
        step_k = row_step
    else:
        step_n = row_step
        step_k = column_step
    with torch.cuda.device_of(out):
        _rows_kernel[(programs(out),)](
            a=_described(a, ROWS),
            b=_described(b, BLOCK_N),
            a_inv=_described_line(a_inv, ROWS),
            first=groups.first,
            tiles=groups.tiles(PARTS * ROWS),
            b_inv=b_inv,
            step_e=step_e,
            step_n=step_n,
            step_k=step_k,
            bias=bias,
            out=out,
            width=out.shape[1],
            depth=a.shape[1],
            count=groups.experts,
            **OPTIONS,
        )


def hopper_block_weights_from(
    a: Tensor,
    a_inv: Tensor,
    b: Tensor,
    b_inv: Tensor,
    groups: Groups,
    out: Tensor,
) -> None:
    """Write each expert's rows of a, transposed, times its rows of b into out [E, height, width].

    a [height, P] and b [width, P] are transposed copies, a_inv [P / 128, height] and b_inv their inverse scales
    (expert_blocks_triton.Blocks).
    """
    experts, height, width = out.shape
    with torch.cuda.device_of(out):
        _weights_kernel[(programs(out),)](
            a=_described(a, ROWS),
            b=_described(b, BLOCK_N),
            a_inv=_described_line(a_inv, ROWS),
            b_inv=_described_line(b_inv, BLOCK_N),
            first=groups.first,
            aligned_first=groups.aligned.first,
            out=out,
            height=height,
            width=width,
            count=experts,
            **OPTIONS,
        )


def _described(data: Tensor, rows: int) -> TensorDescriptor:
    """Return the copy engine's description of bytes in E4M3, of which it copies `rows` rows and BLOCK_K columns."""
    block = [rows, BLOCK_K]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.float8e4nv)
    data = data.view(torch.float8_e4m3fn)
    return TensorDescriptor(data, list(data.shape), [data.shape[1], 1], block, layout)


def _described_line(scales: Tensor, columns: int) -> TensorDescriptor:
    """Return the copy engine's description of FP32 numbers, of which it copies `columns` of a row."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor(scales, list(scales.shape), [scales.shape[1], 1], [1, columns], layout)
