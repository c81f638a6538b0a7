"""Triton kernels for the cast and decoding of nvfp4.py, bit-identical; torch draws random numbers and transforms."""

import triton
import triton.language as tl

from te_models.numerics.casts_triton import TILE, _tile
from te_models.numerics.fp8_triton import decode_fp8, encode_fp8

GROUPS = tl.constexpr(8)  # blocks of 16 along a tile


@triton.jit
def _block_scale(bits, amax):
    """Return the E4M3 byte of a block's scale and the block's multiplier, from the bits of its largest magnitude."""
    one = tl.zeros_like(amax) + 1.0
    # 448 * 6; as nvfp4._global_scale, NaN stays
    whole = tl.div_rn(tl.zeros_like(amax) + 2688.0, amax)
    whole = tl.where(
        whole > 3.4028234663852886e38, 3.4028234663852886e38, tl.where(whole == 0, 1.0, whole)
    )
    byte = encode_fp8(
        bits.to(tl.float32, bitcast=True) * (whole * tl.div_rn(one, one * 6.0)), False
    )
    scaled = decode_fp8(byte, False) * tl.div_rn(one, whole)
    multiplier = tl.div_rn(tl.zeros_like(scaled) + 1.0, scaled)
    return byte, tl.where(multiplier > 3.4028234663852886e38, 3.4028234663852886e38, multiplier)


@triton.jit
def _encode_e2m1(v, noise, at, mask, STOCHASTIC: tl.constexpr):
    """Compute nvfp4.encode_e2m1 as int32, of any FP32 values; `noise` are its random words."""
    v = tl.where(v > 6.0, 6.0, tl.where(v < -6.0, -6.0, v))
    sign = tl.where(v.to(tl.int32, bitcast=True) < 0, 8, 0)
    size = tl.where(v != v, 0.0, tl.abs(v))
    octave = tl.maximum(size.to(tl.int32, bitcast=True) & 0x7F800000, 0x3F800000)
    if STOCHASTIC:
        random = tl.load(noise + at, mask=mask, other=0).to(tl.float32) + 0.5
        size += random * (octave - (17 << 23)).to(tl.float32, bitcast=True)
    sums = ((octave + ((22 << 23) + 2)).to(tl.float32, bitcast=True) + size).to(
        tl.int32, bitcast=True
    )
    return ((sums + (octave >> 22)) & 0xFF) | sign


