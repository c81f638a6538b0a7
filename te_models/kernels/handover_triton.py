"""Operations before a te.Linear that write the FP8 it multiplies: data, transpose and amax in one pass.

On Hopper a GEMM needs the contracted dimension last in both operands, so the forward reads the data as it is and the
weight's gradient reads it transposed. A separate cast costs a BF16 round trip, and a separate transpose another pass.
Each function uses a delayed scale (FP32 [1]) and raises `amax` (FP32 [1]) to the amax of its FP32 result; FP8 data is
uint8. N is a multiple of 4: the bytes of four rows are one word, so that words are transposed, not bytes.

Tested on a CPU through Triton's interpreter (TRITON_INTERPRET=1), which has no instruction for the conversion and uses
integer arithmetic instead.
"""

import triton
import triton.language as tl
from torch import Tensor

from te_models.kernels.count_cast_triton import Counts
from te_models.kernels.count_four_triton import (
    MOST_TILES,
    add_care,
    add_saturated,
    add_state,
    amaxes,
    count_rows,
    count_rows_with_care,
    mark_of,
    marked,
    needs_care,
    new_care,
    new_state,
    saturated_of,
    table_of,
)
from te_models.kernels.fp8_tiles_triton import (
    BAND,
    COLUMNS,
    ROWS,
    FP8Data,
    largest_of,
    new_fp8,
    note_inverse,
    raise_amax,
    sigmoid,
    store_fp8,
    tile,
    unwritten,
)
from te_models.kernels.handover import CastScale

# Programs of a kernel that counts: four times as many as an H100 runs at once. The few that meet saturated values go
# twice through some tiles, and with fewer and longer programs the others would wait for them.
PROGRAMS = 2112
COUNTING: dict[str, int] = dict(num_warps=4, maxnreg=128)
# The same for the gradient of a gated activation, whose tiles have two halves.
PROGRAMS_OF_HALVES = 1584
COUNTING_HALVES: dict[str, int] = dict(num_warps=4, maxnreg=160)


