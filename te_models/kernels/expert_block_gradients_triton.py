"""FP8 with a scale per block of the gradients of experts' activations, from the gradient of their output."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_models.kernels.expert_blocks_triton import (
    SIZE,
    TRANSPOSED,
    Blocks,
    CastTile,
    cast_blocks,
    grid_of_tiles,
    room_for_blocks,
    sizes_of_tile,
    store_blocks,
)
from te_models.kernels.expert_cast_triton import (
    Matrices,
    find_matrix,
    total_sums,
)
from te_models.kernels.expert_hidden_triton import Activation, gradient_values
from te_models.kernels.groups import Groups

GRADIENT = CastTile(16, SIZE, 2)  # of the straight copies


@triton.jit
def _store_plain(a, b, c, d, i, j, rows, columns, stride, out):
    """Store the first to fourth rows of groups of four."""
    at = out + i[:, None] * stride + j[None, :]
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    tl.store(at, a.to(out.dtype.element_ty), inside)
    tl.store(at + stride, b.to(out.dtype.element_ty), inside)
    tl.store(at + 2 * stride, c.to(out.dtype.element_ty), inside)
    tl.store(at + 3 * stride, d.to(out.dtype.element_ty), inside)


@triton.jit
def _gradient_kernel(
    # gradient of the hidden rows [R, F], and [R, 2F] = [gate | up]
    dy,
    gate_up,
    # of each row (None: no row has to be zero), and how many tokens there are
    token,
    tokens,
    # where each expert begins, int64 [E + 1], and how many tiles end with it, int64 [E]
    first,
    tiles,
    # where each expert begins in the transposed copies
    aligned_first,
    # the gradient [R, 2F] in 16 bits, or as FP8 in both copies with their scales
    plain,
    data,
    scale_inv,
    transposed,
    transposed_inv,
    # transposed hidden rows, made again for the gradient of down_proj, or None
    hidden,
    hidden_inv,
    pitch,
    # sums of the rows of each tile, for the gradient of a bias, or None
    sums,
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
    """Write the gradient of a tile of gate_up, and on request the hidden rows again, as FP8 with a scale per block."""
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
    slope = dy + begin * columns
    # The gradients of gate and up, and the hidden values, of the first to fourth rows of groups of four.
    gate_a, up_a, hidden_a = gradient_values(
        slope, address, token, tokens, i, j, rows, columns, alpha, LIMIT
    )
    gate_b, up_b, hidden_b = gradient_values(
        slope, address, token, tokens, i + 1, j, rows, columns, alpha, LIMIT
    )
    gate_c, up_c, hidden_c = gradient_values(
        slope, address, token, tokens, i + 2, j, rows, columns, alpha, LIMIT
    )
    gate_d, up_d, hidden_d = gradient_values(
        slope, address, token, tokens, i + 3, j, rows, columns, alpha, LIMIT
    )
    if sums is not None:
        at = sums + tl.program_id(0).to(tl.int64) * 2 * columns + j
        tl.store(at, tl.sum((gate_a + gate_b) + (gate_c + gate_d), 0), j < columns)
        tl.store(at + columns, tl.sum((up_a + up_b) + (up_c + up_d), 0), j < columns)
    aligned_begin = tl.multiple_of(tl.load(aligned_first + e), 128)
    none = tl.zeros([], tl.int64)
    if plain is not None:
        plain += begin * 2 * columns
        _store_plain(gate_a, gate_b, gate_c, gate_d, i, j, rows, columns, 2 * columns, plain)
        _store_plain(up_a, up_b, up_c, up_d, i, j, rows, columns, 2 * columns, plain + columns)
    else:
        store_blocks(
            a=gate_a,
            b=gate_b,
            c=gate_c,
            d=gate_d,
            group=group,
            j=j,
            rows=rows,
            columns=columns,
            width=2 * columns,
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
        store_blocks(
            a=up_a,
            b=up_b,
            c=up_c,
            d=up_d,
            group=group,
            j=j,
            rows=rows,
            columns=columns,
            width=2 * columns,
            begin=begin,
            aligned_begin=aligned_begin,
            count=most,
            data=data,
            scale_inv=scale_inv,
            transposed=transposed,
            transposed_inv=transposed_inv,
            pitch=pitch,
            offset=none + columns,
        )
    if hidden is not None:
        store_blocks(
            a=hidden_a,
            b=hidden_b,
            c=hidden_c,
            d=hidden_d,
            group=group,
            j=j,
            rows=rows,
            columns=columns,
            width=columns,
            begin=begin,
            aligned_begin=aligned_begin,
            count=most,
            data=None,
            scale_inv=None,
            transposed=hidden,
            transposed_inv=hidden_inv,
            pitch=pitch,
            offset=none,
        )


class BlockGradients(NamedTuple):
    """Gradients of gate_up, the recomputed activation, and the sums of each expert's rows or None."""

    of_gate_up: Blocks
    hidden: Blocks
    sums: Tensor | None


