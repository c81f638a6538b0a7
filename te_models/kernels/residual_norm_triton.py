"""RMSNorm of 16-bit rows of the residual stream and its gradients, each in one pass at the speed of memory.

    total = x + delta,   y = total / rms(total) * gamma

A program holds whole rows in registers. A tensor in Triton has a power of two of columns, and widths such as 2,560 are
no such power, so that a row is a tuple of chunks; the compiler knows their number.

The gradient of gamma is a sum over all rows. Each program of the backward kernel adds up its own rows, and a second
kernel adds these partial sums in a fixed order, so that every run gets the same bits. Shapes: N rows, D columns.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

FEWEST_COLUMNS = 1024
MOST_COLUMNS = 8192
ALIGNMENT = 8  # columns: a thread loads 8 values of 16 bits at once


class RowTiles(NamedTuple):
    """How a kernel goes through rows.

    Attributes:
        rows: rows that a program computes at a time.
        chunk: columns of each tensor that holds a part of these rows; a power of two.
        warps: warps per program.
        programs: the most programs to launch; each then takes several groups of `rows`. None: one group per program.
        stages: depth of the software pipeline: the loads of `stages` - 1 groups run ahead of the computation.
        registers: the most registers per thread; None: as many as the compiler chooses.
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
    """Return the tiles of the backward kernel for rows of this width.

    Args:
        columns: the width D.
        add: whether the kernel adds a second gradient, the residual stream's.
    """
    # As many programs as the 132 multiprocessors of an H200 run at once with so many registers. At 2,560, 2,880, 3,584
    # and 5,120 columns these were the fastest of four to six choices (docs/internals/kernels.md has the times).
    if columns <= 2560:
        return RowTiles(rows=1, chunk=512, warps=4, programs=396, stages=3)
    if columns <= 3584:
        return RowTiles(rows=1, chunk=512, warps=4, programs=396, stages=3, registers=168)
    if columns <= 5120:
        stages = 2 if add else 3
        return RowTiles(rows=1, chunk=1024, warps=8, programs=264, stages=stages, registers=128)
    return RowTiles(rows=1, chunk=2048, warps=16, programs=132, stages=3, registers=128)


def supports_width(columns: int) -> bool:
    """Return whether the kernels compute rows of this width."""
    return FEWEST_COLUMNS <= columns <= MOST_COLUMNS and columns % ALIGNMENT == 0


@triton.jit
def _offsets_and_mask(i, k, rows, columns: tl.constexpr, CHUNK: tl.constexpr):
    """Return the offsets of chunk k of rows i, in elements, and the mask of those that exist: [R, CHUNK] each."""
    j = k * CHUNK + tl.arange(0, CHUNK)
    offsets = i[:, None] * columns + j[None, :]
    mask = (i < rows)[:, None]
    # Only the last chunk may reach beyond the columns.
    if (k + 1) * CHUNK > columns:
        mask = mask & (j < columns)[None, :]
    return offsets, mask


