"""The gradient of QK-norm and RoPE that writes FP8 for qkvg_proj, data and transposed copy at once.

A program handles some tokens of one head and reads them twice: first for 1 / RMS and for the part of the gradient along
the normed head, then, mostly from the cache, for the gradient itself, some channels at a time. So registers suffice for
heads of any width, at as many tokens as fill sectors of the transposed copy.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_models.kernels.attention_parts import Norm, Rotation
from te_models.kernels.count_cast_triton import Counts
from te_models.kernels.count_four_triton import (
    add_care,
    add_state,
    count_columns,
    count_rows_with_care,
    marked,
    needs_care,
    new_care,
    new_state,
    table_of,
)
from te_models.kernels.fp8_tiles_triton import (
    BAND,
    FP8Data,
    note_inverse,
    raise_amax,
    store_fp8,
    tile,
)
from te_models.kernels.handover import CastScale
from te_models.kernels.head_groups_triton import TOKENS, WARPS, read_head, token_rows
from te_models.kernels.head_tiles_triton import (
    members,
    norm_factor,
    rotation_tables,
    row_and_place,
    strides_of,
    width_of,
)

CHANNELS = 64  # of a tile, at most
COUNTED = 8  # heads of a program that counts, which adds to a recorder's table once


@triton.jit
def _pairs_at(places, i, head, seq, pair, half: tl.constexpr, interleaved: tl.constexpr, exists):
    """Return both members of pairs of a head at tokens i, and their gradients before they turned.

    `places`: the gradient of the normed and turned heads and the heads before the norm with their strides
    (`token_rows`), and cos and sin, None where nothing turns, with the strides of their rows and tokens. `exists`
    [tokens, 1].
    """
    dy_at, x_at, tables_at = places
    first, second = members(pair, half, interleaved)
    inside = exists & (pair < half)[None, :]
    slope = token_rows(dy_at, i, head, seq)
    source = token_rows(x_at, i, head, seq)
    da = read_head(slope, first, inside)
    db = read_head(slope, second, inside)
    cos, sin, table_batch, table_seq = tables_at
    if cos is not None:
        row, place = row_and_place(i, seq)
        at = (row * table_batch + place * table_seq)[:, None]
        cosine = read_head(cos + at, pair, inside)
        sine = read_head(sin + at, pair, inside)
        turned = da * cosine + db * sine
        db = db * cosine - da * sine
        da = turned
    return read_head(source, first, inside), read_head(source, second, inside), da, db


@triton.jit
def _rest_at(places, i, head, seq, other, dim: tl.constexpr, exists):
    """Return channels of a head that do not turn, at tokens i, and their gradients; see `_pairs_at`."""
    dy_at, x_at, _ = places
    inside = exists & (other < dim)[None, :]
    x = read_head(token_rows(x_at, i, head, seq), other, inside)
    return x, read_head(token_rows(dy_at, i, head, seq), other, inside)


@triton.jit
def _by_four(values):
    """Return the first to fourth of each four values [4 * groups], [groups, 1] each."""
    pairs = values.reshape(values.shape[0] // 4, 2, 2)
    even, odd = tl.split(pairs)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first[:, None], second[:, None], third[:, None], fourth[:, None]


@triton.jit
def _norm_sums(
    # as in `_pairs_at`; the weight of the norm, and which tokens exist [tokens, 1]
    places,
    weight,
    token,
    head,
    seq,
    exists,
    eps,
    dim: tl.constexpr,
    half: tl.constexpr,
    interleaved: tl.constexpr,
    zero_centered: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return 1 / RMS of a head, and the mean of its unit channels times their gradients, four tuples of tokens each."""
    squares = tl.zeros(token.shape, tl.float32)
    products = tl.zeros(token.shape, tl.float32)
    for at in tl.static_range(0, half, TILE):
        pair = at + tl.arange(0, TILE)
        first, second = members(pair, half, interleaved)
        a, b, da, db = _pairs_at(places, token, head, seq, pair, half, interleaved, exists)
        da *= norm_factor(weight, 0, first, pair < half, zero_centered)[None, :]
        db *= norm_factor(weight, 0, second, pair < half, zero_centered)[None, :]
        squares += tl.sum(a * a + b * b, 1)
        products += tl.sum(a * da + b * db, 1)
    for at in tl.static_range(2 * half, dim, TILE):
        other = at + tl.arange(0, TILE)
        c, dc = _rest_at(places, token, head, seq, other, dim, exists)
        dc *= norm_factor(weight, 0, other, other < dim, zero_centered)[None, :]
        squares += tl.sum(c * c, 1)
        products += tl.sum(c * dc, 1)
    inverse = tl.rsqrt(squares / dim + eps)
    return _by_four(inverse), _by_four(products * inverse / dim)


