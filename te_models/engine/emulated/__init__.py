"""Transformer Engine's PyTorch API in plain PyTorch, with its numbers, on any device.

`import te_models.engine.emulated as te` stands in for `import transformer_engine.pytorch as te`; `te.recipe` stands in
for `transformer_engine.common.recipe`. Names, signatures, state machine and casts follow Transformer Engine 2.20.
FP8 data, scales and amax histories are bit-identical to Transformer Engine's. So are GEMM results up to the size that
`exact_gemm` sets; larger ones differ only in the order of accumulation. The FP8 state belongs to the thread.

Lives here: te.Linear, te.GroupedLinear, te.RMSNorm, te.checkpoint, recipes, delayed scaling, products of quantized
matrices, and the shortcuts of a step of generation on a CPU.
Not here: casts, quantizers and quantized tensors (te_models.numerics), which have their names here as well, and
Transformer Engine itself (te_models.engine.native).
"""

from collections.abc import Callable
from typing import NoReturn

from te_models.engine.emulated import recipe
from te_models.engine.emulated.autocast import (
    FP8GlobalStateManager,
    autocast,
    fp8_autocast,
    get_align_size_for_quantization,
    get_default_recipe,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
    outside_autocast,
    quantized_model_init,
    region_lock,
)
from te_models.engine.emulated.gemm import exact_gemm, exact_unless_set
from te_models.engine.emulated.grouped import GroupedLinear
from te_models.engine.emulated.layernorm import LayerNormWithoutBias
from te_models.engine.emulated.linear import Linear, LinearOfTorch
from te_models.engine.emulated.module import restored_recompute
from te_models.engine.emulated.module_state import (
    drop_cached_weights,
    give_cached_weights,
    observe_quantizer,
    reset_fp8_state,
    separate_copy,
    set_observers,
    take_cached_weights,
)
from te_models.engine.emulated.recompute import checkpoint
from te_models.engine.emulated.rmsnorm import RMSNorm
from te_models.engine.emulated.short_rows import row_padding
from te_models.numerics.formats import DType
from te_models.numerics.nvfp4 import NVFP4Quantizer, NVFP4Tensor
from te_models.numerics.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
)
from te_models.numerics.tensors import (
    Float8BlockwiseQTensor,
    Float8Tensor,
    MXFP8Tensor,
    QuantizedTensor,
)

__all__ = [
    "DType",
    "FP8GlobalStateManager",
    "Float8BlockQuantizer",
    "Float8BlockwiseQTensor",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8Tensor",
    "GroupedLinear",
    "LINEARS",
    "LayerNormWithoutBias",
    "Linear",
    "LinearOfTorch",
    "MXFP8Quantizer",
    "MXFP8Tensor",
    "NVFP4Quantizer",
    "NVFP4Tensor",
    "QuantizedTensor",
    "RMSNorm",
    "StoredGroupedLinear",
    "StoredLinear",
    "autocast",
    "checkpoint",
    "drop_cached_weights",
    "exact_gemm",
    "exact_unless_set",
    "fp8_autocast",
    "get_align_size_for_quantization",
    "get_default_recipe",
    "give_cached_weights",
    "handover",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "observe_quantizer",
    "outside_autocast",
    "quantized_model_init",
    "recipe",
    "region_lock",
    "reset_fp8_state",
    "restored_recompute",
    "row_padding",
    "runs_stored_experts",
    "separate_copy",
    "set_observers",
    "take_cached_weights",
]


def __getattr__(name: str) -> NoReturn:
    """Raise an AttributeError that says which layers both engines have."""
    raise AttributeError(
        f"the emulated engine has no te.{name}: both engines have te.Linear, te.GroupedLinear and te.RMSNorm; other "
        "layers need transformer_engine.pytorch itself, on a GPU"
    )


# The layers that quantize: each has `fp8_meta` and quantizers.
LINEARS = (Linear, GroupedLinear)
# For weights that stay as a release stores them, which both of these take.
StoredLinear = Linear
StoredGroupedLinear = GroupedLinear


def runs_stored_experts(te_recipe: recipe.Recipe | None) -> bool:
    """Return True: experts run one by one, under any recipe."""
    return True


# No twins of te_models.kernels.handover: each module casts by itself, as Transformer Engine's modules do.
handover: dict[str, Callable[..., object]] = {}
