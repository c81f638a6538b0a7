"""Transformer Engine's modules without data, on the meta device: what they allocate and what they save for backward.

The third engine. It runs real models for the memory plan (te_models.planning), where there is neither a GPU nor
Transformer Engine. Recipes, autocasts, quantizers and the state of modules are taken from the emulated engine; a cast
makes the tensors that its quantizer makes, and a product its result. Sections are in
docs/internals/transformer_engine.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import te_models.kernels.handover as handover_plain
from te_models.device.allocations import counted_as
from te_models.device.autograd import Context
from te_models.engine import planned_experts
from te_models.engine.emulated import (
    DType,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    FP8GlobalStateManager,
    MXFP8Quantizer,
    autocast,
    checkpoint,
    drop_cached_weights,
    fp8_autocast,
    get_align_size_for_quantization,
    get_default_recipe,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
    outside_autocast,
    quantized_model_init,
    recipe,
    region_lock,
    reset_fp8_state,
    restored_recompute,
    row_padding,
    runs_stored_experts,
    separate_copy,
)
from te_models.engine.planned_modules import (
    GRADIENTS,
    WEIGHT_COPIES,
    GroupedLinear,
    LayerNormWithoutBias,
    Linear,
    RMSNorm,
    StoredGroupedLinear,
    StoredLinear,
)
from te_models.kernels.early_save import save_early, save_input, saved_input
from te_models.kernels.gradient_room import Slot, empty
from te_models.kernels.planned import FP8Memory
from te_models.numerics.quantizers import Quantizer
from te_models.numerics.stored import StoredWeight
from te_models.numerics.tensors import (
    Float8Tensor,
    QuantizedTensor,
    QuantizedTensorStorage,
)

__all__ = [
    "DType",
    "FP8GlobalStateManager",
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "GroupedLinear",
    "LINEARS",
    "LayerNormWithoutBias",
    "Linear",
    "MXFP8Quantizer",
    "RMSNorm",
    "StoredGroupedLinear",
    "StoredLinear",
    "autocast",
    "checkpoint",
    "drop_cached_weights",
    "fp8_autocast",
    "get_align_size_for_quantization",
    "get_default_recipe",
    "handover",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "outside_autocast",
    "quantized_model_init",
    "recipe",
    "region_lock",
    "reset_fp8_state",
    "restored_recompute",
    "row_padding",
    "runs_stored_experts",
    "separate_copy",
    "unfused",
]

# The layers that quantize.
LINEARS = (Linear, GroupedLinear)


# Twins of the operations in engine/native_handover.py and native_residual_norm.py, which explain them. Each allocates
# and saves what those do, and computes nothing.


class _Target(NamedTuple):
    """Where a kernel writes FP8 for a te.Linear: the twin of native_targets.QuantizerTarget."""

    quantizer: Quantizer
    cast_scale: None = None
    counts: None = None

    def tensor(self, fp8: FP8Memory, dtype: torch.dtype) -> Tensor:
        """Return the FP8 data [N, K] as a tensor."""
        return Float8Tensor(
            shape=fp8.transposed.shape[::-1],
            dtype=dtype,
            data=fp8.data,
            transpose=fp8.transposed,
            scale_inv=fp8.scale_inv,
            fp8_dtype=None,
            quantizer=self.quantizer,
            device=fp8.transposed.device,
        )


def _quantizer(linear: nn.Module | None, direction: str, operand: int = 0) -> Quantizer | None:
    """Return what native_targets.quantizer_of does."""
    if not (isinstance(linear, Linear) and FP8GlobalStateManager.is_fp8_enabled()):
        return None
    linear.init_fp8_metadata()
    of_operand = linear.quantizers[direction][operand]
    if not isinstance(of_operand, (Float8Quantizer, Float8CurrentScalingQuantizer)):
        return None
    # A copy, as there: the module sets the usage of its own quantizer anew in each pass.
    quantizer = of_operand.copy()
    quantizer.internal = False
    quantizer.set_usage(rowwise=True, columnwise=linear.weight.requires_grad)
    return quantizer


def _target(quantizer: Quantizer | None) -> _Target | None:
    """Return what native_targets.target_of does: only delayed scaling knows its scale before the values."""
    if isinstance(quantizer, Float8Quantizer) and quantizer.columnwise_usage:
        return _Target(quantizer)
    return None


def _targets(
    producer: nn.Module | None, consumer: nn.Module | None
) -> tuple[_Target | None, _Target | None]:
    """See te_models.kernels.handover.targets."""
    if not torch.is_grad_enabled():
        return None, None
    gradient = _target(_quantizer(producer, "scaling_bwd"))
    # The gradient of a bias is summed from BF16, before the cast.
    if isinstance(producer, Linear) and producer.use_bias:
        gradient = None
    return gradient, _target(_quantizer(consumer, "scaling_fwd"))


def _kernel_result(quantizer: Quantizer | None, shape: Sequence[int], like: Tensor) -> Tensor:
    """Return the result of a kernel for a te.Linear with this quantizer; None: in the dtype of `like`."""
    if quantizer is None:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    # Registers of the kernel: the values never reach memory.
    with counted_as(None):
        values = torch.empty(shape, dtype=like.dtype, device=like.device)
    return quantizer(values)


class _NormInto(torch.autograd.Function):
    """RMSNorm that writes FP8, and whose backward adds the residual stream's gradient: native_residual_norm._Norm."""

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, delta: Tensor | None, weight: Tensor, quantizer: Quantizer | None
    ) -> tuple[Tensor, Tensor]:
        ctx.has_delta = delta is not None
        total = x if delta is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        inverse = torch.empty(len(x), dtype=torch.float32, device=x.device)
        y = _kernel_result(quantizer, x.shape, x)
        ctx.save_for_backward(total, weight, inverse)
        if delta is None:
            # Autograd must not see an input returned as an output: a view is another tensor.
            total = total.view_as(total)
        return y, total

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy, dtotal = grads
        total, weight, _ = ctx.saved_tensors
        dy = dy.contiguous()
        dtotal = dtotal.contiguous()
        dx = torch.empty(total.shape, dtype=total.dtype, device=total.device)
        with counted_as(GRADIENTS):
            dw = torch.empty_like(weight)
        return dx, dx if ctx.has_delta else None, dw, None


