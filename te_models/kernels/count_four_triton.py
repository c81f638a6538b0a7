"""Counts of casts with one scale, made on four tiles at a time whose FP8 bytes are the words of a fifth.

A step of training casts billions of elements, and each instruction per element would cost it about a third of a
percent. Hence a program adds to tiles in registers over all tiles that it goes through, without a reduction before its
end; flags and hashes of four codes are computed in one word, squares are in FP32, and nothing rare is looked at. A
program that met saturated values goes once more through the few tiles that have them, which it has marked, and counts
those values alone. One that met what FP32 sums do not hold (values that are not finite, squares too large or too small)
leaves out what it cannot know, and counts all its tiles once more with care.

A state of counts is a tuple: tiles of signal, noise, words of flags "not 0" and "not subnormal", and zeros; smaller
tiles of largest magnitudes, hashes and marks; then how many places of the tiles lie outside of the tensor, and how many
there are. A state of counts with care has scalars only: zeros, saturated, flushed and non-finite values, signal, noise,
amax.
"""

from typing import Any

import triton
import triton.language as tl

from te_models.kernels.count_cast_triton import (
    _INF,
    _SATURATED,
    _WIDTH,
    ROW_BYTES_0,
    ROW_BYTES_1,
    Counts,
    _add,
    _add_counts,
    _note_tensor,
    block_weights,
    column_weights,
)
from te_models.numerics.fp8_triton import INTERPRETED, decode_four, encode_four

# Tiles that a program may add up: a byte of flags holds no more.
MOST_TILES = 255
# Programs of a kernel that counts small tiles, and how many of these a program has before there are more programs.
FEWEST_PROGRAMS = 2112
SMALL_TILES = 8
WORDS = tl.constexpr(4)  # of a row of a tile that one thread has
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
def bytes_dot(word, weights):
    """Return the sums of the products of the bytes of words and of weights, int32."""
    if INTERPRETED:
        total = (word & 0xFF) * (weights & 0xFF)
        total += ((word >> 8) & 0xFF) * ((weights >> 8) & 0xFF)
        total += ((word >> 16) & 0xFF) * ((weights >> 16) & 0xFF)
        total += ((word >> 24) & 0xFF) * ((weights >> 24) & 0xFF)
    else:
        total = tl.inline_asm_elementwise(
            "dp4a.u32.u32 $0, $1, $2, 0;", "=r,r,r", [word, weights], tl.int32, True, 1
        )
    return total


