"""The quantizer of each operand of te.Linear's GEMMs under a recipe."""

import torch

from te_models.engine.emulated.recipe import (
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
    fp8_dtype,
)
from te_models.numerics.nvfp4 import NVFP4Quantizer
from te_models.numerics.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    Quantizer,
)

# The keys of `fp8_meta` and `quantizers`, as Transformer Engine names them.
DIRECTIONS = ("scaling_fwd", "scaling_bwd")

# The order of the quantizers of one GEMM.
SLOTS = {"scaling_fwd": ("input", "weight", "output"), "scaling_bwd": ("grad_output", "grad_input")}


def make_quantizer(recipe: Recipe, slot: str, device: torch.device) -> Quantizer:
    """Return the quantizer of one of a te.Linear's `SLOTS` under a recipe without state, for a weight on `device`."""
    forward = slot in SLOTS["scaling_fwd"]
    dtype = fp8_dtype(recipe.fp8_format, forward)
    # Results of a GEMM, where the next module takes FP8; the other slots are operands.
    result = slot in ("output", "grad_input")
    # The name of the operand's options in a recipe (`Recipe.options`).
    if slot == "weight":
        operand = "fwd_weight"
    elif forward:
        operand = "fwd_inp"
    else:
        operand = "bwd_grad"
    if isinstance(recipe, MXFP8BlockScaling):
        return MXFP8Quantizer(
            dtype, with_2d_quantization=recipe.enable_2d_quantization and slot == "weight"
        )
    if isinstance(recipe, NVFP4BlockScaling):
        params = recipe.options(operand)
        # A Hadamard transform of 16 elements spreads an outlier over its block, in operands of the weight gradient.
        transform = params.random_hadamard_transform
        return NVFP4Quantizer(
            with_rht=transform,
            with_post_rht_amax=transform,
            with_2d_quantization=params.fp4_2d_quantization,
            stochastic_rounding=params.stochastic_rounding,
        )
    if isinstance(recipe, Float8CurrentScaling) and result:
        # It follows `use_power_2_scales`, where the operands of a GEMM follow `fp8_quant_*`, as in Transformer Engine.
        return Float8CurrentScalingQuantizer(
            dtype, device, force_pow_2_scales=recipe.use_power_2_scales
        )
    if isinstance(recipe, (Float8BlockScaling, Float8CurrentScaling)):
        params = recipe.options(operand)
        if isinstance(recipe, Float8CurrentScaling):
            return Float8CurrentScalingQuantizer(
                dtype,
                device,
                force_pow_2_scales=params.power_2_scale,
                amax_epsilon=params.amax_epsilon,
            )
        # 1: blocks of 1 x 128, 2: of 128 x 128.
        dims = {"fwd_weight": recipe.w_block_scaling_dim, "bwd_grad": recipe.grad_block_scaling_dim}
        dim = dims.get(operand, recipe.x_block_scaling_dim)
        return Float8BlockQuantizer(
            dtype,
            rowwise=True,
            columnwise=True,
            block_scaling_dim=dim,
            force_pow_2_scales=params.power_2_scale,
            amax_epsilon=params.amax_epsilon,
        )
    raise ValueError(
        f"{type(recipe).__name__} is not emulated: use one of the recipes of te_models.engine.emulated.recipe"
    )
