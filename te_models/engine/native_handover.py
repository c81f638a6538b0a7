"""The operations that write FP8 for a te.Linear with its own scale and amax (te_models.kernels.handover).

A part of te_models.engine.native: Transformer Engine's kernels where it has one, else ours. In shapes: N rows, F the
width of the MLP.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformer_engine.pytorch  # noqa: F401  makes transformer_engine_torch known
import transformer_engine_torch as tex
from torch import Tensor
from torch.nn import Module
from transformer_engine.pytorch import (
    DType,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
    Linear,
    QuantizedTensor,
    RMSNorm,
)

import te_models.kernels.handover as handover_plain
import te_models.kernels.handover_triton as handover_triton
import te_models.kernels.head_norm_triton as head_norm_triton
from te_models.device.autograd import Context
from te_models.device.hooks import is_untouched
from te_models.engine import native_experts, native_inference, native_residual_norm
from te_models.engine.native_observers import observe
from te_models.engine.native_targets import (
    PerTensorQuantizer,
    QuantizerTarget,
    current_target_of,
    quantizer_of,
    target_of,
)
from te_models.kernels import decode_triton
from te_models.kernels.early_save import save_early, save_input, saved_input
from te_models.kernels.fp8_tiles_triton import new_fp8, write_current_scale
from te_models.kernels.gradient_room import Slot, empty
from te_models.kernels.handover import CastScale
from te_models.numerics.stored import StoredWeight


def _targets(
    producer: Module | None, consumer: Module | None
) -> tuple[QuantizerTarget | None, QuantizerTarget | None]:
    """See te_models.kernels.handover.targets."""
    if not torch.is_grad_enabled():
        return None, None
    gradient = target_of(quantizer_of(producer, "scaling_bwd"))
    if _has_bias(producer):
        gradient = None
    return gradient, target_of(quantizer_of(consumer, "scaling_fwd"))


def _gradient_target(producer: Module | None) -> QuantizerTarget | None:
    """Return the target for the gradient of an activation's input, which may be measured before it is written."""
    if _has_bias(producer):
        return None
    quantizer = quantizer_of(producer, "scaling_bwd")
    return target_of(quantizer) or current_target_of(quantizer)


def _has_bias(producer: Module | None) -> bool:
    """Return whether a te.Linear sums the gradient of its output for a bias, and so needs this gradient in BF16."""
    return isinstance(producer, Linear) and producer.use_bias


# (activation, gated) -> Transformer Engine's kernel and its gradient.
ACTIVATIONS: dict[tuple[str, bool], tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    ("silu", True): (tex.swiglu, tex.dswiglu),
    ("silu", False): (tex.silu, tex.dsilu),
    ("gelu_pytorch_tanh", True): (tex.geglu, tex.dgeglu),
    ("gelu_pytorch_tanh", False): (tex.gelu, tex.dgelu),
    ("relu2", True): (tex.sreglu, tex.dsreglu),
    ("relu2", False): (tex.srelu, tex.dsrelu),
}


