"""Everything between the two GEMMs of attention as one operation: QK-norm, RoPE, causal attention, the output gate.

Composed of separate operations, it would copy q, k and v in forward and backward to change their layout, and its
backward would concatenate four gradients into one: 12 of 183 ms per step at 1B on an H200. Here attention reads views
of qkvg_proj's output, and the backward writes each gradient to its place in one buffer.

Without QK-norm, q and k are rotated where qkvg_proj wrote them, since the inverse rotation is all that backward needs.
With it, backward needs them as they were: forward writes normed and rotated copies, which live until attention has run,
and backward makes them again. Saved for backward are the projection, attention's output and its log-sum-exp.

`Operations` are the elementwise parts: `PLAIN` in attention_parts.py, in Triton in gated_attention_triton.py. Shapes as
in model/attention.py.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from te_models.config.attention import Heads
from te_models.config.layer import first_rows
from te_models.device.allocations import on_gpu
from te_models.device.autograd import Context
from te_models.kernels import flash_4
from te_models.kernels.attention_parts import (
    PLAIN,
    FP8Operations,
    Norm,
    Operations,
    Rotation,
    split_heads,
)
from te_models.kernels.handover import CastTarget, CastTargets
from te_models.kernels.sdpa import backward_workspace

if TYPE_CHECKING:
    from te_models.kernels.span_attention_triton import Spans

# The sections of a projection [q | k | v | gate], in the order of `split_heads` and `Heads.sections`.
Q, K, V, GATE = range(4)


@dataclass(frozen=True)
class AttentionSetting:
    """Options of attention_core; the tensors among them have no gradients."""

    batch: int
    rows: int  # tokens, without the rows of padding
    heads: Heads
    query_rotation: Rotation | None = None
    key_rotation: Rotation | None = None
    eps: float = 0.0  # of the norms of q and k
    zero_centered: bool = False
    scale: float | None = None  # the factor on the products of q and k; None: H ** -0.5
    cap: float | None = None
    softplus: bool = False  # the gate is a softplus rather than a sigmoid
    spans: Spans | None = None
    ops: Operations = PLAIN
    targets: CastTargets = (None, None)

    def norm(self, weight: Tensor | None) -> Norm | None:
        """Return the norm with this weight."""
        return None if weight is None else Norm(weight, self.eps, self.zero_centered)


class _AttentionCore(torch.autograd.Function):
    """See attention_core."""

    @staticmethod
    def forward(
        ctx: Context,
        qkvg: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        sinks: Tensor | None,
        setting: AttentionSetting,
    ) -> Tensor:
        """Return [B*S, A*H] of qkvg [N, Q]; without QK-norm, rotates q and k in place."""
        # The operations need contiguous channels. Detached: autograd refuses in-place changes to a view that another
        # function returned.
        qkvg = qkvg.detach().contiguous()
        heads = setting.heads
        ops = setting.ops
        rows = setting.rows
        q, k, v, logits = rotated_heads(qkvg[:rows], q_weight, k_weight, setting)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, heads, S, H]
        ctx.kernel = _kernel_for(q, sinks, setting)
        out, *saved = _attention(q, k, v, sinks, setting, ctx.kernel)
        gradient, target = _targets(qkvg, q_weight, setting)
        # The target of the output has been used; keeping it would keep its quantizer alive until backward.
        ctx.setting = dataclasses.replace(setting, targets=(gradient, None))
        # A kernel keeps tensors and numbers (seeds, lengths) for its backward; autograd saves only tensors.
        tensors = [value for value in saved if isinstance(value, Tensor)]
        ctx.kernel_state = [None if isinstance(value, Tensor) else value for value in saved]
        ctx.is_tensor = [isinstance(value, Tensor) for value in saved]
        ctx.save_for_backward(qkvg, q_weight, k_weight, sinks, out, *tensors)
        mixed = out.transpose(1, 2)  # [B, S, A, H]
        if target is not None and ops.fp8 is not None:
            fp8 = ops.fp8.new(rows, heads.query * heads.dim, qkvg.device)
            ops.fp8.gate(
                fp8,
                target.cast_scale,
                0,
                mixed,
                logits,
                setting.softplus,
                counts=target.counts,
            )
            return target.tensor(fp8, qkvg.dtype)
        gated = mixed if logits is None else ops.gate(mixed, logits, setting.softplus)
        return gated.reshape(rows, -1)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of qkvg, made in one buffer, of the norms' weights and of the sinks."""
        # The gradient of a sum, for example, is one number with strides of 0, which kernels cannot read.
        dy = grads[0].contiguous()
        setting: AttentionSetting = ctx.setting
        heads = setting.heads
        qkvg, q_weight, k_weight, sinks, out, *tensors = ctx.saved_tensors
        # In the order in which attention returned them.
        kernel_state = list(ctx.kernel_state)
        for place, is_tensor in enumerate(ctx.is_tensor):
            if is_tensor:
                kernel_state[place] = tensors.pop(0)
        q, k, v, logits = split_heads(heads, qkvg[: setting.rows], setting.batch)
        into = _gradient(qkvg, setting)
        dmixed = dy.view(setting.batch, -1, heads.query, heads.dim)  # [B, S, A, H]
        if logits is not None:
            dmixed = into.gate(dmixed, out.transpose(1, 2), logits)
        normed_q, normed_k = _normed(q, k, q_weight, k_weight, setting)
        # Attention's own gradients are [B, heads, S, H], as its inputs are; all others here [B, S, heads, H].
        dq, dk, dv, dsinks = _attention_backward(
            dmixed.transpose(1, 2),
            normed_q.transpose(1, 2),
            k=normed_k.transpose(1, 2),
            v=v.transpose(1, 2),
            out=out,
            saved=kernel_state,
            sinks=sinks,
            setting=setting,
            kernel=ctx.kernel,
        )
        # Copies of q and k: free them before the gradients are written, where the peak is.
        del normed_q, normed_k
        dq_weight = into.heads(
            Q, dq.transpose(1, 2), q, norm=setting.norm(q_weight), rotation=setting.query_rotation
        )
        dk_weight = into.heads(
            K, dk.transpose(1, 2), k, norm=setting.norm(k_weight), rotation=setting.key_rotation
        )
        into.heads(V, dv.transpose(1, 2), v, norm=None, rotation=None)
        return into.whole(), dq_weight, dk_weight, dsinks, None


