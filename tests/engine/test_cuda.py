"""The emulated engine on a CUDA device: the same FP8 values, scales and histories as on the CPU, in every bit."""

import engine_reference
import pytest
import torch
from bits import assert_same_bits
from torch import Tensor

import te_models.engine.emulated as te
from te_models.engine.emulated import recipe as R
from te_models.engine.emulated.fused import fused
from te_models.engine.emulated.numerics import DType

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
RECIPES = engine_reference.RECIPES | {
    "nvfp4": lambda: R.NVFP4BlockScaling(disable_stochastic_rounding=True)
}
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


@pytest.mark.parametrize("name", RECIPES)
def test_kernels_change_nothing(name: str) -> None:
    with fused(False):
        plain = train("cuda", name, None)
    with fused(True):
        kernels = train("cuda", name, None)
    assert all(torch.equal(a, b) for a, b in zip(plain, kernels, strict=True))


def train(device: str, name: str, reentrant: bool | None) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    norm = te.RMSNorm(256, dtype=BF16, device=device)
    layers = [te.Linear(256, 256, params_dtype=BF16, device=device) for _ in range(2)]
    found: list[Tensor] = []
    with torch.no_grad():
        for m in layers:
            m.weight.copy_(torch.randn(256, 256, generator=g) * 0.05)
    recipe = RECIPES[name]()
    for step in range(4):
        x = (torch.randn(128, 256, generator=g) * 2**step).to(BF16).to(device).requires_grad_()

        def function(v: Tensor) -> Tensor:
            return layers[1](torch.nn.functional.silu(layers[0](norm(v))))

        with te.autocast(recipe=recipe):
            y = (
                function(x)
                if reentrant is None
                else te.checkpoint(function, x, use_reentrant=reentrant)
            )
        y.backward(torch.randn(128, 256, generator=g).to(BF16).to(device))
        found += [y.detach(), x.grad, layers[0].weight.grad, layers[1].bias.grad]
        if name == "delayed":
            found += [
                m.fp8_meta[d].scale.clone() for m in layers for d in ("scaling_fwd", "scaling_bwd")
            ]
    return [t.float().cpu() for t in found]


@pytest.mark.parametrize("name", RECIPES)
def test_layers_agree_with_the_cpu(name: str) -> None:
    # Another order of accumulation moves BF16 steps of the first layer, and those FP8 codes of the second.
    for a, b in zip(train("cpu", name, None), train("cuda", name, None), strict=True):
        assert (a - b).norm() <= 2e-2 * a.norm()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_checkpoint_changes_nothing(name: str, reentrant: bool) -> None:
    plain, checkpointed = train("cuda", name, None), train("cuda", name, reentrant)
    assert all(torch.equal(a, b) for a, b in zip(plain, checkpointed, strict=True))
