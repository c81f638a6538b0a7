"""A te.Linear as the kernels of a step of decoding read it: its cached FP8 weight, and how its input is cast."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from te_models.config.recipe import EngineRecipe
from te_models.device.hooks import is_untouched
from te_models.fp8.primary_weights import is_quantized
from te_models.kernels.decode import StepLinear


def step_linear(
    te: ModuleType, module: Any, te_recipe: EngineRecipe | None, cached: bool
) -> StepLinear | None:
    """Return a te.Linear as those kernels take it; None where only the module computes what is asked for.

    Args:
        te: the engine.
        module: a te.Linear, or anything in its place, such as one with adapters.
        te_recipe: the engine's recipe that it runs under; None: BF16.
        cached: whether the pass may use the FP8 weight that the module has from a pass before.
    """
    if type(module) not in (te.Linear, te.LinearOfTorch) or not is_untouched(module):
        return None
    weight = module.weight
    bias = module.bias if module.use_bias else None
    if te_recipe is None:
        return None if is_quantized(weight) else StepLinear(weight, bias)
    stored: Any = weight if is_quantized(weight) else None
    if stored is None and cached:
        stored = module._fp8_workspaces.get("weight")
    quantizers = module.quantizers["scaling_fwd"]
    if stored is None or not quantizers:
        return None
    quantizer = quantizers[0]
    if getattr(quantizer, "dtype", None) != te.DType.kFloat8E4M3:
        return None
    if isinstance(quantizer, te.Float8Quantizer):
        return StepLinear(stored._data, bias, stored._scale_inv, quantizer.scale)
    if isinstance(quantizer, te.Float8CurrentScalingQuantizer):
        return StepLinear(
            weight=stored._data,
            bias=bias,
            weight_inverse=stored._scale_inv,
            power_of_2=quantizer.force_pow_2_scales,
            epsilon=quantizer.amax_epsilon,
        )
    return None
