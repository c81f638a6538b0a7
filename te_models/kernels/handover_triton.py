"""Operations before a te.Linear that write the FP8 it multiplies: data, transpose and amax in one pass.

On Hopper a GEMM needs the contracted dimension last in both operands, so the forward reads the data as it is and the
weight's gradient reads it transposed. A separate cast costs a BF16 round trip, and a separate transpose another pass.
Each function uses a delayed scale (FP32 [1]) and raises `amax` (FP32 [1]) to the amax of its FP32 result; FP8 data is
uint8. N is a multiple of 4: the bytes of four rows are one word, so that words are transposed, not bytes.

Tested on a CPU through Triton's interpreter (TRITON_INTERPRET=1), which has no instruction for the conversion and uses
integer arithmetic instead.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from te_models.kernels.count_cast_triton import Counts, count_tile
from te_models.kernels.fp8_tiles_triton import (
    BAND,
    COLUMNS,
    ROWS,
    FP8Data,
    new_fp8,
    note_inverse,
    raise_amax,
    sigmoid,
    store_fp8,
    tile,
)
from te_models.kernels.handover import CastScale


@triton.jit
def _place(rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BAND: tl.constexpr):
    """Return the groups of four rows of this program's tile, and its columns."""
    row, column = tile(tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS), BAND)
    group = row.to(tl.int64) * (ROWS // 4) + tl.arange(0, ROWS // 4)
    return group, column.to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)


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
        opening = sigmoid(x)
        value = x * opening
        slope = opening + value * (1 - opening)
    elif ACTIVATION == "relu2":
        positive = tl.maximum(x, 0.0)
        value = positive * positive
        slope = 2 * positive
    else:
        tl.static_assert(ACTIVATION == "gelu_pytorch_tanh")
        # (1 + tanh(u)) / 2 is the sigmoid of 2 u.
        square = x * x * GELU_CUBE
        opening = sigmoid(tl.maximum((x + x * square) * GELU, -80.0))  # exp(80) is finite
        value = x * opening
        slope = opening + value * (1 - opening) * (1 + 3 * square) * GELU
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
def _cast_kernel(
    # [N, K], or with GATED [N, 2K] = [gate | up]
    x,
    # the FP8 output: uint8 [N, K] and its transpose [K, N] (either may be None), the scale and amax of its quantizer,
    # and the inverse scale to write, FP32 [1] each
    data,
    transposed,
    scale,
    amax,
    scale_inv,
    # N and K
    rows,
    columns,
    # where a recorder counts the cast (count_cast_triton.py); None: not compiled
    counts,
    codes,
    flag,
    spread,
    # name of the activation, or None
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    # format, and tile
    E5M2: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BAND: tl.constexpr,
):
    group, j = _place(rows, columns, ROWS, COLUMNS, BAND)
    i = 4 * group
    a = _value(x, i, j, rows, columns, ACTIVATION, GATED)
    b = _value(x, i + 1, j, rows, columns, ACTIVATION, GATED)
    c = _value(x, i + 2, j, rows, columns, ACTIVATION, GATED)
    d = _value(x, i + 3, j, rows, columns, ACTIVATION, GATED)
    s = tl.load(scale)
    raise_amax(
        amax, store_fp8(a, b, c, d, s, group, j, rows, columns, data, transposed, columns, E5M2)
    )
    if counts is not None:
        noted = tl.program_id(0) == 0
        count_tile(
            fields=counts,
            codes=codes,
            flag=flag,
            spread=spread,
            a=a,
            b=b,
            c=c,
            d=d,
            scale=s,
            group=group,
            j=j,
            rows=rows,
            columns=columns,
            width=columns,
            first=0,
            noted=noted,
            E5M2=E5M2,
        )
    note_inverse(s, scale_inv)


@triton.jit
def _slope(dy, x, i, j, rows, columns, ACTIVATION: tl.constexpr):
    _, slope = activation_and_slope(load_tile(x, i, j, rows, columns, columns), ACTIVATION)
    return load_tile(dy, i, j, rows, columns, columns) * slope


@triton.jit
def _slope_kernel(
    # gradient of the activation, and its input, both [N, K]
    dy,
    x,
    # the FP8 output: uint8 [N, K] and its transpose [K, N] (either may be None), the scale and amax of its quantizer,
    # and the inverse scale to write, FP32 [1] each
    data,
    transposed,
    scale,
    amax,
    scale_inv,
    # N and K
    rows,
    columns,
    # where a recorder counts the cast; None: not compiled
    counts,
    codes,
    flag,
    spread,
    ACTIVATION: tl.constexpr,
    E5M2: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BAND: tl.constexpr,
):
    group, j = _place(rows, columns, ROWS, COLUMNS, BAND)
    i = 4 * group
    a = _slope(dy, x, i, j, rows, columns, ACTIVATION)
    b = _slope(dy, x, i + 1, j, rows, columns, ACTIVATION)
    c = _slope(dy, x, i + 2, j, rows, columns, ACTIVATION)
    d = _slope(dy, x, i + 3, j, rows, columns, ACTIVATION)
    s = tl.load(scale)
    raise_amax(
        amax, store_fp8(a, b, c, d, s, group, j, rows, columns, data, transposed, columns, E5M2)
    )
    if counts is not None:
        noted = tl.program_id(0) == 0
        count_tile(
            fields=counts,
            codes=codes,
            flag=flag,
            spread=spread,
            a=a,
            b=b,
            c=c,
            d=d,
            scale=s,
            group=group,
            j=j,
            rows=rows,
            columns=columns,
            width=columns,
            first=0,
            noted=noted,
            E5M2=E5M2,
        )
    note_inverse(s, scale_inv)


