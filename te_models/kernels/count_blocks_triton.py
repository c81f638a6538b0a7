"""Counts of a cast whose blocks have scales of their own, read four codes at a time as words.

It counts as te_models.kernels.count_words_triton does, with an inverse scale for each run of words that a thread has.
Other layouts have te_models.kernels.count_cast_triton.count_cast. Tested on a CPU through Triton's interpreter,
against the counts in PyTorch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_models.kernels.count_cast_triton import _INF, _WIDTH, Counts, add_scale_sums
from te_models.kernels.count_four_triton import (
    MOST_TILES,
    add_care,
    add_saturated,
    add_state,
    count_four,
    count_with_care,
    in_thread,
    mark_of,
    marked,
    needs_care,
    new_care,
    new_state,
    saturated_of,
)
from te_models.kernels.count_four_triton import WORDS as WORDS_OF_RUN
from te_models.kernels.count_words_triton import (
    COUNTING,
    PROGRAMS,
    ROWS,
    WORDS,
    hashes_of_words,
    places_outside,
    values_of_words,
    words_of_codes,
)

_INF_BITS = tl.constexpr(0x7F800000)  # of infinity and 1 in FP32
_ONE_BITS = tl.constexpr(0x3F800000)


@triton.jit
def place_of_turn(
    turn, words, programs, HEIGHT: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr
):
    """Return the first row and the first word of the tile that this program, of `programs`, reads as number `turn`.

    A program reads units of HEIGHT rows and WORDS words, each in tiles of ROWS rows from the top.
    """
    tiles: tl.constexpr = HEIGHT // ROWS
    unit = tl.program_id(0) + turn // tiles * programs
    units_of_row = tl.cdiv(words, WORDS)
    top = unit // units_of_row * HEIGHT + turn % tiles * ROWS
    left = unit % units_of_row * WORDS
    return top, left


@triton.jit
def _tile(
    # as in count_blocks_kernel
    source,
    data,
    top,
    left,
    rows,
    words,
    source_stride,
    data_stride,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Return a tile's values before the cast as four FP32 tiles, its words of codes, and the places outside."""
    i = top.to(tl.int64) + tl.arange(0, ROWS)
    j = left.to(tl.int64) + tl.arange(0, WORDS)
    values = values_of_words(source, i, j, rows, words, source_stride)
    word = words_of_codes(data, i, j, rows, words, data_stride)
    return values, word, places_outside(top, left, rows, words, ROWS, WORDS)


