"""RoPE and its inverse that write FP8 for a te.Linear, data and transposed copy at once.

A program handles some tokens of a few heads. Its tiles hold every fourth token: the first to fourth tile have the
tokens i, i + 1, i + 2 and i + 3 of groups that begin at tokens i. So the bytes of one group are one word of the
transposed copy, see fp8_tiles_triton.py.

Tested against the plain operations through Triton's interpreter on a CPU (TRITON_INTERPRET=1).
"""

import triton
import triton.language as tl
from torch import Tensor

from te_models.kernels.attention_parts import Rotation
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
    note_inverse,
    raise_amax,
    store_fp8,
)
from te_models.kernels.handover import CastScale
from te_models.kernels.head_groups_triton import (
    TOKENS,
    WARPS,
    first_row,
    place_of_heads,
    read_head,
    token_rows,
)
from te_models.kernels.head_tiles_triton import (
    head_tiles,
    rotation_tables,
    row_and_place,
    strides_of,
)

HEADS_PER_PROGRAM = 8  # they share the angles of a token


@triton.jit
def _angles(cos, sin, i, table_batch, table_seq, seq, sign, pair, inside):
    """Return cos and sign * sin of the pairs at tokens i, FP32 [len(i), pairs]; without tables 1 and 0."""
    if cos is not None:
        row, place = row_and_place(i, seq)
        at = (row * table_batch + place * table_seq)[:, None]
        cosine = read_head(cos + at, pair, inside)
        sine = read_head(sin + at, pair, inside) * sign
    else:
        cosine = inside.to(tl.float32)
        sine = cosine * 0
    return cosine, sine


