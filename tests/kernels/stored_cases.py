"""Stored weights: their values in one launch, and the products of experts, against the plain and the dense ones.

Run by test_triton_kernels.py. The interpreter cuts BF16 off and multiplies none, so that a CPU takes FP32 in its place.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from fewer import every
from torch import Tensor

from te_models.kernels import grouped_gemm_triton, stored_experts_triton
from te_models.kernels.expert_rows import Route
from te_models.kernels.expert_scales_triton import Delayed
from te_models.kernels.grouped_linear_triton import (
    E5M2,
    Casts,
    Locations,
    Weights,
    in_bf16,
    in_fp8,
)
from te_models.kernels.groups import Groups
from te_models.kernels.stored_experts_triton import (
    StoredExperts,
    stored_in_bf16,
    stored_in_fp8,
)
from te_models.numerics.stored import StoredRows

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
SCALES = ["fp32", "bf16", "e4m3", "e8m0"]


def rows_of(
    rows: int,
    columns: int,
    packed: bool = True,
    kind: str = "e8m0",
    shared: bool = False,
    factors: str = "",
) -> StoredRows:
    """Random data, with scales of 32 columns: of each row, or shared by several."""
    data = torch.randint(0, 256, (rows, columns // (2 if packed else 1)), dtype=torch.uint8)
    if not packed:
        data[(data & 0x7F) == 0x7F] = 1
    count = 7 if shared else rows
    shape = (count, -(-columns // 32))
    scales = torch.rand(shape) + 0.1
    if kind == "bf16":
        scales = scales.bfloat16()
    elif kind == "e4m3":
        scales = scales.to(torch.float8_e4m3fn)
    elif kind == "e8m0":
        scales = torch.randint(120, 130, shape, dtype=torch.uint8)
    scale_rows = torch.randint(0, count, (rows,), dtype=torch.int32) if shared else None
    found = StoredRows(
        data=data,
        scales=scales,
        width=32,
        packed=packed,
        scale_rows=scale_rows,
        factors=torch.rand(rows) + 0.3 if factors else None,
        divide=factors == "divide",
    )
    return found.mapped(lambda tensor: tensor.to(DEVICE))


@pytest.mark.parametrize(
    ("packed", "kind", "shared", "factors"),
    every(3, [True, False], SCALES, [False, True], ["", "divide", "multiply"]),
)
def test_values_in_one_launch(packed: bool, kind: str, shared: bool, factors: str) -> None:
    torch.manual_seed(0)
    rows = rows_of(70, 288, packed, kind, shared, factors)
    out = torch.empty(70, 288, dtype=DTYPE, device=DEVICE)
    rows.dequantize_in_one_launch(out)
    wanted = rows.mapped(lambda tensor: tensor.cpu()).dequantize(DTYPE)
    assert torch.equal(out.cpu(), wanted)
    assert torch.equal(torch.signbit(out.cpu()), torch.signbit(wanted))


def operands(rows: list[int], inputs: int, outputs: int) -> tuple[Tensor, Tensor, Groups]:
    """x and the gradient, with rows behind those of the experts."""
    behind = 32
    x, dy = (
        torch.randn(sum(rows) + behind, width, device=DEVICE).to(DTYPE)
        for width in (inputs, outputs)
    )
    return x.requires_grad_(), dy, Groups(Groups.of(rows, DEVICE).first, len(x))


def both(
    monkeypatch: pytest.MonkeyPatch, rows: list[int], inputs: int, outputs: int, at_a_time: int
) -> tuple[StoredExperts, Weights]:
    """The weights as they are stored, of which some are dequantized at a time, and their values."""
    stack = rows_of(len(rows) * outputs, inputs)
    parts = [stack.part(e * outputs, (e + 1) * outputs) for e in range(len(rows))]
    if at_a_time == 3:  # parts that do not follow each other
        parts = [
            replace(part, data=part.data.clone(), scales=part.scales.clone()) for part in parts
        ]
    values = [
        part.mapped(lambda tensor: tensor.cpu()).dequantize(DTYPE).to(DEVICE) for part in parts
    ]
    found = Locations.of(values)
    assert found is not None
    monkeypatch.setattr(stored_experts_triton, "experts_at_a_time", lambda *sizes: at_a_time)
    if DEVICE.type == "cpu":
        for name in ("BF16", "FP8", "PRECISE"):
            small = grouped_gemm_triton.Tiles(32, 64, 32, 1)
            monkeypatch.setattr(grouped_gemm_triton, name, small)
        # Off a GPU, the plain values; the interpreter's are the same (above).
    return StoredExperts(parts, DTYPE), Weights(values, found)


ROWS = [16, 0, 32]


@pytest.mark.parametrize(("at_a_time", "biased"), every(3, [1, 2, 3], [False, True]))
def test_bf16(monkeypatch: pytest.MonkeyPatch, at_a_time: int, biased: bool) -> None:
    torch.manual_seed(1)
    stored, weights = both(monkeypatch, ROWS, 64, 48, at_a_time)
    x, dy, groups = operands(ROWS, 64, 48)
    bias = torch.randn(3, 48, device=DEVICE).to(DTYPE) if biased else None
    found = stored_in_bf16(x, groups, stored, bias)
    wanted = in_bf16(x, groups, weights, bias)
    strided = dy.T.contiguous().T  # autograd hands on gradients of any layout
    (of_found,) = torch.autograd.grad(found, x, strided)
    (of_wanted,) = torch.autograd.grad(wanted, x, dy)
    real = sum(ROWS)
    assert torch.equal(found[:real], wanted[:real])
    assert torch.equal(of_found[:real], of_wanted[:real])


CASES = list(itertools.product([1, 2], [False, True], [False, True]))


@pytest.mark.parametrize(
    ("at_a_time", "delayed", "routed"),
    [case if case == CASES[-1] else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
def test_fp8(monkeypatch: pytest.MonkeyPatch, at_a_time: int, delayed: bool, routed: bool) -> None:
    torch.manual_seed(2)
    stored, weights = both(monkeypatch, ROWS, 64, 48, at_a_time)
    x, dy, groups = operands(ROWS, 64, 48)
    count = sum(ROWS)
    route = None
    if routed:
        tokens = 24
        row = torch.randperm(count, device=DEVICE).view(tokens, 2)
        token = torch.full((len(x),), tokens, device=DEVICE)
        source = torch.arange(tokens, device=DEVICE).repeat_interleave(2)
        route = Route(token.scatter(0, row.flatten(), source), row)
        x = torch.randn(tokens, 64, device=DEVICE).to(DTYPE).requires_grad_()
    results = []
    for dense in (False, True):
        scale = torch.rand(3, 3, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(3))
        scale += 0.5
        amax = torch.zeros(3, 3, device=DEVICE)
        own = [Delayed(s, a) if delayed else None for s, a in zip(scale.T, amax.T, strict=True)]
        ended: list[bool] = []
        casts = Casts(
            E5M2, True, False, True, *own, after_backward=lambda ended=ended: ended.append(True)
        )
        if dense:
            cast = weights.cast(own[1])
            y = in_fp8(x, groups, casts, cast, weights, None, route)
        else:
            y = stored_in_fp8(x, groups, casts, stored, None, route)
        raised = amax.clone()
        scale[:, 1] = 1000.0  # which the recipe changes before backward
        (dx,) = torch.autograd.grad(y, x, dy if dense else dy.T.contiguous().T)
        assert ended == [True]
        results.append([y[:count], dx if routed else dx[:count], raised, amax])
    for found, wanted in zip(*results, strict=True):
        assert torch.equal(found, wanted)
