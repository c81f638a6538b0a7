"""MXFP8 and NVFP4 against torchao, which computes them independently: no Hopper GPU can run Transformer Engine's."""

import warnings

import pytest
import torch
from bits import assert_same_bits
from torch import Tensor

import te_models.engine.emulated as te
from te_models.numerics.formats import DType

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
    assert_same_bits(
        "t._rowwise_scale_inv[:m, : k // 32]", t._rowwise_scale_inv[:m, : k // 32], scale
    )
    scale, codes = to_mx(x.t().contiguous(), dtype)
    assert_same_bits("t._columnwise_data", t._columnwise_data, codes.t())
    assert_same_bits(
        "t._columnwise_scale_inv[: m // 32, :k]", t._columnwise_scale_inv[: m // 32, :k], scale.t()
    )


@pytest.mark.parametrize("chunk", range(2))
def test_mxfp8_random(chunk: int) -> None:
    """200 tensors of random shapes, dtypes and magnitudes."""
    g = torch.Generator().manual_seed(chunk)
    for i in range(100):
        m, k = (32 * int(n) for n in torch.randint(1, 5, (2,), generator=g))
        spread = torch.rand((), generator=g).item() * 20
        exponent = torch.randn(m, k, generator=g) * spread + torch.randn((), generator=g) * 15
        x = torch.randn(m, k, generator=g) * torch.exp2(exponent.clamp(-120, 120))
        x[torch.rand(m, k, generator=g) < 0.1] = 0
        assert_equal_to_torchao(x.to((torch.bfloat16, torch.float32)[i % 2]), (*FP8,)[i // 2 % 2])


def test_nvfp4_agrees_in_every_bit_with_power_of_two_scales() -> None:
    """With exact scales the order of multiplications does not matter."""
    g = torch.Generator().manual_seed(0)
    x = torch.randint(-12, 13, (128, 256), generator=g).float() / 2
    x[:, ::16] = 6.0
    x[0, 0] = 6.0 * 448
    t = te.NVFP4Quantizer(columnwise=False)(x)
    scale, packed = nvfp4_tensor.nvfp4_quantize(x, 16, torch.tensor(1.0))
    assert_same_bits(
        "t._rowwise_scale_inv[:128, :16]", t._rowwise_scale_inv[:128, :16], scale.view(torch.uint8)
    )
    assert_same_bits("t._rowwise_data", t._rowwise_data, packed.view(torch.uint8))
