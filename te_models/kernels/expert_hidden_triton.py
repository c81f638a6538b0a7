"""The activation between the projections of experts, written as the FP8 that they multiply, forward and backward.

Values are rounded to the dtype of their input before they are cast, as if they were stored in between, so that the bits
equal the operations' one by one. Shapes: R rows of all experts, F their width; `gate_up` [R, 2F] = [gate | up].
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_models.kernels.expert_cast_triton import (
    COLUMNS,
    ROWS,
    CastTile,
    FP8Matrices,
    find_matrix,
    room_for_sums,
    room_for_transposed_rows,
    tiles_of,
    total_sums,
)
from te_models.kernels.expert_scales_triton import (
    Delayed,
    note_scale,
    scale_of,
    scales_and_launches,
)
from te_models.kernels.fp8_tiles_triton import raise_amax, rounded, sigmoid, store_fp8
from te_models.kernels.groups import Groups


class Activation(NamedTuple):
    """silu(gate) * up, or with `limit` elementwise.clamped_swiglu.

    With `token`, int64 [R], rows whose token is not below `tokens` are padding, which a bias made nonzero: they give 0.
    """

    limit: float | None = None
    alpha: float = 1.0
    token: Tensor | None = None
    tokens: int = 0


@triton.jit
def _load(x, i, j, rows, columns, stride):
    """Return rows i and columns j of x in FP32, zeros outside [rows, columns]; rows are `stride` apart."""
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    return tl.load(x + i.to(tl.int64)[:, None] * stride + j[None, :], inside, 0.0).to(tl.float32)


@triton.jit
def _without_padding(value, token, tokens, i, rows):
    """Return the values of rows i, or 0 in rows of padding."""
    if token is not None:
        is_token = tl.load(token + i, i < rows, 0) < tokens
        value = tl.where(is_token[:, None], value, 0.0)
    return value


@triton.jit
def hidden_values(gate_up, token, tokens, i, j, rows, columns, alpha, LIMIT: tl.constexpr):
    """Return the activation at rows i and columns j, rounded."""
    gate = _load(gate_up, i, j, rows, columns, 2 * columns)
    up = _load(gate_up + columns, i, j, rows, columns, 2 * columns)
    if LIMIT is not None:
        gate = tl.where(gate > LIMIT, LIMIT, gate)  # which NaN passes
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        value = (up + 1) * gate * sigmoid(alpha * gate)
    else:
        value = gate * sigmoid(gate) * up
    return _without_padding(rounded(value, gate_up.dtype.element_ty), token, tokens, i, rows)


@triton.jit
def gradient_values(dy, gate_up, token, tokens, i, j, rows, columns, alpha, LIMIT: tl.constexpr):
    """Return the gradients of gate and up at rows i and columns j, rounded, and the activation itself."""
    gate = _load(gate_up, i, j, rows, columns, 2 * columns)
    up = _load(gate_up + columns, i, j, rows, columns, 2 * columns)
    slope = _without_padding(_load(dy, i, j, rows, columns, columns), token, tokens, i, rows)
    if LIMIT is not None:
        inside = gate <= LIMIT
        between = tl.abs(up) <= LIMIT
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + 1
        sigma = sigmoid(alpha * gate)
        of_gate = slope * up * sigma * (1 + alpha * gate * (1 - sigma))
        of_gate = tl.where(inside, of_gate, of_gate * 0.0)
        of_up = slope * gate * sigma
        of_up = tl.where(between, of_up, of_up * 0.0)
        value = up * gate * sigma
    else:
        sigma = sigmoid(gate)
        silu = gate * sigma
        of_gate = slope * up * (sigma + silu * (1 - sigma))
        of_up = slope * silu
        value = silu * up
    of_gate = rounded(of_gate, gate_up.dtype.element_ty)
    of_up = rounded(of_up, gate_up.dtype.element_ty)
    value = rounded(value, gate_up.dtype.element_ty)
    return of_gate, of_up, _without_padding(value, token, tokens, i, rows)


@triton.jit
def _hidden_kernel(
    # [R, 2F] = [gate | up], the token of each row (None: no row has to be zero), and how many tokens there are
    gate_up,
    token,
    tokens,
    # where each expert begins, int64 [E + 1], and how many tiles end with it, int64 [E]
    first,
    tiles,
    # delayed scales or None, measured amaxes, and [2, E] for inverse scale and scale
    scales,
    amax,
    factors,
    # uint8 [R, F]
    out,
    # F, E, and the stride of amax
    columns,
    count,
    stride,
    alpha,
    LIMIT: tl.constexpr,
    E5M2: tl.constexpr,
    # whether amaxes are raised, and nothing else is done
    MEASURES: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Cast a tile of the activation of one expert's rows to FP8, or raise its amax if MEASURES."""
    tile = tl.program_id(0)
    place = tl.program_id(1)
    e, address, begin, rows, group = find_matrix(
        tile=tile,
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
    j = place.to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    if MEASURES:
        i = group * 4 + tl.arange(0, ROWS)
        value = hidden_values(address, token, tokens, i, j, rows, columns, alpha, LIMIT)
        raise_amax(amax + e, tl.abs(value))
        return
    scale = scale_of(e, scales, amax, stride, E5M2)
    note_scale(
        factors=factors,
        first=first,
        e=e,
        count=count,
        scale=scale,
        group=group,
        rows=rows,
        place=place,
    )
    group += tl.arange(0, ROWS // 4)
    i = 4 * group
    a = hidden_values(address, token, tokens, i, j, rows, columns, alpha, LIMIT)
    b = hidden_values(address, token, tokens, i + 1, j, rows, columns, alpha, LIMIT)
    c = hidden_values(address, token, tokens, i + 2, j, rows, columns, alpha, LIMIT)
    d = hidden_values(address, token, tokens, i + 3, j, rows, columns, alpha, LIMIT)
    out += begin * columns
    largest = store_fp8(
        a=a,
        b=b,
        c=c,
        d=d,
        scale=scale,
        group=group,
        j=j,
        rows=rows,
        columns=columns,
        data=out,
        transposed=None,
        stride=columns,
        E5M2=E5M2,
    )
    if scales is not None:
        raise_amax(amax + e * stride, largest)


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
    # delayed scales or None, measured amaxes, and [2, E] for inverse scale and scale
    scales,
    amax,
    factors,
    # scale of the hidden rows in forward, to make them again
    hidden_scale,
    # uint8: the gradient [R, 2F], its transpose, and the transposed hidden rows
    out,
    transposed,
    hidden,
    # where each expert begins in the transposed copies, whose rows are `pitch` long
    aligned_first,
    pitch,
    # sums of the rows of each tile, for the gradient of a bias, or None
    sums,
    # F, E, and the stride of amax
    columns,
    count,
    stride,
    alpha,
    LIMIT: tl.constexpr,
    E5M2: tl.constexpr,
    # whether amaxes are raised, and nothing else is done
    MEASURES: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the gradient of a tile of gate_up, and on request the hidden rows again, as FP8 with a scale per expert."""
    tile = tl.program_id(0)
    place = tl.program_id(1)
    e, address, begin, rows, group = find_matrix(
        tile=tile,
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
    j = place.to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    slope = dy + begin * columns
    if MEASURES:
        i = group * 4 + tl.arange(0, ROWS)
        of_gate, of_up, _ = gradient_values(
            slope, address, token, tokens, i, j, rows, columns, alpha, LIMIT
        )
        raise_amax(amax + e, tl.maximum(tl.abs(of_gate), tl.abs(of_up)))
        return
    scale = scale_of(e, scales, amax, stride, E5M2)
    note_scale(
        factors=factors,
        first=first,
        e=e,
        count=count,
        scale=scale,
        group=group,
        rows=rows,
        place=place,
    )
    group += tl.arange(0, ROWS // 4)
    i = 4 * group
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
        at = sums + tile.to(tl.int64) * 2 * columns + j
        written = (j < columns) & (rows > 0)
        tl.store(at, tl.sum((gate_a + gate_b) + (gate_c + gate_d), 0), written)
        tl.store(at + columns, tl.sum((up_a + up_b) + (up_c + up_d), 0), written)
    # The expert's rows in the transposed copies, which have zeros behind the last one.
    aligned_begin = tl.multiple_of(tl.load(aligned_first + e), 4)
    out += begin * 2 * columns
    aligned_rows = tl.multiple_of(tl.load(aligned_first + e + 1) - aligned_begin, 4)
    half = transposed  # where the gradient of up begins: F rows of the transposed copy below the gate's
    if transposed is not None:
        transposed += aligned_begin
        half = transposed + pitch.to(tl.int64) * columns
    gate_amax = store_fp8(
        a=gate_a,
        b=gate_b,
        c=gate_c,
        d=gate_d,
        scale=scale,
        group=group,
        j=j,
        rows=rows,
        columns=columns,
        data=out,
        transposed=transposed,
        stride=2 * columns,
        E5M2=E5M2,
        transposed_stride=pitch,
        transposed_rows=aligned_rows,
    )
    out += columns
    up_amax = store_fp8(
        a=up_a,
        b=up_b,
        c=up_c,
        d=up_d,
        scale=scale,
        group=group,
        j=j,
        rows=rows,
        columns=columns,
        data=out,
        transposed=half,
        stride=2 * columns,
        E5M2=E5M2,
        transposed_stride=pitch,
        transposed_rows=aligned_rows,
    )
    if hidden is not None:
        store_fp8(
            a=hidden_a,
            b=hidden_b,
            c=hidden_c,
            d=hidden_d,
            scale=tl.load(hidden_scale + e),
            group=group,
            j=j,
            rows=rows,
            columns=columns,
            data=None,
            transposed=hidden + aligned_begin,
            stride=columns,
            E5M2=False,
            transposed_stride=pitch,
            transposed_rows=aligned_rows,
        )
    if scales is not None:
        raise_amax(amax + e * stride, tl.maximum(gate_amax, up_amax))


# Of the activation, and of its gradient, whose transposed copies want square tiles.
HIDDEN = CastTile(32, 128, 4)
GRADIENT = CastTile(ROWS, COLUMNS, 8)


def _sizes(groups: Groups, tile: CastTile) -> dict[str, Any]:
    """Return the sizes that a kernel is compiled for, and its warps."""
    return dict(
        EXPERTS=triton.next_power_of_2(groups.experts),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        num_warps=tile.warps,
    )


def hidden(
    gate_up: Tensor, groups: Groups, activation: Activation, delayed: Delayed | None
) -> FP8Matrices:
    """Return the activation of gate_up [R, 2F] in E4M3, by `delayed` scales or by each expert's largest magnitude.

    Without transposed copies.
    """
    columns = gate_up.shape[1] // 2
    count = groups.experts
    out = torch.empty(groups.most, columns, dtype=torch.uint8, device=gate_up.device)
    factors = torch.empty(2, count, device=gate_up.device)
    tiles = groups.tiles(HIDDEN.rows)
    scales, amax, launches = scales_and_launches(delayed, None, count, gate_up.device)
    across = triton.cdiv(columns, HIDDEN.columns)
    with torch.cuda.device_of(gate_up):
        for measures in launches:
            _hidden_kernel[groups.most_tiles(HIDDEN.rows), across](
                gate_up=gate_up,
                token=activation.token,
                tokens=activation.tokens,
                first=groups.first,
                tiles=tiles,
                scales=scales,
                amax=amax,
                factors=factors,
                out=out,
                columns=columns,
                count=count,
                stride=amax.stride(0),
                alpha=activation.alpha,
                E5M2=False,
                LIMIT=activation.limit,
                MEASURES=measures,
                **_sizes(groups, HIDDEN),
            )
    inverse, scale = factors.unbind()
    return FP8Matrices(out, transposed=None, scale_inv=inverse, scale=scale)


class HiddenGradients(NamedTuple):
    """The operands of backward's products: FP8 of the gradient of gate_up, and the activation again, transposed.

    `hidden` uint8 is as FP8Matrices.transposed, or None; `sums` [E, 2F] are the sums of each
    expert's rows, or None.
    """

    of_gate_up: FP8Matrices
    hidden: Tensor | None
    sums: Tensor | None


def gradients(
    dy: Tensor,
    gate_up: Tensor,
    groups: Groups,
    activation: Activation,
    form: torch.dtype,
    delayed: Delayed | None,
    hidden_scale: Tensor | None,
    *,
    transpose: bool,
    summed: bool,
) -> HiddenGradients:
    """Return the gradient of gate_up [R, 2F] in the format `form`, for dy [R, F] of the activation.

    Args:
        hidden_scale: the scales FP32 [E] by which `hidden` cast the activation, which is transposed; None: it is not
            needed.
        transpose: whether to write transposed gradients too.
        summed: whether to sum the rows of the gradients.
    """
    columns = dy.shape[1]
    count = groups.experts
    device = dy.device
    out = torch.empty(groups.most, 2 * columns, dtype=torch.uint8, device=device)
    transposed = room_for_transposed_rows(groups, 2 * columns, device) if transpose else None
    recomputed = None
    if hidden_scale is not None:
        recomputed = room_for_transposed_rows(groups, columns, device)
    sums = room_for_sums(groups, 2 * columns, device) if summed else None
    factors = torch.empty(2, count, device=device)
    tiles, most_tiles = tiles_of(groups, transpose=transpose or recomputed is not None)
    scales, amax, launches = scales_and_launches(delayed, None, count, device)
    across = triton.cdiv(columns, GRADIENT.columns)
    with torch.cuda.device_of(dy):
        for measures in launches:
            _gradient_kernel[most_tiles, across](
                dy=dy,
                gate_up=gate_up,
                token=activation.token,
                tokens=activation.tokens,
                first=groups.first,
                tiles=tiles,
                scales=scales,
                amax=amax,
                factors=factors,
                hidden_scale=hidden_scale,
                out=out,
                transposed=transposed,
                hidden=recomputed,
                aligned_first=groups.aligned.first,
                pitch=groups.aligned.most,
                sums=sums,
                columns=columns,
                count=count,
                stride=amax.stride(0),
                alpha=activation.alpha,
                E5M2=form == torch.float8_e5m2,
                LIMIT=activation.limit,
                MEASURES=measures,
                **_sizes(groups, GRADIENT),
            )
    total = None if sums is None else total_sums(sums, tiles, dy.dtype)
    inverse, scale = factors.unbind()
    return HiddenGradients(
        of_gate_up=FP8Matrices(out, transposed, scale_inv=inverse, scale=scale),
        hidden=recomputed,
        sums=total,
    )
