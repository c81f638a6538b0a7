"""Triton functions that the kernels of a decoding step's products (decode.py) call: input, cast, scale and epilogue.

The kernels are in decode_product_triton.py and decode_split_triton.py. Shapes: T rows of the input, I and O channels
in and out of a te.Linear.
"""

import triton
import triton.language as tl

from te_models.kernels.fp8_tiles_triton import INTERPRETED
from te_models.kernels.handover_triton import activation_and_slope

LARGEST = tl.constexpr(448.0)  # the largest number of E4M3
LARGEST_FLOAT = tl.constexpr(3.4028234663852886e38)  # the largest finite number of FP32


@triton.jit
def _round_e4m3(v):
    """Return FP32 values of at most 448 rounded to E4M3, to nearest and ties to even, as FP16.

    FP32 has 23 bits after a number's first one, E4M3 has 3. Adding and subtracting 1.5 * 2^20 times the value's power
    of two rounds the others away. Below 2^-6, where E4M3 is subnormal, the power is 2^-6.
    """
    power = (v.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    magic = tl.maximum(power, 0.015625) * 1572864.0
    return ((v + magic) - magic).to(tl.float16)


@triton.jit
def cast_e4m3(v, scale):
    """Return v * scale in E4M3, saturated, as FP16 values; NaN stays NaN."""
    v = v.to(tl.float32) * scale
    if not INTERPRETED:  # one instruction for two values, which saturates too
        return v.to(tl.float8e4nv).to(tl.float16)
    clamped = tl.minimum(tl.maximum(v, -LARGEST), LARGEST)
    return tl.where(v != v, v, _round_e4m3(clamped)).to(tl.float16)


@triton.jit
def current_scale(amax, epsilon, POWER_OF_2: tl.constexpr):
    """Return the scale that maps an amax to 448, FP32, as te_models.numerics.scale_rules.scale_from_amax does.

    It is 1 for an amax of 0, infinity or NaN.
    """
    amax = tl.maximum(amax, epsilon)
    usable = (amax > 0) & (amax < float("inf"))
    scale = tl.minimum(tl.div_rn(LARGEST, tl.where(usable, amax, 1.0)), LARGEST_FLOAT)
    scale = tl.where(usable, scale, 1.0)
    if POWER_OF_2:
        scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def input_tile(
    x, j, i, tokens, width, inverse_rms, norm, NORM: tl.constexpr, CENTERED: tl.constexpr
):
    """Return channels j of rows i of x, after the norm if NORM, in the dtype of x: [len(i), len(j)].

    `norm` is the norm's weight [I], to which CENTERED adds 1, and `inverse_rms` is 1 / RMS of the rows, FP32.
    """
    mask = (i < tokens)[:, None] & (j < width)[None, :]
    value = tl.load(x + i[:, None] * width + j[None, :], mask, 0.0)
    if NORM:
        gamma = tl.load(norm + j, j < width, 0.0).to(tl.float32)
        if CENTERED:
            gamma += 1.0
        value = (value.to(tl.float32) * inverse_rms[:, None] * gamma[None, :]).to(
            x.dtype.element_ty
        )
    return value


@triton.jit
def input_scales(
    # the input [N, I], the weight of its norm [I], and its scale under delayed scaling, FP32 [1]
    x,
    norm,
    input_scale,
    # rows [T], how many of N are tokens, and I
    t,
    tokens,
    width,
    # added to the mean square of the norm, and the smallest amax of a scale
    eps,
    epsilon,
    NORM: tl.constexpr,
    CENTERED: tl.constexpr,
    FP8: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Return 1 / RMS of rows t of x, FP32 [T], and the scale of their cast to E4M3, an FP32 scalar.

    Without NORM the first is 0, and nothing reads it; without FP8 the scale is 1. Under current scaling the scale comes
    from the amax of all rows t.
    """
    channel = tl.arange(0, CHUNK)
    inverse_rms = tl.zeros_like(t).to(tl.float32)
    if NORM:
        squares = inverse_rms
        for start in range(0, width, CHUNK):
            v = input_tile(x, start + channel, t, tokens, width, inverse_rms, norm, False, CENTERED)
            v = v.to(tl.float32)
            squares += tl.sum(v * v, 1)
        inverse_rms = tl.rsqrt(squares / width + eps)
    scale = 1.0
    if FP8:
        if input_scale is not None:
            scale = tl.load(input_scale)
        else:
            largest = tl.zeros_like(t).to(tl.float32)
            for start in range(0, width, CHUNK):
                v = input_tile(
                    x, start + channel, t, tokens, width, inverse_rms, norm, NORM, CENTERED
                )
                largest = tl.maximum(largest, tl.max(tl.abs(v.to(tl.float32)), 1))
            scale = current_scale(tl.max(largest, 0), epsilon, POWER_OF_2)
    return inverse_rms, scale


@triton.jit
def store_product(
    # FP32 sums of the product, and of the rows of `up` if GATED
    sums,
    up_sums,
    # [O], or [2 * O] if GATED; the residual stream [N, O]; None: there is none
    bias,
    residual,
    # output [N, O]
    out,
    # the rows and output channels of the sums: each has their shape, or 1 in the dimension in which it does not vary
    i,
    o,
    # N, the rows that are tokens, O, and the factor before the residual stream is added
    rows,
    tokens,
    outputs,
    factor,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    SCALED: tl.constexpr,
    dtype: tl.constexpr,
):
    """Store sums after bias, activation, factor and residual stream; rows that are no tokens get zeros."""
    token_mask = (i < tokens) & (o < outputs)
    if bias is not None:
        sums += tl.load(bias + o, o < outputs, 0.0).to(tl.float32)
        if GATED:
            up_sums += tl.load(bias + outputs + o, o < outputs, 0.0).to(tl.float32)
    # Round wherever the modules of a block store a tensor, so that a step has their numbers.
    y = sums.to(dtype)
    if ACTIVATION is not None:
        activated, _ = activation_and_slope(y.to(tl.float32), ACTIVATION)
        if GATED:
            activated *= up_sums.to(dtype).to(tl.float32)
        y = activated.to(dtype)
    if SCALED:
        y = (y.to(tl.float32) * factor).to(dtype)
    offsets = i * outputs + o
    if residual is not None:
        stream = tl.load(residual + offsets, token_mask, 0.0)
        y = (y.to(tl.float32) + stream.to(tl.float32)).to(dtype)
    y = tl.where(i < tokens, y, 0.0)  # rows of padding remain zeros, whatever the bias
    tl.store(out + offsets, y, (i < rows) & (o < outputs))
