"""Experts under block scaling: the bits of the emulated engine's casts, and products and gradients in FP64.

Run by test_triton_kernels.py in Triton's interpreter, which takes FP32 for BF16, and on a GPU.
"""

import pytest
import torch
from expert_counts import APART, counts_of
from fewer import every
from torch import Tensor

from te_models.kernels import elementwise, expert_blocks_triton
from te_models.kernels.expert_blocks_triton import cast_blocks, cast_weight_blocks
from te_models.kernels.expert_cast_triton import Matrices
from te_models.kernels.expert_hidden_triton import Activation
from te_models.kernels.expert_rows import PLAIN, Route, combine, dispatch
from te_models.kernels.grouped_blocks_triton import (
    BlockExperts,
    BlockProjection,
    cast_weights,
    experts_in_blocks,
    in_blocks,
)
from te_models.kernels.grouped_linear_triton import Locations
from te_models.kernels.groups import Groups
from te_models.numerics.formats import DType
from te_models.numerics.quantizers import Float8BlockQuantizer
from te_models.recorder.layout import INDEX
from te_models.recorder.statistics import Cast
from te_models.recorder.statistics import count_cast as count_in_pytorch

# A tile may contain rows that are not stored, of which the interpreter warns where they are not finite.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:overflow")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
ROWS = [16, 0, 144, 48]
BEHIND = 16  # rows that belong to no expert
INPUTS, OUTPUTS = 144, 80


def quantizer(block: int) -> Float8BlockQuantizer:
    return Float8BlockQuantizer(
        DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=block
    )


def rows_of(width: int) -> Tensor:
    """Rows of magnitudes that differ by expert, row and column, and NaN behind them; a block of zeros among them."""
    x = torch.randn(sum(ROWS) + BEHIND, width, device=DEVICE)
    x *= 10.0 ** torch.randint(-6, 6, (len(x), 1), device=DEVICE)
    x *= 10.0 ** torch.randint(-2, 2, (1, width), device=DEVICE)
    x[:16, :128] = 0
    x[sum(ROWS) :] = torch.nan
    return x.to(DTYPE)


def groups() -> Groups:
    return Groups(Groups.of(ROWS, DEVICE).first, sum(ROWS) + BEHIND)


