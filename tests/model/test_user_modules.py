"""te_models.checkpoint and FP8 state on modules that are not ours: the bits of a run without recompute."""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from bits import assert_same_bits, assert_same_tensors
from fewer import every
from torch import Tensor, nn
from typed import gradient

from te_models.config.recipe import get_recipe, list_recipes
from te_models.engine import emulated, engine_module
from te_models.errors import CheckpointError, UsageError
from te_models.model.user_modules import checkpoint, fp8_state, load_fp8_state

RECIPES = [name for name in list_recipes() if name != "bf16"]
STEPS = 4


class Mine(nn.Module):
    """A user's block: a norm, two linears, dropout and a residual."""

    def __init__(self, te: ModuleType = emulated, **place: Any) -> None:
        super().__init__()
        self.norm = te.RMSNorm(64, dtype=torch.bfloat16, **place)
        self.up = te.Linear(64, 128, params_dtype=torch.bfloat16, **place)
        self.down = te.Linear(128, 64, params_dtype=torch.bfloat16, **place)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.up(self.norm(x)))
        return x + nn.functional.dropout(self.down(hidden), 0.1, self.training)


def build(te: ModuleType, device: str) -> nn.ModuleList:
    torch.manual_seed(3)
    return nn.ModuleList(Mine(te, device=device) for _ in range(3))


def trained(
    te: ModuleType,
    blocks: nn.ModuleList,
    recipe: str,
    run: Callable[[nn.Module, Tensor], Tensor],
    device: str = "cpu",
) -> tuple[list[float], dict[str, Any]]:
    """Losses of STEPS steps; the weights, gradients and FP8 state after them."""
    losses, built = [], get_recipe(recipe).build(te)
    for step in range(STEPS):
        torch.manual_seed(step)
        x = torch.randn(128, 64, device=device, dtype=torch.bfloat16)
        with te.autocast(enabled=True, recipe=built):
            y = x
            for block in blocks:
                y = run(block, y)
        loss = y.float().square().mean()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in blocks.parameters():
                parameter -= 0.1 * gradient(parameter)
                if step < STEPS - 1:
                    parameter.grad = None
    found = {f"{name}.grad": parameter.grad for name, parameter in blocks.named_parameters()}
    return losses, {**dict(blocks.named_parameters()), **found, **fp8_state(blocks)}


def nested(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(lambda x: checkpoint(block, x), x, modules=[block])


def abandoned(block: nn.Module, x: Tensor) -> Tensor:
    """A pass whose output nobody uses must not disturb the recompute of the next one;
    it is drawn from other dropout."""
    state = torch.get_rng_state()
    with emulated.autocast(enabled=False):
        checkpoint(block, 3 * x)
    torch.set_rng_state(state)
    return checkpoint(block, x)


WAYS = {
    "module": lambda block, x: checkpoint(block, x),
    "method": lambda block, x: checkpoint(block.forward, x),
    "function": lambda block, x: checkpoint(lambda x: block(x), x, modules=[block]),
    "keyword": lambda block, x: checkpoint(block, x=x),
    "nested": nested,
    "abandoned": abandoned,
    "none": lambda block, x: checkpoint(block, x, mode="none"),
}


@pytest.mark.parametrize(("way", "recipe"), every(5, WAYS, RECIPES))
def test_a_recompute_changes_no_bit(way: str, recipe: str) -> None:
    expected = trained(emulated, build(emulated, "cpu"), recipe, lambda block, x: block(x))
    found = trained(emulated, build(emulated, "cpu"), recipe, WAYS[way])
    assert found[0] == expected[0]
    assert_same_tensors(found[1], expected[1])
    assert bool(fp8_state(build(emulated, "cpu"))) is False
    assert ("0.up.scaling_fwd.scale" in found[1]) == get_recipe(recipe).stateful


def test_a_recompute_saves_only_the_arguments() -> None:
    block, x = Mine(), torch.randn(128, 64, dtype=torch.bfloat16, requires_grad=True)
    sizes: dict[str, int] = {}
    for way in ("module", "none"):
        saved: list[int] = []
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: saved.append(t.nbytes) or t, lambda t: t
        )
        with hooks, emulated.autocast(enabled=True, recipe=get_recipe("current").build(emulated)):
            WAYS[way](block, x)
        sizes[way] = sum(saved)
    assert sizes["module"] <= x.nbytes < sizes["none"]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_backward_in_any_order(order: tuple[int, int]) -> None:
    gradients = []
    for way in ("none", "module"):
        block = build(emulated, "cpu")[0]
        with emulated.autocast(enabled=True, recipe=get_recipe("delayed").build(emulated)):
            inputs = [
                torch.full((16, 64), 0.5 + i, dtype=torch.bfloat16, requires_grad=True)
                for i in range(2)
            ]
            torch.manual_seed(1)
            losses = [WAYS[way](block.eval(), x).float().sum() for x in inputs]
        for i in order:
            losses[i].backward()
        gradients.append([x.grad for x in inputs])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_fp8_state_moves_to_a_module_that_has_not_run() -> None:
    blocks = build(emulated, "cpu")
    trained(emulated, blocks, "delayed", lambda block, x: block(x))
    other = build(emulated, "cpu")
    other.load_state_dict(
        {k: v for k, v in blocks.state_dict().items() if isinstance(v, Tensor)}, strict=False
    )
    load_fp8_state(other, fp8_state(blocks))
    blocks.zero_grad()
    runs = [trained(emulated, b, "delayed", lambda block, x: block(x)) for b in (blocks, other)]
    assert runs[0][0] == runs[1][0]
    with pytest.raises(ValueError, match="no FP8 module '7.up'"):
        load_fp8_state(other, {"7.up.scaling_fwd.scale": torch.ones(3)})


