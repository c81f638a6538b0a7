"""The products of all experts at once have the bits of Transformer Engine's own te.GroupedLinear."""

import copy
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from te_models.fp8.primary_weights import drop_transposed
from te_models.fp8.scaling_state import fp8_state
from te_models.kernels.expert_rows import Route, dispatch
from te_models.kernels.groups import Groups

pytestmark = pytest.mark.gpu
ROWS = [16, 0, 48, 128, 272, 1008, 0]
RECIPES: dict[str, dict[str, str] | None] = {
    "bf16": None,
    "hybrid": {},
    "e4m3": {"fp8_format": "E4M3"},
}


def step(
    run: Callable[..., Tensor], module: Any, x: Tensor, dy: Tensor, rows: list[int] | Groups
) -> dict[str, Tensor | None]:
    leaf = x.clone().requires_grad_()
    module.zero_grad()
    y = run(module, leaf, rows)
    y.backward(dy)
    return dict(
        y=y, dx=leaf.grad, **{name: parameter.grad for name, parameter in module.named_parameters()}
    )


def theirs(module: Any, x: Tensor, rows: list[int]) -> Tensor:
    return module(x, rows)


def compare(
    found: Mapping[str, Tensor | None], wanted: Mapping[str, Tensor | None], dy: Tensor
) -> None:
    """In every bit, but gradients of biases, which Transformer Engine sums in another order before it rounds them."""
    assert found.keys() == wanted.keys()
    different = {
        name
        for name, value in wanted.items()
        if value is not None and not torch.equal(found[name], value)
    }
    for name in {name for name in different if name.startswith("bias")}:
        noise = len(dy) * 2.0**-24 * float(dy.abs().sum(0).max())
        torch.testing.assert_close(found[name], wanted[name], rtol=2.0**-7, atol=noise)
        different.remove(name)
    assert different == set()


def operands(inputs: int, outputs: int, rows: list[int]) -> tuple[Tensor, Tensor]:
    """x and dy, of other magnitudes for each expert."""
    x, dy = (torch.randn(sum(rows), width, device="cuda").bfloat16() for width in (inputs, outputs))
    for scale, (one, other) in enumerate(zip(x.split(rows), dy.split(rows), strict=True)):
        one.mul_(10.0**scale)
        other.mul_(10.0**-scale)
    return x, dy


