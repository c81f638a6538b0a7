"""te.Linear and te.GroupedLinear with stored weights: on any engine, and those of Transformer Engine on a GPU."""

import importlib
import weakref
from typing import Any

import pytest
import torch
from fewer import every
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from te_models.config.recipe import get_recipe
from te_models.engine import emulated
from te_models.engine.remade_weight import linear_with_remade_weight
from te_models.kernels.expert_rows import Route, dispatch
from te_models.kernels.groups import Groups
from te_models.numerics.stored import StoredRows, StoredWeight

RECIPES = ["bf16", "current", "delayed", "blockwise", "mxfp8", "nvfp4"]
OVERRIDES = ["high_precision", "dequantized"]


class Remade(emulated.Linear):
    """The emulated engine's te.Linear, which runs as native.StoredLinear does."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._is_fsdp2 = True

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None, **options: Any) -> Any:  # type: ignore[bad-override]
        """Return the output."""
        if not isinstance(self._parameters["weight"], StoredWeight):
            return super().forward(inp, is_first_microbatch=is_first_microbatch, **options)
        return linear_with_remade_weight(super().forward, self, inp, **options)


def rows_of(outputs: int, inputs: int, device: str = "cpu") -> StoredRows:
    """MXFP4."""
    data = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)
    scales = torch.randint(118, 124, (outputs, inputs // 32), dtype=torch.uint8)
    return StoredRows(data, scales, 32, True).mapped(lambda tensor: tensor.to(device))


def frozen(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=False)


def pair(te: Any, kind: Any, device: str = "cpu") -> tuple[Any, Any]:
    """A te.Linear with a stored weight, and one with its values; both have the bias of the other."""
    torch.manual_seed(4)
    stored = StoredWeight(rows_of(64, 96, device), torch.bfloat16)
    bias = torch.randn(64, device=device).bfloat16()
    found = []
    for module, weight in ((kind, stored), (te.Linear, stored.dequantize())):
        made = module(96, 64, bias=True, params_dtype=torch.bfloat16, device=device)
        made.register_parameter("weight", frozen(weight))
        made.register_parameter("bias", frozen(bias.clone()))
        found.append(made)
    return found[0], found[1]


def steps(te: Any, module: Any, recipe: Any, recompute: bool, device: str = "cpu") -> list[Tensor]:
    """The outputs and input gradients of three steps."""
    generator = torch.Generator().manual_seed(5)
    torch.manual_seed(8)  # NVFP4 rounds gradients stochastically
    found = []
    for step in range(3):
        x = torch.randn(32, 96, generator=generator).bfloat16().to(device).requires_grad_()
        dy = torch.randn(32, 64, generator=generator).bfloat16().to(device)
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            if recompute:
                y = checkpoint(module, x, use_reentrant=False)
            else:
                y = module(x)
        y.backward(dy * (step + 1))
        assert x.grad is not None
        found += [y.detach(), x.grad]
    return found


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", [*RECIPES, *OVERRIDES])
def test_a_remade_weight_changes_no_bit(name: str, recompute: bool) -> None:
    if recompute and name != "bf16":
        pytest.skip("FP8 recomputes are the model's (te_models.model.recompute)")
    recipe: Any = None
    if name in OVERRIDES:
        recipe = get_recipe("current", backward_override=name).build(emulated)
    elif name != "bf16":
        recipe = get_recipe(name).build(emulated)
    stored, dense = pair(emulated, Remade)
    if (
        name == "delayed"
    ):  # the backward of FSDP2's weights has the next scale, which stays the same from step 2 on
        for module in (stored, dense):
            steps(emulated, module, recipe, recompute)
    for ours, wanted in zip(
        steps(emulated, stored, recipe, recompute),
        steps(emulated, dense, recipe, recompute),
        strict=True,
    ):
        assert torch.equal(ours, wanted)
    assert isinstance(stored.weight, StoredWeight) and isinstance(stored.weight, nn.Parameter)


@pytest.mark.parametrize("name", ["bf16", "current"])
def test_autograd_keeps_no_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe: Any = None if name == "bf16" else get_recipe(name).build(emulated)
    stored, _ = pair(emulated, Remade)
    made: list[Any] = []
    dequantize = StoredRows.dequantize

    def noted(self: StoredRows, *args: Any, **options: Any) -> Tensor:
        values = dequantize(self, *args, **options)
        made.append(weakref.ref(values))
        return values

    monkeypatch.setattr(StoredRows, "dequantize", noted)
    x = torch.randn(32, 96).bfloat16().requires_grad_()
    with emulated.autocast(enabled=recipe is not None, recipe=recipe):
        y = stored(x, is_first_microbatch=True)
    assert len(made) == 1 and made[0]() is None and not stored._fp8_workspaces
    y.sum().backward()
    assert len(made) >= 2 and not any(one() is not None for one in made)
    with pytest.raises(RuntimeError):
        stored.load_state_dict({"weight": torch.zeros(3, 3), "bias": torch.zeros(64)}, strict=False)


def native() -> Any:
    return importlib.import_module("te_models.engine.native")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bf16", "current", "delayed", "blockwise", *OVERRIDES])
def test_transformer_engines_linear_has_the_same_bits(name: str) -> None:
    te = native()
    recipe: Any = None
    if name in OVERRIDES:
        recipe = get_recipe("current", backward_override=name).build(te)
    elif name != "bf16":
        recipe = get_recipe(name).build(te)
    stored, dense = pair(te, te.StoredLinear, "cuda")
    if name == "delayed":
        for module in (stored, dense):
            steps(te, module, recipe, False, "cuda")
    for ours, wanted in zip(
        steps(te, stored, recipe, False, "cuda"),
        steps(te, dense, recipe, False, "cuda"),
        strict=True,
    ):
        assert torch.equal(ours, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "routed"), every(1, ["bf16", "current", "delayed"], [False, True])
)
@pytest.mark.parametrize("on_device", [False, True])
def test_experts_have_the_bits_of_their_values(
    name: str, routed: bool, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from te_models.kernels import stored_experts_triton  # noqa: PLC0415  needs Triton

    monkeypatch.setattr(stored_experts_triton, "experts_at_a_time", lambda *sizes: 2)
    te = native()
    recipe: Any = None if name == "bf16" else get_recipe(name).build(te)
    rows = [16, 0, 48, 128, 272]
    inputs, outputs = 256, 512
    torch.manual_seed(6)
    stack = rows_of(len(rows) * outputs, inputs, "cuda")
    modules = []
    for kind in (te.StoredGroupedLinear, te.GroupedLinear):
        module = kind(len(rows), inputs, outputs, bias=True, params_dtype=torch.bfloat16)
        for expert in range(len(rows)):
            own = StoredWeight(stack.part(expert * outputs, (expert + 1) * outputs), torch.bfloat16)
            weight = own if kind is te.StoredGroupedLinear else own.dequantize()
            module.register_parameter(f"weight{expert}", frozen(weight))
            generator = torch.Generator("cuda").manual_seed(expert)
            bias = torch.randn(outputs, device="cuda", generator=generator).bfloat16()
            module.register_parameter(f"bias{expert}", frozen(bias))
        modules.append(module)
    count = sum(rows)
    route = None
    if routed:
        row = torch.randperm(count, device="cuda").view(-1, 2)
        source = torch.arange(len(row), device="cuda").repeat_interleave(2)
        token = torch.empty(count, dtype=torch.int64, device="cuda").scatter_(
            0, row.flatten(), source
        )
        route = Route(token, row)
    results = []
    for module in modules:
        found = []
        generator = torch.Generator("cuda").manual_seed(9)
        for _ in range(3):
            size = count // 2 if routed else count
            x = torch.randn(size, inputs, device="cuda", generator=generator).bfloat16()
            x.requires_grad_()
            dy = torch.randn(count, outputs, device="cuda", generator=generator).bfloat16()
            groups: Any = Groups.of(rows, x.device) if on_device else rows
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                if on_device:
                    assert te.handover["counts_on_device"](module, recipe)
                    y = te.handover["grouped"](module, x, groups, route=route)
                else:
                    y = module(x if route is None else dispatch(x, *route), groups)
            y.backward(dy)
            found += [y.detach(), x.grad]
        results.append(found)
    for ours, wanted in zip(*results, strict=True):
        assert torch.equal(ours, wanted)
