"""The casts of quantizers.py as Triton kernels: one launch per tensor on a GPU, bit-identical.

Roundings are done with integers, as in nvfp4.encode_e2m1, so that the Triton interpreter (TRITON_INTERPRET=1, on any
machine) computes what a GPU does; divisions are `div_rn`, since Triton's own is approximate.
"""

import triton
import triton.language as tl

from te_models.numerics.fp8_triton import decode_fp8, encode_fp8, magnitude_bits

TILE = tl.constexpr(128)
_FLT_MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _scale(amax, epsilon, infinite, POWER_OF_2: tl.constexpr, E5M2: tl.constexpr):
    """Compute scale_rules.scale_from_amax."""
    fp8_max: tl.constexpr = 57344.0 if E5M2 else 448.0
    amax = tl.maximum(amax, epsilon)
    scale = tl.div_rn(tl.zeros_like(amax) + fp8_max, amax)
    scale = tl.where(scale == float("inf"), infinite, scale)
    scale = tl.where((amax > 0) & (amax < float("inf")), scale, 1.0)
    if POWER_OF_2:
        scale = (scale.to(tl.int32, bitcast=True) & -0x800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def amax_kernel(x, y, parts, n, steps, NAN: tl.constexpr, BLOCK: tl.constexpr):
    """Write the largest magnitude of every program's elements to `parts`, `steps` blocks per program.

    The first row of the grid reads x; a second row, if any, reads y and writes the second half. With NAN, a NaN is
    larger than any number.
    """
    largest = tl.zeros((BLOCK,), tl.int32)
    for step in range(steps):
        block = step * tl.num_programs(0) + tl.program_id(0)
        at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        if tl.program_id(1) == 0:
            v = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
        else:
            v = tl.load(y + at, mask=at < n, other=0.0).to(tl.float32)
        bits = v.to(tl.int32, bitcast=True) & 0x7FFFFFFF if NAN else magnitude_bits(v)
        largest = tl.maximum(largest, bits)
    part = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(parts + part, tl.max(largest, 0).to(tl.float32, bitcast=True))


@triton.jit
def delayed_kernel(x, data, scale, amax, scale_inv, n, E5M2: tl.constexpr, BLOCK: tl.constexpr):
    """Cast with the scale as it stands, and raise `amax` [1] to the largest magnitude."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
    tl.atomic_max(amax.to(tl.pointer_type(tl.int32), bitcast=True), tl.max(magnitude_bits(v), 0))
    _cast_tensor(v, tl.load(scale), data, scale_inv, at, n, E5M2)


@triton.jit
def current_kernel(
    # n values, and their FP8 data
    x,
    data,
    # largest magnitudes of parts of x, and the inverse scale to write, FP32 [1]
    parts,
    scale_inv,
    n,
    n_parts,
    epsilon,
    POWER_OF_2: tl.constexpr,
    E5M2: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Cast with the scale that follows from the largest of `parts`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
    i = tl.arange(0, PARTS)
    amax = tl.max(tl.load(parts + i, mask=i < n_parts, other=0.0), 0)
    _cast_tensor(v, _scale(amax, epsilon, _FLT_MAX, POWER_OF_2, E5M2), data, scale_inv, at, n, E5M2)


@triton.jit
def _cast_tensor(v, multiplier, data, scale_inv, at, n, E5M2: tl.constexpr):
    tl.store(data + at, encode_fp8(v * multiplier, E5M2), mask=at < n)
    if tl.program_id(0) == 0:
        tl.store(scale_inv, tl.div_rn(tl.full((), 1.0, tl.float32), multiplier))


@triton.jit
def _tile(p, q, rows, cols):
    """Return row and column numbers of tile (p, q), offsets and mask of its elements in a `[rows, cols]` matrix."""
    i = p.to(tl.int64) * TILE + tl.arange(0, TILE)
    j = q.to(tl.int64) * TILE + tl.arange(0, TILE)
    return i, j, i[:, None] * cols + j[None, :], (i < rows)[:, None] & (j < cols)[None, :]


@triton.jit
def block_kernel(
    # [rows, cols]
    x,
    # FP8 data and inverse scales of blocks along the rows, and transposed along the columns
    row_data,
    row_scale,
    col_data,
    col_scale,
    # sizes, and strides of the scales
    rows,
    cols,
    row_stride,
    col_stride,
    epsilon,
    infinite,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    TWO_D: tl.constexpr,
    POWER_OF_2: tl.constexpr,
    E5M2: tl.constexpr,
):
    """Cast 1x128 blocks along rows (ROW) and columns (COL), or one 128x128 block for both (TWO_D)."""
    p = tl.program_id(0)
    q = tl.program_id(1)
    i, j, at, mask = _tile(p, q, rows, cols)
    v = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    bits = magnitude_bits(v)
    if TWO_D:
        amax = tl.max(tl.max(bits, 1), 0).to(tl.float32, bitcast=True)
        scale = _scale(amax, epsilon, infinite, POWER_OF_2, E5M2)
        tl.store(row_data + at, encode_fp8(v * scale, E5M2), mask=mask)
        inverse = tl.div_rn(tl.full((), 1.0, tl.float32), scale)
        if ROW:
            _store_padded(row_scale + p * row_stride, q, tl.num_programs(1), row_stride, inverse)
        if COL:
            _store_padded(col_scale + q * col_stride, p, tl.num_programs(0), col_stride, inverse)
    else:
        if ROW:
            scale = _scale(
                tl.max(bits, 1).to(tl.float32, bitcast=True), epsilon, infinite, POWER_OF_2, E5M2
            )
            tl.store(row_data + at, encode_fp8(v * scale[:, None], E5M2), mask=mask)
            inverse = tl.where(i < rows, tl.div_rn(tl.full((TILE,), 1.0, tl.float32), scale), 0.0)
            tl.store(row_scale + q * row_stride + i, inverse, mask=i < row_stride)
        if COL:
            scale = _scale(
                tl.max(bits, 0).to(tl.float32, bitcast=True), epsilon, infinite, POWER_OF_2, E5M2
            )
            tl.store(col_data + at, encode_fp8(v * scale[None, :], E5M2), mask=mask)
            inverse = tl.where(j < cols, tl.div_rn(tl.full((TILE,), 1.0, tl.float32), scale), 0.0)
            tl.store(col_scale + p * col_stride + j, inverse, mask=j < col_stride)


@triton.jit
def _store_padded(line, i, n, padded, value):
    """Store entry i of n; the last one is followed by zeros, up to `padded`, which is at most three more."""
    at = i + tl.arange(0, 4)
    end = tl.where(i + 1 == n, padded, i + 1)
    tl.store(line + at, tl.where(at == i, value, 0.0), mask=at < end)


@triton.jit
def e8m0_from_bits(amax_bits, inverse_max):
    """Compute e8m0.e8m0_from_amax."""
    bits = (amax_bits.to(tl.float32, bitcast=True) * inverse_max).to(tl.int32, bitcast=True)
    exponent = bits >> 23
    mantissa = bits & 0x7FFFFF
    up = tl.where(exponent == 0, mantissa > 0x400000, mantissa > 0).to(tl.int32)
    return tl.minimum(exponent + up, 254)


@triton.jit
def power_of_2(exponent):
    """Return 2^(exponent - 127)."""
    return tl.where(exponent > 0, exponent << 23, 0x400000).to(tl.float32, bitcast=True)


@triton.jit
def mx_kernel(
    # [rows, cols]
    x,
    # FP8 data and E8M0 scales of blocks along the rows, and along the columns
    row_data,
    row_scale,
    col_data,
    col_scale,
    # sizes, and strides of the scales
    rows,
    cols,
    row_stride,
    col_stride,
    # one over the largest number of the format
    inverse_max,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    TWO_D: tl.constexpr,
    E5M2: tl.constexpr,
):
    """Cast blocks of 32 along rows and columns, with E8M0 scales; TWO_D shares them over 32x32 elements."""
    groups: tl.constexpr = TILE // 32
    i, j, at, mask = _tile(tl.program_id(0), tl.program_id(1), rows, cols)
    v = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    bits = magnitude_bits(v)
    # [128, 4] maxima along rows, [4, 128] along columns.
    along = tl.max(tl.reshape(bits, (TILE, groups, 32)), 2)
    down = tl.max(tl.reshape(bits, (groups, 32, TILE)), 1)
    if TWO_D:
        both = tl.max(tl.reshape(along, (groups, 32, groups)), 1)
        along = tl.reshape(tl.broadcast_to(both[:, None, :], (groups, 32, groups)), (TILE, groups))
        down = tl.reshape(tl.broadcast_to(both[:, :, None], (groups, groups, 32)), (groups, TILE))
    if ROW:
        e = e8m0_from_bits(along, inverse_max)
        scaled = tl.reshape(v, (TILE, groups, 32)) * power_of_2(254 - e)[:, :, None]
        tl.store(row_data + at, encode_fp8(tl.reshape(scaled, (TILE, TILE)), E5M2), mask=mask)
        g = tl.program_id(1) * groups + tl.arange(0, groups)
        e = tl.where((i < rows)[:, None] & (g < cols // 32)[None, :], e, 0)
        tl.store(row_scale + i[:, None] * row_stride + g[None, :], e.to(tl.uint8))
    if COL:
        e = e8m0_from_bits(down, inverse_max)
        scaled = tl.reshape(v, (groups, 32, TILE)) * power_of_2(254 - e)[:, None, :]
        tl.store(col_data + at, encode_fp8(tl.reshape(scaled, (TILE, TILE)), E5M2), mask=mask)
        g = tl.program_id(0) * groups + tl.arange(0, groups)
        e = tl.where((g < rows // 32)[:, None] & (j < cols)[None, :], e, 0)
        tl.store(col_scale + g[:, None] * col_stride + j[None, :], e.to(tl.uint8))


@triton.jit
def decode_kernel(
    # FP8 data, inverse scales of its blocks, and BF16 to write, for both factors of a product
    a,
    a_scale,
    a_out,
    b,
    b_scale,
    b_out,
    # sizes, and strides of the scales
    a_rows,
    a_cols,
    a_row_step,
    a_col_step,
    b_rows,
    b_cols,
    b_row_step,
    b_col_step,
    # elements that share a scale, down and along
    A_DOWN: tl.constexpr,
    A_ALONG: tl.constexpr,
    A_E5M2: tl.constexpr,
    B_DOWN: tl.constexpr,
    B_ALONG: tl.constexpr,
    B_E5M2: tl.constexpr,
):
    """Write both matrices of a product as BF16: the first programs decode the tiles of a, the others the tiles of b."""
    tile = tl.program_id(0)
    of_a = tl.cdiv(a_rows, TILE) * tl.cdiv(a_cols, TILE)
    if tile < of_a:
        _decode_tile(
            tile, a, a_scale, a_out, a_rows, a_cols, a_row_step, a_col_step, A_DOWN, A_ALONG, A_E5M2
        )
    else:
        _decode_tile(
            tile=tile - of_a,
            data=b,
            scale=b_scale,
            out=b_out,
            rows=b_rows,
            cols=b_cols,
            row_step=b_row_step,
            col_step=b_col_step,
            DOWN=B_DOWN,
            ALONG=B_ALONG,
            E5M2=B_E5M2,
        )


@triton.jit
def _decode_tile(
    tile,
    data,
    scale,
    out,
    rows,
    cols,
    row_step,
    col_step,
    DOWN: tl.constexpr,
    ALONG: tl.constexpr,
    E5M2: tl.constexpr,
):
    """Write FP8 data times block scales as BF16; a scale, of strides `row_step` and `col_step`, serves DOWN x ALONG."""
    across = tl.cdiv(cols, TILE)
    i, j, at, mask = _tile(tile // across, tile % across, rows, cols)
    factor = tl.load(
        scale + (i // DOWN)[:, None] * row_step + (j // ALONG)[None, :] * col_step,
        mask=mask,
        other=0,
    )
    if factor.dtype == tl.uint8:  # E8M0
        factor = power_of_2(factor.to(tl.int32))
    value = decode_fp8(tl.load(data + at, mask=mask, other=0), E5M2) * factor
    tl.store(out + at, value.to(tl.bfloat16), mask=mask)


@triton.jit
def update_kernel(
    table,
    amaxes,
    largest,
    REDUCED: tl.constexpr,
    MOST_RECENT: tl.constexpr,
    LENGTH: tl.constexpr,
    N: tl.constexpr,
):
    """Update history `[length, n]` and scale `[n]` of one state per program in place (delayed_scaling.updated).

    A row of `table` (int64) has the addresses of history and scale, length, n, and where in `amaxes` the n reduced ones
    start; without REDUCED they are row 0 of the history.
    """
    table += tl.program_id(0) * 5
    history = tl.load(table).to(tl.pointer_type(tl.float32))
    scale = tl.load(table + 1).to(tl.pointer_type(tl.float32))
    length = tl.load(table + 2).to(tl.int32)
    n = tl.load(table + 3).to(tl.int32)
    amax = amaxes + tl.load(table + 4) if REDUCED else history
    i = tl.arange(0, LENGTH)
    j = tl.arange(0, N)
    at = i[:, None] * n + j[None, :]
    mask = (i < length)[:, None] & (j < n)[None, :]
    old = tl.load(history + at, mask=mask, other=0.0)
    following = tl.load(history + at + n, mask=mask & (i < length - 1)[:, None], other=0.0)
    newest = tl.load(amax + j, mask=j < n, other=0.0)
    last = tl.where(newest != 0, newest, tl.load(history + j, mask=j < n, other=0.0))
    bits = magnitude_bits(tl.where((i > 0)[:, None], old, 0.0))
    used = last if MOST_RECENT else tl.maximum(tl.max(bits, 0).to(tl.float32, bitcast=True), last)
    old_scale = tl.load(scale + j, mask=j < n, other=1.0)
    tl.debug_barrier()  # all is read before anything is written
    rolled = tl.where((i == length - 1)[:, None], last[None, :], following)
    rolled = tl.where((i == 0)[:, None], 0.0, rolled)
    tl.store(history + at, rolled, mask=mask & (last != 0)[None, :])
    usable = (last != 0) & (used > 0) & (used < float("inf"))
    fresh = tl.minimum(tl.div_rn(tl.zeros_like(used) + largest, used), _FLT_MAX)
    tl.store(scale + j, tl.where(usable, fresh, old_scale), mask=j < n)