@triton.jit
def in_thread(tile):
    """Return the rows of a tile in runs of WORDS, of which one thread has each: [high, wide / WORDS, WORDS]."""
    words: tl.constexpr = WORDS if tile.shape[1] >= WORDS else tile.shape[1]
    return tl.reshape(tile, (tile.shape[0], tile.shape[1] // words, words))


@triton.jit
def hash_of_sums(sums, weights):
    """Return sums of weighted codes, int32 [high, wide], times the weights of their blocks: int64."""
    return sums.to(tl.uint32).to(tl.int64) * weights.to(tl.int64)


@triton.jit
def _larger(x, y):
    """Return the larger of two magnitudes; NaN where one is."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _largest(values):
    """Return the largest magnitude of each place of four tiles; NaN where one is."""
    a, b, c, d = values
    return _larger(_larger(tl.abs(a), tl.abs(b)), _larger(tl.abs(c), tl.abs(d)))


@triton.jit
def _limit(inverse, E5M2: tl.constexpr):
    """Return the largest magnitude that a cast does not clip."""
    beyond: tl.constexpr = 61440.0 if E5M2 else 464.0
    return beyond * inverse


@triton.jit
def new_state(HIGH: tl.constexpr, WIDE: tl.constexpr):
    """Return the state of counts over tiles [HIGH, WIDE] before any."""
    runs: tl.constexpr = WIDE // WORDS if WIDE >= WORDS else 1
    return (
        tl.zeros((HIGH, WIDE), tl.float32),
        tl.zeros((HIGH, WIDE), tl.float32),
        tl.zeros((HIGH, WIDE), tl.int32),
        tl.zeros((HIGH, WIDE), tl.int32),
        tl.zeros((HIGH, WIDE), tl.float32),
        tl.zeros((HIGH, runs), tl.float32),
        tl.zeros((HIGH, runs), tl.int64),
        tl.zeros((HIGH, runs), tl.int32),
        tl.zeros((), tl.int64),
        tl.zeros((), tl.int64),
    )


@triton.jit
def count_four(
    state, values, word, hashes, inverse, outside, E5M2: tl.constexpr, inverse_of_runs=None
):
    """Return a state to which four FP32 tiles, `values`, and the words of their codes are added.

    `inverse` is the inverse scale, and `outside` how many of the values are not in the tensor: they are 0. `hashes`,
    int64 [high, wide / WORDS], are their parts in the hash. Where blocks have scales, `inverse` is a tile of them, and
    `inverse_of_runs` [high, wide / WORDS] has one for each run of a thread.
    """
    signal, noise, filled, normal, zeros, largest, hashed, marks, outsides, places = state
    decoded = decode_four(word, E5M2)
    for place in tl.static_range(4):
        x = values[place]
        change = x - decoded[place] * inverse
        # One after the other, so that each square is a multiplication that adds.
        signal += x * x
        noise += change * change
        # In FP32: with integers, the compiler packs bits and counts them slowly.
        zeros += tl.where(x == 0, 1.0, 0.0)
    filled += flags_from(word, 1)
    normal += flags_from(word, 4 if E5M2 else 8)
    of_tile = tl.reduce(in_thread(_largest(values)), 2, _larger)
    largest = _larger(largest, of_tile)
    if inverse_of_runs is None:
        limit = _limit(inverse, E5M2)
    else:
        limit = _limit(inverse_of_runs, E5M2)
    marks |= tl.where(of_tile <= limit, 0, mark_of(places // (4 * word.numel)))
    hashed += hashes
    outsides += outside
    places += 4 * word.numel
    return signal, noise, filled, normal, zeros, largest, hashed, marks, outsides, places


@triton.jit
def amaxes(state):
    """Return the largest magnitudes of the tiles of a state, for `raise_amax`; 0 in place of NaN."""
    return tl.where(state[5] == state[5], state[5], 0.0)


@triton.jit
def mark_of(number):
    """Return the mark of a program's tile of this number, int32: a bit that every 32nd tile shares."""
    return (tl.full((), 1, tl.int64) << (number % 32)).to(tl.int32)


@triton.jit
def _either(x, y):
    return x | y


@triton.jit
def marked(state):
    """Return the marks of the tiles that have a saturated or non-finite value, int32; 0 if none has."""
    return tl.reduce(tl.reduce(state[7], 1, _either), 0, _either)


@triton.jit
def needs_care(state, inverse):
    """Return 1 if a state met values that are not finite, or squares that FP32 does not hold, else 0."""
    largest = state[5]
    wrong = tl.max((largest < _INF).to(tl.int32) ^ 1)  # NaN is smaller than nothing
    amax = tl.max(largest)
    small = (amax < _SMALL) & (amax > 0)
    return wrong | (small | (amax > _LARGE) | (inverse < _LEAST_INVERSE)).to(tl.int32)


@triton.jit
def saturated_of(values, inverse, E5M2: tl.constexpr):
    """Return how many of four FP32 tiles of finite values a cast clips, int64."""
    limit = _limit(inverse, E5M2)
    counts = tl.zeros(values[0].shape, tl.int32)
    for place in tl.static_range(4):
        counts += (tl.abs(values[place]) > limit).to(tl.int32)
    return tl.sum(counts).to(tl.int64)


@triton.jit
def add_saturated(fields, spread, saturated):
    """Add a program's count of saturated values to the table of a recorder."""
    _add(fields + (tl.program_id(0) % spread) * _WIDTH, _SATURATED, saturated)


@triton.jit
def add_state(
    fields,
    codes,
    spread,
    state,
    care,
    scale,
    elements,
    E5M2: tl.constexpr,
    begins=True,
):
    """Add a program's counts to the table of a recorder; program 0 adds what concerns the whole tensor.

    With `care` above 0 (`needs_care`) those are left out that `count_with_care` makes once more. `scale` is the
    tensor's, and `elements` how many of its elements this launch counts; of several launches that share a tensor,
    one `begins` it.
    """
    program_fields = fields + (tl.program_id(0) % spread) * _WIDTH
    signal, noise, filled, normal, zeros, largest, hashed, marks, outsides, places = state
    not_empty = flags_sum(filled)
    all_zeros = tl.sum(zeros).to(tl.int64)
    known = care == 0
    nothing = tl.zeros((), tl.int64)
    _add_counts(
        fields=program_fields,
        codes=codes,
        zeros=tl.where(known, all_zeros - outsides, 0),
        saturated=nothing,
        flushed=tl.where(known, places - not_empty - all_zeros, 0),
        subnormal=not_empty - flags_sum(normal),
        wrong=nothing,
        signal=tl.where(known, tl.sum(signal), 0.0),
        noise=tl.where(known, tl.sum(noise), 0.0),
        hashed=tl.sum(hashed),
        largest=tl.where(known, tl.max(largest), 0.0),
        SOURCE=True,
    )
    if tl.program_id(0) == 0:
        if begins:
            _note_tensor(program_fields, elements, scale, E5M2, True, False)
        else:
            # As if it had blocks: another launch notes its scale.
            _note_tensor(program_fields, elements, scale, E5M2, True, True)


@triton.jit
def new_care():
    """Return the state of counts with care before any."""
    nothing = tl.zeros((), tl.int64)
    none = tl.zeros((), tl.float64)
    return nothing, nothing, nothing, nothing, none, none, tl.zeros((), tl.float32)


@triton.jit
def count_with_care(state, values, word, inverse, outside, E5M2: tl.constexpr):
    """Return a state of counts with care to which a tile is added; arguments as in `count_four`.

    Squares are of values over the largest power of two in them.
    """
    zeros, saturated, flushed, wrong, signal, noise, amax = state
    largest: tl.constexpr = 57344.0 if E5M2 else 448.0
    limit = _limit(inverse, E5M2)
    decoded = decode_four(word, E5M2)
    counts = tl.zeros(word.shape, tl.int64)
    top = tl.zeros(word.shape, tl.float32)
    finite_top = tl.zeros(word.shape, tl.float32)
    for place in tl.static_range(4):
        x = values[place]
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
        x = values[place]
        value = decoded[place]
        finite = (tl.abs(x) < _INF) & (tl.abs(value) < _INF)
        exact = tl.where(finite, x * factor, 0.0)
        change = tl.where(finite, (x - value * inverse) * factor, 0.0)
        squares += exact * exact
        changes += change * change
    unit = 1.0 / factor.to(tl.float64)
    zeros += (packed & 0xFFFF) - outside
    saturated += (packed >> 16) & 0xFFFF
    flushed += (packed >> 32) & 0xFFFF
    wrong += (packed >> 48) & 0xFFFF
    signal += tl.sum(squares).to(tl.float64) * unit * unit
    noise += tl.sum(changes).to(tl.float64) * unit * unit
    amax = tl.maximum(amax, tl.max(top))
    return zeros, saturated, flushed, wrong, signal, noise, amax


@triton.jit
def add_care(fields, codes, spread, state):
    """Add a program's counts with care to the table of a recorder."""
    zeros, saturated, flushed, wrong, signal, noise, amax = state
    nothing = tl.zeros((), tl.int64)
    _add_counts(
        fields=fields + (tl.program_id(0) % spread) * _WIDTH,
        codes=codes,
        zeros=zeros,
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
def _rows_dot(word, FAMILY: tl.constexpr):
    """Return the sums of four rows' codes by the weights of rows in the hash, int32."""
    row_bytes: tl.constexpr = ROW_BYTES_0 if FAMILY == 0 else ROW_BYTES_1
    return bytes_dot(word, tl.full(word.shape, row_bytes, tl.int32))


@triton.jit
def _outside(tile, top, left, rows, columns):
    """Return how many values of tiles of the first to fourth rows of groups of four are not in the tensor, int64."""
    high: tl.constexpr = 4 * tile.shape[0]
    wide: tl.constexpr = tile.shape[1]
    inside = tl.minimum(rows - top, high) * tl.minimum(columns - left, wide)
    return high * wide - inside.to(tl.int64)


@triton.jit
def _inside_only(values, outside, top, left, rows, columns):
    """Return four tiles with 0 in places outside of the tensor, where a negative factor or a NaN may have come in."""
    a, b, c, d = values
    if outside > 0:
        groups = top // 4 + tl.arange(0, a.shape[0])
        places = left + tl.arange(0, a.shape[1])
        inside = (groups < rows // 4)[:, None] & (places < columns)[None, :]
        a = tl.where(inside, a, 0.0)
        b = tl.where(inside, b, 0.0)
        c = tl.where(inside, c, 0.0)
        d = tl.where(inside, d, 0.0)
    return a, b, c, d


@triton.jit
def count_rows(
    state,
    # a tuple of FP32 tiles [groups, columns], the first to fourth rows of groups of four, and their scale
    values,
    scale,
    # the first row and column of the tile, and how many there are
    top,
    left,
    rows,
    columns,
    # where column 0 lies in the tensor
    first,
    E5M2: tl.constexpr,
    ALIGNED: tl.constexpr,
    # whether the tiles have 0 in places outside of the tensor: to write it there takes registers
    EMPTY: tl.constexpr = False,
):
    """Return a state to which a tile of the rows of groups of four is added. Rows are a multiple of four.

    What the tiles have in places outside of the tensor is not counted. ALIGNED: `left` and `first` are multiples of 64.
    """
    outside = _outside(values[0], top, left, rows, columns)
    if not EMPTY:
        values = _inside_only(values, outside, top, left, rows, columns)
    word = _codes_of_rows(values, scale, E5M2)
    high: tl.constexpr = word.shape[0]
    wide: tl.constexpr = word.shape[1]
    j = first + left + tl.arange(0, wide)
    four_rows = top // 4 + tl.arange(0, high)
    if ALIGNED:
        hashes = tl.zeros((high, wide // WORDS), tl.int64)
        for family in tl.static_range(2):
            # The same weights in each tile, and words of a thread in one block.
            sums = _rows_dot(word, family)
            sums *= column_weights(tl.arange(0, wide), family)[None, :]
            runs = (first + left) // 64 + WORDS * tl.arange(0, wide // WORDS) // 64
            weights = block_weights(four_rows[:, None], runs[None, :], family)
            hashes += hash_of_sums(tl.sum(in_thread(sums), 2), weights)
    else:
        hashes = _hashes_of_columns(word, four_rows, j)
    inverse = tl.div_rn(tl.full((), 1.0, tl.float32), scale)
    return count_four(state, values, word, hashes, inverse, outside, E5M2)


@triton.jit
def _hashes_of_columns(word, four_rows, j):
    """Return the parts in the hash of words of four rows each and of columns j in any order, one per thread's run."""
    first = _rows_dot(word, 0) * column_weights(j, 0)[None, :]
    second = _rows_dot(word, 1) * column_weights(j, 1)[None, :]
    hashes = hash_of_sums(first, block_weights(four_rows[:, None], (j // 64)[None, :], 0))
    hashes += hash_of_sums(second, block_weights(four_rows[:, None], (j // 64)[None, :], 1))
    return tl.sum(in_thread(hashes), 2)


@triton.jit
def count_columns(state, values, scale, top, rows, j, columns, E5M2: tl.constexpr):
    """Return a state to which a tile is added that has columns j of the tensor in any order, the first `columns` of j.

    The other arguments are as in `count_rows`.
    """
    outside = _outside(values[0], top, 0, rows, columns)
    values = _inside_only(values, outside, top, 0, rows, columns)
    word = _codes_of_rows(values, scale, E5M2)
    four_rows = top // 4 + tl.arange(0, word.shape[0])
    hashes = _hashes_of_columns(word, four_rows, j)
    inverse = tl.div_rn(tl.full((), 1.0, tl.float32), scale)
    return count_four(state, values, word, hashes, inverse, outside, E5M2)


@triton.jit
def count_rows_with_care(state, values, scale, top, left, rows, columns, E5M2: tl.constexpr):
    """Return a state of counts with care to which a tile is added; arguments as in `count_rows`."""
    outside = _outside(values[0], top, left, rows, columns)
    values = _inside_only(values, outside, top, left, rows, columns)
    word = _codes_of_rows(values, scale, E5M2)
    inverse = tl.div_rn(tl.full((), 1.0, tl.float32), scale)
    return count_with_care(state, values, word, inverse, outside, E5M2)


def table_of(counts: Counts | None) -> dict[str, Any]:
    """Return the arguments of a kernel that may count what it casts: where the counts go."""
    if counts is None:
        return dict(counts=None, codes=None, spread=1)
    return dict(counts=counts.fields, codes=counts.codes, spread=len(counts.fields))


def programs_of(tiles: int, counts: Counts | None) -> int:
    """Return the programs of a kernel with this number of small tiles: one per tile, or fewer if it counts."""
    if counts is None:
        return tiles
    return min(tiles, max(FEWEST_PROGRAMS, triton.cdiv(tiles, SMALL_TILES)))


def small_tiles(width: int, counts: Counts | None) -> dict[str, int]:
    """Return the options of a kernel of `programs_of` whose tiles have this many columns."""
    # Three programs per multiprocessor; wider tiles would not fit into these registers.
    return {} if counts is None or width > 128 else dict(maxnreg=160)
