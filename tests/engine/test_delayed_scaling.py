"""Delayed scaling's state machine: te_models/engine/emulated/delayed_scaling.py against an independent simulation."""

import copy
import math
import pickle
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import te_models.engine.emulated as te
from te_models.engine.emulated.recipe import DelayedScaling, Float8CurrentScaling, Format

BF16 = torch.bfloat16
FLT_MAX = torch.finfo(torch.float32).max


class Slot:
    """One tensor's history and scale, by the rules of the specification in plain Python."""

    def __init__(self, length: int, fp8_max: float) -> None:
        self.history, self.scale, self.fp8_max = [0.0] * length, 1.0, fp8_max

    def record(self, value: float) -> None:
        self.history[0] = max(self.history[0], value)

    def update(self, algorithm: str, margin: int) -> None:
        last = self.history[0]
        if last == 0:
            return
        largest = max(self.history)
        self.history = [0.0, *self.history[2:], last] if len(self.history) > 1 else [0.0]
        amax = last if algorithm == "most_recent" else largest
        if math.isfinite(amax):
            quotient = torch.tensor(self.fp8_max * 2.0**-margin) / torch.tensor(amax)
            self.scale = min(quotient.item(), FLT_MAX)


def layer(n: int = 32, **options: object) -> te.Linear:
    return te.Linear(n, n, params_dtype=BF16, **options)


def step(m: te.Linear, recipe: DelayedScaling, x: Tensor, g: Tensor | None = None) -> None:
    with te.autocast(recipe=recipe):
        y = m(x)
    if g is not None:
        y.backward(g)


