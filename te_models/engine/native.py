"""Transformer Engine itself, under the names that the layers use. The only file that imports transformer_engine.

What differs between its versions is settled here; what this project needs beyond its public names (dropping a module's
FP8 state so that the recipe of a live model can change) is added here.
"""

from __future__ import annotations

import contextlib
from importlib.metadata import version
from typing import Any

import torch
import transformer_engine.pytorch as _te
import transformer_engine_torch as tex
from torch import Tensor
from transformer_engine.common import recipe
from transformer_engine.pytorch import (
    DType,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Linear,
    MXFP8Quantizer,
    QuantizedTensor,
    RMSNorm,
    RotaryPositionEmbedding,
    TransformerLayer,
    checkpoint,
    get_default_recipe,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
)
from transformer_engine.pytorch.constants import TE_DType
from transformer_engine.pytorch.optimizers import FusedAdam
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, get_align_size_for_quantization

__version__ = version("transformer-engine")

autocast = _te.autocast
fp8_autocast = _te.fp8_autocast
quantized_model_init = _te.quantized_model_init
restored_recompute = contextlib.nullcontext  # the emulated engine refuses recomputes that nobody answers for

__all__ = [
    "DType", "FP8GlobalStateManager", "Float8BlockQuantizer", "Float8CurrentScalingQuantizer", "Float8Quantizer",
    "FusedAdam", "Linear", "MXFP8Quantizer", "RMSNorm", "RotaryPositionEmbedding", "TransformerLayer", "autocast",
    "checkpoint", "fp8_autocast", "get_align_size_for_quantization",
    "get_default_recipe", "handover", "is_fp8_available", "is_fp8_block_scaling_available", "is_mxfp8_available",
    "is_nvfp4_available", "quantized_model_init", "recipe", "reset_fp8_state", "restored_recompute",
    "drop_cached_weights",
]  # fmt: skip


def reset_fp8_state(module: Any) -> None:
    """Drop a te.Linear's FP8 state, so that its next forward starts afresh under whatever recipe is active.

    Without this, Transformer Engine keeps the old quantizers within one recipe class, and after a change of class and
    back the scales stay 1 for ever, since a module registers for updates only once (sections 2.8 and 7.12).
    """
    registry = FP8GlobalStateManager.quantization_state
    for direction in ("scaling_fwd", "scaling_bwd"):
        state = module.fp8_meta.pop(direction, None)
        history = getattr(state, "amax_history", None)
        if history is None:
            continue
        for key, histories in registry.global_amax_history_buffer.items():
            keep = [i for i, other in enumerate(histories) if other is not history]
            for buffers in (
                registry.global_amax_buffer,
                registry.global_amax_history_buffer,
                registry.global_scale_buffer,
            ):
                buffers[key] = [buffers[key][i] for i in keep]
    for name in ("recipe", FP8GlobalStateManager.get_buffer_info(), "global_fp8_buffer_pos_fwd_recompute"):
        module.fp8_meta.pop(name, None)
    module.quantizers = {"scaling_fwd": [], "scaling_bwd": []}
    module.fp8_initialized = False
    module.fp8_meta_tensors_initialized = False
    module._fp8_workspaces.clear()


def drop_cached_weights(module: Any) -> None:
    """Forget the weight codes that a te.Linear keeps for is_first_microbatch=False."""
    module._fp8_workspaces.clear()


def _input_quantizer(linear: Any) -> Any:
    """What quantizes this te.Linear's input, for use outside it; None where it takes BF16, or is not a te.Linear.

    Scale and amax are the module's own. Block scaling is left to the module: it gains nothing from a kernel before it.
    """
    if not (isinstance(linear, Linear) and FP8GlobalStateManager.is_fp8_enabled()):
        return None
    linear.init_fp8_metadata(num_gemms=1)  # else there is no quantizer before the module's first forward
    own = linear.quantizers["scaling_fwd"][0]
    if not isinstance(own, (Float8Quantizer, Float8CurrentScalingQuantizer)):
        return None
    quantizer = own.copy()
    quantizer.internal = False  # autograd can pass on tensors, not Transformer Engine's bare storages
    quantizer.set_usage(rowwise=True, columnwise=linear.weight.requires_grad)
    return quantizer


class _Norm(torch.autograd.Function):
    """RMSNorm that writes FP8; its backward adds the gradient of the residual stream in the same kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, module: Any, quantizer: Any) -> tuple[Tensor, Tensor]:
        """x [N, D] -> (y [N, D], x)."""
        ctx.zero_centered = module.zero_centered_gamma
        y, _, scale = tex.rmsnorm_fwd(x, weight, module.eps, None, quantizer, TE_DType[x.dtype], 0, ctx.zero_centered)
        ctx.save_for_backward(x, weight, scale)
        return y, x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dx: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """The gradients of x, by both ways, and of the weight."""
        x, weight, scale = ctx.saved_tensors
        dy, dx = dy.contiguous(), dx.contiguous()
        dx, dweight = tex.rmsnorm_bwd_add(dy, x, dx, scale, weight, 0, ctx.zero_centered)
        return dx, dweight, None, None


class _SwiGLU(torch.autograd.Function):
    """SwiGLU that writes FP8."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, quantizer: Any) -> Tensor:
        """gate_up [N, 2F] -> [N, F]."""
        ctx.save_for_backward(gate_up)
        return tex.swiglu(gate_up, quantizer)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """The gradient of gate_up."""
        (gate_up,) = ctx.saved_tensors
        return tex.dswiglu(dy.contiguous(), gate_up, None), None


def _norm(module: Any, x: Tensor, consumer: Any) -> tuple[Tensor, Tensor]:
    """kernels.handover.norm."""
    if not torch.is_grad_enabled():
        return module(x), x
    return _Norm.apply(x, module.weight, module, _input_quantizer(consumer))


def _swiglu(gate_up: Tensor, consumer: Any) -> Tensor:
    """kernels.handover.swiglu."""
    quantizer = _input_quantizer(consumer) if torch.is_grad_enabled() else None
    return _SwiGLU.apply(gate_up, quantizer)


def _linear(module: Any, x: Tensor, **options: Any) -> Tensor:
    """kernels.handover.linear."""
    y = module(x, **options)
    if isinstance(x, QuantizedTensor) and module.weight.requires_grad:
        x.update_usage(rowwise_usage=False, columnwise_usage=True)  # as te.Linear does with what it quantized itself
    return y


handover = {"norm": _norm, "swiglu": _swiglu, "linear": _linear}