@triton.jit
def _pack_rows(v, amax, noise, at, mask, half, TWO_D: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Return the scales [TILE, GROUPS] of blocks of 16 along the rows of v [TILE, TILE], and its codes in pairs.

    With TWO_D a scale belongs to 16 x 16 elements, and is repeated for each of their rows.
    """
    bits = tl.max(tl.reshape(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, (TILE, GROUPS, 16)), 2)
    if TWO_D:
        both = tl.max(tl.reshape(bits, (GROUPS, 16, GROUPS)), 1)
        bits = tl.reshape(tl.broadcast_to(both[:, None, :], (GROUPS, 16, GROUPS)), (TILE, GROUPS))
    scale, multiplier = _block_scale(bits, amax)
    scaled = tl.reshape(tl.reshape(v, (TILE, GROUPS, 16)) * multiplier[:, :, None], (TILE, TILE))
    data = _encode_e2m1(scaled, noise, at, mask, STOCHASTIC)
    return scale, tl.sum(tl.reshape(data, (TILE, TILE // 2, 2)) << half[None, None, :], 2)


@triton.jit
def _pack_columns(
    v, amax, noise, begin, at, mask, half, TWO_D: tl.constexpr, STOCHASTIC: tl.constexpr
):
    """Return what `_pack_rows` does for blocks along the columns: scales [GROUPS, TILE], codes [TILE / 2, TILE].

    Their random words start at `begin`.
    """
    bits = tl.max(tl.reshape(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, (GROUPS, 16, TILE)), 1)
    if TWO_D:
        both = tl.max(tl.reshape(bits, (GROUPS, GROUPS, 16)), 2)
        bits = tl.reshape(tl.broadcast_to(both[:, :, None], (GROUPS, GROUPS, 16)), (GROUPS, TILE))
    scale, multiplier = _block_scale(bits, amax)
    scaled = tl.reshape(tl.reshape(v, (GROUPS, 16, TILE)) * multiplier[:, None, :], (TILE, TILE))
    data = _encode_e2m1(scaled, noise + begin, at, mask, STOCHASTIC)
    return scale, tl.sum(tl.reshape(data, (TILE // 2, 2, TILE)) << half[None, :, None], 1)


@triton.jit
def nvfp4_kernel(
    # [rows, cols], what its columns are cast from, and random words
    x,
    t,
    noise,
    # E2M1 pairs, E4M3 scales of blocks of 16, and the amax of the tensor, for rows and for columns
    row_data,
    row_scale,
    row_amax,
    col_data,
    col_scale,
    col_amax,
    # largest magnitudes of parts of x, then of t
    parts,
    n_parts,
    # sizes, strides of the scales, and where the random words of the columns begin
    rows,
    cols,
    row_stride,
    col_stride,
    col_noise,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    TWO_D: tl.constexpr,
    TRANSFORMED: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Cast blocks of 16 along the rows of x and the columns of t, which is x unless TRANSFORMED; TWO_D: 16x16 elements.

    The largest of the first n_parts of `parts` is the amax of x, the largest of the next n_parts the transformed one's.
    The random words of the columns start at `col_noise`.
    """
    p = tl.program_id(0)
    q = tl.program_id(1)
    i, j, at, mask = _tile(p, q, rows, cols)
    k = tl.arange(0, PARTS)
    half = (tl.arange(0, 2) * 4).to(tl.int32)
    if ROW:
        v = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        amax = _largest(parts, k, n_parts)
        scale, packed = _pack_rows(v, amax, noise, at, mask, half, TWO_D, STOCHASTIC)
        c = q * (TILE // 2) + tl.arange(0, TILE // 2)
        inside = (i < rows)[:, None] & (c < cols // 2)[None, :]
        tl.store(row_data + i[:, None] * (cols // 2) + c[None, :], packed.to(tl.uint8), mask=inside)
        g = q * GROUPS + tl.arange(0, GROUPS)
        scale = tl.where((i < rows)[:, None] & (g < cols // 16)[None, :], scale, 0)
        tl.store(
            row_scale + i[:, None] * row_stride + g[None, :], scale, mask=(g < row_stride)[None, :]
        )
        tl.store(row_amax, amax, mask=(p == 0) & (q == 0))
    if COL:
        v = tl.load(t + at, mask=mask, other=0.0).to(tl.float32)
        amax = _largest(parts + n_parts if TRANSFORMED and ROW else parts, k, n_parts)
        scale, packed = _pack_columns(v, amax, noise, col_noise, at, mask, half, TWO_D, STOCHASTIC)
        r = p.to(tl.int64) * (TILE // 2) + tl.arange(0, TILE // 2)
        inside = (r < rows // 2)[:, None] & (j < cols)[None, :]
        tl.store(col_data + r[:, None] * cols + j[None, :], packed.to(tl.uint8), mask=inside)
        g = p * GROUPS + tl.arange(0, GROUPS)
        scale = tl.where((g < rows // 16)[:, None] & (j < cols)[None, :], scale, 0)
        tl.store(
            col_scale + j[None, :] * col_stride + g[:, None], scale, mask=(g < col_stride)[:, None]
        )
        tl.store(col_amax, amax, mask=(p == 0) & (q == 0))


@triton.jit
def _largest(parts, k, n_parts):
    """Return the largest of n_parts magnitudes; NaN is larger than any number."""
    bits = tl.load(parts + k, mask=k < n_parts, other=0.0).to(tl.int32, bitcast=True)
    return tl.max(bits, 0).to(tl.float32, bitcast=True)


@triton.jit
def nvfp4_decode_kernel(
    a,
    a_scale,
    a_out,
    a_amax,
    b,
    b_scale,
    b_out,
    b_amax,
    alpha,
    a_rows,
    a_cols,
    a_step,
    a_top,
    b_rows,
    b_cols,
    b_step,
    b_top,
    A_COL: tl.constexpr,
    B_COL: tl.constexpr,
):
    """Write both matrices of a product as BF16, and the factor of the product to `alpha`."""
    tile = tl.program_id(0)
    of_a = tl.cdiv(a_rows, TILE) * tl.cdiv(a_cols, TILE)
    if tile < of_a:
        _decode_tile(tile, a, a_scale, a_out, a_rows, a_cols, a_step, A_COL)
    else:
        _decode_tile(tile - of_a, b, b_scale, b_out, b_rows, b_cols, b_step, B_COL)
    if tile == 0:
        left = tl.load(a_amax)
        right = tl.load(b_amax)
        left = tl.div_rn(left, tl.zeros_like(left) + a_top)
        tl.store(alpha, left * tl.div_rn(right, tl.zeros_like(right) + b_top))


@triton.jit
def _decode_tile(tile, data, scale, out, rows, cols, step, COL: tl.constexpr):
    """Decode one tile; `step` is the stride of the scales; the scales of a row (COL: a column) follow each other."""
    across = tl.cdiv(cols, TILE)
    i, j, at, mask = _tile(tile // across, tile % across, rows, cols)
    if COL:
        byte = tl.load(data + (i // 2)[:, None] * cols + j[None, :], mask=mask, other=0).to(
            tl.int32
        )
        bits = byte >> ((i % 2).to(tl.int32) * 4)[:, None]
        factor = tl.load(scale + (i // 16)[:, None] + j[None, :] * step, mask=mask, other=0)
    else:
        byte = tl.load(data + i[:, None] * (cols // 2) + (j // 2)[None, :], mask=mask, other=0).to(
            tl.int32
        )
        bits = byte >> ((j % 2).to(tl.int32) * 4)[None, :]
        factor = tl.load(scale + i[:, None] * step + (j // 16)[None, :], mask=mask, other=0)
    # As nvfp4._decode: the bits where FP32 has its exponent's end and its mantissa's start.
    # 2^126
    value = (((bits & 7) << 22) | ((bits & 8) << 28)).to(
        tl.float32, bitcast=True
    ) * 8.507059173023462e37
    tl.store(out + at, (value * decode_fp8(factor, False)).to(tl.bfloat16), mask=mask)