@triton.jit
def _load_rows(x, i, rows, columns: tl.constexpr, CHUNK: tl.constexpr):
    """Return rows i as a tuple of chunks [R, CHUNK] in the dtype of x, with zeros outside of x."""
    chunks = ()
    for k in tl.static_range((columns + CHUNK - 1) // CHUNK):
        offsets, mask = _offsets_and_mask(i, k, rows, columns, CHUNK)
        chunks = chunks + (tl.load(x + offsets, mask, 0.0),)
    return chunks


@triton.jit
def _gamma(chunk, ZERO_CENTERED: tl.constexpr):
    """Return the factors of a chunk of the weight [1, CHUNK] in FP32: 1 + weight if ZERO_CENTERED."""
    gamma = chunk.to(tl.float32)
    return 1 + gamma if ZERO_CENTERED else gamma


@triton.jit
def _load_weight(weight, columns: tl.constexpr, CHUNK: tl.constexpr):
    """Return the weight as a tuple of chunks [1, CHUNK]."""
    return _load_rows(weight, tl.zeros((1,), tl.int32), 1, columns, CHUNK)


@triton.jit
def _forward_kernel(
    # input [N, D]; if ADD also what is added to it, and the sum to write, [N, D] each
    x,
    delta,
    total,
    # [D]
    weight,
    # outputs: the norm [N, D], and 1 / RMS, FP32 [N]
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
    """Write the norm of rows, 1 / RMS, and if ADD the sum that is normed."""
    CHUNKS: tl.constexpr = (columns + CHUNK - 1) // CHUNK
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    # Load everything before the first store: the compiler moves no load across a store, which may alias.
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
            offsets, mask = _offsets_and_mask(i, k, rows, columns, CHUNK)
            tl.store(total + offsets, values[k], mask)
    squares = tl.zeros((ROWS, CHUNK), tl.float32)
    for k in tl.static_range(CHUNKS):
        value = values[k].to(tl.float32)
        squares += value * value
    inverse_rms = 1 / tl.sqrt_rn(tl.sum(squares, 1) / columns + eps)
    tl.store(rstd + i, inverse_rms, i < rows)
    for k in tl.static_range(CHUNKS):
        offsets, mask = _offsets_and_mask(i, k, rows, columns, CHUNK)
        value = values[k].to(tl.float32) * inverse_rms[:, None] * _gamma(weights[k], ZERO_CENTERED)
        tl.store(y + offsets, value.to(y.dtype.element_ty), mask)


@triton.jit
def _backward_kernel(
    # the gradient of the norm, the input of the norm, and if ADD another gradient of that input, [N, D] each
    dy,
    total,
    dtotal,
    # [D], and 1 / RMS, FP32 [N]
    weight,
    rstd,
    # outputs: the gradient of the input [N, D], and one partial sum of the weight's gradient per program,
    # FP32 [programs, D]
    dx,
    partial_sums,
    rows,
    columns: tl.constexpr,
    ADD: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write the gradients of the norm: of its input, and partial sums of the weight's.

    With x_hat = total * rstd and wdy = gamma * dy, a row's gradient is rstd * (wdy - x_hat * mean(wdy * x_hat)), and
    gamma's is the sum of dy * x_hat over rows.
    """
    CHUNKS: tl.constexpr = (columns + CHUNK - 1) // CHUNK
    step = tl.num_programs(0) * ROWS
    first_row = tl.program_id(0) * ROWS
    weights = _load_weight(weight, columns, CHUNK)
    sums = ()
    for _ in tl.static_range(CHUNKS):
        sums = sums + (tl.zeros((ROWS, CHUNK), tl.float32),)
    # With several stages, later rows are on their way to shared memory while these are computed.
    for start in tl.range(first_row, rows, step, num_stages=STAGES):
        i = (start + tl.arange(0, ROWS)).to(tl.int64)
        inverse_rms = tl.load(rstd + i, i < rows, 0.0)
        values = _load_rows(total, i, rows, columns, CHUNK)
        dys = _load_rows(dy, i, rows, columns, CHUNK)
        if ADD:
            dtotals = _load_rows(dtotal, i, rows, columns, CHUNK)
        wdy_x_hat = tl.zeros((ROWS, CHUNK), tl.float32)
        new_sums = ()
        for k in tl.static_range(CHUNKS):
            x_hat = values[k].to(tl.float32) * inverse_rms[:, None]
            dy_chunk = dys[k].to(tl.float32)
            wdy_x_hat += dy_chunk * _gamma(weights[k], ZERO_CENTERED) * x_hat
            new_sums = new_sums + (sums[k] + dy_chunk * x_hat,)
        sums = new_sums
        mean = tl.sum(wdy_x_hat, 1) / columns
        for k in tl.static_range(CHUNKS):
            offsets, mask = _offsets_and_mask(i, k, rows, columns, CHUNK)
            x_hat = values[k].to(tl.float32) * inverse_rms[:, None]
            wdy = dys[k].to(tl.float32) * _gamma(weights[k], ZERO_CENTERED)
            gradient = inverse_rms[:, None] * (wdy - x_hat * mean[:, None])
            if ADD:
                gradient += dtotals[k].to(tl.float32)
            tl.store(dx + offsets, gradient.to(dx.dtype.element_ty), mask)
    for k in tl.static_range(CHUNKS):
        j = k * CHUNK + tl.arange(0, CHUNK)
        partial_sum = partial_sums + tl.program_id(0).to(tl.int64) * columns + j
        tl.store(partial_sum, tl.sum(sums[k], 0), j < columns)


@triton.jit
def _add_parts_kernel(
    # FP32 [count, D], and the gradient of the weight to write [D]
    partial_sums,
    dweight,
    count,
    columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add up the backward kernel's partial sums, always in the same order."""
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, count, ROWS):
        i = start + tl.arange(0, ROWS)
        mask = (i < count)[:, None] & (j < columns)[None, :]
        total += tl.load(partial_sums + i[:, None] * columns + j[None, :], mask, 0.0)
    tl.store(dweight + j, tl.sum(total, 0).to(dweight.dtype.element_ty), j < columns)


def forward(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    zero_centered: bool,
    tiles: RowTiles | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return RMSNorm of x + delta, that sum, and 1 / RMS.

    Args:
        x: [N, D], BF16 or FP16, of any strides.
        delta: [N, D] in the dtype of x, of any strides; None: norm x itself.
        weight: [D] in the dtype of x.
        eps: added to the mean square.
        zero_centered: multiply by 1 + weight rather than by weight.
        tiles: how the kernel goes through the rows; None: `forward_tiles`.

    Returns:
        y: the norm [N, D] in the dtype of x.
        total: x + delta, rounded to the dtype of x, contiguous.
        rstd: 1 / RMS, FP32 [N].
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
    """Return the gradients of `forward`.

    Args:
        dy: the gradient of y [N, D], in the dtype of total, of any strides.
        total: x + delta, contiguous, as `forward` returned it.
        dtotal: the gradient that reaches x + delta past the norm [N, D], to be added; None: there is none.
        weight: [D].
        rstd: 1 / RMS, FP32 [N].
        zero_centered: as in `forward`.
        tiles: how the kernel goes through the rows, with `programs`; None: `backward_tiles`.

    Returns:
        dx: the gradient of x + delta [N, D] in its dtype, rounded once.
        dweight: the gradient of the weight [D] in its dtype.
    """
    rows, columns = total.shape
    tiles = tiles or backward_tiles(columns, add=dtotal is not None)
    assert tiles.programs is not None
    dy = dy.contiguous()
    dtotal = None if dtotal is None else dtotal.contiguous()
    dx = torch.empty_like(total)
    dweight = torch.empty_like(weight)
    programs = min(tiles.programs, triton.cdiv(rows, tiles.rows))
    partial_sums = torch.empty(programs, columns, dtype=torch.float32, device=total.device)
    with torch.cuda.device_of(total):
        _backward_kernel[(programs,)](
            dy,
            total,
            dtotal,
            weight,
            rstd,
            dx,
            partial_sums,
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
            partial_sums, dweight, programs, columns, ROWS=128, COLUMNS=32, num_warps=8
        )
    return dx, dweight
