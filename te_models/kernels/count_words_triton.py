"""Counts of a cast with one scale whose codes lie in rows, read four at a time as words.

Block scales have te_models.kernels.count_blocks_triton, other layouts te_models.kernels.count_cast_triton. Tested on a
CPU through Triton's interpreter, against the counts in PyTorch.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_models.kernels.count_cast_triton import (
    _WIDTH,
    Counts,
    _add_counts,
    _note_tensor,
    block_weights,
    column_weights,
    row_weights,
)
from te_models.kernels.count_four_triton import (
    MOST_TILES,
    add_care,
    add_saturated,
    add_state,
    bytes_dot,
    count_four,
    count_with_care,
    flags_from,
    flags_sum,
    hash_of_sums,
    in_thread,
    mark_of,
    marked,
    needs_care,
    new_care,
    new_state,
    saturated_of,
)
from te_models.numerics.fp8_triton import decode_four, decode_fp8

ROWS, WORDS = 16, 64  # of a tile
# As many programs as an H100 runs at once; each goes through many tiles.
PROGRAMS = 528
COUNTING: dict[str, int] = dict(num_warps=8, maxnreg=64)


@triton.jit
def _place(number, words, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Return the first row and the first word of the tile of this number, and all of them as int64."""
    wide = tl.cdiv(words, WORDS)
    top = number // wide * ROWS
    left = number % wide * WORDS
    return top, left, top.to(tl.int64) + tl.arange(0, ROWS), left.to(tl.int64) + tl.arange(0, WORDS)


