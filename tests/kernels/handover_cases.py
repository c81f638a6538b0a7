"""FP8 written by the kernels of kernels/handover_triton.py, against the plain operation and a cast of its FP32 result.

Run by test_triton_kernels.py in Triton's interpreter and on a GPU.
"""

import math
from typing import Any

import pytest
import torch
from fewer import every
from torch import Tensor

from te_models.config.mlp import HANDED_OVER
from te_models.kernels import handover_triton
from te_models.numerics.formats import FP8_MAX, DType

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(64, 128), (48, 272), (16, 16)]  # whole tiles, and parts of them
SCALES = [1.0, 37.0, 2.0**18]  # the last saturates


def random(*shape: int) -> Tensor:
    g = torch.Generator().manual_seed(sum(shape))
    return (
        (torch.randn(shape, generator=g) * torch.logspace(-3, 1, shape[0])[:, None])
        .bfloat16()
        .to(DEVICE)
    )


def state(scale: float) -> tuple[Tensor, Tensor]:
    return torch.full((1,), scale, device=DEVICE), torch.zeros(1, device=DEVICE)


def check(found: Any, wanted: Tensor, scale: float, amax: Tensor, e5m2: bool) -> None:
    """FP8Data within one step of a cast of `wanted`, almost all equal: an FP32 function may round either way."""
    form, limit = (
        (torch.float8_e5m2, DType.kFloat8E5M2) if e5m2 else (torch.float8_e4m3fn, DType.kFloat8E4M3)
    )
    codes = (wanted * scale).clamp(-FP8_MAX[limit], FP8_MAX[limit]).to(form)
    assert torch.equal(found.data.t(), found.transposed)
    torch.testing.assert_close(
        found.data.view(form).float(), codes.float(), rtol=0.25, atol=2.0**-9
    )
    # Zeros may differ in sign.
    assert (found.data.view(form).float() != codes.float()).float().mean() < 0.01
    torch.testing.assert_close(amax, wanted.abs().max().reshape(1), rtol=1e-5, atol=0)
    torch.testing.assert_close(
        found.scale_inv, torch.full((1,), 1 / scale, device=DEVICE), rtol=1e-7, atol=0
    )


def by_definition(x: Tensor, activation: str) -> Tensor:
    """The activation of this name, as its paper has it."""
    if activation == "relu2":
        return x.clamp(min=0) ** 2
    if activation == "silu":
        return x / (1 + (-x).exp())
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", HANDED_OVER)
@pytest.mark.parametrize(("shape", "scale", "e5m2"), every(3, SHAPES, SCALES, [False, True]))
def test_activations_and_their_gradients(
    shape: tuple[int, int], scale: float, e5m2: bool, activation: str, gated: bool
) -> None:
    rows, columns = shape
    gate_up = random(rows, 2 * columns if gated else columns)
    dy = random(rows, columns).flip(0).contiguous()
    leaf = gate_up.double().requires_grad_()
    y = by_definition(leaf[:, :columns], activation)
    if gated:
        y = y * leaf[:, columns:]
    (slope,) = torch.autograd.grad(y, leaf, dy.double())
    kind = (activation, gated)
    given, amax = state(scale)
    found = handover_triton.activate(gate_up, given, amax, e5m2, *kind)
    check(found, y.detach().float(), scale, amax, e5m2)
    given, amax = state(scale)
    found = handover_triton.activate_backward(dy, gate_up, given, amax, e5m2, *kind)
    check(found, slope.float(), scale, amax, e5m2)


@pytest.mark.parametrize(
    ("shape", "scale", "e5m2", "dtype"),
    every(3, SHAPES, SCALES, [False, True], [torch.bfloat16, torch.float32]),
)
def test_cast(shape: tuple[int, int], scale: float, e5m2: bool, dtype: torch.dtype) -> None:
    """Bit for bit: nothing is computed that could round either way."""
    x = random(*shape).to(dtype) * (1 if dtype == torch.bfloat16 else 1.0009765)
    given, amax = state(scale)
    found = handover_triton.cast(x, given, amax, e5m2)
    form, limit = (torch.float8_e5m2, 57344.0) if e5m2 else (torch.float8_e4m3fn, 448.0)
    codes = (x.float() * scale).clamp(-limit, limit).to(form)
    assert torch.equal(found.data, codes.view(torch.uint8)) and torch.equal(
        found.data.t(), found.transposed
    )
    assert amax.item() == x.abs().max().item()


@pytest.mark.parametrize(
    ("shape", "add", "zero_centered"), every(2, [*SHAPES, (64, 256)], [False, True], [False, True])
)
def test_norm(shape: tuple[int, int], add: bool, zero_centered: bool) -> None:
    x, delta = random(*shape), random(*shape).flip(1).contiguous()
    if add:  # sums that BF16 holds: the interpreter cuts off where a GPU rounds
        x, delta = ((t.clamp(-15, 15) * 4).round() / 4 for t in (x, delta))
    weight = torch.linspace(0.5, 1.5, shape[1]).bfloat16().to(DEVICE)
    total = x + delta if add else x
    size = total.float()
    inverse = (size.square().mean(-1) + 1e-5).rsqrt()
    gamma = weight.float() + 1 if zero_centered else weight.float()
    given, amax = state(3.0)
    found, summed, rstd = handover_triton.norm(
        x, delta if add else None, weight, 1e-5, zero_centered, given, amax, False
    )
    check(found, size * inverse[:, None] * gamma, 3.0, amax, False)
    assert torch.equal(summed, total)
    torch.testing.assert_close(rstd, inverse, rtol=1e-6, atol=0)


def test_an_amax_is_raised_and_never_lowered() -> None:
    gate_up = random(32, 64)
    for before in (0.0, 1e6):
        given, amax = state(1.0)
        amax.fill_(before)
        handover_triton.activate(gate_up, given, amax, False)
        assert (amax.item() == before) == (before > 0)


def test_nan_stays_nan() -> None:
    gate_up = random(32, 64)
    gate_up[3, 5] = float("nan")
    given, amax = state(1.0)
    codes = (
        handover_triton.activate(gate_up, given, amax, False).data.view(torch.float8_e4m3fn).float()
    )
    assert codes.isnan().sum() == 1 and codes[3, 5].isnan()