def _norm(
    module: RMSNorm | LayerNormWithoutBias,
    x: Tensor,
    delta: Tensor | None,
    consumer: nn.Module | None,
) -> tuple[Tensor, Tensor]:
    """See te_models.kernels.handover.norm."""
    if torch.is_grad_enabled() and isinstance(module, RMSNorm):
        return _NormInto.apply(x, delta, module.weight, _quantizer(consumer, "scaling_fwd"))
    total = x if delta is None else x + delta
    return module(total), total


class _ActivationInto(torch.autograd.Function):
    """The activation of an MLP that writes FP8, and whose backward does: native_handover._Activation."""

    @staticmethod
    def forward(
        ctx: Context,
        gate_up: Tensor,
        gradient_target: _Target | None,
        quantizer: Quantizer | None,
        gated: bool,
    ) -> Tensor:
        ctx.gradient_target = gradient_target
        rows, columns = gate_up.shape
        shape = (rows, columns // 2 if gated else columns)

        def recompute(source: Tensor) -> Tensor:
            output = _kernel_result(quantizer, shape, source)
            if _target(quantizer) is not None and isinstance(output, QuantizedTensorStorage):
                output.update_usage(rowwise_usage=False)
            return output

        save_input(ctx, gate_up, recompute=lambda: recompute)
        return _kernel_result(quantizer, shape, gate_up)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate_up = saved_input(ctx)
        # The kernel's wrapper makes such a copy where the gradient is none; on meta only its size counts.
        grads[0].contiguous()
        quantizer = None if ctx.gradient_target is None else ctx.gradient_target.quantizer
        return _kernel_result(quantizer, gate_up.shape, gate_up), None, None, None


def _activate(
    gate_up: Tensor,
    producer: nn.Module | None,
    consumer: nn.Module | None,
    activation: str = "silu",
    gated: bool = True,
) -> Tensor:
    """See te_models.kernels.handover.activate."""
    gate_up = save_early(gate_up)
    gradient_target, _ = _targets(producer, consumer)
    has_bias = isinstance(producer, Linear) and producer.use_bias
    dy_quantizer = None if has_bias else _quantizer(producer, "scaling_bwd")
    # Under current scaling a first pass measures the gradient, and stores nothing.
    if isinstance(dy_quantizer, Float8CurrentScalingQuantizer) and dy_quantizer.columnwise_usage:
        gradient_target = _Target(dy_quantizer)
    x_quantizer = _quantizer(consumer, "scaling_fwd")
    return _ActivationInto.apply(gate_up, gradient_target, x_quantizer, gated)


class _GatedHeadsInto(torch.autograd.Function):
    """The norm of each head and its gate, which save their inputs: native_handover._GatedHeads."""

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        z: Tensor,
        weight: Tensor,
        target: _Target | None,
        slot: Slot | None,
    ) -> Tensor:
        ctx.slot = slot
        ctx.save_for_backward(x, z, weight)
        return _kernel_result(None if target is None else target.quantizer, x.shape, x)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, z, weight = ctx.saved_tensors
        with counted_as(GRADIENTS):
            dw = torch.empty_like(weight)
        return torch.empty_like(x), empty(ctx.slot, z), dw, None, None


