"""Triton kernels for numbers that are sent in FP8: casts to messages, and sums of received ones (sent_blocks.py)."""

import triton
import triton.language as tl

from te_models.numerics.casts_triton import e8m0_from_bits, power_of_2
from te_models.numerics.fp8_triton import decode_fp8, encode_fp8

BLOCK = tl.constexpr(128)
_INF = tl.constexpr(0x7F800000)
_INVERSE_MAX = tl.constexpr(1 / 448)


@triton.jit
def pack_kernel(
    # [ranks, n]
    x,
    # [ranks, stride]: E4M3 of `padded` elements, and a scale byte for each block of them
    message,
    n,
    padded,
    stride,
    BLOCKS: tl.constexpr,
):
    """Cast BLOCKS blocks of one rank's row."""
    rank = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    v = tl.load(x + rank * n + at, mask=at < n, other=0.0).to(tl.float32)
    # NaN's bits are above infinity's.
    amax = tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    e = e8m0_from_bits(amax, _INVERSE_MAX)
    data = encode_fp8(v * power_of_2(254 - e)[:, None], False)
    row = message + rank * stride
    tl.store(row + at, data, mask=at < padded)
    scale = tl.where(amax >= _INF, 255, e).to(tl.uint8)
    tl.store(row + padded + block, scale, mask=block * BLOCK < padded)


@triton.jit
def sum_kernel(
    # [ranks, stride]
    message,
    # [n]
    out,
    n,
    padded,
    stride,
    ranks,
    BLOCKS: tl.constexpr,
):
    """Add BLOCKS blocks of all ranks, in their order."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((BLOCKS, BLOCK), tl.float32)
    row = message
    for _ in range(ranks):
        data = decode_fp8(tl.load(row + at, mask=at < padded, other=0), False)
        e = tl.load(row + padded + block, mask=block * BLOCK < padded, other=0).to(tl.int32)
        scale = tl.where(e == 255, float("nan"), power_of_2(e))
        total += data * scale[:, None]
        row += stride
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < n)
