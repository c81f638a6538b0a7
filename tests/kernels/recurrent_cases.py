"""The convolution of recurrent mixers and the gated norm of heads in Triton, against FP64.

Run by test_triton_kernels.py in Triton's interpreter and on a GPU.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from expert_counts import counted_by
from torch import Tensor

from te_models.kernels import conv_triton, head_norm_triton
from te_models.kernels.fp8_tiles_triton import new_fp8
from te_models.kernels.gradient_room import GradientRoom, Slot, split
from te_models.kernels.handover import CastScale
from te_models.recorder.layout import FIELDS
from te_models.recorder.statistics import Cast, count_cast

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Relative to the norm of a tensor in BF16: Triton's interpreter cuts off bits where a GPU rounds to the nearest number.
ROUNDING = 2.0**-7 if DEVICE.type == "cpu" else 2.0**-8


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16).to(DEVICE)


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter a program of a convolution has two tiles of tokens, not eight: few tokens have several."""
    if DEVICE.type == "cpu":
        tiles = {packed: tile._replace(steps=2) for packed, tile in conv_triton.TILES.items()}
        monkeypatch.setattr(conv_triton, "TILES", tiles)


def error(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    return ((found.double() - wanted).norm() / wanted.norm()).item()


def by_definition(x: Tensor, taps: Tensor, bias: Tensor | None, documents: Tensor | None) -> Tensor:
    """The convolution, token by token, and its SiLU."""
    size = taps.shape[2]
    rows = []
    for t in range(x.shape[1]):
        total = torch.zeros_like(x[:, 0])
        for back in range(min(size, t + 1)):
            earlier = x[:, t - back] * taps[:, 0, size - 1 - back]
            if documents is not None:
                earlier = earlier * (documents[:, t] == documents[:, t - back])[:, None]
            total = total + earlier
        rows.append(total if bias is None else total + bias)
    return F.silu(torch.stack(rows, dim=1))


# Rows, tokens, channels of the parts, taps, whether there is a bias, documents.
@pytest.mark.parametrize(
    ("batch", "seq", "sizes", "taps", "biased", "packed"),
    [
        pytest.param(2, 19, (24, 40), 4, False, False, marks=pytest.mark.slow),
        pytest.param(1, 135, (130, 8), 4, True, True, marks=pytest.mark.slow),
        (1, 35, (130, 8), 4, True, True),
        pytest.param(2, 21, (16, 16), 3, False, True, marks=pytest.mark.slow),
        (1, 3, (8, 8, 8), 2, True, False),
        (1, 1, (8,), 1, True, True),
    ],
)
def test_convolution(
    batch: int, seq: int, sizes: tuple[int, ...], taps: int, biased: bool, packed: bool
) -> None:
    torch.manual_seed(0)
    channels = sum(sizes)
    projection = random(batch * seq, channels + 8).requires_grad_()
    weight = random(channels, 1, taps).requires_grad_()
    bias = random(channels).requires_grad_() if biased else None
    documents = None
    if packed:
        documents = torch.randint(0, 2, (batch, seq)).cumsum(1).to(DEVICE)
    room = GradientRoom((channels, 8))
    x, rest = split(projection, room)
    x = x.unflatten(0, (batch, seq))
    found = conv_triton.mixed_parts(
        pytest.fail, x, None, weight, documents, bias, sizes=sizes, activation="silu",
        slot=Slot(room, 0),
    )  # fmt: skip
    assert [part.shape[2] for part in found] == list(sizes)
    slopes = [random(batch, seq, size) for size in sizes]
    leaves = [leaf for leaf in (projection, weight, bias) if leaf is not None]
    total = sum((part * slope).sum() for part, slope in zip(found, slopes, strict=True))
    gradients = torch.autograd.grad(total + rest.sum(), leaves)

    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    own = exact[0].view(batch, seq, -1)
    y = by_definition(own[..., :channels], exact[1], exact[2] if biased else None, documents)
    wanted = torch.autograd.grad(
        (y * torch.cat(slopes, -1)).sum() + own[..., channels:].sum(), exact
    )
    assert error(torch.cat(found, dim=-1), y) < ROUNDING
    for one, two in zip(gradients, wanted, strict=True):
        assert error(one, two) < 2 * ROUNDING


@pytest.mark.slow
def test_gradients_of_any_strides() -> None:
    torch.manual_seed(0)
    x = random(2, 9, 24).requires_grad_()
    weight = random(24, 1, 3)
    gradients = []
    for spread in (lambda y: y.sum(), lambda y: (y * torch.ones_like(y)).sum()):
        # The first hands on one number whose strides are all 0.
        parts = conv_triton.mixed_parts(
            pytest.fail, x, None, weight, None, sizes=(16, 8), activation="silu"
        )
        gradients += torch.autograd.grad(spread(parts[0]) + spread(parts[1]), x)
    assert torch.equal(*gradients)


def gated(x: Tensor, z: Tensor, weight: Tensor, heads: int, eps: float) -> Tensor:
    """The norm of each head and its gate."""
    per_head = x.unflatten(1, (heads, -1))
    normed = per_head * torch.rsqrt(per_head.square().mean(-1, keepdim=True) + eps) * weight
    return normed.flatten(1) * F.silu(z)


@pytest.mark.parametrize(("rows", "heads", "dim"), [(37, 2, 24), (32, 3, 16), (44, 1, 64)])
def test_gated_norm(rows: int, heads: int, dim: int) -> None:
    torch.manual_seed(0)
    x = random(rows, heads * dim)
    z = random(rows, heads * dim + 8)[:, 8:]  # columns of a projection
    weight = random(dim)
    dy = random(rows, heads * dim)
    y = head_norm_triton.head_norm(x, z, weight, 1e-3)
    dz = torch.empty_like(random(rows, heads * dim + 16))[:, 16:]
    dx, dweight = head_norm_triton.head_norm_backward(dy, x, z, weight, 1e-3, dz)
    exact = [leaf.detach().double().requires_grad_() for leaf in (x, z, weight)]
    wanted = gated(*exact, heads=heads, eps=1e-3)
    gradients = torch.autograd.grad(wanted, exact, dy.double())
    assert error(y, wanted) < 2 * ROUNDING
    for one, two in zip((dx, dz, dweight), gradients, strict=True):
        assert error(one, two) < 2 * ROUNDING


@pytest.mark.parametrize("e5m2", [False, True])
def test_gated_norm_in_fp8(e5m2: bool) -> None:
    torch.manual_seed(0)
    rows, heads, dim = 44, 3, 24
    x, z, weight = random(rows, heads * dim), random(rows, heads * dim), random(dim)
    scale = torch.full((1,), 16.0, device=DEVICE)
    amax = torch.zeros(1, device=DEVICE)
    out = new_fp8(rows, heads * dim, DEVICE)
    head_norm_triton.head_norm_fp8(x, z, weight, 1e-3, out, CastScale(scale, amax, e5m2))
    # The norm is rounded before the gate, as te.RMSNorm rounds it; what is cast is not.
    normed = gated(x.float(), torch.full_like(z, 40.0).float(), weight.float(), heads, 1e-3) / 40
    values = normed.bfloat16().float() * F.silu(z.float())
    form = torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn
    codes = (values * scale).clamp(-torch.finfo(form).max, torch.finfo(form).max).to(form)
    assert out.data is not None
    assert torch.equal(out.data.t(), out.transposed)
    found = out.data.view(form).float()
    # One step of the format where the rounding before was another one, as in the interpreter.
    torch.testing.assert_close(found, codes.float(), rtol=0.25, atol=2.0**-6)
    if DEVICE.type == "cuda":
        assert (found != codes.float()).float().mean() < 0.02
    torch.testing.assert_close(amax, values.abs().max().reshape(1), rtol=1e-2, atol=0)
    torch.testing.assert_close(out.scale_inv, 1 / scale)


@pytest.mark.parametrize(("scale", "e5m2"), [(16.0, False), (2.0**16, True)])
def test_gated_norm_counts_what_it_casts(scale: float, e5m2: bool) -> None:
    """In FP32, which the norm is not rounded to; the second scale saturates."""
    torch.manual_seed(0)
    rows, heads, dim = 44, 3, 24
    x = random(rows, heads * dim).float()
    z = random(rows, heads * dim).float()
    weight = random(dim).float()
    known = torch.full((1,), scale, device=DEVICE)
    plain = new_fp8(rows, heads * dim, DEVICE)
    out = new_fp8(rows, heads * dim, DEVICE)
    places = [CastScale(known, torch.zeros(1, device=DEVICE), e5m2) for _ in range(2)]
    head_norm_triton.head_norm_fp8(x, z, weight, 1e-3, plain, places[0])
    _, fields, hashed = counted_by(
        head_norm_triton.head_norm_fp8, x, z, weight, 1e-3, out, places[1]
    )
    assert plain.data is not None and out.data is not None
    assert torch.equal(plain.data, out.data) and torch.equal(plain.transposed, out.transposed)
    assert torch.equal(places[0].amax, places[1].amax)
    values = gated(x.double(), z.double(), weight.double(), heads, 1e-3).float()
    cast = Cast(out.data, out.scale_inv.view(1, 1), (rows, heads * dim), 8 if e5m2 else 7, known)
    wanted, codes = count_cast(values, cast)
    assert hashed == int(codes)
    expected = dict(zip(FIELDS, wanted.tolist(), strict=True))
    del expected["scale_age"]
    assert (expected["saturated"] > 0) == e5m2
    for name, value in expected.items():
        assert fields[name] == pytest.approx(value, rel=1e-3 if name == "noise" else 1e-5), name
