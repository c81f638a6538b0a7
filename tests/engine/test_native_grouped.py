"""Casts of all experts at once give the bits of Transformer Engine's own te.GroupedLinear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu
ROWS = [16, 0, 48, 128, 272, 1008, 0]


def step(run: Callable[..., Tensor], module: Any, x: Tensor, dy: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    module.zero_grad()
    y = run(module, leaf, ROWS)
    y.backward(dy)
    return [y, leaf.grad, *(parameter.grad for parameter in module.parameters())]


@pytest.mark.parametrize("options", [{}, {"fp8_format": "E4M3"}, {"power_2": True}])
@pytest.mark.parametrize(("inputs", "outputs"), [(256, 512), (1024, 64)])
def test_bits(options: dict[str, Any], inputs: int, outputs: int) -> None:
    te = pytest.importorskip("te_models.engine.native")
    torch.manual_seed(0)
    module = te.GroupedLinear(len(ROWS), inputs, outputs, bias=False, params_dtype=torch.bfloat16)
    x, dy = (torch.randn(sum(ROWS), width, device="cuda").bfloat16() for width in (inputs, outputs))
    for scale, (one, other) in enumerate(zip(x.split(ROWS), dy.split(ROWS), strict=True)):
        one.mul_(10.0**scale)
        other.mul_(10.0**-scale)
    built = te.recipe.Float8CurrentScaling(fp8_format=getattr(te.recipe.Format, options.get("fp8_format", "HYBRID")))
    if "power_2" in options:
        built.fp8_quant_fwd_inp = te.recipe.QParams(power_2_scale=True)
    with te.autocast(enabled=True, recipe=built):
        wanted = step(lambda module, x, rows: module(x, rows), module, x, dy)
        found = step(te.handover["grouped"], module, x, dy)
        taken = type(te.handover["grouped"](module, x.requires_grad_(), ROWS).grad_fn).__name__
    assert ("_GroupedBackward" in taken) == ("power_2" not in options)
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours, theirs)