def rotated_heads(
    qkvg: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, setting: AttentionSetting
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return q [B, S, A, H], k and v [B, S, K, H] as attention takes them, and the gate's logits or None.

    Without QK-norm q and k are rotated in place in qkvg [B*S, Q], whose channels are contiguous; with it they are
    copies.
    """
    ops = setting.ops
    q, k, v, logits = split_heads(setting.heads, qkvg, setting.batch)
    # In place: backward needs only the inverse rotation. A norm would destroy what its backward reads, so it copies.
    rotation = setting.key_rotation
    same_rotation = rotation is not None and rotation is setting.query_rotation
    if same_rotation and q_weight is None and k_weight is None and _are_beside(q, k):
        # Queries and keys as heads of one tensor [B, S, A + K, H]: one launch in place of two.
        both = q.as_strided((*q.shape[:2], q.shape[2] + k.shape[2], q.shape[3]), q.stride())
        ops.rotate(both, both, rotation, False)
        return q, k, v, logits
    if q_weight is None and setting.query_rotation is not None:
        ops.rotate(q, q, setting.query_rotation, False)
    if k_weight is None and setting.key_rotation is not None:
        ops.rotate(k, k, setting.key_rotation, False)
    q, k = _normed(q, k, q_weight, k_weight, setting)
    return q, k, v, logits


def _are_beside(q: Tensor, k: Tensor) -> bool:
    """Return whether in memory each token's heads of k [B, S, K, H] follow its heads of q [B, S, A, H]."""
    end_of_q = q.storage_offset() + q.shape[2] * q.stride(2)
    return q.stride() == k.stride() and k.storage_offset() == end_of_q


def _targets(qkvg: Tensor, q_weight: Tensor | None, setting: AttentionSetting) -> CastTargets:
    """Return the targets of the setting that the kernels can write, for the gradient of qkvg and for the output."""
    heads = setting.heads
    if setting.ops.fp8 is None:
        return None, None
    # The kernels write FP8 for all rows and columns. The gradient of a headwise gate is a sum over the channels of a
    # head, which several programs of a kernel would share.
    if _has_padding(qkvg, setting.rows, heads) or heads.gate == "headwise":
        return None, None
    gradient, output = setting.targets
    # So would they share the sums of a norm over all heads of a token.
    norm_over_all_heads = q_weight is not None and len(q_weight) != heads.dim
    if norm_over_all_heads:
        return None, output
    return gradient, output


def _normed(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    setting: AttentionSetting,
) -> tuple[Tensor, Tensor]:
    """Return q and k after QK-norm and RoPE; without QK-norm, themselves, which are rotated already."""
    if (norm := setting.norm(q_weight)) is not None:
        q = setting.ops.norm(q, norm, setting.query_rotation)
    if (norm := setting.norm(k_weight)) is not None:
        k = setting.ops.norm(k, norm, setting.key_rotation)
    return q, k


class _PlainGradient:
    """The gradient of qkvg, in one buffer of its dtype, filled section by section."""

    def __init__(self, qkvg: Tensor, setting: AttentionSetting) -> None:
        self.ops = setting.ops
        self.softplus = setting.softplus
        # Only padding has no writer of its own.
        padded = _has_padding(qkvg, setting.rows, setting.heads)
        self.grad = torch.zeros_like(qkvg) if padded else torch.empty_like(qkvg)
        # Views [B, S, heads, H or 1], which the operations write to.
        self.places = split_heads(setting.heads, self.grad[: setting.rows], setting.batch)

    def gate(self, dy: Tensor, mixed: Tensor, logits: Tensor) -> Tensor:
        """Write the gradient of the gate's logits; return the gradient of attention's output."""
        place = self.places[GATE]
        assert place is not None
        return self.ops.gate_backward(dy, mixed, logits, place, self.softplus)

    def heads(
        self, section: int, slope: Tensor, x: Tensor, norm: Norm | None, rotation: Rotation | None
    ) -> Tensor | None:
        """Write the gradient of q, k or v before norm and RoPE, given attention's; return the norm weight's."""
        place = self.places[section]
        assert place is not None
        if norm is not None:
            dweight = self.ops.norm_backward(slope, x, norm, rotation, place)
            return dweight.to(norm.weight.dtype)
        if rotation is None:
            self.ops.copy(slope, place)
        else:
            self.ops.rotate(slope, place, rotation, True)
        return None

    def whole(self) -> Tensor:
        """Return the buffer [N, Q]."""
        return self.grad


class _FP8Gradient:
    """The gradient of qkvg written as FP8 for qkvg_proj, data and transposed copy at once."""

    def __init__(
        self, qkvg: Tensor, setting: AttentionSetting, target: CastTarget, fp8: FP8Operations
    ) -> None:
        self.ops = fp8
        self.softplus = setting.softplus
        self.target = target
        self.counts = target.counts
        self.dtype = qkvg.dtype
        self.starts = first_rows(setting.heads.sections)
        rows, columns = qkvg.shape
        self.out = fp8.new(rows, columns, qkvg.device)

    def gate(self, dy: Tensor, mixed: Tensor, logits: Tensor) -> Tensor:
        """Write the gradient of the gate's logits in FP8; return the gradient of attention's output."""
        scale = self.target.cast_scale
        start = self.starts[GATE]
        return self.ops.gate_backward(
            self.out, scale, start, dy, mixed, logits, self.softplus, counts=self.counts
        )

    def heads(
        self, section: int, slope: Tensor, x: Tensor, norm: Norm | None, rotation: Rotation | None
    ) -> Tensor | None:
        """Write the gradient of q, k or v in FP8, before norm and RoPE, given attention's; return the norm weight's."""
        out = self.out
        scale = self.target.cast_scale
        start = self.starts[section]
        if norm is not None:
            dweight = self.ops.norm_backward(
                out, scale, start, slope, x, norm, rotation, counts=self.counts
            )
            return dweight.to(norm.weight.dtype)
        if rotation is None:
            # A gate without logits is a cast alone.
            self.ops.gate(out, scale, start, slope, None, False, counts=self.counts)
        else:
            self.ops.rotate(out, scale, start, slope, rotation, True, counts=self.counts)
        return None

    def whole(self) -> Tensor:
        """Return the FP8 tensor [N, Q]."""
        return self.target.tensor(self.out, self.dtype)


def _gradient(qkvg: Tensor, setting: AttentionSetting) -> _PlainGradient | _FP8Gradient:
    """Return where backward writes the gradient of qkvg."""
    target, _ = setting.targets
    if target is None or setting.ops.fp8 is None:
        return _PlainGradient(qkvg, setting)
    return _FP8Gradient(qkvg, setting, target, setting.ops.fp8)


def _has_padding(qkvg: Tensor, rows: int, heads: Heads) -> bool:
    """Return whether qkvg has padding rows or columns, whose gradient is zero."""
    if len(qkvg) != rows:
        return True
    return any(section.used != section.stored for section in heads.sections)


def _kernel_for(q: Tensor, sinks: Tensor | None, setting: AttentionSetting) -> str:
    """Return the kernel for queries [B, A, S, H]. Backward has to take the one whose results forward saved."""
    if setting.spans is not None:
        return setting.spans.kernel_for(q, sinks, setting.cap)
    if flash_4.suits(q):
        return "FlashAttention-4"
    return "cuDNN" if on_gpu(q) else "CPU"


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    setting: AttentionSetting,
    kernel: str,
) -> tuple[Any, ...]:
    """Return the output of attention [B, A, S, H], in spans or causal, and behind it what its backward needs.

    q is [B, A, S, H], k and v [B, K, S, H].
    """
    if setting.spans is not None:
        return setting.spans.forward(q, k, v, setting.scale, sinks, setting.cap, kernel)
    if kernel == "FlashAttention-4":
        return flash_4.forward(q, k, v, setting.scale)
    if kernel == "cuDNN":
        return torch.ops.aten._scaled_dot_product_cudnn_attention(
            q,
            k,
            v,
            attn_bias=None,
            compute_log_sumexp=True,
            dropout_p=0.0,
            is_causal=True,
            return_debug_mask=False,
            scale=setting.scale,
        )
    # The CPU's kernel wants a key head per query head: [B, A, S, H].
    group = q.shape[1] // k.shape[1]
    out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.float(),
        k.float().repeat_interleave(group, 1),
        v.float().repeat_interleave(group, 1),
        dropout_p=0.0,
        is_causal=True,
        scale=setting.scale,
    )
    return out.to(q.dtype), log_sum