def layer(te: Any, inputs: int, outputs: int, biased: bool) -> Any:
    module = te.GroupedLinear(len(ROWS), inputs, outputs, bias=biased, params_dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.startswith("bias"):
                parameter.normal_()
    return module


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("name", [*RECIPES, "blockwise", "power of 2", "override"])
@pytest.mark.parametrize(("inputs", "outputs"), [(256, 512), (1024, 64), (2048, 1536)])
def test_bits(name: str, inputs: int, outputs: int, on_device: bool, biased: bool) -> None:
    te = pytest.importorskip("te_models.engine.native")
    torch.manual_seed(0)
    module = layer(te, inputs, outputs, biased)
    x, dy = operands(inputs, outputs, ROWS)
    options = RECIPES.get(name, {})
    built = None
    if options is not None:
        form = getattr(te.recipe.Format, options.get("fp8_format", "HYBRID"))
        override = "high_precision" if name == "override" else None
        built = te.recipe.Float8CurrentScaling(fp8_format=form, backward_override=override)
    if name == "blockwise":
        built = te.recipe.Float8BlockScaling()
    if name == "power of 2":
        built.fp8_quant_fwd_inp = te.recipe.QParams(power_2_scale=True)
    joint = te.handover["counts_on_device"](module, built)
    assert joint == (name in RECIPES or name == "blockwise")
    rows = Groups.of(ROWS, x.device) if on_device and joint else ROWS
    with te.autocast(enabled=built is not None, recipe=built):
        wanted = step(theirs, module, x, dy, ROWS)
        found = step(te.handover["grouped"], module, x, dy, rows)
    compare(found, wanted, dy)


STEPS = [
    ROWS,
    [0, 0, 48, 16, 272, 32, 0],
    [16, 0, 0, 144, 0, 48, 0],
    [32, 16, 16, 0, 16, 0, 0],
    [0] * 7,
    ROWS,
]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("form", ["HYBRID", "E4M3"])
def test_delayed_scaling(form: str, algorithm: str, biased: bool) -> None:
    """Scales and histories too, after each of several steps: those of idle experts' inputs stay as they are."""
    te = pytest.importorskip("te_models.engine.native")
    torch.manual_seed(0)
    built = te.recipe.DelayedScaling(
        fp8_format=getattr(te.recipe.Format, form), amax_history_len=3, amax_compute_algo=algorithm
    )
    reference = layer(te, 256, 512, biased)
    module = copy.deepcopy(reference)
    assert te.handover["counts_on_device"](module, built)
    for number, rows in enumerate(STEPS):
        x, dy = operands(256, 512, rows)
        groups = Groups.of(rows, x.device) if number % 2 else rows
        with te.autocast(enabled=True, recipe=built):
            wanted = step(theirs, reference, x, dy, rows)
        with te.autocast(enabled=True, recipe=built):
            found = step(te.handover["grouped"], module, x, dy, groups)
        compare(found, wanted, dy)
        compare(fp8_state(module), fp8_state(reference), dy)
        with torch.no_grad():
            for one, other in zip(reference.parameters(), module.parameters(), strict=True):
                one.mul_(1.5)
                other.mul_(1.5)
    scale = fp8_state(module)[".scaling_fwd.scale"].view(-1, 3)
    assert (
        scale[6, 0] == 1 and (scale[:6, 0] != 1).all() and (scale[:, 1] != 1).all()
    )  # the last never had a row


@pytest.mark.parametrize(
    "scheme", [None, "Float8CurrentScaling", "DelayedScaling", "Float8BlockScaling"]
)
def test_tokens_go_to_their_experts_inside(scheme: str | None) -> None:
    """As rows that are dispatched before. Tokens 0 to 15 reach no expert, and each expert has a row of padding."""
    te = pytest.importorskip("te_models.engine.native")
    kernels = importlib.import_module("te_models.kernels.expert_rows_triton").TRITON  # needs Triton
    torch.manual_seed(0)
    tokens, count, ends = 400, sum(ROWS), torch.tensor(ROWS).cumsum(0)
    free = torch.ones(count, dtype=torch.bool)
    free[ends[torch.tensor(ROWS) > 0] - 1] = False
    row = torch.full((tokens, 2), count)
    row[16:] = (
        free.nonzero().flatten()[torch.randperm(int(free.sum()))[: 2 * (tokens - 16)]].view(-1, 2)
    )
    token = torch.full((count + 1,), tokens).scatter(
        0, row.flatten(), torch.arange(tokens).repeat_interleave(2)
    )
    route = Route(token[:count].clone().cuda(), row.cuda(), kernels)
    x = torch.randn(tokens, 256, device="cuda").bfloat16()
    dy = operands(256, 512, ROWS)[1]
    reference = layer(te, 256, 512, False)
    module = copy.deepcopy(reference)
    built = None if scheme is None else getattr(te.recipe, scheme)()

    def dispatched(module: Any, x: Tensor, rows: list[int]) -> Tensor:
        return module(dispatch(x, *route), rows)

    def inside(module: Any, x: Tensor, rows: list[int]) -> Tensor:
        return te.handover["grouped"](module, x, rows, route=route)

    for _ in range(3):
        with te.autocast(enabled=built is not None, recipe=built):
            wanted = step(dispatched, reference, x, dy, ROWS)
        with te.autocast(enabled=built is not None, recipe=built):
            found = step(inside, module, x, dy, ROWS)
        compare(found, wanted, dy)
        compare(fp8_state(module), fp8_state(reference), dy)


def test_hooks_of_the_module_run() -> None:
    """So that calibration sees its operands, and FSDP2 gathers its weights."""
    te = pytest.importorskip("te_models.engine.native")
    module, seen = layer(te, 64, 128, False), []
    assert te.handover["counts_on_device"](module, None)
    module.register_forward_hook(lambda module, given, found: seen.append(given[1]))
    assert not te.handover["counts_on_device"](module, None)
    te.handover["grouped"](module, operands(64, 128, ROWS)[0], ROWS)
    assert seen == [ROWS]


@pytest.mark.parametrize("scheme", ["Float8CurrentScaling", "DelayedScaling", "Float8BlockScaling"])
def test_weights_are_cast_once_for_several_micro_batches(scheme: str) -> None:
    """As te.Linear does: a weight that changes in between is not seen before the next first micro-batch."""
    te = pytest.importorskip("te_models.engine.native")
    module = te.GroupedLinear(len(ROWS), 64, 128, bias=False, params_dtype=torch.bfloat16)
    x = torch.randn(sum(ROWS), 64, device="cuda").bfloat16()
    with torch.no_grad(), te.autocast(enabled=True, recipe=getattr(te.recipe, scheme)()):
        first = te.handover["grouped"](module, x, ROWS, True)
        for weight in module.parameters():
            weight.neg_()
        assert torch.equal(te.handover["grouped"](module, x, ROWS, False), first)
        assert torch.equal(te.handover["grouped"](module, x, ROWS, True), -first)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("form", ["HYBRID", "E4M3"])
@pytest.mark.parametrize("scheme", ["Float8CurrentScaling", "DelayedScaling"])
def test_frozen_weights_in_fp8(scheme: str, form: str, on_device: bool) -> None:
    """Read where they are, and transposed together in backward, which leaves no copy behind."""
    te = pytest.importorskip("te_models.engine.native")
    torch.manual_seed(0)
    built = getattr(te.recipe, scheme)(fp8_format=getattr(te.recipe.Format, form))
    with te.quantized_model_init(recipe=built):
        module = te.GroupedLinear(
            len(ROWS), 256, 512, bias=False, params_dtype=torch.bfloat16
        ).requires_grad_(False)
    drop_transposed(module)
    x, dy = operands(256, 512, ROWS)
    assert te.handover["counts_on_device"](module, built)
    with te.autocast(enabled=True, recipe=built):
        wanted = step(theirs, module, x, dy, ROWS)
        for name, tensor in fp8_state(module).items():  # as before, after the update in backward
            tensor.fill_(name.endswith("scale"))
        found = step(
            te.handover["grouped"], module, x, dy, Groups.of(ROWS, x.device) if on_device else ROWS
        )
    compare(found, wanted, dy)