@triton.jit
def _rotated(
    x_at,
    i,
    head,
    seq,
    c,
    s,
    exists,
    half: tl.constexpr,
    wide: tl.constexpr,
    interleaved: tl.constexpr,
):
    """Return the channels of a head that RoPE turns, at tokens i, after the rotation by cos c and sin s.

    Interleaved pairs are in one tile, others in two: the first and the second members. `exists` [len(i), 1] says which
    tokens there are.
    """
    at = token_rows(x_at, i, head, seq)
    channel = tl.arange(0, wide)
    if interleaved:
        # Both members of a pair are in one thread: reading every second channel would take twice as many loads.
        both = read_head(at, channel, exists & (channel < 2 * half)[None, :])
        first, second = tl.split(tl.reshape(both, (both.shape[0], wide // 2, 2)))
        turned = tl.join(first * c - second * s, second * c + first * s)
        tiles = (tl.reshape(turned, (both.shape[0], wide)),)
    else:
        inside = exists & (channel < half)[None, :]
        first = read_head(at, channel, inside)
        second = read_head(at, half + channel, inside)
        tiles = (first * c - second * s, second * c + first * s)
    return tiles


@triton.jit
def _turned_four(
    x_at,
    i,
    head,
    seq,
    cosines,
    sines,
    exists,
    half: tl.constexpr,
    wide: tl.constexpr,
    interleaved: tl.constexpr,
):
    """Return `_rotated` of tokens i, i + 1, i + 2 and i + 3: for each of its tiles a tuple of four."""
    ca, cb, cc, cd = cosines
    sa, sb, sc, sd = sines
    a = _rotated(x_at, i, head, seq, ca, sa, exists, half, wide, interleaved)
    b = _rotated(x_at, i + 1, head, seq, cb, sb, exists, half, wide, interleaved)
    c = _rotated(x_at, i + 2, head, seq, cc, sc, exists, half, wide, interleaved)
    d = _rotated(x_at, i + 3, head, seq, cd, sd, exists, half, wide, interleaved)
    if interleaved:
        turned = ((a[0], b[0], c[0], d[0]),)
    else:
        turned = ((a[0], b[0], c[0], d[0]), (a[1], b[1], c[1], d[1]))
    return turned


@triton.jit
def _read_four(x_at, i, head, seq, channel, inside):
    """Return channels of a head at tokens i, i + 1, i + 2 and i + 3: four tiles [len(i), channels]."""
    a = read_head(token_rows(x_at, i, head, seq), channel, inside)
    b = read_head(token_rows(x_at, i + 1, head, seq), channel, inside)
    c = read_head(token_rows(x_at, i + 2, head, seq), channel, inside)
    d = read_head(token_rows(x_at, i + 3, head, seq), channel, inside)
    return a, b, c, d


@triton.jit
def _count_turned(
    state,
    # of `_turned_four`
    turned,
    scale,
    # the first row, the column where the head begins, and how many rows there are
    top,
    begin,
    rows,
    # channels of each of its tiles that exist
    size: tl.constexpr,
    E5M2: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Return a state of counts (count_four_triton.py) to which the turned channels of a head are added."""
    for tile in tl.static_range(len(turned)):
        at = begin + tile * size
        state = count_rows(state, turned[tile], scale, top, 0, rows, size, at, E5M2, ALIGNED)
    return state


@triton.jit
def _store_turned(
    # of `_turned_four`
    turned,
    scale,
    # groups of four rows; the column of the output where the head begins; its rows and columns
    group,
    begin,
    rows,
    columns,
    data,
    transposed,
    # channels of each of its tiles that exist, and their columns
    size: tl.constexpr,
    wide: tl.constexpr,
    E5M2: tl.constexpr,
):
    """Quantize the turned channels of a head into both copies; return the largest magnitudes."""
    largest = tl.zeros(turned[0][0].shape, tl.float32)
    for tile in tl.static_range(len(turned)):
        a, b, c, d = turned[tile]
        at = begin + tile * size
        stored = store_fp8(
            a,
            b,
            c,
            d,
            scale,
            group,
            at + tl.arange(0, wide),
            rows,
            at + size,
            data,
            transposed,
            columns,
            E5M2,
        )
        largest = tl.maximum(largest, stored)
    return largest


@triton.jit
def _rotate_fp8_kernel(
    # q or k [B, S, heads, H], and tables [S, R] or [B, S, R]; without tables nothing turns
    x,
    cos,
    sin,
    # the FP8 output: uint8 [N, K] and its transpose [K, N] (either may be None), the scale and amax of its quantizer,
    # and the inverse scale to write, FP32 [1] each
    data,
    transposed,
    scale,
    amax,
    scale_inv,
    # strides in elements
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
    # 1 turns forward, -1 back, which is the gradient
    sign,
    # channels of a head, pairs that turn, their order, and powers of two above the pairs and the rest
    dim: tl.constexpr,
    half: tl.constexpr,
    interleaved: tl.constexpr,
    width: tl.constexpr,
    rest: tl.constexpr,
    # tokens and heads per program, and how tiles are ordered
    block: tl.constexpr,
    heads_per_program: tl.constexpr,
    BAND: tl.constexpr,
    E5M2: tl.constexpr,
    ALIGNED: tl.constexpr,  # of counts: whether halves of heads are whole blocks of the hash
):
    """Write RoPE of a few heads of some tokens as FP8, or its inverse; count the cast if `counts` are given."""
    group, part, pair, inside = place_of_heads(
        rows, tl.cdiv(heads, heads_per_program), half, width, block, BAND
    )
    # A head's turned channels are one tile where pairs are neighbors, else two.
    wide: tl.constexpr = 2 * width if interleaved else width
    size: tl.constexpr = 2 * half if interleaved else half
    exists = (4 * group < rows)[:, None]
    other = 2 * half + tl.arange(0, rest)
    beside = exists & (other < dim)[None, :]
    i = 4 * group
    x_at = (x, x_batch, x_seq, x_head)
    s = tl.load(scale)
    ca, sa = _angles(cos, sin, i, table_batch, table_seq, seq, sign, pair, inside)
    cb, sb = _angles(cos, sin, i + 1, table_batch, table_seq, seq, sign, pair, inside)
    cc, sc = _angles(cos, sin, i + 2, table_batch, table_seq, seq, sign, pair, inside)
    cd, sd = _angles(cos, sin, i + 3, table_batch, table_seq, seq, sign, pair, inside)
    cosines = (ca, cb, cc, cd)
    sines = (sa, sb, sc, sd)
    largest = tl.zeros((block // 4, wide), tl.float32)
    largest_rest = tl.zeros((block // 4, rest), tl.float32)
    top = first_row(rows, tl.cdiv(heads, heads_per_program), block, BAND)
    if counts is not None:
        state = new_state(block // 4, wide)
        if 2 * half < dim:
            rest_state = new_state(block // 4, rest)
    for step in range(tl.minimum(heads_per_program, heads - part * heads_per_program)):
        head = part * heads_per_program + step
        four = _turned_four(x_at, i, head, seq, cosines, sines, exists, half, wide, interleaved)
        begin = start + head * dim
        stop = begin + dim
        stored = _store_turned(
            four, s, group, begin, rows, columns, data, transposed, size, wide, E5M2
        )
        largest = tl.maximum(largest, stored)
        if counts is not None:
            state = _count_turned(state, four, s, top, begin, rows, size, E5M2, ALIGNED)
        if 2 * half < dim:
            others = _read_four(x_at, i, head, seq, other, beside)
            a, b, c, d = others
            stored = store_fp8(
                a, b, c, d, s, group, begin + other, rows, stop, data, transposed, columns, E5M2
            )
            largest_rest = tl.maximum(largest_rest, stored)
            if counts is not None:
                at = begin + 2 * half
                rest_state = count_rows(
                    rest_state, others, s, top, 0, rows, dim - 2 * half, at, E5M2, False
                )
    raise_amax(amax, largest)
    if 2 * half < dim:
        raise_amax(amax, largest_rest)
    # The same passes over counts as in the other kernels that count: see the first lines of count_four_triton.py.
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
            # Not finite, or too large or small for FP32 squares: count all of the tiles once more, with care.
            care = new_care()
            for step in range(tl.minimum(heads_per_program, heads - part * heads_per_program)):
                head = part * heads_per_program + step
                four = _turned_four(
                    x_at, i, head, seq, cosines, sines, exists, half, wide, interleaved
                )
                for tile in tl.static_range(len(four)):
                    care = count_rows_with_care(care, four[tile], s, top, 0, rows, size, E5M2)
                if 2 * half < dim:
                    others = _read_four(x_at, i, head, seq, other, beside)
                    care = count_rows_with_care(care, others, s, top, 0, rows, dim - 2 * half, E5M2)
            add_care(counts, codes, spread, care)
        elif marks != 0:
            # Some values saturated: count these.
            saturated = tl.zeros((), tl.int64)
            for step in range(tl.minimum(heads_per_program, heads - part * heads_per_program)):
                head = part * heads_per_program + step
                four = _turned_four(
                    x_at, i, head, seq, cosines, sines, exists, half, wide, interleaved
                )
                for tile in tl.static_range(len(four)):
                    saturated += saturated_of(four[tile], inverse, E5M2)
                if 2 * half < dim:
                    others = _read_four(x_at, i, head, seq, other, beside)
                    saturated += saturated_of(others, inverse, E5M2)
            add_saturated(counts, spread, saturated)
    note_inverse(s, scale_inv)


def _halves_are_blocks(dim: int, rotation: Rotation | None, first: int) -> bool:
    """Return whether halves of heads, the first of which begins at column `first`, are whole blocks of the hash."""
    half = (dim if rotation is None else rotation.cos.shape[-1]) // 2
    return half % 64 == 0 and dim % 64 == 0 and first % 64 == 0


def rotate_fp8(
    out: FP8Data,
    cast_scale: CastScale,
    first: int,
    x: Tensor,
    rotation: Rotation,
    inverse: bool,
    counts: Counts | None = None,
) -> None:
    """Write attention_parts.rotate of x as FP8 into `out`.

    Args:
        out: uint8 data [N, K] or None, and transposed [K, N]; N = B * S is a multiple of 4.
        cast_scale: the scale of the cast, and the amax to raise.
        first: the column of `out` where the first head begins.
        x: q or k [B, S, heads, H] with contiguous channels.
        rotation: the tables of RoPE.
        inverse: rotate by the opposite angles, as the backward pass does.
        counts: where a recorder counts what the cast does to the values; None: it does not.
    """
    batch, seq, heads, dim = x.shape
    (cos, sin), (table_batch, table_seq) = rotation_tables(rotation)
    _rotate_fp8_kernel[(triton.cdiv(batch * seq, TOKENS) * triton.cdiv(heads, HEADS_PER_PROGRAM),)](
        x=x,
        cos=cos,
        sin=sin,
        data=out.data,
        transposed=out.transposed,
        scale=cast_scale.scale,
        amax=cast_scale.amax,
        scale_inv=out.scale_inv,
        **strides_of(x=x),
        table_batch=table_batch,
        table_seq=table_seq,
        rows=batch * seq,
        seq=seq,
        heads=heads,
        columns=out.transposed.shape[0],
        start=first,
        **table_of(counts),
        sign=-1.0 if inverse else 1.0,
        **head_tiles(dim, rotation),
        block=TOKENS,
        heads_per_program=HEADS_PER_PROGRAM,
        BAND=BAND,
        E5M2=cast_scale.e5m2,
        ALIGNED=_halves_are_blocks(dim, rotation, first),
        num_warps=WARPS,
    )
