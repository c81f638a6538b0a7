"""A step of decoding in Triton, judged by FP64; test_triton_kernels.py runs it in the interpreter and on a GPU."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fewer import every, slow
from torch import Tensor

from te_models.config.attention import Heads
from te_models.kernels import decode_attention_triton, decode_product_triton
from te_models.kernels.decode import (
    HeadNorms,
    Rotary,
    StepActivation,
    StepAttention,
    StepKeys,
    StepLinear,
    StepNorm,
)
from te_models.kernels.decode_attention_triton import attention
from te_models.kernels.decode_product_triton import product
from te_models.kernels.decode_split_triton import SplitTile, split_product
from te_models.numerics.casts import cast_fp8, decode_fp8
from te_models.numerics.formats import DType
from te_models.numerics.scale_rules import scale_from_amax

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
# Half a unit in the last place for each of the roundings in a row, of which attention has the most: norm, RoPE, the
# probabilities, the sum and the gate.
BOUND = 5 * 2**-9 if ON_GPU else 1e-5
SLOW = pytest.mark.slow
E4M3 = DType.kFloat8E4M3


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    if not ON_GPU:
        tile = decode_product_triton.FewTile(outputs=16, width=16, warps=1)
        monkeypatch.setattr(decode_product_triton, "_few_tile", lambda *kind: tile)
        monkeypatch.setattr(decode_attention_triton, "KEYS", {256: 16})


def near(found: Tensor, wanted: Tensor) -> None:
    """Compare by norm, relative to the wanted."""
    assert found.shape == wanted.shape
    assert bool(found.isfinite().all())
    assert float((found.double() - wanted).norm() / wanted.norm()) < BOUND


def normed(x: Tensor, norm: StepNorm) -> Tensor:
    """The norm by its definition, rounded to the model's dtype."""
    gain = norm.weight.double() + norm.zero_centered
    x = x.double()
    return (x * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * gain).to(DTYPE).double()


def activated(y: Tensor, activation: StepActivation) -> Tensor:
    act = {
        "silu": F.silu,
        "relu2": lambda v: F.relu(v).square(),
        "gelu_pytorch_tanh": lambda v: F.gelu(v, approximate="tanh"),
    }[activation.name]
    if not activation.gated:
        return act(y)
    gate, up = y.chunk(2, dim=-1)
    return act(gate) * up


# Tokens, rows, width, outputs, activation, and whether the norm before has a weight around zero; None: there is none.
Shape = tuple[int, int, int, int, StepActivation | None, bool | None]
SCALINGS = ["none", "delayed", "current"]
SHAPES: list[Shape] = [
    (1, 1, 48, 40, None, None),
    (5, 8, 64, 96, StepActivation("silu", True), True),
    (2, 2, 33, 32, StepActivation("relu2", False), None),
    (4, 8, 272, 144, None, None),
    (7, 8, 300, 144, StepActivation("silu", False), False),
]
# In slow tests.
RARER_SCALINGS = ["power of 2"]
RARER_SHAPES: list[Shape] = [
    (3, 16, 40, 48, None, False),
    (16, 16, 32, 64, StepActivation("gelu_pytorch_tanh", True), False),
    (6, 8, 272, 288, StepActivation("silu", True), False),
]


def products(step: int, *axes: list[Any]) -> list[Any]:
    """Return cases of the axes, a scaling and a shape; each `step`-th of the usual ones is not slow."""
    return [
        *every(step, *axes, SCALINGS, SHAPES),
        *slow(every(1, *axes, RARER_SCALINGS, SHAPES)),
        *slow(every(1, *axes, [*SCALINGS, *RARER_SCALINGS], RARER_SHAPES)),
    ]


