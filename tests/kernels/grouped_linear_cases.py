"""The products of all experts in one launch each, against FP64; run by test_triton_kernels.py.

The interpreter multiplies no BF16, so that a CPU takes FP32 in its place.
"""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import pytest
import torch
from fewer import every
from torch import Tensor

from te_models.kernels import grouped_gemm_triton
from te_models.kernels.expert_rows import Route, dispatch
from te_models.kernels.expert_scales_triton import Delayed
from te_models.kernels.grouped_gemm_triton import ExpertMatrices, Tiles, rows_times, weights_from
from te_models.kernels.grouped_linear_triton import (
    E4M3,
    E5M2,
    Casts,
    Locations,
    Stored,
    Weights,
    in_bf16,
    in_fp8,
    on_device,
)
from te_models.kernels.groups import Groups
from te_models.numerics.formats import FP8_MAX, DType
from te_models.numerics.quantizers import Float8CurrentScalingQuantizer, Float8Quantizer

# A tile may contain rows that are not stored, of which the interpreter warns where they are not finite.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
# One rounding to BF16, by up to 2**-8, and sums of tensor cores, which keep 14 bits of FP8's products after every 32 of
# up to 272 terms. On a CPU a sum is rounded as often as it has terms.
BOUND = 2.0**-8 + 9 * 2.0**-13 if DEVICE.type == "cuda" else 272 * 2.0**-24
CASES = [([16, 0, 48, 144, 0], 80, 96), ([0, 16], 16, 272)]
FEW = (
    [16, 0, 32],
    48,
    32,
)  # where two ways are compared: the interpreter takes 0.1 s for a tile of a cast
BEHIND = 32  # rows that belong to no expert


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let few rows have several tiles, and none that is mostly padding, in the interpreter."""
    for name in ("BF16", "FP8", "PRECISE"):
        if DEVICE.type == "cpu":
            monkeypatch.setattr(grouped_gemm_triton, name, grouped_gemm_triton.Tiles(32, 64, 32, 1))


def weights_of(count: int, inputs: int, outputs: int) -> tuple[list[Tensor], Weights]:
    """Weights of different magnitudes in memory of their own."""
    made = [
        torch.randn(outputs, inputs, device=DEVICE).mul_(2.0**e).to(DTYPE).requires_grad_()
        for e in range(count)
    ]
    return made, Weights(made, locations(made))


def locations(tensors: list[Tensor]) -> Locations:
    """Where these tensors are."""
    found = Locations.of(tensors)
    assert found is not None
    return found


def operands(rows: list[int], inputs: int, outputs: int) -> tuple[Tensor, Tensor, Groups]:
    """x and the gradient, whose rows behind those of the experts are not finite, and the groups."""
    x, dy = (
        torch.randn(sum(rows) + BEHIND, width, device=DEVICE).to(DTYPE)
        for width in (inputs, outputs)
    )
    for tensor in (x, dy):
        for e, part in enumerate(tensor.split([*rows, BEHIND])):
            part.mul_(torch.nan if e == len(rows) else 10.0**e)
    return x.requires_grad_(), dy, Groups(Groups.of(rows, DEVICE).first, len(x))


def pieces(rows: list[int], *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Each expert's rows of the tensors."""
    parts = (tensor.detach().split([*rows, BEHIND])[:-1] for tensor in tensors)
    return zip(*parts, strict=True)


def check(found: Tensor, wanted: Tensor) -> None:
    """Each row, by its own norm."""
    scale = wanted.norm(dim=-1, keepdim=True).clamp(min=1e-30)
    assert ((found.double() - wanted).abs() <= BOUND * scale).all()


def biases_of(count: int, outputs: int) -> Tensor:
    """Biases of the magnitude of their expert's products."""
    scale = 20.0 ** torch.arange(count, device=DEVICE)[:, None]
    return (torch.randn(count, outputs, device=DEVICE) * scale).to(DTYPE).requires_grad_()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), CASES)
