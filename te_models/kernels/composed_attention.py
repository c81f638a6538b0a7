"""Causal attention whose softmax PyTorch's scaled_dot_product_attention does not compute, composed in FP32.

That is capped logits, c * tanh(scores / c) (Gemma 2, arXiv 2408.00118, section 2), and sinks, a logit per head in the
denominator of the softmax (gpt-oss, arXiv 2508.10925, section 2.2). The scores are in memory for one row of the batch
at a time, in forward and backward, and backward recomputes them, so that only q, k and v are saved.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from te_models.device.autograd import Context
from te_models.device.operations import one_operation
from te_models.kernels.sdpa import attention_flops


class Softmax(NamedTuple):
    """The softmax of scores: the factor on the products of queries and keys, the cap, the sinks [N]."""

    scale: float
    cap: float | None
    sinks: Tensor | None


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, softmax: Softmax
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the output of q [K, G, S, H], k and v [K, M, H], and what `_weights` makes of the scores [K, G, S, M].

    All FP32. `mask` [S, M] as in composed_attention; None: causal.
    """
    scores = (q.flatten(1, 2) @ k.mT).unflatten(1, q.shape[1:3])  # [K, N/K, S, M]
    scores, weights, share = _weights(scores, mask, softmax, (*q.shape[:2], 1, 1))
    return (weights.flatten(1, 2) @ v).unflatten(1, q.shape[1:3]), scores, weights, share


def _weights(
    scores: Tensor, mask: Tensor | None, softmax: Softmax, heads: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return products of queries and keys [..., S, M] divided by the cap, their probabilities, and the sinks'.

    The first overwrites `scores`, and is after tanh. `heads` is a shape for the sinks that broadcasts against it.
    """
    bounded = scores.mul_(softmax.scale if softmax.cap is None else softmax.scale / softmax.cap)
    if softmax.cap is not None:
        bounded = scores.tanh_() * softmax.cap
    if mask is None:
        queries, keys = scores.shape[-2:]
        mask = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).tril(
            keys - queries
        )
    if mask.dtype == torch.bool:
        bounded = bounded.masked_fill_(~mask, float("-inf"))
    else:
        bounded = bounded.add_(mask)
    if softmax.sinks is None:
        return scores, bounded.softmax(dim=-1), None
    sinks = softmax.sinks.float().view(heads)
    # The usual shift of a softmax, over keys and sink; detached, since it changes no value.
    top = bounded.detach().amax(dim=-1, keepdim=True).maximum(sinks.detach())
    weights = (bounded - top).exp()
    share = (sinks - top).exp()
    total = weights.sum(dim=-1, keepdim=True) + share
    return scores, weights / total, share / total


def _rows(q: Tensor) -> range:
    """Return the rows of the batch; without data they are all alike."""
    return range(1 if q.is_meta else len(q))


def _row(tensor: Tensor, row: int, heads: int) -> Tensor:
    """Return row `row` of q or of its gradient [B, N, S, H] as FP32 [K, N/K, S, H]."""
    return tensor[row].float().unflatten(0, (heads, -1))


class _ComposedAttention(torch.autograd.Function):
    """See composed_attention."""

    @staticmethod
    def forward(
        ctx: Context,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        mask: Tensor | None,
        scale: float,
        cap: float | None,
    ) -> Tensor:
        """Return [B, N, S, H]."""
        ctx.save_for_backward(q, k, v, sinks)
        ctx.mask = mask  # all layers share it
        ctx.numbers = (scale, cap)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for row in _rows(q):
            attended, _, _, _ = _attend(
                _row(q, row, k.shape[1]),
                k[row].float(),
                v[row].float(),
                _of_row(mask, row),
                Softmax(scale, cap, sinks),
            )
            out[row] = attended.flatten(0, 1)  # [N, S, H]
        return out

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k, v and sinks."""
        (dy,) = grads
        q, k, v, sinks = ctx.saved_tensors
        scale, cap = ctx.numbers
        softmax = Softmax(scale, cap, sinks)
        heads = k.shape[1]
        dq = torch.empty_like(q)
        dk = torch.empty_like(k)
        dv = torch.empty_like(v)
        dsinks = torch.zeros(q.shape[1], device=q.device)
        for row in _rows(q):
            queries = _row(q, row, heads)  # [K, N/K, S, H]
            keys = k[row].float()  # [K, S, H]
            values = v[row].float()
            _, capped, weights, share = _attend(
                queries, keys, values, _of_row(ctx.mask, row), softmax
            )
            slope = _row(dy, row, heads).flatten(1, 2)  # [K, N/K*S, H]
            dv[row] = weights.flatten(1, 2).mT @ slope
            # The gradient of the weights, [K, N/K, S, M].
            change = (slope @ values.mT).unflatten(1, weights.shape[1:3])
            # d softmax: each weight by its change less the mean change.
            mean = (change * weights).sum(-1, keepdim=True)
            if share is not None:
                dsinks -= (share * mean).sum((2, 3)).flatten()  # the value of a sink is zero
            change = weights * (change - mean) * softmax.scale  # of the scores
            change = (change if softmax.cap is None else change * (1 - capped * capped)).flatten(
                1, 2
            )
            dq[row] = (change @ keys).unflatten(1, weights.shape[1:3]).flatten(0, 1)
            dk[row] = change.mT @ queries.flatten(1, 2)
        return dq, dk, dv, None if sinks is None else dsinks.to(sinks.dtype), None, None, None


def _of_row(mask: Tensor | None, row: int) -> Tensor | None:
    """Return the mask [S, M] of one row, from [S, M] or [B or 1, 1, S, M]."""
    return mask if mask is None or mask.dim() == 2 else mask[row if len(mask) > 1 else 0, 0]


def composed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    cap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return attention with the logits scale * q k, which `cap` c bounds to c * tanh(logit / c), computed in FP32.

    q [B, N, S, H]; k, v [B, K, M, H] with N a multiple of K; returns [B, N, S, H] in q's dtype. `mask` [S, M] or
    [B, 1, S, M] (bool, or added to the logits) selects the keys that a query sees; None: those up to its own, where
    the queries belong to the last S keys. `sinks` [N]: a logit of each head whose exponential is added to the sum that
    the softmax divides by.
    """
    softmax = Softmax(scale, cap, sinks)
    group = q.shape[1] // k.shape[1]
    if torch.compiler.is_compiling():  # a graph has no loop over a batch of any size
        queries = q
        k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    elif q.shape[2] == 1:
        # The heads that share a key are queries of one head, so that no key is copied.
        queries = q.reshape(len(q), -1, group, q.shape[3])
        if mask is None:
            mask = q.new_zeros(1, 1)
    else:
        with one_operation(q, attention_flops(q, k, v)):
            return _ComposedAttention.apply(q, k, v, sinks, mask, scale, cap)
    _, weights, _ = _weights(queries.float() @ k.float().mT, mask, softmax, (k.shape[1], -1, 1))
    return (weights @ v.float()).to(q.dtype).reshape(q.shape)
