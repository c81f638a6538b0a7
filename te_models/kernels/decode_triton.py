"""The kernels of a step of decoding (decode.py), in Triton.

A product reads each weight once, with all rows of the step in one tile, and makes its input anew in every program: the
norm, the amax and the cast of a few rows cost less than a kernel of their own. FP8 values are multiplied as FP16, which
represents E4M3 exactly, and summed in FP32. Attention is divided over the keys, since one program per head would leave
most of the GPU idle (Flash-Decoding).

Tested on a CPU through Triton's interpreter (TRITON_INTERPRET=1), in FP16, since it multiplies BF16 wrongly.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_models.kernels.decode import (
    MOST_ROWS,
    DecodeKernels,
    StepActivation,
    StepAttention,
    StepKeys,
    StepLinear,
    StepNorm,
)
from te_models.kernels.fp8_tiles_triton import INTERPRETED
from te_models.kernels.handover_triton import activation_and_slope

ROWS = MOST_ROWS
# Channels per head, at most -> keys of a tile, as many as the shared memory of an Ada GPU holds.
KEYS = {128: 64, 256: 32}
PROGRAMS = 264  # of attention, two for each multiprocessor of an H200: as many fill it
MOST_PARTS = 32
FEW = 2  # tokens up to which no tensor cores are used
CHUNK = 1024  # channels that are read at once for norms and amaxes
LARGEST = tl.constexpr(448.0)  # of E4M3
LARGEST_FLOAT = tl.constexpr(3.4028234663852886e38)


class Tile(NamedTuple):
    """The rows of a weight that a program multiplies, the channels of one iteration, warps and stages of its loop."""

    outputs: int
    width: int
    warps: int
    stages: int


def _few_tile(gated: bool, normed: bool, fp8: bool) -> Tile:
    """Return the tile of a product without tensor cores.

    Norms are computed in every program, so there are fewer programs with them. The fastest of 14 for most of eight
    shapes on an H100 (benchmarks/results/decode_tiles_h100.json), as in `_tile` the fastest of 11.
    """
    if fp8:
        return Tile(8, 1024, 4, 1) if normed else Tile(2, 1024, 2, 1)
    return Tile(4, 1024, 4, 1) if normed and not gated else Tile(2, 2048, 4, 1)


def _tile(gated: bool, normed: bool, fp8: bool) -> Tile:
    """Return the tile of a product with tensor cores."""
    if gated:
        return Tile(64, 128, 8, 3)
    return Tile(32, 256, 4, 3) if normed or fp8 else Tile(16, 256, 2, 5)


@triton.jit
def _round_e4m3(v):
    """Round FP32 values of at most 448 to E4M3, to nearest and ties to even; return them in FP16.

    Adding 1.5 * 2^20 times the value's power of two leaves three bits after its first, as for any number below 2^-6.
    """
    power = (v.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    step = tl.maximum(power, 0.015625) * 1572864.0
    return ((v + step) - step).to(tl.float16)


@triton.jit
def _cast(v, scale):
    """Return v * scale in E4M3, saturated, as FP16 values; NaN stays NaN."""
    v = v.to(tl.float32) * scale
    if not INTERPRETED:  # one instruction for two values, which saturates too
        return v.to(tl.float8e4nv).to(tl.float16)
    clamped = tl.minimum(tl.maximum(v, -LARGEST), LARGEST)
    return tl.where(v != v, v, _round_e4m3(clamped)).to(tl.float16)


@triton.jit
def _current_scale(amax, epsilon, POWER_OF_2: tl.constexpr):
    """Return the scale of an amax, as te_models.numerics.scale_rules.scale_from_amax."""
    amax = tl.maximum(amax, epsilon)
    usable = (amax > 0) & (amax < float("inf"))
    scale = tl.minimum(tl.div_rn(LARGEST, tl.where(usable, amax, 1.0)), LARGEST_FLOAT)
    scale = tl.where(usable, scale, 1.0)
    if POWER_OF_2:
        scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def _input(x, j, i, tokens, width, inverse, norm, NORM: tl.constexpr, CENTERED: tl.constexpr):
    """Return channels j of rows i of the product's input [ROWS, WIDTH], normed, in the dtype of x."""
    inside = (i < tokens)[:, None] & (j < width)[None, :]
    value = tl.load(x + i[:, None] * width + j[None, :], inside, 0.0)
    if NORM:
        gain = tl.load(norm + j, j < width, 0.0).to(tl.float32)
        if CENTERED:
            gain += 1.0
        value = (value.to(tl.float32) * inverse[:, None] * gain[None, :]).to(x.dtype.element_ty)
    return value


