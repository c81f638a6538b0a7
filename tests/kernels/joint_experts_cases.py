"""An MLP of experts in FP8 as one function, against its operations one by one, and these against FP64.

Run by test_triton_kernels.py in Triton's interpreter, which takes FP32 for BF16, and on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from expert_counts import APART, counts_of
from fewer import every
from torch import Tensor

from te_models.kernels import elementwise, expert_hidden_triton, grouped_gemm_triton
from te_models.kernels.count_experts_triton import ExpertCounts
from te_models.kernels.expert_cast_triton import (
    Matrices,
    cast,
    cast_transposed,
)
from te_models.kernels.expert_hidden_triton import Activation, gradients, hidden
from te_models.kernels.expert_rows import PLAIN, Route, combine
from te_models.kernels.expert_rows_triton import dots
from te_models.kernels.expert_scales_triton import Delayed
from te_models.kernels.grouped_linear_triton import (
    E4M3,
    E5M2,
    Casts,
    Locations,
    Stored,
    Weights,
    in_fp8,
)
from te_models.kernels.groups import Groups
from te_models.kernels.joint_experts_triton import JointExperts, Projection, experts_in_fp8
from te_models.recorder.layout import INDEX

# A tile may contain rows that are not stored, of which the interpreter warns where they are not finite.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
BEHIND = 32  # rows that belong to no expert
ROWS = [16, 0, 48, 32, 0]  # with rows of padding
TOKENS, CHOICES, WIDTH, HIDDEN = 40, 2, 48, 80
LIMITS = [None, 1.5]
FORMS = {E4M3: (448.0, 2.0**-4), E5M2: (57344.0, 2.0**-3)}


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BF16", "FP8", "PRECISE"):
        if DEVICE.type == "cpu":
            monkeypatch.setattr(grouped_gemm_triton, name, grouped_gemm_triton.Tiles(32, 64, 32, 1))


class Places(NamedTuple):
    token: Tensor
    row: Tensor
    groups: Groups


def places() -> Places:
    """Tokens at random places, of which each expert leaves its last row to padding; the first token has none."""
    count = sum(ROWS)
    ends = torch.tensor(ROWS).cumsum(0)
    free = torch.ones(count, dtype=torch.bool)
    free[ends[torch.tensor(ROWS) > 0] - 1] = False
    where = free.nonzero().flatten()
    where = where[torch.randperm(len(where))[: CHOICES * (TOKENS - 1)]]
    row = torch.full((TOKENS, CHOICES), count + BEHIND)
    row.view(-1)[CHOICES : CHOICES + len(where)] = where
    token = torch.full((count + BEHIND + 1,), TOKENS)
    token = token.scatter(0, row.flatten(), torch.arange(TOKENS).repeat_interleave(CHOICES))
    token[-1] = TOKENS
    groups = Groups(Groups.of(ROWS, DEVICE).first, count + BEHIND)
    return Places(token[:-1].contiguous().to(DEVICE), row.to(DEVICE), groups)


def opening(x: Tensor) -> Tensor:
    """The sigmoid that the kernels compute: NumPy's in the interpreter."""
    if x.is_cuda:
        return 1 / (1 + torch.exp2(x * -1.4426950216293335))
    return torch.from_numpy(1 / (1 + np.exp(-x.numpy())))


def of_rows(gate_up: Tensor, activation: Activation) -> Tensor:
    """The activation in FP32, rounded."""
    gate, up = gate_up.detach().float().chunk(2, 1)
    if activation.limit is None:
        value = gate * opening(gate) * up
    else:
        gate = gate.clamp(max=activation.limit)
        up = up.clamp(-activation.limit, activation.limit)
        value = (up + 1) * gate * opening(activation.alpha * gate)
    value = value.to(gate_up.dtype)
    if activation.token is not None:
        value[activation.token >= activation.tokens] = 0
    return value


def locations(tensors: list[Tensor]) -> Locations:
    found = Locations.of(tensors)
    assert found is not None
    return found


