"""Transformer Engine itself, under the names that the layers use. The only file that imports transformer_engine.

What differs between its versions is settled here; what this project needs beyond its public names (dropping a module's
FP8 state so that the recipe of a live model can change) is added here.
"""

from __future__ import annotations

import contextlib
from importlib.metadata import version
from typing import Any

import transformer_engine.pytorch as _te
from transformer_engine.common import recipe
from transformer_engine.pytorch import (
    DType,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Linear,
    MXFP8Quantizer,
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
from transformer_engine.pytorch.optimizers import FusedAdam
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, get_align_size_for_quantization

__version__ = version("transformer-engine")
if tuple(int(part) for part in __version__.split(".")[:2]) < (2, 9):
    raise ImportError(
        f"te-models needs Transformer Engine 2.9 or newer, found {__version__}: pip install -U 'te-models[te]'"
    )

autocast = _te.autocast
fp8_autocast = _te.fp8_autocast
quantized_model_init = _te.quantized_model_init
restored_recompute = contextlib.nullcontext  # the emulated engine refuses recomputes that nobody answers for

__all__ = [
    "DType", "FP8GlobalStateManager", "Float8BlockQuantizer", "Float8CurrentScalingQuantizer", "Float8Quantizer",
    "FusedAdam", "Linear", "MXFP8Quantizer", "RMSNorm", "RotaryPositionEmbedding", "TransformerLayer", "autocast",
    "checkpoint", "fp8_autocast", "get_align_size_for_quantization",
    "get_default_recipe", "is_fp8_available", "is_fp8_block_scaling_available", "is_mxfp8_available",
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