def test_bf16(rows: list[int], inputs: int, outputs: int, biased: bool) -> None:
    torch.manual_seed(0)
    made, weights = weights_of(len(rows), inputs, outputs)
    bias = (
        biases_of(len(rows), outputs)
        if biased
        else torch.zeros(len(rows), outputs, device=DEVICE, requires_grad=True)
    )
    x, dy, groups = operands(rows, inputs, outputs)
    y = in_bf16(x, groups, weights, bias if biased else None)
    of_x, db, *of_weights = torch.autograd.grad(y, [x, bias, *made], dy, allow_unused=True)
    sums = torch.stack([slope.double().sum(0) for (slope,) in pieces(rows, dy)])
    assert db is None or sums.any()
    check(torch.zeros_like(sums) if db is None else db, sums * biased)
    parts = pieces(rows, x, dy, y, of_x)
    for (one, slope, out, dx), weight, added, dw in zip(parts, made, bias, of_weights, strict=True):
        check(out, one.double() @ weight.detach().double().T + added.detach().double())
        check(dx, slope.double() @ weight.detach().double())
        check(dw, slope.double().T @ one.double())


class Case(NamedTuple):
    rows: tuple[list[int], int, int]
    gradient: torch.dtype
    precise: bool
    delayed: bool
    biased: bool


QUICK = [Case(CASES[0], E5M2, True, True, True), Case(CASES[1], E4M3, False, False, False)]
# All pairs of choices, not all combinations.
OTHERS = [
    Case(rows, gradient, precise, delayed, biased=(gradient == E5M2) ^ precise ^ delayed)
    for rows, gradient, precise, delayed in product(
        CASES, (E4M3, E5M2), (False, True), (False, True)
    )
]
SLOW = [pytest.param(case, marks=pytest.mark.slow) for case in OTHERS if case not in QUICK]


@pytest.mark.parametrize("case", QUICK + SLOW)
def test_fp8(case: Case) -> None:
    """The operands are those of the emulated engine's quantizer, one matrix at a time, and so are delayed amaxes."""
    torch.manual_seed(1)
    rows, inputs, outputs = case.rows
    made, weights = weights_of(len(rows), inputs, outputs)
    bias = biases_of(len(rows), outputs) if case.biased else None
    x, dy, groups = operands(rows, inputs, outputs)
    scales, amaxes = torch.rand(2, len(rows), 3, device=DEVICE).add_(0.5).unbind()
    amaxes[0] = 1e9  # that of a larger tensor before
    before = amaxes.clone()
    own = [Delayed(scales[:, slot], amaxes[:, slot]) if case.delayed else None for slot in range(3)]
    ended: list[int] = []
    casts = Casts(case.gradient, *[case.precise] * 3, *own, after_backward=lambda: ended.append(1))
    y = in_fp8(x, groups, casts, weights.cast(own[1]), weights, bias)
    of_x, *of_weights = torch.autograd.grad(y, [x, *made, *([] if bias is None else [bias])], dy)
    assert ended == [1]
    if bias is not None:
        check(
            of_weights.pop(), torch.stack([slope.double().sum(0) for (slope,) in pieces(rows, dy)])
        )

    def rounded(value: Tensor, form: torch.dtype, expert: int, slot: int) -> Tensor:
        kind = DType.kFloat8E5M2 if form == E5M2 else DType.kFloat8E4M3
        assert FP8_MAX[kind] == torch.finfo(form).max
        scale, amax = (tensor[expert, slot, None] for tensor in (scales, before))
        quantizer = (
            Float8Quantizer(scale, amax, kind)
            if case.delayed
            else Float8CurrentScalingQuantizer(kind, DEVICE)
        )
        return quantizer(value.detach()).dequantize().double()

    parts = pieces(rows, x, dy, y, of_x)
    for e, ((one, slope, out, dx), weight, dw) in enumerate(
        zip(parts, made, of_weights, strict=True)
    ):
        weight = rounded(weight, E4M3, e, 1)
        if not len(one):
            assert not dw.any()
            continue
        one, slope = rounded(one, E4M3, e, 0), rounded(slope, case.gradient, e, 2)
        check(out, one @ weight.T + (0 if bias is None else bias[e].detach().double()))
        check(dx, slope @ weight)
        check(dw, slope.T @ one)
    assert torch.equal(amaxes, before)  # of experts without rows, only the weights' were raised


