"""Few rows without the zeros that pad them: the bits are those of te.Linear with the zeros."""

import copy
from typing import Any

import pytest
import torch
from fewer import every
from torch import Tensor

from te_models.engine import emulated as te
from te_models.engine.emulated import few_rows, recipe
from te_models.engine.emulated import short_rows as short_module
from te_models.engine.emulated.short_rows import enough_rows, full_rows, multiply, short_rows


class PowersOfTwo(recipe.Float8CurrentScaling):
    """Current scaling whose operands have scales that are powers of two."""

    fp8_quant_fwd_inp = recipe.QParams(power_2_scale=True, amax_epsilon=1e-3)
    fp8_quant_fwd_weight = recipe.QParams(power_2_scale=True)


RECIPES = {
    "delayed": recipe.DelayedScaling(),
    "current": recipe.Float8CurrentScaling(),
    "powers": PowersOfTwo(),
    "blocks": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(),
}
# Factor on a normal distribution, and numbers among its values.
VALUES: dict[str, tuple[float, list[float]]] = {
    "normal": (1.0, []),
    "zeros": (0.0, []),
    "nan": (1.0, [torch.nan]),
    "infinite": (1.0, [torch.inf, -torch.inf, torch.nan]),
    "small": (1e-5, []),
    "tiny": (1e-36, [1e-38]),
    "wide": (1.0, [3e38, 1e-30, 448.0]),
}
ROWS, MULTIPLE, OUTPUTS = 4, 128, 128
LIMITS = {"inexact": 0, "exact if short": ROWS, "exact": MULTIPLE}  # of rows whose product is exact


