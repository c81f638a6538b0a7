"""Counts of casts with one scale, made on four tiles at a time whose FP8 bytes are the words of a fifth.

A step of training casts billions of elements, and each instruction per element would cost it about a third of a
percent. Hence a program adds to tiles in registers over all tiles that it goes through, without a reduction before its
end, flags of four codes are counted in one word, and squares are in FP32. Words with anything rare in them (saturated
or non-finite values) are left out there, and counted with care in a second loop, which most programs skip.

A state of counts is a tuple: tiles of signal, noise, largest magnitudes, words of flags "not 0" and "not subnormal",
zeros (with words left out in the upper half), and hashes; then how many places of the tiles lie outside of the tensor,
and how many there are. A state of counts with care has scalars only: saturated and non-finite values, flushed ones
beyond codes of 0, signal, noise and amax.
"""

import triton
import triton.language as tl

from te_models.kernels.count_cast_triton import _INF, _MIX, _WIDTH, _add_counts, _note_tensor
from te_models.numerics.fp8_triton import decode_four, encode_four

RUN = 128  # indices in an aligned run of these differ in the last seven bits alone
# Tiles that a program may add up: a byte of flags holds no more.
MOST_TILES = 255
_LANES = tl.constexpr(0x01010101)
_SIZES = tl.constexpr(0x7F7F7F7F)
# Between these amaxes, FP32 holds the squares of a tile's values and of their errors.
_SMALL = tl.constexpr(2.0**-44)
_LARGE = tl.constexpr(2.0**50)
_LEAST_INVERSE = tl.constexpr(2.0**-100)


@triton.jit
def flags_from(word, CODE: tl.constexpr):
    """Return words whose bytes are 1 where the code in `word`, without its sign, is at least CODE, else 0."""
    return (((word & _SIZES) + (0x80 - CODE) * _LANES) >> 7) & _LANES


@triton.jit
def flags_sum(flags):
    """Return the sum of the bytes of a tile of words of at most 128 columns, int64."""
    pairs = (flags & 0x00FF00FF) + ((flags >> 8) & 0x00FF00FF)
    rows = tl.sum(pairs, 1)
    return tl.sum((rows & 0xFFFF) + ((rows >> 16) & 0xFFFF)).to(tl.int64)


@triton.jit
def mix(index):
    """Return the low 32 bits of an index times the mixing number, uint32."""
    return index.to(tl.uint32) * tl.full((), _MIX, tl.uint32)


@triton.jit
def mixed_code(word, PLACE: tl.constexpr, low, high):
    """Return the part of the byte at PLACE (0 to 3) in the hash, int64.

    In uint32, `low` is its index times the mixing number, and `high` its index without the last seven bits.
    """
    code = ((word >> (8 * PLACE)) & 0xFF) + 1
    return code.to(tl.uint32).to(tl.int64) * (low ^ high).to(tl.int64)


@triton.jit
def _largest(values):
    """Return the largest magnitude of each place of four tiles; NaN where one is."""
    a, b, c, d = values
    every: tl.constexpr = tl.PropagateNan.ALL
    return tl.maximum(
        tl.maximum(tl.abs(a), tl.abs(b), propagate_nan=every),
        tl.maximum(tl.abs(c), tl.abs(d), propagate_nan=every),
        propagate_nan=every,
    )


@triton.jit
def _limit(inverse, E5M2: tl.constexpr):
    """Return the largest magnitude that a cast does not clip."""
    beyond: tl.constexpr = 61440.0 if E5M2 else 464.0
    return beyond * inverse


@triton.jit
def new_state(HIGH: tl.constexpr, WIDE: tl.constexpr):
    """Return the state of counts over tiles [HIGH, WIDE] before any."""
    return (
        tl.zeros((HIGH, WIDE), tl.float32),
        tl.zeros((HIGH, WIDE), tl.float32),
        tl.zeros((HIGH, WIDE), tl.float32),
        tl.zeros((HIGH, WIDE), tl.int32),
        tl.zeros((HIGH, WIDE), tl.int32),
        tl.zeros((HIGH, WIDE), tl.int32),
        tl.zeros((HIGH, WIDE), tl.int64),
        tl.zeros((), tl.int64),
        tl.zeros((), tl.int64),
    )


