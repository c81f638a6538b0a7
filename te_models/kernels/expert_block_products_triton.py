"""The products of all experts' FP8 matrices with a scale per block (expert_blocks_triton.py), in one launch each.

Tensor cores add 128 elements at a time; each such sum is multiplied by the scales of its two blocks and added in FP32,
as cuBLAS does for Float8BlockScaling.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from te_models.kernels.expert_blocks_triton import Blocks, WeightBlocks
from te_models.kernels.grouped_gemm_kernels_triton import own_tile, store_rows
from te_models.kernels.grouped_gemm_triton import GROUP_M, Tiles, by_tma
from te_models.kernels.groups import Groups
from te_models.kernels.hopper_block_products_triton import (
    hopper_block_rows_times,
    hopper_block_weights_from,
)

# Two or three programs per multiprocessor: one multiplies by scales and adds while another is in its tensor cores.
TILES = Tiles(64, 128, 128, 3, 4)


@triton.jit
def _rows_kernel(
    # descriptors of rows [R, K] and of the matrices of all experts below each other, for the copy engine
    a,
    b,
    # inverse scales of blocks
    a_inv,
    b_inv,
    # where each expert begins, int64 [E + 1], and how many tiles end with it, int64 [E]
    first,
    tiles,
    # [E, N] or None, and the result [R, N]
    bias,
    out,
    # N, K, E and R
    width,
    depth,
    count,
    most,
    # strides of the scales of b over columns of the result, terms of the sum, and experts
    step_n,
    step_k,
    step_e,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Write a tile of one expert's rows times its matrix, in FP8 with scales of blocks; see `block_rows_times`."""
    e, begin, rows, m, n = own_tile(first, tiles, width, count, EXPERTS, BLOCK_M, BLOCK_N, GROUP_M)
    if e >= count:
        return
    row = begin.to(tl.int32) + m * BLOCK_M
    i = m * BLOCK_M + tl.arange(0, BLOCK_M)
    left_inv = a_inv + begin + i
    right_inv = b_inv + e * step_e + (n * BLOCK_N // BLOCK_K) * step_n
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, depth, BLOCK_K):
        left = a.load([row, start])
        right = b.load([e * width + n * BLOCK_N, start]).T
        by = tl.load(left_inv, i < rows, 0.0) * tl.load(right_inv)
        total += tl.dot(left, right) * by[:, None]
        left_inv += most
        right_inv += step_k
    store_rows(total, None, None, bias, out, e, begin, rows, m, n, width, BLOCK_M, BLOCK_N)


@triton.jit
def _weights_kernel(
    # descriptors of both transposed copies, [M, rows] and [N, rows]
    a,
    b,
    # inverse scales of blocks
    a_inv,
    b_inv,
    # where each expert begins, in rows and in the transposed copies
    first,
    aligned_first,
    # gradient of the weights [E, M, N]
    out,
    height,
    width,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Write a tile of the gradient of one expert's weight: the sum over its rows, in FP8 with scales of blocks."""
    tiles_m = tl.cdiv(height, BLOCK_M)
    tiles_n = tl.cdiv(width, BLOCK_N)
    e = tl.program_id(0) // (tiles_m * tiles_n)
    tile = tl.program_id(0) % (tiles_m * tiles_n)
    m = tile % tiles_m
    n = tile // tiles_m
    rows = (tl.load(first + e + 1) - tl.load(first + e)).to(tl.int32)
    aligned_begin = tl.load(aligned_first + e)
    i = m * BLOCK_M + tl.arange(0, BLOCK_M)
    j = n * BLOCK_N + tl.arange(0, BLOCK_N)
    left_inv = a_inv + aligned_begin // BLOCK_K * height + i
    right_inv = b_inv + aligned_begin // BLOCK_K * width + j
    at = aligned_begin.to(tl.int32)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, rows, BLOCK_K):  # zeros follow the last row
        left = a.load([m * BLOCK_M, at + start])
        right = b.load([n * BLOCK_N, at + start]).T
        part = tl.dot(left, right)
        by = tl.load(left_inv, i < height, 0.0)
        total += part * (by[:, None] * tl.load(right_inv, j < width, 0.0)[None, :])
        left_inv += height
        right_inv += width
    z = out + (e.to(tl.int64) * height + i[:, None]) * width + j[None, :]
    tl.store(z, total.to(out.dtype.element_ty), (i < height)[:, None] & (j < width)[None, :])


