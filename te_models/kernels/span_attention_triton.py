"""Attention in which each query sees one span of keys, in Triton: documents in one row, sliding windows, or both.

Query i sees the keys `first[i]` to i. As `first` never decreases along a row, a block of queries reads the key blocks
from its first query's `first` to its own end and no others, so that the work grows with the documents, not with the
row, and no mask of [S, S] exists. With sinks, the softmax of a head begins with a logit of its own. The online softmax
and its backward are FlashAttention-2's (Dao 2023, arXiv 2307.08691), without atomic additions: the gradients are the
same in every run. Tested through Triton's interpreter on a CPU (TRITON_INTERPRET=1).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from te_models.device.autograd import Context
from te_models.kernels import flash_4
from te_models.kernels.attention_parts import adjacent_channels
from te_models.kernels.span_kernels_triton import (
    _dot_kernel,
    _forward_kernel,
    _grad_key_kernel,
    _grad_query_kernel,
)

LOG2E = 1.4426950408889634
BlockSize = tuple[int, int, int, int]  # queries, keys, warps, stages
# Channels per head, at most -> the fastest block that benchmarks/span_attention.py found on an H200. Blocks for 512
# were not timed: they are the largest that ptxas compiles without spills, in the shared memory of an Ada GPU.
FORWARD: dict[int, BlockSize] = {
    64: (64, 64, 4, 3),
    128: (64, 64, 4, 3),
    256: (64, 32, 4, 1),
    512: (64, 16, 8, 1),
}
GRAD_QUERY: dict[int, BlockSize] = {
    64: (64, 64, 4, 2),
    128: (64, 64, 4, 2),
    256: (64, 32, 4, 1),
    512: (32, 16, 8, 1),
}
GRAD_KEY: dict[int, BlockSize] = {
    64: (64, 64, 4, 2),
    128: (64, 64, 4, 2),
    256: (32, 32, 4, 1),
    512: (32, 16, 8, 1),
}


WIDEST_HERE = 128  # channels per head from which on FlashAttention-2 is faster under a window
WIDEST_FLASH = 256  # channels per head that it has kernels for


class Spans(NamedTuple):
    """The span of keys that each query sees, which ends with its own.

    `first` int32 [B or 1, S]: its first key; never decreases along a row. `last` int32 [B or 1, S]: the last query that
    sees each key. `window`: the number of keys that every query sees, where nothing else bounds the spans.
    """

    first: Tensor
    last: Tensor
    window: int | None = None

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None = None,
        sinks: Tensor | None = None,
        cap: float | None = None,
        kernel: str | None = None,
    ) -> tuple[Tensor, ...]:
        """Return attention's output [B, N, S, H], and what `backward` needs beside it.

        q [B, N, S, H]; k, v [B, K, S, H], N a multiple of K, with contiguous channels and any other strides. `scale`
        is the factor on the products of q and k; None: H ** -0.5. `sinks` [N] are logits in each softmax's denominator.
        `cap` c bounds the logits to c * tanh(logit / c). `kernel` as `kernel_for` names it; None: the one that suits.
        """
        kernel = kernel or self.kernel_for(q, sinks, cap)
        if kernel == "FlashAttention-4":
            return flash_4.forward(q, k, v, scale, self.window)
        if kernel == "FlashAttention-2":
            return self._flash_forward(q, k, v, scale)
        batch, heads, seq, dim = q.shape
        out = torch.empty(batch, seq, heads, dim, dtype=q.dtype, device=q.device).transpose(1, 2)
        log_sum = torch.empty(batch, heads, seq, dtype=torch.float32, device=q.device)
        sinks = None if sinks is None else sinks.float() * LOG2E
        factor, cap_2 = _factors(scale, dim, cap)
        block, options = _options(FORWARD, dim)
        _forward_kernel[(triton.cdiv(seq, block[0]) * batch * heads,)](
            q=q,
            k=k,
            v=v,
            sinks=sinks,
            out=out,
            log_sum=log_sum,
            first=self.first,
            **_strides(q=q, k=k, v=v, o=out),
            first_batch=self._stride,
            seq=seq,
            heads=heads,
            group=heads // k.shape[1],
            factor=factor,
            cap=cap_2,
            **options,
        )
        return out, log_sum

    def backward(
        self,
        dy: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        *saved: Tensor,
        scale: float | None = None,
        sinks: Tensor | None = None,
        cap: float | None = None,
        kernel: str | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return the gradients of q, k, v and sinks.

        `dy` is the gradient of `out` [B, N, S, H], and `saved` what `forward` returned beside it, with this `kernel`.
        """
        kernel = kernel or self.kernel_for(q, sinks, cap)
        if kernel == "FlashAttention-4":
            return *flash_4.backward(dy, q, k, v, out, *saved, scale, self.window), None
        if kernel == "FlashAttention-2":
            return *self._flash_backward(dy, q, k, v, out, saved, scale), None
        (log_sum,) = saved
        dq, dk, dv = (
            torch.empty_like(t.transpose(1, 2), memory_format=torch.contiguous_format).transpose(
                1, 2
            )
            for t in (q, k, v)
        )
        dots = self._write_gradients(dy, q, k, v, out, log_sum, dq, dk, dv, scale, cap)
        if sinks is None:
            return dq, dk, dv, None
        # A sink is a key whose value is zero; this is its weight in each query's softmax.
        weight = torch.exp2(sinks.float()[:, None] * LOG2E - log_sum)
        return dq, dk, dv, -(weight * dots).sum((0, 2)).to(sinks.dtype)

    def _write_gradients(
        self,
        dy: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        log_sum: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        scale: float | None,
        cap: float | None,
    ) -> Tensor:
        """Write dq, dk and dv; return the product of each query's output with its gradient, FP32 [B, N, S]."""
        batch, heads, seq, dim = q.shape
        key_heads = k.shape[1]
        dots = torch.empty_like(log_sum)
        _dot_kernel[(triton.cdiv(seq, 64) * batch * heads,)](
            out=out,
            dy=dy,
            dots=dots,
            **_strides(o=out, y=dy),
            seq=seq,
            heads=heads,
            dim=dim,
            width=_width(dim),
            queries=64,
        )
        factor, cap_2 = _factors(scale, dim, cap)
        # The arguments that both kernels of gradients have.
        arguments = dict(
            q=q,
            k=k,
            v=v,
            dy=dy,
            log_sum=log_sum,
            dots=dots,
            first=self.first,
            **_strides(q=q, k=k, v=v, y=dy),
            first_batch=self._stride,
            seq=seq,
            heads=heads,
            group=heads // key_heads,
            factor=factor,
            scale=_scale(scale, dim),
            cap=cap_2,
        )
        block, options = _options(GRAD_QUERY, dim)
        _grad_query_kernel[(triton.cdiv(seq, block[0]) * batch * heads,)](
            **arguments, dq=dq, **_strides(d=dq), **options
        )
        block, options = _options(GRAD_KEY, dim)
        _grad_key_kernel[(triton.cdiv(seq, block[1]) * batch * key_heads,)](
            **arguments, last=self.last, dk=dk, dv=dv, **_strides(d=dk), **options
        )
        return dots

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None = None,
        sinks: Tensor | None = None,
        cap: float | None = None,
    ) -> Tensor:
        """Return the output of `forward`, differentiable."""
        return _SpanAttention.apply(q, k, v, sinks, self, scale, cap)

    @property
    def _stride(self) -> int:
        """The distance between the rows of `first`, 0 where all rows of the batch share one."""
        return self.first.stride(0) if len(self.first) > 1 else 0

    def kernel_for(self, q: Tensor, sinks: Tensor | None, cap: float | None) -> str:
        """Return the fastest kernel for these spans of q [B, N, S, H].

        Others than ours know windows, but no documents, sinks or caps. FlashAttention-2 is faster for wide heads, 0.6
        to 0.75 of our time on an H100 (docs/results/training_speed.md); the order of its sums varies from run to run.
        The answer may change between forward and backward, with PyTorch's choice of deterministic algorithms: what
        forward saved is of one kernel, so that backward is told which.
        """
        if self.window is None or sinks is not None or cap is not None:
            return "ours"
        if flash_4.suits(q):
            return "FlashAttention-4"
        wide = WIDEST_HERE < q.shape[-1] <= WIDEST_FLASH and q.is_cuda
        if wide and not torch.are_deterministic_algorithms_enabled():
            return "FlashAttention-2"
        return "ours"

    def _flash_arguments(self, q: Tensor) -> tuple[tuple[object, ...], dict[str, object]]:
        """Return the arguments that FlashAttention's forward and backward share: row boundaries, lengths, window."""
        assert self.window is not None
        batch, _, seq, _ = q.shape
        bounds = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * seq
        window = dict(window_size_left=self.window - 1, window_size_right=0)
        return (bounds, bounds, seq, seq), window

    def _flash_forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float | None
    ) -> tuple[Tensor, ...]:
        bounds, window = self._flash_arguments(q)
        rows = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))  # [B*S, heads, H]
        out, *saved = torch.ops.aten._flash_attention_forward(
            *rows, *bounds, 0.0, True, False, scale=scale, **window
        )
        batch, heads, seq, dim = q.shape
        return out.view(batch, seq, heads, dim).transpose(1, 2), *saved[:3]

    def _flash_backward(
        self,
        dy: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        saved: tuple[Tensor, ...],
        scale: float | None,
    ) -> list[Tensor]:
        bounds, window = self._flash_arguments(q)
        log_sum, seed, offset = saved
        dy, *rows = (t.transpose(1, 2).flatten(0, 1) for t in (dy, q, k, v, out))
        grads = torch.ops.aten._flash_attention_backward(
            dy, *rows, log_sum, *bounds, 0.0, True, seed, offset, scale=scale, **window
        )
        return [grad.unflatten(0, (q.shape[0], -1)).transpose(1, 2) for grad in grads]