@triton.jit
def _slopes(dy, gate_up, i, j, rows, columns, ACTIVATION: tl.constexpr):
    gate = load_tile(gate_up, i, j, rows, columns, 2 * columns)
    up = load_tile(gate_up + columns, i, j, rows, columns, 2 * columns)
    slope = load_tile(dy, i, j, rows, columns, columns)
    value, own = activation_and_slope(gate, ACTIVATION)
    return slope * up * own, slope * value


@triton.jit
def _gated_slope_kernel(
    # gradient of the output [N, K], and the input [N, 2K] = [gate | up]
    dy,
    gate_up,
    # the FP8 output: uint8 [N, K] and its transpose [K, N] (either may be None), the scale and amax of its quantizer,
    # and the inverse scale to write, FP32 [1] each; of the gradient [N, 2K]
    data,
    transposed,
    scale,
    amax,
    scale_inv,
    # N and K
    rows,
    columns,
    # where a recorder counts the cast; None: not compiled
    counts,
    codes,
    flag,
    spread,
    ACTIVATION: tl.constexpr,
    E5M2: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BAND: tl.constexpr,
):
    group, j = _place(rows, columns, ROWS, COLUMNS, BAND)
    i = 4 * group
    a, e = _slopes(dy, gate_up, i, j, rows, columns, ACTIVATION)
    b, f = _slopes(dy, gate_up, i + 1, j, rows, columns, ACTIVATION)
    c, g = _slopes(dy, gate_up, i + 2, j, rows, columns, ACTIVATION)
    d, h = _slopes(dy, gate_up, i + 3, j, rows, columns, ACTIVATION)
    s = tl.load(scale)
    of_gate = store_fp8(a, b, c, d, s, group, j, rows, columns, data, transposed, 2 * columns, E5M2)
    half = transposed + rows.to(tl.int64) * columns
    of_up = store_fp8(
        e, f, g, h, s, group, j, rows, columns, data + columns, half, 2 * columns, E5M2
    )
    raise_amax(amax, tl.maximum(of_gate, of_up))
    if counts is not None:
        noted = tl.program_id(0) == 0
        width = 2 * columns
        count_tile(
            fields=counts,
            codes=codes,
            flag=flag,
            spread=spread,
            a=a,
            b=b,
            c=c,
            d=d,
            scale=s,
            group=group,
            j=j,
            rows=rows,
            columns=columns,
            width=width,
            first=0,
            noted=noted,
            E5M2=E5M2,
        )
        count_tile(
            fields=counts,
            codes=codes,
            flag=flag,
            spread=spread,
            a=e,
            b=f,
            c=g,
            d=h,
            scale=s,
            group=group,
            j=j,
            rows=rows,
            columns=columns,
            width=width,
            first=columns,
            noted=False,
            E5M2=E5M2,
        )
    note_inverse(s, scale_inv)


def _by_tiles(
    kernel: Any,
    inputs: tuple[Tensor, ...],
    rows: int,
    columns: int,
    cast_scale: CastScale,
    out: FP8Data,
    counts: Counts | None,
    **options: bool | str | None,
) -> FP8Data:
    """Launch a kernel that writes `out`, one program per tile of [rows, columns].

    The kernels read rows one after the other, so inputs of any other strides are copied first.
    """
    inputs = tuple(tensor.contiguous() for tensor in inputs)
    kernel[(triton.cdiv(rows, ROWS) * triton.cdiv(columns, COLUMNS),)](
        *inputs,
        out.data,
        out.transposed,
        cast_scale.scale,
        cast_scale.amax,
        out.scale_inv,
        rows,
        columns,
        *destination(counts),
        **options,
        E5M2=cast_scale.e5m2,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        BAND=BAND,
        num_warps=4,
    )
    return out


def destination(counts: Counts | None) -> tuple[Tensor | None, Tensor | None, Tensor | None, int]:
    """Return the arguments of a kernel that counts what it casts; without counts it has no code for that."""
    if counts is None:
        return None, None, None, 1
    return counts.fields, counts.codes, counts.flag, len(counts.fields)


def cast(
    x: Tensor, scale: Tensor, amax: Tensor, e5m2: bool, counts: Counts | None = None
) -> FP8Data:
    """Cast x [N, K], of any float dtype: data [N, K], the bits of Transformer Engine's cast.

    Here and below `counts` are where a recorder counts what the cast does to the values; None: it does not.
    """
    rows, columns = x.shape
    out = new_fp8(rows, columns, x.device)
    cast_scale = CastScale(scale, amax, e5m2)
    return _by_tiles(
        _cast_kernel, (x,), rows, columns, cast_scale, out, counts, ACTIVATION=None, GATED=False
    )


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
    return _by_tiles(
        _cast_kernel,
        (gate_up,),
        rows,
        columns,
        cast_scale,
        out,
        counts,
        ACTIVATION=activation,
        GATED=gated,
    )


def activate_backward(
    dy: Tensor,
    gate_up: Tensor,
    scale: Tensor,
    amax: Tensor,
    e5m2: bool,
    activation: str = "silu",
    gated: bool = True,
    counts: Counts | None = None,
) -> FP8Data:
    """Compute the gradient of gate_up for dy [N, F] of `activate`'s output: data of the shape of gate_up."""
    rows, columns = dy.shape
    out = new_fp8(rows, gate_up.shape[1], dy.device)
    cast_scale = CastScale(scale, amax, e5m2)
    kernel = _gated_slope_kernel if gated else _slope_kernel
    return _by_tiles(
        kernel, (dy, gate_up), rows, columns, cast_scale, out, counts, ACTIVATION=activation
    )
