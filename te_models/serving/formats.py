"""The formats of `CausalLM.export`: how each stores a weight, and describes it in config.json.

Names, shapes and keys are those that vLLM's and SGLang's loaders read; docs/guide/serving.md names the versions.

A model that was trained in a format is served with the same numbers: Transformer Engine's, from the emulated engine's
quantizers. All others have, in every bit, the numbers of the library that defines the format: transformers' for 128 x
128 blocks, compressed-tensors' for the rest (scale = amax / 448, data = weight / scale). Only NVFP4's scale of a whole
tensor is always Transformer Engine's, up to one unit in the last place from compressed-tensors'.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from te_models.errors import UsageError
from te_models.files.formats import Document, Fields
from te_models.interop.quantized import (
    BLOCK,
    CHANNEL,
    E4M3,
    GLOBAL_SCALE,
    MXFP8,
    NVFP4,
    TENSOR,
    WeightStorage,
)
from te_models.numerics import casts
from te_models.numerics.blocks import block_amax, cast_fp8_blocks, merge_blocks, split_blocks
from te_models.numerics.e8m0 import e8m0_to_float
from te_models.numerics.formats import FLT_MAX, FP8_MAX, DType
from te_models.numerics.nvfp4 import FP4_MAX, TOP, NVFP4Quantizer, encode_e2m1, pack
from te_models.numerics.quantizers import MXFP8Quantizer
from te_models.numerics.scale_rules import scale_from_amax

E4M3_MAX = FP8_MAX[DType.kFloat8E4M3]
# The smallest scale of an E4M3 weight or input: below it, a GPU may flush numbers to zero, and reciprocals overflow.
TINY = torch.finfo(torch.float32).tiny
SMALLEST = 0.125  # compressed-tensors' scale of a block whose own rounds to zero
# A quantized weight: name of a stored tensor -> values with one row per row of the weight, or one number.
Parts = dict[str, Tensor]


@dataclass(frozen=True)
class WeightOptions:
    """The way a recipe quantizes its weights, which the format of the same kind follows.

    Attributes:
        scheme: Transformer Engine's recipe class.
        power_of_2: round the scales of 128 x 128 blocks down to powers of two.
        square: share the scales of MXFP8 or NVFP4 over square blocks.
    """

    scheme: str = "none"
    power_of_2: bool = False
    square: bool = False


@dataclass(frozen=True)
class ExportFormat:
    """One format of `CausalLM.export`.

    Attributes:
        storage: of its weights; None for plain ones.
        config: the names of the modules that stay unquantized -> quantization_config.
        columns: the inputs of a linear must be a multiple of this.
        static: the name of the tensor with the static scale of the input of each linear; "" if there is none.
        encode: quantizes a weight row by row; None for blocks of several rows, which `encode_blocks` quantizes.
    """

    storage: WeightStorage | None
    config: Callable[[list[str]], Fields]
    columns: int = 1
    static: str = ""
    encode: Callable[[Tensor, WeightOptions], Parts] | None = None


def encode_tensor(weight: Tensor, options: WeightOptions) -> Parts:
    """Return E4M3 data of a weight [out, in] and its one scale, FP32 []."""
    scale = scale_of(casts.amax(weight))
    return {"weight": divided(weight, scale), "weight_scale": scale}


def encode_channels(weight: Tensor, options: WeightOptions) -> Parts:
    """Return E4M3 data of a weight [out, in] and its scales, FP32 [out, 1]."""
    scale = scale_of(block_amax(weight, (1, weight.shape[1])))
    return {"weight": divided(weight, scale), "weight_scale": scale}


def scale_of(amax: Tensor) -> Tensor:
    """Return the inverse scales of these amaxes, at least TINY; 1 where everything is zero."""
    return torch.where(amax > 0, quotient(amax, E4M3_MAX).clamp(min=TINY), 1.0)


def quotient(tensor: Tensor, number: float) -> Tensor:
    """Return tensor / number, rounded once: on a GPU PyTorch multiplies by the reciprocal of a number."""
    return tensor / torch.full_like(tensor, number)


def divided(weight: Tensor, scale: Tensor) -> Tensor:
    """Return E4M3 data of a tensor divided by its inverse scale; larger values saturate."""
    return (weight.float() / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)


def encode_blocks(weight: Tensor, options: WeightOptions) -> Parts:
    """Return E4M3 data of a weight [out, in] and the inverse scales of its 128 x 128 blocks, FP32.

    transformers 5.23 derives the size of a block from the shapes, as rows / rows of scales. In a dimension that is not
    a multiple of 128 this gives another size, so all blocks along it share one scale, which every reader understands in
    the same way.
    """
    amax = block_amax(weight, BLOCK.block)
    for dim in (0, 1):
        if weight.shape[dim] % BLOCK.block[dim]:
            amax = amax.amax(dim, keepdim=True).expand_as(amax)
    if options.scheme == "Float8BlockScaling":
        # As the quantizer of the recipe does, so that a server has the values of the training.
        infinite = torch.finfo(weight.dtype).max
        scale = scale_from_amax(amax, E4M3_MAX, options.power_of_2, infinite=infinite)
    else:
        scale = torch.where(amax > 0, (amax.reciprocal() * E4M3_MAX).clamp(max=1 / TINY), 1.0)
    data = cast_fp8_blocks(weight, scale, BLOCK.block, DType.kFloat8E4M3)
    return {"weight": data.view(E4M3), "weight_scale_inv": scale.reciprocal()}


def encode_mxfp8(weight: Tensor, options: WeightOptions) -> Parts:
    """Return E4M3 data of a weight [out, in] and its scale bytes, uint8 [out, in / 32].

    An amax of 448 times a power of two gets the next larger scale from compressed-tensors, not from Transformer Engine.
    """
    rows, columns = weight.shape
    if options.scheme == "MXFP8BlockScaling":
        quantizer = MXFP8Quantizer(
            DType.kFloat8E4M3, columnwise=False, with_2d_quantization=options.square
        )
        # Rows of padding are cut off again below.
        tensor = quantizer(_with_rows(weight, 32))
        data = tensor._rowwise_data[:rows]
        scale = tensor._rowwise_scale_inv[:rows, : columns // 32]
    else:
        # [out, in / 32]: the exponent of the amax, rounded up from 1.75 on, less the 8 powers of two of E4M3.
        bits = block_amax(weight, MXFP8.block).view(torch.int32)
        scale = ((bits + 0x200000 >> 23) - 8).clamp_(0, 254).to(torch.uint8)
        data = cast_fp8_blocks(
            weight, e8m0_to_float(scale, inverse=True), MXFP8.block, DType.kFloat8E4M3
        )
    return {"weight": data.view(E4M3), "weight_scale": scale.contiguous()}


def encode_nvfp4(weight: Tensor, options: WeightOptions, whole: Tensor | None = None) -> Parts:
    """Return packed data of a weight [out, in], uint8 [out, in / 2], E4M3 scales [out, in / 16] and the divisor [1].

    `whole` is the divisor; None: the weight has its own. compressed-tensors and Transformer Engine round where these
    multiply and divide the two levels of scales.
    """
    rows, columns = weight.shape
    if options.scheme == "NVFP4BlockScaling":
        quantizer = NVFP4Quantizer(columnwise=False, with_2d_quantization=options.square)
        tensor = quantizer(_with_rows(weight, 16))
        data = tensor._rowwise_data[:rows]
        whole = global_scale(tensor._amax_rowwise)
        scale = tensor._rowwise_scale_inv[:rows, : columns // 16].contiguous().view(E4M3)
    else:
        amax = block_amax(weight, NVFP4.block)
        if whole is None:
            whole = global_scale(amax.amax())
        scale = (whole * quotient(amax, FP4_MAX)).clamp_(max=E4M3_MAX).to(E4M3)
        # A scale of zero would lose the block, and readers divide by it.
        scale = torch.where(scale.float() == 0, SMALLEST, scale.float()).to(E4M3)
        # [out, 1, in / 16, 1], for the blocks of `split_blocks`.
        divisors = (scale.float() / whole)[:, None, :, None]
        values = merge_blocks(split_blocks(weight.float(), NVFP4.block) / divisors, rows, columns)
        data = pack(encode_e2m1(values.clamp_(-FP4_MAX, FP4_MAX).contiguous()))
    return {"weight_packed": data, "weight_scale": scale, GLOBAL_SCALE: whole}


def _with_rows(weight: Tensor, multiple: int) -> Tensor:
    """Return a weight with rows of zeros up to a multiple, which TE's quantizers ask for."""
    return F.pad(weight, (0, 0, 0, -len(weight) % multiple)).contiguous()