@pytest.mark.parametrize("delayed", [False, True])
def test_transposed_weights_are_made_again_in_backward(delayed: bool) -> None:
    """With the bits of those that are kept, by the scales of the forward, which the recipe has changed since."""
    torch.manual_seed(3)
    rows, inputs, outputs = FEW
    made, weights = weights_of(len(rows), inputs, outputs)
    x, dy, groups = operands(rows, inputs, outputs)
    results, kept = [], []
    for transpose in (True, False):
        scale, amax = (
            torch.full((len(rows),), 0.7, device=DEVICE),
            torch.zeros(len(rows), device=DEVICE),
        )
        own = weights.cast(Delayed(scale, amax) if delayed else None, transpose=transpose)
        found: dict[int, Tensor] = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, found=found: found.setdefault(t.data_ptr(), t), lambda t: t
        ):
            y = in_fp8(x, groups, Casts(E5M2, False, True, True), own, weights)
        scale.fill_(1000.0)
        before = amax.clone()
        of_x, *of_weights = torch.autograd.grad(y, [x, *made], dy)
        assert torch.equal(amax, before)
        results.append([y[: sum(rows)], of_x[: sum(rows)], *of_weights])
        kept.append(sum(t.numel() for t in found.values() if t.dtype == torch.uint8))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert kept[0] - kept[1] == len(rows) * inputs * outputs


@pytest.mark.parametrize("delayed", [False, True])
def test_rows_of_tokens_are_made_twice_and_never_kept(delayed: bool) -> None:
    """With the bits of rows that are dispatched first; padding, and a token that reaches no expert, among them."""
    torch.manual_seed(4)
    rows, inputs, outputs = FEW
    made, weights = weights_of(len(rows), inputs, outputs)
    tokens, count = 20, sum(rows)
    row = torch.full((tokens, 2), count + BEHIND, device=DEVICE)
    row[1:] = torch.randperm(count, device=DEVICE)[: 2 * tokens - 2].view(-1, 2)
    token = torch.full((count + BEHIND + 1,), tokens, device=DEVICE)
    token = token.scatter(
        0, row.flatten(), torch.arange(tokens, device=DEVICE).repeat_interleave(2)
    )
    token[-1] = tokens
    route = Route(token[:-1].contiguous(), row)
    x = (
        torch.randn(tokens, inputs, device=DEVICE) * 10.0 ** torch.randn(tokens, 1, device=DEVICE)
    ).to(DTYPE)
    dy = torch.randn(count + BEHIND, outputs, device=DEVICE).to(DTYPE)
    groups, x = Groups(Groups.of(rows, DEVICE).first, count + BEHIND), x.requires_grad_()
    results, kept = [], []
    for first in (True, False):
        scale, amax = (
            torch.full((len(rows),), 0.7, device=DEVICE),
            torch.zeros(len(rows), device=DEVICE),
        )
        casts = Casts(E5M2, False, True, True, delayed_x=Delayed(scale, amax) if delayed else None)
        found: dict[int, Tensor] = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, found=found: found.setdefault(t.data_ptr(), t), lambda t: t
        ):
            given, how = (dispatch(x, *route), None) if first else (x, route)
            y = in_fp8(given, groups, casts, weights.cast(), weights, None, how)
        scale.fill_(1000.0)
        of_x, *of_weights = torch.autograd.grad(y, [x, *made], dy)
        results.append([y[:count], of_x, *of_weights, amax])
        kept.append(sum(t.numel() for t in found.values() if t.dtype == torch.uint8))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert not of_x[0].any() and of_x[1:].any(1).all()
    assert kept[0] - kept[1] == groups.aligned.most * inputs


@pytest.mark.parametrize(("case", "precise"), every(2, [FEW, CASES[1]], [False, True]))
def test_weights_in_fp8(case: tuple[list[int], int, int], precise: bool) -> None:
    """The bits of weights that are cast to the same FP8."""
    torch.manual_seed(2)
    rows, inputs, outputs = case
    made, weights = weights_of(len(rows), inputs, outputs)
    for weight in made:
        weight.requires_grad_(False)
    x, dy, groups = operands(rows, inputs, outputs)
    own, casts = weights.cast(), Casts(E5M2, precise, precise, precise)
    data = [part.clone() for part in own.data.split(outputs)]  # each in memory of its own
    stored = Stored(data, locations(data), own.scale_inv)
    results = []
    for y in (in_fp8(x, groups, casts, own, weights), in_fp8(x, groups, casts, stored)):
        (dx,) = torch.autograd.grad(y, [x], dy)
        results.append((y[: sum(rows)], dx[: sum(rows)]))
    for found, wanted in zip(*results, strict=True):
        assert torch.equal(found, wanted) and (wanted.any() or not sum(rows))