@triton.jit
def count_four(state, values, word, hashes, inverse, outside, E5M2: tl.constexpr):
    """Return a state to which four FP32 tiles, `values`, and the words of their codes are added.

    `inverse` is the inverse scale, and `outside` how many of the values are not in the tensor: they are 0. `hashes` is
    the tile of their parts in the hash.
    """
    signal, noise, largest, filled, normal, zeros, hashed, outsides, places = state
    a, b, c, d = values
    p, q, r, s = decode_four(word, E5M2)
    e = a - p * inverse
    f = b - q * inverse
    g = c - r * inverse
    h = d - s * inverse
    top = _largest(values)
    ordinary = top <= _limit(inverse, E5M2)
    signal += tl.where(ordinary, a * a + b * b + c * c + d * d, 0.0)
    noise += tl.where(ordinary, e * e + f * f + g * g + h * h, 0.0)
    largest = tl.maximum(largest, tl.where(ordinary, top, 0.0))
    filled += flags_from(word, 1)
    normal += flags_from(word, 4 if E5M2 else 8)
    zeros += (a == 0).to(tl.int32) + (b == 0).to(tl.int32) + (c == 0).to(tl.int32)
    zeros += (d == 0).to(tl.int32) + tl.where(ordinary, 0, 1 << 16)
    hashed += hashes
    outsides += outside
    places += 4 * a.numel
    return signal, noise, largest, filled, normal, zeros, hashed, outsides, places


@triton.jit
def amaxes(state):
    """Return the largest magnitude of each place of the tiles of a state, but for the words that it left out."""
    return state[2]


@triton.jit
def has_left_out(state):
    """Return 1 if words were left out of a state, which `count_with_care` is to count, else 0."""
    return (tl.max(state[5]) >= (1 << 16)).to(tl.int32)


@triton.jit
def is_out_of_range(state, inverse):
    """Return 1 if FP32 does not hold the squares of a state, which `count_with_care` is to count, else 0."""
    amax = tl.max(state[2])
    small = (amax < _SMALL) & (amax > 0)
    return (small | (amax > _LARGE) | (inverse < _LEAST_INVERSE)).to(tl.int32)


@triton.jit
def add_state(fields, codes, spread, state, scale, inverse, elements, E5M2: tl.constexpr):
    """Add a program's counts to the table of a recorder; program 0 adds what concerns the whole tensor.

    `scale` and `inverse` are the tensor's, and `elements` how many it has.
    """
    own = fields + (tl.program_id(0) % spread) * _WIDTH
    signal, noise, largest, filled, normal, zeros, hashed, outsides, places = state
    not_empty = flags_sum(filled)
    all_zeros = tl.sum(zeros & 0xFFFF).to(tl.int64)
    in_range = is_out_of_range(state, inverse) == 0
    nothing = tl.zeros((), tl.int64)
    _add_counts(
        fields=own,
        codes=codes,
        zeros=all_zeros - outsides,
        saturated=nothing,
        flushed=places - not_empty - all_zeros,
        subnormal=not_empty - flags_sum(normal),
        wrong=nothing,
        signal=tl.where(in_range, tl.sum(signal), 0.0),
        noise=tl.where(in_range, tl.sum(noise), 0.0),
        hashed=tl.sum(hashed),
        largest=tl.max(largest),
        SOURCE=True,
    )
    if tl.program_id(0) == 0:
        _note_tensor(own, elements, scale, E5M2, True, False)


@triton.jit
def new_care():
    """Return the state of counts with care before any."""
    nothing = tl.zeros((), tl.int64)
    none = tl.zeros((), tl.float64)
    return nothing, nothing, nothing, none, none, tl.zeros((), tl.float32)


