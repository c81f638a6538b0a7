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
from te_models.kernels.grouped_gemm_triton import ABREAST, Tiles, by_tma, own_tile, store_rows
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
    # strides of the scales of b
    step_n,
    step_k,
    blocks,
    EXPERTS: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    DEEP: tl.constexpr,
    ABREAST: tl.constexpr,
):
    """Multiply as grouped_gemm_triton's kernel does; scales of b are step_n and step_k apart, experts `blocks`."""
    e, begin, rows, m, n = own_tile(first, tiles, width, count, EXPERTS, HIGH, WIDE, ABREAST)
    if e >= count:
        return
    row = begin.to(tl.int32) + m * HIGH
    i = m * HIGH + tl.arange(0, HIGH)
    left_inv = a_inv + begin + i
    right_inv = b_inv + e * blocks + (n * WIDE // DEEP) * step_n
    total = tl.zeros([HIGH, WIDE], tl.float32)
    for start in range(0, depth, DEEP):
        left = a.load([row, start])
        right = b.load([e * width + n * WIDE, start]).T
        by = tl.load(left_inv, i < rows, 0.0) * tl.load(right_inv)
        total += tl.dot(left, right) * by[:, None]
        left_inv += most
        right_inv += step_k
    store_rows(total, None, None, bias, out, e, begin, rows, m, n, width, HIGH, WIDE)


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
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    DEEP: tl.constexpr,
    ABREAST: tl.constexpr,
):
    """Write a tile of the gradient of one expert's weight: the sum over its rows, in FP8 with scales of blocks."""
    high = tl.cdiv(height, HIGH)
    across = tl.cdiv(width, WIDE)
    e = tl.program_id(0) // (high * across)
    tile = tl.program_id(0) % (high * across)
    m = tile % high
    n = tile // high
    rows = (tl.load(first + e + 1) - tl.load(first + e)).to(tl.int32)
    aligned_begin = tl.load(aligned_first + e)
    i = m * HIGH + tl.arange(0, HIGH)
    j = n * WIDE + tl.arange(0, WIDE)
    left_inv = a_inv + aligned_begin // DEEP * height + i
    right_inv = b_inv + aligned_begin // DEEP * width + j
    at = aligned_begin.to(tl.int32)
    total = tl.zeros([HIGH, WIDE], tl.float32)
    for start in range(0, rows, DEEP):  # zeros follow the last row
        one = a.load([m * HIGH, at + start])
        other = b.load([n * WIDE, at + start]).T
        part = tl.dot(one, other)
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
    steps = b.scale_inv.stride()
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
            step_n=steps[2 if backward else 1],
            step_k=steps[1 if backward else 2],
            blocks=steps[0],
            EXPERTS=triton.next_power_of_2(count),
            **_options(tiles),
        )
    return out


def block_weights_from(
    a: Blocks, b: Blocks, groups: Groups, dtype: torch.dtype, tiles: Tiles | None = None
) -> Tensor:
    """Return each expert's rows of a [R, height], transposed, times its rows of b [R, width]: [E, height, width]."""
    assert a.transposed is not None and b.transposed is not None
    height, width = len(a.transposed), len(b.transposed)
    out = torch.empty(groups.experts, height, width, dtype=dtype, device=a.transposed.device)
    operands = a.transposed, a.transposed_inv, b.transposed, b.transposed_inv
    if tiles is None and _on_hopper(*operands):
        hopper_block_weights_from(*operands, groups, out)
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
    there = [one for one in operands if one is not None]
    return all(one.is_cuda for one in there) and by_tma(*there)


def _described(data: Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor(
        data.view(torch.float8_e4m3fn), list(data.shape), [data.shape[1], 1], block
    )


def _options(tiles: Tiles) -> dict[str, Any]:
    return dict(
        HIGH=tiles.height,
        WIDE=tiles.width,
        DEEP=tiles.depth,
        ABREAST=ABREAST,
        num_stages=tiles.stages,
        num_warps=tiles.warps,
    )
