"""FP8 with a scale per 1 x 128 of rows that copy tokens: each token is cast once, and its bytes are copied.

A scale per block of a row is the same in every copy of the row, so that the k experts of a token read its bytes
instead of its values, which are twice as long.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_models.numerics.fp8_triton import encode_four

SIZE = 128  # elements of a block
# Of a program that casts one block of some tokens: the tokens, and its warps.
TOKENS = 16
CAST_WARPS = 4
# Of a program that copies a part of some rows: the rows, the words of four bytes of each, and its warps.
ROWS = 32
WORDS = 128
COPY_WARPS = 4


@triton.jit
def block_scale(amax):
    """Return the power of two that brings amax to E4M3's largest number or less: 1 for 0 and infinity."""
    counts = (amax > 0) & (amax < float("inf"))
    largest: tl.constexpr = 448.0
    quotient = tl.div_rn(tl.full(amax.shape, largest, tl.float32), tl.where(counts, amax, largest))
    quotient = tl.minimum(quotient, 1.7014118346046923e38)  # 2^127
    bits = quotient.to(tl.int32, bitcast=True) & -0x800000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def inverse_of(scale):
    """Return 1 / scale, rounded to nearest."""
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@triton.jit
def _cast_kernel(x, out, scale_inv, tokens, columns, SIZE: tl.constexpr, TOKENS: tl.constexpr):
    """Cast one block of some tokens x [T, K] to FP8, as words of four bytes, each with a scale per 1 x 128."""
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    block = tl.program_id(1)
    j = block * SIZE + tl.arange(0, SIZE)
    at = x + t[:, None] * columns + j[None, :]
    values = tl.load(at, (t < tokens)[:, None] & (j < columns)[None, :], 0.0).to(tl.float32)
    scale = block_scale(tl.max(tl.abs(values), 1))
    tl.store(scale_inv + block * tokens + t, inverse_of(scale), t < tokens)
    # [TOKENS, SIZE / 4, 2, 2]: of four values that follow each other, first and third, second and fourth.
    even, odd = tl.split(tl.reshape(values * scale[:, None], [TOKENS, SIZE // 4, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    word = block * (SIZE // 4) + tl.arange(0, SIZE // 4)
    to = out + t[:, None] * (columns // 4) + word[None, :]
    inside = (t < tokens)[:, None] & (word < columns // 4)[None, :]
    tl.store(to, encode_four(a, b, c, d, False), inside)


@triton.jit
def _copy_kernel(
    # of tokens: words [T, words] and inverse scales [blocks, T]
    data,
    scale_inv,
    # the token of each row, int64 [R]
    source,
    # of rows: words [R, words] and inverse scales [blocks, R]
    out,
    out_inv,
    tokens,
    most,
    words,
    blocks,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Copy FP8 and scales of tokens to the rows that repeat them."""
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = tl.load(source + i, i < most, tokens)
    real = token < tokens
    token = tl.where(real, token, 0)  # rows of padding read nothing, of an address that there is
    w = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    inside = (w < words)[None, :]
    values = tl.load(data + token[:, None] * words + w[None, :], real[:, None] & inside, 0)
    tl.store(out + i[:, None] * words + w[None, :], values, (i < most)[:, None] & inside)
    each: tl.constexpr = WORDS * 4 // SIZE
    b = tl.program_id(1) * each + tl.arange(0, each)
    there = (b < blocks)[:, None]
    inverse = tl.load(scale_inv + b[:, None] * tokens + token[None, :], there & real[None, :], 1.0)
    to = out_inv + b.to(tl.int64)[:, None] * most + i[None, :]
    tl.store(to, inverse, there & (i < most)[None, :])


def copied_blocks(x: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """Return FP8 of rows [R, K] that copy tokens x [T, K]: uint8 [R, K], and inverse scales FP32 [K / 128, R].

    Args:
        source: int64 [R], the token of each row; zeros for numbers from T on.
    """
    tokens, columns = x.shape
    most = len(source)
    blocks = triton.cdiv(columns, SIZE)
    room = dict(dtype=torch.uint8, device=x.device)
    of_tokens = torch.empty(tokens, columns, **room)  # FP8 of each token, once
    of_tokens_inv = torch.empty(blocks, tokens, device=x.device)
    data = torch.empty(most, columns, **room)
    inverse = torch.empty(blocks, most, device=x.device)
    if not most:
        return data, inverse
    words = columns // 4
    with torch.cuda.device_of(x):
        _cast_kernel[(triton.cdiv(tokens, TOKENS), blocks)](
            x=x,
            out=of_tokens.view(torch.int32),
            scale_inv=of_tokens_inv,
            tokens=tokens,
            columns=columns,
            SIZE=SIZE,
            TOKENS=TOKENS,
            num_warps=CAST_WARPS,
        )
        _copy_kernel[(triton.cdiv(most, ROWS), triton.cdiv(words, WORDS))](
            data=of_tokens.view(torch.int32),
            scale_inv=of_tokens_inv,
            source=source,
            out=data.view(torch.int32),
            out_inv=inverse,
            tokens=tokens,
            most=most,
            words=words,
            blocks=blocks,
            SIZE=SIZE,
            ROWS=ROWS,
            WORDS=WORDS,
            num_warps=COPY_WARPS,
        )
    return data, inverse