def moved(tensors: list[Tensor]) -> None:
    """Free the memory of these tensors and give them other memory, in reverse, as FSDP2 does before backward."""
    values = [tensor.detach().clone() for tensor in tensors]
    before = [tensor.data_ptr() for tensor in tensors]
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(tensors)):
        for tensor, value in zip(reversed(tensors), reversed(values), strict=True):
            tensor.set_(
                torch.empty(3 * value.numel(), dtype=value.dtype, device=DEVICE)[
                    : value.numel()
                ].view_as(value)
            )
            tensor.copy_(value)
    apart = [
        [address - addresses[0] for address in addresses]
        for addresses in (before, [t.data_ptr() for t in tensors])
    ]
    assert apart[0] != apart[1]


@pytest.mark.parametrize("way", ["bf16", "fp8", "stored"])
def test_weights_that_were_gathered_elsewhere_before_backward(way: str) -> None:
    torch.manual_seed(5)
    rows, inputs, outputs = FEW
    made, weights = weights_of(len(rows), inputs, outputs)
    x, dy, groups = operands(rows, inputs, outputs)
    casts, own = Casts(E5M2, False, True, True), weights.cast(transpose=False)
    data = [part.clone() for part in own.data.split(outputs)]
    results = []
    for move in (False, True):
        if way == "bf16":
            y = in_bf16(x, groups, weights)
        elif way == "fp8":
            y = in_fp8(x, groups, casts, own, weights)
        else:
            y = in_fp8(x, groups, casts, Stored(data, locations(data), own.scale_inv))
        if move:
            moved(data if way == "stored" else made)
        results.append(torch.autograd.grad(y, [x], dy)[0][: sum(rows)])
    assert torch.equal(*results) and results[0].any()


def test_frozen_weights_get_no_gradient() -> None:
    made, weights = weights_of(2, 16, 32)
    x, dy, groups = operands([16, 32], 16, 32)
    for weight in made:
        weight.requires_grad_(False)
    casts = Casts(E5M2, False, True, True)
    for y in (in_bf16(x, groups, weights), in_fp8(x, groups, casts, weights.cast(), weights)):
        (dx,) = torch.autograd.grad(y, [x], dy)
        assert dx[:48].isfinite().all() and dx[:48].any()


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), CASES)
def test_products_read_in_both_ways(rows: list[int], inputs: int, outputs: int, tma: bool) -> None:
    """By pointers and by Hopper's copy engine, which also reads rows of other experts."""
    torch.manual_seed(6)
    tiles = Tiles(32, 64, 32, 1, 4, tma)
    x, dy, groups = operands(rows, inputs, outputs)
    made, _ = weights_of(len(rows), inputs, outputs)
    w = torch.cat(made).detach()
    how = dict(precise=False, dtype=DTYPE, tiles=tiles)
    y = rows_times(
        ExpertMatrices(x.detach()), ExpertMatrices(w), groups, outputs, down=False, **how
    )
    dx = rows_times(ExpertMatrices(dy), ExpertMatrices(w), groups, inputs, down=True, **how)
    dw = weights_from(
        ExpertMatrices(dy), ExpertMatrices(x.detach()), groups, outputs, inputs, **how
    )
    for (one, slope, out, of_x), weight, of_weight in zip(
        pieces(rows, x, dy, y, dx), made, dw, strict=True
    ):
        weight = weight.detach().double()
        check(out, one.double() @ weight.T)
        check(of_x, slope.double() @ weight)
        check(of_weight, slope.double().T @ one.double())


