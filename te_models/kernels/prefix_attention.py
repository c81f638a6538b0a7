"""Causal attention of the last queries of a row to all of its keys, as context parallelism needs it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from te_models.device.allocations import on_gpu
from te_models.device.autograd import Context
from te_models.device.operations import count_flops
from te_models.kernels.sdpa import (
    attention_flops,
    attention_mask,
    attention_without_data,
    backward_workspace,
    causal_attention,
    gradient_like,
    suits_cudnn,
)


def prefix_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
    """Return attention in which the i-th of S queries sees the keys 0 to M - S + i.

    q [B, N, S, H]; k, v [B, K, M, H] with N a multiple of K and M at least S; returns [B, N, S, H]. `scale` is the
    factor on the products of q and k; None: H ** -0.5.
    """
    seq = q.shape[2]
    before = k.shape[2] - seq
    if before == 0:
        return causal_attention(q, k, v, scale=scale)
    if not on_gpu(q) or q.dtype.itemsize != 2:
        rows = slice(before, before + seq)
        mask = attention_mask(rows.stop, None, None, None, q.device, rows=rows)
        return causal_attention(q, k, v, mask, scale=scale)
    if suits_cudnn(seq, q.shape[-1], q.dtype):
        return _TwoParts.apply(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale)
    if q.is_meta:
        return attention_without_data(q, k, v, None)
    # Imports TorchDynamo, which takes a second.
    from torch.nn.attention.bias import causal_lower_right  # noqa: PLC0415

    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=causal_lower_right(seq, before + seq),
            enable_gqa=q.shape[1] != k.shape[1],
            scale=scale,
        )


class _TwoParts(torch.autograd.Function):
    """Attention by cuDNN's kernels: to the keys before the queries, and causally to the queries' own.

    cuDNN counts causal queries and keys from the same first slot. The softmax over both parts follows from their
    logarithms of sums, and with the whole one each part's backward gives its part of the gradients (the online softmax,
    Milakov and Gimelshein 2018, arXiv 1805.02867; in parts, Liu et al. 2023, arXiv 2310.01889).
    """

    @staticmethod
    def forward(ctx: Context, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        before = k.shape[2] - q.shape[2]
        old = _cudnn(q, k[:, :, :before], v[:, :, :before], False, scale)
        new = _cudnn(q, k[:, :, before:], v[:, :, before:], True, scale)
        whole = torch.logaddexp(old[1], new[1])  # FP32, [B, N, S] or [B, N, S, 1]
        shares = [(part[1] - whole).exp().view(*q.shape[:3], 1) for part in (old, new)]
        # With the strides that cuDNN gives its outputs: see gradient_like.
        out = torch.empty_like(q)
        torch.add(old[0] * shares[0], new[0] * shares[1], out=out)
        ctx.save_for_backward(q, k, v, out, whole)
        ctx.scale = scale
        ctx.random = [(part[6], part[7]) for part in (old, new)]  # seeds and offsets of no dropout
        return out

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sum = ctx.saved_tensors
        before = k.shape[2] - q.shape[2]
        slope = gradient_like(grads[0], out.stride())
        parts = []
        slots = (slice(0, before), slice(before, None))
        for causal, seen, random in zip((False, True), slots, ctx.random, strict=True):
            keys = k[:, :, seen]
            values = v[:, :, seen]
            parts.append(
                _cudnn_backward(
                    slope,
                    q,
                    k=keys,
                    v=values,
                    out=out,
                    log_sum=log_sum,
                    random=random,
                    causal=causal,
                    scale=ctx.scale,
                )
            )
        old, new = parts
        return old[0] + new[0], torch.cat((old[1], new[1]), 2), torch.cat((old[2], new[2]), 2), None


def _cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Any:
    """Return cuDNN's attention and what its backward needs: the output and the logarithms of sums come first."""
    if q.is_meta:
        return _cudnn_without_data(q, k, v, causal)
    return torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )


def _cudnn_backward(
    slope: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sum: Tensor,
    random: tuple[Tensor, Tensor],
    causal: bool,
    scale: float,
) -> Any:
    """Return the gradients of q, k and v, given the output's, the output and the logarithms of all sums."""
    if q.is_meta:
        workspace = backward_workspace(q)
        gradients = [torch.empty_like(x) for x in (q, k, v)]
        del workspace
        return gradients
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        slope,
        q,
        k,
        v,
        out,
        log_sum,
        *random,
        None,
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal,
        scale=scale,
    )


def _cudnn_without_data(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> list[Any]:
    """Return the results of `_cudnn` that are used, on meta, and count its operations."""
    # Causal queries see half of the pairs, all others each key.
    count_flops(q, attention_flops(q, k, v) * (1 if causal else 2))
    log_sum = q.new_empty(q.shape[:3], dtype=torch.float32)
    seed = q.new_empty((), dtype=torch.int64)
    return [torch.empty_like(q), log_sum, None, None, None, None, seed, seed]