def decoded(x: Tensor, columnwise: bool) -> Tensor:
    """The values of the emulated engine's copy of x, FP64."""
    if not len(x):
        return x.double()
    tensor = quantizer(1)(x.detach())
    data = tensor._columnwise_data if columnwise else tensor._rowwise_data
    scale = tensor._columnwise_scale_inv if columnwise else tensor._rowwise_scale_inv
    blocks = -(-data.shape[1] // 128)
    by = scale[:blocks, : data.shape[0]].t().repeat_interleave(128, 1)[:, : data.shape[1]]
    found = data.view(torch.float8_e4m3fn).double() * by.double()
    return found.t() if columnwise else found


def decoded_weight(weight: Tensor) -> Tensor:
    tensor = quantizer(2)(weight.detach())
    o, i = weight.shape
    scale = tensor._rowwise_scale_inv[: -(-o // 128), : -(-i // 128)]
    by = scale.repeat_interleave(128, 0)[:o].repeat_interleave(128, 1)[:, :i]
    return tensor._rowwise_data.view(torch.float8_e4m3fn).double() * by.double()


def test_rows_have_the_bits_of_the_emulated_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)

    def used(groups: Groups, columns: int, device: torch.device) -> Tensor:
        return torch.full((columns, groups.aligned.most), 255, dtype=torch.uint8, device=device)

    monkeypatch.setattr(expert_blocks_triton, "room_for_transposed_rows", used)
    x = rows_of(INPUTS)
    found, sums = cast_blocks(Matrices(x, groups()), summed=True)
    assert found.data is not None and found.scale_inv is not None and sums is not None
    assert found.transposed is not None and found.transposed_inv is not None
    begin = at = 0
    for e, (count, part) in enumerate(zip(ROWS, x.split([*ROWS, BEHIND]), strict=False)):
        if count:
            wanted = quantizer(1)(part)
            own = slice(begin, begin + count)
            assert torch.equal(found.data[own], wanted._rowwise_data.view(torch.uint8))
            assert torch.equal(found.scale_inv[:, own], wanted._rowwise_scale_inv[:, :count])
            turned = wanted._columnwise_data.view(torch.uint8)
            assert torch.equal(found.transposed[:, at : at + count], turned)
            end = at - (-count // 128) * 128
            assert not found.transposed[:, at + count : end].any()  # a product reads whole lines
            blocks = slice(at // 128, at // 128 - (-count // 128))
            inverse = wanted._columnwise_scale_inv[:, :INPUTS]
            assert torch.equal(found.transposed_inv[blocks], inverse)
        total = part.double().sum(0)
        assert ((sums[e].double() - total).abs() <= 2.0**-8 * part.double().abs().sum(0)).all()
        begin += count
        at += -(-count // 128) * 128


@pytest.mark.parametrize(("tokens", "columns"), [(40, 48), (33, 272)])
def test_copies_of_tokens_have_the_bits_of_rows(tokens: int, columns: int) -> None:
    """Tokens of every magnitude, zeros and infinity among them; padding and what lies behind gets zeros."""
    torch.manual_seed(tokens)
    x = torch.randn(tokens, columns) * 10.0 ** torch.randint(-20, 20, (tokens, 1))
    x[3] = 0.0
    x[5, 1] = torch.inf
    x = x.to(DTYPE).to(DEVICE)
    source = torch.randint(0, tokens, (sum(ROWS) + BEHIND,), device=DEVICE)
    source[7] = tokens
    source[sum(ROWS) :] = tokens + 1
    where = groups()
    found, _ = cast_blocks(Matrices(x, where, source=source), transpose=False)
    ones = torch.ones(len(source), device=DEVICE)
    wanted, _ = cast_blocks(Matrices(x, where, source=source, factor=ones), transpose=False)
    assert found.data is not None and wanted.data is not None
    assert found.scale_inv is not None and wanted.scale_inv is not None
    own = slice(0, sum(ROWS))
    assert torch.equal(found.data[own], wanted.data[own])
    assert torch.equal(found.scale_inv[:, own], wanted.scale_inv[:, own])
    assert not found.data[sum(ROWS) :].any() and not found.data[7].any()


def weights_of(inputs: int, outputs: int) -> tuple[list[Tensor], Locations]:
    """Weights of other magnitudes for each expert, in memory of their own."""
    made = [
        (torch.randn(outputs, inputs, device=DEVICE) * 4.0**e).to(DTYPE).requires_grad_()
        for e in range(len(ROWS))
    ]
    at = Locations.of(made)
    assert at is not None
    return made, at


def test_weights_have_the_bits_of_the_emulated_engine() -> None:
    torch.manual_seed(1)
    made, at = weights_of(INPUTS, OUTPUTS)
    found = cast_weight_blocks(made[0].detach(), at.places)
    assert found.data is not None and found.transposed is not None
    for e, weight in enumerate(made):
        wanted = quantizer(2)(weight.detach())
        data = wanted._rowwise_data.view(torch.uint8)
        assert torch.equal(found.data.split(OUTPUTS)[e], data)
        assert torch.equal(found.transposed.split(INPUTS)[e], data.t())
        inverse = wanted._rowwise_scale_inv
        assert torch.equal(
            found.scale_inv[e], inverse[: found.scale_inv.shape[1], : found.scale_inv.shape[2]]
        )


def close(found: Tensor, wanted: Tensor, size: Tensor) -> None:
    """Within the rounding of a result to DTYPE, and of sums of tensor cores, by the size of the terms."""
    exact = DEVICE.type == "cpu"
    bound = (2.0**-22 if exact else 2.0**-8) * wanted.abs() + (
        2.0**-18 if exact else 2.0**-11
    ) * size
    assert ((found.double() - wanted).abs() <= bound).all()


@pytest.mark.parametrize(("transpose", "biased"), every(2, [False, True], [False, True]))
def test_products_and_gradients(transpose: bool, biased: bool) -> None:
    """By the operands that the emulated engine's quantizers make; transposed weights kept, or made in backward."""
    torch.manual_seed(2)
    where = groups()
    made, at = weights_of(INPUTS, OUTPUTS)
    bias = torch.randn(len(ROWS), OUTPUTS, device=DEVICE).to(DTYPE).requires_grad_()
    x = rows_of(INPUTS).requires_grad_()
    dy = rows_of(OUTPUTS)
    own = cast_weight_blocks(made[0].detach(), at.places, transpose=transpose)
    y = in_blocks(x, where, BlockProjection(own, at, made, bias if biased else None))
    dx, *of_weights = torch.autograd.grad(y, [x, *made, *([bias] if biased else [])], dy)
    db = of_weights.pop() if biased else None
    parts = zip(
        *(value.detach().split([*ROWS, BEHIND])[:-1] for value in (x, dy, y, dx)), strict=True
    )
    for e, (one, slope, out, of_x) in enumerate(parts):
        weight = decoded_weight(made[e])
        if not len(one):
            assert not of_weights[e].any()
            continue
        added = bias[e].detach().double() if biased else 0.0
        a = decoded(one, False)
        close(out, a @ weight.T + added, a.abs() @ weight.T.abs())
        g = decoded(slope, False)
        close(of_x, g @ weight, g.abs() @ weight.abs())
        a, g = decoded(one, True), decoded(slope, True)
        close(of_weights[e], g.T @ a, g.T.abs() @ a.abs())
        if db is not None:
            close(db[e], slope.double().sum(0), slope.double().abs().sum(0))


TOKENS, CHOICES = 100, 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("routed", "limit", "hidden_size"),
    [
        (True, None, 80),
        (True, None, 128),
        (True, 1.5, 144),
        (False, 1.5, 128),
        (False, None, 144),
    ],
)
def test_the_mlp_against_its_operations_one_by_one(
    routed: bool, limit: float | None, hidden_size: int
) -> None:
    """Of the same kernels, with the activation in FP64: codes differ by one where its last bit does."""
    torch.manual_seed(3)
    count = sum(ROWS)
    row = torch.full((TOKENS, CHOICES), count + BEHIND)
    ends = torch.tensor(ROWS).cumsum(0)
    free = torch.ones(count, dtype=torch.bool)
    free[ends[torch.tensor(ROWS) > 0] - 1] = False
    where = free.nonzero().flatten()
    where = where[torch.randperm(len(where))[: CHOICES * (TOKENS - 1)]]
    row.view(-1)[CHOICES : CHOICES + len(where)] = where
    token = torch.full((count + BEHIND + 1,), TOKENS)
    token = token.scatter(0, row.flatten(), torch.arange(TOKENS).repeat_interleave(CHOICES))
    token[-1] = TOKENS
    route = Route(token[:-1].contiguous().to(DEVICE), row.to(DEVICE), PLAIN)
    own = groups()
    up, up_at = weights_of(INPUTS, 2 * hidden_size)
    down, down_at = weights_of(hidden_size, INPUTS)
    biased = limit is not None
    biases = [
        torch.randn(len(ROWS), width, device=DEVICE).to(DTYPE).requires_grad_()
        for width in (2 * hidden_size, INPUTS)
    ]
    x = torch.randn(TOKENS if routed else count + BEHIND, INPUTS, device=DEVICE).to(DTYPE)
    x.requires_grad_()
    gates = torch.rand(TOKENS, CHOICES, device=DEVICE).requires_grad_()
    dy = torch.randn_like(x)
    real = (route.token < TOKENS)[:, None]
    sides = [
        BlockProjection(
            cast_weight_blocks(made[0].detach(), at.places, transpose=False), at, made,
            biases[number] if biased else None,
        )
        for number, (made, at) in enumerate(((up, up_at), (down, down_at)))
    ]  # fmt: skip

    def one_by_one() -> Tensor:
        rows = dispatch(x, route.token, route.row) if routed else x
        gate_up = in_blocks(rows, own, sides[0]).double()
        if limit is None:
            hidden = elementwise.swiglu(gate_up)
        else:
            gate, value = gate_up.chunk(2, dim=1)
            gate = gate.clamp(max=limit)
            hidden = (value.clamp(-limit, limit) + 1) * gate * torch.sigmoid(1.702 * gate)
        if biased:
            hidden = torch.where(real, hidden, 0.0)
        out = in_blocks(hidden.to(DTYPE), own, sides[1])
        return combine(out, gates, route.token, route.row) if routed else out

    def at_once() -> Tensor:
        activation = Activation(limit, 1.702 if limit else 1.0)
        if biased:
            activation = activation._replace(token=route.token, tokens=TOKENS)
        how = BlockExperts(own, route if routed else None, activation, *sides)
        return experts_in_blocks(x, gates if routed else None, how)

    leaves = [x, *([gates] if routed else []), *up, *down, *(biases if biased else [])]
    results = []
    for run in (one_by_one, at_once):
        y = run()
        other = dy.t().contiguous().t()  # of the same values, with other strides
        found = torch.autograd.grad(y, leaves, other if run is at_once else dy)
        there = slice(None) if routed else slice(0, count)
        results.append([y[there], found[0][there], *found[1:]])
    for number, (wanted, value) in enumerate(zip(*results, strict=True)):
        off = (value.double() - wanted.double()).norm()
        assert off <= 2.0**-7 * wanted.double().norm(), number
        assert value.isfinite().all()
    assert results[0][0].any() and results[0][1].any()


class Watched:
    """An observer of a cast of all experts."""

    def __init__(self) -> None:
        self.table = counts_of(len(ROWS), DEVICE)
        self.asked = 0

    @property
    def counts(self) -> object:
        self.asked += 1
        return self.table

    def of(self, field: str) -> Tensor:
        return self.table.fields[::APART, :, INDEX[field]].sum(1).cpu()


@pytest.mark.slow
@pytest.mark.parametrize("joint", [False, True])
def test_a_recorded_step_has_the_same_bits(joint: bool) -> None:
    """Each cast of a step is counted once, and the counts of the input are those of the emulated engine's cast."""
    torch.manual_seed(4)
    hidden_size = 48
    own = Groups.of(ROWS, DEVICE)
    up, up_at = weights_of(INPUTS, 2 * hidden_size)
    down, down_at = weights_of(hidden_size, INPUTS)
    x = torch.randn(sum(ROWS), INPUTS, device=DEVICE).to(DTYPE).requires_grad_()
    sides = [(up, up_at), (down, down_at)]
    seen = [[Watched() for _ in range(3)] for _ in sides]

    def step(recorded: bool) -> list[Tensor]:
        made = []
        for (weights, at), (of_x, of_weights, of_dy) in zip(sides, seen, strict=True):
            detached = [weight.detach() for weight in weights]
            cast = cast_weights(detached, at, False, of_weights if recorded else None)
            observers = dict(observer_x=of_x, observer_dy=of_dy) if recorded else {}
            made.append(BlockProjection(cast, at, weights, **observers))
        if joint:
            y = experts_in_blocks(x, None, BlockExperts(own, None, Activation(None, 1.0), *made))
        else:
            hidden = elementwise.swiglu(in_blocks(x, own, made[0]))
            y = in_blocks(hidden, own, made[1])
        return [y, *torch.autograd.grad(y, (x, *up, *down), torch.ones_like(y))]

    for found, expected in zip(step(True), step(False), strict=True):
        assert torch.equal(found, expected)
    sizes = [(INPUTS, 2 * hidden_size), (hidden_size, INPUTS)]
    for side, (inputs, outputs) in enumerate(sizes):
        for operand, columns in ((0, inputs), (2, outputs), (1, 0)):
            watched = seen[side][operand]
            assert watched.asked == 1
            elements = (
                [inputs * outputs] * len(ROWS) if operand == 1 else [r * columns for r in ROWS]
            )
            assert watched.of("elements").tolist() == elements, (side, operand)
            signal = watched.of("signal")[watched.of("elements") > 0]
            assert (signal > 0).all()
    for e, part in enumerate(x.detach().split(ROWS)):
        if len(part):
            cast = quantizer(1)(part)
            codes = cast._rowwise_data.view(torch.uint8)
            inverse = cast._rowwise_scale_inv[:, : len(part)].t()
            fields, hashed = count_in_pytorch(part, Cast(codes, inverse, (1, 128), 7))
            assert seen[0][0].table.codes[APART * e].item() == hashed.item()
            for field in ("subnormal", "blocks", "signal", "noise"):
                wanted = fields[INDEX[field]].item()
                assert seen[0][0].of(field)[e].item() == pytest.approx(wanted, rel=1e-6)


def test_only_hopper_and_whole_lines_fit() -> None:
    assert expert_blocks_triton.blocks_fit(DEVICE, 144, 80) == (
        DEVICE.type == "cpu" or torch.cuda.get_device_capability(DEVICE)[0] == 9
    )
    assert not expert_blocks_triton.blocks_fit(DEVICE, 144, 72)
