"""Every quantizer over the whole range of FP32, subnormals, infinities and NaN included, against FP64 arithmetic.

The rules are those of sections 2 to 6 of docs/internals/transformer_engine.md. Each operation is computed in FP64 and
rounded to FP32, which for one product or quotient of FP32 numbers is the same as rounding once.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from engine_reference import nearest
from numpy.typing import NDArray
from torch import Tensor

import te_models.engine.emulated as te
from te_models.numerics.formats import DType
from te_models.numerics.scale_rules import delayed_update

E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2
FP8 = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
MAX = {E4M3: 448.0, E5M2: 57344.0}
FLT_MAX = float(np.finfo(np.float32).max)
SOURCES = (torch.float32, torch.bfloat16, torch.float16)
Values = NDArray[np.float64]

pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning"
)  # of NumPy's overflows and divisions by zero


def f32(x: Values | float) -> Values:
    """Round to FP32."""
    return np.asarray(x).astype(np.float32).astype(np.float64)


def rows(source: torch.dtype) -> Tensor:
    """Rows of 128 values: every binade of FP32, three maxima in each, with values far below them; then special ones."""
    largest = [
        2.0**e * f for e, f in itertools.product(range(-149, 128), (1.0, 1 + 2.0**-23, 1.75))
    ]
    edges = [
        FLT_MAX,
        *(
            2.0**-126 * (1 - 2.0**-23),
            448 / FLT_MAX,
            2688 / FLT_MAX,
            448 * 2.0**-127,
            448 * 2.0**-126,
        ),
    ]
    shape = np.concatenate(
        [
            [1, -1, 0, -0.0],
            np.linspace(-1, 1, 60),
            2.0 ** -np.arange(32),
            -0.7 * 2.0 ** -np.arange(32),
        ]
    )
    table = torch.tensor(np.outer([*largest, *edges], shape)).to(torch.float32)
    special = torch.zeros(5, 128)
    special[1, ::3], special[2, 5], special[3, 7], special[4, 9] = (
        1e-45,
        torch.inf,
        torch.nan,
        -torch.inf,
    )
    special[2:, 64:] = torch.linspace(-3, 500, 64)
    special[4, 10] = torch.nan
    return torch.cat([table, special]).to(source)


def largest_of(x: Values) -> Values:
    """The largest magnitude along the last dimension; NaN does not count."""
    return np.nan_to_num(np.abs(x), nan=0.0, posinf=np.inf).max(-1)


def scale_of(amax: Values, dtype: DType, infinite: float, power_of_2: bool) -> Values:
    scale = f32(MAX[dtype] / amax)
    scale = np.where(np.isinf(scale), infinite, scale)
    scale = np.where((amax == 0) | np.isinf(amax), 1.0, scale)
    return 2.0 ** np.floor(np.log2(scale)) if power_of_2 else scale


def codes(x: Values, scale: Values, dtype: DType) -> Tensor:
    """FP8 bytes by search among all finite values: to nearest even, saturating."""
    grid = torch.arange(127 if dtype == E4M3 else 124, dtype=torch.uint8).view(FP8[dtype]).float()
    product = torch.tensor(f32(x * scale))
    found = nearest(product.abs().clamp(max=MAX[dtype]).nan_to_num(0), grid).to(torch.uint8)
    return found | (product.signbit().to(torch.uint8) << 7)


def assert_codes(found: Tensor, x: Values, scale: Values, dtype: DType) -> None:
    """NaN stays NaN; everything else is the nearest code."""
    nan = torch.tensor(np.isnan(x))
    assert torch.equal(found.view(FP8[dtype]).float().isnan(), nan)
    assert torch.equal(found[~nan], codes(x, scale, dtype)[~nan])


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("power_of_2", [False, True])
class TestScales:
    def test_blocks(self, source: torch.dtype, dtype: DType, power_of_2: bool) -> None:
        tensor = rows(source)
        x = tensor.double().numpy()
        scale = scale_of(largest_of(x), dtype, torch.finfo(source).max, power_of_2)
        for columnwise in (False, True):
            quantizer = te.Float8BlockQuantizer(
                dtype,
                rowwise=not columnwise,
                columnwise=columnwise,
                block_scaling_dim=1,
                force_pow_2_scales=power_of_2,
            )
            made = quantizer(tensor.t().contiguous() if columnwise else tensor)
            data, inverse = made._copy(columnwise)
            assert_codes(data, x, scale[:, None], dtype)
            assert np.array_equal(inverse[0, : len(x)].double().numpy(), f32(1 / scale))

    def test_current(self, source: torch.dtype, dtype: DType, power_of_2: bool) -> None:
        quantizer = te.Float8CurrentScalingQuantizer(dtype, force_pow_2_scales=power_of_2)
        for row in rows(source)[::11]:
            x = row.double().numpy()
            scale = scale_of(largest_of(x), dtype, FLT_MAX, power_of_2)
            made = quantizer(row[None])
            assert_codes(made._data[0], x, scale, dtype)
            assert made._scale_inv.item() == f32(1 / scale)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_delayed(dtype: DType) -> None:
    """A step with each maximum, then a cast with the scale that it left."""
    x = rows(torch.float32)
    largest = torch.tensor(largest_of(x.double().numpy())).float()
    history, before = torch.zeros(3, len(x)), torch.full((len(x),), 7.0)
    history, scale = delayed_update(
        history, before, largest, algorithm="max", margin=0, fp8_max=MAX[dtype]
    )
    kept = (largest == 0) | largest.isinf()
    expected = np.where(kept, 7.0, scale_of(largest.double().numpy(), dtype, FLT_MAX, False))
    assert np.array_equal(scale.double().numpy(), expected)
    for row, factor in zip(x[::5], scale[::5], strict=True):
        amax = torch.zeros(1)
        made = te.Float8Quantizer(factor.reshape(1), amax, dtype)(row[None])
        assert_codes(made._data[0], row.double().numpy(), factor.double().numpy(), dtype)
        assert made._scale_inv.item() == f32(1 / factor.double().numpy())
        assert amax.item() == largest_of(row.double().numpy())


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_mxfp8(source: torch.dtype, dtype: DType) -> None:
    tensor = rows(source)[: 32 * 26]
    tensor = torch.cat([tensor, rows(source)[-32:]])
    x = tensor.double().numpy().reshape(len(tensor), 4, 32)
    quotient = f32(largest_of(x) * f32(1 / MAX[dtype]))
    mantissa, exponent = np.frexp(quotient)
    byte = np.where(quotient == 0, 0, np.clip(exponent - (mantissa == 0.5) + 127, 0, 254))
    byte = np.where(np.isinf(quotient), 254, byte)
    made = te.MXFP8Quantizer(dtype, columnwise=False)(tensor)
    assert np.array_equal(made._rowwise_scale_inv[: len(x), :4].numpy(), byte)
    assert_codes(made._rowwise_data.view(x.shape), x, 2.0 ** (127.0 - byte)[..., None], dtype)
    columns = te.MXFP8Quantizer(dtype, rowwise=False)(tensor.t().contiguous())
    assert torch.equal(columns._columnwise_data.t(), made._rowwise_data)


def nvfp4_reference(x: Values) -> tuple[Tensor, Tensor]:
    """Codes and E4M3 scales of x [8, 16] under TE's reference: a scale per row, and one of the tensor."""
    blocks = np.abs(x).max(-1)  # a NaN is larger than any number
    whole = min(f32(2688 / blocks.max()), FLT_MAX) if not np.isnan(blocks.max()) else np.nan
    whole = 1.0 if whole == 0 else whole
    wanted = torch.tensor(f32(blocks * f32(whole * f32(1 / 6)))).clamp(max=448)
    grid = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    scale = torch.where(wanted.isnan(), torch.nan, grid[nearest(wanted.nan_to_num(0), grid)])
    multiplier = np.minimum(f32(1 / f32(scale.double().numpy() * f32(1 / whole))), FLT_MAX)
    values = torch.tensor(f32(x * multiplier[:, None])).clamp(-6, 6)
    found = nearest(values.abs().nan_to_num(0), torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6.0]))
    return torch.where(values.isnan(), 0, found), scale


def test_nvfp4() -> None:
    """Tensors with every maximum, whose other blocks are smaller, down to scales that round to zero."""
    steps = torch.tensor([1, 0.3, 2.0**-7, 2.0**-14, 2.0**-18, 2.0**-19, 2.0**-60, 0])
    for row in rows(torch.float32)[::5]:
        tensor = (row[:16] * steps[:, None]).repeat(2, 1)
        made = te.NVFP4Quantizer(columnwise=False)(tensor)
        expected, scale = nvfp4_reference(tensor.double().numpy())
        found = made._rowwise_scale_inv[:16, 0].view(torch.float8_e4m3fn).float()
        assert torch.equal(found.nan_to_num(-1), scale.nan_to_num(-1).float())
        packed = made._rowwise_data.int()
        assert torch.equal(torch.stack([packed & 7, packed >> 4 & 7], 2).flatten(1), expected.int())
        if math.isfinite(row.abs().max().item()):
            assert made.dequantize().isfinite().all()
