"""A block: the te.Linears that save FP8 data, the hand-over from one to the next, and calls that are refused."""

import re
from typing import Any

import pytest
import torch
from kinds import GEMMA4
from small_model import FP8, Build, tokens
from torch import Tensor

from te_models.engine import emulated
from te_models.errors import EngineError
from te_models.kernels import handover
from te_models.model.recompute import may_draw


@pytest.mark.parametrize("recipe", FP8)
def test_the_fp8_layers_save_fp8_data_and_the_edges_do_not(small: Build, recipe: str) -> None:
    model = small(recipe)
    saved_dtypes: dict[str, set[torch.dtype]] = {}  # by the name of the te.Linear
    running: list[str] = []

    def pack(tensor: Tensor) -> Tensor:
        if running:
            # Transformer Engine's quantized tensor has the nominal dtype BF16, and its data is uint8.
            dtype = torch.uint8 if hasattr(tensor, "quantize_") else tensor.dtype
            saved_dtypes.setdefault(running[-1], set()).add(dtype)
        return tensor

    def enter(name: str) -> None:
        running.append(name)

    def leave() -> None:
        running.pop()

    for name, module in model.named_modules():
        if isinstance(module, model.te.Linear):
            module.register_forward_pre_hook(lambda module, inputs, name=name: enter(name))
            module.register_forward_hook(lambda module, inputs, output: leave())
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(tokens().to(model.device))
    fp8_dtypes = {torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2}
    fp8 = {name for name, dtypes in saved_dtypes.items() if dtypes & fp8_dtypes}
    # The model has five layers, of which the first and the last run in BF16.
    assert fp8 == {name for name in saved_dtypes if re.match(r"layers\.[123]\.", name)}
    assert len(fp8) == 12
    assert "lm_head" in saved_dtypes


# Heads and sequence for which attention is one operation on a GPU.
@pytest.mark.parametrize("small", ["emulated"], indirect=True)
def test_each_module_knows_its_successor(small: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's twins get the te.Linears before and behind them, and the model goes on with the tensors they return.

    Here `linear` returns twice the plain result, which changes the loss.
    """
    calls: list[tuple[str, Any, Any]] = []
    streams: list[Tensor] = []

    def norm(module: Any, x: Tensor, delta: Tensor | None, consumer: Any) -> tuple[Tensor, Tensor]:
        calls.append(("norm", module, consumer))
        assert (delta is None) == any(module is block.input_layernorm for block in model.layers)
        y, x = handover.norm(module, x, delta, consumer)
        streams.append(x.clone())
        if x.requires_grad:
            streams[-1].retain_grad()
        return y, streams[-1]

    def activate(gate_up: Tensor, producer: Any, consumer: Any, *kind: Any) -> Tensor:
        calls.append(("swiglu", producer, consumer))
        return handover.activate(gate_up, producer, consumer, *kind)

    def targets(producer: Any, consumer: Any) -> tuple[Any, Any]:
        calls.append(("targets", producer, consumer))
        return handover.targets(producer, consumer)

    def linear(module: Any, x: Tensor, **options: Any) -> Tensor:
        calls.append(("linear", module, None))
        return 2 * handover.linear(module, x, **options)

    plain = small("current", fused=False, num_hidden_layers=4)
    monkeypatch.setattr(
        emulated, "handover", dict(norm=norm, activate=activate, linear=linear, targets=targets)
    )
    model = small("current", fused=True, num_hidden_layers=4)
    ids = tokens()
    changed = model(ids, labels=ids).loss
    changed.backward()
    assert all(x.grad is not None for x in streams), (
        "the residual stream goes on with what norm returned"
    )
    expected = []
    for block in model.layers:
        qkvg = block.self_attn.qkvg_proj
        out = block.self_attn.o_proj
        up = block.mlp.gate_up_proj
        down = block.mlp.down_proj
        expected += [("norm", block.input_layernorm, qkvg), ("linear", qkvg, None)]
        expected += [("targets", qkvg, out), ("linear", out, None)]
        expected += [("norm", block.post_attention_layernorm, up), ("linear", up, None)]
        expected += [("swiglu", up, down), ("linear", down, None)]
    expected.append(("linear", model.lm_head, None))
    assert [call for call in calls if call[1] is not model.norm] == expected
    calls.clear()
    with model.unfused():
        loss = model(ids, labels=ids).loss
    assert calls == []
    assert loss == plain(ids, labels=ids).loss != changed
    model(ids)
    assert len(calls) == len(expected), "unfused() ended with its block"


@pytest.mark.parametrize("small", ["emulated"], indirect=True)
@pytest.mark.parametrize("position", ["post", "both"])
def test_the_norm_of_an_output_is_an_operation(
    small: Build, position: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine's twin gets the norms behind mixer and MLP, and the model goes on with the tensor it returns."""
    calls: list[Any] = []
    factor = 1

    def output_norm(module: Any, x: Tensor) -> Tensor:
        calls.append(module)
        return factor * handover.output_norm(module, x)

    options = dict(num_hidden_layers=3, norm_position=position)
    plain = small("current", fused=True, **options)
    monkeypatch.setattr(emulated, "handover", dict(output_norm=output_norm))
    model = small("current", fused=True, **options)
    ids = tokens()
    expected = plain(ids, labels=ids).loss
    assert model(ids, labels=ids).loss == expected
    norms = []
    for block in model.layers:
        norms += [block.attention_output_norm, block.mlp_output_norm]
    assert calls == norms
    factor = 2
    assert model(ids, labels=ids).loss != expected
    assert len(calls) == 2 * len(norms)


def test_a_block_by_itself_is_refused(small: Build) -> None:
    model = small("current")
    calls: list[Any] = []
    model.layers[1].register_forward_pre_hook(lambda module, inputs: calls.append(inputs))
    model(tokens().to(model.device))
    with pytest.raises(EngineError, match="call the model, not its blocks"):
        model.layers[1](*calls[0])


def test_a_stored_factor_is_not_trained_by_unfreezing_everything(small: Build) -> None:
    """It is a buffer in transformers, which requires_grad_ of the model passes over there."""
    model = small("bf16", **GEMMA4, num_hidden_layers=3)
    model.requires_grad_(False).requires_grad_(True)
    ids = tokens().to(model.device)
    model(ids, labels=ids).loss.backward()
    assert all(block.layer_scalar.grad is None for block in model.layers)
    assert all(p.grad is not None for name, p in model.named_parameters() if "scalar" not in name)


def test_blocks_that_may_draw_random_numbers_are_found(small: Build) -> None:
    """Code of a user (a hook, a module of another package) may draw; dropout does unless its probability is zero."""
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
