"""Operations before a te.Linear that write the FP8 it multiplies: data, transpose and amax in one pass.

On Hopper a GEMM needs the contracted dimension last in both operands, so the forward reads the data as it is and the
weight's gradient reads it transposed. A separate cast costs a BF16 round trip, and a separate transpose another pass.
Each function uses a delayed scale (FP32 [1]) and raises `amax` (FP32 [1]) to the amax of its FP32 result; FP8 data is
uint8. N is a multiple of 4: the bytes of four rows are one word, so that words are transposed, not bytes.

Tested on a CPU through Triton's interpreter (TRITON_INTERPRET=1), which has no instruction for the conversion and uses
integer arithmetic instead.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_models.kernels.count_cast_triton import Counts, count_tile
from te_models.kernels.handover import CastScale
from te_models.numerics.fp8_triton import encode_fp8

# Rows and columns of a tile, for four warps, and rows of tiles per band. Programs go down a band before they go right,
# so those that run at about the same time write neighboring memory in both copies. The fastest of thirty choices on
# an H200.
ROWS = 64
COLUMNS = 64
BAND = 8
NORM_ROWS, NORM_COLUMNS = 32, 128  # of which a program goes through all columns
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_CONVERT = (
    "{ .reg .b16 low, high; cvt.rn.satfinite.FORMx2.f32 low, $2, $1; "
    "cvt.rn.satfinite.FORMx2.f32 high, $4, $3; mov.b32 $0, {low, high}; }"
)
_E4M3 = tl.constexpr(_CONVERT.replace("FORM", "e4m3"))
_E5M2 = tl.constexpr(_CONVERT.replace("FORM", "e5m2"))
# The bytes of four words, the lowest of each first, then the second of each, and so on.
_BYTES = tl.constexpr(
    "{ .reg .b32 a, b, c, d; prmt.b32 a, $4, $5, 0x5140; prmt.b32 b, $4, $5, 0x7362; prmt.b32 c, $6, $7, 0x5140; "
    "prmt.b32 d, $6, $7, 0x7362; prmt.b32 $0, a, c, 0x5410; prmt.b32 $1, a, c, 0x7632; prmt.b32 $2, b, d, 0x5410; "
    "prmt.b32 $3, b, d, 0x7632; }"
)
_SIGMOID = tl.constexpr(
    "{ .reg .f32 e; mul.ftz.f32 e, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e; add.ftz.f32 e, e, 0f3F800000; "
    "rcp.approx.ftz.f32 $0, e; }"  # 1 / (1 + 2 ** (-x / ln 2))
)


class FP8Data(NamedTuple):
    """data [N, K] or None, transposed [K, N], both uint8; scale_inv FP32 [1], the factor from data to values."""

    data: Tensor | None
    transposed: Tensor
    scale_inv: Tensor


@triton.jit
def _encode4(a, b, c, d, E5M2: tl.constexpr):
    """Return the FP8 data of four FP32 tensors as one of int32, a's in the lowest byte."""
    if INTERPRETED:
        a = encode_fp8(a, E5M2).to(tl.int32)
        b = encode_fp8(b, E5M2).to(tl.int32)
        c = encode_fp8(c, E5M2).to(tl.int32)
        d = encode_fp8(d, E5M2).to(tl.int32)
        word = a | (b << 8) | (c << 16) | (d << 24)
    else:
        # Triton's own cast to FP8 (3.6) mixes up elements where the result is transposed.
        asm: tl.constexpr = _E5M2 if E5M2 else _E4M3
        word = tl.inline_asm_elementwise(
            asm, "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1
        )
    return word


@triton.jit
def _bytes(word):
    """Return the four bytes of words as four tensors of uint8, the lowest first."""
    if INTERPRETED:
        first = word.to(tl.uint8)
        second = (word >> 8).to(tl.uint8)
        third = (word >> 16).to(tl.uint8)
        fourth = (word >> 24).to(tl.uint8)
    else:
        # The types are written in the call: as a constexpr of their own, Triton 3.9 does not accept them.
        first, second, third, fourth = tl.inline_asm_elementwise(
            _BYTES,
            "=r,=r,=r,=r,r,r,r,r",
            [word],
            dtype=(tl.uint8, tl.uint8, tl.uint8, tl.uint8),
            is_pure=True,
            pack=4,
        )
    return first, second, third, fourth


@triton.jit
def sigmoid(x):
    """Return the sigmoid in FP32, to two units in the last place, in few instructions, which limit these kernels."""
    if INTERPRETED:
        y = tl.sigmoid(x)
    else:
        y = tl.inline_asm_elementwise(_SIGMOID, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def store_fp8(
    # FP32 tiles [groups, columns]: the first to fourth rows of groups of four
    a,
    b,
    c,
    d,
    scale,
    # the groups and columns of the tile, and how many rows and columns there are
    group,
    j,
    rows,
    columns,
    # uint8, written where not None
    data,
    transposed,
    stride,
    E5M2: tl.constexpr,
    apart=None,
):
    """Quantize FP32 tiles, the first to fourth rows of groups of four, of columns j, into both copies or only one
    of them. Return the largest magnitude of each group and column, for `raise_amax`.

    The rows of `data` are `stride` apart, the rows of `transposed` `apart`, or as many as there are rows.

    `group` are consecutive numbers: from 4 * group the compiler could not tell that the words are contiguous, and would
    write them one by one.
    """
    group = group.to(tl.int64)
    j = j.to(tl.int64)
    i = 4 * group
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    word = _encode4(a * scale, b * scale, c * scale, d * scale, E5M2)
    if data is not None:
        at = data + i[:, None] * stride + j[None, :]
        first, second, third, fourth = _bytes(word)
        tl.store(at, first, mask=inside)
        tl.store(at + stride, second, mask=inside)
        tl.store(at + 2 * stride, third, mask=inside)
        tl.store(at + 3 * stride, fourth, mask=inside)
    if transposed is not None:
        words = transposed.to(tl.pointer_type(tl.int32), bitcast=True)
        step = rows if apart is None else apart
        place = j[:, None] * (step // 4) + group[None, :]
        tl.store(
            words + place,
            tl.trans(word),
            mask=(j < columns)[:, None] & (group < rows // 4)[None, :],
        )
    largest = tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))
    return tl.where(inside, largest, 0.0)


@triton.jit
def raise_amax(amax, largest):
    """Raise `amax` to the largest of a tile of magnitudes. Call it once per program, since its threads synchronize."""
    bits = tl.max(tl.max(largest, 1), 0).to(tl.int32, bitcast=True)  # ordered like magnitudes
    tl.atomic_max(amax.to(tl.pointer_type(tl.int32), bitcast=True), bits, sem="relaxed")


@triton.jit
def note_inverse(scale, scale_inv):
    """Write the inverse scale, from one program only."""
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale_inv, tl.div_rn(tl.full((), 1.0, tl.float32), scale))