@triton.jit
def place(number, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BAND: tl.constexpr):
    """Return the groups of four rows of the tile of this number and its columns, and its first row and column."""
    row, column = tile(tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS), BAND, number)
    group = row.to(tl.int64) * (ROWS // 4) + tl.arange(0, ROWS // 4)
    j = column.to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    return group, j, row * ROWS, column * COLUMNS


@triton.jit
def load_tile(x, i, j, rows, columns, stride):
    """Load x at rows i and columns j, in FP32."""
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    return tl.load(x + i[:, None] * stride + j[None, :], inside, 0.0).to(tl.float32)


GELU = tl.constexpr(2 * 0.7978845608028654)  # 2 sqrt(2 / pi), of the approximation of GELU by tanh
GELU_CUBE = tl.constexpr(0.044715)


@triton.jit
def activation_and_slope(x, ACTIVATION: tl.constexpr):
    """Return the activation of this name (te_models.kernels.elementwise.ACTIVATIONS), and its derivative."""
    if ACTIVATION == "silu":
        sigma = sigmoid(x)
        value = x * sigma
        slope = sigma + value * (1 - sigma)
    elif ACTIVATION == "relu2":
        positive = tl.maximum(x, 0.0)
        value = positive * positive
        slope = 2 * positive
    else:
        tl.static_assert(ACTIVATION == "gelu_pytorch_tanh")
        # (1 + tanh(u)) / 2 is the sigmoid of 2 u.
        square = x * x * GELU_CUBE
        sigma = sigmoid(tl.maximum((x + x * square) * GELU, -80.0))  # exp(80) is finite
        value = x * sigma
        slope = sigma + value * (1 - sigma) * (1 + 3 * square) * GELU
    return value, slope


@triton.jit
def _value(x, i, j, rows, columns, ACTIVATION: tl.constexpr, GATED: tl.constexpr):
    """Return x at rows i and columns j, its activation, or with GATED act(gate) * up of x = [gate | up]."""
    value = load_tile(x, i, j, rows, columns, 2 * columns if GATED else columns)
    if ACTIVATION is not None:
        value, _ = activation_and_slope(value, ACTIVATION)
    if GATED:
        value *= load_tile(x + columns, i, j, rows, columns, 2 * columns)
    return value


@triton.jit
def _slope(dy, x, i, j, rows, columns, ACTIVATION: tl.constexpr):
    _, slope = activation_and_slope(load_tile(x, i, j, rows, columns, columns), ACTIVATION)
    return load_tile(dy, i, j, rows, columns, columns) * slope


@triton.jit
def _slopes(dy, gate_up, i, j, rows, columns, ACTIVATION: tl.constexpr):
    gate = load_tile(gate_up, i, j, rows, columns, 2 * columns)
    up = load_tile(gate_up + columns, i, j, rows, columns, 2 * columns)
    slope = load_tile(dy, i, j, rows, columns, columns)
    value, gate_slope = activation_and_slope(gate, ACTIVATION)
    return slope * up * gate_slope, slope * value


@triton.jit
def _values(x, dy, group, j, rows, columns, ACTIVATION: tl.constexpr, GATED: tl.constexpr):
    """Return the values to cast, as FP32 tiles of the first to fourth rows of groups of four, and their second half.

    Without a second half, the same again: only the gradient of a gated activation has one.
    """
    i = 4 * group
    if dy is None:
        a = _value(x, i, j, rows, columns, ACTIVATION, GATED)
        b = _value(x, i + 1, j, rows, columns, ACTIVATION, GATED)
        c = _value(x, i + 2, j, rows, columns, ACTIVATION, GATED)
        d = _value(x, i + 3, j, rows, columns, ACTIVATION, GATED)
        e, f, g, h = a, b, c, d
    elif GATED:
        a, e = _slopes(dy, x, i, j, rows, columns, ACTIVATION)
        b, f = _slopes(dy, x, i + 1, j, rows, columns, ACTIVATION)
        c, g = _slopes(dy, x, i + 2, j, rows, columns, ACTIVATION)
        d, h = _slopes(dy, x, i + 3, j, rows, columns, ACTIVATION)
    else:
        a = _slope(dy, x, i, j, rows, columns, ACTIVATION)
        b = _slope(dy, x, i + 1, j, rows, columns, ACTIVATION)
        c = _slope(dy, x, i + 2, j, rows, columns, ACTIVATION)
        d = _slope(dy, x, i + 3, j, rows, columns, ACTIVATION)
        e, f, g, h = a, b, c, d
    return (a, b, c, d), (e, f, g, h)


@triton.jit
def _store(
    values,
    second,
    group,
    j,
    rows,
    columns,
    data,
    transposed,
    scale,
    HALVES: tl.constexpr,
    E5M2: tl.constexpr,
):
    """Write the FP8 of `_values`; return the largest magnitude of each place, for `raise_amax`."""
    width = 2 * columns if HALVES else columns
    a, b, c, d = values
    largest = store_fp8(a, b, c, d, scale, group, j, rows, columns, data, transposed, width, E5M2)
    if HALVES:
        e, f, g, h = second
        half = transposed
        to_right = data
        if transposed is not None:
            half = transposed + rows.to(tl.int64) * columns
        if data is not None:
            to_right = data + columns
        of_second = store_fp8(
            e, f, g, h, scale, group, j, rows, columns, to_right, half, width, E5M2
        )
        largest = tl.maximum(largest, of_second)
    return largest


@triton.jit
def _cast_kernel(
    # [N, K], or with GATED [N, 2K] = [gate | up]; the gradient of the activation [N, K], or None to cast the activation
    x,
    dy,
    # the FP8 output: uint8 [N, K] and its transpose [K, N] (either may be None), the scale and amax of its quantizer,
    # and the inverse scale to write, FP32 [1] each; with HALVES of [N, 2K]
    data,
    transposed,
    scale,
    amax,
    scale_inv,
    # N and K
    rows,
    columns,
    # the fields and codes of a recorder that counts casts (count_cast_triton.py); None: not compiled
    counts,
    codes,
    spread,
    # name of the activation, or None; whether the output has two halves, as the gradient of a gated one does
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    HALVES: tl.constexpr,
    # format, and tile
    E5M2: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BAND: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Write x, its activation or the gradient of its activation as FP8; count the cast if `counts` are given."""
    s = tl.load(scale)
    if counts is None:
        group, j, _, _ = place(tl.program_id(0), rows, columns, ROWS, COLUMNS, BAND)
        values, second = _values(x, dy, group, j, rows, columns, ACTIVATION, GATED)
        largest = _store(values, second, group, j, rows, columns, data, transposed, s, HALVES, E5M2)
        raise_amax(amax, largest)
    else:
        width = 2 * columns if HALVES else columns
        tiles = tl.cdiv(rows, ROWS) * tl.cdiv(columns, COLUMNS)
        state = new_state(ROWS // 4, COLUMNS)
        for number in range(tl.program_id(0), tiles, tl.num_programs(0)):
            group, j, top, left = place(number, rows, columns, ROWS, COLUMNS, BAND)
            values, second = _values(x, dy, group, j, rows, columns, ACTIVATION, GATED)
            _store(values, second, group, j, rows, columns, data, transposed, s, HALVES, E5M2)
            state = count_rows(state, values, s, top, left, rows, columns, 0, E5M2, ALIGNED, True)
            if HALVES:
                state = count_rows(
                    state, second, s, top, left, rows, columns, columns, E5M2, ALIGNED, True
                )
        raise_amax(amax, amaxes(state))
        inverse = tl.div_rn(tl.full((), 1.0, tl.float32), s)
        elements = tl.full((), 1.0, tl.float64) * rows * width
        care_needed = needs_care(state, inverse)
        add_state(counts, codes, spread, state, care_needed, s, elements, E5M2)
        marks = marked(state)
        if care_needed > 0:
            care = new_care()
            largest = tl.zeros((ROWS // 4, COLUMNS), tl.float32)
            for number in range(tl.program_id(0), tiles, tl.num_programs(0)):
                group, j, top, left = place(number, rows, columns, ROWS, COLUMNS, BAND)
                values, second = _values(x, dy, group, j, rows, columns, ACTIVATION, GATED)
                # Above, a NaN hides the values beside it.
                largest = tl.maximum(largest, largest_of(values))
                care = count_rows_with_care(care, values, s, top, left, rows, columns, E5M2)
                if HALVES:
                    largest = tl.maximum(largest, largest_of(second))
                    care = count_rows_with_care(care, second, s, top, left, rows, columns, E5M2)
            raise_amax(amax, largest)
            add_care(counts, codes, spread, care)
        elif marks != 0:
            saturated = tl.zeros((), tl.int64)
            halves: tl.constexpr = 2 if HALVES else 1
            for number in range(tl.program_id(0), tiles, tl.num_programs(0)):
                counted = number // tl.num_programs(0) * halves  # tiles of this program before
                marks_here = mark_of(counted)
                if HALVES:
                    marks_here |= mark_of(counted + 1)
                if (marks & marks_here) != 0:
                    group, j, _, _ = place(number, rows, columns, ROWS, COLUMNS, BAND)
                    first, second = _values(x, dy, group, j, rows, columns, ACTIVATION, GATED)
                    saturated += saturated_of(first, inverse, E5M2)
                    if HALVES:
                        saturated += saturated_of(second, inverse, E5M2)
            add_saturated(counts, spread, saturated)
    note_inverse(s, scale_inv)


def _by_tiles(
    x: Tensor,
    dy: Tensor | None,
    rows: int,
    columns: int,
    activation: str | None,
    gated: bool,
    cast_scale: CastScale,
    out: FP8Data,
    counts: Counts | None,
) -> FP8Data:
    """Write `out`, one program per tile of [rows, columns]: a cast of `_values`.

    The kernel reads rows one after the other, so inputs of any other strides are copied first.
    """
    tiles = triton.cdiv(rows, ROWS) * triton.cdiv(columns, COLUMNS)
    halves = dy is not None and gated
    if counts is None:
        programs = tiles
        options: dict[str, int] = dict(num_warps=4)
    else:
        # Few programs, each of which adds to the table once; one counts two tiles at a time at most.
        fewest = PROGRAMS_OF_HALVES if halves else PROGRAMS
        programs = min(tiles, max(fewest, triton.cdiv(tiles, MOST_TILES // 2)))
        options = COUNTING_HALVES if halves else COUNTING
    _cast_kernel[(programs,)](
        x.contiguous(),
        None if dy is None else dy.contiguous(),
        out.data,
        out.transposed,
        cast_scale.scale,
        cast_scale.amax,
        out.scale_inv,
        rows,
        columns,
        **table_of(counts),
        ACTIVATION=activation,
        GATED=gated,
        HALVES=halves,
        E5M2=cast_scale.e5m2,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        BAND=BAND,
        ALIGNED=columns % 64 == 0,
        **options,
    )
    return out


def cast(
    x: Tensor, scale: Tensor, amax: Tensor, e5m2: bool, counts: Counts | None = None
) -> FP8Data:
    """Cast x [N, K], of any float dtype: data [N, K], the bits of Transformer Engine's cast.

    Here and below `counts` are where a recorder counts what the cast does to the values; None: it does not.
    """
    rows, columns = x.shape
    out = new_fp8(rows, columns, x.device)
    cast_scale = CastScale(scale, amax, e5m2)
    return _by_tiles(x, None, rows, columns, None, False, cast_scale, out, counts)


def activate(
    gate_up: Tensor,
    scale: Tensor,
    amax: Tensor,
    e5m2: bool,
    activation: str = "silu",
    gated: bool = True,
    rowwise: bool = True,
    counts: Counts | None = None,
) -> FP8Data:
    """Compute elementwise.mlp_activation of gate_up [N, 2F], or [N, F] if not `gated`: data [N, F].

    Only the transposed copy if not `rowwise`.
    """
    rows, columns = gate_up.shape
    if gated:
        columns //= 2
    out = new_fp8(rows, columns, gate_up.device, rowwise)
    cast_scale = CastScale(scale, amax, e5m2)
    return _by_tiles(gate_up, None, rows, columns, activation, gated, cast_scale, out, counts)


def activate_backward(
    dy: Tensor,
    gate_up: Tensor,
    scale: Tensor,
    amax: Tensor,
    e5m2: bool,
    activation: str = "silu",
    gated: bool = True,
    written: bool = True,
    counts: Counts | None = None,
) -> FP8Data:
    """Compute the gradient of gate_up for dy [N, F] of `activate`'s output: data of the shape of gate_up.

    With `written` False, the amax is raised and nothing is written.
    """
    rows, columns = dy.shape
    out = new_fp8(rows, gate_up.shape[1], dy.device) if written else unwritten(dy.device)
    cast_scale = CastScale(scale, amax, e5m2)
    return _by_tiles(gate_up, dy, rows, columns, activation, gated, cast_scale, out, counts)
