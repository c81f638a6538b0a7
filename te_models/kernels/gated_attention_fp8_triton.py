"""The elementwise parts of attention that write FP8 for the next te.Linear, data and transposed copy at once.

A program handles some tokens, in groups of four, of one or a few heads; see fp8_tiles_triton.py for the layout of its
words. Tested against the plain operations through Triton's interpreter on a CPU (TRITON_INTERPRET=1).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_models.kernels.attention_parts import FP8Operations, Norm, Rotation
from te_models.kernels.count_cast_triton import Counts
from te_models.kernels.count_four_triton import (
    add_care,
    add_saturated,
    add_state,
    count_rows,
    count_rows_with_care,
    marked,
    needs_care,
    new_care,
    new_state,
    saturated_of,
    table_of,
)
from te_models.kernels.fp8_tiles_triton import (
    BAND,
    FP8Data,
    new_fp8,
    note_inverse,
    raise_amax,
    store_fp8,
)
from te_models.kernels.gate_fp8_triton import gate_backward_fp8, gate_fp8
from te_models.kernels.handover import CastScale
from te_models.kernels.head_groups_triton import (
    first_row,
    place_of_heads,
    read_head,
    token_rows,
)
from te_models.kernels.head_tiles_triton import (
    factor,
    head_tiles,
    pairs,
    rotation_tables,
)
from te_models.kernels.rotate_fp8_triton import (
    TURNED,
    count_pairs,
    halves_are_blocks,
    pair_angles,
    rotate_fp8,
    store_pairs,
)

# Tokens per program of norm_backward: with 32 the registers of a wide head do not suffice. Of 8 and 16 tokens, 8 took
# 0.71 ms and 16 at least 0.87 for 16 heads of 256 and 12,288 tokens on an H100.
NORM_TOKENS = {128: 32, 256: 8}  # channels per head, at most -> tokens


@triton.jit
def _norm_slopes(
    # the gradient of the normed and turned heads, and the heads before the norm, with their strides (`token_rows`)
    dy_at,
    x_at,
    # tokens of one head
    i,
    head,
    seq,
    # cos and sin of the pairs, FP32 [tokens, pairs]
    turn,
    slant,
    # first and second channels of the pairs, and the channels that do not turn; which pairs and others exist; the
    # factors of the norm for these three tiles
    channels,
    exist,
    factors,
    eps,
    dim: tl.constexpr,
):
    """Return the gradients of one head's norm at tokens i in three tiles, and their sums for the weight [width]."""
    slope = token_rows(dy_at, i, head, seq)
    source = token_rows(x_at, i, head, seq)
    first, second, other = channels
    inside, beside = exist
    factor_a, factor_b, factor_c = factors
    one = read_head(slope, first, inside)
    two = read_head(slope, second, inside)
    da = one * turn + two * slant
    db = two * turn - one * slant
    a = read_head(source, first, inside)
    b = read_head(source, second, inside)
    dc = read_head(slope, other, beside)  # beside is empty where RoPE turns all channels
    c = read_head(source, other, beside)
    squares = tl.sum(a * a + b * b, 1) + tl.sum(c * c, 1)
    products = tl.sum(a * da * factor_a + b * db * factor_b, 1) + tl.sum(c * dc * factor_c, 1)
    inverse = tl.rsqrt(squares / dim + eps)[:, None]
    mean = products[:, None] / dim * inverse * inverse
    a *= inverse
    b *= inverse
    c *= inverse
    mean /= inverse
    return (
        inverse * da * factor_a - inverse * a * mean,
        inverse * db * factor_b - inverse * b * mean,
        inverse * dc * factor_c - inverse * c * mean,
        tl.sum(da * a, 0),
        tl.sum(db * b, 0),
        tl.sum(dc * c, 0),
    )


@triton.jit
def _norm_slopes_four(
    # as in _norm_slopes
    dy_at,
    x_at,
    i,
    head,
    seq,
    cosines,
    sines,
    channels,
    exist,
    factors,
    # sums of the gradients of the weight so far, of these three tiles
    sums,
    eps,
    dim: tl.constexpr,
):
    """Return `_norm_slopes` of the first to fourth rows of groups of four at tokens i, and the sums, in tuples."""
    ca, cb, cc, cd = cosines
    sa, sb, sc, sd = sines
    sum_a, sum_b, sum_c = sums
    a, e, k, wa, wb, wc = _norm_slopes(
        dy_at, x_at, i, head, seq, ca, sa, channels, exist, factors, eps, dim
    )
    sum_a += wa
    sum_b += wb
    sum_c += wc
    b, f, m, wa, wb, wc = _norm_slopes(
        dy_at, x_at, i + 1, head, seq, cb, sb, channels, exist, factors, eps, dim
    )
    sum_a += wa
    sum_b += wb
    sum_c += wc
    c, g, n, wa, wb, wc = _norm_slopes(
        dy_at, x_at, i + 2, head, seq, cc, sc, channels, exist, factors, eps, dim
    )
    sum_a += wa
    sum_b += wb
    sum_c += wc
    d, h, o, wa, wb, wc = _norm_slopes(
        dy_at, x_at, i + 3, head, seq, cd, sd, channels, exist, factors, eps, dim
    )
    sum_a += wa
    sum_b += wb
    sum_c += wc
    return (a, b, c, d), (e, f, g, h), (k, m, n, o), (sum_a, sum_b, sum_c)