@triton.jit
def inverses_of(
    inverse,
    top,
    left,
    rows,
    words,
    inverse_row,
    inverse_column,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    WORDS_OF_INVERSE: tl.constexpr,
):
    """Return the inverse scales of a tile's rows, one per WORDS_OF_INVERSE words, and 1 outside.

    FP32 [ROWS, WORDS / WORDS_OF_INVERSE].
    """
    i = top + tl.arange(0, ROWS)
    j = left + WORDS_OF_INVERSE * tl.arange(0, WORDS // WORDS_OF_INVERSE)
    p = (i // BLOCK_ROWS).to(tl.int64)[:, None] * inverse_row
    q = (j // BLOCK_WORDS).to(tl.int64)[None, :] * inverse_column
    return tl.load(inverse + p + q, (i < rows)[:, None] & (j < words)[None, :], 1.0)


@triton.jit
def for_words(of_runs):
    """Return a value for each word, [rows, words], from one for each run, [rows, words / WORDS_OF_RUN]."""
    rows: tl.constexpr = of_runs.shape[0]
    runs: tl.constexpr = of_runs.shape[1]
    each = tl.broadcast_to(of_runs[:, :, None], (rows, runs, WORDS_OF_RUN))
    return tl.reshape(each, (rows, runs * WORDS_OF_RUN))


@triton.jit
def filled_runs(word, of_runs):
    """Return the bits of the inverse scale of each run of words that has a code other than 0, and -1 for the others.

    Inverse scales are not negative, and so ordered as their bits are: int32 [rows, words / WORDS_OF_RUN].
    """
    sizes = tl.max(in_thread(word & 0x7F7F7F7F), 2)
    return tl.where(sizes > 0, of_runs.to(tl.int32, bitcast=True), -1)


@triton.jit
def new_scales(HIGH: tl.constexpr, WIDE: tl.constexpr):
    """Return the state of scales of no block: tiles [HIGH, WIDE].

    The bits of the largest inverse scale, of the least one, and of the least one above 0, int32; how many blocks there
    are that have a scale; and the sums of log2 of their scales and of its square, FP32.
    """
    return (
        tl.full((HIGH, WIDE), -1, tl.int32),
        tl.full((HIGH, WIDE), _INF_BITS, tl.int32),
        tl.full((HIGH, WIDE), _INF_BITS, tl.int32),
        tl.zeros((HIGH, WIDE), tl.int32),
        tl.zeros((HIGH, WIDE), tl.float32),
        tl.zeros((HIGH, WIDE), tl.float32),
    )


@triton.jit
def count_scales(scales, seen, BLOCK_ROWS: tl.constexpr):
    """Return the state of scales to which blocks are added: `seen` is `filled_runs` in the tiles of a unit.

    A block of zeros has a scale of its own making, which says nothing about the values.
    """
    most, least, least_above, blocks, logarithms, squares = scales
    blocks_of_row: tl.constexpr = most.shape[1]
    filled = tl.max(
        tl.reshape(seen, (seen.shape[0], blocks_of_row, seen.shape[1] // blocks_of_row)), 2
    )
    if BLOCK_ROWS > 1:
        filled = tl.max(filled, 0)[None, :]
    above = filled > 0
    most = tl.maximum(most, filled)
    least = tl.minimum(least, tl.where(filled >= 0, filled, _INF_BITS))
    least_above = tl.minimum(least_above, tl.where(above, filled, _INF_BITS))
    blocks += above.to(tl.int32)
    logarithm = tl.log2(tl.where(above, filled, _ONE_BITS).to(tl.float32, bitcast=True))
    logarithms -= logarithm
    squares += logarithm * logarithm
    return most, least, least_above, blocks, logarithms, squares


@triton.jit
def sums_of_scales(scales):
    """Return a program's sums for `add_scale_sums`."""
    most, least, least_above, blocks, logarithms, squares = scales
    one = tl.full((), 1.0, tl.float32)
    largest = tl.max(most).to(tl.float32, bitcast=True)
    smallest = tl.min(least_above).to(tl.float32, bitcast=True)
    counted = tl.sum(blocks).to(tl.int64)
    lowest = tl.where(counted > 0, tl.div_rn(one, tl.where(counted > 0, largest, 1.0)), _INF)
    highest = tl.div_rn(one, smallest)  # 0 where there is none
    return (
        lowest,
        highest,
        counted,
        tl.sum(logarithms.to(tl.float64)),
        tl.sum(squares.to(tl.float64)),
    )


# Where the compiler knows of a stride of 1, threads load inverse scales along it, and exchange them afterwards with the
# threads that have the codes.
@triton.jit(do_not_specialize=["inverse_row", "inverse_column"])
def count_blocks_kernel(
    # the values before the cast [rows, 4 words], and the codes uint8 of the same shape
    source,
    data,
    # inverse scales FP32 [ceil(rows / BLOCK_ROWS), ceil(words / BLOCK_WORDS)]
    inverse,
    # the table of a recorder: counts, and codes of which it makes a hash
    fields,
    codes,
    # sizes, and strides of rows in elements
    rows,
    words,
    source_stride,
    data_stride,
    inverse_row,
    inverse_column,
    spread,
    # format; rows and words that share a scale; tile, and rows of a unit, which has whole blocks
    E5M2: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    HEIGHT: tl.constexpr,
):
    """Count a cast; each program goes through many units."""
    tiles: tl.constexpr = HEIGHT // ROWS
    blocks: tl.constexpr = WORDS // BLOCK_WORDS
    runs: tl.constexpr = WORDS // WORDS_OF_RUN
    units = tl.cdiv(rows, HEIGHT) * tl.cdiv(words, WORDS)
    programs = tl.num_programs(0)
    turns = tl.cdiv(units - tl.program_id(0), programs) * tiles
    state = new_state(ROWS, WORDS)
    # Scales are counted once per block: in each tile, or after the last tile of a unit.
    scales = new_scales(ROWS if BLOCK_ROWS == 1 else 1, blocks)
    seen = tl.full((ROWS, runs), -1, tl.int32)  # `filled_runs` in the tiles of a unit so far
    for turn in range(turns):
        top, left = place_of_turn(turn, words, programs, HEIGHT, ROWS, WORDS)
        values, word, outside = _tile(
            source, data, top, left, rows, words, source_stride, data_stride, ROWS, WORDS
        )
        of_runs = inverses_of(
            inverse=inverse,
            top=top,
            left=left,
            rows=rows,
            words=words,
            inverse_row=inverse_row,
            inverse_column=inverse_column,
            BLOCK_ROWS=BLOCK_ROWS,
            BLOCK_WORDS=BLOCK_WORDS,
            ROWS=ROWS,
            WORDS=WORDS,
            WORDS_OF_INVERSE=WORDS_OF_RUN,
        )
        hashes = hashes_of_words(word, top, left, ROWS, WORDS)
        state = count_four(
            state,
            values,
            word,
            hashes,
            for_words(of_runs),
            outside,
            E5M2,
            inverse_of_runs=of_runs,
        )
        filled = filled_runs(word, of_runs)
        seen = tl.maximum(seen, filled)
        if turn % tiles == tiles - 1:
            scales = count_scales(scales, seen, BLOCK_ROWS)
            seen = tl.full((ROWS, runs), -1, tl.int32)
    one = tl.full((), 1.0, tl.float32)
    elements = tl.full((), 4.0, tl.float64) * rows * words
    care_needed = needs_care(state, tl.min(scales[1]).to(tl.float32, bitcast=True))
    # The scale is noted below, by block.
    add_state(fields, codes, spread, state, care_needed, one, elements, E5M2, begins=False)
    program_fields = fields + (tl.program_id(0) % spread) * _WIDTH
    add_scale_sums(program_fields, sums_of_scales(scales))
    marks = marked(state)
    if (care_needed > 0) | (marks != 0):
        care = new_care()
        saturated = tl.zeros((), tl.int64)
        for turn in range(turns):
            if (care_needed > 0) | ((marks & mark_of(turn)) != 0):
                top, left = place_of_turn(turn, words, programs, HEIGHT, ROWS, WORDS)
                values, word, outside = _tile(
                    source, data, top, left, rows, words, source_stride, data_stride, ROWS, WORDS
                )
                by = inverses_of(
                    inverse=inverse,
                    top=top,
                    left=left,
                    rows=rows,
                    words=words,
                    inverse_row=inverse_row,
                    inverse_column=inverse_column,
                    BLOCK_ROWS=BLOCK_ROWS,
                    BLOCK_WORDS=BLOCK_WORDS,
                    ROWS=ROWS,
                    WORDS=WORDS,
                    WORDS_OF_INVERSE=1,
                )
                if care_needed > 0:
                    care = count_with_care(care, values, word, by, outside, E5M2)
                else:
                    saturated += saturated_of(values, by, E5M2)
        if care_needed > 0:
            add_care(fields, codes, spread, care)
        else:
            add_saturated(fields, spread, saturated)


def count_blocks(
    source: Tensor,
    data: Tensor,
    inverse: Tensor,
    block: tuple[int, int],
    e5m2: bool,
    counts: Counts,
) -> None:
    """Add the counts of a cast with a scale per block to a table.

    Args:
        source: the values before the cast, [M, K] of any float dtype.
        data: uint8 [M, K]; `are_words` of both (te_models.kernels.count_words_triton).
        inverse: inverse scales, FP32 [ceil(M / block[0]), ceil(K / block[1])], of any strides.
        block: rows and columns that share a scale: (1, 32), (1, 128) or (128, 128).
        e5m2: whether the format is E5M2.
        counts: where they go.
    """
    rows, columns = data.shape
    if not rows * columns:
        return
    words = columns // 4
    height = max(ROWS, block[0])
    units = triton.cdiv(rows, height) * triton.cdiv(words, WORDS)
    units_per_program = MOST_TILES // (height // ROWS)
    programs = min(units, max(PROGRAMS, triton.cdiv(units, units_per_program)))
    with torch.cuda.device_of(data):
        count_blocks_kernel[(programs,)](
            source=source,
            data=data,
            inverse=inverse,
            fields=counts.fields,
            codes=counts.codes,
            rows=rows,
            words=words,
            source_stride=source.stride(0),
            data_stride=data.stride(0),
            inverse_row=inverse.stride(0),
            inverse_column=inverse.stride(1),
            spread=len(counts.fields),
            E5M2=e5m2,
            BLOCK_ROWS=block[0],
            BLOCK_WORDS=block[1] // 4,
            ROWS=ROWS,
            WORDS=WORDS,
            HEIGHT=height,
            **COUNTING,
        )
