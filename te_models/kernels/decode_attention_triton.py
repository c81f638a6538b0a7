"""The attention of a step of decoding (decode.py) in Triton: norms of heads, RoPE, the cache, softmax and gate.

It is divided over the keys, since one program per head would leave most of the GPU idle (Flash-Decoding). A first
kernel attends to each part of the keys and writes the new token's key and value to the cache; a second joins the parts.

Shapes: N rows, of which the first B are tokens; A heads of queries and K of keys, H channels each; R of these rotate.

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
def _projected_channel(c, rotated, INTERLEAVED: tl.constexpr):
    """Return the channel of the projection that becomes channel c of a rotated head.

    Interleaved pairs become halves, as the cache holds them: products of queries and keys ignore the order.
    """
    if INTERLEAVED:
        half = rotated // 2
        pair_channel = tl.where(c < half, 2 * c, 2 * (c - half) + 1)
        c = tl.where(c < rotated, pair_channel, c)
    return c


@triton.jit
def _heads(
    # the first of `heads` heads in the projection; the numbers of heads [G] and channels [W] to return
    base,
    head,
    c,
    heads,
    # H, the tables of RoPE of this row [R], the weight of the norm [H], and R
    size,
    cos,
    sin,
    weight,
    rotated,
    eps,
    ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORMED: tl.constexpr,
    CENTERED: tl.constexpr,
):
    """Return heads [G, W] of queries or keys in their dtype, normed if NORMED, with RoPE if ROTATED."""
    dtype = base.dtype.element_ty
    inside = (head < heads)[:, None] & (c < size)[None, :]
    at = _projected_channel(c, rotated, INTERLEAVED)
    value = tl.load(base + head[:, None] * size + at[None, :], inside, 0.0).to(tl.float32)
    inverse_rms = tl.zeros_like(tl.sum(value, 1))
    if NORMED:
        inverse_rms = tl.rsqrt(tl.sum(value * value, 1) / size + eps)
        value = _normed(value, inverse_rms, weight, at, c < size, dtype, CENTERED)
    if ROTATED:
        half = rotated // 2
        other = tl.where(c < half, c + half, c - half)
        rotates = c < rotated
        at = _projected_channel(other, rotated, INTERLEAVED)
        partner = tl.load(
            base + head[:, None] * size + at[None, :], inside & rotates[None, :], 0.0
        ).to(tl.float32)
        if NORMED:
            partner = _normed(partner, inverse_rms, weight, at, rotates, dtype, CENTERED)
        partner = tl.where((c < half)[None, :], -partner, partner)
        cosine = tl.load(cos + c, rotates, 1.0).to(tl.float32)[None, :]
        sine = tl.load(sin + c, rotates, 0.0).to(tl.float32)[None, :]
        value = value * cosine + partner * sine
    return value.to(dtype)


@triton.jit
def _normed(value, inverse_rms, weight, at, inside, dtype: tl.constexpr, CENTERED: tl.constexpr):
    """Return heads times 1 / RMS and the weight of their channels `at`, rounded to the dtype of the model."""
    factor = tl.load(weight + at, inside, 0.0).to(tl.float32)
    if CENTERED:
        factor += 1.0
    return (value * inverse_rms[:, None] * factor[None, :]).to(dtype).to(tl.float32)


@triton.jit
def _scores(product, mask, slot, end, scale, cap):
    """Return the scores [G, KEYS] of queries times keys at slots [KEYS]: scaled, capped, and -inf where masked."""
    score = product * scale
    if cap is not None:
        score = (2.0 * tl.sigmoid(2.0 * score / cap) - 1.0) * cap  # cap * tanh(score / cap)
    seen = tl.load(mask + slot, slot < end, float("-inf")).to(tl.float32)
    return score + seen[None, :]


@triton.jit
def _online_softmax(top, score):
    """Return a step of the online softmax over a tile of scores [G, KEYS].

    `top` [G] is the largest score before the tile, by which earlier sums are exp(score - top). Returns the largest
    score now [G], the factor that brings earlier sums to it [G], and the weights of the tile [G, KEYS].
    """
    new_top = tl.maximum(top, tl.max(score, 1))
    # -inf: no key of this part is seen yet, and -inf - -inf would be NaN.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    rescale = tl.exp(top - base)
    weight = tl.exp(score - base[:, None])
    return new_top, rescale, weight


@triton.jit
def _attention_kernel(
    # projections [N, Q], and the fields of StepKeys
    qkvg,
    keys,
    values,
    mask,
    filled,
    # tables of RoPE [R] or [B, R], and weights of the norms of heads [H]; None: there is none
    cos,
    sin,
    q_weight,
    k_weight,
    # outputs: the fields of PartialAttention
    sums,
    tops,
    totals,
    # Q, K, heads of queries for each head of keys, H, slots of the cache, R, and the stride of the tables' rows
    width,
    key_heads,
    group,
    size,
    slots,
    rotated,
    cos_stride,
    # parts of the keys
    parts,
    # the factor of scores, the cap of scores or None, and what the norms add to the mean square
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
    """Attend to one part of the keys for all queries that share a head of keys; the last part has the new key."""
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
        q_weight,
        rotated,
        eps,
        ROTATED=ROTATED,
        INTERLEAVED=INTERLEAVED,
        NORMED=NORMED,
        CENTERED=CENTERED,
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
        k_weight,
        rotated,
        eps,
        ROTATED=ROTATED,
        INTERLEAVED=INTERLEAVED,
        NORMED=NORMED,
        CENTERED=CENTERED,
    )
    new_value = tl.load(key_start + key_heads * size + c, c < size, 0.0)[None, :]

    count = tl.load(filled).to(tl.int32)
    newest = count - 1
    # Whole tiles of the keys before the new one, as evenly divided among the parts as possible.
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
    for start in range(begin, end, KEYS):
        s = start + tl.arange(0, KEYS)  # slots
        inside = (s < end)[:, None] & (c < size)[None, :]
        offsets = s.to(tl.int64)[:, None] * size + c[None, :]
        k = tl.load(keys + offsets, inside, 0.0)
        v = tl.load(values + offsets, inside, 0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        score = _scores(score, mask, s, end, scale, cap)
        top, rescale, weight = _online_softmax(top, score)
        total = total * rescale + tl.sum(weight, 1)
        out = out * rescale[:, None] + tl.dot(weight.to(dtype), v, input_precision="ieee")
    if part == parts - 1:
        # The new key comes after the loop, whose tiles need no selection then.
        s = newest + one
        offsets = s.to(tl.int64)[:, None] * size + c[None, :]
        tl.store(keys + offsets, new_key, (c < size)[None, :])
        tl.store(values + offsets, new_value, (c < size)[None, :])
        score = tl.sum(q.to(tl.float32) * new_key.to(tl.float32), 1)[:, None]
        score = _scores(score, mask, s, count, scale, cap)
        top, rescale, weight = _online_softmax(top, score)
        total = total * rescale + tl.sum(weight, 1)
        out = out * rescale[:, None] + weight.to(dtype).to(tl.float32) * new_value.to(tl.float32)
    head = (row * key_heads + key_head) * group + g
    tl.store(tops + head * parts + part, top, g < group)
    tl.store(totals + head * parts + part, total, g < group)
    to = sums + (head[:, None] * parts + part) * size + c[None, :]
    tl.store(to, out, (g < group)[:, None] & (c < size)[None, :])


@triton.jit
def _combine_kernel(
    # the fields of PartialAttention, and the logits of attention sinks [A] or None
    sums,
    tops,
    totals,
    sinks,
    # projections [N, Q], which have the logits of the gate, and the output [N, A * H]
    qkvg,
    out,
    # Q, the column of the gate's logits, A, H, B, and parts of the keys
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
    """Join the parts of one head and apply the gate; rows that are no tokens get zeros."""
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
    """Return the gated attention of new tokens, and write their keys and values to the cache.

    Args:
        qkvg: their projections [N, Q], in the dtype of the cache.
        cache: keys and values; row i of it belongs to row i of qkvg.
        step: the settings of attention.
        tokens: the first rows of qkvg, which are no padding.

    Returns:
        [N, A*H] in the dtype of qkvg, zeros where a row is padding.
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
    """Attention over each of P parts of the keys, FP32; a softmax over all keys follows from these.

    Attributes:
        sums: values weighted by exp(score - top), [B, A, P, H].
        tops: the largest score, [B, A, P].
        totals: the sum of exp(score - top), [B, A, P].
    """

    sums: Tensor
    tops: Tensor
    totals: Tensor


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
    rotated = 0 if rotary is None else rotary.cos.shape[-1]
    _attention_kernel[(parts, heads.key, tokens)](
        qkvg=qkvg,
        keys=cache.keys,
        values=cache.values,
        mask=cache.mask,
        filled=cache.filled,
        cos=None if rotary is None else rotary.cos,
        sin=None if rotary is None else rotary.sin,
        q_weight=None if norms is None else norms.query,
        k_weight=None if norms is None else norms.key,
        sums=partial.sums,
        tops=partial.tops,
        totals=partial.totals,
        width=qkvg.shape[1],
        key_heads=heads.key,
        group=group,
        size=heads.dim,
        slots=slots,
        rotated=rotated,
        cos_stride=rotated if per_row else 0,
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