@triton.jit
def _scales(
    x, norm, input_scale, t, tokens, width, eps, epsilon,
    NORM: tl.constexpr, CENTERED: tl.constexpr, FP8: tl.constexpr, POWER_OF_2: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Return 1 / RMS of each of rows t [T] of x, and the scale of the cast; ones where there is no norm, or no cast."""
    channel = tl.arange(0, CHUNK)
    inverse = tl.zeros_like(t).to(tl.float32)
    if NORM:
        squares = inverse
        for at in range(0, width, CHUNK):
            v = _input(x, at + channel, t, tokens, width, inverse, norm, False, CENTERED)
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
                v = _input(x, at + channel, t, tokens, width, inverse, norm, NORM, CENTERED)
                largest = tl.maximum(largest, tl.max(tl.abs(v.to(tl.float32)), 1))
            scale = _current_scale(tl.max(largest, 0), epsilon, POWER_OF_2)
    return inverse, scale


@triton.jit
def _sums(first, j, o, v, width, outputs, FP8: tl.constexpr):
    """Return the sums over channels j of v [T, WIDTH] times these rows of a weight: [T, O]."""
    inside = (o < outputs)[:, None] & (j < width)[None, :]
    w = tl.load(first + j[None, :], inside, 0)
    if FP8:
        w = w.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return tl.sum(w.to(tl.float32)[None, :, :] * v[:, None, :], 2)


@triton.jit
def _few_kernel(
    x, norm, weight, bias, weight_inverse, input_scale, residual, out,
    rows, tokens, width, outputs, eps, epsilon, factor,
    NORM: tl.constexpr, CENTERED: tl.constexpr, FP8: tl.constexpr, POWER_OF_2: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """The product of a few tokens, without tensor cores: weights go from memory to registers."""
    dtype = out.dtype.element_ty
    t = tl.arange(0, TOKENS)
    o = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    inverse, scale = _scales(
        x, norm, input_scale, t, tokens, width, eps, epsilon, NORM, CENTERED, FP8, POWER_OF_2, CHUNK
    )
    first = weight + o.to(tl.int64)[:, None] * width
    second = first + outputs.to(tl.int64) * width  # the rows of `up`, where there is a gate
    sums = tl.zeros([TOKENS, OUTPUTS], tl.float32)
    up = tl.zeros([TOKENS, OUTPUTS], tl.float32)
    for at in range(0, width, WIDTH):
        j = at + tl.arange(0, WIDTH)
        v = _input(x, j, t, tokens, width, inverse, norm, NORM, CENTERED)
        if FP8:
            v = _cast(v, scale)
        v = v.to(tl.float32)
        sums += _sums(first, j, o, v, width, outputs, FP8)
        if GATED:
            up += _sums(second, j, o, v, width, outputs, FP8)
    if FP8:
        back = tl.load(weight_inverse) * tl.div_rn(1.0, scale)
        sums *= back
        up *= back
    _store_product(
        sums, up, bias, residual, out, t[:, None], o[None, :], tokens, tokens, outputs, factor,
        ACTIVATION, GATED, SCALED, dtype,
    )  # fmt: skip
    padding = tokens + tl.arange(0, ROWS)[:, None]
    blank = tl.zeros([ROWS, OUTPUTS], dtype)
    inside = (padding < rows) & (o < outputs)[None, :]
    tl.store(out + padding * outputs + o[None, :], blank, inside)


@triton.jit
def _store_product(
    sums, up, bias, residual, out, i, o, rows, tokens, outputs, factor,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Store the sums of rows i and outputs o after bias, activation, factor and residual stream.

    i and o have the shape of the sums, or 1 where they do not vary.
    """
    inside = (i < tokens) & (o < outputs)
    if bias is not None:
        sums += tl.load(bias + o, o < outputs, 0.0).to(tl.float32)
        if GATED:
            up += tl.load(bias + outputs + o, o < outputs, 0.0).to(tl.float32)
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


@triton.jit
def _product_kernel(
    x, norm, weight, bias, weight_inverse, input_scale, residual, out,
    rows, tokens, width, outputs, eps, epsilon, factor,
    NORM: tl.constexpr, CENTERED: tl.constexpr, FP8: tl.constexpr, POWER_OF_2: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    dtype = out.dtype.element_ty
    i = tl.arange(0, ROWS)
    o = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    channel = tl.arange(0, WIDTH)

    inverse, scale = _scales(
        x, norm, input_scale, i, tokens, width, eps, epsilon,
        NORM, CENTERED, FP8, POWER_OF_2, WIDTH,
    )  # fmt: skip
    first = weight + o.to(tl.int64)[:, None] * width
    second = first + outputs.to(tl.int64) * width  # the rows of `up`, where there is a gate
    sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
    up = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for at in range(0, width, WIDTH):
        j = at + channel
        inside = (o < outputs)[:, None] & (j < width)[None, :]
        v = _input(x, j, i, tokens, width, inverse, norm, NORM, CENTERED)
        w = tl.load(first + j[None, :], inside, 0)
        if FP8:
            v = _cast(v, scale)
            w = w.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        v = tl.trans(v)
        sums += tl.dot(w, v, input_precision="ieee")
        if GATED:
            w = tl.load(second + j[None, :], inside, 0)
            if FP8:
                w = w.to(tl.float8e4nv, bitcast=True).to(tl.float16)
            up += tl.dot(w, v, input_precision="ieee")

    if FP8:
        back = tl.load(weight_inverse) * tl.div_rn(1.0, scale)
        sums *= back
        up *= back
    _store_product(
        sums, up, bias, residual, out, i[None, :], o[:, None], rows, tokens, outputs, factor,
        ACTIVATION, GATED, SCALED, dtype,
    )  # fmt: skip


def product(
    x: Tensor,
    operand: StepLinear,
    tokens: int,
    *,
    norm: StepNorm | None = None,
    activation: StepActivation | None = None,
    residual: Tensor | None = None,
    factor: float = 1.0,
) -> Tensor:
    """Return the te.Linear `operand` of x [N, I], of whose rows the first `tokens` are not padding: [N, O].

    Args:
        x: at most MOST_ROWS rows.
        norm: runs on x before.
        activation: runs on the product; with a gate the result has half the channels.
        residual: [N, O], added at last.
        factor: of the product, before the residual stream is added.
    """
    rows, width = x.shape
    gated = activation is not None and activation.gated
    outputs = operand.weight.shape[0] // (1 + gated)
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    arguments = (
        x.contiguous(),
        None if norm is None else norm.weight,
        operand.weight,
        operand.bias,
        operand.weight_inverse,
        operand.input_scale,
        residual,
        out,
        rows,
        tokens,
        width,
        outputs,
        0.0 if norm is None else norm.eps,
        operand.epsilon,
        factor,
    )
    flags: dict[str, Any] = dict(
        NORM=norm is not None,
        CENTERED=norm is not None and norm.zero_centered,
        FP8=operand.weight_inverse is not None,
        POWER_OF_2=operand.power_of_2,
        ACTIVATION=None if activation is None else activation.name,
        GATED=gated,
        SCALED=factor != 1.0,
        ROWS=ROWS,
    )
    kind = (gated, norm is not None, operand.weight_inverse is not None)
    if tokens <= FEW:
        few = _few_tile(*kind)
        _few_kernel[(triton.cdiv(outputs, few.outputs),)](
            *arguments,
            **flags,
            TOKENS=triton.next_power_of_2(tokens),
            OUTPUTS=few.outputs,
            WIDTH=few.width,
            CHUNK=CHUNK,
            num_warps=few.warps,
        )
        return out
    tile = _tile(*kind)
    _product_kernel[(triton.cdiv(outputs, tile.outputs),)](
        *arguments,
        **flags,
        OUTPUTS=tile.outputs,
        WIDTH=tile.width,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


@triton.jit
def _source(c, turned, INTERLEAVED: tl.constexpr):
    """Return where channel c of a rotated head lies in the projection: interleaved pairs become halves."""
    if INTERLEAVED:
        half = turned // 2
        inside = tl.where(c < half, 2 * c, 2 * (c - half) + 1)
        c = tl.where(c < turned, inside, c)
    return c


@triton.jit
def _heads(
    base, head, c, heads, size, cos, sin, gain, turned, eps,
    ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr, NORMED: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    """Return these heads [G, W] of queries or keys, normed and rotated as the model asks for, in their dtype."""
    dtype = base.dtype.element_ty
    inside = (head < heads)[:, None] & (c < size)[None, :]
    at = _source(c, turned, INTERLEAVED)
    value = tl.load(base + head[:, None] * size + at[None, :], inside, 0.0).to(tl.float32)
    inverse = tl.zeros_like(tl.sum(value, 1))
    if NORMED:
        inverse = tl.rsqrt(tl.sum(value * value, 1) / size + eps)
        value = _gain(value, inverse, gain, at, c < size, dtype, CENTERED)
    if ROTATED:
        half = turned // 2
        other = tl.where(c < half, c + half, c - half)
        rotates = c < turned
        at = _source(other, turned, INTERLEAVED)
        partner = tl.load(
            base + head[:, None] * size + at[None, :], inside & rotates[None, :], 0.0
        ).to(tl.float32)
        if NORMED:
            partner = _gain(partner, inverse, gain, at, rotates, dtype, CENTERED)
        partner = tl.where((c < half)[None, :], -partner, partner)
        turn = tl.load(cos + c, rotates, 1.0).to(tl.float32)[None, :]
        lift = tl.load(sin + c, rotates, 0.0).to(tl.float32)[None, :]
        value = value * turn + partner * lift
    return value.to(dtype)


@triton.jit
def _gain(value, inverse, gain, at, inside, dtype: tl.constexpr, CENTERED: tl.constexpr):
    """Return the norm of heads whose channels lie at `at`, rounded to the dtype of the model."""
    factor = tl.load(gain + at, inside, 0.0).to(tl.float32)
    if CENTERED:
        factor += 1.0
    return (value * inverse[:, None] * factor[None, :]).to(dtype).to(tl.float32)


@triton.jit
def _attention_kernel(
    qkvg, keys, values, mask, filled, cos, sin, q_gain, k_gain, sums, tops, totals,
    width, key_heads, group, size, slots, turned, cos_stride, parts, scale, cap, eps,
    ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr, NORMED: tl.constexpr, CENTERED: tl.constexpr,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    key_head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    g = tl.arange(0, GROUP)
    c = tl.arange(0, WIDTH)
    dtype = qkvg.dtype.element_ty
    qkvg += row * width
    if ROTATED:
        cos += row * cos_stride
        sin += row * cos_stride

    q = _heads(
        qkvg + key_head * group * size, g, c, group, size, cos, sin, q_gain, turned, eps,
        ROTATED, INTERLEAVED, NORMED, CENTERED,
    )  # fmt: skip
    one = tl.arange(0, 1)
    own = qkvg + (key_heads * group + key_head) * size
    new_key = _heads(
        own, one, c, 1, size, cos, sin, k_gain, turned, eps,
        ROTATED, INTERLEAVED, NORMED, CENTERED,
    )  # fmt: skip
    new_value = tl.load(own + key_heads * size + c, c < size, 0.0)[None, :]

    count = tl.load(filled).to(tl.int32)
    newest = count - 1
    length = tl.cdiv(tl.cdiv(count, parts), KEYS) * KEYS  # of each part
    begin = part * length
    end = tl.minimum(begin + length, count)
    base = (row * key_heads + key_head) * slots * size
    keys += base
    values += base
    top = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    out = tl.zeros([GROUP, WIDTH], tl.float32)
    for at in range(begin, end, KEYS):
        s = at + tl.arange(0, KEYS)
        inside = (s < end)[:, None] & (c < size)[None, :]
        place = s.to(tl.int64)[:, None] * size + c[None, :]
        new = (s == newest)[:, None]
        k = tl.where(new, new_key, tl.load(keys + place, inside, 0.0))
        v = tl.where(new, new_value, tl.load(values + place, inside, 0.0))
        # The only program of this head whose keys include the new one.
        tl.store(keys + place, k, inside & new)
        tl.store(values + place, v, inside & new)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if cap is not None:
            score = (2.0 * tl.sigmoid(2.0 * score / cap) - 1.0) * cap  # cap * tanh(score / cap)
        seen = tl.load(mask + row * slots + s, s < end, float("-inf")).to(tl.float32)
        score += seen[None, :]
        higher = tl.maximum(top, tl.max(score, 1))
        base_score = tl.where(
            higher == float("-inf"), 0.0, higher
        )  # no key of this part is seen yet
        shrunk = tl.exp(top - base_score)
        weight = tl.exp(score - base_score[:, None])
        total = total * shrunk + tl.sum(weight, 1)
        out = out * shrunk[:, None] + tl.dot(weight.to(dtype), v, input_precision="ieee")
        top = higher
    head = (row * key_heads + key_head) * group + g
    tl.store(tops + head * parts + part, top, g < group)
    tl.store(totals + head * parts + part, total, g < group)
    to = sums + (head[:, None] * parts + part) * size + c[None, :]
    tl.store(to, out, (g < group)[:, None] & (c < size)[None, :])


@triton.jit
def _combine_kernel(
    sums, tops, totals, sinks, qkvg, out, width, gate_at, heads, size, tokens, parts,
    GATE: tl.constexpr, SOFTPLUS: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Join the parts of one head, and apply the gate."""
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    dtype = out.dtype.element_ty
    c = tl.arange(0, WIDTH)
    p = tl.arange(0, PARTS)
    to = out + (row * heads + head) * size + c
    if row >= tokens:
        tl.store(to, tl.zeros([WIDTH], dtype), c < size)
    else:
        at = (row * heads + head) * parts
        top = tl.load(tops + at + p, p < parts, float("-inf"))
        highest = tl.max(top, 0)
        if sinks is not None:
            sink = tl.load(sinks + head).to(tl.float32)
            highest = tl.maximum(highest, sink)
        share = tl.exp(top - highest)
        total = tl.sum(tl.load(totals + at + p, p < parts, 0.0) * share, 0)
        if sinks is not None:
            total += tl.exp(sink - highest)
        inside = (p < parts)[:, None] & (c < size)[None, :]
        each = tl.load(sums + (at + p)[:, None] * size + c[None, :], inside, 0.0)
        value = (tl.sum(each * share[:, None], 0) / total).to(dtype)
        if GATE != "none":
            gate = qkvg + row * width + gate_at
            if GATE == "elementwise":
                logit = tl.load(gate + head * size + c, c < size, 0.0).to(tl.float32)
            else:
                logit = tl.zeros([WIDTH], tl.float32) + tl.load(gate + head).to(tl.float32)
            if SOFTPLUS:
                opening = tl.maximum(logit, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(logit)))
            else:
                opening = tl.sigmoid(logit)
            value = (value.to(tl.float32) * opening).to(dtype)
        tl.store(to, value, c < size)


def attention(qkvg: Tensor, cache: StepKeys, step: StepAttention, tokens: int) -> Tensor:
    """Return the gated attention of the new tokens [N, A*H] from qkvg [N, Q], and write their keys and values.

    Row i of the cache belongs to row i of qkvg, for the first `tokens` of them.
    """
    heads = step.heads
    rows = qkvg.shape[0]
    wide = max(16, triton.next_power_of_2(heads.dim))
    partial = _partial_attention(qkvg, cache, step, tokens, wide)
    parts = partial.tops.shape[2]
    out = torch.empty(rows, heads.q_size, dtype=qkvg.dtype, device=qkvg.device)
    _combine_kernel[(heads.query, rows)](
        sums=partial.sums,
        tops=partial.tops,
        totals=partial.totals,
        sinks=step.sinks,
        qkvg=qkvg,
        out=out,
        width=qkvg.shape[1],
        # The gate comes after q, k and v.
        gate_at=heads.q_size + 2 * heads.kv_size,
        heads=heads.query,
        size=heads.dim,
        tokens=tokens,
        parts=parts,
        GATE=heads.gate,
        SOFTPLUS=step.softplus,
        PARTS=triton.next_power_of_2(parts),
        WIDTH=wide,
        num_warps=4,
    )
    return out


class PartialAttention(NamedTuple):
    """Attention over parts P of the keys, which a softmax over all of them joins; FP32."""

    sums: Tensor  # [N, A, P, H], of values by exp(score - top)
    tops: Tensor  # [N, A, P], the largest score
    totals: Tensor  # [N, A, P], the sum of exp(score - top)


def _partial_attention(
    qkvg: Tensor, cache: StepKeys, step: StepAttention, tokens: int, wide: int
) -> PartialAttention:
    """Attend to each part of the keys, and write the new keys and values to the cache."""
    heads = step.heads
    group = heads.query // heads.key
    slots = cache.keys.shape[2]
    tile = next(keys for widest, keys in KEYS.items() if wide <= widest)
    # As many parts as fill the GPU, but none without a whole tile of keys.
    parts = max(1, min(MOST_PARTS, PROGRAMS // (tokens * heads.key), triton.cdiv(slots, tile)))
    device = qkvg.device
    partial = PartialAttention(
        sums=torch.empty(tokens, heads.query, parts, heads.dim, dtype=torch.float32, device=device),
        tops=torch.empty(tokens, heads.query, parts, dtype=torch.float32, device=device),
        totals=torch.empty(tokens, heads.query, parts, dtype=torch.float32, device=device),
    )
    rotary = step.rotary
    norms = step.norms
    # Rows of different lengths have tables of their own; one table for all of them has stride 0.
    per_row = rotary is not None and rotary.cos.dim() == 3 and rotary.cos.shape[0] > 1
    turned = 0 if rotary is None else rotary.cos.shape[-1]
    _attention_kernel[(parts, heads.key, tokens)](
        qkvg=qkvg,
        keys=cache.keys,
        values=cache.values,
        mask=cache.mask,
        filled=cache.filled,
        cos=None if rotary is None else rotary.cos,
        sin=None if rotary is None else rotary.sin,
        q_gain=None if norms is None else norms.query,
        k_gain=None if norms is None else norms.key,
        sums=partial.sums,
        tops=partial.tops,
        totals=partial.totals,
        width=qkvg.shape[1],
        key_heads=heads.key,
        group=group,
        size=heads.dim,
        slots=slots,
        turned=turned,
        cos_stride=turned if per_row else 0,
        parts=parts,
        scale=step.scale,
        cap=step.softcap,
        eps=0.0 if norms is None else norms.eps,
        ROTATED=rotary is not None,
        INTERLEAVED=rotary is not None and rotary.interleaved,
        NORMED=norms is not None,
        CENTERED=norms is not None and norms.zero_centered,
        GROUP=max(16, triton.next_power_of_2(group)),
        WIDTH=wide,
        KEYS=tile,
        num_warps=4,
        num_stages=1,
    )
    return partial


TRITON = DecodeKernels(product=product, attention=attention)