class _Activation(torch.autograd.Function):
    """The activation of an MLP that writes FP8, and whose backward does."""

    @staticmethod
    def forward(
        ctx: Context,
        gate_up: Tensor,
        gradient_target: QuantizerTarget | None,
        quantizer: PerTensorQuantizer | None,
        kind: tuple[str, bool],
    ) -> Tensor:
        """Return [N, F], from gate_up [N, 2F] or [N, F].

        `gradient_target` is where backward writes FP8, `quantizer` casts the result, and `kind` is a key of
        ACTIVATIONS. Each of the first two may be None: it is written in BF16.
        """
        ctx.gradient_target = gradient_target
        ctx.kind = kind
        save_input(ctx, gate_up, recompute=lambda: _activation_for_backward(quantizer, kind))
        if (target := target_of(quantizer)) is not None:
            cast_scale = target.cast_scale
            activation, gated = kind
            fp8 = handover_triton.activate(
                gate_up,
                scale=cast_scale.scale,
                amax=cast_scale.amax,
                e5m2=cast_scale.e5m2,
                activation=activation,
                gated=gated,
                counts=target.counts,
            )
            return target.tensor(fp8, gate_up.dtype)
        compute, _ = ACTIVATIONS[kind]
        y = compute(gate_up, quantizer)
        observe(quantizer, y, lambda: compute(gate_up, None))
        return y

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of gate_up."""
        (dy,) = grads
        gate_up = saved_input(ctx)
        dy = dy.contiguous()
        target: QuantizerTarget | None = ctx.gradient_target
        if target is not None:
            activation, gated = ctx.kind
            if isinstance(target.quantizer, Float8Quantizer):
                cast_scale = target.cast_scale
            else:
                cast_scale = _measured(dy, gate_up, target.quantizer, activation, gated)
            fp8 = handover_triton.activate_backward(
                dy,
                gate_up,
                scale=cast_scale.scale,
                amax=cast_scale.amax,
                e5m2=cast_scale.e5m2,
                activation=activation,
                gated=gated,
                counts=target.counts,
            )
            return target.tensor(fp8, gate_up.dtype), None, None, None
        _, compute_gradient = ACTIVATIONS[ctx.kind]
        return compute_gradient(dy, gate_up, None), None, None, None


def _measured(
    dy: Tensor,
    gate_up: Tensor,
    quantizer: Float8CurrentScalingQuantizer,
    activation: str,
    gated: bool,
) -> CastScale:
    """Return the scale of the gradient of gate_up under current scaling, from a first pass that measures it.

    To compute the gradient twice takes less memory traffic than to store it in BF16, measure and cast it.
    """
    cast_scale = CastScale(
        scale=torch.empty(1, dtype=torch.float32, device=dy.device),
        amax=torch.zeros(1, dtype=torch.float32, device=dy.device),
        e5m2=quantizer.dtype == DType.kFloat8E5M2,
    )
    handover_triton.activate_backward(
        dy,
        gate_up,
        scale=cast_scale.scale,
        amax=cast_scale.amax,
        e5m2=cast_scale.e5m2,
        activation=activation,
        gated=gated,
        written=False,
    )
    write_current_scale(cast_scale)
    return cast_scale


def _activation_for_backward(
    quantizer: PerTensorQuantizer | None, kind: tuple[str, bool]
) -> Callable[[Tensor], Tensor]:
    """Return a function that recomputes the activation for te.Linear's backward: the present scale, no amax."""
    target = target_of(quantizer)
    if target is None:
        compute, _ = ACTIVATIONS[kind]
        return lambda gate_up: compute(gate_up, quantizer)
    activation, gated = kind
    present = target.cast_scale
    # A copy: the update after the forward pass changes the scale in place, and backward needs the one of the pass.
    scale = present.scale.clone()
    unread_amax = torch.empty_like(present.amax)

    def recompute(gate_up: Tensor) -> Tensor:
        fp8 = handover_triton.activate(
            gate_up,
            scale=scale,
            amax=unread_amax,
            e5m2=present.e5m2,
            activation=activation,
            gated=gated,
            # The weight gradient reads the transposed copy only.
            rowwise=False,
            # No counts: the recorder counted this cast in the forward pass.
        )
        return target.tensor(fp8, gate_up.dtype)

    return recompute


def _activate(
    gate_up: Tensor,
    producer: Module | None,
    consumer: Module | None,
    activation: str = "silu",
    gated: bool = True,
) -> Tensor:
    """See te_models.kernels.handover.activate."""
    kind = (activation, gated)
    if not torch.is_grad_enabled():
        compute, _ = ACTIVATIONS[kind]
        return compute(gate_up, None)
    gate_up = save_early(gate_up)
    gradient_target = _gradient_target(producer)
    quantizer = quantizer_of(consumer, "scaling_fwd")
    return _Activation.apply(gate_up, gradient_target, quantizer, kind)


