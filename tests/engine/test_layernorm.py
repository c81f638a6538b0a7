"""te.LayerNorm without its bias: arithmetic against FP64, dtypes, parameters, and the order of its kernels."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import te_models.engine.emulated as te
from te_models.engine import engine_module, planned
from te_models.engine.emulated import layernorm_kernels, rmsnorm_kernels

BF16 = torch.bfloat16
# Rows and columns of each kind of kernel: general with one warp or four, with one block or several, and tuned ones.
SIZES = [(5, 48), (3, 640), (7, 3000), (2, 9000), (4, 768), (8, 1536), (4, 3840), (4, 6144)]
SIZES += [(4, 8192), (4, 12800), (4, 25600)]


def fp64(m: nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """PyTorch's LayerNorm of x, and its gradients for x and the weight, in FP64."""
    wide = x.detach().double().requires_grad_()
    weight = m.get_parameter("weight").detach().double().requires_grad_()
    gamma = weight + 1 if m.zero_centered_gamma else weight
    y = F.layer_norm(wide, wide.shape[-1:], gamma, None, m.eps)
    dx, dw = torch.autograd.grad(y, (wide, weight), dy.double())
    return y.detach(), dx, dw


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize(("rows", "cols"), SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_against_fp64(rows: int, cols: int, zero_centered: bool, dtype: torch.dtype) -> None:
    """Also where the mean is far larger than the deviation, whose square no FP32 sum of squares would hold."""
    torch.manual_seed(0)
    m = te.LayerNormWithoutBias(cols, eps=1e-3, zero_centered_gamma=zero_centered, dtype=dtype)
    nn.init.normal_(m.weight, 0.0 if zero_centered else 1.0, 0.3)
    x = (torch.randn(rows, cols) + torch.linspace(0, 500, rows)[:, None]).to(dtype)
    dy = torch.randn(rows, cols).to(dtype)
    x.requires_grad_()
    y = m(x)
    y.backward(dy)
    bound = 2e-4 if dtype == torch.float32 else 2.0**-8
    for found, expected in zip((y, x.grad, m.weight.grad), fp64(m, x, dy), strict=True):
        assert found.dtype == dtype
        error = (found.double() - expected).abs().max()
        assert error <= bound * expected.abs().max(), error
    with torch.no_grad():
        assert torch.equal(m(x), y)


def test_leading_dimensions_and_empty_batches() -> None:
    m = te.LayerNormWithoutBias(48)
    x = torch.randn(4, 16, 48)
    assert torch.equal(m(x), m(x.view(-1, 48)).view_as(x))
    assert m(torch.randn(3, 0, 48)).shape == (3, 0, 48)
    with pytest.raises(ValueError, match="are not compatible"):
        m(torch.ones(4, 8))


@pytest.mark.parametrize("name", ["emulated", "planned"])
def test_its_weight_is_its_only_parameter(name: str) -> None:
    engine = {"emulated": te, "planned": planned}[name]
    m = engine.LayerNormWithoutBias(8, device="meta", dtype=BF16, zero_centered_gamma=True)
    assert [*dict(m.named_parameters())] == ["weight"] and not list(m.buffers())
    assert list(m.state_dict()) == ["weight", "_extra_state"]
    m.reset_parameters()
    assert m.weight.dtype == BF16 and (m.weight == 0).all()


def test_the_output_has_the_dtype_of_autocast() -> None:
    m = te.LayerNormWithoutBias(32, dtype=torch.float32)
    assert m(torch.randn(4, 32, dtype=BF16)).dtype == torch.float32
    with torch.autocast("cpu", BF16):
        assert m(torch.randn(4, 32)).dtype == BF16


def test_rows_do_not_depend_on_their_neighbors() -> None:
    """Of one kernel, which a tuned size has for multiples of four rows."""
    for cols, rows in ((768, 4), (640, 1)):
        m = te.LayerNormWithoutBias(cols, dtype=BF16)
        assert m.row_multiple == rows
        x = torch.randn(16, cols, dtype=BF16)
        assert torch.equal(m(x)[4:8], m(x[4:8]))


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_the_tuned_statistics_are_those_of_rmsnorm(dtype: torch.dtype) -> None:
    """Both norms have one way to compute mean and centered squares, and RMSNorm's bits are compared with a GPU's."""
    x = torch.randn(8, 2048).to(dtype)
    kernel = layernorm_kernels.kernel_of("forward", x)
    other = rmsnorm_kernels.Kernel.of("forward", x)
    assert kernel == other and kernel.tuned
    mean, r = layernorm_kernels.statistics(x, x.float(), 0.0)
    variance = 1 / r.double().square()
    rms = rmsnorm_kernels.reciprocal_rms(x, x.float(), 0.0)
    torch.testing.assert_close(
        (mean.double().square() + variance).rsqrt().float(), rms, rtol=1e-6, atol=0.0
    )


@pytest.mark.gpu
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(("rows", "cols"), [*SIZES, (256, 4096), (4096, 768), (1000, 2304)])
def test_the_native_engine_has_these_numbers(
    rows: int, cols: int, dtype: torch.dtype, zero_centered: bool
) -> None:
    """But for the last bit where an order of sums is not known."""
    native = engine_module("native")
    torch.manual_seed(0)
    options = dict(eps=1e-5, zero_centered_gamma=zero_centered, dtype=dtype)
    there = native.LayerNormWithoutBias(cols, device="cuda", **options)
    assert list(dict(there.named_parameters())) == ["weight"]
    here = te.LayerNormWithoutBias(cols, device="cpu", **options)
    with torch.no_grad():
        here.weight.normal_(0.0 if zero_centered else 1.0, 0.3)
        there.weight.copy_(here.weight)
    x = (torch.randn(rows, cols) * 2 + 0.3).to(dtype)
    dy = torch.randn(rows, cols).to(dtype)
    results = []
    for module, place in ((here, "cpu"), (there, "cuda")):
        leaf = x.detach().to(place).requires_grad_()
        y = module(leaf)
        y.backward(dy.to(place))
        results.append([t.double().cpu() for t in (y.detach(), leaf.grad, module.weight.grad)])
    bound = 2.0**-7 if dtype == BF16 else 1e-5
    for found, expected in zip(*results, strict=True):
        assert (found - expected).abs().max() <= bound * expected.abs().max()
        if dtype == BF16:  # a sum in another order seldom changes a rounding
            assert (found != expected).double().mean() < 0.02
