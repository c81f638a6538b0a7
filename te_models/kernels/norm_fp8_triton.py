"""RMSNorm of the residual stream, with its sum, that writes FP8 for the next te.Linear."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_models.kernels.count_cast_triton import Counts
from te_models.kernels.count_four_triton import (
    MOST_TILES,
    add_care,
    add_saturated,
    add_state,
    count_rows,
    count_rows_with_care,
    mark_of,
    marked,
    needs_care,
    new_care,
    new_state,
    programs_of,
    saturated_of,
    small_tiles,
    table_of,
)
from te_models.kernels.fp8_tiles_triton import (
    BAND,
    COLUMNS,
    ROWS,
    FP8Data,
    new_fp8,
    note_inverse,
    raise_amax,
    store_fp8,
    write_current_scale,
)
from te_models.kernels.handover import CastScale
from te_models.kernels.handover_triton import load_tile, place

NORM_ROWS = 32  # of which a program goes through all columns
NORM_COLUMNS = 128  # at a time
REGISTERS = 128  # of a program that counts: four per multiprocessor, as many as without counts
# Elements of a program that holds whole rows, and its warps.
WHOLE_ROWS = 8192
WHOLE_WARPS = 4


@triton.jit
def _write_rstd(
    x,
    delta,
    total,
    rstd,
    rows,
    columns,
    eps,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write 1 / RMS of this program's rows, and if ADD their sum with what the block before adds."""
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    # Summed at the end, since a sum synchronizes the threads.
    squares = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, columns, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        inside = (i < rows)[:, None] & (j < columns)[None, :]
        at = i[:, None] * columns + j[None, :]
        value = tl.load(x + at, inside, 0.0)
        if ADD:
            value = (value.to(tl.float32) + tl.load(delta + at, inside, 0.0).to(tl.float32)).to(
                x.dtype.element_ty
            )
            tl.store(total + at, value, mask=inside)
        value = value.to(tl.float32)
        squares += value * value
    tl.store(rstd + i, 1 / tl.sqrt_rn(tl.sum(squares, 1) / columns + eps), mask=i < rows)


@triton.jit
def _normed(source, weight, inverses, i, j, rows, columns, ZERO_CENTERED: tl.constexpr):
    """Return channels j of rows i to i + 3, normed, as four tiles; `inverses` are 1 / RMS of these rows."""
    inverse_a, inverse_b, inverse_c, inverse_d = inverses
    gamma = tl.load(weight + j, j < columns, 0.0).to(tl.float32)[None, :]
    gamma = 1 + gamma if ZERO_CENTERED else gamma
    normed_a = load_tile(source, i, j, rows, columns, columns) * inverse_a[:, None] * gamma
    normed_b = load_tile(source, i + 1, j, rows, columns, columns) * inverse_b[:, None] * gamma
    normed_c = load_tile(source, i + 2, j, rows, columns, columns) * inverse_c[:, None] * gamma
    normed_d = load_tile(source, i + 3, j, rows, columns, columns) * inverse_d[:, None] * gamma
    return normed_a, normed_b, normed_c, normed_d


