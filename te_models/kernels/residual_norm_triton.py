"""RMSNorm of 16-bit rows of the residual stream and its gradients, each in one pass at the speed of memory.

    total = x + delta,   y = total / rms(total) * gamma

A program holds whole rows in registers, as chunks of columns whose number the compiler knows, since a tensor of Triton
has a power of two of them and widths such as 2,560 are none. The gradient of gamma is a sum over all rows: each program
of backward sums its own, and a second kernel adds these parts in a fixed order. Shapes: N rows, D columns.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

FEWEST_COLUMNS = 1024
MOST_COLUMNS = 8192
ALIGNMENT = 8  # columns, of which one load of a thread takes as many


class RowTiles(NamedTuple):
    """How a kernel goes through rows.

    Attributes:
        rows: of a program at a time.
        chunk: columns of one of its tensors, a power of two.
        warps: of a program.
        programs: the most that are launched; None: one for all rows that it holds at a time.
        stages: rows of which a program's loads are under way at once, or have come.
        registers: the most of a thread; None: as many as it takes.
    """

    rows: int
    chunk: int
    warps: int
    programs: int | None = None
    stages: int = 1
    registers: int | None = None


def forward_tiles(columns: int) -> RowTiles:
    """Return the tiles of the forward kernel for rows of this width."""
    return RowTiles(rows=1, chunk=512, warps=4 if columns <= 4096 else 8)


def backward_tiles(columns: int, add: bool) -> RowTiles:
    """Return the tiles of the backward kernel for rows of this width; `add`: it adds another gradient."""
    # As many programs as an H200, with 132 multiprocessors, runs at once with these registers. The fastest of four to
    # six at 2,560, 2,880, 3,584 and 5,120 (docs/internals/kernels.md has the times).
    if columns <= 2560:
        return RowTiles(rows=1, chunk=512, warps=4, programs=396, stages=3)
    if columns <= 3584:
        return RowTiles(rows=1, chunk=512, warps=4, programs=396, stages=3, registers=168)
    if columns <= 5120:
        stages = 2 if add else 3
        return RowTiles(rows=1, chunk=1024, warps=8, programs=264, stages=stages, registers=128)
    return RowTiles(rows=1, chunk=2048, warps=16, programs=132, stages=3, registers=128)


def takes(columns: int) -> bool:
    """Return whether the kernels take rows of this width."""
    return FEWEST_COLUMNS <= columns <= MOST_COLUMNS and columns % ALIGNMENT == 0


@triton.jit
def _place(i, k, rows, columns: tl.constexpr, CHUNK: tl.constexpr):
    """Return the places of chunk k of rows i [R, CHUNK], and which of them there are."""
    j = k * CHUNK + tl.arange(0, CHUNK)
    at = i[:, None] * columns + j[None, :]
    inside = (i < rows)[:, None]
    # Only the last chunk may reach beyond the columns.
    if (k + 1) * CHUNK > columns:
        inside = inside & (j < columns)[None, :]
    return at, inside


@triton.jit
def _load_rows(x, i, rows, columns: tl.constexpr, CHUNK: tl.constexpr):
    """Return rows i as chunks in their own dtype, zero outside."""
    chunks = ()
    for k in tl.static_range((columns + CHUNK - 1) // CHUNK):
        at, inside = _place(i, k, rows, columns, CHUNK)
        chunks = chunks + (tl.load(x + at, inside, 0.0),)
    return chunks


@triton.jit
def _gamma(chunk, ZERO_CENTERED: tl.constexpr):
    """Return a chunk of the weight [1, CHUNK] as the factor that it stands for, in FP32."""
    gamma = chunk.to(tl.float32)
    return 1 + gamma if ZERO_CENTERED else gamma


@triton.jit
def _load_weight(weight, columns: tl.constexpr, CHUNK: tl.constexpr):
    """Return the weight as chunks [1, CHUNK]."""
    return _load_rows(weight, tl.zeros((1,), tl.int32), 1, columns, CHUNK)


@triton.jit
def _forward_kernel(
    # [N, D], what is added to it, and the sum to write if ADD
    x,
    delta,
    total,
    # [D]; to write: the norm [N, D], and 1 / RMS, FP32 [N]
    weight,
    y,
    rstd,
    rows,
    eps,
    columns: tl.constexpr,
    ADD: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    CHUNKS: tl.constexpr = (columns + CHUNK - 1) // CHUNK
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    # All loads come before the first store, behind which the compiler would have to leave them.
    values = _load_rows(x, i, rows, columns, CHUNK)
    weights = _load_weight(weight, columns, CHUNK)
    if ADD:
        deltas = _load_rows(delta, i, rows, columns, CHUNK)
        sums = ()
        for k in tl.static_range(CHUNKS):
            value = values[k].to(tl.float32) + deltas[k].to(tl.float32)
            sums = sums + (value.to(x.dtype.element_ty),)
        values = sums
        for k in tl.static_range(CHUNKS):
            at, inside = _place(i, k, rows, columns, CHUNK)
            tl.store(total + at, values[k], inside)
    squares = tl.zeros((ROWS, CHUNK), tl.float32)
    for k in tl.static_range(CHUNKS):
        value = values[k].to(tl.float32)
        squares += value * value
    factor = 1 / tl.sqrt_rn(tl.sum(squares, 1) / columns + eps)
    tl.store(rstd + i, factor, i < rows)
    for k in tl.static_range(CHUNKS):
        at, inside = _place(i, k, rows, columns, CHUNK)
        value = values[k].to(tl.float32) * factor[:, None] * _gamma(weights[k], ZERO_CENTERED)
        tl.store(y + at, value.to(y.dtype.element_ty), inside)


@triton.jit
def _backward_kernel(
    # the gradient of the norm, the normed rows, and what is added to the gradient of these if ADD [N, D]
    dy,
    total,
    dtotal,
    # [D], and 1 / RMS, FP32 [N]
    weight,
    rstd,
    # to write: the gradient of the rows [N, D], and this program's part of the weight's, FP32 [programs, D]
    dx,
    parts,
    rows,
    columns: tl.constexpr,
    ADD: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    CHUNKS: tl.constexpr = (columns + CHUNK - 1) // CHUNK
    step = tl.num_programs(0) * ROWS
    first = tl.program_id(0) * ROWS
    weights = _load_weight(weight, columns, CHUNK)
    sums = ()
    for _ in tl.static_range(CHUNKS):
        sums = sums + (tl.zeros((ROWS, CHUNK), tl.float32),)
    # With several stages the loads of later rows are on their way, through shared memory, while this one is computed.
    for start in tl.range(first, rows, step, num_stages=STAGES):
        i = (start + tl.arange(0, ROWS)).to(tl.int64)
        factor = tl.load(rstd + i, i < rows, 0.0)
        values = _load_rows(total, i, rows, columns, CHUNK)
        slopes = _load_rows(dy, i, rows, columns, CHUNK)
        if ADD:
            others = _load_rows(dtotal, i, rows, columns, CHUNK)
        products = tl.zeros((ROWS, CHUNK), tl.float32)
        new_sums = ()
        for k in tl.static_range(CHUNKS):
            unit = values[k].to(tl.float32) * factor[:, None]
            slope = slopes[k].to(tl.float32)
            products += slope * _gamma(weights[k], ZERO_CENTERED) * unit
            new_sums = new_sums + (sums[k] + slope * unit,)
        sums = new_sums
        share = tl.sum(products, 1) / columns
        for k in tl.static_range(CHUNKS):
            at, inside = _place(i, k, rows, columns, CHUNK)
            unit = values[k].to(tl.float32) * factor[:, None]
            slope = slopes[k].to(tl.float32) * _gamma(weights[k], ZERO_CENTERED)
            gradient = factor[:, None] * (slope - unit * share[:, None])
            if ADD:
                gradient += others[k].to(tl.float32)
            tl.store(dx + at, gradient.to(dx.dtype.element_ty), inside)
    for k in tl.static_range(CHUNKS):
        j = k * CHUNK + tl.arange(0, CHUNK)
        part = parts + tl.program_id(0).to(tl.int64) * columns + j
        tl.store(part, tl.sum(sums[k], 0), j < columns)


@triton.jit
def _add_parts_kernel(
    parts,
    dweight,
    count,
    columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the sums of the parts [count, D] over the first dimension."""
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, count, ROWS):
        i = start + tl.arange(0, ROWS)
        inside = (i < count)[:, None] & (j < columns)[None, :]
        total += tl.load(parts + i[:, None] * columns + j[None, :], inside, 0.0)
    tl.store(dweight + j, tl.sum(total, 0).to(dweight.dtype.element_ty), j < columns)


