"""RMSNorm around the parts of a block, by our kernels or Transformer Engine's; a part of te_models.engine.native.

Transformer Engine has tuned kernels for a few widths, and general ones for the rest, which take two to three times as
long as the memory (docs/internals/kernels.md); at those widths ours run. In shapes: N rows, D the width of the residual
stream.
"""

from __future__ import annotations

import torch
import transformer_engine.pytorch  # noqa: F401  makes transformer_engine_torch known
import transformer_engine_torch as tex
from torch import Tensor
from torch.nn import Module
from transformer_engine.pytorch import DType, RMSNorm
from transformer_engine.pytorch.constants import TE_DType

import te_models.kernels.norm_fp8_triton as norm_fp8_triton
import te_models.kernels.residual_norm_triton as residual_norm_triton
from te_models.device.autograd import Context
from te_models.engine import native_inference
from te_models.engine.native_norm import LayerNormWithoutBias
from te_models.engine.native_observers import observe
from te_models.engine.native_targets import (
    PerTensorQuantizer,
    current_target_of,
    quantizer_of,
    target_of,
)
from te_models.engine.norm_widths import TUNED


def _te_norm(
    x: Tensor, weight: Tensor, module: RMSNorm, quantizer: PerTensorQuantizer | None
) -> tuple[Tensor, Tensor]:
    """Return the norm of x [N, D] by Transformer Engine's kernel, quantized or in x's dtype, and 1 / RMS, FP32 [N]."""
    # Positional, as Transformer Engine itself calls it: out (None: a new tensor), quantizer, dtype of the output,
    # multiprocessors to leave free, zero-centred weight.
    y, _, inverse = tex.rmsnorm_fwd(
        x,
        weight,
        module.eps,
        None,
        quantizer,
        TE_DType[x.dtype],
        0,
        module.zero_centered_gamma,
    )
    return y, inverse


def _is_ours(x: Tensor, weight: Tensor) -> bool:
    """Return whether our kernels compute the norm of x [N, D]: in 16 bits, at a width that has no tuned one."""
    columns = x.shape[-1]
    half = x.dtype in (torch.bfloat16, torch.float16) and weight.dtype == x.dtype
    return half and columns not in TUNED and residual_norm_triton.supports_width(columns)


class _Norm(torch.autograd.Function):
    """RMSNorm that writes FP8; its backward adds the gradient of the residual stream in the same kernel."""

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        delta: Tensor | None,
        weight: Tensor,
        module: RMSNorm,
        quantizer: PerTensorQuantizer | None,
    ) -> tuple[Tensor, Tensor]:
        """Return (y [N, D], x + delta), from x and delta [N, D].

        `quantizer` casts y for the next te.Linear, by our kernels if they know its rule of scales; None: y is in the
        dtype of x.
        """
        ctx.zero_centered = module.zero_centered_gamma
        ctx.has_delta = delta is not None
        if (target := target_of(quantizer)) is not None:
            cast_scale = target.cast_scale
            fp8, total, inverse = norm_fp8_triton.norm(
                x,
                delta,
                weight=weight,
                eps=module.eps,
                zero_centered=ctx.zero_centered,
                scale=cast_scale.scale,
                amax=cast_scale.amax,
                e5m2=cast_scale.e5m2,
                counts=target.counts,
            )
            y = target.tensor(fp8, x.dtype)
        elif (target := current_target_of(quantizer)) is not None and x.shape[0] % 4 == 0:
            fp8, total, inverse = norm_fp8_triton.norm_measured(
                x,
                delta,
                weight=weight,
                eps=module.eps,
                zero_centered=ctx.zero_centered,
                e5m2=target.quantizer.dtype == DType.kFloat8E5M2,
                counts=target.counts,
            )
            y = target.tensor(fp8, x.dtype)
        elif quantizer is None and _is_ours(x, weight):
            y, total, inverse = residual_norm_triton.forward(
                x, delta, weight=weight, eps=module.eps, zero_centered=ctx.zero_centered
            )
        else:
            # Without a scale that is known before, or under BF16: the sum in PyTorch, the norm by Transformer Engine.
            total = (x if delta is None else x + delta).contiguous()  # rmsnorm_fwd reads no strides
            y, inverse = _te_norm(total, weight, module, quantizer)
            observe(quantizer, y, lambda: _te_norm(total, weight, module, None)[0])
        ctx.save_for_backward(total, weight, inverse)
        if delta is None:
            # Autograd must not see an input returned as an output: a view is another tensor.
            total = total.view_as(total)
        return y, total

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and delta, which are one tensor, and of the weight."""
        dy, dtotal = grads
        total, weight, inverse = ctx.saved_tensors
        dy = dy.contiguous()
        dtotal = dtotal.contiguous()
        # The residual gradient is added in the same kernel, which saves reading and writing [N, D] once.
        if _is_ours(total, weight):
            dx, dweight = residual_norm_triton.backward(
                dy, total, dtotal, weight=weight, rstd=inverse, zero_centered=ctx.zero_centered
            )
        else:
            # Positional, as Transformer Engine itself calls it: the last two are multiprocessors to leave free, and
            # whether the weight is zero-centred.
            dx, dweight = tex.rmsnorm_bwd_add(
                dy, total, dtotal, inverse, weight, 0, ctx.zero_centered
            )
        ddelta = dx if ctx.has_delta else None
        return dx, ddelta, dweight, None, None


class _OutputNorm(torch.autograd.Function):
    """RMSNorm of a part's output [N, D] by our kernels."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, module: RMSNorm) -> Tensor:
        """Return the norm of x [N, D]."""
        ctx.zero_centered = module.zero_centered_gamma
        y, x, inverse = residual_norm_triton.forward(
            x, None, weight=weight, eps=module.eps, zero_centered=ctx.zero_centered
        )
        ctx.save_for_backward(x, weight, inverse)
        return y

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and of the weight."""
        (dy,) = grads
        x, weight, inverse = ctx.saved_tensors
        dx, dweight = residual_norm_triton.backward(
            dy, x, None, weight=weight, rstd=inverse, zero_centered=ctx.zero_centered
        )
        return dx, dweight, None


def norm(
    module: RMSNorm | LayerNormWithoutBias,
    x: Tensor,
    delta: Tensor | None,
    consumer: Module | None,
) -> tuple[Tensor, Tensor]:
    """See te_models.kernels.handover.norm."""
    # LayerNorm runs its own forward: no kernel of it adds the residual stream or writes FP8.
    if torch.is_grad_enabled() and isinstance(module, RMSNorm):
        return _Norm.apply(x, delta, module.weight, module, quantizer_of(consumer, "scaling_fwd"))
    total = x if delta is None else x + delta
    return native_inference.norm(module, total), total


def output_norm(module: Module, x: Tensor) -> Tensor:
    """See te_models.kernels.handover.output_norm."""
    if not torch.is_grad_enabled() or not native_inference.is_plain_norm(module, x):
        return module(x)
    if not _is_ours(x, module.weight):
        return module(x)
    return _OutputNorm.apply(x, module.weight, module)
