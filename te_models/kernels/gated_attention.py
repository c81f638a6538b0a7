"""Everything between the two GEMMs of attention as one operation: RoPE, causal attention, the output gate.

Composed of separate operations, it would copy q, k and v in forward and backward to change their layout, and its
backward would concatenate four gradients into one: 12 of 183 ms per step at 1B on an H200. Here q and k are rotated
where qkvg_proj wrote them, attention reads views, and the backward writes each gradient to its place in one buffer. The
rotated projection, attention's output and its log-sum-exp are saved for backward.

`Operations` are the elementwise parts: `PLAIN` here, in Triton in gated_attention_triton.py. Shapes as in
model/attention.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from te_models.config.attention import AttentionSpec, Heads
from te_models.config.layer import first_rows
from te_models.device.autograd import Context
from te_models.kernels.handover import Place, Targets
from te_models.kernels.sdpa import suits_cudnn

if TYPE_CHECKING:
    from te_models.kernels.handover_triton import FP8Data
    from te_models.kernels.span_attention_triton import Spans


def can_fuse(
    spec: AttentionSpec, tokens: int, device: torch.device, dtype: torch.dtype, spans: bool = False
) -> bool:
    """Return whether attention_core supports this attention of `tokens` tokens per row, in `spans` or causal.

    It does not with QK-norm, RoPE on a part of the channels or another of AttentionSpec.obstacles, and with sinks only
    in spans. On CUDA devices, it supports causal attention only where cuDNN's kernel would run.
    """
    if spec.obstacles:
        return False
    return spans or (
        not spec.sinks and (device.type != "cuda" or suits_cudnn(tokens, spec.heads.dim, dtype))
    )


def split_heads(
    heads: Heads, qkvg: Tensor, batch: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return views of qkvg [B*S, Q]: q [B, S, A, H], k and v [B, S, K, H], the gate [B, S, A, H or 1] or None."""
    rows = [section.stored for section in heads.sections]
    q, k, v, rest = qkvg.unflatten(0, (batch, -1)).split(rows, dim=-1)
    q, k, v = (t.unflatten(-1, (-1, heads.dim)) for t in (q, k, v))
    if heads.gate == "none":
        return q, k, v, None
    if heads.gate == "elementwise":
        return q, k, v, rest.unflatten(-1, (heads.query, heads.dim))
    return q, k, v, rest[..., : heads.query, None]  # one column per head, and padding


class Operations(NamedTuple):
    """The elementwise parts; tensors are [B, S, heads, H] with contiguous channels and any other strides.

    With `fp8` None they write no FP8. `spans` makes the Spans of documents and windows; None: those are masks.
    """

    rotate: Callable[[Tensor, Tensor, Tensor, Tensor, bool], None]
    copy: Callable[[Tensor, Tensor], None]
    gate: Callable[[Tensor, Tensor], Tensor]
    gate_backward: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    fp8: FP8Operations | None = None
    spans: Callable[[int, int | None, Tensor | None, torch.device], Spans] | None = None


class FP8Operations(NamedTuple):
    """The last operations of forward and backward, which write FP8 [N, K] and transposed [K, N] from column `first` on.

    Tensors as above; `place` is a target's (engine.native.Target). `new` makes the FP8Data to write to.
    """

    new: Callable[[int, int, torch.device], FP8Data]
    gate: Callable[..., None]  # (out, place, first, x, logits or None)
    rotate: Callable[..., None]  # (out, place, first, x, cos, sin, inverse)
    gate_backward: Callable[..., Tensor]  # (out, place, first, dy, x, logits): the gradient for x


def rotate(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> None:
    """Write RoPE of x, or its inverse (which is its gradient), into `out`, which may be x.

    cos, sin [S, H] or [B, S, H], whose halves repeat.
    """
    cos = cos.unsqueeze(-2).float()  # [S, 1, H] or [B, S, 1, H]
    sin = sin.unsqueeze(-2).float()
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1) * sin
    out.copy_(x.float() * cos + (-turned if inverse else turned))


def copy(x: Tensor, out: Tensor) -> None:
    """Write x into `out`."""
    out.copy_(x)