def weights_of(count: int, inputs: int, outputs: int) -> tuple[list[Tensor], Weights]:
    """Weights of different magnitudes in memory of their own."""
    made = [
        torch.randn(outputs, inputs, device=DEVICE).mul_(2.0**e).to(DTYPE).requires_grad_()
        for e in range(count)
    ]
    return made, Weights(made, locations(made))


def biases_of(count: int, outputs: int) -> Tensor:
    return torch.randn(count, outputs, device=DEVICE).to(DTYPE).requires_grad_()


@pytest.mark.parametrize("padded", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("limit", "form"), every(2, LIMITS, FORMS))
def test_the_activation_against_fp64(
    limit: float | None, form: torch.dtype, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its codes within one step of their format of FP64's, which is where a sum or sigmoid was rounded otherwise."""
    torch.manual_seed(0)
    where = places()

    def used(groups: Groups, columns: int, device: torch.device) -> Tensor:
        return torch.full((columns, groups.aligned.most), 255, dtype=torch.uint8, device=device)

    monkeypatch.setattr(expert_hidden_triton, "room_for_transposed_rows", used)
    made = torch.randn(len(where.token), 2 * HIDDEN, device=DEVICE) * 2
    made[sum(ROWS) :] = torch.nan
    gate_up = made.to(DTYPE)
    dy = torch.randn(len(where.token), HIDDEN, device=DEVICE).to(DTYPE)
    activation = Activation(limit, 1.702 if limit else 1.0)
    if padded:
        activation = activation._replace(token=where.token, tokens=TOKENS)
    there = slice(0, sum(ROWS))
    leaf = gate_up[there].double().requires_grad_()
    if limit is None:
        value = elementwise.swiglu(leaf)
    else:
        gate, up = leaf.chunk(2, dim=1)
        gate = gate.clamp(max=limit)
        value = (up.clamp(-limit, limit) + 1) * gate * torch.sigmoid(1.702 * gate)
    if padded:
        value = value * (where.token[there] < TOKENS)[:, None]
    (slope,) = torch.autograd.grad(value, leaf, dy[there].double())
    expert = torch.repeat_interleave(torch.arange(len(ROWS)), torch.tensor(ROWS)).to(DEVICE)

    def close(data: Tensor, inverse: Tensor, wanted: Tensor, form: torch.dtype) -> None:
        largest, step = FORMS[form]
        found = data.view(form).double() * inverse.double()[expert][:, None]
        smallest = inverse.double()[expert][:, None] * (2.0**-9 if form == E4M3 else 2.0**-16)
        rounding = 0 if torch.float32 == DTYPE else 2.0**-8
        bound = wanted.abs() * (step + rounding) * 1.01 + smallest
        assert ((found - wanted).abs() <= bound).all()
        for e in range(len(ROWS)):
            own = wanted[expert == e]
            if len(own):
                assert abs(own.abs().max() / (inverse[e].double() * largest) - 1) < 2.0**-7

    of_hidden = hidden(gate_up, where.groups, activation, None)
    close(of_hidden.data[there], of_hidden.scale_inv, value.detach(), E4M3)
    found = gradients(
        dy,
        gate_up,
        where.groups,
        activation,
        form,
        None,
        of_hidden.scale,
        transpose=True,
        summed=True,
    )
    data = found.of_gate_up.data[there]
    close(data, found.of_gate_up.scale_inv, slope, form)
    assert found.of_gate_up.transposed is not None and found.hidden is not None
    assert found.sums is not None
    begin = at = 0
    for e, count in enumerate(ROWS):
        apart = -(-count // 128) * 128
        for turned, straight in (
            (found.of_gate_up.transposed, data),
            (found.hidden, of_hidden.data),
        ):
            own = straight[begin : begin + count]
            assert torch.equal(turned[:, at : at + count], own.t())
            assert not turned[:, at + count : at + apart].any()  # a product reads whole lines
        wanted = slope[begin : begin + count]
        noise = 2.0**-7 * wanted.abs().sum(0) + 1e-6  # each value is rounded, and their sum
        assert ((found.sums[e].double() - wanted.sum(0)).abs() <= noise).all()
        begin += count
        at += apart


def test_products_of_tokens_with_their_rows() -> None:
    torch.manual_seed(1)
    where = places()
    x = torch.randn(TOKENS, WIDTH, device=DEVICE).to(DTYPE)
    rows = torch.randn(len(where.token), WIDTH, device=DEVICE).to(DTYPE)
    found, amax = dots(x, rows, where.row)
    padded = torch.cat((rows, rows.new_zeros(1, WIDTH))).double()
    wanted = (padded[where.row] * x.double()[:, None]).sum(2)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=WIDTH * 2.0**-20)
    assert torch.equal(amax, x.float().abs().amax(1))


class Case(NamedTuple):
    delayed: bool = False
    limit: float | None = None
    biased: bool = False
    frozen: bool = False
    gradient: torch.dtype = E5M2
    turned: bool = False  # transposed weights are kept from the forward
    routed: bool = True


CASES = [
    Case(),
    Case(delayed=True, gradient=E4M3, turned=True),
    Case(limit=1.5, biased=True),
    Case(delayed=True, limit=1.5, biased=True),
    Case(frozen=True),
    Case(routed=False),
    Case(delayed=True, biased=True, routed=False),
]


@pytest.mark.filterwarnings("ignore:overflow")  # of NumPy's exponential
@pytest.mark.parametrize(
    "case", [*(pytest.param(case, marks=pytest.mark.slow) for case in CASES[:-1]), CASES[-1]]
)
def test_the_bits_of_the_operations_one_by_one(case: Case) -> None:
    """Outputs, gradients and delayed amaxes; sums of biases within their rounding.

    On a GPU, whose kernels take approximate instructions for the sigmoid, a few codes differ by one.
    """
    torch.manual_seed(2)
    where = places()
    groups = where.groups
    route = Route(where.token, where.row, PLAIN)
    up, up_weights = weights_of(len(ROWS), WIDTH, 2 * HIDDEN)
    down, down_weights = weights_of(len(ROWS), HIDDEN, WIDTH)
    biases = [biases_of(len(ROWS), 2 * HIDDEN), biases_of(len(ROWS), WIDTH)]
    own_biases = biases if case.biased else [None, None]
    gates = torch.rand(TOKENS, CHOICES, device=DEVICE).requires_grad_()
    tokens = torch.randn(TOKENS, WIDTH, device=DEVICE)
    tokens *= 10.0 ** torch.randn(TOKENS, 1, device=DEVICE)
    rows = torch.randn(len(where.token), WIDTH, device=DEVICE)
    x = (tokens if case.routed else rows).to(DTYPE).requires_grad_()
    dy = torch.randn_like(x)
    activation = Activation(case.limit, 1.702 if case.limit else 1.0)
    if case.biased:
        activation = activation._replace(token=where.token, tokens=TOKENS)
    trained = [*up, *down]
    if case.frozen:
        for weight in trained:
            weight.requires_grad_(False)

    def casts(state: list[Tensor]) -> list[Casts]:
        scales, amaxes = state
        found = []
        for side in range(2):
            slots = [Delayed(scales[side, slot], amaxes[side, slot]) for slot in range(3)]
            own = slots if case.delayed else [None] * 3
            found.append(Casts(case.gradient, False, True, True, *own))
        return found

    def begun() -> list[Tensor]:
        made = torch.Generator().manual_seed(5)
        scales = torch.rand(2, 3, len(ROWS), generator=made).add_(0.5).to(DEVICE)
        return [scales, torch.zeros_like(scales)]

    def stored(own: Weights, delayed: Delayed | None) -> Stored:
        made = own.cast(delayed)
        data = [part.clone() for part in made.data.split(len(own.tensors[0]))]
        return Stored(data, locations(data), made.scale_inv)

    def one_by_one(state: list[Tensor]) -> Tensor:
        of_up, of_down = casts(state)
        pair = [up_weights.cast(of_up.delayed_weights), down_weights.cast(of_down.delayed_weights)]
        gate_up = in_fp8(
            x, groups, of_up, pair[0], up_weights, own_biases[0], route if case.routed else None
        )
        middle = _Middle.apply(gate_up, activation, groups)
        out = in_fp8(middle, groups, of_down, pair[1], down_weights, own_biases[1])
        return combine(out, gates, where.token, where.row) if case.routed else out

    def at_once(state: list[Tensor]) -> Tensor:
        sides = []
        for own, cast_of, bias, sizes in zip(
            (up_weights, down_weights), casts(state), own_biases,
            ((WIDTH, 2 * HIDDEN), (HIDDEN, WIDTH)), strict=True,
        ):  # fmt: skip
            if case.frozen:
                kept = stored(own, cast_of.delayed_weights)
                sides.append(Projection(cast_of, kept, kept.at, *sizes, (), bias))
            else:
                kept = own.cast(cast_of.delayed_weights, transpose=case.turned)
                sides.append(Projection(cast_of, kept, own.at, *sizes, own.tensors, bias))
        experts = JointExperts(groups, route if case.routed else None, activation, *sides)
        return experts_in_fp8(x, gates if case.routed else None, experts)

    leaves = [x, *([gates] if case.routed else []), *([] if case.frozen else trained)]
    leaves += biases if case.biased else []
    results = []
    for run in (one_by_one, at_once):
        state = begun()
        y = run(state)
        other = dy.t().contiguous().t()  # of the same values, with other strides
        found = torch.autograd.grad(y, leaves, other if run is at_once else dy)
        there = slice(None) if case.routed else slice(0, sum(ROWS))
        values = {"y": y[there], "dx": found[0][there], "amax": state[1]}
        values |= {str(number): value for number, value in enumerate(found[1:])}
        results.append(values)
    last = [str(len(leaves) - 2 - number) for number in range(2)] if case.biased else []
    for name, wanted in results[0].items():
        found_one = results[1][name]
        if name in last or (name == "0" and case.routed):  # sums in another order
            scale = wanted.double().abs().amax()
            assert ((found_one.double() - wanted.double()).abs() <= 2.0**-7 * scale).all()
        elif DEVICE.type == "cuda":
            off = (found_one.double() - wanted.double()).norm()
            assert off <= 2.0**-6 * wanted.double().norm(), name
        else:
            assert torch.equal(found_one, wanted), name
    assert results[0]["dx"].any() and results[0]["y"].isfinite().all()


class _Middle(torch.autograd.Function):
    """The activation, whose gradient the kernel under test computes: the bits that are compared are those around it."""

    @staticmethod
    def forward(ctx, gate_up: Tensor, activation: Activation, groups: Groups) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(gate_up)
        ctx.activation, ctx.groups = activation, groups
        return of_rows(gate_up, activation)

    @staticmethod
    def backward(ctx, *grads: Tensor):  # type: ignore[no-untyped-def]
        (gate_up,) = ctx.saved_tensors
        activation = ctx.activation
        gate, up = gate_up.float().chunk(2, 1)
        dy = grads[0].float().clone()
        if activation.token is not None:
            dy[activation.token >= activation.tokens] = 0
        if activation.limit is None:
            open_ = opening(gate)
            silu = gate * open_
            slopes = dy * up * (open_ + silu * (1 - open_)), dy * silu
        else:
            inside, between = gate <= activation.limit, up.abs() <= activation.limit
            gate = gate.clamp(max=activation.limit)
            up = up.clamp(-activation.limit, activation.limit) + 1
            open_ = opening(activation.alpha * gate)
            of_gate = dy * up * open_ * (1 + activation.alpha * gate * (1 - open_))
            slopes = of_gate * inside, dy * gate * open_ * between
        return torch.cat(slopes, 1).to(gate_up.dtype), None, None


def test_amaxes_of_copies_are_those_of_rows() -> None:
    """By factors too: the codes are those of rows that are written first."""
    torch.manual_seed(3)
    where = places()
    x = torch.randn(TOKENS, WIDTH, device=DEVICE).to(DTYPE)
    factor = torch.rand(len(where.token), device=DEVICE)
    rows, _ = PLAIN.gather(x, where.token, factor, None)
    wanted = cast(Matrices(rows, where.groups), E4M3)
    given = Matrices(x, where.groups, source=where.token, factor=factor)
    found = cast(given, E4M3)
    there = slice(0, sum(ROWS))
    assert torch.equal(found.data[there], wanted.data[there])
    assert torch.equal(found.scale_inv, wanted.scale_inv)
    again = cast_transposed(given, E4M3, found.scale)
    assert wanted.transposed is not None
    begin = 0
    for count in ROWS:
        apart = -(-count // 128) * 128
        own = slice(begin, begin + count)
        assert torch.equal(again[:, own], wanted.transposed[:, own])
        begin += apart


class Watched(NamedTuple):
    """An observer that lets the kernels count into a table of its own (te_models.recorder.table.ExpertObserver)."""

    counts: ExpertCounts


@pytest.mark.filterwarnings("ignore:overflow")  # of NumPy's exponential
@pytest.mark.slow
@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("joint", [True, False])
def test_observers_count_every_cast_and_change_no_bit(joint: bool, routed: bool) -> None:
    """Elements and energy of each expert's operands, the activation and its gradient included."""
    torch.manual_seed(4)
    where = places()
    groups = where.groups
    route = Route(where.token, where.row, PLAIN) if routed else None
    up, up_weights = weights_of(len(ROWS), WIDTH, 2 * HIDDEN)
    down, down_weights = weights_of(len(ROWS), HIDDEN, WIDTH)
    x = torch.randn(TOKENS if routed else len(where.token), WIDTH, device=DEVICE)
    x = x.to(DTYPE).requires_grad_()
    gates = torch.rand(TOKENS, CHOICES, device=DEVICE) if routed else None
    plain = Casts(E5M2, False, True, True)

    def step(of_up: Casts, of_down: Casts) -> list[Tensor]:
        own = up_weights.cast(transpose=False, observer=of_up.observer_weights)
        if joint:
            other = down_weights.cast(transpose=False, observer=of_down.observer_weights)
            experts = JointExperts(
                groups,
                route,
                Activation(None, 1.0),
                Projection(of_up, own, up_weights.at, WIDTH, 2 * HIDDEN, up),
                Projection(of_down, other, down_weights.at, HIDDEN, WIDTH, down),
            )
            y = experts_in_fp8(x, gates, experts)
            return [y, *torch.autograd.grad(y, (x, *up, *down), torch.ones_like(y))]
        y = in_fp8(x, groups, of_up, own, up_weights, None, route)
        return [y, *torch.autograd.grad(y, (x, *up), torch.ones_like(y))]

    seen = [[Watched(counts_of(len(ROWS), DEVICE)) for _ in range(3)] for _ in range(2)]
    watched = [
        plain._replace(observer_x=own[0], observer_weights=own[1], observer_dy=own[2])
        for own in seen
    ]
    there = sum(ROWS)
    for found, expected in zip(step(*watched), step(plain, plain), strict=True):
        whole = found[:there] if len(found) == len(where.token) else found
        assert torch.equal(whole, expected[: len(whole)])
    sizes = [(WIDTH, 2 * HIDDEN, 2 * HIDDEN * WIDTH), (HIDDEN, WIDTH, HIDDEN * WIDTH)]
    for side, (inputs, outputs, weight) in enumerate(sizes[: 2 if joint else 1]):
        for operand, columns in ((0, inputs), (2, outputs), (1, 0)):
            fields = seen[side][operand].counts.fields[::APART].sum(1)
            elements = [weight] * len(ROWS) if operand == 1 else [r * columns for r in ROWS]
            assert fields[:, INDEX["elements"]].tolist() == elements, (side, operand)
            signal = fields[:, INDEX["signal"]][fields[:, INDEX["elements"]] > 0]
            assert (signal > 0).all()