def _gated_heads(
    module: RMSNorm,
    x: Tensor,
    z: Tensor,
    consumer: nn.Module | None,
    slot: Slot | None = None,
) -> Tensor:
    """See te_models.kernels.handover.gated_heads."""
    if type(module) is not RMSNorm or x.dtype.itemsize != 2:
        return handover_plain.gated_heads(module, x, z, consumer)
    _, target = _targets(None, consumer)
    if x.shape[0] % 4:
        target = None
    return _GatedHeadsInto.apply(x.flatten(1), z, module.weight, target, slot)


def _linear(module: nn.Module, x: Tensor, **options: bool | None) -> Tensor:
    """See te_models.kernels.handover.linear; under delayed scaling only the weight's transposed copy is saved."""
    weight = _cast_weight(module) if options.get("is_first_microbatch") is None else None
    if weight is None:
        y = module(x, **options)
    else:
        cache: Any = module._fp8_workspaces
        # Handed to te.Linear as a weight that an earlier micro-batch has cached, so that it casts none.
        module._fp8_workspaces = {"weight": weight}  # type: ignore[assignment]
        try:
            y = module(x, **options | {"is_first_microbatch": False})
        finally:
            module._fp8_workspaces = cache
        weight.update_usage(rowwise_usage=False, columnwise_usage=True)
    trained = isinstance(module, Linear) and module.weight.requires_grad
    if isinstance(x, QuantizedTensor) and trained:
        x.update_usage(rowwise_usage=False, columnwise_usage=True)
    return y


def _cast_weight(module: nn.Module) -> QuantizedTensorStorage | None:
    """Return what native_handover._cast_weight does."""
    if not (torch.is_grad_enabled() and isinstance(module, Linear)):
        return None
    if isinstance(module.weight, (QuantizedTensor, StoredWeight)) or module._is_fsdp2:
        return None
    quantizer = _quantizer(module, "scaling_fwd", 1)
    if _target(quantizer) is None or quantizer is None:
        return None
    with counted_as(WEIGHT_COPIES):
        return quantizer(module.weight.detach())


# The operations of models that are not fused, and of fused ones, by the names of te_models.kernels.dispatch.Kernels.
unfused: dict[str, Callable[..., Any]] = {
    "counts_on_device": planned_experts.counts_on_device,
}
handover: dict[str, Callable[..., Any]] = {
    "norm": _norm,
    "activate": _activate,
    "gated_heads": _gated_heads,
    "linear": _linear,
    "targets": _targets,
    "grouped": planned_experts.grouped,
    "experts": planned_experts.experts,
    "experts_join": planned_experts.experts_join,
    "counts_on_device": planned_experts.counts_on_device,
}
