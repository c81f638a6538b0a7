"""The formats of exports over the whole range of FP32: dequantized in FP64, every value is within its rounding."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from fewer import every
from torch import Tensor

from te_models import CausalLM, ModelConfig
from te_models.cli.export import export
from te_models.errors import UsageError
from te_models.interop.quantized import GLOBAL_SCALE
from te_models.serving.export import TOO_LARGE
from te_models.serving.formats import FORMATS, Parts, WeightOptions, encode_blocks, static_scale
from te_models.serving.served import INPUTS

TINY = 2.0**-126  # the smallest normal number
SCHEMES = {
    "fp8-block": ("none", "Float8BlockScaling"),
    "fp8-tensor": ("none",),
    "fp8-channel": ("none",),
    "mxfp8": ("none", "MXFP8BlockScaling"),
    "nvfp4": ("none", "NVFP4BlockScaling"),
}
OPTIONS = [
    (format, WeightOptions(scheme, power_of_2, square))
    for format, schemes in SCHEMES.items()
    for scheme in schemes
    for power_of_2 in ([False, True] if scheme == "Float8BlockScaling" else [False])
    for square in (
        [False, True] if scheme in ("MXFP8BlockScaling", "NVFP4BlockScaling") else [False]
    )
]
# Around every bound: subnormal numbers, infinite reciprocals, 448 or 2688 over the largest number, and that number.
LARGEST = [0.0, *(2.0**e * f for e, f in itertools.product(range(-149, 128, 3), (1.0, 1.9))), 1.3e-36, 1.32e-36,
           2.9e-39, 5.2e-36, 7.8e-36, 3e-43, 1e-42, TOO_LARGE * (1 - 2.0**-8)]  # fmt: skip
SHAPE = torch.cat(
    [torch.tensor([1.0, -1.0, 0.0, -0.0]), torch.linspace(-1, 1, 60), 2.0 ** -torch.arange(64.0)]
)


def decoded(format: str, parts: Parts, shape: tuple[int, int]) -> Tensor:
    """The FP64 values of a stored weight: data times scales."""
    if format == "nvfp4":
        grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]).double()
        codes = (
            torch.stack([parts["weight_packed"] & 15, parts["weight_packed"] >> 4], 2)
            .flatten(1)
            .int()
        )
        data = torch.where(codes > 7, -grid[codes & 7], grid[codes & 7])
        scale = parts["weight_scale"].double() / parts[GLOBAL_SCALE].double()
    else:
        data = parts["weight"].double()
        scale = parts.get("weight_scale", parts.get("weight_scale_inv", torch.ones(()))).double()
        if format == "mxfp8":
            scale = torch.exp2(scale - 127)
    if scale.dim():
        for dim in (0, 1):
            scale = scale.repeat_interleave(-(-shape[dim] // scale.shape[dim]), dim).narrow(
                dim, 0, shape[dim]
            )
    return data * scale


def encode(format: str, weight: Tensor, options: WeightOptions) -> Parts:
    function = FORMATS[format].encode
    return encode_blocks(weight, options) if function is None else function(weight, options)


def bound(format: str, x: Tensor, amax: float) -> Tensor:
    """Half a step of E4M3 or of E2M1 with its E4M3 scale; below the smallest normal number everything may be lost."""
    if format == "nvfp4":
        return x.abs() * (1 / 6 + 1 / 16) + amax * (1 / 6) * (1 + 1 / 16) + TINY
    return x.abs() * 2.0**-4 * (1 + 2.0**-10) + amax * 2.0**-16 * (1 + 2.0**-10) + TINY


@pytest.mark.parametrize(
    ("choice", "source"), every(2, OPTIONS, [torch.float32, torch.bfloat16]), ids=str
)
def test_every_magnitude_comes_back(choice: tuple[str, WeightOptions], source: torch.dtype) -> None:
    format, options = choice
    for amax in LARGEST:
        weight = (torch.outer(torch.tensor([1.0, 0.5, 1e-3, 0.0]), SHAPE).double() * amax).to(
            source
        )
        parts = encode(format, weight, options)
        x, found = weight.double(), decoded(format, parts, (4, 128))
        assert ((found - x).abs() <= bound(format, x, x.abs().max().item())).all(), amax
        assert found.float().isfinite().all(), amax
        for name, tensor in parts.items():
            assert tensor.dtype == torch.uint8 or tensor.float().isfinite().all(), (name, amax)
            # A block far below the largest value of its tensor has a scale of zero under Transformer Engine.
            if "scale" in name and tensor.dtype == torch.float32:
                assert (tensor > 0).all(), (name, amax)


@pytest.mark.parametrize("format", ["fp8-channel", "fp8-block", "mxfp8", "nvfp4"])
def test_blocks_of_other_magnitudes_are_left_alone(format: str) -> None:
    """A tensor whose blocks lie far apart: each is what it is alone, save NVFP4's, which share a scale."""
    weight = torch.cat([SHAPE.repeat(128, 1) * amax for amax in (1e-44, 1e-40, 1e-37, 1.0, 1e37)])
    found = decoded(format, encode(format, weight, WeightOptions()), (640, 128))
    for part, whole in zip(weight.split(128), found.split(128), strict=True):
        alone = decoded(format, encode(format, part, WeightOptions()), (128, 128))
        if format == "nvfp4":
            assert (whole.abs() <= part.abs().amax() * (1 + 1 / 16) + 1e37 / 2688 * 2.0**-9).all()
        else:
            assert torch.equal(whole, alone)


