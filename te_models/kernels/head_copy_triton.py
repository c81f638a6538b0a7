"""Copies of heads into a tensor of another layout, in Triton."""

import triton
import triton.language as tl
from torch import Tensor

from te_models.kernels.head_tiles_triton import (
    HEADS,
    heads_of_token,
    strides_of,
    width_of,
)


@triton.jit
def _copy_kernel(
    x,
    out,
    x_batch,
    x_seq,
    x_head,
    out_batch,
    out_seq,
    out_head,
    seq,
    heads,
    dim: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
):
    """Copy a few heads of one token."""
    token, batch, place, head, channel, inside = heads_of_token(seq, heads, dim, width, block)
    value = tl.load(x + batch * x_batch + place * x_seq + head * x_head + channel, inside)
    tl.store(out + batch * out_batch + place * out_seq + head * out_head + channel, value, inside)


def copy(x: Tensor, out: Tensor) -> None:
    """See attention_parts.copy."""
    batch, seq, heads, dim = x.shape
    grid = (batch * seq, triton.cdiv(heads, HEADS))
    _copy_kernel[grid](
        x=x,
        out=out,
        **strides_of(x=x, out=out),
        seq=seq,
        heads=heads,
        dim=dim,
        width=width_of(dim),
        block=HEADS,
    )
