"""The attention of a step of decoding (decode.py) in Triton: norms of heads, RoPE, the cache, softmax and gate.

It is divided over the keys, since one program per head would leave most of the GPU idle (Flash-Decoding). A first
kernel attends to each part of the keys, a second joins the parts.

Tested on a CPU through Triton's interpreter (TRITON_INTERPRET=1), in FP16, since it multiplies BF16 wrongly.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_models.kernels.decode import StepAttention, StepKeys

# Within 6 % of the fastest of 24 for llama-3.1-8b and qwen3-1.7b at batches of 1, 4, 8 and 16, with 2,049 keys on an
# H200 (benchmarks/results/decode_attention_h200.json).
KEYS = {128: 64, 256: 32}  # channels per head, at most -> keys of a tile
WARPS = 4
STAGES = 2
PROGRAMS = 528  # four for each multiprocessor
MOST_PARTS = 32


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
    base,
    head,
    c,
    heads,
    size,
    cos,
    sin,
    gain,
    turned,
    eps,
    ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORMED: tl.constexpr,
    CENTERED: tl.constexpr,
):
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
def _scores(product, mask, slot, end, scale, cap):
    """Return the scores [G, KEYS] from queries times the keys at these slots, -inf where a slot is not seen."""
    score = product * scale
    if cap is not None:
        score = (2.0 * tl.sigmoid(2.0 * score / cap) - 1.0) * cap  # cap * tanh(score / cap)
    seen = tl.load(mask + slot, slot < end, float("-inf")).to(tl.float32)
    return score + seen[None, :]


@triton.jit
def _online_softmax(top, score):
    """Return the largest scores [G] with a tile [G, KEYS] more, the factor of earlier sums, and the tile's weights.

    Sums so far are relative to `top`, the largest score so far.
    """
    higher = tl.maximum(top, tl.max(score, 1))
    # -inf: no key of this part is seen yet, and -inf - -inf would be NaN.
    base = tl.where(higher == float("-inf"), 0.0, higher)
    shrunk = tl.exp(top - base)
    weight = tl.exp(score - base[:, None])
    return higher, shrunk, weight


@triton.jit
def _attention_kernel(
    qkvg,
    keys,
    values,
    mask,
    filled,
    cos,
    sin,
    q_gain,
    k_gain,
    sums,
    tops,
    totals,
    width,
    key_heads,
    group,
    size,
    slots,
    turned,
    cos_stride,
    parts,
    scale,
    cap,
    eps,
    ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORMED: tl.constexpr,
    CENTERED: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
):
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
        qkvg + key_head * group * size,
        g,
        c,
        group,
        size,
        cos,
        sin,
        q_gain,
        turned,
        eps,
        ROTATED,
        INTERLEAVED,
        NORMED,
        CENTERED,
    )
    one = tl.arange(0, 1)
    key_start = qkvg + (key_heads * group + key_head) * size
    new_key = _heads(
        key_start,
        one,
        c,
        1,
        size,
        cos,
        sin,
        k_gain,
        turned,
        eps,
        ROTATED,
        INTERLEAVED,
        NORMED,
        CENTERED,
    )
    new_value = tl.load(key_start + key_heads * size + c, c < size, 0.0)[None, :]

    count = tl.load(filled).to(tl.int32)
    newest = count - 1
    # Whole tiles of the keys before the new one, as equal as may be.
    tiles = tl.cdiv(newest, KEYS)
    begin = part * tiles // parts * KEYS
    end = tl.minimum((part + 1) * tiles // parts * KEYS, newest)
    base = (row * key_heads + key_head) * slots * size
    keys += base
    values += base
    mask += row * slots
    top = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    out = tl.zeros([GROUP, WIDTH], tl.float32)
    for at in range(begin, end, KEYS):
        s = at + tl.arange(0, KEYS)
        inside = (s < end)[:, None] & (c < size)[None, :]
        place = s.to(tl.int64)[:, None] * size + c[None, :]
        k = tl.load(keys + place, inside, 0.0)
        v = tl.load(values + place, inside, 0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        score = _scores(score, mask, s, end, scale, cap)
        top, shrunk, weight = _online_softmax(top, score)
        total = total * shrunk + tl.sum(weight, 1)
        out = out * shrunk[:, None] + tl.dot(weight.to(dtype), v, input_precision="ieee")
    if part == parts - 1:
        # The new key comes after the loop, whose tiles need no selection then.
        s = newest + one
        place = s.to(tl.int64)[:, None] * size + c[None, :]
        tl.store(keys + place, new_key, (c < size)[None, :])
        tl.store(values + place, new_value, (c < size)[None, :])
        score = tl.sum(q.to(tl.float32) * new_key.to(tl.float32), 1)[:, None]
        score = _scores(score, mask, s, count, scale, cap)
        top, shrunk, weight = _online_softmax(top, score)
        total = total * shrunk + tl.sum(weight, 1)
        out = out * shrunk[:, None] + weight.to(dtype).to(tl.float32) * new_value.to(tl.float32)
    head = (row * key_heads + key_head) * group + g
    tl.store(tops + head * parts + part, top, g < group)
    tl.store(totals + head * parts + part, total, g < group)
    to = sums + (head[:, None] * parts + part) * size + c[None, :]
    tl.store(to, out, (g < group)[:, None] & (c < size)[None, :])


@triton.jit
def _combine_kernel(
    sums,
    tops,
    totals,
    sinks,
    qkvg,
    out,
    width,
    gate_at,
    heads,
    size,
    tokens,
    parts,
    GATE: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
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
                gate_factor = tl.maximum(logit, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(logit)))
            else:
                gate_factor = tl.sigmoid(logit)
            value = (value.to(tl.float32) * gate_factor).to(dtype)
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
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return partial
