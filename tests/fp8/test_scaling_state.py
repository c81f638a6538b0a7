"""Scales and amax histories as data: converted, resized, restored and frozen, against the rules written out."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_models.engine.emulated as emulated
from te_models import CausalLM, get_recipe
from te_models.config.recipe import Recipe
from te_models.fp8 import calibration
from te_models.fp8.calibration import Measurement, ModuleScaling, unmeasured
from te_models.fp8.precision import take_scales
from te_models.fp8.scaling_state import (
    convert_scales,
    delayed_states,
    divide_gradient_amaxes,
    fp8_state,
    frozen_fp8_state,
    load_fp8_state,
)

FLT_MAX = torch.finfo(torch.float32).max


def build(**fields: Any) -> CausalLM:
    torch.manual_seed(0)
    return CausalLM.from_preset(
        "gated-nano", recipe="delayed", device="cpu", hidden_size=64, intermediate_size=96, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=1, vocab_size=96, amax_history_len=4, **fields,
    )  # fmt: skip


def trained(**fields: Any) -> CausalLM:
    """A model whose scales two steps have moved."""
    model = build(**fields)
    for seed in (0, 1):
        ids = torch.randint(0, 96, (2, 16), generator=torch.Generator().manual_seed(seed))
        model(ids, labels=ids).loss.backward()
    return model


def copied(model: nn.Module) -> dict[str, Tensor]:
    found = {name: tensor.clone() for name, tensor in fp8_state(model).items()}
    assert found
    return found


def largest(fields: dict[str, Any], backward: bool) -> float:
    """The number that an amax is scaled to: 448 in E4M3 and 57344 in E5M2, less the margin's power of two."""
    wide = backward and fields.get("fp8_format", "HYBRID") == "HYBRID"
    return (57344.0 if wide else 448.0) / 2.0 ** fields.get("margin", 0)


CHANGES = [
    ({}, dict(margin=2)),
    (dict(margin=1), {}),
    ({}, dict(fp8_format="E4M3")),
    (dict(fp8_format="E4M3"), dict(margin=3)),
]


@pytest.mark.parametrize("before, after", CHANGES)
def test_scales_are_converted_to_another_recipe(
    before: dict[str, Any], after: dict[str, Any]
) -> None:
    """By the ratio of the numbers that amaxes are scaled to; histories, which hold amaxes, stay."""
    model = trained(**before)
    old = copied(model)
    model.set_recipe("delayed", amax_history_len=4, **after)
    for name, tensor in fp8_state(model).items():
        if name.endswith("amax_history"):
            assert torch.equal(tensor, old[name])
            continue
        backward = ".scaling_bwd." in name
        ratio = largest(after, backward) / largest(before, backward)
        history = old[name.removesuffix("scale") + "amax_history"]
        seen = (history > 0).any(0)
        assert torch.equal(tensor[seen], old[name][seen] * ratio)
        assert (tensor[~seen] == 1).all() and (~seen).any()


def test_only_scales_of_tensors_that_were_seen_are_converted_or_divided() -> None:
    model = trained()
    state = delayed_states(model)
    name, own = next((name, own) for name, own in state.items() if name.endswith("bwd"))
    own.scale.copy_(torch.tensor([1.0, FLT_MAX]))
    own.amax_history.zero_()
    own.amax_history[1, 0] = 57344.0  # so that a scale of 1 is one that was measured
    roomy: Recipe = get_recipe("delayed", amax_history_len=4, margin=3)
    delayed = get_recipe("delayed", amax_history_len=4)
    convert_scales(model, lambda _: roomy, lambda _: delayed)
    assert own.scale.tolist() == [8.0, FLT_MAX], "no scale becomes infinite"
    own.amax_history.zero_()
    own.scale.copy_(torch.tensor([1.0, 3.0]))
    forward = {n: t.clone() for n, t in fp8_state(model, ("scaling_fwd",)).items()}
    divide_gradient_amaxes(model, 4)
    assert own.scale.tolist() == [1.0, 12.0]
    for key, tensor in fp8_state(model, ("scaling_fwd",)).items():
        assert torch.equal(tensor, forward[key])
    own.amax_history[2, 0] = 8.0
    divide_gradient_amaxes(model, 4)
    assert own.scale.tolist() == [4.0, 48.0] and own.amax_history[2].tolist() == [2.0, 0.0]
    assert name


@pytest.mark.parametrize("length", [1, 2, 3, 4, 6])
def test_a_history_of_another_length_keeps_its_newest_rows(length: int) -> None:
    """Row 0 belongs to the step in progress, and the last row to the newest finished one."""
    model = trained()
    state = copied(model)
    for key, tensor in state.items():
        if key.endswith("amax_history"):
            rows = torch.arange(1.0, 5.0)[:, None]
            tensor.copy_(rows.expand_as(tensor))
    other = build().train()
    other.set_recipe("delayed", amax_history_len=length)
    load_fp8_state(other, state, other.precision.te_recipe_of)
    finished = {1: [], 2: [4.0], 3: [3.0, 4.0], 4: [2.0, 3.0, 4.0], 6: [0.0, 0.0, 2.0, 3.0, 4.0]}
    for key, tensor in fp8_state(other).items():
        if key.endswith("amax_history"):
            assert tensor[:, 0].tolist() == [1.0, *finished[length]]
        else:
            assert torch.equal(tensor, state[key])