@triton.jit
def _slope(x, dx, gamma, inverse, mean):
    """Return the gradient of x before the norm, and its part of the gradient of the weight.

    `dx` is the gradient of x behind the norm, and `gamma` its factor there.
    """
    unit = x * inverse
    return inverse * (dx * gamma - unit * mean), dx * unit


@triton.jit
def _pair_slopes(
    # as in `_pairs_at` and `_norm_sums`, for groups of four tokens that begin at tokens i
    places,
    weight,
    sums,
    i,
    head,
    seq,
    exists,
    pair,
    half: tl.constexpr,
    interleaved: tl.constexpr,
    zero_centered: tl.constexpr,
):
    """Return the gradients of both members of pairs, four tiles each, and their sums for the weight [pairs]."""
    first, second = members(pair, half, interleaved)
    first_gamma = norm_factor(weight, 0, first, pair < half, zero_centered)[None, :]
    second_gamma = norm_factor(weight, 0, second, pair < half, zero_centered)[None, :]
    inverses, means = sums
    x1, x2, dx1, dx2 = _pairs_at(places, i, head, seq, pair, half, interleaved, exists)
    first_a, first_dweight = _slope(x1, dx1, first_gamma, inverses[0], means[0])
    second_a, second_dweight = _slope(x2, dx2, second_gamma, inverses[0], means[0])
    x1, x2, dx1, dx2 = _pairs_at(places, i + 1, head, seq, pair, half, interleaved, exists)
    first_b, more_first = _slope(x1, dx1, first_gamma, inverses[1], means[1])
    second_b, more_second = _slope(x2, dx2, second_gamma, inverses[1], means[1])
    first_dweight += more_first
    second_dweight += more_second
    x1, x2, dx1, dx2 = _pairs_at(places, i + 2, head, seq, pair, half, interleaved, exists)
    first_c, more_first = _slope(x1, dx1, first_gamma, inverses[2], means[2])
    second_c, more_second = _slope(x2, dx2, second_gamma, inverses[2], means[2])
    first_dweight += more_first
    second_dweight += more_second
    x1, x2, dx1, dx2 = _pairs_at(places, i + 3, head, seq, pair, half, interleaved, exists)
    first_d, more_first = _slope(x1, dx1, first_gamma, inverses[3], means[3])
    second_d, more_second = _slope(x2, dx2, second_gamma, inverses[3], means[3])
    first_dweight += more_first
    second_dweight += more_second
    return (
        (first_a, first_b, first_c, first_d),
        (second_a, second_b, second_c, second_d),
        tl.sum(first_dweight, 0),
        tl.sum(second_dweight, 0),
    )


