"""A quantized checkpoint as a server computes it, on any device: dequantized weights, inputs quantized per forward.

A linear multiplies the products of data and scales in FP32 and rounds its result once, as the scaled GEMMs of servers
do. Inputs are quantized as the format's kernels in vLLM do: per token (`scaled_fp8_quant`), per token and 128
channels (`per_token_group_quant_fp8`), per 32 channels with E8M0 scales, per 16 with E4M3 scales under a static
divisor, or with a static scale. Everything else is the model in its own dtype, under recipe "bf16".
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from te_models.interop.hf import HuggingFaceFolder
from te_models.interop.quantized import (
    CHANNEL,
    GLOBAL_SCALE,
    MXFP8,
    NVFP4,
    WeightStorage,
    dequantize,
)
from te_models.model.decoder import Decoder
from te_models.numerics import casts
from te_models.numerics.blocks import block_amax, merge_blocks, split_blocks
from te_models.numerics.e8m0 import e8m0_to_float
from te_models.numerics.formats import DType
from te_models.saving.pretrained import open_model
from te_models.serving.formats import (
    E4M3_MAX,
    WeightOptions,
    encode_channels,
    encode_mxfp8,
    encode_nvfp4,
    scale_of,
)


class ServedLinear(nn.Module):
    """A linear with the dequantized weight of a checkpoint, which quantizes its input as a server does.

    It takes weight FP32 [out, in], bias [out] or None, the checkpoint's scheme, and the input's static scale, if any.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, scheme: WeightStorage, static: Tensor | None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.quantize = INPUTS[scheme.activations]
        self.static = static

    def forward(self, x: Tensor, **options: object) -> Tensor:
        """Return [N, out] for x [N, in], in the dtype of x; `options` of te.Linear are ignored."""
        inputs = self.quantize(x.float(), self.static)
        bias = None if self.bias is None else self.bias.float()
        return F.linear(inputs, self.weight, bias).to(x.dtype)


class ServedExperts(nn.Module):
    """The linears of experts, as te.GroupedLinear has them."""

    def __init__(self, linears: list[nn.Module]) -> None:
        super().__init__()
        self.linears = nn.ModuleList(linears)

    def forward(self, x: Tensor, rows: list[int], **options: object) -> Tensor:
        """Return [R, out] for x [R, in], of which each expert has the next of these `rows`; some have none."""
        parts = zip(self.linears, x.split(rows), strict=True)
        return torch.cat([linear(part) for linear, part in parts if len(part)])


def _as_it_is(x: Tensor, static: Tensor | None) -> Tensor:
    return x


def _static(x: Tensor, static: Tensor | None) -> Tensor:
    """Quantize with one stored scale, of which vLLM takes the reciprocal; larger values saturate."""
    assert static is not None
    codes = casts.cast_fp8(x, static.reciprocal(), DType.kFloat8E4M3)
    return casts.decode_fp8(codes, DType.kFloat8E4M3) * static


def _per_token(x: Tensor, static: Tensor | None) -> Tensor:
    encoded = encode_channels(x, WeightOptions())
    return dequantize(CHANNEL, encoded["weight"], encoded["weight_scale"])


def _per_group(x: Tensor, static: Tensor | None) -> Tensor:
    """Quantize with one FP32 scale per token and 128 channels."""
    block = (1, 128)
    scale = scale_of(block_amax(x, block))[
        :, None, :, None
    ]  # one per block of [N, 1, in / 128, 128]
    values = split_blocks(x, block) / scale
    codes = values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return merge_blocks(codes.float() * scale, *x.shape)


def _mxfp8(x: Tensor, static: Tensor | None) -> Tensor:
    encoded = encode_mxfp8(x, WeightOptions("MXFP8BlockScaling"))
    return dequantize(MXFP8, encoded["weight"], e8m0_to_float(encoded["weight_scale"]))


def _nvfp4(x: Tensor, static: Tensor | None) -> Tensor:
    encoded = encode_nvfp4(x, WeightOptions(), whole=static)
    return dequantize(
        NVFP4, encoded["weight_packed"], encoded["weight_scale"].float() / encoded[GLOBAL_SCALE]
    )


# WeightStorage.activations -> a function of x, FP32 [N, in], and the static scale, that returns the dequantized input.
INPUTS = {
    "none": _as_it_is,
    "static": _static,
    "token": _per_token,
    "block": _per_group,
    "mxfp8": _mxfp8,
    "nvfp4": _nvfp4,
}


@torch.no_grad()
def read_served(folder: str | Path, device: torch.device | str) -> Decoder:
    """Return the model of a quantized Hugging Face folder with its linears as a server computes them.

    Raises:
        CheckpointError: the folder is damaged or not supported.
    """
    options = dict(recipe="bf16", engine="emulated", device=device, compile=False, fused=False)
    with open_model(Decoder, Path(folder), options) as (model, opened):
        if isinstance(opened, HuggingFaceFolder) and opened.stored.storage is not None:
            _replace_linears(model, opened, opened.stored.storage)
    return model.eval()


def _replace_linears(model: Decoder, opened: HuggingFaceFolder, scheme: WeightStorage) -> None:
    """Replace the linears of quantized weights."""
    places = {name: place for name, place in opened.places.items() if name in opened.stored.scales}
    owners = {place.name for place in places.values()}
    values = opened.parameters(torch.empty(0))
    weights = {name: weight.float() for name, weight in values if name in owners}
    served: dict[str, list[nn.Module]] = {}
    # In the order of the model: files have expert 10 before 2.
    quantized_names = [name for name, _ in model.named_parameters() if name in weights]
    for name in quantized_names:
        weight = weights[name]
        # A server takes the largest static scale of the weights that it fuses.
        static = []
        for theirs, place in places.items():
            if place.name == name and theirs in opened.stored.inputs:
                static.append(opened.stored.inputs[theirs])
        largest = torch.stack(static).amax().to(model.device) if static else None
        path, _, kind = name.rpartition(".")
        biases = dict(model.get_submodule(path).named_parameters())
        bias = biases.get(kind.replace("weight", "bias"))
        served.setdefault(path, []).append(
            ServedLinear(weight.to(model.device), bias, scheme, largest)
        )
    for path, linears in served.items():
        parent, _, last = path.rpartition(".")
        replacement = linears[0]
        # The head is no linear of a layer.
        if path in model.config.linears and model.config.linears[path].experts:
            replacement = ServedExperts(linears)
        setattr(model.get_submodule(parent), last, replacement)