def global_scale(amax: Tensor) -> Tensor:
    """Return NVFP4's divisor of a tensor with this amax, FP32 [1]: values times it are data times block scales.

    It is 1 for zero, and FP32's largest number where the quotient is infinite, as in Transformer Engine.
    """
    scale = (torch.full_like(amax, TOP) / amax).clamp(max=FLT_MAX)
    return torch.where(amax > 0, scale, 1.0).reshape(1)


def _block_config(ignored: list[str]) -> Fields:
    """Return the keys of DeepSeek and Qwen; vLLM reads ignored_layers, transformers modules_to_not_convert."""
    lists = {"ignored_layers": ignored, "modules_to_not_convert": ignored}
    kind = {"activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": list(BLOCK.block)}
    return {"quant_method": "fp8", **kind, **lists}


def _compressed_config(
    format: str, weights: Document, inputs: Document
) -> Callable[[list[str]], Fields]:
    """Return a function that makes the config of a format of compressed-tensors."""

    def make(ignored: list[str]) -> Fields:
        bits = 4 if format.startswith("nvfp4") else 8
        number = {"num_bits": bits, "type": "float", "symmetric": True}
        group = {
            "targets": ["Linear"],
            "weights": {**number, "dynamic": False, **weights},
            "input_activations": {**number, "dynamic": True, **inputs},
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": format,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ignored,
            "kv_cache_scheme": None,
        }

    return make


