"""Causal attention with capped logits, c * tanh(scores / c) (Gemma 2, arXiv 2408.00118, section 2).

No kernel behind PyTorch's scaled_dot_product_attention caps its logits. Here they are in memory for one row of the
batch at a time, in forward and backward, and backward recomputes them, so that only q, k and v are saved.
"""

from __future__ import annotations

import torch
from torch import Tensor

from te_models.device.autograd import Context


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, cap: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output [K, G, S, H], tanh(scores / cap) and the probabilities [K, G, S, M] of q [K, G, S, H], k and v.

    All FP32. `mask` [S, M] as in softcap_attention; None: causal.
    """
    scores = (q.flatten(1, 2) @ k.mT).unflatten(1, q.shape[1:3]).mul_(scale / cap).tanh_()
    weights = _weights(scores * cap, mask)
    return (weights.flatten(1, 2) @ v).unflatten(1, q.shape[1:3]), scores, weights


def _weights(bounded: Tensor, mask: Tensor | None) -> Tensor:
    """Return the probabilities of capped scores [..., S, M], which are overwritten."""
    if mask is None:
        queries, keys = bounded.shape[-2:]
        mask = torch.ones(queries, keys, dtype=torch.bool, device=bounded.device).tril(keys - queries)
    bounded = bounded.masked_fill_(~mask, float("-inf")) if mask.dtype == torch.bool else bounded.add_(mask)
    return bounded.softmax(dim=-1)


def _row(tensor: Tensor, row: int, heads: int) -> Tensor:
    """Return row `row` of q or of its gradient [B, N, S, H] as FP32 [K, N/K, S, H]."""
    return tensor[row].float().unflatten(0, (heads, -1))


class _SoftcapAttention(torch.autograd.Function):
    """See softcap_attention."""

    @staticmethod
    def forward(
        ctx: Context, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, cap: float
    ) -> Tensor:  # fmt: skip
        """Return [B, N, S, H]."""
        ctx.save_for_backward(q, k, v)
        ctx.mask, ctx.numbers = mask, (scale, cap)  # all layers share the mask
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for row in range(len(q)):
            own = _row(q, row, k.shape[1]), k[row].float(), v[row].float()
            out[row] = _attend(*own, _of_row(mask, row), scale, cap)[0].flatten(0, 1)
        return out

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k and v."""
        (dy,) = grads
        q, k, v = ctx.saved_tensors
        (scale, cap), heads = ctx.numbers, k.shape[1]
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for row in range(len(q)):
            own = _row(q, row, heads), k[row].float(), v[row].float()
            _, capped, weights = _attend(*own, _of_row(ctx.mask, row), scale, cap)
            slope = _row(dy, row, heads).flatten(1, 2)
            dv[row] = weights.flatten(1, 2).mT @ slope
            change = (slope @ own[2].mT).unflatten(1, weights.shape[1:3])
            change = weights * (change - (change * weights).sum(-1, keepdim=True))
            change = (change * (1 - capped * capped) * scale).flatten(1, 2)
            dq[row] = (change @ own[1]).unflatten(1, weights.shape[1:3]).flatten(0, 1)
            dk[row] = change.mT @ own[0].flatten(1, 2)
        return dq, dk, dv, None, None, None


def _of_row(mask: Tensor | None, row: int) -> Tensor | None:
    """Return the mask [S, M] of one row, from [S, M] or [B or 1, 1, S, M]."""
    return mask if mask is None or mask.dim() == 2 else mask[row if len(mask) > 1 else 0, 0]


def softcap_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, cap: float) -> Tensor:
    """Return attention with the logits cap * tanh(scale * q k / cap), computed in FP32.

    q [B, N, S, H]; k, v [B, K, M, H] with N a multiple of K; returns [B, N, S, H] in q's dtype. `mask` [S, M] or
    [B, 1, S, M] (bool, or added to the capped logits) selects the keys that a query sees; None: those up to its
    own, where the queries belong to the last S keys.
    """
    if torch.compiler.is_compiling():  # a graph has no loop over a batch of any size
        queries, (keys, values) = q.float(), (t.float().repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        scores = (queries @ keys.mT).mul(scale / cap).tanh()
        return (_weights(scores * cap, mask) @ values).to(q.dtype)
    return _SoftcapAttention.apply(q, k, v, mask, scale, cap)
