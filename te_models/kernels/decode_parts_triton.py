"""Triton functions that both kernels of a decoding step's products (decode.py) call: input, cast, scale, epilogue."""

import triton
import triton.language as tl

from te_models.kernels.fp8_tiles_triton import INTERPRETED
from te_models.kernels.handover_triton import activation_and_slope

LARGEST = tl.constexpr(448.0)  # of E4M3
LARGEST_FLOAT = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _round_e4m3(v):
    """Round FP32 values of at most 448 to E4M3, to nearest and ties to even; return them in FP16.

    Adding 1.5 * 2^20 times the value's power of two leaves three bits after its first, as for any number below 2^-6.
    """
    power = (v.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    step = tl.maximum(power, 0.015625) * 1572864.0
    return ((v + step) - step).to(tl.float16)


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
    """Return the scale of an amax, as te_models.numerics.scale_rules.scale_from_amax."""
    amax = tl.maximum(amax, epsilon)
    usable = (amax > 0) & (amax < float("inf"))
    scale = tl.minimum(tl.div_rn(LARGEST, tl.where(usable, amax, 1.0)), LARGEST_FLOAT)
    scale = tl.where(usable, scale, 1.0)
    if POWER_OF_2:
        scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def input_tile(x, j, i, tokens, width, inverse, norm, NORM: tl.constexpr, CENTERED: tl.constexpr):
    """Return channels j of rows i of the product's input [T, WIDTH], normed, in the dtype of x."""
    inside = (i < tokens)[:, None] & (j < width)[None, :]
    value = tl.load(x + i[:, None] * width + j[None, :], inside, 0.0)
    if NORM:
        gain = tl.load(norm + j, j < width, 0.0).to(tl.float32)
        if CENTERED:
            gain += 1.0
        value = (value.to(tl.float32) * inverse[:, None] * gain[None, :]).to(x.dtype.element_ty)
    return value


@triton.jit
def input_scales(
    x,
    norm,
    input_scale,
    t,
    tokens,
    width,
    eps,
    epsilon,
    NORM: tl.constexpr,
    CENTERED: tl.constexpr,
    FP8: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Return 1 / RMS of each of rows t [T] of x, and the scale of the cast; ones where there is no norm, or no cast."""
    channel = tl.arange(0, CHUNK)
    inverse = tl.zeros_like(t).to(tl.float32)
    if NORM:
        squares = inverse
        for at in range(0, width, CHUNK):
            v = input_tile(x, at + channel, t, tokens, width, inverse, norm, False, CENTERED)
            v = v.to(tl.float32)
            squares += tl.sum(v * v, 1)
        inverse = tl.rsqrt(squares / width + eps)
    scale = 1.0
    if FP8:
        if input_scale is not None:
            scale = tl.load(input_scale)
        else:
            largest = tl.zeros_like(t).to(tl.float32)
            for at in range(0, width, CHUNK):
                v = input_tile(x, at + channel, t, tokens, width, inverse, norm, NORM, CENTERED)
                largest = tl.maximum(largest, tl.max(tl.abs(v.to(tl.float32)), 1))
            scale = current_scale(tl.max(largest, 0), epsilon, POWER_OF_2)
    return inverse, scale


@triton.jit
def store_product(
    sums,
    up,
    bias,
    residual,
    out,
    i,
    o,
    rows,
    tokens,
    outputs,
    factor,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    SCALED: tl.constexpr,
    dtype: tl.constexpr,
):
    """Store the sums of rows i and outputs o after bias, activation, factor and residual stream.

    i and o have the shape of the sums, or 1 where they do not vary.
    """
    inside = (i < tokens) & (o < outputs)
    if bias is not None:
        sums += tl.load(bias + o, o < outputs, 0.0).to(tl.float32)
        if GATED:
            up += tl.load(bias + outputs + o, o < outputs, 0.0).to(tl.float32)
    # Rounded where the modules would store it, so that both ways round alike.
    y = sums.to(dtype)
    if ACTIVATION is not None:
        opened, _ = activation_and_slope(y.to(tl.float32), ACTIVATION)
        if GATED:
            opened *= up.to(dtype).to(tl.float32)
        y = opened.to(dtype)
    if SCALED:
        y = (y.to(tl.float32) * factor).to(dtype)
    place = i * outputs + o
    if residual is not None:
        before = tl.load(residual + place, inside, 0.0)
        y = (y.to(tl.float32) + before.to(tl.float32)).to(dtype)
    y = tl.where(i < tokens, y, 0.0)  # rows of padding remain zeros, whatever the bias
    tl.store(out + place, y, (i < rows) & (o < outputs))