@triton.jit
def tile(high, wide, BAND: tl.constexpr):
    """Return this program's tile of `high` x `wide`, from above and from the left, in bands of BAND rows."""
    first = tl.program_id(0) // (BAND * wide) * BAND
    own = tl.program_id(0) - first * wide
    height = tl.minimum(BAND, high - first)
    return first + own % height, own // height


@triton.jit
def _place(rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BAND: tl.constexpr):
    """Return the groups of four rows of this program's tile, and its columns."""
    row, column = tile(tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS), BAND)
    group = row.to(tl.int64) * (ROWS // 4) + tl.arange(0, ROWS // 4)
    return group, column.to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)


@triton.jit
def _load(x, i, j, rows, columns, stride):
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
    value = _load(x, i, j, rows, columns, 2 * columns if GATED else columns)
    if ACTIVATION is not None:
        value, _ = activation_and_slope(value, ACTIVATION)
    if GATED:
        value *= _load(x + columns, i, j, rows, columns, 2 * columns)
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
    _, slope = activation_and_slope(_load(x, i, j, rows, columns, columns), ACTIVATION)
    return _load(dy, i, j, rows, columns, columns) * slope


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
    gate = _load(gate_up, i, j, rows, columns, 2 * columns)
    up = _load(gate_up + columns, i, j, rows, columns, 2 * columns)
    slope = _load(dy, i, j, rows, columns, columns)
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
    # where a recorder counts the cast; None: not compiled
    counts,
    codes,
    flag,
    spread,
    ADD: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    E5M2: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * ROWS
    i = first + tl.arange(0, ROWS)
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
    s = tl.load(scale)
    tl.debug_barrier()  # what is read back below was written above
    group = tl.program_id(0).to(tl.int64) * (ROWS // 4) + tl.arange(0, ROWS // 4)
    i = 4 * group
    source = total if ADD else x
    a = tl.load(rstd + i, i < rows, 0.0)
    b = tl.load(rstd + i + 1, i < rows, 0.0)
    c = tl.load(rstd + i + 2, i < rows, 0.0)
    d = tl.load(rstd + i + 3, i < rows, 0.0)
    largest = tl.zeros((ROWS // 4, COLUMNS), tl.float32)
    for start in range(0, columns, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        gamma = tl.load(weight + j, j < columns, 0.0).to(tl.float32)[None, :]
        gamma = 1 + gamma if ZERO_CENTERED else gamma
        e = _load(source, i, j, rows, columns, columns) * a[:, None] * gamma
        f = _load(source, i + 1, j, rows, columns, columns) * b[:, None] * gamma
        g = _load(source, i + 2, j, rows, columns, columns) * c[:, None] * gamma
        h = _load(source, i + 3, j, rows, columns, columns) * d[:, None] * gamma
        found = store_fp8(e, f, g, h, s, group, j, rows, columns, data, transposed, columns, E5M2)
        largest = tl.maximum(largest, found)
        if counts is not None:
            noted = (tl.program_id(0) == 0) & (start == 0)
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
                width=columns,
                first=0,
                noted=noted,
                E5M2=E5M2,
            )
    raise_amax(amax, largest)
    note_inverse(s, scale_inv)


def new_fp8(rows: int, columns: int, device: torch.device, rowwise: bool = True) -> FP8Data:
    """Return FP8 data [rows, columns] without values, only the transposed copy if not `rowwise`."""
    data = torch.empty(rows, columns, dtype=torch.uint8, device=device) if rowwise else None
    transposed = torch.empty(columns, rows, dtype=torch.uint8, device=device)
    return FP8Data(data, transposed, torch.empty(1, dtype=torch.float32, device=device))


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
    """Compute RMSNorm of x + delta (None: of x) [N, D]: data [N, D], x + delta contiguous, and 1 / RMS, FP32 [N]."""
    rows, columns = x.shape
    x = x.contiguous()
    delta = None if delta is None else delta.contiguous()
    out = new_fp8(rows, columns, x.device)
    total = x if delta is None else torch.empty_like(x)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    _norm_kernel[(triton.cdiv(rows, NORM_ROWS), 1)](
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
        *destination(counts),
        ADD=delta is not None,
        ZERO_CENTERED=zero_centered,
        E5M2=e5m2,
        ROWS=NORM_ROWS,
        COLUMNS=NORM_COLUMNS,
        num_warps=4,
    )
    return out, total, rstd
