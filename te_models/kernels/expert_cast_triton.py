"""FP8 of many matrices below each other, each with a scale of its own, in few launches instead of three per matrix.

The matrices are rows [R, K] of experts, or their weights. A scale follows from its matrix' largest magnitude
(current scaling), or is known before (delayed scaling), which saves a pass over the matrices; the bits are Transformer
Engine's, one matrix at a time. Each has a multiple of 4 rows. A program finds its matrix by the number of tiles
of those before it.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_models.kernels.expert_scales_triton import (
    Delayed,
    note_scale,
    scale_of,
    scales_and_launches,
)
from te_models.kernels.fp8_tiles_triton import raise_amax, rounded, store_fp8
from te_models.kernels.groups import LINE, Groups


class CastTile(NamedTuple):
    """The rows and columns that a program casts, and its warps."""

    rows: int
    columns: int
    warps: int


# A transposed copy writes as many rows of bytes as a tile has columns: square tiles are the fastest then.
ROWS = 64
COLUMNS = 64
WARPS = 4
STRAIGHT = CastTile(32, 256, 4)  # of a cast without one
ROW_COLUMNS = 2048  # columns of a row that one program reads at a time
GROUP_ROWS = 256  # rows whose amaxes a program reads at a time
SPLIT = 8  # programs per expert that read them


class Matrices(NamedTuple):
    """A matrix per expert, with as many columns as `data`, in which they lie below each other.

    With `places`, int64 [E], `data` is one of them, and matrix e begins places[e] elements behind it, a multiple of 8;
    such matrices are counted alone, and cast as expert_weights_triton.EqualMatrices. With `source`, int64 [R], row r of
    them all is row source[r] of `data`, or zeros if that is not one of its rows, and with `factor` too, FP32 [R], that
    row times factor[r], rounded to the dtype of `data`.
    """

    data: Tensor
    groups: Groups
    places: Tensor | None = None
    source: Tensor | None = None
    factor: Tensor | None = None


@triton.jit
def find_matrix(
    tile,
    data,
    source,
    first,
    tiles,
    columns,
    count,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Return the matrix of a tile: its number, address, first row among all, rows, and the first group of the tile.

    A tile behind the last gets no rows of the last matrix.
    """
    number = tl.arange(0, EXPERTS)
    ends = tl.load(tiles + number, number < count, 2**40)
    passed = tl.sum((ends <= tile).to(tl.int32), 0)
    e = tl.minimum(passed, count - 1)
    begin = tl.load(first + e)
    rows = tl.where(passed < count, tl.load(first + e + 1) - begin, 0)
    before = tl.load(tiles + tl.maximum(e - 1, 0), e > 0, 0)
    if source is None:
        data += begin * columns
    return e, data, begin, rows, (tile - before) * (ROWS // 4)


@triton.jit
def load_rows(address, source, factor, tokens, i, j, rows, columns):
    """Return rows i of a matrix, as `Matrices` describes them, at columns j, in FP32."""
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    row = i
    if source is not None:
        row = tl.load(source + i, i < rows, 0)
        inside = inside & (row < tokens)[:, None]
    values = tl.load(address + row[:, None] * columns + j[None, :], inside, 0.0).to(tl.float32)
    if factor is not None:
        by = tl.load(factor + i, i < rows, 0.0)
        values = rounded(values * by[:, None], address.dtype.element_ty)
    return values


@triton.jit
def _row_amax_kernel(x, out, columns, COLUMNS: tl.constexpr):
    """Write the largest magnitude of one row."""
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, columns, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        value = tl.load(x + row * columns + j, j < columns, 0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(value))
    tl.store(out + row, tl.max(largest, 0))


@triton.jit
def _group_amax_kernel(of_rows, data, source, factor, tokens, first, amax, ROWS: tl.constexpr):
    """Raise an expert's amax to the amax of its rows of `data`, from the amaxes of the rows that these copy.

    The largest of rounded products is the product of the largest, rounded.
    """
    e = tl.program_id(0)
    begin = tl.load(first + e)
    end = tl.load(first + e + 1)
    largest = tl.zeros([ROWS], tl.float32)
    for start in range(begin + tl.program_id(1) * ROWS, end, ROWS * tl.num_programs(1)):
        i = start + tl.arange(0, ROWS)
        row = tl.load(source + i, i < end, tokens)
        value = tl.load(of_rows + row, row < tokens, 0.0)
        if factor is not None:
            by = tl.load(factor + i, i < end, 0.0)
            value = tl.abs(rounded(value * by, data.dtype.element_ty))
        largest = tl.maximum(largest, value)
    bits = tl.max(largest, 0).to(tl.int32, bitcast=True)
    tl.atomic_max((amax + e).to(tl.pointer_type(tl.int32), bitcast=True), bits, sem="relaxed")


@triton.jit
def _cast_kernel(
    # rows of all experts: `data` or tokens of it by `source` and `factor` (see Matrices); there are `tokens` tokens
    data,
    source,
    factor,
    tokens,
    # where each expert begins, int64 [E + 1], and how many tiles end with it, int64 [E]
    first,
    tiles,
    # measured amaxes, FP32 [E], or delayed `scales`; `factors` [2, E] get inverse scale and scale
    amax,
    scales,
    factors,
    # uint8: straight and transposed copy, each written where not None
    out,
    transposed,
    # where each expert begins in the transposed copy, whose rows are `pitch` long
    aligned_first,
    pitch,
    # sums of the rows of each tile, for the gradient of a bias, or None
    sums,
    # K, E, and the stride of amax
    columns,
    count,
    stride,
    E5M2: tl.constexpr,
    # whether amaxes are raised, and nothing else is done
    MEASURES: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Cast a tile of the rows of one expert to FP8, in one or both copies, or raise its amax if MEASURES."""
    tile = tl.program_id(0)
    place = tl.program_id(1)
    e, address, begin, rows, group = find_matrix(
        tile=tile,
        data=data,
        source=source,
        first=first,
        tiles=tiles,
        columns=columns,
        count=count,
        EXPERTS=EXPERTS,
        ROWS=ROWS,
    )
    j = place.to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    if source is not None:
        source += begin
    if factor is not None:
        factor += begin
    if MEASURES:
        i = group * 4 + tl.arange(0, ROWS)
        values = load_rows(address, source, factor, tokens, i, j, rows, columns)
        raise_amax(amax + e, tl.abs(values))
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
    a = load_rows(address, source, factor, tokens, i, j, rows, columns)
    b = load_rows(address, source, factor, tokens, i + 1, j, rows, columns)
    c = load_rows(address, source, factor, tokens, i + 2, j, rows, columns)
    d = load_rows(address, source, factor, tokens, i + 3, j, rows, columns)
    if sums is not None:
        at = sums + tile.to(tl.int64) * columns + j
        tl.store(at, tl.sum((a + b) + (c + d), 0), (j < columns) & (rows > 0))
    # The expert's rows in the transposed copy, which has zeros behind the last one.
    aligned_begin = tl.multiple_of(tl.load(aligned_first + e), 4)
    aligned_rows = tl.multiple_of(tl.load(aligned_first + e + 1) - aligned_begin, 4)
    if out is not None:
        out += begin * columns
    if transposed is not None:
        transposed += aligned_begin
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
        transposed=transposed,
        stride=columns,
        E5M2=E5M2,
        transposed_stride=pitch,
        transposed_rows=aligned_rows,
    )
    if scales is not None:
        raise_amax(amax + e * stride, largest)


@triton.jit
def _total_sums_kernel(sums, tiles, out, columns, TILES: tl.constexpr, COLUMNS: tl.constexpr):
    """Write some columns of one expert's sum, from the sums of its tiles; see `total_sums`."""
    e = tl.program_id(1)
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    begin = tl.load(tiles + tl.maximum(e - 1, 0), e > 0, 0)
    end = tl.load(tiles + e)
    total = tl.zeros([TILES, COLUMNS], tl.float32)
    for start in range(begin, end, TILES):
        i = start + tl.arange(0, TILES)
        inside = (i < end)[:, None] & (j < columns)[None, :]
        total += tl.load(sums + i[:, None] * columns + j[None, :], inside, 0.0)
    tl.store(out + e * columns + j, tl.sum(total, 0).to(out.dtype.element_ty), j < columns)


class FP8Matrices(NamedTuple):
    """FP8 of `Matrices`.

    Attributes:
        data: uint8 [R, K].
        transposed: uint8 [K, Groups.aligned.most], whose columns are the rows of `Groups.aligned`, with zeros between
            experts; of weights the matrices [K, rows], one after the other. None: not written.
        scale_inv: FP32 [E], the factor from data to values.
        scale: FP32 [E], the factor from values to data.
    """

    data: Tensor
    transposed: Tensor | None
    scale_inv: Tensor
    scale: Tensor


def cast(
    matrices: Matrices,
    form: torch.dtype,
    delayed: Delayed | None = None,
    transpose: bool = True,
    amax: Tensor | None = None,
    sums: Tensor | None = None,
) -> FP8Matrices:
    """Cast matrices to torch.float8_e4m3fn or float8_e5m2, by `delayed` scales, else each by its largest magnitude.

    Args:
        transpose: whether to write a transposed copy too.
        amax: the largest magnitude of each, FP32 [E], where they are known already.
        sums: gets the sums of the values of each tile's rows (`room_for_sums`).
    """
    data = torch.empty(
        matrices.groups.most, matrices.data.shape[1], dtype=torch.uint8, device=matrices.data.device
    )
    transposed = _room_for_transposed(matrices) if transpose else None
    inverse, scale = _launch(
        matrices,
        form,
        delayed=delayed,
        data=data,
        transposed=transposed,
        known_amax=amax,
        sums=sums,
    )
    return FP8Matrices(data, transposed, scale_inv=inverse, scale=scale)


def cast_transposed(matrices: Matrices, form: torch.dtype, scale: Tensor) -> Tensor:
    """Return FP8Matrices.transposed of an earlier cast by these scales FP32 [E], alone and anew."""
    transposed = _room_for_transposed(matrices)
    unread_amax = torch.empty_like(scale)
    _launch(
        matrices,
        form,
        delayed=Delayed(scale, unread_amax),
        data=None,
        transposed=transposed,
    )
    return transposed


def row_amax(x: Tensor) -> Tensor:
    """Return the largest magnitude of each row of x [T, K], contiguous: FP32 [T]."""
    amaxes = torch.empty(len(x), dtype=torch.float32, device=x.device)
    if len(x):
        columns = x.shape[1]
        width = min(ROW_COLUMNS, triton.next_power_of_2(columns))
        with torch.cuda.device_of(x):
            _row_amax_kernel[(len(x),)](x, amaxes, columns, COLUMNS=width, num_warps=4)
    return amaxes


def amax_of_copies(matrices: Matrices, of_rows: Tensor) -> Tensor:
    """Return the amax of each matrix, FP32 [E], whose rows are `source` of `data`, from the amaxes of these [T]."""
    amax = torch.zeros(matrices.groups.experts, device=of_rows.device)
    with torch.cuda.device_of(of_rows):
        _group_amax_kernel[(matrices.groups.experts, SPLIT)](
            of_rows=of_rows,
            data=matrices.data,
            source=matrices.source,
            factor=matrices.factor,
            tokens=len(matrices.data),
            first=matrices.groups.first,
            amax=amax,
            ROWS=GROUP_ROWS,
            num_warps=4,
        )
    return amax


def room_for_sums(groups: Groups, columns: int, device: torch.device) -> Tensor:
    """Return memory for the sums of rows of every tile of a cast: FP32 [tiles, columns]."""
    _, most_tiles = tiles_of(groups, transpose=True)
    return torch.empty(most_tiles, columns, device=device)


def tiles_of(groups: Groups, *, transpose: bool) -> tuple[Tensor, int]:
    """Return Groups.tiles and Groups.most_tiles of a cast; with `transpose` it also pads each expert's last line."""
    if transpose:
        return groups.aligned.tiles(ROWS), groups.most_tiles(LINE) * (LINE // ROWS)
    return groups.tiles(ROWS), groups.most_tiles(ROWS)


def total_sums(sums: Tensor, tiles: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sums of each expert's rows, in FP32 and rounded once, from the sums of a cast's tiles: [E, columns].

    `tiles`, int64 [E], are the numbers of tiles of each expert and those before it (`Groups.tiles`).
    """
    columns = sums.shape[1]
    count = len(tiles)
    out = torch.empty(count, columns, dtype=dtype, device=sums.device)
    with torch.cuda.device_of(sums):
        _total_sums_kernel[(triton.cdiv(columns, COLUMNS), count)](
            sums, tiles, out, columns, TILES=16, COLUMNS=COLUMNS, num_warps=4
        )
    return out


def _room_for_transposed(matrices: Matrices) -> Tensor:
    data = matrices.data
    return room_for_transposed_rows(matrices.groups, data.shape[1], data.device)


def room_for_transposed_rows(groups: Groups, columns: int, device: torch.device) -> Tensor:
    """Return memory for the transposed rows of experts (`FP8Matrices.transposed`)."""
    return torch.empty(columns, groups.aligned.most, dtype=torch.uint8, device=device)


def _launch(
    matrices: Matrices,
    form: torch.dtype,
    *,
    delayed: Delayed | None,
    data: Tensor | None,
    transposed: Tensor | None,
    known_amax: Tensor | None = None,
    sums: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Cast matrices into `data` and `transposed`, where not None; return FP8Matrices.scale_inv and FP8Matrices.scale.

    Arguments are as for `cast`, whose `amax` is `known_amax`.
    """
    assert matrices.places is None
    groups = matrices.groups
    columns = matrices.data.shape[1]
    count = groups.experts
    device = matrices.data.device
    scales, amax, launches = scales_and_launches(delayed, known_amax, count, device)
    factors = torch.empty(2, count, device=device)
    tile = CastTile(ROWS, COLUMNS, WARPS)
    tiles, most_tiles = tiles_of(groups, transpose=transposed is not None)
    if transposed is None and sums is None:
        tile = STRAIGHT
        tiles = groups.tiles(tile.rows)
        most_tiles = groups.most_tiles(tile.rows)
    sizes: dict[str, Any] = dict(
        EXPERTS=triton.next_power_of_2(count),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        num_warps=tile.warps,
    )
    across = triton.cdiv(columns, tile.columns)
    with torch.cuda.device_of(matrices.data):
        for measures in launches:
            _cast_kernel[most_tiles, across](
                data=matrices.data,
                source=matrices.source,
                factor=matrices.factor,
                tokens=len(matrices.data),
                first=groups.first,
                tiles=tiles,
                amax=amax,
                scales=scales,
                factors=factors,
                out=data,
                transposed=transposed,
                aligned_first=groups.aligned.first,
                pitch=groups.aligned.most,
                sums=sums,
                columns=columns,
                count=count,
                stride=amax.stride(0),
                E5M2=form == torch.float8_e5m2,
                MEASURES=measures,
                **sizes,
            )
    inverse, scale = factors.unbind()
    return inverse, scale
