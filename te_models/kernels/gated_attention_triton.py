"""The elementwise parts of attention in Triton: each tensor is read once and written once, in any layout.

A program handles a few heads of one token. Its tiles are `width` channels wide, the next power of two from the head's
own number on. Indices are 64-bit numbers before they are multiplied by strides, since a tensor may have more than 2**31
elements. Tested against the plain operations (attention_parts.py) through Triton's interpreter on a CPU
(TRITON_INTERPRET=1).

RoPE and QK-norm take a head in three tiles: the `first` and `second` channels of the pairs that RoPE turns, and the
`rest`, which it leaves. Without RoPE all channels are pairs that do not turn.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_models.kernels.attention_parts import Norm, Operations, Rotation
from te_models.kernels.gate_triton import gate, gate_backward
from te_models.kernels.gated_attention_fp8_triton import FP8
from te_models.kernels.head_copy_triton import copy
from te_models.kernels.head_tiles_triton import (
    HEADS,
    head_tiles,
    heads_of_token,
    norm_factor,
    pairs,
    rotation_tables,
    row_and_place,
    strides_of,
)
from te_models.kernels.span_attention_triton import spans

NORM_TOKENS = 16  # tokens per program of norm_backward, which adds up their gradients of the weight


@triton.jit
def _rotate_kernel(
    # input and output [B, S, heads, H], the same tensor if `in_place`
    x,
    out,
    # rotary tables [S, R] or [B, S, R], and the weight of a norm; None: no RoPE, no norm
    cos,
    sin,
    weight,
    # strides in elements
    x_batch,
    x_seq,
    x_head,
    out_batch,
    out_seq,
    out_head,
    table_batch,
    table_seq,
    # tokens per row of the batch, and heads
    seq,
    heads,
    eps,
    # 1 turns forward, -1 back, which is the gradient
    sign,
    # channels of a head, pairs that turn, and their order
    dim: tl.constexpr,
    half: tl.constexpr,
    interleaved: tl.constexpr,
    # one norm over all heads of a token
    together: tl.constexpr,
    zero_centered: tl.constexpr,
    in_place: tl.constexpr,
    # powers of two above the pairs and the rest, and heads per program
    width: tl.constexpr,
    rest: tl.constexpr,
    block: tl.constexpr,
):
    """Write x, normed if there is a weight, with RoPE if there are tables.

    a and b are the first and second channels of the pairs [block, width], c the channels that do not turn.
    """
    token, batch, place, head, _, _ = heads_of_token(seq, heads, half, width, block)
    pair, first, second = pairs(half, width, interleaved)
    exists = pair < half
    inside = (head < heads) & exists[None, :]
    source = x + batch * x_batch + place * x_seq + head * x_head
    target = out + batch * out_batch + place * out_seq + head * out_head
    if interleaved:
        # Both members of a pair are in one thread: reading every second channel would take twice as many loads.
        channel = tl.arange(0, 2 * width)
        among = (head < heads) & (channel < 2 * half)[None, :]
        both = tl.load(source + channel[None, :], among, 0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(both, (block, width, 2)))
    else:
        a = tl.load(source + first[None, :], inside, 0.0).to(tl.float32)
        b = tl.load(source + second[None, :], inside, 0.0).to(tl.float32)
    other = 2 * half + tl.arange(0, rest)
    beside = (head < heads) & (other < dim)[None, :]
    if 2 * half < dim:
        c = tl.load(source + other[None, :], beside, 0.0).to(tl.float32)
    if weight is not None:
        squares = tl.sum(a * a + b * b, 1)
        if 2 * half < dim:
            squares += tl.sum(c * c, 1)
        if together:
            inverse = tl.rsqrt(tl.sum(squares, 0) / (heads * dim) + eps)
        else:
            inverse = tl.rsqrt(squares / dim + eps)[:, None]
        offset = head * dim if together else head * 0
        a *= inverse * norm_factor(weight, offset, first[None, :], inside, zero_centered)
        b *= inverse * norm_factor(weight, offset, second[None, :], inside, zero_centered)
        if 2 * half < dim:
            c *= inverse * norm_factor(weight, offset, other[None, :], beside, zero_centered)
    if cos is not None:
        at = batch * table_batch + place * table_seq + pair
        cosine = tl.load(cos + at, exists, 0.0).to(tl.float32)[None, :]
        sine = tl.load(sin + at, exists, 0.0).to(tl.float32)[None, :] * sign
        turned_a = a * cosine - b * sine
        b = b * cosine + a * sine
        a = turned_a
    if interleaved:
        both = tl.reshape(tl.join(a, b), (block, 2 * width))
        tl.store(target + channel[None, :], both.to(out.dtype.element_ty), among)
    else:
        tl.store(target + first[None, :], a.to(out.dtype.element_ty), inside)
        tl.store(target + second[None, :], b.to(out.dtype.element_ty), inside)
    if 2 * half < dim and not in_place:
        tl.store(target + other[None, :], c.to(out.dtype.element_ty), beside)


@triton.jit
def _norm_backward_kernel(
    # gradient of the output, input of the norm, and the gradient to write, all [B, S, heads, H]
    dy,
    x,
    dx,
    # parts of the gradient of the weight, FP32, one row per program
    dweight,
    # rotary tables and the weight of the norm
    cos,
    sin,
    weight,
    # strides in elements
    dy_batch,
    dy_seq,
    dy_head,
    x_batch,
    x_seq,
    x_head,
    dx_batch,
    dx_seq,
    dx_head,
    table_batch,
    table_seq,
    # B * S, S, and heads
    tokens,
    seq,
    heads,
    eps,
    # channels of a head, pairs that turn, and their order
    dim: tl.constexpr,
    half: tl.constexpr,
    interleaved: tl.constexpr,
    # one norm over all heads of a token
    together: tl.constexpr,
    zero_centered: tl.constexpr,
    # powers of two above the pairs and the rest, heads per program, and tokens per program
    width: tl.constexpr,
    rest: tl.constexpr,
    block: tl.constexpr,
    program_tokens: tl.constexpr,
):
    """Write dx and this program's part of the gradient of the weight: undo RoPE, then differentiate the norm.

    The names end in a and b for the channels of pairs [block, width], and in c for those that do not turn.
    """
    head = tl.program_id(1).to(tl.int64) * block + tl.arange(0, block)[:, None]
    pair, first, second = pairs(half, width, interleaved)
    exists = pair < half
    inside = (head < heads) & exists[None, :]
    other = 2 * half + tl.arange(0, rest)
    beside = (head < heads) & (other < dim)[None, :]
    offset = head * dim if together else head * 0
    factor_a = norm_factor(weight, offset, first[None, :], inside, zero_centered)
    factor_b = norm_factor(weight, offset, second[None, :], inside, zero_centered)
    sum_a = tl.zeros((block, width), tl.float32)
    sum_b = tl.zeros((block, width), tl.float32)
    if 2 * half < dim:
        factor_c = norm_factor(weight, offset, other[None, :], beside, zero_centered)
        sum_c = tl.zeros((block, rest), tl.float32)
    begin = tl.program_id(0).to(tl.int64) * program_tokens
    for step in range(tl.minimum(program_tokens, tokens - begin)):
        token = begin + step
        batch, place = row_and_place(token, seq)
        source = x + batch * x_batch + place * x_seq + head * x_head
        slope = dy + batch * dy_batch + place * dy_seq + head * dy_head
        target = dx + batch * dx_batch + place * dx_seq + head * dx_head
        a = tl.load(source + first[None, :], inside, 0.0).to(tl.float32)
        b = tl.load(source + second[None, :], inside, 0.0).to(tl.float32)
        da = tl.load(slope + first[None, :], inside, 0.0).to(tl.float32)
        db = tl.load(slope + second[None, :], inside, 0.0).to(tl.float32)
        if cos is not None:
            at = batch * table_batch + place * table_seq + pair
            cosine = tl.load(cos + at, exists, 0.0).to(tl.float32)[None, :]
            sine = tl.load(sin + at, exists, 0.0).to(tl.float32)[None, :]
            # The inverse rotation, which is the gradient of RoPE.
            turned_da = da * cosine + db * sine
            db = db * cosine - da * sine
            da = turned_da
        squares = tl.sum(a * a + b * b, 1)
        products = tl.sum(a * da * factor_a + b * db * factor_b, 1)
        if 2 * half < dim:
            c = tl.load(source + other[None, :], beside, 0.0).to(tl.float32)
            dc = tl.load(slope + other[None, :], beside, 0.0).to(tl.float32)
            squares += tl.sum(c * c, 1)
            products += tl.sum(c * dc * factor_c, 1)
        if together:
            inverse = tl.rsqrt(tl.sum(squares, 0) / (heads * dim) + eps)
            mean = tl.sum(products, 0) / (heads * dim) * inverse * inverse
        else:
            inverse = tl.rsqrt(squares / dim + eps)[:, None]
            mean = products[:, None] / dim * inverse * inverse
        ga = inverse * (da * factor_a - a * mean)
        gb = inverse * (db * factor_b - b * mean)
        tl.store(target + first[None, :], ga.to(dx.dtype.element_ty), inside)
        tl.store(target + second[None, :], gb.to(dx.dtype.element_ty), inside)
        sum_a += da * a * inverse
        sum_b += db * b * inverse
        if 2 * half < dim:
            gc = inverse * (dc * factor_c - c * mean)
            tl.store(target + other[None, :], gc.to(dx.dtype.element_ty), beside)
            sum_c += dc * c * inverse
    if together:
        part = dweight + tl.program_id(0).to(tl.int64) * heads * dim + head * dim
        tl.store(part + first[None, :], sum_a, inside)
        tl.store(part + second[None, :], sum_b, inside)
        if 2 * half < dim:
            tl.store(part + other[None, :], sum_c, beside)
    else:
        program = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        part = dweight + program * dim
        tl.store(part + first, tl.sum(sum_a, 0), exists)
        tl.store(part + second, tl.sum(sum_b, 0), exists)
        if 2 * half < dim:
            tl.store(part + other, tl.sum(sum_c, 0), other < dim)


def rotate(x: Tensor, out: Tensor, rotation: Rotation, inverse: bool) -> None:
    """See attention_parts.rotate."""
    _write_heads(x, out, norm=None, rotation=rotation, sign=-1.0 if inverse else 1.0)


def norm(x: Tensor, norm: Norm, rotation: Rotation | None) -> Tensor:
    """See attention_parts.norm."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _write_heads(x, out, norm=norm, rotation=rotation, sign=1.0)
    return out