@pytest.mark.parametrize(("scaling", "shape"), products(1))
def test_a_product_with_all_that_surrounds_it(scaling: str, shape: Shape) -> None:
    """StepNorm, cast, product, bias, activation, factor and residual; rows of padding are zeros."""
    tokens, rows, width, outputs, activation, centered = shape
    options = dict(device=DEVICE, dtype=DTYPE)
    x = torch.randn(rows, width, **options)
    x[tokens:] = 0
    weight = torch.randn(outputs, width, **options) / width**0.5
    bias = torch.randn(outputs, **options)
    norm = None
    before = x.double()
    if centered is not None:
        norm = StepNorm(torch.rand(width, **options) + 0.5, 1e-6, centered)
        before = normed(x, norm)
    before[tokens:] = 0
    operand = StepLinear(weight, bias)
    values = weight.double()
    if scaling != "none":
        amax = weight.float().abs().amax()
        scale = scale_from_amax(amax, 448.0)
        fp8 = cast_fp8(weight, scale, E4M3)
        power_of_2 = scaling == "power of 2"
        # A scale that is too large for some values, which saturate.
        given = torch.full((1,), 300.0, device=DEVICE) if scaling == "delayed" else None
        operand = StepLinear(fp8, bias, (1 / scale).view(1), given, power_of_2, 0.0)
        values = decode_fp8(fp8, E4M3).double() / scale.double()
        of_input = given
        if of_input is None:
            of_input = scale_from_amax(before.float().abs().amax(), 448.0, power_of_2)
        seen = cast_fp8(before.to(DTYPE), of_input, E4M3)
        before = decode_fp8(seen, E4M3).double() / of_input.double()
    wanted = before @ values.T + bias.double()
    if activation is not None:
        wanted = activated(wanted, activation)
    residual = torch.randn(rows, wanted.shape[1], **options)
    wanted = wanted * 0.25 + residual.double()
    wanted[tokens:] = 0
    found = product(
        x, operand, tokens, norm=norm, activation=activation, residual=residual, factor=0.25
    )
    near(found, wanted)
    assert not found[tokens:].any()


@pytest.mark.parametrize(("programs", "scaling", "shape"), products(2, [1, 1000]))
def test_a_product_in_small_tiles(
    monkeypatch: pytest.MonkeyPatch, programs: int, scaling: str, shape: Shape
) -> None:
    """The same on tensor cores, also with one and two tokens: a program has all channels, or those of one iteration."""
    # On a GPU the smallest tile that Hopper's WGMMA multiplies.
    loop = (64, 32, 4, 3) if ON_GPU else (16, 16, 1, 1)
    tile = SplitTile(*loop, programs=programs)
    monkeypatch.setattr(decode_product_triton, "_split_tile", lambda *kind: tile)
    monkeypatch.setattr(decode_product_triton, "FEW", 0)
    test_a_product_with_all_that_surrounds_it(scaling, shape)