def inputs(kind: str, columns: int) -> Tensor:
    """Three rows [4, columns], of which the second has zeros for an instruction, and one of zeros."""
    factor, values = VALUES[kind]
    x = torch.randn(ROWS, columns, generator=torch.Generator().manual_seed(0)) * factor
    x[0, : len(values)] = torch.tensor(values)
    x[1, : columns // 2] = 0.0
    x[3:] = 0.0
    return x


@pytest.mark.parametrize(("name", "kind", "limit"), every(2, RECIPES, VALUES, LIMITS))
@torch.no_grad()
def test_short_rows_give_the_bits_of_padded_ones(name: str, kind: str, limit: str) -> None:
    dtype = torch.bfloat16 if name == "nvfp4" else torch.float32  # FP32 shows every rounding
    x = inputs(kind, 48 if name == "powers" else 256).to(dtype)  # 48: one and a half instructions
    linear = te.Linear(x.shape[1], OUTPUTS, bias=kind == "normal", params_dtype=dtype)
    if kind == "normal":
        linear.bias.normal_()
    exact = te.exact_gemm(LIMITS[limit] * x.shape[1] * OUTPUTS)
    with exact, te.autocast(enabled=True, recipe=RECIPES[name]):
        padded = linear(
            torch.nn.functional.pad(x, (0, 0, 0, MULTIPLE - ROWS)), is_first_microbatch=True
        )
        with short_rows(MULTIPLE):
            assert full_rows(ROWS) == MULTIPLE
            short = [linear(x, is_first_microbatch=reused) for reused in (False, None)]
    for found in short:
        assert found.shape == (ROWS, OUTPUTS)
        assert torch.equal(found[:3].nan_to_num(nan=7.0), padded[:3].nan_to_num(nan=7.0))


@torch.no_grad()
def test_few_rows_take_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = te.Linear(64, 64)
    calls: list[torch.Size] = []
    plain = few_rows.product
    monkeypatch.setattr(
        few_rows,
        "product",
        lambda x, *args, **options: calls.append(x.shape) or plain(x, *args, **options),
    )
    with te.autocast(enabled=True, recipe=RECIPES["current"]):
        with short_rows(16):
            linear(inputs("normal", 64)[:4])
            linear(inputs("nan", 64)[:4])
        linear(torch.nn.functional.pad(inputs("normal", 64)[:4], (0, 0, 0, 12)))
        with pytest.raises(ValueError, match="divisible by 8"):
            linear(inputs("normal", 64)[:4])
    assert calls == [(4, 64)]


@pytest.mark.parametrize("name", ["delayed", "current"])
@torch.no_grad()
def test_weights_of_either_layout_give_the_same_bits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear, x = te.Linear(96, 64, params_dtype=torch.bfloat16), torch.randn(1, 96).bfloat16()
    plain, found = few_rows.enough_rows, []
    for suits in (True, False):
        monkeypatch.setattr(few_rows, "enough_rows", plain if suits else lambda *args: 0)
        with te.exact_gemm(0), te.autocast(enabled=True, recipe=RECIPES[name]), short_rows(16):
            found += [linear(x, is_first_microbatch=first) for first in (True, False)]
        cached: Any = linear._fp8_workspaces["weight"]
        columns = cached._cache[("columns", False)]
        assert columns.is_contiguous() == (
            suits and enough_rows(1, 96, 64, torch.float32, True, torch.get_num_threads()) > 0
        )
    assert all(torch.equal(found[0], y) for y in found)


SHAPES = [
    (192, 512),
    (192, 192),
    (192, 1024),
    (512, 192),
    (96, 16),
    (16, 8),
    (112, 40),
    (1536, 24),
    (2048, 40),
]


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("inputs, outputs", SHAPES)
def test_few_rows_have_the_bits_of_many(inputs: int, outputs: int, columns: bool) -> None:
    x, weight = (torch.randn(rows, inputs) for rows in (100, outputs))
    right = weight.t().contiguous() if columns else weight.t()
    many = x @ weight.t()
    for rows in (1, 2, 3, 5):
        if columns and not enough_rows(
            rows, inputs, outputs, torch.float32, True, torch.get_num_threads()
        ):
            continue
        with short_rows(16):
            assert torch.equal(multiply(x[:rows], right), many[:rows])


@torch.no_grad()
def test_rows_that_differ_from_many_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of fewer than five rows that add in another order."""
    plain = short_module.matmul

    def matmul(x: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
        calls.append(len(x))
        return plain(x, right, bias) if len(x) > 4 else plain(x.flip(1), right.flip(0), bias)

    calls: list[int] = []
    monkeypatch.setattr(short_module, "matmul", matmul)
    monkeypatch.setattr(short_module, "enough_rows", enough_rows.__wrapped__)
    x, right = torch.randn(100, 80), torch.randn(48, 80).t()
    expected = plain(x, right)
    with short_rows(16):
        assert torch.equal(short_module.multiply(x[:1], right), expected[:1]) and calls[-1] >= 8
        assert torch.equal(short_module.multiply(x[:6], right), expected[:6])
    short_module.multiply(x[:1], right)
    assert calls[-1] == 1


@pytest.mark.parametrize("name", ["delayed", "current"])
@torch.no_grad()
def test_a_step_prepares_nothing_unless_something_changed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Tensor] = []
    plain = te.Linear.prepare_forward
    monkeypatch.setattr(
        te.Linear, "prepare_forward", lambda self, x: calls.append(x) or plain(self, x)
    )
    linear, x = te.Linear(64, 32, params_dtype=torch.bfloat16), torch.randn(1, 3, 64).bfloat16()
    linear.bias.normal_()

    def run(
        first: bool | None, recipe: recipe.Recipe = RECIPES[name], enabled: bool = True
    ) -> Tensor:
        with te.autocast(enabled=enabled, recipe=recipe), short_rows(16):
            return linear(x, is_first_microbatch=first)

    first = run(True)
    assert torch.equal(run(False), first) and len(calls) == 1 and first.shape == (1, 3, 32)
    assert torch.equal(run(False, enabled=False), run(None, enabled=False)) and len(calls) == 3
    equal = copy.deepcopy(RECIPES[name])
    assert (
        torch.equal(run(False, equal), first)
        and torch.equal(run(False, equal), first)
        and len(calls) == 4
    )
    other = type(equal)(fp8_format=recipe.Format.E4M3)
    run(False, other)
    assert linear.fp8_meta["recipe"] is other and len(calls) == 5
    with te.autocast(enabled=True, recipe=other):
        linear(torch.cat((x,) * 8, dim=1), is_first_microbatch=False)
    assert len(calls) == 6


@torch.no_grad()
def test_short_rows_record_no_amax() -> None:
    linear = te.Linear(64, 64)
    with te.autocast(enabled=True, recipe=RECIPES["delayed"]), short_rows(16):
        linear(inputs("normal", 64), is_first_microbatch=True)
    assert not linear.fp8_meta["scaling_fwd"].amax_history.any()