def test_precise_sums_leave_the_tensor_cores() -> None:
    """One term per 128 is not zero: 65,536, and others near 1, which the 14 bits of tensor cores would lose."""
    torch.manual_seed(8)
    rows, inputs, outputs = [16, 0, 272, 144], 384, 192
    groups = Groups.of(rows, DEVICE)
    count = sum(rows)
    number = torch.arange(inputs, device=DEVICE)
    first = number == 0
    small = (number % 128 == 5) & (number >= 128)
    near_one = torch.randint(8, 16, (count + 4 * outputs, inputs), device=DEVICE) / 8
    operand = torch.where(first, 256.0, torch.where(small, near_one, 0.0)).to(E4M3)
    x, w = operand.split([count, 4 * outputs])
    ones = torch.ones(4, device=DEVICE)
    how = dict(precise=True, dtype=torch.float32)
    y = rows_times(
        ExpertMatrices(x, ones), ExpertMatrices(w, ones), groups, outputs, down=False, **how
    )
    parts = zip(x.split(rows), w.split(outputs), y.split(rows), strict=True)
    for one, weight, found in parts:
        assert torch.equal(found.double(), one.double() @ weight.double().T)
    # The same along rows, whose transposed copies begin at whole lines.
    numbers = [torch.arange(n, device=DEVICE) for n in rows]
    lead = [(number % 128 == 5) & (number >= 128) for number in numbers]
    values = torch.randint(8, 16, (outputs + 64, count), device=DEVICE) / 8
    turned = torch.zeros(outputs + 64, groups.aligned.most, dtype=torch.uint8, device=DEVICE)
    kept = []
    begins = groups.aligned.first.tolist()
    for part, here, begin in zip(values.split(rows, dim=1), lead, begins, strict=False):
        own = torch.where(here, part, 0.0)
        own[:, :1] = 256.0
        own = own.to(E4M3)
        kept.append(own)
        turned[:, begin : begin + own.shape[1]] = own.view(torch.uint8)
    a, b = turned.view(E4M3).split([outputs, 64])
    dw = weights_from(ExpertMatrices(a, ones), ExpertMatrices(b, ones), groups, outputs, 64, **how)
    for own, found in zip(kept, dw, strict=True):
        one, other = own.double().split([outputs, 64])
        assert torch.equal(found.double(), one @ other.T)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="Gluon has no interpreter")
def test_the_number_of_programs_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper each of several processes has more programs than multiprocessors."""
    pytest.importorskip("triton.experimental.gluon")
    from te_models.kernels import hopper_products_triton as hopper  # noqa: PLC0415

    torch.manual_seed(9)
    rows, inputs, outputs = [16, 0, 272, 1040], 384, 512
    groups = Groups.of(rows, DEVICE)
    x = torch.randn(sum(rows), inputs, device=DEVICE).to(E4M3)
    w = torch.randn(4 * outputs, inputs, device=DEVICE).to(E4M3)
    ones = torch.ones(4, device=DEVICE)
    found = []
    for programs in (1, 7, 132, 528):
        monkeypatch.setattr(hopper, "programs", lambda out, count=programs: count)
        for precise in (False, True):
            found.append(
                rows_times(
                    ExpertMatrices(x, ones),
                    ExpertMatrices(w, ones),
                    groups,
                    outputs,
                    down=False,
                    precise=precise,
                    dtype=torch.float32,
                )
            )
    for number, one in enumerate(found):
        assert torch.equal(one, found[number % 2])


def test_tokens_are_found_inside_the_product() -> None:
    """With the bits of rows that are written first; the last row of each expert is padding."""
    torch.manual_seed(7)
    rows, inputs, outputs = CASES[0]
    x, dy, groups = operands(rows, inputs, outputs)
    made, weights = weights_of(len(rows), inputs, outputs)
    tokens = torch.randn(50, inputs, device=DEVICE).to(DTYPE)
    source = torch.randint(0, 50, (len(x),), device=DEVICE)
    ends = torch.tensor(rows).cumsum(0)
    source[ends[torch.tensor(rows) > 0] - 1] = 50
    given = torch.cat((tokens, tokens.new_zeros(1, inputs)))[source]
    b = ExpertMatrices(made[0].detach(), places=weights.at.places)
    how = dict(precise=False, dtype=DTYPE)
    found, wanted = (
        rows_times(ExpertMatrices(a), b, groups, outputs, down=False, source=where, **how)[
            : sum(rows)
        ]
        for a, where in ((tokens, source), (given, None))
    )
    assert torch.equal(found, wanted) and found.any()
    found, wanted = (
        weights_from(
            ExpertMatrices(dy), ExpertMatrices(a), groups, outputs, inputs, source=where, **how
        )
        for a, where in ((tokens, source), (given, None))
    )
    if DEVICE.type == "cuda":
        assert torch.equal(found, wanted)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize("count", [1, 19, 300])
def test_numbers_reach_the_device_without_a_copy(count: int) -> None:
    numbers = [(-1) ** n * n * 2**37 + n for n in range(count)]
    assert on_device(numbers, DEVICE).tolist() == numbers
