"""FP8 written by the kernels of kernels/handover_triton.py, against the plain operation and a cast of its FP32 result.

Run by test_triton_kernels.py in Triton's interpreter and on a GPU.
"""

import math
from typing import Any

import pytest
import torch
from expert_counts import assert_counts, counted_by
from fewer import every
from torch import Tensor

from te_models.config.mlp import HANDED_OVER
from te_models.kernels import handover_triton, norm_fp8_triton
from te_models.kernels.fp8_tiles_triton import write_current_scale
from te_models.kernels.handover import CastScale
from te_models.numerics.formats import FP8_MAX, DType
from te_models.numerics.quantizers import Float8CurrentScalingQuantizer
from te_models.numerics.scale_rules import scale_from_amax
from te_models.recorder.layout import FIELDS
from te_models.recorder.statistics import Cast, count_cast

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


@pytest.mark.parametrize(
    ("shape", "scale", "e5m2", "activation", "gated"),
    every(9, SHAPES, SCALES, [False, True], HANDED_OVER, [True, False], rest=3),
)
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
    found, summed, rstd = norm_fp8_triton.norm(
        x, delta if add else None, weight, 1e-5, zero_centered, given, amax, False
    )
    check(found, size * inverse[:, None] * gamma, 3.0, amax, False)
    assert torch.equal(summed, total)
    torch.testing.assert_close(rstd, inverse, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("shape", "add", "e5m2"),
    every(4, SHAPES, [False, True], [False, True])
    + every(3, [(20, 5120)], [False, True], [False, True]),  # whose programs have one row each
)
def test_a_norm_is_measured_and_then_cast_with_its_current_scale(
    shape: tuple[int, int], add: bool, e5m2: bool
) -> None:
    """The bits are those of a cast of the norm as it would be stored."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32  # see test_norm
    x = random(*shape).to(dtype)
    delta = random(*shape).to(dtype).flip(1).contiguous()
    weight = torch.linspace(0.5, 1.5, shape[1]).to(dtype).to(DEVICE)
    found, total, rstd = norm_fp8_triton.norm_measured(
        x, delta if add else None, weight, 1e-5, add, e5m2
    )
    assert torch.equal(total, x + delta if add else x)
    inverse = (total.double().square().mean(-1) + 1e-5).rsqrt()
    torch.testing.assert_close(rstd.double(), inverse, rtol=1e-6, atol=0)
    gamma = weight.float() + 1 if add else weight.float()
    stored = (total.float() * rstd[:, None] * gamma).to(dtype)
    form = DType.kFloat8E5M2 if e5m2 else DType.kFloat8E4M3
    cast = Float8CurrentScalingQuantizer(form, rowwise=True, columnwise=True)(stored)
    assert torch.equal(found.data, cast._data.view(torch.uint8))
    assert torch.equal(found.transposed, found.data.t())
    assert torch.equal(found.scale_inv, cast._scale_inv.view(1))
    (again, _, _), fields, hashed = counted_by(
        norm_fp8_triton.norm_measured, x, delta if add else None, weight, 1e-5, add, e5m2
    )
    assert torch.equal(found.data, again.data) and torch.equal(found.transposed, again.transposed)
    scale = scale_from_amax(stored.float().abs().max().reshape(1), FP8_MAX[form])
    expected, codes = reference(stored, again, scale.item(), e5m2)
    del expected["scale_age"], fields["scale_age"]
    assert_counts(fields, expected)
    assert hashed == codes


@pytest.mark.parametrize("e5m2", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_a_gradient_is_measured_and_then_cast_with_its_current_scale(
    gated: bool, e5m2: bool
) -> None:
    dy, gate_up = random(48, 272), random(48, 544 if gated else 272)
    given, amax = state(float("nan"))
    kind = ("silu", gated)
    handover_triton.activate_backward(dy, gate_up, given, amax, e5m2, *kind, written=False)
    write_current_scale(CastScale(given, amax, e5m2))
    other, found = state(1.0)
    handover_triton.activate_backward(dy, gate_up, other, found, e5m2, *kind)
    assert torch.equal(amax, found)
    limit = FP8_MAX[DType.kFloat8E5M2 if e5m2 else DType.kFloat8E4M3]
    assert torch.equal(given, scale_from_amax(amax, limit))
    fp8 = handover_triton.activate_backward(dy, gate_up, given, amax, e5m2, *kind)
    form = torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn
    assert fp8.data is not None and fp8.data.view(form).float().abs().max() == limit


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("amax", [0.0, math.inf, math.nan, 1e-45, 3e38, 1.0])
def test_current_scales_of_any_amax(amax: float) -> None:
    given, _ = state(7.0)
    write_current_scale(CastScale(given, torch.full((1,), amax, device=DEVICE), False))
    assert torch.equal(given, scale_from_amax(torch.full((1,), amax, device=DEVICE), 448.0))


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


def reference(values: Tensor, fp8: Any, scale: float, e5m2: bool) -> tuple[dict[str, float], int]:
    """The same from the values and the data, in PyTorch."""
    inverse = fp8.scale_inv.reshape(1, 1)
    known = torch.full((1,), scale, device=DEVICE)
    cast = Cast(fp8.data, inverse, tuple(fp8.data.shape), 8 if e5m2 else 7, known)
    expected, codes = count_cast(values, cast)
    return dict(zip(FIELDS, expected.tolist(), strict=True)), int(codes)


COUNTED = {
    "cast": lambda x, *place, **how: handover_triton.cast(x, *place, **how),
    "activate": lambda x, *place, **how: handover_triton.activate(x, *place, **how),
    "slope": lambda x, *place, **how: handover_triton.activate_backward(
        x[:, : x.shape[1] // 2].contiguous(), x, *place, **how
    ),
    "plain slope": lambda x, *place, **how: handover_triton.activate_backward(
        x, x, *place, activation="relu2", gated=False, **how
    ),
    "norm": lambda x, *place, **how: norm_fp8_triton.norm(
        x, None, -torch.ones_like(x[0]), 1e-5, False, *place, **how
    )[0],
}


@pytest.mark.parametrize("kernel", COUNTED)
def test_rows_behind_the_last_are_not_counted(kernel: str) -> None:
    """Whatever memory holds there: a NaN would stop a run that is healthy."""
    memory = torch.full((64, 160), math.nan, dtype=torch.bfloat16, device=DEVICE)
    memory[:36] = random(36, 160)  # neither rows nor columns are whole tiles
    _, found, _ = counted_by(COUNTED[kernel], memory[:36], *state(5.0), False)
    assert found["nonfinite"] == 0 and found["elements"] > 0
    assert math.isfinite(found["amax"]) and math.isfinite(found["noise"])


@pytest.mark.parametrize(("name", "scaling"), every(2, COUNTED, [(37.0, False), (2.0**18, True)]))
def test_a_kernel_counts_what_it_casts(
    name: str, scaling: tuple[float, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits are those without counts; the counts those of its data and of values within FP32's rounding."""
    scale, e5m2 = scaling
    for programs in ("PROGRAMS", "PROGRAMS_OF_HALVES"):
        monkeypatch.setattr(handover_triton, programs, 2)  # each goes through several tiles
    x = random(48, 144)
    x[3] = 0
    plain = COUNTED[name](x, *state(scale), e5m2)
    fp8, found, codes = counted_by(COUNTED[name], x, *state(scale), e5m2)
    assert torch.equal(plain.data, fp8.data) and torch.equal(plain.transposed, fp8.transposed)
    if name == "cast":
        expected, hashed = reference(x, fp8, scale, e5m2)
        del expected["scale_age"], found["scale_age"]
        assert_counts(found, expected)
        assert codes == hashed
        return
    # The values of a norm or an activation are in the kernel only: what the data say of them.
    inverse = fp8.scale_inv
    decoded = fp8.data.view(torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn).float() * inverse
    expected, hashed = reference(decoded, fp8, scale, e5m2)
    assert codes == hashed
    for field in ("elements", "subnormal", "format", "scale_min", "nonfinite", "blocks"):
        assert found[field] == expected[field], field
    assert found["zeros"] + found["flushed"] == expected["zeros"]
    if not found["saturated"]:
        assert found["signal"] == pytest.approx(expected["signal"], rel=0.05)
        assert 0 < found["noise"] < 0.02 * found["signal"]


