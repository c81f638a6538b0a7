"""FP8 primary weights: te.Linear weights that are FP8 codes and inverse scales, without a BF16 copy on the device.

Transformer Engine makes them under `quantized_model_init` (section 10 of its behaviour) and reads them as they are, so a
step casts no weight. What an update must not lose lives in the optimizer's FP32 masters; after each step the codes are
made again from those. A weight is written here and nowhere else: an ordinary in-place operation would quantize again
what is already quantized, and an in-place operation on a slice of one would be lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from te_models.recipe import Recipe
from te_models.sharded import put

E4M3_MAX = 448.0
SCHEMES = ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling")
# The fields of a recipe that say how a weight is quantized.
WEIGHT_FIELDS = ("use_power_2_scales", "use_f32_scales", "w_block_scaling_dim", "enable_2d_quantization")
# Transformer Engine's attributes that hold the codes and their inverse scales; a format has two or four of them.
_PARTS = ("data", "scale_inv", "rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")


def check_recipe(recipe: Recipe) -> None:
    """Raise a ValueError if weights cannot be kept in the format of this recipe."""
    if recipe.scheme not in SCHEMES:
        raise ValueError(
            f"fp8_params=True needs an FP8 recipe, and {recipe.name!r} is {recipe.scheme!r}: choose recipe='current', "
            "'blockwise', 'delayed' or 'mxfp8', or leave fp8_params out"
        )


def same_codes(one: Recipe, other: Recipe) -> bool:
    """Whether both recipes quantize a weight into the same kind of codes."""
    return one.scheme == other.scheme and all(one.fields.get(f) == other.fields.get(f) for f in WEIGHT_FIELDS)


def is_quantized(tensor: Any) -> bool:
    """Whether a parameter is an FP8 primary weight, of either engine."""
    return hasattr(tensor, "quantize_")


def plain(tensor: Tensor) -> Tensor:
    """The tensor without its graph; the dequantized values of an FP8 weight, in its nominal dtype."""
    return tensor.dequantize().detach() if is_quantized(tensor) else tensor.detach()


def clear_states(model: nn.Module) -> None:
    """Scales 1 and histories 0 in modules with FP8 weights: they were built by quantizing what the memory held."""
    for module in _owners(model).values():
        module.reset_fp8_meta_tensors()


@torch.no_grad()
def write_weight(parameter: Any, value: Tensor) -> None:
    """Give a parameter its values, or its piece of them; an FP8 weight also keeps them, on the CPU, for the optimizer's master.

    Under DelayedScaling the scale is first taken from the values, where Transformer Engine casts the first ones with
    scale 1, into the subnormals (section 10).
    """
    if not is_quantized(parameter):
        put(parameter, value)
        return
    value = value.detach().to(parameter.dtype)
    quantizer = parameter._quantizer
    if _delayed(quantizer) and (amax := value.abs().amax().float()) > 0:
        quantizer.scale.fill_(E4M3_MAX / amax.item())
        quantizer.amax.zero_()
    parameter.quantize_(value.to(parameter.device))
    keep_initial_value(parameter, value)


def keep_initial_value(parameter: Any, value: Tensor) -> None:
    """Remember the values that an FP8 weight was made of, where Transformer Engine's optimizers look for them too."""
    parameter._high_precision_init_val = value.detach().to("cpu", parameter.dtype)


@torch.no_grad()
def new_master(parameter: Any) -> Tensor:
    """The FP32 master of an FP8 weight: the values it was made of, if they are still kept, else the dequantized ones."""
    value = parameter.get_high_precision_init_val() if hasattr(parameter, "get_high_precision_init_val") else None
    if value is None:
        return plain(parameter).float()
    parameter.clear_high_precision_init_val()
    return value.to(parameter.device, torch.float32, copy=True)


def weight_codes(model: nn.Module) -> dict[str, Tensor]:
    """Name -> live codes and inverse scales of every FP8 weight: `<weight>.data` uint8 [O, I] and `<weight>.scale_inv`
    FP32 [1], or rowwise and columnwise ones where blocks have scales."""
    return {
        f"{name}.{part}": tensor
        for name, parameter in model.named_parameters()
        if is_quantized(parameter)
        for part in _PARTS
        if (tensor := getattr(parameter, f"_{part}", None)) is not None
    }


@torch.no_grad()
def load_codes(model: nn.Module, codes: Mapping[str, Tensor]) -> None:
    """Overwrite codes and inverse scales with `codes`, which fit (`weight_codes` says what does)."""
    live = weight_codes(model)
    for name, tensor in codes.items():
        live[name].copy_(tensor)
    parameters: dict[str, Any] = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if f"{name}.data" in codes:  # the transposed copy, where there is one, is of the codes before
            parameter.update_usage(columnwise_usage=False)
            parameter.update_usage(columnwise_usage=True)


@torch.no_grad()
def relink(model: nn.Module, built: Any) -> None:
    """Connect FP8 weights to the new FP8 state of their modules after the old one was dropped.

    `built` is the engine's recipe object. Delayed scales are the caller's to bring along.
    """
    for module in _owners(model).values():
        if "scaling_fwd" not in module.fp8_meta:
            module.fp8_meta.update(recipe=built, num_gemms=1)
            module.init_fp8_meta_tensors(built)
        quantizer = module.quantizers["scaling_fwd"][1].copy()
        quantizer.internal = False
        module.weight._quantizer = quantizer


def _owners(model: nn.Module) -> dict[str, Any]:
    return {name: m for name, m in model.named_modules() if is_quantized(getattr(m, "weight", None))}


def _delayed(quantizer: Any) -> bool:
    recipe = quantizer._get_compatible_recipe()
    return not isinstance(recipe, tuple) and recipe.delayed()
