"""The products of all experts at once have the bits of Transformer Engine's own te.GroupedLinear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from te_models.fp8.primary_weights import drop_transposed
from te_models.kernels.groups import Groups

pytestmark = pytest.mark.gpu
ROWS = [16, 0, 48, 128, 272, 1008, 0]
RECIPES: dict[str, dict[str, str] | None] = {"bf16": None, "hybrid": {}, "e4m3": {"fp8_format": "E4M3"}}


def step(run: Callable[..., Tensor], module: Any, x: Tensor, dy: Tensor, rows: list[int] | Groups) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    module.zero_grad()
    y = run(module, leaf, rows)
    y.backward(dy)
    return [y, leaf.grad, *(parameter.grad for parameter in module.parameters())]


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("name", [*RECIPES, "power of 2"])
@pytest.mark.parametrize(("inputs", "outputs"), [(256, 512), (1024, 64), (2048, 1536)])
def test_bits(name: str, inputs: int, outputs: int, on_device: bool) -> None:
    te = pytest.importorskip("te_models.engine.native")
    torch.manual_seed(0)
    module = te.GroupedLinear(len(ROWS), inputs, outputs, bias=False, params_dtype=torch.bfloat16)
    x, dy = (torch.randn(sum(ROWS), width, device="cuda").bfloat16() for width in (inputs, outputs))
    for scale, (one, other) in enumerate(zip(x.split(ROWS), dy.split(ROWS), strict=True)):
        one.mul_(10.0**scale)
        other.mul_(10.0**-scale)
    options = RECIPES.get(name, {})
    built = None
    if options is not None:
        form = getattr(te.recipe.Format, options.get("fp8_format", "HYBRID"))
        built = te.recipe.Float8CurrentScaling(fp8_format=form)
    if name == "power of 2":
        built.fp8_quant_fwd_inp = te.recipe.QParams(power_2_scale=True)
    assert te.handover["counts_on_device"](module, built) == (name != "power of 2")
    rows = Groups.of(ROWS, x.device) if on_device and name != "power of 2" else ROWS
    with te.autocast(enabled=built is not None, recipe=built):
        wanted = step(lambda module, x, rows: module(x, rows), module, x, dy, ROWS)
        found = step(te.handover["grouped"], module, x, dy, rows)
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours, theirs)


def test_weights_are_cast_once_for_several_micro_batches() -> None:
    """As te.Linear does: a weight that changes in between is not seen before the next first micro-batch."""
    te = pytest.importorskip("te_models.engine.native")
    module = te.GroupedLinear(len(ROWS), 64, 128, bias=False, params_dtype=torch.bfloat16)
    x = torch.randn(sum(ROWS), 64, device="cuda").bfloat16()
    with torch.no_grad(), te.autocast(enabled=True, recipe=te.recipe.Float8CurrentScaling()):
        first = te.handover["grouped"](module, x, ROWS, True)
        for weight in module.parameters():
            weight.neg_()
        assert torch.equal(te.handover["grouped"](module, x, ROWS, False), first)
        assert torch.equal(te.handover["grouped"](module, x, ROWS, True), -first)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("form", ["HYBRID", "E4M3"])
def test_frozen_weights_in_fp8(form: str, on_device: bool) -> None:
    """Read where they are, and transposed together in backward, which leaves no copy behind."""
    te = pytest.importorskip("te_models.engine.native")
    torch.manual_seed(0)
    built = te.recipe.Float8CurrentScaling(fp8_format=getattr(te.recipe.Format, form))
    with te.quantized_model_init(recipe=built):
        module = te.GroupedLinear(len(ROWS), 256, 512, bias=False, params_dtype=torch.bfloat16).requires_grad_(False)
    drop_transposed(module)
    x, dy = (torch.randn(sum(ROWS), width, device="cuda").bfloat16() for width in (256, 512))
    assert te.handover["counts_on_device"](module, built)
    with te.autocast(enabled=True, recipe=built):
        wanted = step(lambda module, x, rows: module(x, rows), module, x, dy, ROWS)
        found = step(te.handover["grouped"], module, x, dy, Groups.of(ROWS, x.device) if on_device else ROWS)
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