class _SpanAttention(torch.autograd.Function):
    """See Spans.__call__."""

    @staticmethod
    def forward(
        ctx: Context,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        spans: Spans,
        scale: float | None,
        cap: float | None,
    ) -> Tensor:
        q, k, v = map(adjacent_channels, (q, k, v))
        kernel = spans.kernel_for(q, sinks, cap)
        out, *saved = spans.forward(q, k, v, scale, sinks, cap, kernel)
        ctx.save_for_backward(q, k, v, out, sinks, spans.first, spans.last, *saved)
        ctx.window = spans.window
        ctx.options = dict(scale=scale, cap=cap, kernel=kernel)
        return out

    @staticmethod
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sinks, first, last, *saved = ctx.saved_tensors
        spans = Spans(first, last, ctx.window)
        dy = dy if dy.stride(-1) == 1 else dy.contiguous()
        grads = spans.backward(dy, q, k, v, out, *saved, sinks=sinks, **ctx.options)
        return *grads, None, None, None


def spans(seq: int, window: int | None, documents: Tensor | None, device: torch.device) -> Spans:
    """Return the spans of `seq` queries, of their own document and of at most `window` keys, themselves included.

    `documents` int [B or 1, S]: a new document begins wherever the number changes; None for one in each row.
    """
    place = torch.arange(seq, device=device)
    first = (
        torch.zeros_like(place)[None] if window is None else (place - window + 1).clamp(min=0)[None]
    )
    if documents is not None:
        begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=False)
        first = first.maximum(torch.where(begins, place, 0).cummax(dim=1).values)
    first = first.contiguous()
    last = torch.searchsorted(first, place.expand_as(first).contiguous(), right=True) - 1
    return Spans(first.int(), last.int(), window if documents is None else None)