@triton.jit
def _norm_kernel(
    # the residual stream [N, D], what the block before adds to it, and the sum to write if ADD
    x,
    delta,
    total,
    # [D], and 1 / RMS to write for backward, FP32 [N]
    weight,
    rstd,
    # the FP8 output: uint8 [N, K] and its transpose [K, N] (either may be None), the scale and amax of its quantizer,
    # and the inverse scale to write, FP32 [1] each
    data,
    transposed,
    scale,
    amax,
    scale_inv,
    # N and D
    rows,
    columns,
    eps,
    # the fields and codes of a recorder that counts casts (count_cast_triton.py); None: not compiled
    counts,
    codes,
    spread,
    ADD: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    E5M2: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGNED: tl.constexpr,  # of the pass that counts: whether rows are whole blocks of the hash
):
    """Write the norm of NORM_ROWS rows as FP8: a pass over their columns for 1 / RMS, and one for the values."""
    _write_rstd(x, delta, total, rstd, rows, columns, eps, ADD, ROWS, COLUMNS)
    s = tl.load(scale)
    tl.debug_barrier()  # other threads have written the 1 / RMS and the sums that are read below
    group = tl.program_id(0).to(tl.int64) * (ROWS // 4) + tl.arange(0, ROWS // 4)
    i = 4 * group
    source = total if ADD else x
    a = tl.load(rstd + i, i < rows, 0.0)
    b = tl.load(rstd + i + 1, i < rows, 0.0)
    c = tl.load(rstd + i + 2, i < rows, 0.0)
    d = tl.load(rstd + i + 3, i < rows, 0.0)
    inverses = (a, b, c, d)
    largest = tl.zeros((ROWS // 4, COLUMNS), tl.float32)
    for start in range(0, columns, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        normed_a, normed_b, normed_c, normed_d = _normed(
            source, weight, inverses, i, j, rows, columns, ZERO_CENTERED
        )
        tile = store_fp8(
            normed_a,
            normed_b,
            normed_c,
            normed_d,
            s,
            group,
            j,
            rows,
            columns,
            data,
            transposed,
            columns,
            E5M2,
        )
        largest = tl.maximum(largest, tile)
    raise_amax(amax, largest)
    if counts is not None:
        # A pass of its own: in the one above, counts would not fit into the registers.
        state = new_state(ROWS // 4, COLUMNS)
        top = tl.program_id(0) * ROWS
        inverse = tl.div_rn(tl.full((), 1.0, tl.float32), s)
        for start in range(0, columns, COLUMNS):
            j = start + tl.arange(0, COLUMNS)
            values = _normed(source, weight, inverses, i, j, rows, columns, ZERO_CENTERED)
            state = count_rows(state, values, s, top, start, rows, columns, 0, E5M2, ALIGNED)
        elements = tl.full((), 1.0, tl.float64) * rows * columns
        care_needed = needs_care(state, inverse)
        add_state(counts, codes, spread, state, care_needed, s, elements, E5M2)
        marks = marked(state)
        if care_needed > 0:
            care = new_care()
            for start in range(0, columns, COLUMNS):
                j = start + tl.arange(0, COLUMNS)
                values = _normed(source, weight, inverses, i, j, rows, columns, ZERO_CENTERED)
                care = count_rows_with_care(care, values, s, top, start, rows, columns, E5M2)
            add_care(counts, codes, spread, care)
        elif marks != 0:
            saturated = tl.zeros((), tl.int64)
            for start in range(0, columns, COLUMNS):
                if (marks & mark_of(start // COLUMNS)) != 0:
                    j = start + tl.arange(0, COLUMNS)
                    values = _normed(source, weight, inverses, i, j, rows, columns, ZERO_CENTERED)
                    saturated += saturated_of(values, inverse, E5M2)
            add_saturated(counts, spread, saturated)
    note_inverse(s, scale_inv)


def norm(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    zero_centered: bool,
    scale: Tensor,
    amax: Tensor,
    e5m2: bool,
    counts: Counts | None = None,
) -> tuple[FP8Data, Tensor, Tensor]:
    """Return RMSNorm of x + delta in FP8, that sum, and 1 / RMS.

    Args:
        x: [N, D] in 16 bits, N a multiple of 4.
        delta: [N, D] in the dtype of x; None: norm x itself.
        weight: [D].
        eps: added to the mean square.
        zero_centered: multiply by 1 + weight rather than by weight.
        scale: the factor before the cast, FP32 [1].
        amax: FP32 [1], raised to the amax of the norm.
        e5m2: cast to E5M2 rather than E4M3.
        counts: where a recorder counts the cast; None: it does not.

    Returns:
        fp8: data [N, D] and its transposed copy [D, N].
        total: x + delta, rounded to the dtype of x, contiguous.
        rstd: 1 / RMS, FP32 [N].
    """
    rows, columns = x.shape
    assert counts is None or columns <= MOST_TILES * NORM_COLUMNS
    x = x.contiguous()
    delta = None if delta is None else delta.contiguous()
    out = new_fp8(rows, columns, x.device)
    total = x if delta is None else torch.empty_like(x)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    programs = triton.cdiv(rows, NORM_ROWS)
    _norm_kernel[(programs, 1)](
        x,
        x if delta is None else delta,
        total,
        weight,
        rstd,
        out.data,
        out.transposed,
        scale,
        amax,
        out.scale_inv,
        rows,
        columns,
        eps,
        **table_of(counts),
        ADD=delta is not None,
        ZERO_CENTERED=zero_centered,
        E5M2=e5m2,
        ROWS=NORM_ROWS,
        COLUMNS=NORM_COLUMNS,
        ALIGNED=columns % 64 == 0,
        num_warps=4,
        maxnreg=None if counts is None else REGISTERS,
    )
    return out, total, rstd


@triton.jit
def whole_rows_normed(
    x,
    delta,
    total,
    weight,
    rstd,
    i,
    j,
    rows,
    columns,
    eps,
    ADD: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
):
    """Return the norm of rows i, of which j are all channels, rounded to the dtype of x, in FP32.

    Their 1 / RMS is written, and if ADD their sum with what the block before adds.
    """
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    at = i[:, None] * columns + j[None, :]
    value = tl.load(x + at, inside, 0.0)
    if ADD:
        value = value.to(tl.float32) + tl.load(delta + at, inside, 0.0).to(tl.float32)
        value = value.to(x.dtype.element_ty)
        tl.store(total + at, value, inside)
    value = value.to(tl.float32)
    factor = 1 / tl.sqrt_rn(tl.sum(value * value, 1) / columns + eps)
    tl.store(rstd + i, factor, i < rows)
    gamma = tl.load(weight + j, j < columns, 0.0).to(tl.float32)
    gamma = 1 + gamma if ZERO_CENTERED else gamma
    value = value * factor[:, None] * gamma[None, :]
    return value.to(x.dtype.element_ty).to(tl.float32)


@triton.jit
def rounded_norm(total, weight, rstd, i, j, rows, columns, ZERO_CENTERED: tl.constexpr):
    """Return channels j of rows i, normed with the 1 / RMS that was written, rounded to the dtype of `total`."""
    gamma = tl.load(weight + j, j < columns, 0.0).to(tl.float32)
    gamma = 1 + gamma if ZERO_CENTERED else gamma
    factor = tl.load(rstd + i, i < rows, 0.0)
    value = load_tile(total, i, j, rows, columns, columns)
    value = value * factor[:, None] * gamma[None, :]
    return value.to(total.dtype.element_ty).to(tl.float32)


@triton.jit
def _amax_kernel(
    # as of _norm_kernel
    x,
    delta,
    total,
    weight,
    rstd,
    amax,
    rows,
    columns,
    eps,
    ADD: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    # rows of a program, and columns, a power of two
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Raise `amax` to the amax of the norm of whole rows; write their 1 / RMS, and if ADD their sum."""
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, WIDTH)
    value = whole_rows_normed(
        x, delta, total, weight, rstd, i, j, rows, columns, eps, ADD, ZERO_CENTERED
    )
    raise_amax(amax, tl.abs(value))


@triton.jit
def _rounded_four(total, weight, rstd, i, j, rows, columns, ZERO_CENTERED: tl.constexpr):
    """Return `rounded_norm` of the first to fourth rows of groups of four that begin at rows i."""
    a = rounded_norm(total, weight, rstd, i, j, rows, columns, ZERO_CENTERED)
    b = rounded_norm(total, weight, rstd, i + 1, j, rows, columns, ZERO_CENTERED)
    c = rounded_norm(total, weight, rstd, i + 2, j, rows, columns, ZERO_CENTERED)
    d = rounded_norm(total, weight, rstd, i + 3, j, rows, columns, ZERO_CENTERED)
    return a, b, c, d


@triton.jit
def _rounded_cast_kernel(
    # the sum [N, D], weight [D] and 1 / RMS [N]
    total,
    weight,
    rstd,
    # as of _norm_kernel
    data,
    transposed,
    scale,
    scale_inv,
    rows,
    columns,
    # the fields and codes of a recorder that counts casts (count_cast_triton.py); None: not compiled
    counts,
    codes,
    spread,
    ZERO_CENTERED: tl.constexpr,
    E5M2: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BAND: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Cast the norm to FP8, with the sum and the 1 / RMS that `_amax_kernel` wrote."""
    s = tl.load(scale)
    if counts is None:
        number = tl.program_id(0)
        group, j, _, _ = place(number, rows, columns, ROWS, COLUMNS, BAND)
        a, b, c, d = _rounded_four(total, weight, rstd, 4 * group, j, rows, columns, ZERO_CENTERED)
        store_fp8(a, b, c, d, s, group, j, rows, columns, data, transposed, columns, E5M2)
    else:
        tiles = tl.cdiv(rows, ROWS) * tl.cdiv(columns, COLUMNS)
        state = new_state(ROWS // 4, COLUMNS)
        for number in range(tl.program_id(0), tiles, tl.num_programs(0)):
            group, j, top, left = place(number, rows, columns, ROWS, COLUMNS, BAND)
            values = _rounded_four(total, weight, rstd, 4 * group, j, rows, columns, ZERO_CENTERED)
            a, b, c, d = values
            store_fp8(a, b, c, d, s, group, j, rows, columns, data, transposed, columns, E5M2)
            state = count_rows(state, values, s, top, left, rows, columns, 0, E5M2, ALIGNED)
        inverse = tl.div_rn(tl.full((), 1.0, tl.float32), s)
        elements = tl.full((), 1.0, tl.float64) * rows * columns
        care_needed = needs_care(state, inverse)
        add_state(counts, codes, spread, state, care_needed, s, elements, E5M2)
        if care_needed > 0:
            care = new_care()
            for number in range(tl.program_id(0), tiles, tl.num_programs(0)):
                group, j, top, left = place(number, rows, columns, ROWS, COLUMNS, BAND)
                values = _rounded_four(
                    total, weight, rstd, 4 * group, j, rows, columns, ZERO_CENTERED
                )
                care = count_rows_with_care(care, values, s, top, left, rows, columns, E5M2)
            add_care(counts, codes, spread, care)
        elif marked(state) != 0:
            saturated = tl.zeros((), tl.int64)
            for number in range(tl.program_id(0), tiles, tl.num_programs(0)):
                group, j, _, _ = place(number, rows, columns, ROWS, COLUMNS, BAND)
                values = _rounded_four(
                    total, weight, rstd, 4 * group, j, rows, columns, ZERO_CENTERED
                )
                saturated += saturated_of(values, inverse, E5M2)
            add_saturated(counts, spread, saturated)
    note_inverse(s, scale_inv)


def whole_rows(columns: int) -> dict[str, int]:
    """Return the keywords of a kernel whose programs hold whole rows of this width."""
    width = max(128, triton.next_power_of_2(columns))
    warps = WHOLE_WARPS if width <= WHOLE_ROWS else 4 * WHOLE_WARPS
    return dict(ROWS=max(1, WHOLE_ROWS // width), WIDTH=width, num_warps=warps)


def norm_measured(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    zero_centered: bool,
    e5m2: bool,
    counts: Counts | None = None,
) -> tuple[FP8Data, Tensor, Tensor]:
    """Return `norm` under current scaling: the scale maps the amax of the norm to the format's largest number.

    Values are rounded to the dtype of x before they are measured and cast, as if the norm were stored first.
    Arguments and results are as in `norm`.
    """
    rows, columns = x.shape
    x = x.contiguous()
    delta = None if delta is None else delta.contiguous()
    out = new_fp8(rows, columns, x.device)
    total = x if delta is None else torch.empty_like(x)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    cast_scale = CastScale(
        scale=torch.empty(1, dtype=torch.float32, device=x.device),
        amax=torch.zeros(1, dtype=torch.float32, device=x.device),
        e5m2=e5m2,
    )
    options = whole_rows(columns)
    with torch.cuda.device_of(x):
        _amax_kernel[(triton.cdiv(rows, options["ROWS"]),)](
            x,
            delta,
            total,
            weight,
            rstd,
            cast_scale.amax,
            rows,
            columns,
            eps,
            ADD=delta is not None,
            ZERO_CENTERED=zero_centered,
            **options,
        )
        write_current_scale(cast_scale)
        tiles = triton.cdiv(rows, ROWS) * triton.cdiv(columns, COLUMNS)
        _rounded_cast_kernel[(programs_of(tiles, counts),)](
            total,
            weight,
            rstd,
            out.data,
            out.transposed,
            cast_scale.scale,
            out.scale_inv,
            rows,
            columns,
            **table_of(counts),
            ZERO_CENTERED=zero_centered,
            E5M2=e5m2,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            BAND=BAND,
            ALIGNED=columns % 64 == 0,
            num_warps=4,
            **small_tiles(COLUMNS, counts),
        )
    return out, total, rstd