class _GatedHeads(torch.autograd.Function):
    """RMSNorm of each head and its gate, which keep their inputs and may write FP8."""

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        z: Tensor,
        weight: Tensor,
        eps: float,
        target: QuantizerTarget | None,
        slot: Slot | None,
    ) -> Tensor:
        """Return [T, C] of x and z [T, C]."""
        ctx.eps = eps
        ctx.slot = slot
        ctx.save_for_backward(x, z, weight)
        with torch.cuda.device_of(x):
            if target is None:
                return head_norm_triton.head_norm(x, z, weight, eps)
            fp8 = new_fp8(x.shape[0], x.shape[1], x.device)
            head_norm_triton.head_norm_fp8(x, z, weight, eps, fp8, target.cast_scale, target.counts)
        return target.tensor(fp8, x.dtype)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, z and the weight."""
        (dy,) = grads
        x, z, weight = ctx.saved_tensors
        dz = empty(ctx.slot, z)
        with torch.cuda.device_of(x):
            dx, dweight = head_norm_triton.head_norm_backward(
                dy.contiguous(), x, z, weight, ctx.eps, dz
            )
        return dx, dz, dweight, None, None, None


def _gated_heads(
    module: RMSNorm, x: Tensor, z: Tensor, consumer: Module | None, slot: Slot | None = None
) -> Tensor:
    """See te_models.kernels.handover.gated_heads."""
    known = type(module) is RMSNorm and is_untouched(module) and not module.zero_centered_gamma
    if not known or x.dtype.itemsize != 2:
        return handover_plain.gated_heads(module, x, z, consumer)
    target = target_of(quantizer_of(consumer, "scaling_fwd")) if torch.is_grad_enabled() else None
    if x.shape[0] % 4:  # the transposed copy is written in words of four rows
        target = None
    x = x.flatten(1).contiguous()  # [T, C]
    if z.stride(1) != 1:
        z = z.contiguous()
    return _GatedHeads.apply(x, z, module.weight, module.eps, target, slot)


def _linear(module: Any, x: Tensor, **options: bool | None) -> Tensor:
    """See te_models.kernels.handover.linear; `module` may be a layer of peft in its place."""
    if not torch.is_grad_enabled():
        y = native_inference.linear(module, x, **options)
        return module(x, **options) if y is None else y
    weight = _cast_weight(module) if options.get("is_first_microbatch") is None else None
    if weight is None:
        y = module(x, **options)
    else:
        # is_first_microbatch=False reads the weight from the cache: for one call it holds the copy made by our kernel.
        cache = module._fp8_workspaces
        module._fp8_workspaces = {"weight": weight}
        try:
            y = module(x, **options | {"is_first_microbatch": False})
        finally:
            module._fp8_workspaces = cache
        # Backward reads only the transposed copy.
        weight.update_usage(rowwise_usage=False, columnwise_usage=True)
    if isinstance(x, QuantizedTensor) and module.weight.requires_grad:
        # te.Linear does so with an input that it quantized itself.
        x.update_usage(rowwise_usage=False, columnwise_usage=True)
    return y


def _cast_weight(module: Module) -> Float8Tensor | None:
    """Return a te.Linear's weight in FP8; None where the module casts it, or where it is FP8 already."""
    if not (torch.is_grad_enabled() and isinstance(module, Linear)):
        return None
    # Pruning and parametrizations make the weight when the module is called, or in a hook before.
    weight = module._parameters.get("weight")
    if weight is None or not is_untouched(module):
        return None
    if isinstance(weight, (QuantizedTensor, StoredWeight)):
        return None
    target = target_of(quantizer_of(module, "scaling_fwd", 1))
    if target is None or module.is_fsdp2:  # FSDP2 gathers and casts again in backward
        return None
    cast_scale = target.cast_scale
    fp8 = handover_triton.cast(
        weight.detach(),
        scale=cast_scale.scale,
        amax=cast_scale.amax,
        e5m2=cast_scale.e5m2,
        counts=target.counts,
    )
    return target.tensor(fp8, weight.dtype)


handover = {
    "norm": native_residual_norm.norm,
    "output_norm": native_residual_norm.output_norm,
    "activate": _activate,
    "gated_heads": _gated_heads,
    "linear": _linear,
    "targets": _targets,
    "grouped": native_experts.grouped,
    "experts": native_experts.experts,
    "experts_join": native_experts.experts_join,
    "counts_on_device": native_experts.counts_on_device,
    "decode": decode_triton.TRITON,
}