@triton.jit
def count_with_care(state, values, word, inverse, every, E5M2: tl.constexpr):
    """Return a state of counts with care to which the words that `count_four` left out are added; `every` is 1 to add
    all, else 0.

    Squares are of values over the largest power of two in them.
    """
    saturated, wrong, flushed, signal, noise, amax = state
    ordinary = (_largest(values) <= _limit(inverse, E5M2)).to(tl.int32)
    left_out = ordinary - every <= 0
    if tl.max(left_out.to(tl.int32)) > 0:
        largest: tl.constexpr = 57344.0 if E5M2 else 448.0
        limit = _limit(inverse, E5M2)
        codes = tl.where(left_out, word, 0)
        p, q, r, s = decode_four(codes, E5M2)
        decoded = (p, q, r, s)
        counts = tl.zeros(word.shape, tl.int64)
        top = tl.zeros(word.shape, tl.float32)
        finite_top = tl.zeros(word.shape, tl.float32)
        for place in tl.static_range(4):
            x = tl.where(left_out, values[place], 0.0)
            value = decoded[place]
            size = tl.abs(x)
            finite = (size < _INF) & (tl.abs(value) < _INF)
            clipped = finite & (tl.abs(value) == largest) & (size > limit)
            lost = finite & (x != 0) & (value * inverse == 0)
            counts += (
                (x == 0).to(tl.int64)
                + (clipped.to(tl.int64) << 16)
                + (lost.to(tl.int64) << 32)
                + ((finite == 0).to(tl.int64) << 48)
            )
            top = tl.maximum(top, tl.where(x == x, size, 0.0))
            finite_top = tl.maximum(finite_top, tl.where(finite, size, 0.0))
        packed = tl.sum(counts)
        # 2^-e for a largest value of 2^e and more; exponents at the ends of FP32 are cut off.
        exponent = tl.max(finite_top).to(tl.int32, bitcast=True) >> 23
        exponent = tl.minimum(tl.maximum(exponent, 1), 253)
        factor = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        squares = tl.zeros(word.shape, tl.float32)
        changes = tl.zeros(word.shape, tl.float32)
        for place in tl.static_range(4):
            x = tl.where(left_out, values[place], 0.0)
            value = decoded[place]
            finite = (tl.abs(x) < _INF) & (tl.abs(value) < _INF)
            exact = tl.where(finite, x * factor, 0.0)
            change = tl.where(finite, (x - value * inverse) * factor, 0.0)
            squares += exact * exact
            changes += change * change
        unit = 1.0 / factor.to(tl.float64)
        empty = 4 * word.numel - flags_sum(flags_from(codes, 1))
        saturated += (packed >> 16) & 0xFFFF
        wrong += (packed >> 48) & 0xFFFF
        # Codes of 0 from other values are in the first state.
        flushed += ((packed >> 32) & 0xFFFF) - (empty - (packed & 0xFFFF))
        signal += tl.sum(squares).to(tl.float64) * unit * unit
        noise += tl.sum(changes).to(tl.float64) * unit * unit
        amax = tl.maximum(amax, tl.max(top))
    return saturated, wrong, flushed, signal, noise, amax


@triton.jit
def add_care(fields, codes, spread, state):
    """Add a program's counts with care to the table of a recorder."""
    saturated, wrong, flushed, signal, noise, amax = state
    nothing = tl.zeros((), tl.int64)
    _add_counts(
        fields=fields + (tl.program_id(0) % spread) * _WIDTH,
        codes=codes,
        zeros=nothing,
        saturated=saturated,
        flushed=flushed,
        subnormal=nothing,
        wrong=wrong,
        signal=signal,
        noise=noise,
        hashed=nothing,
        largest=amax,
        SOURCE=True,
    )


@triton.jit
def _codes_of_rows(values, scale, E5M2: tl.constexpr):
    """Return the words of codes that `store_fp8` of fp8_tiles_triton makes of four tiles."""
    a, b, c, d = values
    return encode_four(a * scale, b * scale, c * scale, d * scale, E5M2)


@triton.jit
def count_rows(
    state,
    # a tuple of FP32 tiles [groups, columns], the first to fourth rows of groups of four, and their scale
    values,
    scale,
    # the first row and column of the tile, and where they lie in the tensor
    top,
    left,
    rows,
    columns,
    width,
    first,
    E5M2: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Return a state to which a tile of the rows of groups of four is added; its columns lie at `first` + j of `width`.

    ALIGNED: `width` and `first` are multiples of RUN, and the tile's columns are part of an aligned run. Rows are a
    multiple of four.
    """
    word = _codes_of_rows(values, scale, E5M2)
    high: tl.constexpr = word.shape[0]
    wide: tl.constexpr = word.shape[1]
    i = top.to(tl.int64) + 4 * tl.arange(0, high)
    j = left + tl.arange(0, wide)
    hashes = tl.zeros(word.shape, tl.int64)
    for row in tl.static_range(4):
        start = (i + row) * width + first  # where the row begins in the tensor
        if ALIGNED:
            seven = ((start + left) >> 7).to(tl.uint32)[:, None]
        else:
            seven = ((start[:, None] + j.to(tl.int64)[None, :]) >> 7).to(tl.uint32)
        hashes += mixed_code(word, row, mix(start)[:, None] + mix(j)[None, :], seven)
    hashes = tl.where((i < rows)[:, None] & (j < columns)[None, :], hashes, 0)
    inverse = tl.div_rn(tl.full((), 1.0, tl.float32), scale)
    inside = tl.minimum(rows - top, 4 * high) * tl.minimum(columns - left, wide)
    outside = 4 * high * wide - inside.to(tl.int64)
    return count_four(state, values, word, hashes, inverse, outside, E5M2)


@triton.jit
def count_rows_with_care(state, values, scale, every, E5M2: tl.constexpr):
    """Return a state of counts with care to which a tile is added; arguments as in `count_rows` and above."""
    inverse = tl.div_rn(tl.full((), 1.0, tl.float32), scale)
    word = _codes_of_rows(values, scale, E5M2)
    return count_with_care(state, values, word, inverse, every, E5M2)