@triton.jit
def _norm_backward_fp8_kernel(
    # gradient of the normed and turned heads, and the heads before the norm, both [B, S, heads, H]
    dy,
    x,
    # parts of the gradient of the weight, FP32, one row per program
    dweight,
    # rotary tables and the weight of the norm [H]
    cos,
    sin,
    weight,
    # the FP8 output: uint8 [N, K] and its transpose [K, N] (either may be None), the scale and amax of its quantizer,
    # and the inverse scale to write, FP32 [1] each
    data,
    transposed,
    scale,
    amax,
    scale_inv,
    # strides in elements
    dy_batch,
    dy_seq,
    dy_head,
    x_batch,
    x_seq,
    x_head,
    table_batch,
    table_seq,
    # tokens B * S, tokens per row, heads, and columns of the output, of which these begin at `start`
    rows,
    seq,
    heads,
    columns,
    start,
    # the fields and codes of a recorder that counts casts (count_cast_triton.py); None: not compiled
    counts,
    codes,
    spread,
    eps,
    # channels of a head, pairs that turn and their order, and powers of two above the pairs and the rest
    dim: tl.constexpr,
    half: tl.constexpr,
    interleaved: tl.constexpr,
    zero_centered: tl.constexpr,
    width: tl.constexpr,
    rest: tl.constexpr,
    block: tl.constexpr,
    turned: tl.constexpr,
    BAND: tl.constexpr,
    E5M2: tl.constexpr,
    ALIGNED: tl.constexpr,  # of counts: whether halves of heads are whole blocks of the hash
):
    group, part, pair, inside = place_of_heads(
        rows, tl.cdiv(heads, turned), half, width, block, BAND
    )
    _, first, second = pairs(half, width, interleaved)
    other = 2 * half + tl.arange(0, rest)
    beside = (4 * group < rows)[:, None] & (other < dim)[None, :]
    i = 4 * group
    s = tl.load(scale)
    fa = factor(weight, 0, first, pair < half, zero_centered)[None, :]
    fb = factor(weight, 0, second, pair < half, zero_centered)[None, :]
    fc = factor(weight, 0, other, other < dim, zero_centered)[None, :]
    ca, sa = pair_angles(cos, sin, i, table_batch, table_seq, seq, 1.0, pair, inside)
    cb, sb = pair_angles(cos, sin, i + 1, table_batch, table_seq, seq, 1.0, pair, inside)
    cc, sc = pair_angles(cos, sin, i + 2, table_batch, table_seq, seq, 1.0, pair, inside)
    cd, sd = pair_angles(cos, sin, i + 3, table_batch, table_seq, seq, 1.0, pair, inside)
    dy_at = (dy, dy_batch, dy_seq, dy_head)
    x_at = (x, x_batch, x_seq, x_head)
    channels = (first, second, other)
    exist = (inside, beside)
    factors = (fa, fb, fc)
    cosines = (ca, cb, cc, cd)
    sines = (sa, sb, sc, sd)
    largest = tl.zeros((block // 4, width), tl.float32)
    top = first_row(rows, tl.cdiv(heads, turned), block, BAND)
    if counts is not None:
        state = new_state(block // 4, width)
        if 2 * half < dim:
            rest_state = new_state(block // 4, rest)
    sum_a = tl.zeros((width,), tl.float32)
    sum_b = tl.zeros((width,), tl.float32)
    sum_c = tl.zeros((rest,), tl.float32)
    for step in range(tl.minimum(turned, heads - part * turned)):
        head = part * turned + step
        begin = start + head * dim
        stop = begin + dim
        end = begin + 2 * half if interleaved else begin + half
        firsts, seconds, others, sums = _norm_slopes_four(
            dy_at,
            x_at,
            i,
            head,
            seq,
            cosines,
            sines,
            channels,
            exist,
            factors,
            (sum_a, sum_b, sum_c),
            eps,
            dim,
        )
        sum_a, sum_b, sum_c = sums
        stored = store_pairs(
            firsts,
            seconds,
            first,
            second,
            s,
            group,
            begin,
            end,
            rows,
            columns,
            data,
            transposed,
            half,
            E5M2,
        )
        largest = tl.maximum(largest, stored)
        if counts is not None:
            state = count_pairs(
                state,
                firsts,
                seconds,
                first,
                second,
                s,
                top,
                begin,
                rows,
                half,
                interleaved,
                E5M2,
                ALIGNED,
            )
        if 2 * half < dim:
            k, m, n, o = others
            three = store_fp8(
                k, m, n, o, s, group, begin + other, rows, stop, data, transposed, columns, E5M2
            )
            raise_amax(amax, three)
            if counts is not None:
                at = begin + 2 * half
                rest_state = count_rows(
                    rest_state,
                    others,
                    s,
                    top,
                    0,
                    rows,
                    dim - 2 * half,
                    at,
                    E5M2,
                    False,
                )
    raise_amax(amax, largest)
    if counts is not None:
        inverse = tl.div_rn(tl.full((), 1.0, tl.float32), s)
        elements = tl.full((), 1.0, tl.float64) * rows * heads * dim
        care_needed = needs_care(state, inverse)
        marks = marked(state)
        if 2 * half < dim:
            care_needed |= needs_care(rest_state, inverse)
            marks |= marked(rest_state)
            nothing = tl.zeros((), tl.float64)
            add_state(counts, codes, spread, rest_state, care_needed, s, nothing, E5M2, False)
        add_state(counts, codes, spread, state, care_needed, s, elements, E5M2, start == 0)
        if care_needed > 0:
            care = new_care()
            for step in range(tl.minimum(turned, heads - part * turned)):
                head = part * turned + step
                firsts, seconds, others, unused = _norm_slopes_four(
                    dy_at,
                    x_at,
                    i,
                    head,
                    seq,
                    cosines,
                    sines,
                    channels,
                    exist,
                    factors,
                    (sum_a, sum_b, sum_c),
                    eps,
                    dim,
                )
                care = count_rows_with_care(care, firsts, s, top, 0, rows, half, E5M2)
                care = count_rows_with_care(care, seconds, s, top, 0, rows, half, E5M2)
                if 2 * half < dim:
                    care = count_rows_with_care(care, others, s, top, 0, rows, dim - 2 * half, E5M2)
            add_care(counts, codes, spread, care)
        elif marks != 0:
            saturated = tl.zeros((), tl.int64)
            for step in range(tl.minimum(turned, heads - part * turned)):
                head = part * turned + step
                firsts, seconds, others, unused = _norm_slopes_four(
                    dy_at,
                    x_at,
                    i,
                    head,
                    seq,
                    cosines,
                    sines,
                    channels,
                    exist,
                    factors,
                    (sum_a, sum_b, sum_c),
                    eps,
                    dim,
                )
                saturated += saturated_of(firsts, inverse, E5M2)
                saturated += saturated_of(seconds, inverse, E5M2)
                if 2 * half < dim:
                    saturated += saturated_of(others, inverse, E5M2)
            add_saturated(counts, spread, saturated)
    note_inverse(s, scale_inv)
    into = dweight + tl.program_id(0).to(tl.int64) * dim
    tl.store(into + first, sum_a, pair < half)
    tl.store(into + second, sum_b, pair < half)
    if 2 * half < dim:
        tl.store(into + other, sum_c, other < dim)


def norm_backward_fp8(
    out: FP8Data,
    cast_scale: CastScale,
    first: int,
    dy: Tensor,
    x: Tensor,
    norm: Norm,
    rotation: Rotation | None,
    counts: Counts | None = None,
) -> Tensor:
    """Write the gradient for x of attention_parts.norm_backward as FP8 into `out`; return the gradient of the weight.

    Only for the norm of each head by itself.
    """
    batch, seq, heads, dim = x.shape
    (cos, sin), (table_batch, table_seq) = rotation_tables(rotation)
    tokens = NORM_TOKENS[128 if dim <= 128 else 256]
    programs = triton.cdiv(batch * seq, tokens) * triton.cdiv(heads, TURNED)
    parts = torch.empty(programs, dim, dtype=torch.float32, device=x.device)
    _norm_backward_fp8_kernel[(programs,)](
        dy=dy,
        x=x,
        dweight=parts,
        cos=cos,
        sin=sin,
        weight=norm.weight,
        data=out.data,
        transposed=out.transposed,
        scale=cast_scale.scale,
        amax=cast_scale.amax,
        scale_inv=out.scale_inv,
        dy_batch=dy.stride(0),
        dy_seq=dy.stride(1),
        dy_head=dy.stride(2),
        x_batch=x.stride(0),
        x_seq=x.stride(1),
        x_head=x.stride(2),
        table_batch=table_batch,
        table_seq=table_seq,
        rows=batch * seq,
        seq=seq,
        heads=heads,
        columns=out.transposed.shape[0],
        start=first,
        **table_of(counts),
        eps=norm.eps,
        **head_tiles(dim, rotation),
        zero_centered=norm.zero_centered,
        block=tokens,
        turned=TURNED,
        BAND=BAND,
        E5M2=cast_scale.e5m2,
        ALIGNED=halves_are_blocks(dim, rotation, first),
        num_warps=4,
    )
    return parts.sum(0)


FP8 = FP8Operations(new_fp8, gate_fp8, rotate_fp8, norm_backward_fp8, gate_backward_fp8)