def gate(x: Tensor, logits: Tensor) -> Tensor:
    """Return x [B, S, A, H] * sigmoid(logits [B, S, A, H or 1]), contiguous, computed in FP32."""
    return (x.float() * torch.sigmoid(logits.float())).to(x.dtype).contiguous()


def gate_backward(dy: Tensor, x: Tensor, logits: Tensor, dlogits: Tensor) -> Tensor:
    """Return the gradient of `gate` for x, contiguous; that for the logits is written into `dlogits`."""
    opening = torch.sigmoid(logits.float())
    slope = dy.float() * x.float() * opening * (1 - opening)
    dlogits.copy_(slope if logits.shape[-1] == x.shape[-1] else slope.sum(-1, keepdim=True))
    return (dy.float() * opening).to(dy.dtype).contiguous()


PLAIN = Operations(rotate, copy, gate, gate_backward)


class _AttentionCore(torch.autograd.Function):
    """See attention_core."""

    @staticmethod
    def forward(
        ctx: Context,
        qkvg: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        sinks: Tensor | None,
        batch: int,
        rows: int,
        heads: Heads,
        ops: Operations,
        targets: Targets,
        spans: Spans | None,
    ) -> Tensor:
        """Return [B*S, A*H] of qkvg [N, Q]; rotates q and k in place."""
        # The operations need contiguous channels. Detached: autograd refuses in-place changes to a view that another
        # function returned.
        qkvg = qkvg.detach().contiguous()
        q, k, v, logits = split_heads(
            heads, qkvg[:rows], batch
        )  # q [B, S, A, H], k and v [B, S, K, H]
        if cos is not None and sin is not None:
            ops.rotate(q, q, cos, sin, False)
            ops.rotate(k, k, cos, sin, False)
        out, *kept = _attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), spans, sinks
        )
        # FP8 is written for all rows and columns, and a headwise gate's gradient would need a sum over channels that
        # several programs of the kernel share.
        whole = (
            ops.fp8 is not None and not _has_filling(qkvg, rows, heads) and heads.gate != "headwise"
        )
        gradient, target = targets if whole else (None, None)
        ctx.setting = (batch, rows, heads, ops, gradient, spans)
        ctx.plain = [value for value in kept if not isinstance(value, Tensor)]
        ctx.places = [isinstance(value, Tensor) for value in kept]
        ctx.save_for_backward(
            qkvg, cos, sin, sinks, out, *(value for value in kept if isinstance(value, Tensor))
        )
        mixed = out.transpose(1, 2)  # [B, S, A, H]
        if target is not None and ops.fp8 is not None:
            fp8 = ops.fp8.new(rows, heads.query * heads.dim, qkvg.device)
            ops.fp8.gate(fp8, target.place, 0, mixed, logits)
            return target.tensor(fp8, qkvg.dtype)
        return (mixed if logits is None else ops.gate(mixed, logits)).reshape(rows, -1)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of qkvg, made in one buffer, and of the sinks."""
        dy = grads[0].contiguous()  # that of a sum, for example, is one number with strides of 0
        batch, rows, heads, ops, target, spans = ctx.setting
        qkvg, cos, sin, sinks, out, *tensors = ctx.saved_tensors
        dsinks: Tensor | None = None
        plain = iter(ctx.plain)
        tensors = iter(tensors)
        kept = [next(tensors) if place else next(plain) for place in ctx.places]
        q, k, v, logits = split_heads(heads, qkvg[:rows], batch)
        dy = dy.view(batch, -1, heads.query, heads.dim)  # [B, S, A, H]
        mixed = out.transpose(1, 2)

        def slopes(dmixed: Tensor) -> list[Tensor]:
            nonlocal dsinks
            own = (
                dmixed.transpose(1, 2),
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                out,
                kept,
            )
            *found, dsinks = _attention_backward(*own, spans, sinks)
            return [t.transpose(1, 2) for t in found]

        if target is not None:
            fp8 = ops.fp8.new(*qkvg.shape, qkvg.device)
            _write_fp8(fp8, target.place, heads, ops.fp8, dy, mixed, logits, cos, sin, slopes)
            return target.tensor(fp8, qkvg.dtype), None, None, dsinks, *[None] * 6
        grad = torch.zeros_like(qkvg) if _has_filling(qkvg, rows, heads) else torch.empty_like(qkvg)
        gq, gk, gv, glogits = split_heads(
            heads, grad[:rows], batch
        )  # views, which the operations below write to
        dq, dk, dv = slopes(dy if logits is None else ops.gate_backward(dy, mixed, logits, glogits))
        for slope, place in ((dq, gq), (dk, gk)):
            if cos is None:
                ops.copy(slope, place)
            else:
                ops.rotate(slope, place, cos, sin, True)
        ops.copy(dv, gv)
        return grad, None, None, dsinks, *[None] * 6


def _write_fp8(
    out: FP8Data,
    place: Place,
    heads: Heads,
    ops: FP8Operations,
    dy: Tensor,
    mixed: Tensor,
    logits: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    slopes: Callable[[Tensor], list[Tensor]],
) -> None:
    """Write the backward's gradient [q | k | v | gate] as FP8; `slopes` is attention's own backward."""
    starts = first_rows(heads.sections)
    dmixed = dy if logits is None else ops.gate_backward(out, place, starts[3], dy, mixed, logits)
    dq, dk, dv = slopes(dmixed)
    for slope, first in ((dq, starts[0]), (dk, starts[1])):
        if cos is None:
            ops.gate(out, place, first, slope, None)
        else:
            ops.rotate(out, place, first, slope, cos, sin, True)
    ops.gate(out, place, starts[2], dv, None)


def _has_filling(qkvg: Tensor, rows: int, heads: Heads) -> bool:
    """Return whether qkvg has padding rows or columns, whose gradient is zero."""
    return len(qkvg) != rows or any(section.used != section.stored for section in heads.sections)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, spans: Spans | None, sinks: Tensor | None
) -> tuple[Any, ...]:
    """Return the output of attention of [B, heads, S, H], in `spans` or causal, and what its backward needs."""
    if spans is not None:
        return spans.forward(q, k, v, sinks=sinks)
    if q.is_cuda:
        return torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, True, False
        )
    group = q.shape[1] // k.shape[1]
    wide = [t.float().repeat_interleave(group, 1) for t in (k, v)]
    out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.float(), *wide, 0.0, True
    )
    return out.to(q.dtype), log_sum


def _attention_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    kept: list[Any],
    spans: Spans | None,
    sinks: Tensor | None,
) -> tuple[Any, ...]:
    """Return the gradients of q, k and v, and of sinks, None where there are none."""
    if spans is not None:
        return spans.backward(dy, q, k, v, out, *kept, sinks=sinks)
    if q.is_cuda:
        log_sum, cum_q, cum_k, max_q, max_k, seed, offset, _ = kept
        return *torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            dy, q, k, v, out, log_sum, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, True
        ), None
    group = q.shape[1] // k.shape[1]
    wide = [t.float().repeat_interleave(group, 1) for t in (k, v)]
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dy.float(), q.float(), *wide, out.float(), kept[0], 0.0, True
    )
    return dq, *(t.unflatten(1, (-1, group)).sum(2) for t in (dk, dv)), None


def attention_core(
    qkvg: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    batch: int,
    seq: int,
    heads: Heads,
    ops: Operations = PLAIN,
    targets: Targets = (None, None),
    spans: Spans | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return gate(attention(rope(q), rope(k), v)) [B*S, A*H] of the projection qkvg [N, Q], N >= B*S.

    cos, sin [S, H] or [B, S, H], None for a layer without RoPE. **Overwrites q and k in qkvg**, which nothing else
    may use: te.Linear does not save its output. `targets` (kernels.handover.targets): where the gradient of
    qkvg and the result may be written as FP8. `spans` (Operations.spans): the keys that each query sees; None: all
    before it. `sinks` [A]: logits in the denominators of its softmax, only with spans.
    """
    return _AttentionCore.apply(
        qkvg, cos, sin, sinks, batch, batch * seq, heads, ops, targets, spans
    )