RARE = ["zeros", "saturated", "not finite", "tiny", "huge", "subnormal"]


# Squares that overflow are left out later.
@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize(("rare", "e5m2", "shape"), every(6, RARE, [False, True], SHAPES))
def test_a_cast_of_rare_values_is_counted_exactly(
    rare: str, e5m2: bool, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for programs in ("PROGRAMS", "PROGRAMS_OF_HALVES"):
        monkeypatch.setattr(handover_triton, programs, 2)  # each goes through several tiles
    x = random(*shape).float()
    scale = 37.0
    if rare == "zeros":
        x[: shape[0] // 2] = 0
    elif rare == "saturated":
        x[3, 5] = 1e6
        x[7] = -448 / 37 * 1.2
    elif rare == "not finite":
        x[1, 2], x[2, 3], x[3, 4] = math.inf, -math.inf, math.nan
        x[4] = 0
    elif rare == "tiny":
        x *= 1e-33
        scale = 37e33
    elif rare == "huge":
        x *= 1e30
        scale = 37e-30
    else:
        x *= 1e-44  # subnormal numbers of FP32, most of them flushed
        scale = 1e30
    fp8, found, codes = counted_by(
        lambda *a, **k: handover_triton.cast(*a, **k), x, *state(scale), e5m2
    )
    expected, hashed = reference(x, fp8, scale, e5m2)
    del expected["scale_age"], found["scale_age"]
    assert_counts(found, expected)
    assert codes == hashed
