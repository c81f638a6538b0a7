"""A block: which of its te.Linears save codes, what each hands on to the next, and that the model alone may call it."""

import re
from typing import Any

import pytest
import torch
from small_model import FP8, Build, tokens
from torch import Tensor

from te_models.engine import emulated
from te_models.errors import EngineError
from te_models.kernels import handover
from te_models.model.recompute import may_draw


@pytest.mark.parametrize("recipe", FP8)
def test_the_fp8_layers_save_codes_and_the_edges_do_not(small: Build, recipe: str) -> None:
    model = small(recipe)
    kept: dict[str, set[torch.dtype]] = {}
    inside: list[str] = []

    def pack(tensor: Tensor) -> Tensor:
        if inside:
            fp8 = hasattr(
                tensor, "quantize_"
            )  # Transformer Engine's tensor of codes, which says BF16
            kept.setdefault(inside[-1], set()).add(torch.uint8 if fp8 else tensor.dtype)
        return tensor

    for name, module in model.named_modules():
        if isinstance(module, model.te.Linear):
            module.register_forward_pre_hook(lambda m, i, name=name: inside.append(name))
            module.register_forward_hook(lambda m, i, o: inside.pop() and None)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(tokens().to(model.device))
    codes = {torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2}
    fp8 = {name for name, dtypes in kept.items() if dtypes & codes}
    assert fp8 == {name for name in kept if re.match(r"layers\.[123]\.", name)} and len(fp8) == 12
    assert "lm_head" in kept


# Heads and sequence for which attention is one operation on a GPU.
@pytest.mark.parametrize("small", ["emulated"], indirect=True)
def test_each_module_knows_its_successor(small: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what an engine's twins return is what the model goes on with: here twice the plain result, where it shows."""
    told: list[tuple[str, Any, Any]] = []
    streams: list[Tensor] = []

    def norm(module: Any, x: Tensor, delta: Tensor | None, consumer: Any) -> tuple[Tensor, Tensor]:
        told.append(("norm", module, consumer))
        assert (delta is None) == any(module is block.input_layernorm for block in model.layers)
        y, x = handover.norm(module, x, delta, consumer)
        streams.append(x.clone())
        if x.requires_grad:
            streams[-1].retain_grad()
        return y, streams[-1]

    def activate(gate_up: Tensor, producer: Any, consumer: Any, *kind: Any) -> Tensor:
        told.append(("swiglu", producer, consumer))
        return handover.activate(gate_up, producer, consumer, *kind)

    def targets(producer: Any, consumer: Any) -> tuple[Any, Any]:
        told.append(("targets", producer, consumer))
        return handover.targets(producer, consumer)

    def linear(module: Any, x: Tensor, **options: Any) -> Tensor:
        told.append(("linear", module, None))
        return 2 * handover.linear(module, x, **options)

    plain = small("current", fused=False, num_hidden_layers=4)
    monkeypatch.setattr(
        emulated, "handover", dict(norm=norm, activate=activate, linear=linear, targets=targets)
    )
    model, ids = small("current", fused=True, num_hidden_layers=4), tokens()
    changed = model(ids, labels=ids).loss
    changed.backward()
    assert all(x.grad is not None for x in streams), (
        "the residual stream goes on with what norm returned"
    )
    expected = []
    for block in model.layers:
        qkvg, out, up = block.self_attn.qkvg_proj, block.self_attn.o_proj, block.mlp.gate_up_proj
        down = block.mlp.down_proj
        expected += [("norm", block.input_layernorm, qkvg), ("linear", qkvg, None)]
        expected += [("targets", qkvg, out), ("linear", out, None)]
        expected += [("norm", block.post_attention_layernorm, up), ("linear", up, None)]
        expected += [("swiglu", up, down), ("linear", down, None)]
    expected.append(("linear", model.lm_head, None))
    assert [entry for entry in told if entry[1] is not model.norm] == expected
    told.clear()
    with model.unfused():
        loss = model(ids, labels=ids).loss
    assert told == [] and loss == plain(ids, labels=ids).loss != changed
    model(ids)
    assert len(told) == len(expected), "unfused() ended with its block"


def test_a_block_by_itself_is_refused(small: Build) -> None:
    model, seen = small("current"), []
    model.layers[1].register_forward_pre_hook(lambda module, given: seen.append(given))
    model(tokens().to(model.device))
    with pytest.raises(EngineError, match="call the model, not its blocks"):
        model.layers[1](*seen[0])


def test_blocks_that_may_draw_are_found(small: Build) -> None:
    model = small("delayed", activation_checkpointing="full")
    block, other = model.layers[1], model.layers[2]
    assert not may_draw(block)
    handle = block.post_attention_layernorm.register_forward_hook(
        lambda module, inputs, output: None
    )
    assert may_draw(block) and not may_draw(other)
    handle.remove()
    block.mlp.drop = torch.nn.Dropout(0.0)
    assert not may_draw(block)
    block.mlp.drop = torch.nn.Dropout(0.1)
    assert may_draw(block)
    other.mlp.mine = type("Mine", (torch.nn.Module,), {"__module__": "users.own"})()
    assert may_draw(other)
