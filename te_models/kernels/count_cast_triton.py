"""Counts about an FP8 cast, added to a table on the device: saturated, flushed, subnormal and non-finite elements, the
signal and the noise, and a hash of the codes (docs/internals/recorder.md).

`count_cast` reads a cast that has been made, of any layout and any scales. Casts with one scale have faster kernels:
te_models.kernels.count_words_triton, and inside kernels that cast te_models.kernels.count_four_triton.

Tested on a CPU through Triton's interpreter (TRITON_INTERPRET=1), against the counts in PyTorch.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from te_models.numerics.code_weights import BLOCK_MIX, COLUMN_MIX, ROW_WEIGHTS
from te_models.numerics.fp8_triton import decode_fp8

# A tile has at most 2,048 elements, so that five counts of 12 bits fit into one integer, which one sum adds up.
ROWS, COLUMNS = 16, 128
SQUARE = 128  # rows of a square block, of which a program goes through all
PROGRAMS = 528  # four per multiprocessor of an H100; each goes through many tiles
# The fields of te_models.recorder.layout, in its order.
_AMAX = tl.constexpr(0)
_SCALE_MIN = tl.constexpr(1)
_SCALE_MAX = tl.constexpr(2)
_SCALE_AGE = tl.constexpr(3)
_ELEMENTS = tl.constexpr(4)
_ZEROS = tl.constexpr(5)
_SATURATED = tl.constexpr(6)
_FLUSHED = tl.constexpr(7)
_SUBNORMAL = tl.constexpr(8)
_NONFINITE = tl.constexpr(9)
_SIGNAL = tl.constexpr(10)
_NOISE = tl.constexpr(11)
_BLOCKS = tl.constexpr(12)
_BLOCK_LOG2 = tl.constexpr(13)
_BLOCK_LOG2_SQUARES = tl.constexpr(14)
_FORMAT = tl.constexpr(15)
_WIDTH = tl.constexpr(16)
_INF = tl.constexpr(float("inf"))
# The weights of codes in the hash (te_models.recorder.statistics.hash_codes), of two families.
ROW_BYTES_0 = tl.constexpr(ROW_WEIGHTS[0])
ROW_BYTES_1 = tl.constexpr(ROW_WEIGHTS[1])
_COLUMNS_0 = tl.constexpr(COLUMN_MIX[0])
_COLUMNS_1 = tl.constexpr(COLUMN_MIX[1])
_DOWN_0 = tl.constexpr(BLOCK_MIX[0][0])
_DOWN_1 = tl.constexpr(BLOCK_MIX[1][0])
_ACROSS_0 = tl.constexpr(BLOCK_MIX[0][1])
_ACROSS_1 = tl.constexpr(BLOCK_MIX[1][1])
_ADDED_0 = tl.constexpr(BLOCK_MIX[0][2])
_ADDED_1 = tl.constexpr(BLOCK_MIX[1][2])
_BITS = tl.constexpr(0xFFF)


class Counts(NamedTuple):
    """Where the counts of one tensor go.

    Attributes:
        fields: float64 [spread, fields]: programs add to different rows of it, which are summed later.
        codes: int64 [1], the hash.
    """

    fields: Tensor
    codes: Tensor


@triton.jit
def _finite(x):
    return (x == x) & (tl.abs(x) != _INF)


@triton.jit
def _add(fields, place, value):
    tl.atomic_add(fields + place, value.to(tl.float64), sem="relaxed")


@triton.jit
def _raise(fields, place, value):
    """Raise a field to a value; numbers of 0 and more are ordered like their bits."""
    bits = value.to(tl.float64).to(tl.int64, bitcast=True)
    tl.atomic_max((fields + place).to(tl.pointer_type(tl.int64), bitcast=True), bits, sem="relaxed")


@triton.jit
def _lower(fields, place, value):
    bits = value.to(tl.float64).to(tl.int64, bitcast=True)
    tl.atomic_min((fields + place).to(tl.pointer_type(tl.int64), bitcast=True), bits, sem="relaxed")


@triton.jit
def column_weights(j, FAMILY: tl.constexpr):
    """Return the weights of columns in the hash: int32."""
    mix: tl.constexpr = _COLUMNS_0 if FAMILY == 0 else _COLUMNS_1
    place = (j % 64 + 1).to(tl.uint32) * tl.full((), mix, tl.uint32)
    return (place >> 24).to(tl.int32) | 1


@triton.jit
def row_weights(i, FAMILY: tl.constexpr):
    """Return the weights of rows in the hash: int32."""
    row_bytes: tl.constexpr = ROW_BYTES_0 if FAMILY == 0 else ROW_BYTES_1
    return (tl.full(i.shape, row_bytes, tl.int32) >> (8 * (i % 4)).to(tl.int32)) & 0xFF


@triton.jit
def block_weights(four_rows, columns, FAMILY: tl.constexpr):
    """Return the weights of blocks of 4 rows and 64 columns in the hash, by their numbers: uint32."""
    down: tl.constexpr = _DOWN_0 if FAMILY == 0 else _DOWN_1
    across: tl.constexpr = _ACROSS_0 if FAMILY == 0 else _ACROSS_1
    added: tl.constexpr = _ADDED_0 if FAMILY == 0 else _ADDED_1
    high = four_rows.to(tl.uint32) * tl.full((), down, tl.uint32)
    wide = columns.to(tl.uint32) * tl.full((), across, tl.uint32)
    total = high + wide + tl.full((), added, tl.uint32)
    return total ^ (total >> 16)


@triton.jit
def code_weights(i, j):
    """Return the weights of the elements of rows i and columns j in the hash: int64 [rows, columns]."""
    total = tl.zeros((i.shape[0], j.shape[0]), tl.int64)
    for family in tl.static_range(2):
        weights = row_weights(i, family)[:, None] * column_weights(j, family)[None, :]
        block = block_weights((i // 4)[:, None], (j // 64)[None, :], family)
        total += weights.to(tl.int64) * block.to(tl.int64)
    return total


@triton.jit
def new_sums():
    """Return the sums of no tile, scalars: zeros, saturated, flushed, subnormal and non-finite elements, and the hash,
    int64; signal and noise, float64; and the largest magnitude, FP32.
    """
    none = tl.zeros((), tl.int64)
    nothing = tl.zeros((), tl.float64)
    return none, none, none, none, none, none, nothing, nothing, tl.zeros((), tl.float32)


@triton.jit
def count_tile(sums, x, code, inverse, inside, weights, E5M2: tl.constexpr, SOURCE: tl.constexpr):
    """Return sums (`new_sums`) to which a tile [rows, columns] of at most 2,048 elements is added.

    x are the values before the cast, FP32 (without SOURCE: not read), code uint8 the data, inverse FP32 the inverse
    scales, `inside` which elements there are, and `weights` int64 their weights in the hash (`code_weights`).
    """
    zeros, saturated, flushed, subnormal, wrong, hashed, signal, noise, amax = sums
    largest: tl.constexpr = 57344.0 if E5M2 else 448.0
    beyond: tl.constexpr = 61440.0 if E5M2 else 464.0
    normal: tl.constexpr = 6.103515625e-05 if E5M2 else 0.015625
    value = decode_fp8(code, E5M2)
    size = tl.abs(value)
    after = value * inverse
    before = x if SOURCE else after
    finite = _finite(before) & _finite(value)
    is_saturated = (size == largest) & inside
    is_zero = inside & (before == 0)
    is_flushed = inside & finite & (before != 0) & (after == 0)
    if SOURCE:
        # The largest number is also the nearest to values a little above it, which rounding did not saturate.
        is_saturated = is_saturated & finite & (tl.abs(before) > beyond * inverse)
    is_subnormal = inside & (value != 0) & (size < normal)
    is_wrong = inside & (finite == 0)
    # Five counts of 12 bits in an integer: one sum over the tile adds up all of them.
    packed = (
        is_zero.to(tl.int64)
        + (is_saturated.to(tl.int64) << 12)
        + (is_flushed.to(tl.int64) << 24)
        + (is_subnormal.to(tl.int64) << 36)
        + (is_wrong.to(tl.int64) << 48)
    )
    exact = tl.where(finite & inside, before, 0.0).to(tl.float64)
    change = tl.where(finite & inside, before.to(tl.float64) - after.to(tl.float64), 0.0)
    hashes = tl.where(inside, code.to(tl.int64) * weights, 0)
    magnitude = tl.where(inside & (before == before), tl.abs(before), 0.0)
    exact *= exact
    change *= change
    counts = tl.sum(tl.sum(packed, 1), 0)
    zeros += counts & _BITS
    saturated += (counts >> 12) & _BITS
    flushed += (counts >> 24) & _BITS
    subnormal += (counts >> 36) & _BITS
    wrong += (counts >> 48) & _BITS
    hashed += tl.sum(tl.sum(hashes, 1), 0)
    signal += tl.sum(tl.sum(exact, 1), 0)
    noise += tl.sum(tl.sum(change, 1), 0)
    amax = tl.maximum(amax, tl.max(tl.max(magnitude, 1), 0))
    return zeros, saturated, flushed, subnormal, wrong, hashed, signal, noise, amax


@triton.jit
def new_scale_sums():
    """Return the sums of no block's scale, scalars: the smallest and the largest scale, FP32; how many blocks there
    are, int64; and the sums of log2 of their scales and of its square, float64.
    """
    lowest = tl.full((), _INF, tl.float32)
    highest = tl.zeros((), tl.float32)
    nothing = tl.zeros((), tl.float64)
    return lowest, highest, tl.zeros((), tl.int64), nothing, nothing


@triton.jit
def count_row_scales(sums, inverses, sizes):
    """Return sums (`new_scale_sums`) to which the blocks of a tile are added that are not zeros.

    inverses are the addresses of inverse scales [rows, blocks], sizes the codes without signs [rows, blocks, columns].
    """
    lowest, highest, blocks, logarithms, squares = sums
    # A block of zeros has a scale of its own making, which says nothing about the values.
    filled = tl.max(sizes, 2) > 0
    factors = tl.load(inverses, filled, 1.0)
    filled = filled & (factors > 0)
    divisors = tl.where(filled, factors, 1.0)
    scale = tl.div_rn(tl.full(divisors.shape, 1.0, tl.float32), divisors)
    logarithm = tl.log2(scale).to(tl.float64)
    blocks_here = tl.sum(tl.sum(filled.to(tl.int64), 1), 0)
    logarithms_here = tl.sum(tl.sum(logarithm, 1), 0)
    squares_here = tl.sum(tl.sum(logarithm * logarithm, 1), 0)
    low = tl.min(tl.min(tl.where(filled, scale, _INF), 1), 0)
    high = tl.max(tl.max(tl.where(filled, scale, 0.0), 1), 0)
    blocks += blocks_here
    logarithms += logarithms_here
    squares += squares_here
    lowest = tl.minimum(lowest, low)
    highest = tl.maximum(highest, high)
    return lowest, highest, blocks, logarithms, squares


@triton.jit
def count_square_scale(sums, inverse, size):
    """Return sums (`new_scale_sums`) to which one block is added, unless it is zeros.

    inverse is its inverse scale, and size the largest of its codes without signs.
    """
    lowest, highest, blocks, logarithms, squares = sums
    if (size > 0) & (inverse > 0):
        scale = tl.div_rn(tl.full((), 1.0, tl.float32), inverse)
        logarithm = tl.log2(scale).to(tl.float64)
        blocks += 1
        logarithms += logarithm
        squares += logarithm * logarithm
        lowest = tl.minimum(lowest, scale)
        highest = tl.maximum(highest, scale)
    return lowest, highest, blocks, logarithms, squares


@triton.jit
def _add_counts(
    fields,
    codes,
    zeros,
    saturated,
    flushed,
    subnormal,
    wrong,
    signal,
    noise,
    hashed,
    largest,
    SOURCE: tl.constexpr,
):
    """Add the sums of one or more tiles."""
    # Atomics of many programs to one place wait for each other, so counts that are mostly 0 are left out.
    if SOURCE:
        if zeros + flushed > 0:
            _add(fields, _ZEROS, zeros)
            _add(fields, _FLUSHED, flushed)
        _add(fields, _SIGNAL, signal)
        _add(fields, _NOISE, noise)
    if saturated + wrong > 0:
        _add(fields, _SATURATED, saturated)
        _add(fields, _NONFINITE, wrong)
    _add(fields, _SUBNORMAL, subnormal)
    _raise(fields, _AMAX, largest)
    tl.atomic_add(codes, hashed, sem="relaxed")


@triton.jit
def add_sums(fields, codes, sums, SOURCE: tl.constexpr):
    """Add a program's sums of tiles (`new_sums`)."""
    zeros, saturated, flushed, subnormal, wrong, hashed, signal, noise, largest = sums
    _add_counts(
        fields=fields,
        codes=codes,
        zeros=zeros,
        saturated=saturated,
        flushed=flushed,
        subnormal=subnormal,
        wrong=wrong,
        signal=signal,
        noise=noise,
        hashed=hashed,
        largest=largest,
        SOURCE=SOURCE,
    )


