"""MXFP8 and NVFP4 against torchao, which computes them independently: no Hopper GPU can run Transformer Engine's."""

from __future__ import annotations

import warnings

import pytest
import torch
from bits import assert_same_bits
from torch import Tensor

import te_models.engine.emulated as te
from te_models.engine.emulated.numerics import DType

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    nvfp4_tensor = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    config = pytest.importorskip("torchao.prototype.mx_formats.config")

FP8 = {DType.kFloat8E4M3: torch.float8_e4m3fn, DType.kFloat8E5M2: torch.float8_e5m2}


def to_mx(x: Tensor, dtype: DType) -> tuple[Tensor, Tensor]:
    """torchao's scale bytes `[M, K/32]` and codes `[M, K]`."""
    scale, codes = mx_tensor.to_mx(x, FP8[dtype], 32, config.ScaleCalculationMode.RCEIL)
    return scale.view(torch.uint8), codes.view(torch.uint8)


def assert_equal_to_torchao(x: Tensor, dtype: DType) -> None:
    """Codes and scale bytes of both copies."""
    m, k = x.shape
    t = te.MXFP8Quantizer(dtype)(x)
    scale, codes = to_mx(x, dtype)
    assert_same_bits("t._rowwise_data", t._rowwise_data, codes)
    assert_same_bits("t._rowwise_scale_inv[:m, : k // 32]", t._rowwise_scale_inv[:m, : k // 32], scale)
    scale, codes = to_mx(x.t().contiguous(), dtype)
    assert_same_bits("t._columnwise_data", t._columnwise_data, codes.t())
    assert_same_bits("t._columnwise_scale_inv[: m // 32, :k]", t._columnwise_scale_inv[: m // 32, :k], scale.t())


@pytest.mark.parametrize("chunk", range(10))
def test_mxfp8_random(chunk: int) -> None:
    """1,000 tensors of random shapes, dtypes and magnitudes."""
    g = torch.Generator().manual_seed(chunk)
    for i in range(100):
        m, k = (32 * int(n) for n in torch.randint(1, 5, (2,), generator=g))
        spread = torch.rand((), generator=g).item() * 20
        exponent = torch.randn(m, k, generator=g) * spread + torch.randn((), generator=g) * 15
        x = torch.randn(m, k, generator=g) * torch.exp2(exponent.clamp(-120, 120))
        x[torch.rand(m, k, generator=g) < 0.1] = 0
        assert_equal_to_torchao(x.to((torch.bfloat16, torch.float32)[i % 2]), (*FP8,)[i // 2 % 2])


@pytest.mark.parametrize("dtype", FP8)
def test_mxfp8_edges(dtype: DType) -> None:
    top = {DType.kFloat8E4M3: 448.0, DType.kFloat8E5M2: 57344.0}[dtype]
    # From the smallest block that has scale byte 1 even for its rows of a third: test_mxfp8_differs_for_scale_byte_0.
    powers = torch.exp2(torch.arange(-126.0 + torch.tensor(top).log2().ceil().item() + 2, 120.0))
    # BF16 neighbors: torchao takes log2 in FP32, which cannot tell a power of two from its FP32 neighbors.
    near = torch.cat([powers, powers * (1 + 2**-7), powers * (1 - 2**-8)])
    values = [0.0, -0.0, 3.3e38, torch.inf, -torch.inf, 448.0, 449.0, 464.0, 465.0, 57344.0, 61440.0]
    edges = torch.cat([near, near * (top / 2 ** torch.tensor(top).log2().floor()), torch.tensor(values)])
    for value in edges.tolist():
        x = torch.full((32, 32), value / 3 if abs(value) < torch.inf else 1.0)
        x[0] = value
        assert_equal_to_torchao(x.bfloat16(), dtype)


def test_mxfp8_differs_where_a_block_holds_nan() -> None:
    """torchao gives the block scale byte 255 and loses it; Transformer Engine ignores NaN for the amax."""
    x = torch.ones(32, 32)
    x[0, 0] = torch.nan
    t = te.MXFP8Quantizer(DType.kFloat8E4M3)(x)
    scale, _ = to_mx(x, DType.kFloat8E4M3)
    assert scale[0, 0] == 255 and t._rowwise_scale_inv[0, 0] == 119
    assert t.dequantize().isnan().sum() == 1


@pytest.mark.parametrize("dtype", FP8)
def test_mxfp8_differs_for_scale_byte_0(dtype: DType) -> None:
    """Blocks below 2^-127 of the format's maximum: Transformer Engine 2.20 multiplies by 2^127, torchao by 1."""
    x = torch.full((32, 32), 1e-37)
    t = te.MXFP8Quantizer(dtype)(x)
    scale, codes = to_mx(x, dtype)
    assert (t._rowwise_scale_inv[:32, 0] == 0).all() and (scale == 0).all()
    assert (codes == 0).all()
    torch.testing.assert_close(t.dequantize(), x, rtol=2.0**-3, atol=0)


def boundary_distance(values: Tensor, grid: Tensor) -> Tensor:
    """Relative distance of FP64 values from the nearest midpoint of an ascending grid."""
    middle = (grid[1:] + grid[:-1]).double() / 2
    return (values[..., None] / middle - 1).abs().amin(-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("seed", range(20))
def test_nvfp4_differs_only_at_rounding_boundaries(dtype: torch.dtype, seed: int) -> None:
    """The two multiply the same scales in another order, so they part where FP32 rounding decides a tie."""
    g = torch.Generator().manual_seed(seed)
    x = (torch.randn(128, 256, generator=g) * torch.exp2(torch.randn(128, 1, generator=g))).to(dtype)
    t = te.NVFP4Quantizer(columnwise=False)(x)
    per_tensor = x.abs().max().float() / (6 * 448)
    ao_scale, packed = nvfp4_tensor.nvfp4_quantize(x, 16, per_tensor)
    scale = t._rowwise_scale_inv[:128, :16].contiguous().view(torch.float8_e4m3fn)
    same = scale.view(torch.uint8) == ao_scale.view(torch.uint8)
    e4m3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    exact = x.double().view(128, 16, 16).abs().amax(2) / 6 / per_tensor.double()
    assert (boundary_distance(exact[~same], e4m3) < 1e-6).all()
    assert same.float().mean() > 0.95

    ours, theirs = (unpacked(p).view(128, 16, 16)[same] for p in (t._rowwise_data, packed.view(torch.uint8)))
    exact = x.double().abs().view(128, 16, 16)[same] / (scale.double()[same] * per_tensor.double())[:, None]
    differ = ours != theirs
    assert (boundary_distance(exact[differ], torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])) < 1e-6).all()
    assert differ.float().mean() < 0.01


def unpacked(packed: Tensor) -> Tensor:
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def test_nvfp4_agrees_in_every_bit_with_power_of_two_scales() -> None:
    """With exact scales the order of multiplications does not matter."""
    g = torch.Generator().manual_seed(0)
    x = torch.randint(-12, 13, (128, 256), generator=g).float() / 2
    x[:, ::16] = 6.0
    x[0, 0] = 6.0 * 448
    t = te.NVFP4Quantizer(columnwise=False)(x)
    scale, packed = nvfp4_tensor.nvfp4_quantize(x, 16, torch.tensor(1.0))
    assert_same_bits("t._rowwise_scale_inv[:128, :16]", t._rowwise_scale_inv[:128, :16], scale.view(torch.uint8))
    assert_same_bits("t._rowwise_data", t._rowwise_data, packed.view(torch.uint8))


def test_nvfp4_differs_for_scales_that_underflow() -> None:
    x = torch.full((16, 16), 1e-6)
    x[0, 0] = 2688.0
    t = te.NVFP4Quantizer(columnwise=False)(x)
    scale, _ = nvfp4_tensor.nvfp4_quantize(x, 16, torch.tensor(1.0))
    assert t._rowwise_scale_inv[1, 0] == 0 and scale.view(torch.uint8)[1, 0] == 8