_GROUP_32 = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
_GROUP_16 = {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
# By the names that --format takes. To add one: docs/internals/design.md, "Add an export format".
FORMATS: dict[str, ExportFormat] = {
    "fp8-block": ExportFormat(BLOCK, _block_config),
    "fp8-tensor": ExportFormat(
        TENSOR,
        lambda ignored: {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "ignored_layers": ignored,
        },
        static="input_scale",
        encode=encode_tensor,
    ),
    "fp8-channel": ExportFormat(
        CHANNEL,
        _compressed_config("float-quantized", {"strategy": "channel"}, {"strategy": "token"}),
        encode=encode_channels,
    ),
    "mxfp8": ExportFormat(
        MXFP8,
        _compressed_config("mxfp8-quantized", _GROUP_32, _GROUP_32),
        columns=32,
        encode=encode_mxfp8,
    ),
    "nvfp4": ExportFormat(
        NVFP4,
        _compressed_config("nvfp4-pack-quantized", _GROUP_16, {**_GROUP_16, "dynamic": "local"}),
        columns=16,
        static="input_global_scale",
        encode=encode_nvfp4,
    ),
    "bf16": ExportFormat(None, lambda ignored: {}),
}


def static_scale(format: ExportFormat, amax: float) -> Tensor:
    """Return the stored scale of an input whose largest magnitude is `amax`."""
    if not 0 < amax < float("inf"):
        raise UsageError(
            f"the input of a linear layer has the largest magnitude {amax}, from which no scale can be made"
        )
    value = torch.tensor(amax, dtype=torch.float32)
    return global_scale(value) if format.static == "input_global_scale" else scale_of(value)