@triton.jit
def add_scale_sums(fields, sums):
    """Add a program's sums of the scales of blocks (`new_scale_sums`)."""
    lowest, highest, blocks, logarithms, squares = sums
    _lower(fields, _SCALE_MIN, lowest)
    _raise(fields, _SCALE_MAX, highest)
    _add(fields, _BLOCKS, blocks)
    _add(fields, _BLOCK_LOG2, logarithms)
    _add(fields, _BLOCK_LOG2_SQUARES, squares)


@triton.jit
def _note_tensor(
    fields,
    elements,
    scale,
    E5M2: tl.constexpr,
    SOURCE: tl.constexpr,
    BLOCKED: tl.constexpr,
):
    """Add what concerns the whole tensor, from one program: `scale` is the tensor's, which blocks do not have."""
    _add(fields, _ELEMENTS, elements)
    _raise(fields, _FORMAT, tl.full((), 8.0 if E5M2 else 7.0, tl.float64))
    if not SOURCE:
        # Without the values before the cast, what follows from them is unknown for the whole tensor.
        unknown = tl.full((), float("nan"), tl.float64)
        _add(fields, _ZEROS, unknown)
        _add(fields, _FLUSHED, unknown)
        _add(fields, _SIGNAL, unknown)
        _add(fields, _NOISE, unknown)
    if not BLOCKED:
        logarithm = tl.log2(scale.to(tl.float32)).to(tl.float64)
        _lower(fields, _SCALE_MIN, scale)
        _raise(fields, _SCALE_MAX, scale)
        _add(fields, _BLOCKS, tl.full((), 1.0, tl.float64))
        _add(fields, _BLOCK_LOG2, logarithm)
        _add(fields, _BLOCK_LOG2_SQUARES, logarithm * logarithm)