def state(m: te.Linear, direction: str = "fwd") -> tuple[list[float], list[list[float]]]:
    meta = m.fp8_meta[f"scaling_{direction}"]
    return meta.scale.tolist(), meta.amax_history.tolist()


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize(
    "length, margin, fp8_format",
    [(1, 0, Format.HYBRID), (2, 1, Format.E4M3), (3, -2, Format.HYBRID), (7, 1, Format.HYBRID)],
)
def test_history_and_scale_follow_the_rules(
    length: int, algorithm: str, margin: int, fp8_format: Format
) -> None:
    """Steps that grow, are silent (all zeros), hold an infinity, or underflow the scale."""
    recipe = DelayedScaling(margin, fp8_format, length, algorithm)
    m = layer(bias=False)
    sizes = [1.0, 3.0, 0.0, 50.0, math.inf, 2.0, 1e-38, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    e4m3, grad_max = 448.0, 448.0 if fp8_format == Format.E4M3 else 57344.0
    slots = {"x": Slot(length, e4m3), "w": Slot(length, e4m3), "g": Slot(length, grad_max)}
    weight_amax = m.weight.abs().max().item()
    for size in sizes:
        x = torch.ones(32, 32, dtype=BF16)
        x[0, 0] = size
        x = (x if math.isinf(size) else x * size).requires_grad_()
        g = torch.full((32, 32), min(size, 1e30), dtype=BF16)
        step(m, recipe, x, g)
        for slot, value in (
            ("x", x.abs().max().item()),
            ("w", weight_amax),
            ("g", g.abs().max().item()),
        ):
            slots[slot].record(value)
            slots[slot].update(algorithm, margin)
        scale, history = state(m)
        assert scale == [slots["x"].scale, slots["w"].scale, 1.0]
        assert history == [
            [a, b, 0.0] for a, b in zip(slots["x"].history, slots["w"].history, strict=True)
        ]
        scale, history = state(m, "bwd")
        assert scale == [slots["g"].scale, 1.0]
        assert history == [[a, 0.0] for a in slots["g"].history]


def test_no_grad_around_the_autocast_delays_the_amax_to_the_next_update() -> None:
    m, recipe = layer(), DelayedScaling(amax_history_len=4)
    step(m, recipe, torch.ones(32, 32, dtype=BF16))
    with torch.no_grad():
        step(m, recipe, torch.full((32, 32), 64.0, dtype=BF16))
    assert state(m)[0][0] == 448.0 and state(m)[1][0][0] == 64.0
    step(m, recipe, torch.ones(32, 32, dtype=BF16))
    assert state(m)[0][0] == 7.0 and state(m)[1][3][0] == 64.0


def test_no_grad_inside_the_autocast_updates() -> None:
    m, recipe = layer(), DelayedScaling(amax_history_len=4)
    with te.autocast(recipe=recipe), torch.no_grad():
        m(torch.full((32, 32), 2.0, dtype=BF16))
    assert state(m)[0][0] == 224.0


def test_a_first_forward_in_inference_mode() -> None:
    m, recipe = layer(), DelayedScaling(amax_history_len=4)
    with torch.inference_mode():
        step(m, recipe, torch.full((32, 32), 2.0, dtype=BF16))
    step(m, recipe, torch.ones(32, 32, dtype=BF16), torch.ones(32, 32, dtype=BF16))
    assert state(m)[0][0] == 224.0


@pytest.mark.parametrize(("outer", "count"), [(True, 1), (False, 0)])
def test_only_the_outermost_exit_updates(outer: bool, count: int, updates: list[str]) -> None:
    m, recipe = layer(), DelayedScaling(amax_history_len=4)
    with te.autocast(enabled=outer, recipe=recipe), te.autocast(recipe=recipe):
        m(torch.ones(32, 32, dtype=BF16))
    assert updates == ["forward"] * count


@pytest.mark.parametrize(
    ("inside", "backward"),
    [
        ([False, False, False], 1),
        ([True, True, True], 3),  # entered before the first module, it restores the flag
        ([False, True], 1),  # and entered after it does not
    ],
)
def test_backward_updates_for_each_autocast(
    inside: list[bool], backward: int, updates: list[str]
) -> None:
    """`inside`: whether a layer has an autocast of its own inside that of all."""
    layers, recipe = [layer() for _ in inside], DelayedScaling(amax_history_len=4)
    for _ in range(2):
        h = torch.ones(32, 32, dtype=BF16, requires_grad=True)
        with te.autocast(recipe=recipe):
            for m, own in zip(layers, inside, strict=True):
                with te.autocast(recipe=recipe) if own else nullcontext():
                    h = m(h)
        h.sum().backward()
    assert updates == ["forward", *["backward"] * backward] * 2


def test_rmsnorm_takes_the_flag_and_updates(updates: list[str]) -> None:
    norm, m, recipe = te.RMSNorm(32, dtype=BF16), layer(), DelayedScaling(amax_history_len=4)
    order: list[str] = []
    with te.autocast(recipe=recipe):
        h = norm(torch.ones(32, 32, dtype=BF16))
        h.register_hook(
            lambda _: order.append(f"{len(updates)} updates when the norm's backward starts")
        )
        y = m(h)
    y.sum().backward()
    assert updates == ["forward", "backward"]
    assert order == ["1 updates when the norm's backward starts"]


def test_a_node_that_is_not_reached_never_updates() -> None:
    unused, used, recipe = layer(), layer(), DelayedScaling(amax_history_len=4)
    x = torch.ones(32, 32, dtype=BF16)
    for _ in range(3):
        with te.autocast(recipe=recipe):
            unused(x)
            y = used(x)
        y.sum().backward()
    assert state(used, "bwd")[0][0] == 1.0 and state(used, "bwd")[1][0][0] == 1.0


def test_a_module_registers_at_its_first_forward_and_is_updated_with_all_others() -> None:
    a, b, recipe = layer(), layer(), DelayedScaling(amax_history_len=2)
    step(a, recipe, torch.ones(32, 32, dtype=BF16))
    with torch.no_grad():
        step(b, recipe, torch.full((32, 32), 4.0, dtype=BF16))
    assert state(b)[0][0] == 1.0
    step(a, recipe, torch.ones(32, 32, dtype=BF16))
    assert state(b)[0][0] == 112.0


def test_loaded_state_is_kept_and_used() -> None:
    m, recipe = layer(bias=False), DelayedScaling(amax_history_len=4)
    m.fp8_meta["recipe"] = recipe
    m.init_fp8_meta_tensors(recipe)
    m.fp8_meta["scaling_fwd"].scale.copy_(torch.tensor([2.0, 4.0, 1.0]))
    m.fp8_meta["scaling_fwd"].amax_history[3] = 5.0
    x = torch.full((32, 32), 1.0, dtype=BF16)
    scale = m.fp8_meta["scaling_fwd"].scale
    step(m, recipe, x)
    assert m.fp8_meta["scaling_fwd"].scale is scale
    assert [row[0] for row in state(m)[1]] == [0.0, 0.0, 5.0, 1.0]
    assert state(m)[0][0] == pytest.approx(448 / 5)


def test_off_and_on_again_keeps_the_state() -> None:
    m, recipe = layer(), DelayedScaling(amax_history_len=4)
    x = torch.full((32, 32), 2.0, dtype=BF16)
    step(m, recipe, x)
    m(x)
    with te.autocast(enabled=False, recipe=recipe):
        m(x)
    step(m, recipe, x)
    assert [row[0] for row in state(m)[1]] == [0.0, 0.0, 2.0, 2.0]


def test_another_length_of_the_history_is_refused() -> None:
    m, x = layer(), torch.ones(32, 32, dtype=BF16)
    step(m, DelayedScaling(amax_history_len=4), x)
    with pytest.raises(RuntimeError, match="reset_fp8_state"):
        step(m, DelayedScaling(amax_history_len=8), x)
    te.reset_fp8_state(m)
    step(m, DelayedScaling(amax_history_len=8), x)
    assert state(m)[0][0] == 448.0


def copied(m: te.Linear, x: Tensor, recipe: DelayedScaling) -> te.Linear:
    return copy.deepcopy(m)


def pickled(m: te.Linear, x: Tensor, recipe: DelayedScaling) -> te.Linear:
    return pickle.loads(pickle.dumps(m))


def back_again(m: te.Linear, x: Tensor, recipe: DelayedScaling) -> te.Linear:
    with (
        pytest.warns(UserWarning, match="Recipe type changed"),
        te.autocast(recipe=Float8CurrentScaling()),
    ):
        m(x)
    with pytest.warns(UserWarning, match="Recipe type changed"):
        step(m, recipe, x)
    return m


def after_reset(m: te.Linear, x: Tensor, recipe: DelayedScaling) -> te.Linear:
    te.FP8GlobalStateManager.reset()
    return m


def in_another_thread(m: te.Linear, x: Tensor, recipe: DelayedScaling) -> te.Linear:
    thread = threading.Thread(target=step, args=(m, recipe, x))
    thread.start()
    thread.join()
    return m


@pytest.mark.parametrize("change", [copied, pickled, back_again, after_reset, in_another_thread])
def test_scales_move_on_where_transformer_engine_freezes_them(
    change: Callable[..., te.Linear],
) -> None:
    m, recipe = layer(), DelayedScaling(amax_history_len=1)
    x = torch.ones(32, 32, dtype=BF16)
    step(m, recipe, x, x)
    m = change(m, x, recipe)
    step(m, recipe, 4 * x, 4 * x)
    assert state(m)[0][0] == 112.0 and state(m, "bwd")[0][0] == 14336.0


@pytest.mark.parametrize(
    ("fields", "scales"),
    [
        (dict(margin=1), (28.0, 3584.0)),
        (dict(fp8_format=Format.E4M3), (56.0, 56.0)),
        (dict(amax_compute_algo="most_recent"), (448.0, 57344.0)),
    ],
)
def test_another_field_takes_effect(fields: dict[str, Any], scales: tuple[float, float]) -> None:
    m, x = layer(), torch.ones(32, 32, dtype=BF16)
    step(m, DelayedScaling(amax_history_len=4), 8 * x, 8 * x)
    step(m, DelayedScaling(amax_history_len=4, **fields), x, x)
    assert (state(m)[0][0], state(m, "bwd")[0][0]) == scales


def test_reset_fp8_state_leaves_no_registry_entry() -> None:
    model = torch.nn.Sequential(layer(), torch.nn.ReLU(), layer())
    recipe = DelayedScaling(amax_history_len=4)
    with te.autocast(recipe=recipe):
        model(torch.ones(32, 32, dtype=BF16))
    te.reset_fp8_state(model)
    assert not te.FP8GlobalStateManager.quantization_state.scales.states
    assert all(not m.fp8_meta for m in (model[0], model[2]))
    with te.autocast(recipe=Float8CurrentScaling()):
        model(torch.ones(32, 32, dtype=BF16))
    te.reset_fp8_state(model)
    with te.autocast(recipe=recipe):
        model(torch.ones(32, 32, dtype=BF16))
    assert state(model[0])[0][0] == 448.0


def test_state_moves_with_the_module_and_others_go_on() -> None:
    a, b, recipe = layer(), layer(), DelayedScaling(amax_history_len=4)
    step(a, recipe, torch.ones(32, 32, dtype=BF16))
    step(b, recipe, torch.ones(32, 32, dtype=BF16))
    b.to("meta")
    assert b.fp8_meta["scaling_fwd"].scale.device.type == "meta"
    assert b.quantizers["scaling_fwd"][0].scale.device.type == "meta"
    step(a, recipe, torch.full((32, 32), 4.0, dtype=BF16))
    assert state(a)[0][0] == 112.0
