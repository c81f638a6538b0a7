"""Transformer Engine's PyTorch API in plain PyTorch, with its numbers, on any device.

`import te_models.engine.emulated as te` stands in for `import transformer_engine.pytorch as te`; `te.recipe` stands in
for `transformer_engine.common.recipe`. Names, signatures, state machine and casts are those of Transformer Engine 2.20;
FP8 codes, scales and amax histories are equal to it in every bit; so are GEMM results, up to the size that `exact_gemm`
sets, and beyond it up to the order of accumulation.
"""

from typing import Any

from te_models.engine.emulated import recipe
from te_models.engine.emulated.autocast import (
    FP8GlobalStateManager,
    autocast,
    fp8_autocast,
    fp8_model_init,
    get_align_size_for_quantization,
    get_default_recipe,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
    quantized_model_init,
    set_support,
)
from te_models.engine.emulated.gemm import exact_gemm
from te_models.engine.emulated.linear import Linear
from te_models.engine.emulated.module import drop_cached_weights, reset_fp8_state, restored_recompute
from te_models.engine.emulated.numerics import DType
from te_models.engine.emulated.nvfp4 import NVFP4Quantizer, NVFP4Tensor
from te_models.engine.emulated.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
)
from te_models.engine.emulated.recipe_state import DelayedScalingRequest, QuantizerRole
from te_models.engine.emulated.recompute import checkpoint
from te_models.engine.emulated.rmsnorm import RMSNorm
from te_models.engine.emulated.tensors import Float8BlockwiseQTensor, Float8Tensor, MXFP8Tensor, QuantizedTensor

__all__ = [
    "DType", "DelayedScalingRequest", "FP8GlobalStateManager", "Float8BlockQuantizer", "Float8BlockwiseQTensor",
    "Float8CurrentScalingQuantizer", "Float8Quantizer", "Float8Tensor", "Linear", "MXFP8Quantizer", "MXFP8Tensor",
    "NVFP4Quantizer", "NVFP4Tensor", "QuantizedTensor", "QuantizerRole", "RMSNorm", "autocast", "checkpoint",
    "drop_cached_weights", "exact_gemm",
    "fp8_autocast", "fp8_model_init", "get_align_size_for_quantization", "get_default_recipe", "handover",
    "is_fp8_available", "is_fp8_block_scaling_available", "is_mxfp8_available", "is_nvfp4_available", "quantized_model_init", "recipe",
    "reset_fp8_state", "restored_recompute", "set_support",
]  # fmt: skip

# te_models.kernels.handover: nothing of it here, each module computes what Transformer Engine's computes by itself.
handover: dict[str, Any] = {}