@pytest.mark.parametrize("name", [name for name in INPUTS if name != "none"])
def test_inputs_of_every_magnitude_are_served(name: str) -> None:
    format = {"static": "fp8-tensor", "nvfp4": "nvfp4"}.get(name, "fp8-channel")
    for amax in LARGEST:
        x = torch.outer(torch.tensor([1.0, 0.5, 1e-3, 0.0]), SHAPE) * amax
        largest = x.abs().max().item()
        static = (
            static_scale(FORMATS[format], largest)
            if name in ("static", "nvfp4") and largest
            else None
        )
        if static is None and name in ("static", "nvfp4"):
            continue
        found = INPUTS[name](x, static).double()
        assert ((found - x.double()).abs() <= bound(format, x.double(), largest)).all(), amax


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -TOO_LARGE], ids=str)
def test_a_weight_that_no_format_holds_is_refused(value: float, tmp_path: Path) -> None:
    sizes: dict[str, Any] = dict(
        vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=3
    )
    sizes |= dict(
        num_attention_heads=2, num_key_value_heads=2, head_dim=32, max_position_embeddings=32
    )
    model = CausalLM(
        ModelConfig(**sizes, attention_gate="none"),
        recipe="bf16",
        device="cpu",
        dtype=torch.float32,
    )
    with torch.no_grad():
        model.layers[1].mlp.down_proj.weight[3, 5] = value
    # An infinity or a NaN is refused in every format, before weights are quantized.
    reason = "has values that are not finite" if value == -TOO_LARGE else "has a NaN or an infinity"
    for format in ("fp8-block", "fp8-channel", "mxfp8"):
        with pytest.raises(UsageError, match=f"layers.1.mlp.down_proj.weight {reason}") as found:
            model.export(tmp_path / "out", format=format)
        assert "\n" not in str(found.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options", [WeightOptions(), WeightOptions("Float8BlockScaling", power_of_2=True)], ids=str
)
@pytest.mark.parametrize("shape", [(200, 256), (256, 200), (200, 200), (100, 256), (256, 256)])
def test_blocks_of_a_size_that_is_no_multiple_of_128(
    shape: tuple[int, int], options: WeightOptions
) -> None:
    """Blocks along a dimension that is not a multiple share the scale of the largest; others have their own."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weight[:128, :128] *= 64  # the first block
    parts = encode_blocks(weight, options)
    scale = parts["weight_scale_inv"]
    assert scale.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    for i, j in itertools.product(range(scale.shape[0]), range(scale.shape[1])):
        rows = slice(None) if shape[0] % 128 else slice(128 * i, 128 * i + 128)
        columns = slice(None) if shape[1] % 128 else slice(128 * j, 128 * j + 128)
        multiplier = 448 / weight[rows, columns].abs().max().double()
        if options.power_of_2:
            multiplier = torch.exp2(multiplier.log2().floor())
        torch.testing.assert_close(scale[i, j].double(), 1 / multiplier, rtol=3e-7, atol=0)
    error = (decoded("fp8-block", parts, shape) - weight).abs()
    assert (error <= bound("fp8-block", weight.double(), weight.abs().max().item())).all()


@pytest.mark.parametrize(
    ("format", "scheme"),
    [("mxfp8", "MXFP8BlockScaling"), ("nvfp4", "NVFP4BlockScaling"), ("fp8-channel", "none")],
)
def test_rows_that_fill_no_block_have_no_padding(format: str, scheme: str) -> None:
    weight = torch.randn(37, 64, generator=torch.Generator().manual_seed(0))
    parts = encode(format, weight, WeightOptions(scheme))
    assert all(len(tensor) == 37 for tensor in parts.values() if tensor.dim() > 1)
    padded = encode(format, torch.cat([weight, torch.zeros(27, 64)]), WeightOptions(scheme))
    assert torch.equal(decoded(format, parts, (37, 64)), decoded(format, padded, (64, 64))[:37])


def test_a_block_scale_of_nvfp4_that_rounds_to_zero_is_an_eighth() -> None:
    """As in compressed-tensors: the block's values are zeros, and nothing divides by zero."""
    weight = torch.ones(1, 64)
    weight[:, 16:32] *= 2.0**-17  # 2^-17 / 6 * 2688 = 2^-8.2, which E4M3 holds
    weight[:, 32:48] *= 2.0**-20  # 2^-11.2, less than half of its smallest number
    weight[:, 48:] = 0
    parts = encode("nvfp4", weight, WeightOptions())
    assert parts["weight_scale"].float().tolist() == [[448.0, 2.0**-8, 0.125, 0.125]]
    assert (decoded("nvfp4", parts, (1, 64))[:, 32:] == 0).all()


def test_every_format_is_named_to_the_user_and_can_be_served_here() -> None:
    """As docs/internals/design.md lists what a new format needs."""
    option = next(option for option in export.params if option.name == "format")
    guide = (Path(__file__).parents[2] / "docs/guide/serving.md").read_text()
    for name, format in FORMATS.items():
        assert name in str(option.to_info_dict()["help"]) and f'"{name}"' in str(
            CausalLM.export.__doc__
        )
        assert f"\n| `{name}` | `weight" in guide, "the table of formats in detail"
        assert format.storage is None or format.storage.activations in INPUTS