def _write_heads(
    x: Tensor, out: Tensor, norm: Norm | None, rotation: Rotation | None, sign: float
) -> None:
    """Write x [B, S, heads, H] with the norm and RoPE into `out`, which may be x; None leaves one of them out.

    `sign` is 1 for RoPE and -1 for its inverse.
    """
    batch, seq, heads, dim = x.shape
    (cos, sin), (table_batch, table_seq) = rotation_tables(rotation)
    # A weight of all heads: one norm over the whole token, so a program has all its heads.
    together = norm is not None and len(norm.weight) != dim
    block = triton.next_power_of_2(heads) if together else HEADS
    _rotate_kernel[(batch * seq, triton.cdiv(heads, block))](
        x=x,
        out=out,
        cos=cos,
        sin=sin,
        weight=None if norm is None else norm.weight,
        **strides_of(x=x, out=out),
        table_batch=table_batch,
        table_seq=table_seq,
        seq=seq,
        heads=heads,
        eps=0.0 if norm is None else norm.eps,
        sign=sign,
        **head_tiles(dim, rotation),
        together=together,
        zero_centered=norm is not None and norm.zero_centered,
        in_place=out is x,
        block=block,
    )


def norm_backward(
    dy: Tensor, x: Tensor, norm: Norm, rotation: Rotation | None, dx: Tensor
) -> Tensor:
    """See attention_parts.norm_backward."""
    batch, seq, heads, dim = x.shape
    (cos, sin), (table_batch, table_seq) = rotation_tables(rotation)
    together = len(norm.weight) != dim
    block = triton.next_power_of_2(heads) if together else HEADS
    grid = (triton.cdiv(batch * seq, NORM_TOKENS), triton.cdiv(heads, block))
    size = heads * dim if together else dim
    # Each program writes its own part, since atomic additions would have no fixed order.
    parts = torch.empty(grid[0] * grid[1], size, dtype=torch.float32, device=x.device)
    _norm_backward_kernel[grid](
        dy=dy,
        x=x,
        dx=dx,
        dweight=parts,
        cos=cos,
        sin=sin,
        weight=norm.weight,
        **strides_of(dy=dy, x=x, dx=dx),
        table_batch=table_batch,
        table_seq=table_seq,
        tokens=batch * seq,
        seq=seq,
        heads=heads,
        eps=norm.eps,
        **head_tiles(dim, rotation),
        together=together,
        zero_centered=norm.zero_centered,
        block=block,
        program_tokens=NORM_TOKENS,
    )
    return parts.sum(0)


TRITON = Operations(
    rotate=rotate,
    norm=norm,
    norm_backward=norm_backward,
    copy=copy,
    gate=gate,
    gate_backward=gate_backward,
    fp8=FP8,
    spans=spans,
)