@triton.jit
def values_of_words(source, i, j, rows, words, stride):
    """Return the values before the cast of words j of rows i as four FP32 tiles."""
    inside = (i < rows)[:, None] & (j < words)[None, :]
    kind: tl.constexpr = source.dtype.element_ty
    if kind.primitive_bitwidth == 16:
        # Four values at once, whose places in memory follow each other.
        four = source.to(tl.pointer_type(tl.int64), bitcast=True)
        word = tl.load(four + i[:, None] * (stride // 4) + j[None, :], inside, 0)
        a = word.to(tl.int16).to(kind, bitcast=True).to(tl.float32)
        b = (word >> 16).to(tl.int16).to(kind, bitcast=True).to(tl.float32)
        c = (word >> 32).to(tl.int16).to(kind, bitcast=True).to(tl.float32)
        d = (word >> 48).to(tl.int16).to(kind, bitcast=True).to(tl.float32)
    else:
        first = source + i[:, None] * stride + 4 * j[None, :]
        a = tl.load(first, inside, 0.0).to(tl.float32)
        b = tl.load(first + 1, inside, 0.0).to(tl.float32)
        c = tl.load(first + 2, inside, 0.0).to(tl.float32)
        d = tl.load(first + 3, inside, 0.0).to(tl.float32)
    return a, b, c, d


@triton.jit
def words_of_codes(data, i, j, rows, words, stride):
    """Return the words of codes, int32, 0 outside of the tensor."""
    four = data.to(tl.pointer_type(tl.int32), bitcast=True)
    address = four + i[:, None] * (stride // 4) + j[None, :]
    return tl.load(address, (i < rows)[:, None] & (j < words)[None, :], 0)


@triton.jit
def _column_bytes(WORDS: tl.constexpr, FAMILY: tl.constexpr):
    """Return the weights of columns in the hash as words, int32 [WORDS]: of a tile that begins at a multiple of 64."""
    j = 4 * tl.arange(0, WORDS)
    word = column_weights(j, FAMILY) | (column_weights(j + 1, FAMILY) << 8)
    return word | (column_weights(j + 2, FAMILY) << 16) | (column_weights(j + 3, FAMILY) << 24)


@triton.jit
def hashes_of_words(word, top, left, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Return the parts of a tile of words in the hash, int64 [ROWS, WORDS / 4]: of words that one thread has."""
    # Neither a block of 4 x 64 codes nor a run of four words ends inside of another.
    four_rows = (top + tl.arange(0, ROWS)) // 4
    blocks = (left + 4 * tl.arange(0, WORDS // 4)) // 16
    hashes = tl.zeros((ROWS, WORDS // 4), tl.int64)
    for family in tl.static_range(2):
        sums = bytes_dot(word, tl.broadcast_to(_column_bytes(WORDS, family)[None, :], word.shape))
        sums = tl.sum(in_thread(sums), 2) * row_weights(tl.arange(0, ROWS), family)[:, None]
        hashes += hash_of_sums(sums, block_weights(four_rows[:, None], blocks[None, :], family))
    return hashes


@triton.jit
def places_outside(top, left, rows, words, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Return how many values of a tile are not in the tensor, int64."""
    high = tl.maximum(tl.minimum(rows - top, ROWS), 0)
    inside = high * tl.minimum(words - left, WORDS)
    return 4 * (ROWS * WORDS - inside).to(tl.int64)


@triton.jit
def count_words_kernel(
    # the values before the cast [rows, 4 words], the codes uint8 of the same shape, inverse scale and scale FP32 [1]
    source,
    data,
    inverse,
    scale,
    # the table of a recorder: counts, and codes of which it makes a hash
    fields,
    codes,
    # sizes, and strides of rows in elements
    rows,
    words,
    source_stride,
    data_stride,
    spread,
    # format, whether the scale is given, and tile
    E5M2: tl.constexpr,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Count a cast; each program goes through many tiles."""
    one_inverse = tl.load(inverse)
    tiles = tl.cdiv(rows, ROWS) * tl.cdiv(words, WORDS)
    state = new_state(ROWS, WORDS)
    for number in range(tl.program_id(0), tiles, tl.num_programs(0)):
        top, left, i, j = _place(number, words, ROWS, WORDS)
        values = values_of_words(source, i, j, rows, words, source_stride)
        word = words_of_codes(data, i, j, rows, words, data_stride)
        hashes = hashes_of_words(word, top, left, ROWS, WORDS)
        outside = places_outside(top, left, rows, words, ROWS, WORDS)
        state = count_four(state, values, word, hashes, one_inverse, outside, E5M2)
    if SCALED:
        factor = tl.load(scale)
    else:
        factor = tl.div_rn(tl.full((), 1.0, tl.float32), one_inverse)
    elements = tl.full((), 4.0, tl.float64) * rows * words
    care_needed = needs_care(state, one_inverse)
    add_state(fields, codes, spread, state, care_needed, factor, elements, E5M2)
    marks = marked(state)
    if care_needed > 0:
        care = new_care()
        for number in range(tl.program_id(0), tiles, tl.num_programs(0)):
            top, left, i, j = _place(number, words, ROWS, WORDS)
            values = values_of_words(source, i, j, rows, words, source_stride)
            word = words_of_codes(data, i, j, rows, words, data_stride)
            outside = places_outside(top, left, rows, words, ROWS, WORDS)
            care = count_with_care(care, values, word, one_inverse, outside, E5M2)
        add_care(fields, codes, spread, care)
    elif marks != 0:
        saturated = tl.zeros((), tl.int64)
        for number in range(tl.program_id(0), tiles, tl.num_programs(0)):
            if (marks & mark_of(number // tl.num_programs(0))) != 0:
                _, _, i, j = _place(number, words, ROWS, WORDS)
                values = values_of_words(source, i, j, rows, words, source_stride)
                saturated += saturated_of(values, one_inverse, E5M2)
        add_saturated(fields, spread, saturated)


@triton.jit
def count_codes_kernel(
    # as count_words_kernel
    data,
    inverse,
    scale,
    fields,
    codes,
    rows,
    words,
    data_stride,
    spread,
    E5M2: tl.constexpr,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Count a cast by its codes alone, where no memory has the values before it."""
    # The code of the largest number; larger codes are not finite.
    largest: tl.constexpr = 0x7B if E5M2 else 0x7E
    tiles = tl.cdiv(rows, ROWS) * tl.cdiv(words, WORDS)
    filled = tl.zeros((ROWS, WORDS), tl.int32)
    normal = tl.zeros((ROWS, WORDS), tl.int32)
    above = tl.zeros((ROWS, WORDS), tl.int32)  # its highest byte: the largest code without its sign
    hashed = tl.zeros((ROWS, WORDS // 4), tl.int64)
    for number in range(tl.program_id(0), tiles, tl.num_programs(0)):
        top, left, i, j = _place(number, words, ROWS, WORDS)
        word = words_of_codes(data, i, j, rows, words, data_stride)
        filled += flags_from(word, 1)
        normal += flags_from(word, 4 if E5M2 else 8)
        hashed += hashes_of_words(word, top, left, ROWS, WORDS)
        sizes = word & 0x7F7F7F7F
        above = tl.maximum(above, tl.maximum(sizes, sizes << 8))
        above = tl.maximum(above, tl.maximum(sizes << 16, sizes << 24))
    code = tl.max(above) >> 24
    clipped = tl.zeros((), tl.int64)
    wrong = tl.zeros((), tl.int64)
    amax = decode_fp8(code.to(tl.uint8), E5M2)
    if code >= largest:
        of_clipped = tl.zeros((ROWS, WORDS), tl.int32)
        of_wrong = tl.zeros((ROWS, WORDS), tl.int32)
        sizes_of = tl.zeros((ROWS, WORDS), tl.float32)
        for number in range(tl.program_id(0), tiles, tl.num_programs(0)):
            _, _, i, j = _place(number, words, ROWS, WORDS)
            word = words_of_codes(data, i, j, rows, words, data_stride)
            of_clipped += flags_from(word, largest)
            of_wrong += flags_from(word, largest + 1)
            a, b, c, d = decode_four(word, E5M2)
            sizes_of = tl.maximum(sizes_of, tl.maximum(tl.abs(a), tl.abs(b)))  # without NaN
            sizes_of = tl.maximum(sizes_of, tl.maximum(tl.abs(c), tl.abs(d)))
        wrong = flags_sum(of_wrong)
        clipped = flags_sum(of_clipped) - wrong
        amax = tl.max(sizes_of)
    program_fields = fields + (tl.program_id(0) % spread) * _WIDTH
    nothing = tl.zeros((), tl.int64)
    one_inverse = tl.load(inverse)
    _add_counts(
        fields=program_fields,
        codes=codes,
        zeros=nothing,
        saturated=clipped,
        flushed=nothing,
        subnormal=flags_sum(filled) - flags_sum(normal),
        wrong=wrong,
        signal=nothing,
        noise=nothing,
        hashed=tl.sum(hashed),
        largest=amax * one_inverse,
        SOURCE=False,
    )
    if tl.program_id(0) == 0:
        if SCALED:
            factor = tl.load(scale)
        else:
            factor = tl.div_rn(tl.full((), 1.0, tl.float32), one_inverse)
        elements = tl.full((), 4.0, tl.float64) * rows * words
        _note_tensor(program_fields, elements, factor, E5M2, False, False)


def are_words(source: Tensor | None, data: Tensor) -> bool:
    """Return whether codes uint8 [M, K] and the values before the cast [M, K] can be read four at a time."""
    if data.shape[1] % 4 != 0 or not _is_even(data):
        return False
    return source is None or _is_even(source)


def _is_even(tensor: Tensor) -> bool:
    """Return whether the rows of a matrix are words of four elements."""
    return (
        tensor.stride(1) == 1
        and tensor.stride(0) % 4 == 0
        and tensor.data_ptr() % (4 * tensor.element_size()) == 0
    )


def count_words(
    source: Tensor | None,
    data: Tensor,
    inverse: Tensor,
    scale: Tensor | None,
    e5m2: bool,
    counts: Counts,
) -> None:
    """Add the counts of a cast with one scale to a table.

    Args:
        source: the values before the cast, [M, K] of any float dtype; None: they are not in memory.
        data: uint8 [M, K]; `are_words` of both.
        inverse: the inverse scale, FP32 of one element.
        scale: the scale of the cast, FP32 [1], where it was known; None: it follows from `inverse`.
        e5m2: whether the format is E5M2.
        counts: where they go.
    """
    rows, columns = data.shape
    if not rows * columns:
        return
    words = columns // 4
    tiles = triton.cdiv(rows, ROWS) * triton.cdiv(words, WORDS)
    programs = min(tiles, max(PROGRAMS, triton.cdiv(tiles, MOST_TILES)))
    arguments: dict[str, Any] = dict(
        data=data,
        inverse=inverse,
        scale=inverse if scale is None else scale,
        fields=counts.fields,
        codes=counts.codes,
        rows=rows,
        words=words,
        data_stride=data.stride(0),
        spread=len(counts.fields),
        E5M2=e5m2,
        SCALED=scale is not None,
        ROWS=ROWS,
        WORDS=WORDS,
        **COUNTING,
    )
    with torch.cuda.device_of(data):
        if source is None:
            count_codes_kernel[(programs,)](**arguments)
        else:
            count_words_kernel[(programs,)](
                source=source, source_stride=source.stride(0), **arguments
            )