@triton.jit
def count_cast_kernel(
    # the values before the cast [rows, columns], the codes uint8, and inverse scales FP32
    source,
    data,
    inverse,
    scale,
    # the table of a recorder: counts, and codes of which it makes a hash
    fields,
    codes,
    # sizes, and strides in elements
    rows,
    columns,
    source_stride,
    data_row,
    data_column,
    inverse_row,
    inverse_column,
    spread,
    # format; whether there are values before the cast, and one scale of the tensor
    E5M2: tl.constexpr,
    SOURCE: tl.constexpr,
    SCALED: tl.constexpr,
    # elements that share a scale, and the unit that a program reads at a time
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEIGHT: tl.constexpr,
):
    """Count a cast of [rows, columns]: each program goes through units of HEIGHT rows and COLUMNS columns.

    BLOCK_COLUMNS is 0 for a tensor with one scale. A unit has whole blocks: BLOCK_ROWS is 1, or HEIGHT.
    """
    # Programs add to different rows of the table, so that few atomics meet.
    program_fields = fields + (tl.program_id(0) % spread) * _WIDTH
    high = tl.cdiv(rows, HEIGHT)
    wide = tl.cdiv(columns, COLUMNS)
    sums = new_sums()
    scale_sums = new_scale_sums()
    one_inverse = tl.load(inverse)
    for unit in range(tl.program_id(0), high * wide, tl.num_programs(0)):
        first = (unit // wide).to(tl.int64) * HEIGHT
        j = (unit % wide).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
        in_block = tl.zeros((), tl.float32)  # the largest code of a square block
        for start in range(0, HEIGHT, ROWS):
            i = first + start + tl.arange(0, ROWS)
            inside = (i < rows)[:, None] & (j < columns)[None, :]
            code = tl.load(data + i[:, None] * data_row + j[None, :] * data_column, inside, 0)
            if SOURCE:
                values = source + i[:, None] * source_stride + j[None, :]
                x = tl.load(values, inside, 0.0).to(tl.float32)
            else:
                x = tl.zeros((ROWS, COLUMNS), tl.float32)
            if BLOCK_COLUMNS == 0:
                factor = tl.zeros((ROWS, COLUMNS), tl.float32) + one_inverse
            else:
                p = (i // BLOCK_ROWS)[:, None] * inverse_row
                q = (j // BLOCK_COLUMNS)[None, :] * inverse_column
                factor = tl.load(inverse + p + q, inside, 0.0)
            weights = code_weights(i, j)
            sums = count_tile(sums, x, code, factor, inside, weights, E5M2, SOURCE)
            if BLOCK_COLUMNS > 0:
                # Codes without their sign are ordered as magnitudes are; only 0 matters here.
                size = tl.where(inside, (code & 0x7F).to(tl.float32), 0.0)
                if BLOCK_ROWS > 1:
                    in_block = tl.maximum(in_block, tl.max(tl.max(size, 1), 0))
                else:
                    parts: tl.constexpr = COLUMNS // BLOCK_COLUMNS
                    sizes = tl.reshape(size, (ROWS, parts, BLOCK_COLUMNS))
                    part = (unit % wide).to(tl.int64) * parts + tl.arange(0, parts)
                    places = i[:, None] * inverse_row + part[None, :] * inverse_column
                    scale_sums = count_row_scales(scale_sums, inverse + places, sizes)
        # A square block is as high as the unit, so its scale is counted once its rows have been read.
        if BLOCK_ROWS > 1:
            above = (unit // wide).to(tl.int64) * inverse_row
            square = tl.load(inverse + above + (unit % wide).to(tl.int64) * inverse_column)
            scale_sums = count_square_scale(scale_sums, square, in_block)
    add_sums(program_fields, codes, sums, SOURCE)
    if BLOCK_COLUMNS > 0:
        add_scale_sums(program_fields, scale_sums)
    if tl.program_id(0) == 0:
        if SCALED:
            factor = tl.load(scale)
        else:
            factor = tl.div_rn(tl.full((), 1.0, tl.float32), one_inverse)
        elements = tl.full((), 1.0, tl.float64) * rows * columns
        _note_tensor(program_fields, elements, factor, E5M2, SOURCE, BLOCK_COLUMNS > 0)


def count_cast(
    source: Tensor | None,
    data: Tensor,
    inverse: Tensor,
    block: tuple[int, int] | None,
    scale: Tensor | None,
    e5m2: bool,
    counts: Counts,
) -> None:
    """Add the counts of a cast to a table.

    Args:
        source: the values before the cast, [M, K] of any float dtype; None: they are not in memory.
        data: uint8 [M, K], of any strides.
        inverse: inverse scales, FP32, one per block, of any strides.
        block: rows and columns that share a scale, (1, 32), (1, 128) or (128, 128); None: the tensor has one.
        scale: the scale of the cast, FP32 [1], where it was known; None: it follows from `inverse`.
        e5m2: whether the format is E5M2.
        counts: where they go.
    """
    rows, columns = data.shape
    if not rows * columns:
        return
    # The kernel takes one stride of the source, between its rows.
    if source is not None and source.stride(1) != 1:
        source = source.contiguous()
    height = SQUARE if block is not None and block[0] > 1 else ROWS
    units = triton.cdiv(rows, height) * triton.cdiv(columns, COLUMNS)
    inverse = inverse.reshape(1, 1) if block is None else inverse
    spread = len(counts.fields)
    count_cast_kernel[(min(units, PROGRAMS),)](
        source=data if source is None else source,
        data=data,
        inverse=inverse,
        scale=inverse if scale is None else scale,
        fields=counts.fields,
        codes=counts.codes,
        rows=rows,
        columns=columns,
        source_stride=0 if source is None else source.stride(0),
        data_row=data.stride(0),
        data_column=data.stride(1),
        inverse_row=inverse.stride(0),
        inverse_column=inverse.stride(1),
        spread=spread,
        E5M2=e5m2,
        SOURCE=source is not None,
        SCALED=scale is not None,
        BLOCK_ROWS=1 if block is None else block[0],
        BLOCK_COLUMNS=0 if block is None else block[1],
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        HEIGHT=height,
        num_warps=4,
    )