def test_fp8_state_moves_to_a_module_that_ran_under_another_recipe() -> None:
    blocks, other = build(emulated, "cpu"), build(emulated, "cpu")
    trained(emulated, blocks, "delayed", lambda block, x: block(x))
    trained(emulated, other, "current", lambda block, x: block(x))
    state = fp8_state(blocks)
    load_fp8_state(other, state)
    assert_same_tensors(fp8_state(other), state)


@pytest.mark.parametrize(
    "state", [{"up.scaling_fwd.scale": [1.0, 1.0, 1.0]}, {0: torch.ones(3)}, None, [], "state"]
)
def test_state_that_is_no_tensors_is_refused(state: Any) -> None:
    with pytest.raises(CheckpointError, match="give what fp8_state returned"):
        load_fp8_state(Mine(), state)


def test_a_recipe_of_its_own() -> None:
    block, x = Mine().eval(), torch.randn(128, 64, dtype=torch.bfloat16)
    with emulated.autocast(enabled=True, recipe=get_recipe("current").build(emulated)):
        expected = block(x)
    assert_same_bits(
        "checkpoint(block, x, recipe='current')", checkpoint(block, x, recipe="current"), expected
    )
    assert not torch.equal(checkpoint(block, x), expected)


def test_mistakes_are_named() -> None:
    block, x = Mine(), torch.randn(16, 64, dtype=torch.bfloat16)
    with pytest.raises(UsageError, match="unknown mode 'ful': did you mean 'full'"):
        checkpoint(block, x, mode="ful")
    with (
        emulated.autocast(enabled=True, recipe=get_recipe("delayed").build(emulated)),
        pytest.raises(UsageError, match="pass modules="),
    ):
        checkpoint(lambda x: block(x), x)
    with pytest.raises(
        UsageError, match="recipe 'current' keeps no scales: load them under one of delayed scaling"
    ):
        load_fp8_state(block, {"first.scaling_fwd.scale": torch.ones(3)}, recipe="current")
    load_fp8_state(block, {}, recipe="bf16")
    assert torch.equal(checkpoint(lambda x: x * 2, x, modules=nn.ModuleList([block])), x * 2)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: fp8_state({}), "the module is a dict: give an nn.Module that has te layers"),
        (lambda: fp8_state(None), "the module is a NoneType: give"),
        (lambda: load_fp8_state("gated-nano", {}), "the module is a str: give"),
        (lambda: checkpoint(3, torch.ones(2)), "the function is a int: give a module, a method of"),
        (lambda: checkpoint(abs, torch.ones(2), modules=nn.Linear(2, 2)), "modules is a Linear"),
        (
            lambda: checkpoint(abs, torch.ones(2), modules=None),
            "modules is a NoneType: give a list",
        ),
        (lambda: checkpoint(abs, torch.ones(2), modules=[3]), "the module is a int: give"),
    ],
)
def test_an_argument_of_another_type_is_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call()


class InAList(nn.Module):
    """Its blocks are in a list, where `modules()` does not find them."""

    def __init__(self) -> None:
        super().__init__()
        self.known, self.hidden = Mine(), [Mine()]

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden[0](self.known(x))


def test_layers_that_are_not_known_are_refused_under_delayed_scaling() -> None:
    """Their scales would be those of a later pass in the recompute."""
    block, other, x = (
        InAList(),
        Mine(),
        torch.randn(16, 64, dtype=torch.bfloat16, requires_grad=True),
    )
    calls = (
        lambda: checkpoint(block, x),
        lambda: checkpoint(lambda x: other(block(x)), x, modules=[block, *block.hidden]),
    )
    for call in calls:
        with (
            emulated.autocast(enabled=True, recipe=get_recipe("delayed").build(emulated)),
            pytest.raises(
                UsageError, match="would not restore the scales of a te.Linear, .*: pass modules="
            ),
        ):
            call()
    with emulated.autocast(enabled=True, recipe=get_recipe("delayed").build(emulated)):
        y = checkpoint(lambda x: other(block(x)), x, modules=[block, *block.hidden, other])
    y.sum().backward()
    with emulated.autocast(enabled=True, recipe=get_recipe("current").build(emulated)):
        checkpoint(InAList(), x).sum().backward()
    assert not nn.modules.module._global_forward_pre_hooks


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["Mine", "LayerNormMLP", "TransformerLayer"])
@pytest.mark.parametrize("recipe", ["delayed", "current", "blockwise"])
def test_transformer_engines_own_modules(recipe: str, kind: str) -> None:
    te = engine_module("native")
    own = importlib.import_module("transformer_engine.pytorch")

    def make() -> nn.ModuleList:
        torch.manual_seed(3)
        make_one = {
            "Mine": lambda: Mine(te, device="cuda"),
            "LayerNormMLP": lambda: own.LayerNormMLP(
                64, 256, params_dtype=torch.bfloat16, device="cuda"
            ),
            "TransformerLayer": lambda: own.TransformerLayer(
                64, 256, 4, params_dtype=torch.bfloat16, device="cuda", self_attn_mask_type="causal"
            ),
        }[kind]
        return nn.ModuleList(make_one() for _ in range(3))

    def plain(block: nn.Module, x: Tensor) -> Tensor:
        return block(x.view(128, 1, 64)).view(128, 64) if kind == "TransformerLayer" else block(x)

    def ours(block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(lambda x: plain(block, x), x, modules=[block])

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        expected, found = (trained(te, make(), recipe, run, "cuda") for run in (plain, ours))
    finally:
        torch.use_deterministic_algorithms(False)
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert_same_tensors(found[1], expected[1])
