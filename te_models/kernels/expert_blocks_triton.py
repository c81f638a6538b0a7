"""FP8 of experts' rows and weights with a scale per block (Float8BlockScaling).

Rows have a scale per 1 x 128 elements along the contraction, so that each copy has its own: the straight one along the
columns, the transposed one along the rows of its expert, from its first row on. Weights have one per 128 x 128
elements, which both copies share. Scales are powers of two, and everything is E4M3; the bits are Transformer
Engine's. Each expert has a multiple of 4 rows. Their products are in expert_block_products_triton.py.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_models.kernels.expert_block_rows_triton import (
    SIZE,
    block_scale,
    copied_blocks,
    inverse_of,
)
from te_models.kernels.expert_cast_triton import (
    CastTile,
    Matrices,
    find_matrix,
    load_rows,
    room_for_transposed_rows,
    total_sums,
)
from te_models.kernels.expert_hidden_triton import Activation, hidden_values
from te_models.kernels.fp8_tiles_triton import store_fp8
from te_models.kernels.groups import Groups

WARPS = 16  # of a cast of weights: with 8, registers leave room for one program per multiprocessor
# Rows and columns are whole blocks of the copy that a tile writes. Small programs hide each other's wait for memory,
# which is why each copy has a launch of its own.
CAST = CastTile(64, SIZE, 4)
STRAIGHT = CastTile(32, SIZE, 4)  # of the activation
TRANSPOSED = CastTile(SIZE, 64, 4)


class Blocks(NamedTuple):
    """FP8 of rows, uint8, and FP32 factors from data to values.

    data [R, K], scale_inv [K / 128, R]; transposed [K, P] with P = Groups.aligned.most, in which an expert's rows begin
    at a multiple of 128 and zeros follow the last one, transposed_inv [P / 128, K]. Either pair may be None.
    """

    data: Tensor | None
    scale_inv: Tensor | None
    transposed: Tensor | None
    transposed_inv: Tensor | None


class WeightBlocks(NamedTuple):
    """FP8 of the experts' weights [O, K], uint8: data [E * O, K] or None, transposed [E * K, O] or None.

    scale_inv FP32 [E, O / 128, K / 128], rounded up.
    """

    data: Tensor | None
    transposed: Tensor | None
    scale_inv: Tensor


@triton.jit
def _along(values, group, part: tl.constexpr, first, rows, factors, stride, column):
    """Return values by their scales of 1 x 128, whose inverse is noted for row 4 * group + part."""
    scale = block_scale(tl.max(tl.abs(values), 1))
    row = 4 * group + part
    tl.store(factors + column * stride + first + row, inverse_of(scale), row < rows)
    return values * scale[:, None]


@triton.jit
def store_blocks(
    # FP32 tiles [groups, columns]: the first to fourth rows of groups of four
    a,
    b,
    c,
    d,
    # the groups and columns of the tile, and how many rows and columns the expert has
    group,
    j,
    rows,
    columns,
    # columns of the output; first row of the expert in the straight and in the transposed copy
    width,
    begin,
    aligned_begin,
    # rows of all experts: the stride of scale_inv
    count,
    # straight copy with a scale per 1 x 128, and transposed copy with one per 128 x 1; None: not written
    data,
    scale_inv,
    transposed,
    transposed_inv,
    # length of a row of the transposed copy, and the first column of the output
    pitch,
    offset,
):
    """Store a tile of 128 rows and columns j, of a matrix of `width` columns from column `offset` on."""
    if data is not None:
        block = (offset + tl.min(j, 0)) // 128
        e = _along(a, group, 0, begin, rows, scale_inv, count, block)
        f = _along(b, group, 1, begin, rows, scale_inv, count, block)
        g = _along(c, group, 2, begin, rows, scale_inv, count, block)
        h = _along(d, group, 3, begin, rows, scale_inv, count, block)
        out = data + begin * width + offset
        store_fp8(
            a=e,
            b=f,
            c=g,
            d=h,
            scale=1.0,
            group=group,
            j=j,
            rows=rows,
            columns=columns,
            data=out,
            transposed=None,
            stride=width,
            E5M2=False,
        )
    if transposed is not None:
        largest = tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))
        scale = block_scale(tl.max(largest, 0))
        block = (aligned_begin + 4 * tl.min(group, 0)) // 128
        at = transposed_inv + block * width + offset + j
        tl.store(at, inverse_of(scale), (j < columns) & (tl.min(group, 0) * 4 < rows))
        by = scale[None, :]
        out = transposed + aligned_begin + offset.to(tl.int64) * pitch
        store_fp8(
            a=a * by,
            b=b * by,
            c=c * by,
            d=d * by,
            scale=1.0,
            group=group,
            j=j,
            rows=rows,
            columns=columns,
            data=None,
            transposed=out,
            stride=width,
            E5M2=False,
            transposed_stride=pitch,
            transposed_rows=tl.cdiv(rows, 128) * 128,
        )


@triton.jit
def _cast_kernel(
    # rows of all experts: `x` or tokens of it by `source` and `factor` (see Matrices); there are `tokens` tokens
    x,
    source,
    factor,
    tokens,
    # where each expert begins, int64 [E + 1], and how many tiles end with it, int64 [E]
    first,
    tiles,
    # where each expert begins in the transposed copy
    aligned_first,
    # straight copy with a scale per 1 x 128, and transposed copy with one per 128 x 1; None: not written
    data,
    scale_inv,
    transposed,
    transposed_inv,
    pitch,
    # sums of the rows of each tile, for the gradient of a bias, or None
    sums,
    # K, E, and rows of all experts
    columns,
    count,
    most,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Cast a tile of the rows of one expert to FP8 with a scale per block, in one or both copies."""
    e, address, begin, rows, group = find_matrix(
        tile=tl.program_id(0),
        data=x,
        source=source,
        first=first,
        tiles=tiles,
        columns=columns,
        count=count,
        EXPERTS=EXPERTS,
        ROWS=ROWS,
    )
    if source is not None:
        source += begin
    if factor is not None:
        factor += begin
    group += tl.arange(0, ROWS // 4)
    i = 4 * group
    j = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    a = load_rows(address, source, factor, tokens, i, j, rows, columns)
    b = load_rows(address, source, factor, tokens, i + 1, j, rows, columns)
    c = load_rows(address, source, factor, tokens, i + 2, j, rows, columns)
    d = load_rows(address, source, factor, tokens, i + 3, j, rows, columns)
    if sums is not None:
        at = sums + tl.program_id(0).to(tl.int64) * columns + j
        tl.store(at, tl.sum((a + b) + (c + d), 0), j < columns)
    aligned_begin = tl.multiple_of(tl.load(aligned_first + e), 128)
    none = tl.zeros([], tl.int64)
    store_blocks(
        a=a,
        b=b,
        c=c,
        d=d,
        group=group,
        j=j,
        rows=rows,
        columns=columns,
        width=columns,
        begin=begin,
        aligned_begin=aligned_begin,
        count=most,
        data=data,
        scale_inv=scale_inv,
        transposed=transposed,
        transposed_inv=transposed_inv,
        pitch=pitch,
        offset=none,
    )


@triton.jit
def _hidden_kernel(
    # [R, 2F] = [gate | up], the token of each row (None: no row has to be zero), and how many tokens there are
    gate_up,
    token,
    tokens,
    # where each expert begins, int64 [E + 1], and how many tiles end with it, int64 [E]
    first,
    tiles,
    # uint8 [R, F] with a scale per 1 x 128
    data,
    scale_inv,
    # F, E, and rows of all experts
    columns,
    count,
    most,
    alpha,
    LIMIT: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Cast a tile of the activation of one expert's rows to FP8 with a scale per 1 x 128."""
    e, address, begin, rows, group = find_matrix(
        tile=tl.program_id(0),
        data=gate_up,
        source=None,
        first=first,
        tiles=tiles,
        columns=2 * columns,
        count=count,
        EXPERTS=EXPERTS,
        ROWS=ROWS,
    )
    if token is not None:
        token += begin
    group += tl.arange(0, ROWS // 4)
    i = 4 * group
    j = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    a = hidden_values(address, token, tokens, i, j, rows, columns, alpha, LIMIT)
    b = hidden_values(address, token, tokens, i + 1, j, rows, columns, alpha, LIMIT)
    c = hidden_values(address, token, tokens, i + 2, j, rows, columns, alpha, LIMIT)
    d = hidden_values(address, token, tokens, i + 3, j, rows, columns, alpha, LIMIT)
    none = tl.zeros([], tl.int64)
    store_blocks(
        a=a,
        b=b,
        c=c,
        d=d,
        group=group,
        j=j,
        rows=rows,
        columns=columns,
        width=columns,
        begin=begin,
        aligned_begin=none,
        count=most,
        data=data,
        scale_inv=scale_inv,
        transposed=None,
        transposed_inv=None,
        pitch=none,
        offset=none,
    )


@triton.jit
def _weights_cast_kernel(x, places, data, transposed, scale_inv, rows, columns, SIZE: tl.constexpr):
    """Cast a block of one weight [rows, columns] to FP8 with one scale, in one or both copies."""
    e = tl.program_id(2).to(tl.int64)
    address = x + tl.multiple_of(tl.load(places + e), 8)
    group = tl.program_id(0) * (SIZE // 4) + tl.arange(0, SIZE // 4)
    i = 4 * group
    j = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    a = load_rows(address, None, None, 0, i, j, rows, columns)
    b = load_rows(address, None, None, 0, i + 1, j, rows, columns)
    c = load_rows(address, None, None, 0, i + 2, j, rows, columns)
    d = load_rows(address, None, None, 0, i + 3, j, rows, columns)
    largest = tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))
    scale = block_scale(tl.max(largest))
    block = (e * tl.num_programs(0) + tl.program_id(0)) * tl.num_programs(1) + tl.program_id(1)
    tl.store(scale_inv + block, inverse_of(scale))
    size = rows.to(tl.int64) * columns
    if data is not None:
        data += e * size
    if transposed is not None:
        transposed += e * size
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
        data=data,
        transposed=transposed,
        stride=columns,
        E5M2=False,
    )


def grid_of_tiles(groups: Groups, columns: int, tile: CastTile) -> tuple[int, int]:
    """Return the grid of a kernel with a program per tile: the last one of every expert may lack rows."""
    return groups.most_tiles(tile.rows), triton.cdiv(columns, tile.columns)


def sizes_of_tile(groups: Groups, tile: CastTile) -> dict[str, Any]:
    """Return the sizes that a kernel is compiled for."""
    return dict(
        EXPERTS=triton.next_power_of_2(groups.experts),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        num_warps=tile.warps,
    )


def room_for_blocks(
    groups: Groups, columns: int, device: torch.device, *, straight: bool, transpose: bool
) -> Blocks:
    """Return uninitialized memory for the straight copy of rows, the transposed one, or both, with their scales."""
    blocks = triton.cdiv(columns, SIZE)
    data = scale_inv = transposed = transposed_inv = None
    if straight:
        data = torch.empty(groups.most, columns, dtype=torch.uint8, device=device)
        scale_inv = torch.empty(blocks, groups.most, device=device)
    if transpose:
        transposed = room_for_transposed_rows(groups, columns, device)
        transposed_inv = torch.empty(groups.aligned.most // SIZE, columns, device=device)
    return Blocks(data, scale_inv, transposed, transposed_inv)


def cast_blocks(
    matrices: Matrices, *, straight: bool = True, transpose: bool = True, summed: bool = False
) -> tuple[Blocks, Tensor | None]:
    """Return rows in FP8, and with `summed` the sums of each expert's rows, [E, K] in the dtype of the rows.

    Args:
        straight, transpose: whether to write the straight copy, and the transposed one.
    """
    groups = matrices.groups
    source = matrices.source
    columns = matrices.data.shape[1]
    # Rows that copy tokens copy their FP8 too; a factor of each row would make its blocks' scales its own.
    copied = straight and not summed and source is not None and matrices.factor is None
    blocks = room_for_blocks(
        groups, columns, matrices.data.device, straight=straight and not copied, transpose=transpose
    )
    sums = None
    if copied:
        assert source is not None
        data, scale_inv = copied_blocks(matrices.data, source)
        blocks = blocks._replace(data=data, scale_inv=scale_inv)
    elif straight:
        # With both copies the launch for the transposed one sums.
        only_straight = blocks._replace(transposed=None)
        sums = _cast(matrices, only_straight, CAST, summed=summed and not transpose)
    if transpose:
        only_transposed = blocks._replace(data=None)
        sums = _cast(matrices, only_transposed, TRANSPOSED, summed=summed)
    return blocks, sums


def _cast(matrices: Matrices, blocks: Blocks, tile: CastTile, summed: bool) -> Tensor | None:
    """Write one copy; with `summed` return the sums of each expert's rows, [E, K]."""
    groups = matrices.groups
    columns = matrices.data.shape[1]
    tiles = groups.tiles(tile.rows)
    grid = grid_of_tiles(groups, columns, tile)
    sums = torch.empty(grid[0], columns, device=matrices.data.device) if summed else None
    with torch.cuda.device_of(matrices.data):
        _cast_kernel[grid](
            x=matrices.data,
            source=matrices.source,
            factor=matrices.factor,
            tokens=len(matrices.data),
            first=groups.first,
            tiles=tiles,
            aligned_first=groups.aligned.first,
            data=blocks.data,
            scale_inv=blocks.scale_inv,
            transposed=blocks.transposed,
            transposed_inv=blocks.transposed_inv,
            pitch=groups.aligned.most,
            sums=sums,
            columns=columns,
            count=groups.experts,
            most=groups.most,
            **sizes_of_tile(groups, tile),
        )
    return None if sums is None else total_sums(sums, tiles, matrices.data.dtype)


def hidden_blocks(gate_up: Tensor, groups: Groups, activation: Activation) -> Blocks:
    """Cast the activation of gate_up [R, 2F], without a transposed copy."""
    columns = gate_up.shape[1] // 2
    blocks = room_for_blocks(groups, columns, gate_up.device, straight=True, transpose=False)
    with torch.cuda.device_of(gate_up):
        _hidden_kernel[grid_of_tiles(groups, columns, STRAIGHT)](
            gate_up=gate_up,
            token=activation.token,
            tokens=activation.tokens,
            first=groups.first,
            tiles=groups.tiles(STRAIGHT.rows),
            data=blocks.data,
            scale_inv=blocks.scale_inv,
            columns=columns,
            count=groups.experts,
            most=groups.most,
            alpha=activation.alpha,
            LIMIT=activation.limit,
            **sizes_of_tile(groups, STRAIGHT),
        )
    return blocks


def cast_weight_blocks(
    weight: Tensor, places: Tensor, *, straight: bool = True, transpose: bool = True
) -> WeightBlocks:
    """Cast as many weights [O, K] as there are places (`Matrices.places`), of which `weight` is the first."""
    rows, columns = weight.shape
    count = len(places)
    room = dict(dtype=torch.uint8, device=weight.device)
    data = torch.empty(count * rows, columns, **room) if straight else None
    transposed = torch.empty(count * columns, rows, **room) if transpose else None
    grid = (triton.cdiv(rows, SIZE), triton.cdiv(columns, SIZE), count)
    scale_inv = torch.empty(count, *grid[:2], device=weight.device)
    with torch.cuda.device_of(weight):
        _weights_cast_kernel[grid](
            x=weight,
            places=places,
            data=data,
            transposed=transposed,
            scale_inv=scale_inv,
            rows=rows,
            columns=columns,
            SIZE=SIZE,
            num_warps=WARPS,
        )
    return WeightBlocks(data, transposed, scale_inv)


def blocks_fit(device: torch.device, *sizes: int) -> bool:
    """Return whether the products can read matrices with rows of these sizes: Hopper, and multiples of 16."""
    hopper = device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9
    return hopper and all(size % 16 == 0 for size in sizes)