def forward(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    zero_centered: bool,
    tiles: RowTiles | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute RMSNorm of x + delta (None: of x) [N, D].

    Args:
        x: of any strides.
        delta: of the dtype of x, or None.
        weight: [D].
        eps: the number that is added to the mean square.
        zero_centered: whether the factor of a column is 1 + its weight.
        tiles: how the kernel goes through the rows; None: the best known.

    Returns:
        the norm [N, D] in the dtype of x, x + delta contiguous, rounded to that dtype, and 1 / RMS, FP32 [N].
    """
    rows, columns = x.shape
    tiles = tiles or forward_tiles(columns)
    x = x.contiguous()
    delta = None if delta is None else delta.contiguous()
    total = x if delta is None else torch.empty_like(x)
    y = torch.empty_like(x)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        _forward_kernel[(triton.cdiv(rows, tiles.rows),)](
            x,
            delta,
            total,
            weight,
            y,
            rstd,
            rows,
            eps,
            columns=columns,
            ADD=delta is not None,
            ZERO_CENTERED=zero_centered,
            ROWS=tiles.rows,
            CHUNK=tiles.chunk,
            num_warps=tiles.warps,
        )
    return y, total, rstd


def backward(
    dy: Tensor,
    total: Tensor,
    dtotal: Tensor | None,
    weight: Tensor,
    rstd: Tensor,
    zero_centered: bool,
    tiles: RowTiles | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `forward`.

    Args:
        dy: the gradient of the norm [N, D], of any strides.
        total: x + delta, contiguous.
        dtotal: another gradient of x + delta, which is added; None: there is none.
        weight: [D].
        rstd: 1 / RMS, FP32 [N].
        zero_centered: as in `forward`.
        tiles: as in `forward`.

    Returns:
        the gradient of x + delta [N, D], rounded once, and of the weight [D].
    """
    rows, columns = total.shape
    tiles = tiles or backward_tiles(columns, add=dtotal is not None)
    assert tiles.programs is not None
    dy = dy.contiguous()
    dtotal = None if dtotal is None else dtotal.contiguous()
    dx = torch.empty_like(total)
    dweight = torch.empty_like(weight)
    programs = min(tiles.programs, triton.cdiv(rows, tiles.rows))
    parts = torch.empty(programs, columns, dtype=torch.float32, device=total.device)
    with torch.cuda.device_of(total):
        _backward_kernel[(programs,)](
            dy,
            total,
            dtotal,
            weight,
            rstd,
            dx,
            parts,
            rows,
            columns=columns,
            ADD=dtotal is not None,
            ZERO_CENTERED=zero_centered,
            ROWS=tiles.rows,
            CHUNK=tiles.chunk,
            STAGES=tiles.stages,
            num_warps=tiles.warps,
            maxnreg=tiles.registers,
        )
        _add_parts_kernel[(triton.cdiv(columns, 32),)](
            parts, dweight, programs, columns, ROWS=128, COLUMNS=32, num_warps=8
        )
    return dx, dweight
