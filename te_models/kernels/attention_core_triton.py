"""The elementwise parts of attention_core in Triton: each tensor is read once and written once, in any layout.

A program handles a few heads of one token. Tested against the plain operations through Triton's interpreter on a CPU
(TRITON_INTERPRET=1).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_models.kernels.attention_core import Operations

HEADS = 8  # heads a program


@triton.jit
def _rotate_kernel(
    x, out, cos, sin,
    x_batch, x_seq, x_head, out_batch, out_seq, out_head, table_batch, table_seq,
    seq, heads,
    sign: tl.constexpr, half: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, place = token // seq, token % seq
    head = part * block + tl.arange(0, block)[:, None]
    channel = tl.arange(0, half)[None, :]
    inside = (head < heads) & (channel >= 0)
    source = x + batch * x_batch + place * x_seq + head * x_head + channel
    target = out + batch * out_batch + place * out_seq + head * out_head + channel
    angle = batch * table_batch + place * table_seq + channel
    first = tl.load(source, inside).to(tl.float32)
    second = tl.load(source + half, inside).to(tl.float32)
    c, s = tl.load(cos + angle).to(tl.float32), tl.load(sin + angle).to(tl.float32) * sign
    tl.store(target, (first * c - second * s).to(out.dtype.element_ty), inside)
    tl.store(target + half, (second * c + first * s).to(out.dtype.element_ty), inside)


@triton.jit
def _copy_kernel(
    x, out,
    x_batch, x_seq, x_head, out_batch, out_seq, out_head,
    seq, heads,
    dim: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, place = token // seq, token % seq
    head = part * block + tl.arange(0, block)[:, None]
    channel = tl.arange(0, dim)[None, :]
    inside = (head < heads) & (channel >= 0)
    value = tl.load(x + batch * x_batch + place * x_seq + head * x_head + channel, inside)
    tl.store(out + batch * out_batch + place * out_seq + head * out_head + channel, value, inside)


@triton.jit
def _gate_kernel(
    x, logits, out,
    x_batch, x_seq, x_head, g_batch, g_seq, g_head,
    seq, heads,
    headwise: tl.constexpr, dim: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, place = token // seq, token % seq
    head = part * block + tl.arange(0, block)[:, None]
    channel = tl.arange(0, dim)[None, :]
    inside = (head < heads) & (channel >= 0)
    value = tl.load(x + batch * x_batch + place * x_seq + head * x_head + channel, inside).to(tl.float32)
    column = head * g_head + (0 if headwise else channel)
    opening = tl.sigmoid(tl.load(logits + batch * g_batch + place * g_seq + column, inside).to(tl.float32))
    tl.store(out + (token * heads + head) * dim + channel, (value * opening).to(out.dtype.element_ty), inside)


@triton.jit
def _gate_backward_kernel(
    dy, x, logits, dlogits, dx,
    dy_batch, dy_seq, dy_head, x_batch, x_seq, x_head, g_batch, g_seq, g_head, dg_batch, dg_seq, dg_head,
    seq, heads,
    headwise: tl.constexpr, dim: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, place = token // seq, token % seq
    head = part * block + tl.arange(0, block)[:, None]
    channel = tl.arange(0, dim)[None, :]
    inside = (head < heads) & (channel >= 0)
    slope = tl.load(dy + batch * dy_batch + place * dy_seq + head * dy_head + channel, inside, 0.0).to(tl.float32)
    value = tl.load(x + batch * x_batch + place * x_seq + head * x_head + channel, inside, 0.0).to(tl.float32)
    column = head * g_head + (0 if headwise else channel)
    opening = tl.sigmoid(tl.load(logits + batch * g_batch + place * g_seq + column, inside, 0.0).to(tl.float32))
    tl.store(dx + (token * heads + head) * dim + channel, (slope * opening).to(dx.dtype.element_ty), inside)
    change = slope * value * opening * (1 - opening)
    target = dlogits + batch * dg_batch + place * dg_seq + head * dg_head
    if headwise:
        change = tl.sum(change, axis=1)[:, None]
        tl.store(target, change.to(dlogits.dtype.element_ty), head < heads)
    else:
        tl.store(target + channel, change.to(dlogits.dtype.element_ty), inside)


def rotate(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> None:
    """attention_core.rotate."""
    batch, seq, heads, dim = x.shape
    table = (cos.stride(0) if cos.ndim == 3 else 0, cos.stride(-2))
    grid = (batch * seq, triton.cdiv(heads, HEADS))
    _rotate_kernel[grid](
        x, out, cos, sin, *x.stride()[:3], *out.stride()[:3], *table, seq, heads,
        sign=-1.0 if inverse else 1.0, half=dim // 2, block=HEADS,
    )  # fmt: skip


def copy(x: Tensor, out: Tensor) -> None:
    """attention_core.copy."""
    batch, seq, heads, dim = x.shape
    grid = (batch * seq, triton.cdiv(heads, HEADS))
    _copy_kernel[grid](x, out, *x.stride()[:3], *out.stride()[:3], seq, heads, dim=dim, block=HEADS)


def gate(x: Tensor, logits: Tensor) -> Tensor:
    """attention_core.gate."""
    batch, seq, heads, dim = x.shape
    out = torch.empty(batch, seq, heads, dim, dtype=x.dtype, device=x.device)
    grid = (batch * seq, triton.cdiv(heads, HEADS))
    _gate_kernel[grid](
        x,
        logits,
        out,
        *x.stride()[:3],
        *logits.stride()[:3],
        seq,
        heads,
        headwise=logits.shape[-1] != dim,
        dim=dim,
        block=HEADS,
    )
    return out


def gate_backward(dy: Tensor, x: Tensor, logits: Tensor, dlogits: Tensor) -> Tensor:
    """attention_core.gate_backward."""
    batch, seq, heads, dim = x.shape
    dx = torch.empty(batch, seq, heads, dim, dtype=x.dtype, device=x.device)
    grid = (batch * seq, triton.cdiv(heads, HEADS))
    _gate_backward_kernel[grid](
        dy,
        x,
        logits,
        dlogits,
        dx,
        *dy.stride()[:3],
        *x.stride()[:3],
        *logits.stride()[:3],
        *dlogits.stride()[:3],
        seq,
        heads,
        headwise=logits.shape[-1] != dim,
        dim=dim,
        block=HEADS,
    )
    return dx


TRITON = Operations(rotate, copy, gate, gate_backward)