@triton.jit
def _rest_slopes(
    # as in `_pair_slopes`
    places,
    weight,
    sums,
    i,
    head,
    seq,
    exists,
    other,
    dim: tl.constexpr,
    zero_centered: tl.constexpr,
):
    """Return the gradients of channels that do not turn, four tiles, and their sums for the weight [channels]."""
    gamma = norm_factor(weight, 0, other, other < dim, zero_centered)[None, :]
    inverses, means = sums
    x, dx = _rest_at(places, i, head, seq, other, dim, exists)
    a, dweight = _slope(x, dx, gamma, inverses[0], means[0])
    x, dx = _rest_at(places, i + 1, head, seq, other, dim, exists)
    b, more = _slope(x, dx, gamma, inverses[1], means[1])
    dweight += more
    x, dx = _rest_at(places, i + 2, head, seq, other, dim, exists)
    c, more = _slope(x, dx, gamma, inverses[2], means[2])
    dweight += more
    x, dx = _rest_at(places, i + 3, head, seq, other, dim, exists)
    d, more = _slope(x, dx, gamma, inverses[3], means[3])
    dweight += more
    return (a, b, c, d), tl.sum(dweight, 0)


@triton.jit
def _head_norm_backward_fp8_kernel(
    # gradient of the normed and turned heads, and the heads before the norm, both [B, S, heads, H]
    dy,
    x,
    # parts of the gradient of the weight, FP32 [ceil(N / TOKENS) * heads, H]
    dweight,
    # rotary tables (None: nothing turns) and the weight of the norm [H]
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
    # channels of a head, pairs that turn and their order
    dim: tl.constexpr,
    half: tl.constexpr,
    interleaved: tl.constexpr,
    zero_centered: tl.constexpr,
    # tokens and heads of a program, and pairs or other channels of a tile
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    BAND: tl.constexpr,
    E5M2: tl.constexpr,
):
    """Write the gradient of heads before QK-norm and RoPE as FP8, and partial sums of the weight's gradient."""
    row, part = tile(tl.cdiv(rows, TOKENS), tl.cdiv(heads, HEADS), BAND)
    places = (
        (dy, dy_batch, dy_seq, dy_head),
        (x, x_batch, x_seq, x_head),
        (cos, sin, table_batch, table_seq),
    )
    top = row * TOKENS
    token = row.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    is_token = (token < rows)[:, None]
    # Four tiles, the first to fourth rows of groups of four: the transposed copy is written four bytes at a time.
    group = row.to(tl.int64) * (TOKENS // 4) + tl.arange(0, TOKENS // 4)
    i = 4 * group
    exists = (i < rows)[:, None]
    s = tl.load(scale)
    if counts is not None:
        state = new_state(TOKENS // 4, TILE)
    for step in range(tl.minimum(HEADS, heads - part * HEADS)):
        head = part * HEADS + step
        largest = tl.zeros((TOKENS // 4, TILE), tl.float32)
        begin = start + head * dim
        # In this order also where programs are fewer, so that their sum has the same bits.
        into = dweight + (row.to(tl.int64) * heads + head) * dim
        sums = _norm_sums(
            places,
            weight,
            token,
            head,
            seq,
            is_token,
            eps,
            dim,
            half,
            interleaved,
            zero_centered,
            TILE,
        )
        for at in tl.static_range(0, half, TILE):
            pair = at + tl.arange(0, TILE)
            first, second = members(pair, half, interleaved)
            firsts, seconds, of_first, of_second = _pair_slopes(
                places, weight, sums, i, head, seq, exists, pair, half, interleaved, zero_centered
            )
            tl.store(into + first, of_first, pair < half)
            tl.store(into + second, of_second, pair < half)
            # Beyond the last pair there are no columns: the bound of a half is where the other begins.
            end = begin + 2 * half if interleaved else begin + half
            a, b, c, d = firsts
            j = begin + first
            one = store_fp8(a, b, c, d, s, group, j, rows, end, data, transposed, columns, E5M2)
            a, b, c, d = seconds
            j = begin + second
            end = begin + 2 * half
            two = store_fp8(a, b, c, d, s, group, j, rows, end, data, transposed, columns, E5M2)
            largest = tl.maximum(largest, tl.maximum(one, two))
            if counts is not None:
                there = half - at
                state = count_columns(state, firsts, s, top, rows, begin + first, there, E5M2)
                state = count_columns(state, seconds, s, top, rows, begin + second, there, E5M2)
        for at in tl.static_range(2 * half, dim, TILE):
            other = at + tl.arange(0, TILE)
            others, of_weight = _rest_slopes(
                places, weight, sums, i, head, seq, exists, other, dim, zero_centered
            )
            tl.store(into + other, of_weight, other < dim)
            a, b, c, d = others
            j = begin + other
            end = begin + dim
            stored = store_fp8(a, b, c, d, s, group, j, rows, end, data, transposed, columns, E5M2)
            largest = tl.maximum(largest, stored)
            if counts is not None:
                state = count_columns(state, others, s, top, rows, begin + other, dim - at, E5M2)
        raise_amax(amax, largest)
    note_inverse(s, scale_inv)
    if counts is not None:
        inverse = tl.div_rn(tl.full((), 1.0, tl.float32), s)
        care_needed = needs_care(state, inverse) | (marked(state) != 0).to(tl.int32)
        elements = tl.full((), 1.0, tl.float64) * rows * heads * dim
        add_state(counts, codes, spread, state, care_needed, s, elements, E5M2, start == 0)
        if care_needed > 0:
            care = new_care()
            for step in range(tl.minimum(HEADS, heads - part * HEADS)):
                head = part * HEADS + step
                sums = _norm_sums(
                    places,
                    weight,
                    token,
                    head,
                    seq,
                    is_token,
                    eps,
                    dim,
                    half,
                    interleaved,
                    zero_centered,
                    TILE,
                )
                for at in tl.static_range(0, half, TILE):
                    pair = at + tl.arange(0, TILE)
                    firsts, seconds, of_first, of_second = _pair_slopes(
                        places,
                        weight,
                        sums,
                        i,
                        head,
                        seq,
                        exists,
                        pair,
                        half,
                        interleaved,
                        zero_centered,
                    )
                    there = half - at
                    care = count_rows_with_care(care, firsts, s, top, 0, rows, there, E5M2)
                    care = count_rows_with_care(care, seconds, s, top, 0, rows, there, E5M2)
                for at in tl.static_range(2 * half, dim, TILE):
                    other = at + tl.arange(0, TILE)
                    others, of_weight = _rest_slopes(
                        places, weight, sums, i, head, seq, exists, other, dim, zero_centered
                    )
                    care = count_rows_with_care(care, others, s, top, 0, rows, dim - at, E5M2)
            add_care(counts, codes, spread, care)


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

    Only for the norm of each head by itself. `counts` are where a recorder counts what the cast does to the values;
    None: it does not.
    """
    batch, seq, heads, dim = x.shape
    (cos, sin), (table_batch, table_seq) = rotation_tables(rotation)
    half = (dim if rotation is None else rotation.cos.shape[-1]) // 2
    high = triton.cdiv(batch * seq, TOKENS)
    heads_of_program = 1 if counts is None else COUNTED
    # Each program writes its own parts, since atomic additions would have no fixed order.
    parts = torch.empty(high * heads, dim, dtype=torch.float32, device=x.device)
    _head_norm_backward_fp8_kernel[(high * triton.cdiv(heads, heads_of_program),)](
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
        **strides_of(dy=dy, x=x),
        table_batch=table_batch,
        table_seq=table_seq,
        rows=batch * seq,
        seq=seq,
        heads=heads,
        columns=out.transposed.shape[0],
        start=first,
        **table_of(counts),
        eps=norm.eps,
        dim=dim,
        half=half,
        interleaved=rotation is not None and rotation.interleaved,
        zero_centered=norm.zero_centered,
        TOKENS=TOKENS,
        HEADS=heads_of_program,
        TILE=min(CHANNELS, width_of(half)),
        BAND=BAND,
        E5M2=cast_scale.e5m2,
        num_warps=WARPS,
    )
    return parts.sum(0)
