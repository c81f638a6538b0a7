"""Heads of tokens in groups of four: addresses and masks for the kernels of attention that write FP8."""

import triton
import triton.language as tl
from torch import Tensor

from te_models.kernels.fp8_tiles_triton import tile
from te_models.kernels.head_tiles_triton import row_and_place

# Tokens and warps per program of those that write FP8, each of one head; 64 tokens are as fast, 128 are not.
TOKENS = 32
WARPS = 4


@triton.jit
def token_rows(x_at, i, head, seq):
    """Return pointers [rows, 1] to a head at tokens i of x [B, S, heads, H]; S None: all rows have one stride.

    `x_at` is x with its strides: (pointer, batch, token, head).
    """
    x, batch_stride, seq_stride, head_stride = x_at
    x += head.to(tl.int64) * head_stride
    if seq is None:
        at = x + i * seq_stride
    else:
        row, place = row_and_place(i, seq)
        at = x + row * batch_stride + place * seq_stride
    return at[:, None]


@triton.jit
def place_of_heads(
    rows,
    heads,
    dim: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    BAND: tl.constexpr,
    number=None,
):
    """Return the groups of four rows of a tile, its head, channels, and which of rows and channels exist.

    `number` is the tile's; None: this program's.
    """
    row, head = tile(tl.cdiv(rows, block), heads, BAND, number)
    group = row.to(tl.int64) * (block // 4) + tl.arange(0, block // 4)
    channel = tl.arange(0, width)
    return group, head, channel, (4 * group < rows)[:, None] & (channel < dim)[None, :]


@triton.jit
def first_row(rows, heads, block: tl.constexpr, BAND: tl.constexpr, number=None):
    """Return the first row of a tile of `place_of_heads`."""
    row, _ = tile(tl.cdiv(rows, block), heads, BAND, number)
    return row * block


@triton.jit
def read_head(pointers, channel, inside):
    """Load the channels of a head at `pointers` [rows, 1] in FP32, 0 where there are none."""
    return tl.load(pointers + channel[None, :], inside, 0.0).to(tl.float32)


def one_stride(seq: int, *tensors: Tensor) -> int | None:
    """Return S; None if one stride serves all tokens of tensors [B, S, heads, H], which saves divisions."""
    return None if all(tensor.stride(0) == seq * tensor.stride(1) for tensor in tensors) else seq
