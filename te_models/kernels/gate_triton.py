"""The output gate of attention in Triton, and its backward pass; gate_fp8_triton.py has those that write FP8.

A program handles a few heads of one token, as in gated_attention_triton.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_models.kernels.head_tiles_triton import (
    HEADS,
    gate_factor,
    gate_factor_slope,
    heads_of_token,
    strides_of,
    width_of,
)


@triton.jit
def _gate_kernel(
    # attention [B, S, heads, H], logits of its gate [B, S, heads, H or 1], and the output, contiguous [B, S, heads, H]
    x,
    logits,
    out,
    # strides in elements
    x_batch,
    x_seq,
    x_head,
    g_batch,
    g_seq,
    g_head,
    # tokens per row of the batch, and heads
    seq,
    heads,
    # one logit for all channels of a head
    headwise: tl.constexpr,
    # the gate is softplus(logits), not their sigmoid
    softplus: tl.constexpr,
    # channels of a head, the power of two above, and heads per program
    dim: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
):
    """Write x times its gate."""
    token, batch, place, head, channel, inside = heads_of_token(seq, heads, dim, width, block)
    value = tl.load(x + batch * x_batch + place * x_seq + head * x_head + channel, inside).to(
        tl.float32
    )
    column = head * g_head + (0 if headwise else channel)
    logit = tl.load(logits + batch * g_batch + place * g_seq + column, inside, 0.0).to(tl.float32)
    gate = gate_factor(logit, tl.sigmoid(logit), softplus)
    tl.store(
        out + (token * heads + head) * dim + channel,
        (value * gate).to(out.dtype.element_ty),
        inside,
    )


@triton.jit
def _gate_backward_kernel(
    # gradient of the output, then the inputs of `_gate_kernel`
    dy,
    x,
    logits,
    # to write: the gradients of the logits, and of x, contiguous [B, S, heads, H]
    dlogits,
    dx,
    # strides in elements
    dy_batch,
    dy_seq,
    dy_head,
    x_batch,
    x_seq,
    x_head,
    g_batch,
    g_seq,
    g_head,
    dg_batch,
    dg_seq,
    dg_head,
    # as in `_gate_kernel`
    seq,
    heads,
    headwise: tl.constexpr,
    softplus: tl.constexpr,
    dim: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
):
    """Write the gradients of x and of the logits."""
    token, batch, place, head, channel, inside = heads_of_token(seq, heads, dim, width, block)
    slope = tl.load(
        dy + batch * dy_batch + place * dy_seq + head * dy_head + channel, inside, 0.0
    ).to(tl.float32)
    value = tl.load(x + batch * x_batch + place * x_seq + head * x_head + channel, inside, 0.0).to(
        tl.float32
    )
    column = head * g_head + (0 if headwise else channel)
    logit = tl.load(logits + batch * g_batch + place * g_seq + column, inside, 0.0).to(tl.float32)
    sigma = tl.sigmoid(logit)
    gate = gate_factor(logit, sigma, softplus)
    tl.store(
        dx + (token * heads + head) * dim + channel,
        (slope * gate).to(dx.dtype.element_ty),
        inside,
    )
    dlogit = slope * value * gate_factor_slope(sigma, softplus)
    target = dlogits + batch * dg_batch + place * dg_seq + head * dg_head
    if headwise:
        dlogit = tl.sum(dlogit, axis=1)[:, None]
        tl.store(target, dlogit.to(dlogits.dtype.element_ty), head < heads)
    else:
        tl.store(target + channel, dlogit.to(dlogits.dtype.element_ty), inside)


def gate(x: Tensor, logits: Tensor, softplus: bool) -> Tensor:
    """See attention_parts.gate."""
    batch, seq, heads, dim = x.shape
    out = torch.empty(batch, seq, heads, dim, dtype=x.dtype, device=x.device)
    grid = (batch * seq, triton.cdiv(heads, HEADS))
    _gate_kernel[grid](
        x=x,
        logits=logits,
        out=out,
        **strides_of(x=x, g=logits),
        seq=seq,
        heads=heads,
        headwise=logits.shape[-1] != dim,
        softplus=softplus,
        dim=dim,
        width=width_of(dim),
        block=HEADS,
    )
    return out


def gate_backward(dy: Tensor, x: Tensor, logits: Tensor, dlogits: Tensor, softplus: bool) -> Tensor:
    """See attention_parts.gate_backward."""
    batch, seq, heads, dim = x.shape
    dx = torch.empty(batch, seq, heads, dim, dtype=x.dtype, device=x.device)
    grid = (batch * seq, triton.cdiv(heads, HEADS))
    _gate_backward_kernel[grid](
        dy=dy,
        x=x,
        logits=logits,
        dlogits=dlogits,
        dx=dx,
        **strides_of(dy=dy, x=x, g=logits, dg=dlogits),
        seq=seq,
        heads=heads,
        headwise=logits.shape[-1] != dim,
        softplus=softplus,
        dim=dim,
        width=width_of(dim),
        block=HEADS,
    )
    return dx
