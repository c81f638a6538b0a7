"""AdamW with 8-bit moments in Triton (optim/lowbit_triton.py) against torchao's plain PyTorch, run eagerly.

Run by tests/kernels/test_triton_kernels.py in Triton's interpreter and on a GPU.
"""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from fewer import every
from torch import Tensor, nn

pytest.importorskip("torchao")

import triton
import triton.language as tl
from torchao.optim.adam import single_param_adam
from torchao.optim.quant_utils import create_dynamic_map, quantize_8bit_with_qmap

from te_models.optim import build_optimizer, lowbit, lowbit_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16 = torch.bfloat16
STEP = lowbit_triton.AdamWStep(
    number=3, seed=17, lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1
)
NAMES = list(lowbit.CLASSES)
KERNELS = [True] + [pytest.param(False, marks=pytest.mark.slow)] * (
    DEVICE == "cpu"
)  # torchao's step is for CPUs


@triton.jit
def _codes_kernel(x, codes, middles, SIGNED: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(codes + at, lowbit_triton._nearest(tl.load(x + at), middles, SIGNED).to(tl.uint8))


def interesting(signed: bool) -> Tensor:
    """Every value of the map, every middle and its neighbors in FP32, powers of ten, zeros, and random magnitudes."""
    values = torch.tensor(create_dynamic_map(signed))
    middles = (values[1:] + values[:-1]) / 2
    one = torch.tensor(2.0)
    near = [
        torch.nextafter(middles, one),
        torch.nextafter(middles, -one),
        middles * 1.001,
        middles * 0.999,
    ]
    decades = torch.tensor(
        [0.0, 1e-30] + [f * 10.0**-i for i in range(9) for f in (0.999999, 1.0, 1.000001)]
    )
    spread = 10 ** -torch.linspace(0, 8, 4001)
    found = torch.cat([values, middles, *near, decades, spread]).clamp(-1, 1)
    found = torch.cat([found, -found]) if signed else found.clamp(min=0)
    return torch.cat([found, found[:1].expand(-len(found) % 256)])


@pytest.mark.parametrize("signed", [True, False])
def test_the_nearest_value_of_the_map_is_found(signed: bool) -> None:
    x = interesting(signed)
    values = torch.tensor(create_dynamic_map(signed))
    middles = lowbit_triton._tables(torch.device(DEVICE))[1 if signed else 3]
    codes = torch.empty(len(x), dtype=torch.uint8, device=DEVICE)
    _codes_kernel[(len(x) // 256,)](x.to(DEVICE), codes, middles, SIGNED=signed, SIZE=256)
    found, wanted = codes.cpu().int(), quantize_8bit_with_qmap(x, values).int()
    other = (
        found != wanted
    )  # torchao rounds the distance to a value before it compares: a tie may go either way
    assert (found - wanted)[other].abs().le(1).all()
    low = torch.minimum(found, wanted)[other]
    middle = (values[low] + values[low + 1]) / 2
    assert torch.allclose(x[other], middle, rtol=2.0**-23, atol=0) and other.sum() <= 0.05 * len(x)


def example(name: str, size: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """A parameter, its gradient and moments of earlier gradients, the first blocks without any."""
    generator = torch.Generator().manual_seed(size)
    p, grad, first = (torch.randn(size, generator=generator) for _ in range(3))
    magnitude = 10 ** (-6 * torch.rand(size, generator=generator))
    optimizer = lowbit.CLASSES[name]([nn.Parameter(p.to(dtype))])
    moments = [optimizer._new_buffer(p.to(dtype), signed) for signed in (True, False)]
    first, second = first * magnitude, (first * magnitude).square() * 1.3
    for moment, value in zip(moments, (first, second), strict=True):
        value[: size // 4] = 0
        moment.copy_(value)
    grad = grad * magnitude
    grad[: size // 8] = 0
    return p.to(dtype), grad.to(dtype), *moments


def eager(p: Tensor, grad: Tensor, first: Any, second: Any) -> None:
    """torchao's update without torch.compile."""
    number, lr = torch.tensor(float(STEP.number)), torch.tensor(STEP.lr)
    single_param_adam(
        p,
        grad,
        number,
        first,
        second,
        None,
        lr,
        STEP.beta1,
        STEP.beta2,
        STEP.weight_decay,
        STEP.eps,
        True,
        False,
    )


@pytest.mark.parametrize(
    ("name", "size", "dtype"),
    every(4, NAMES, [4096, 5120, 1000, 4100, 1, 0], [torch.float32, BF16]),
)
def test_an_update_is_torchaos(name: str, size: int, dtype: torch.dtype) -> None:
    """But for rounding in FP32: a moment at the middle of two codes may get the other one."""
    ours, wanted = [t.to(DEVICE) for t in example(name, size, dtype)], example(name, size, dtype)
    p, grad, first, second = ours
    lowbit_triton.update(p, grad, first, second, STEP, stochastic=False)
    exact, *rest = example(name, size, dtype)
    exact = exact.float()
    eager(exact, *rest)
    eager(*wanted)
    # The interpreter cuts BF16 off where a GPU rounds it.
    step = 1e-6 if dtype == torch.float32 else 2.0**-7
    assert torch.allclose(ours[0].cpu().float(), exact, rtol=step, atol=1e-6)
    for found, right in zip(ours[2:], wanted[2:], strict=True):
        assert type(found) is type(right)
        if size < 4096 or size % 256:
            assert torch.allclose(found.cpu().float(), right.float(), rtol=step, atol=3e-7)
            continue
        assert torch.allclose(found.scale.cpu(), right.scale, rtol=1e-6, atol=0)
        apart = (
            found.codes.cpu().view(torch.uint8).int() - right.codes.view(torch.uint8).int()
        ).abs()
        assert apart.max() <= 1 and apart.sum() <= 0.002 * size


@pytest.mark.parametrize(("beta1", "beta2"), [(0.9, 0.0), (0.0, 0.95), (0.0, 0.0)])
def test_a_beta_of_zero_forgets_the_moment(beta1: float, beta2: float) -> None:
    """Moments far larger than the gradient leave nothing behind."""
    p, first, second = (torch.full((8,), value, device=DEVICE) for value in (1.0, 10.0, 1e4))
    step = dataclasses.replace(STEP, beta1=beta1, beta2=beta2, weight_decay=0.0)
    lowbit_triton.update(p, torch.full_like(p, 1e-3), first, second, step, stochastic=False)
    m, v = 10 * beta1 + 1e-3 * (1 - beta1), 1e4 * beta2 + 1e-6 * (1 - beta2)
    assert torch.allclose(first, torch.full_like(p, m)) and torch.allclose(
        second, torch.full_like(p, v), atol=0
    )
    root = (v / (1 - beta2**STEP.number)) ** 0.5 + STEP.eps
    assert torch.allclose(p, torch.full_like(p, 1 - STEP.lr * m / (1 - beta1**STEP.number) / root))


def test_stochastic_rounding_is_unbiased_and_between_neighbors() -> None:
    """Gradients of zero leave the weight decay alone."""
    size, value = 2**17, 1.0 + 2.0**-7
    p = torch.full((size,), value, dtype=BF16, device=DEVICE)
    p[0] = float("nan")
    moments = [torch.zeros(size, dtype=BF16, device=DEVICE) for _ in range(2)]
    before = p.clone()
    first, second = moments
    lowbit_triton.update(p, torch.zeros_like(p), first, second, STEP, stochastic=True)
    exact = value * (1 - STEP.lr * STEP.weight_decay)
    found = p[1:].cpu().double()
    low, high = value - 2.0**-7, value
    assert set(found.unique().tolist()) == {low, high}
    share = (exact - low) / (high - low)
    up = (found == high).double()
    assert abs(up.mean() - share) < 4 * (share * (1 - share) / size) ** 0.5
    together = ((up[1:] - share) * (up[:-1] - share)).mean()  # neighbors are rounded independently
    assert abs(together) < 4 * share * (1 - share) / size**0.5
    assert p[0].isnan()
    assert not torch.equal(
        p[2**15 : 2**16], p[2**16 : 2**15 * 3]
    )  # more than 15 bits of the index count
    for seed, same in ((17, True), (18, False), (2**31 - 1, False)):
        again, grad, m, v = (t[:4096].clone() for t in (before, torch.zeros_like(p), *moments))
        seeded = dataclasses.replace(STEP, seed=seed)
        lowbit_triton.update(again, grad, m, v, seeded, stochastic=True)
        assert torch.equal(again[1:], p[1:4096]) == same


@pytest.mark.parametrize("name", [NAMES[0], pytest.param(NAMES[1], marks=pytest.mark.slow)])
def test_the_optimizer_trains_through_the_kernel(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Beside the same optimizer through torchao on a CPU; state and checkpoints have one format."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64, bias=False))]
    models.append(copy.deepcopy(models[0]).to(DEVICE))
    found = [build_optimizer(name, model, 1e-2, 0.1) for model in models]
    for number in range(3):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(number))
        for model, optimizer in zip(models, found, strict=True):
            monkeypatch.setattr(lowbit, "runs_triton", lambda device, own=model is models[1]: own)
            model(x.to(next(model.parameters()).device)).square().mean().backward()
            with torch.compiler.set_stance("force_eager"):  # torchao would compile its update
                optimizer.step()
    for ours, torchaos in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert torch.allclose(
            ours.cpu(), torchaos, rtol=0, atol=3e-4
        )  # of three updates of about 1e-2
    states = [optimizer.state_dict() for optimizer in found]
    found[0].load_state_dict(states[1])
    assert [sorted(entry) for entry in states[0]["state"]] == [
        sorted(entry) for entry in states[1]["state"]
    ]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", NAMES)
def test_stochastic_rounding_leaves_the_random_state_alone(
    monkeypatch: pytest.MonkeyPatch, name: str, kernel: bool
) -> None:
    """And does not depend on it: two copies of a model are rounded alike, in several steps."""
    monkeypatch.setattr(lowbit, "runs_triton", lambda device: kernel)
    found = []
    for seed in range(2):
        torch.manual_seed(0)
        model = nn.Linear(64, 64, dtype=BF16, device=DEVICE)
        nn.init.ones_(model.weight)
        optimizer = build_optimizer(name, model, 1e-3, 0.1, {"stochastic_rounding": True})
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        for _ in range(2):
            model.weight.grad, model.bias.grad = (
                torch.ones_like(model.weight),
                torch.ones_like(model.bias),
            )
            optimizer.step()
        assert torch.equal(before, torch.get_rng_state())
        found.append(model.weight.detach())
    assert (
        torch.equal(*found) and len(found[0].unique()) > 1
    )  # updates of a quarter of BF16's step below 1