def block_rows_times(
    a: Blocks,
    b: WeightBlocks,
    groups: Groups,
    bias: Tensor | None = None,
    *,
    backward: bool,
    dtype: torch.dtype,
    tiles: Tiles | None = None,
) -> Tensor:
    """Return each expert's rows of a [R, K] times its weight [O, K], transposed, plus its row of `bias`: [R, O].

    With `backward` times the weight [K, O] itself, whose transposed copy is read.
    """
    matrix = b.transposed if backward else b.data
    assert a.data is not None and matrix is not None
    count = groups.experts
    depth = a.data.shape[1]
    width = len(matrix) // count
    out = torch.empty(groups.most, width, dtype=dtype, device=a.data.device)
    if tiles is None and _on_hopper(a.data, a.scale_inv, matrix):
        assert a.scale_inv is not None
        hopper_block_rows_times(
            a.data, a.scale_inv, matrix, b.scale_inv, groups, bias, out, backward=backward
        )
        return out
    tiles = tiles or TILES
    # The sum runs along the columns of the weights, or in backward along their rows.
    expert_step, row_step, column_step = b.scale_inv.stride()
    if backward:
        step_n = column_step
        step_k = row_step
    else:
        step_n = row_step
        step_k = column_step
    grid = (groups.most_tiles(tiles.height) * triton.cdiv(width, tiles.width),)
    with torch.cuda.device_of(out):
        _rows_kernel[grid](
            a=_described(a.data, [tiles.height, tiles.depth]),
            b=_described(matrix, [tiles.width, tiles.depth]),
            a_inv=a.scale_inv,
            b_inv=b.scale_inv,
            first=groups.first,
            tiles=groups.tiles(tiles.height),
            bias=bias,
            out=out,
            width=width,
            depth=depth,
            count=count,
            most=groups.most,
            step_n=step_n,
            step_k=step_k,
            step_e=expert_step,
            EXPERTS=triton.next_power_of_2(count),
            **_options(tiles),
        )
    return out


def block_weights_from(
    a: Blocks, b: Blocks, groups: Groups, dtype: torch.dtype, tiles: Tiles | None = None
) -> Tensor:
    """Return each expert's rows of a [R, height], transposed, times its rows of b [R, width]: [E, height, width]."""
    assert a.transposed is not None and b.transposed is not None
    height = len(a.transposed)
    width = len(b.transposed)
    out = torch.empty(groups.experts, height, width, dtype=dtype, device=a.transposed.device)
    if tiles is None and _on_hopper(a.transposed, a.transposed_inv, b.transposed, b.transposed_inv):
        assert a.transposed_inv is not None and b.transposed_inv is not None
        hopper_block_weights_from(
            a.transposed, a.transposed_inv, b.transposed, b.transposed_inv, groups, out
        )
        return out
    tiles = tiles or TILES
    grid = (groups.experts * triton.cdiv(height, tiles.height) * triton.cdiv(width, tiles.width),)
    with torch.cuda.device_of(out):
        _weights_kernel[grid](
            a=_described(a.transposed, [tiles.height, tiles.depth]),
            b=_described(b.transposed, [tiles.width, tiles.depth]),
            a_inv=a.transposed_inv,
            b_inv=b.transposed_inv,
            first=groups.first,
            aligned_first=groups.aligned.first,
            out=out,
            height=height,
            width=width,
            **_options(tiles),
        )
    return out


def _on_hopper(*operands: Tensor | None) -> bool:
    """Return whether kernels in Gluon can multiply these matrices."""
    tensors = [operand for operand in operands if operand is not None]
    return all(tensor.is_cuda for tensor in tensors) and by_tma(*tensors)


def _described(data: Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor(
        data.view(torch.float8_e4m3fn), list(data.shape), [data.shape[1], 1], block
    )


def _options(tiles: Tiles) -> dict[str, Any]:
    return dict(
        BLOCK_M=tiles.height,
        BLOCK_N=tiles.width,
        BLOCK_K=tiles.depth,
        GROUP_M=GROUP_M,
        num_stages=tiles.stages,
        num_warps=tiles.warps,
    )