def _strides(**tensors: Tensor) -> dict[str, int]:
    """Return the strides of batch, head and token of each tensor [B, heads, S, H], as the kernels name them."""
    strides = {}
    for name, tensor in tensors.items():
        strides[f"{name}_batch"] = tensor.stride(0)
        strides[f"{name}_head"] = tensor.stride(1)
        strides[f"{name}_seq"] = tensor.stride(2)
    return strides


def _scale(scale: float | None, dim: int) -> float:
    return dim**-0.5 if scale is None else scale


def _factors(scale: float | None, dim: int, cap: float | None) -> tuple[float, float | None]:
    """Return the arguments `factor` and `cap` of `_scores`."""
    if cap is None:
        return _scale(scale, dim) * LOG2E, None
    return _scale(scale, dim) / cap, cap * LOG2E


def _width(dim: int) -> int:
    """Return the channels of a tile: a power of two that tensor cores support."""
    return max(16, triton.next_power_of_2(dim))


def _options(blocks: dict[int, BlockSize], dim: int) -> tuple[BlockSize, dict[str, int]]:
    """Return the block of heads of `dim` channels, and the keywords of a launch."""
    queries, keys, warps, stages = block = blocks[max(64, _width(dim))]
    names = dict(
        dim=dim, width=_width(dim), queries=queries, keys=keys, num_warps=warps, num_stages=stages
    )
    return block, names