def test_large_weights_in_fp8_are_multiplied_on_tensor_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For one token, too; in BF16 and with fewer weights they are not."""
    many: list[int] = []

    def counted(*given: Any, **options: Any) -> None:
        many.append(given[2].weight.numel())
        split_product(*given, **options)

    monkeypatch.setattr(decode_product_triton, "split_product", counted)
    monkeypatch.setattr(decode_product_triton, "MANY_WEIGHTS", 64 * 48)
    one = torch.ones(1, device=DEVICE)
    for outputs in (32, 48, 64):
        weight = torch.randn(outputs, 64, device=DEVICE, dtype=DTYPE)
        x = torch.randn(1, 64, device=DEVICE, dtype=DTYPE)
        product(x, StepLinear(weight), 1)
        codes = cast_fp8(weight, one, E4M3)
        found = product(x, StepLinear(codes, None, one, one), 1)
        seen = decode_fp8(cast_fp8(x, one, E4M3), E4M3).double()
        near(found, seen @ decode_fp8(codes, E4M3).double().T)
    assert many == [48 * 64, 64 * 64]


@pytest.mark.parametrize("tokens", [2, 16])
def test_a_cast_rounds_as_the_format_does(tokens: int) -> None:
    """Ties, subnormals, saturation and NaN, as a product with the identity shows them."""
    numbers = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    codes = decode_fp8(numbers, E4M3)
    finite = codes[codes.isfinite()].unique()
    middles = (finite[1:] + finite[:-1]) / 2
    values = torch.cat((finite, middles, middles * 1.001, 2 * finite, 2.0**-11 * finite))
    values = values[: len(values) // 16 * 16].view(-1, 16).to(DTYPE)
    one = torch.ones(1, device=DEVICE)
    identity = cast_fp8(torch.eye(16, device=DEVICE), one, E4M3)
    for x in values.split(tokens):
        found = product(x, StepLinear(identity, None, one, one), len(x))
        assert torch.equal(found, decode_fp8(cast_fp8(x, one, E4M3), E4M3).to(DTYPE))
    x = torch.full((tokens, 16), torch.nan, device=DEVICE, dtype=DTYPE)
    assert product(x, StepLinear(identity, None, one, one), tokens).isnan().all()


def rotated(x: Tensor, rotary: Rotary) -> Tensor:
    """RoPE of x [B, heads, H], whose interleaved pairs become halves."""
    turned = rotary.cos.shape[-1]
    first, rest = x[..., :turned], x[..., turned:]
    if rotary.interleaved:
        first = torch.cat((first[..., 0::2], first[..., 1::2]), dim=-1)
    a, b = first.chunk(2, dim=-1)
    cos, sin = rotary.cos.double(), rotary.sin.double()
    return torch.cat((first * cos + torch.cat((-b, a), dim=-1) * sin, rest), dim=-1)


# rows of the batch, heads, channels rotated (0: none), interleaved, norms (None, or zero-centered), cap, sinks, gate
CASES = [
    (1, Heads(2, 1, 16, "none"), 16, False, None, None, False),
    (3, Heads(4, 2, 24, "elementwise"), 8, True, False, None, False),
    (2, Heads(3, 3, 16, "headwise"), 16, True, True, 5.0, True),
    (4, Heads(6, 1, 20, "elementwise"), 0, False, False, None, True),
]


@pytest.mark.parametrize(
    ("used", "slots"),
    [(1, 16), (20, 32), pytest.param(17, 32, marks=SLOW), pytest.param(70, 80, marks=SLOW)],
)
@pytest.mark.parametrize(
    ("batch", "heads", "turned", "interleaved", "centered", "cap", "sinks"), CASES
)
def test_attention_of_a_step(
    batch: int,
    heads: Heads,
    turned: int,
    interleaved: bool,
    centered: bool | None,
    cap: float | None,
    sinks: bool,
    used: int,
    slots: int,
) -> None:
    """By its definition, over a cache in which some slots are hidden; the new keys and values are written."""
    options = dict(device=DEVICE, dtype=DTYPE)
    width = sum(section.stored for section in heads.sections)
    rows = batch + 2
    qkvg = torch.randn(rows, width, **options)
    qkvg[batch:] = 0
    keys, values = (torch.randn(batch, heads.key, slots, heads.dim, **options) for _ in range(2))
    keys[:, :, used - 1 :] = torch.nan  # nothing reads what is not filled yet
    seen = torch.rand(batch, 1, 1, slots, device=DEVICE) < 0.7
    seen[..., used - 1] = True
    seen[..., used:] = False
    mask = torch.zeros(seen.shape, **options).masked_fill(~seen, float("-inf"))
    rotary = norms = sink = None
    if turned:
        angles = torch.rand(batch if batch > 2 else 1, 1, turned // 2, device=DEVICE) * 6
        angles = torch.cat((angles, angles), dim=-1)
        rotary = Rotary(angles.cos().to(DTYPE), angles.sin().to(DTYPE), interleaved)
    if centered is not None:
        gains = torch.rand(2, heads.dim, **options) + 0.5
        norms = HeadNorms(gains[0], gains[1], 1e-5, centered)
    if sinks:
        sink = torch.randn(heads.query, **options)
    scale = heads.dim**-0.5
    softplus = heads.gate == "headwise"
    step = StepAttention(heads, scale, cap, softplus, sink, rotary, norms)
    old_keys, old_values = keys.clone(), values.clone()
    filled = torch.tensor([used], device=DEVICE)
    found = attention(qkvg, StepKeys(keys, values, filled, mask), step, batch)

    sections = [section.stored for section in heads.sections]
    q, k, v, g = qkvg[:batch].double().split(sections, dim=-1)
    q = q.view(batch, heads.query, heads.dim)
    k = k.view(batch, heads.key, heads.dim)
    v = v.view(batch, heads.key, heads.dim)
    if norms is not None:
        q = normed(q, StepNorm(norms.query, norms.eps, norms.zero_centered))
        k = normed(k, StepNorm(norms.key, norms.eps, norms.zero_centered))
    if rotary is not None:
        q, k = rotated(q, rotary), rotated(k, rotary)
    q, k = q.to(DTYPE).double(), k.to(DTYPE)
    near(keys[:, :, used - 1], k.double())
    assert torch.equal(values[:, :, used - 1], v.to(DTYPE))
    for new, old in ((keys, old_keys), (values, old_values)):
        assert torch.equal(new[:, :, : used - 1], old[:, :, : used - 1])
        assert torch.equal(new[:, :, used:].isnan(), old[:, :, used:].isnan())
    group = heads.query // heads.key
    all_keys = keys[:, :, :used].double().repeat_interleave(group, dim=1)
    all_values = values[:, :, :used].double().repeat_interleave(group, dim=1)
    scores = torch.einsum("bah,bash->bas", q, all_keys) * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~seen[:, 0, :, :used], -math.inf)
    if sink is not None:
        scores = torch.cat((scores, sink.double()[None, :, None].expand(batch, -1, 1)), dim=-1)
    weights = scores.softmax(-1)[..., :used]
    out = torch.einsum("bas,bash->bah", weights, all_values)
    if heads.gate == "elementwise":
        out = out * g.view_as(out).sigmoid()
    elif heads.gate == "headwise":
        out = out * F.softplus(g[:, : heads.query, None])
    near(found[:batch], out.flatten(1))
    assert not found[batch:].any()
