"""Quantizers on a CUDA device: the same bits as on the CPU, and with Triton kernels as with plain functions."""

import engine_reference
import pytest
import torch
from bits import assert_same_bits
from torch import Tensor

import te_models.engine.emulated as te
from te_models.numerics.formats import DType
from te_models.numerics.fused import fused

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
QUANTIZERS = ("delayed", "current", "block1", "block2_fp32", "mxfp8", "nvfp4")
MADE = engine_reference.QUANTIZERS | {
    "nvfp4_gradient": lambda d, at: te.NVFP4Quantizer(
        with_rht=True, stochastic_rounding=True, generator=torch.Generator(at).manual_seed(0)
    ),
}


def bits(tensor: Tensor) -> Tensor:
    """A NaN's are the processor's."""
    if tensor.is_floating_point():
        tensor = tensor.masked_fill(tensor.isnan(), torch.nan)
    return tensor.cpu().contiguous().view(torch.uint8)


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("dtype", [DType.kFloat8E4M3, DType.kFloat8E5M2])
@pytest.mark.parametrize("source", [BF16, torch.float32])
def test_quantizers(name: str, dtype: DType, source: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(256, 384, generator=g) * torch.logspace(-9, 9, 256, base=2)[:, None]
    x[0, :7] = torch.tensor([0.0, -0.0, 448.0, 449.0, 464.0, 465.0, 1e4])
    x[1] = 0
    x = x.to(source)
    a, b = MADE[name](dtype, "cpu")(x), MADE[name](dtype, "cuda")(x.cuda())
    for left, right in zip(a.get_data_tensors(), b.get_data_tensors(), strict=True):
        assert right.is_cuda and torch.equal(bits(left), bits(right))
    assert_same_bits("bits(a.dequantize())", bits(a.dequantize()), bits(b.dequantize()))


@pytest.mark.parametrize("name", [*QUANTIZERS, "nvfp4_2d", "nvfp4_gradient"])
@pytest.mark.parametrize("dtype", [DType.kFloat8E4M3, DType.kFloat8E5M2])
@pytest.mark.parametrize("shape", [(256, 384), (4096, 1056), (96, 32)])
def test_kernels_against_plain_functions(name: str, dtype: DType, shape: tuple[int, int]) -> None:
    g = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(shape, device="cuda", generator=g)
    x *= torch.exp2(torch.randn(shape, device="cuda", generator=g) * 12)
    x[5, 7], x[6] = 1e-42, 0.0
    if not name.startswith("nvfp4"):  # of which a NaN leaves nothing
        x[3, 5], x[4, 6] = torch.nan, torch.inf
    for source in (BF16, torch.float16, torch.float32):
        with fused(False):
            a = MADE[name](dtype, "cuda")(x.to(source))
        with fused(True):
            b = MADE[name](dtype, "cuda")(x.to(source))
        for left, right in zip(a.get_data_tensors(), b.get_data_tensors(), strict=True):
            assert_same_bits("bits(left)", bits(left), bits(right))