def test_state_of_a_recipe_without_scales_is_not_taken() -> None:
    """And without a conversion a scale is that of another format."""
    model = trained()
    state, then = copied(model), model.precision.linears
    current = CausalLM(model.config, recipe="current", device="cpu")
    assert take_scales(current, state, current.precision, then) == 0 and not fp8_state(current)
    other = build(margin=1)
    assert take_scales(other, state, other.precision, then) == len(state)
    for name, tensor in fp8_state(other).items():
        if name.endswith("scale"):
            seen = (state[name.removesuffix("scale") + "amax_history"] > 0).any(0)
            assert torch.equal(tensor[seen], state[name][seen] / 2)


def test_frozen_state_of_a_module_that_runs_for_the_first_time_is_new_again() -> None:
    """Scales of 1 and histories of zeros, as before its first step, and live: the same tensors."""
    model = build()
    ids = torch.arange(32).reshape(2, 16)
    with frozen_fp8_state(model):
        model(ids, labels=ids).loss.backward()
        live = fp8_state(model)
        moved = [name for name, t in live.items() if name.endswith("history") and t.any()]
        assert len(moved) == len(live) // 2
    for name, tensor in fp8_state(model).items():
        assert tensor is live[name]
        assert (tensor == (1.0 if name.endswith("scale") else 0.0)).all(), name
    fresh = build()
    for each in (model, fresh):
        each(ids, labels=ids).loss.backward()
    for (name, one), other in zip(fp8_state(model).items(), fp8_state(fresh).values(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("direction", ["scaling_fwd", "scaling_bwd"])
def test_frozen_state_is_that_of_its_directions(direction: str) -> None:
    model = trained()
    before = copied(model)
    ids = torch.arange(32).reshape(2, 16) + 40
    with frozen_fp8_state(model, (direction,)):
        (model(ids, labels=ids).loss * 8).backward()
    kept = {name: torch.equal(tensor, before[name]) for name, tensor in fp8_state(model).items()}
    assert all(kept[name] for name in kept if direction in name)
    assert not any(
        kept[name] for name in kept if direction not in name and name.endswith("history")
    )


def measured(x: list[Tensor], weights: list[Tensor] | None = None) -> tuple[nn.Module, Any]:
    """A te.Linear with the scales that calibration takes from passes over `x`, and its forward state."""
    recipe = get_recipe("delayed", amax_history_len=3)
    built = recipe.build(emulated)
    linear = emulated.Linear(32, 32, bias=False, device="cpu")
    with torch.no_grad():
        linear.weight.fill_(0.5)
    found = Measurement([linear], torch.device("cpu"))
    with found.running():
        for one in x:
            found.backward(linear(one).sum())
    found.set_scales([ModuleScaling(recipe, built, None)])
    return linear, delayed_states(linear)[".scaling_fwd"]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_number_that_is_none_makes_no_scale(wrong: float) -> None:
    """As in Transformer Engine: the amax of NaN is ignored, and an infinite one leaves the scale as it is."""
    x = torch.full((16, 32), 2.0)
    x[3, 4] = wrong
    linear, state = measured([x])
    assert state.scale.isfinite().all() and (state.scale > 0).all()
    assert not state.amax_history.isnan().any()
    assert state.scale[0] == 1.0 and state.scale[1] == 448 / 0.5
    if wrong != wrong:
        assert not state.amax_history[:, 0].any()
        assert unmeasured([linear], None) == [linear]
    else:
        assert state.amax_history[-1, 0] == torch.inf
    backward = delayed_states(linear)[".scaling_bwd"]
    assert backward.scale[0] == 57344.0


def test_micro_batches_raise_an_amax_and_never_lower_it() -> None:
    ones = torch.ones(16, 32)
    _, state = measured([2 * ones, -8 * ones, ones])
    assert state.amax_history[-1].tolist() == [8.0, 0.5, 0.0]
    assert state.scale.tolist() == [448 / 8, 448 / 0.5, 1.0]


def test_either_a_scale_or_a_history_is_a_measurement() -> None:
    linear, state = measured([torch.ones(16, 32)])
    assert unmeasured([linear], None) == []
    state.scale.fill_(1.0)
    assert unmeasured([linear], None) == [], "a history alone"
    state.amax_history.zero_()
    assert unmeasured([linear], None) == [linear]
    state.scale[0] = 2.0
    assert unmeasured([linear], None) == [], "a scale alone"
    state.scale.copy_(torch.tensor([1.0, 7.0, 7.0]))
    state.amax_history[:, 1:] = 3.0
    assert unmeasured([linear], None) == [linear], "of the input, not of the weight"


@pytest.mark.parametrize("reduces", [True, False])
def test_amaxes_of_other_processes_count_where_the_recipe_reduces_them(
    reduces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here another process has seen numbers three times as large."""
    monkeypatch.setattr(calibration, "largest", lambda own, group: [3 * amax for amax in own])
    recipe = get_recipe("delayed", amax_history_len=3, reduce_amax=reduces)
    linear = emulated.Linear(32, 32, bias=False, device="cpu")
    found = Measurement([linear], torch.device("cpu"))
    found.amaxes[0][0, 0] = 0.5
    found.set_scales([ModuleScaling(recipe, recipe.build(emulated), None)])
    expected = 1.5 if reduces else 0.5
    assert delayed_states(linear)[".scaling_fwd"].amax_history[-1, 0] == expected


def test_an_amax_of_the_step_in_progress_is_kept() -> None:
    """Row 0 has it: an FP8 weight's from when it was written."""
    recipe = get_recipe("delayed", amax_history_len=3)
    linear, state = measured([torch.ones(16, 32)])
    state.amax_history.zero_()
    state.amax_history[0, 0] = 4.0
    found = Measurement([linear], torch.device("cpu"))
    found.amaxes[0][0, 0] = 0.5
    found.set_scales([ModuleScaling(recipe, recipe.build(emulated), None)])
    assert state.amax_history[-1, 0] == 4.0 and state.scale[0] == 112.0