def _attention_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    saved: list[Any],
    sinks: Tensor | None,
    setting: AttentionSetting,
    kernel: str,
) -> tuple[Any, ...]:
    """Return the gradients of q, k, v [B, heads, S, H] and of sinks, None where there are none.

    `saved` is what `_attention` returned behind its output.
    """
    scale = setting.scale
    if setting.spans is not None:
        return setting.spans.backward(
            dy, q, k, v, out, *saved, scale=scale, sinks=sinks, cap=setting.cap, kernel=kernel
        )
    if kernel == "FlashAttention-4":
        return *flash_4.backward(dy, q, k, v, out, saved[0], scale), None
    if kernel == "cuDNN":
        log_sum, cum_q, cum_k, max_q, max_k, seed, offset, _ = saved
        workspace = backward_workspace(q)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            dy,
            q,
            k,
            v,
            out,
            log_sum,
            seed,
            offset,
            None,  # no mask
            cum_q,
            cum_k,
            max_q,
            max_k,
            dropout_p=0.0,
            is_causal=True,
            scale=scale,
        )
        del workspace
        return dq, dk, dv, None
    group = q.shape[1] // k.shape[1]
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dy.float(),
        q.float(),
        k.float().repeat_interleave(group, 1),
        v.float().repeat_interleave(group, 1),
        out.float(),
        saved[0],  # log-sum-exp
        dropout_p=0.0,
        is_causal=True,
        scale=scale,
    )
    # A key head has the gradients of all query heads that read it: [B, A, S, H] to [B, K, S, H].
    dk = dk.unflatten(1, (-1, group)).sum(2)
    dv = dv.unflatten(1, (-1, group)).sum(2)
    return dq, dk, dv, None


def attention_core(
    qkvg: Tensor,
    setting: AttentionSetting,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return gate(attention(rope(norm(q)), rope(norm(k)), v)) [B*S, A*H] of the projection qkvg [N, Q], N >= B*S.

    **Without QK-norm overwrites q and k in qkvg**, which nothing else may use: te.Linear does not save its output.

    Args:
        qkvg: [q | k | v | gate] with the sections of `setting.heads`.
        setting: the shapes, norms, RoPE and gate of this attention, and the operations to use.
        q_weight: of the RMSNorm of queries [H], or of all of them together [A*H]; None: no norm.
        k_weight: of the RMSNorm of keys, likewise.
        sinks: [A], logits in the denominators of the softmax; only with `setting.spans`.
    """
    return _AttentionCore.apply(qkvg, q_weight, k_weight, sinks, setting)