def gradient_blocks(
    dy: Tensor,
    gate_up: Tensor,
    groups: Groups,
    activation: Activation,
    *,
    transpose: bool,
    hidden: bool,
    summed: bool,
) -> BlockGradients:
    """Cast the gradient of gate_up [R, 2F] for dy [R, F] of the activation, and with `hidden` the activation again.

    A block of 1 x 128 may contain the last columns of gate and the first ones of up: then the gradient is stored first.
    """
    columns = dy.shape[1]
    device = dy.device
    nothing = Blocks(None, None, None, None)
    if columns % SIZE == 0:
        plain = None
        blocks = room_for_blocks(groups, 2 * columns, device, straight=True, transpose=transpose)
    else:
        plain = torch.empty_like(gate_up)
        blocks = nothing
    recomputed = room_for_blocks(groups, columns, device, straight=False, transpose=hidden)
    only_transposed = blocks._replace(data=None)
    only_straight = blocks._replace(transposed=None)
    # Transposed copies take a second launch, with tiles of another shape; the last launch sums the rows.
    has_second = hidden or only_transposed.transposed is not None
    with torch.cuda.device_of(dy):
        total = _launch_gradients(
            dy,
            gate_up,
            groups,
            activation,
            plain=plain,
            blocks=only_straight,
            recomputed=nothing,
            tile=GRADIENT,
            summed=summed and not has_second,
        )
        if has_second:
            total = _launch_gradients(
                dy,
                gate_up,
                groups,
                activation,
                plain=None,
                blocks=only_transposed,
                recomputed=recomputed,
                tile=TRANSPOSED,
                summed=summed,
            )
    if plain is not None:
        blocks, _ = cast_blocks(Matrices(plain, groups), transpose=transpose)
    return BlockGradients(blocks, recomputed, total)


def _launch_gradients(
    dy: Tensor,
    gate_up: Tensor,
    groups: Groups,
    activation: Activation,
    *,
    plain: Tensor | None,
    blocks: Blocks,
    recomputed: Blocks,
    tile: CastTile,
    summed: bool,
) -> Tensor | None:
    """Write the copies that there is room for; return the sums of each expert's rows [E, 2F] if they are asked for.

    Args:
        plain: for the gradient in the dtype of dy, [R, 2F].
        blocks: for the gradient in FP8.
        recomputed: for the activation in FP8.
    """
    columns = dy.shape[1]
    tiles = groups.tiles(tile.rows)
    grid = grid_of_tiles(groups, columns, tile)
    sums = torch.empty(grid[0], 2 * columns, device=dy.device) if summed else None
    _gradient_kernel[grid](
        dy=dy,
        gate_up=gate_up,
        token=activation.token,
        tokens=activation.tokens,
        first=groups.first,
        tiles=tiles,
        aligned_first=groups.aligned.first,
        plain=plain,
        data=blocks.data,
        scale_inv=blocks.scale_inv,
        transposed=blocks.transposed,
        transposed_inv=blocks.transposed_inv,
        hidden=recomputed.transposed,
        hidden_inv=recomputed.transposed_inv,
        pitch=groups.aligned.most,
        sums=sums,
        columns=columns,
        count=groups.experts,
        most=groups.most,
        alpha=activation.alpha,
        LIMIT=activation.limit,
        **sizes_of_tile(groups, tile),
    )
    return None if sums is None else total_sums(sums, tiles, dy.dtype)
