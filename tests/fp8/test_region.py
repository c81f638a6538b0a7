"""A model's forward pass under its own recipe: in threads, inside a caller's autocast, and when it fails."""

import contextlib
import copy
import pickle
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from bits import assert_same_bits
from fewer import every
from torch import Tensor, nn

import te_models.engine.emulated as te
from te_models import CausalLM
from te_models.config.recipe import get_recipe
from te_models.errors import EngineError, UsageError
from te_models.fp8.region import Autocasts, preserve_scales_in_backward
from te_models.fp8.scaling_state import delayed_states, fp8_state
from te_models.generation.generate import stream
from te_models.training.evaluation import evaluate

ENGINES = ["emulated", pytest.param("native", marks=pytest.mark.gpu)]


def build(recipe: str, engine: str = "emulated", **options: Any) -> CausalLM:
    device = "cuda" if engine == "native" else "cpu"
    if recipe == "delayed":
        options["amax_history_len"] = 4
    torch.manual_seed(0)
    return CausalLM.from_preset(
        "gated-nano", recipe=recipe, engine=engine, device=device, **options
    )


def tokens(model: CausalLM, batch: int = 2, length: int = 16) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, model.config.vocab_size, (batch, length), generator=generator).to(
        model.device
    )


def train(model: CausalLM, ids: Tensor, steps: int = 2) -> None:
    for _ in range(steps):
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.25)  # so that every step has other amaxes


def state(model: CausalLM) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in fp8_state(model).items()}


def assert_same_state(name: str, model: CausalLM, expected: dict[str, Tensor]) -> None:
    found = fp8_state(model)
    assert found.keys() == expected.keys() and found, name
    for key, tensor in expected.items():
        assert_same_bits(f"{name}: {key}", found[key], tensor)


def run(*functions: Callable[[], Any]) -> list[Any]:
    """The results of functions that run in a thread each."""
    with ThreadPoolExecutor(len(functions)) as threads:
        return [
            running.result() for running in [threads.submit(function) for function in functions]
        ]


@torch.no_grad()
def evaluated(model: CausalLM, ids: Tensor, times: int = 4) -> list[Tensor]:
    return [model(ids).logits for _ in range(times)]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_four_threads_evaluate_one_model(recipe: str, engine: str) -> None:
    model = build(recipe, engine)
    ids = tokens(model)
    train(model, ids)
    expected, before = evaluated(model, ids, 1)[0], state(model)
    for logits in (
        logits for found in run(*[lambda: evaluated(model, ids)] * 4) for logits in found
    ):
        assert_same_bits("logits", logits, expected)
    assert not model.te.FP8GlobalStateManager.is_fp8_enabled()
    if recipe == "delayed":
        assert_same_state("after the threads", model, before)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_bf16_model_beside_an_fp8_one(engine: str) -> None:
    fp8, bf16 = build("delayed", engine), build("bf16", engine)
    ids = tokens(fp8)
    train(fp8, ids)
    expected = [evaluated(model, ids, 1)[0] for model in (fp8, bf16)]
    for found, wanted in zip(
        run(lambda: evaluated(fp8, ids), lambda: evaluated(bf16, ids)), expected, strict=True
    ):
        for logits in found:
            assert_same_bits("logits", logits, wanted)


def test_two_threads_generate_and_move_no_scale() -> None:
    model = build("delayed")
    ids = tokens(model, 1, 4)
    train(model, tokens(model), 1)
    before = state(model)
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    for found in run(*[lambda: model.generate(ids, max_new_tokens=4, do_sample=False)] * 2):
        assert_same_bits("tokens", found, expected)
    assert_same_state("after generation", model, before)
    assert model.training


@pytest.mark.parametrize("recipe", ["delayed", "bf16"])
def test_training_while_the_model_generates_is_one_line(recipe: str) -> None:
    """In evaluation mode it would move no scale and drop nothing out."""
    model, ids = build(recipe), torch.arange(16)[None]
    train(model, ids)
    before = state(model)
    for _ in stream(model, ids[:, :4], 2):
        with pytest.raises(EngineError, match="in evaluation mode while generate") as caught:
            model(ids, labels=ids)
        assert "\n" not in str(caught.value)
        with torch.no_grad():
            model(ids, labels=ids)
    if recipe == "delayed":
        assert_same_state("after generation", model, before)
    train(model, ids)
    model.eval()
    for _ in stream(model, ids[:, :4], 2):
        model(ids, labels=ids).loss.backward()  # an evaluation, as its mode has been


def test_threads_that_train_and_generate_move_scales_as_training_alone() -> None:
    """A pass is refused or right, whenever the other thread begins and ends."""
    model, ids = build("delayed"), torch.arange(16)[None]
    train(model, ids)
    alone = copy.deepcopy(model)
    losses: list[float] = []

    def trains() -> None:
        while len(losses) < 6:
            with contextlib.suppress(EngineError):
                loss = model(ids, labels=ids).loss
                loss.backward()
                losses.append(loss.item())

    def generates() -> None:
        while len(losses) < 6:
            model.generate(ids[:, :4], max_new_tokens=1)
            time.sleep(0.005)

    run(trains, generates)
    again: list[float] = []

    def trains_alone() -> None:
        for _ in losses:
            loss = alone(ids, labels=ids).loss
            loss.backward()
            again.append(loss.item())

    run(trains_alone)  # in a thread too, where PyTorch may use another number of its own threads
    assert again == losses
    assert_same_state("trained beside generation", model, state(alone))


def test_an_evaluation_that_fails_leaves_the_mode() -> None:
    model = build("bf16")
    batch = {"input_ids": torch.zeros(1, 4, dtype=torch.long), "labels": torch.full((1, 4), 10**6)}
    with pytest.raises(UsageError, match="a label is"):
        evaluate(model, [batch])
    assert model.training


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("where", ["a block", "the loss"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_training_pass_that_raises_moves_no_scale(
    where: str, engine: str, checkpointing: str
) -> None:
    model = build("delayed", engine, activation_checkpointing=checkpointing)
    ids = tokens(model)
    train(model, ids)
    before = state(model)

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    last = model.layers[-2] if where == "a block" else model.lm_head
    handle = last.register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        model(100 + 0 * ids, labels=ids)
    handle.remove()
    assert_same_state("after the failure", model, before)
    assert not model.te.FP8GlobalStateManager.is_fp8_enabled()
    model(ids, labels=ids).loss.backward()
    assert any(not torch.equal(before[name], tensor) for name, tensor in fp8_state(model).items())


@pytest.mark.parametrize("fp8_params", [False, True])
def test_a_training_pass_that_raises_keeps_the_amaxes_of_experts(fp8_params: bool) -> None:
    """Those of FP8 weights, one per expert, are of the optimizer's step and not of the pass."""
    sizes = dict(num_hidden_layers=3, amax_history_len=4)
    torch.manual_seed(0)
    model = CausalLM.from_preset(
        "gated-moe-nano",
        recipe="delayed",
        engine="emulated",
        device="cpu",
        fp8_params=fp8_params,
        **sizes,
    )
    ids = tokens(model)
    train(model, ids)
    before = state(model)
    recorded = [
        tensor[0, 1::3]
        for name, tensor in before.items()
        if name.endswith("scaling_fwd.amax_history")
    ]
    assert all((amaxes > 0).all() == fp8_params for amaxes in recorded)
    model.lm_head.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(ids, labels=ids)
    assert_same_state("after the failure", model, before)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_the_backward_of_an_evaluation_changes_nothing(engine: str, checkpointing: str) -> None:
    model = build("delayed", engine, activation_checkpointing=checkpointing)
    ids = tokens(model)
    train(model, ids)
    before = state(model)
    model.eval()
    model(ids, labels=ids).loss.mul(1000.0).backward()
    assert_same_state("after backward from the loss", model, before)
    model(ids).logits.sum().backward()
    assert_same_state("after backward from the logits", model, before)


def test_a_backward_updates_scales_once_whatever_the_number_of_autocasts() -> None:
    """Each step is one row of a history, the newest the last: amaxes of gradients here are 1, 2 and 4."""
    layers = nn.ModuleList(te.Linear(32, 32, device="cpu") for _ in range(3))
    recipe = get_recipe("delayed", amax_history_len=5).build(te)
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    for factor in (1.0, 2.0, 4.0):
        with te.outside_autocast():  # as a model's pass is
            autocasts = Autocasts(te, None, None, dict.fromkeys(layers, (recipe, None)))
            y = x
            for layer in layers:
                with autocasts.linear(layer):
                    y = layer(y)
        (y * factor).sum().backward()
    for name, state in delayed_states(layers, ("scaling_bwd",)).items():
        history = state.amax_history[:, 0]
        assert (history > 0).tolist() == [False, False, True, True, True], name
        if name.startswith("2."):
            assert history.tolist() == [0.0, 0.0, 1.0, 2.0, 4.0]


def test_a_backward_from_two_outputs_one_before_the_other_changes_nothing() -> None:
    """The gradient of the second output is cast when the first one's hook is still to come."""
    layers = nn.Sequential(*(te.Linear(32, 32, device="cpu") for _ in range(2)))
    recipe = get_recipe("delayed", amax_history_len=3).build(te)
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    before: dict[str, Tensor] = {}
    for factor in (1.0, 50.0):
        with te.autocast(enabled=True, recipe=recipe):
            early = layers[0](x)
            late = layers[1](early)
        if factor > 1:
            before = {name: tensor.clone() for name, tensor in fp8_state(layers).items()}
            preserve_scales_in_backward(layers, (early, late))
        ((early + late) * factor).sum().backward()
    for name, tensor in fp8_state(layers).items():
        assert_same_bits(name, tensor, before[name])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("recipe", "checkpointing"),
    every(4, ["delayed", "current", "nvfp4", "mxfp8", "bf16", "blockwise"], ["none", "full"]),
)
def test_an_autocast_around_the_model_has_no_effect(
    recipe: str, engine: str, checkpointing: str
) -> None:
    if engine == "native" and recipe in ("mxfp8", "nvfp4"):
        pytest.skip("no such units on Hopper")
    options: dict[str, Any] = {"disable_stochastic_rounding": True} if recipe == "nvfp4" else {}
    one, other = (
        build(recipe, engine, activation_checkpointing=checkpointing, **options) for _ in range(2)
    )
    te, ids = one.te, tokens(one, 2, 64)
    outer = te.recipe.Float8CurrentScaling(fp8_format=te.recipe.Format.E4M3)  # as no recipe here
    for _ in range(2):
        expected = one(ids, labels=ids)
        expected.loss.backward()
        with te.autocast(enabled=True, recipe=outer):
            with pytest.warns(UserWarning, match=f"runs under its own recipe '{recipe}'"):
                found = other(ids, labels=ids)
            found.loss.backward()
            assert te.FP8GlobalStateManager.get_fp8_recipe() is outer
        assert_same_bits("logits", found.logits, expected.logits)
        for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
            assert_same_bits(f"gradient of {name}", a.grad, b.grad)
    if recipe == "delayed":
        assert_same_state("under the outer autocast", other, state(one))


@pytest.mark.parametrize("recipe", ["bf16", "current"])
def test_an_autocast_of_torch_narrows_nothing_in_a_bf16_model(recipe: str) -> None:
    """Such as attention's sums, linear attention's state and a router in FP32; Trainer's bf16=True has one."""
    kinds = dict(
        layer_types=["linear_attention", "full_attention"],
        linear_attention=dict(
            num_key_heads=2, num_value_heads=4, key_head_dim=16, value_head_dim=16
        ),
        moe=dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, router_fp32=True),
    )
    sizes = dict(num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0)
    one, other = (
        build(recipe, num_hidden_layers=2, **kinds, **(sizes if recipe != "bf16" else {}))
        for _ in range(2)
    )
    ids = tokens(one, 2, 40)
    expected = one(ids, labels=ids)
    with torch.autocast("cpu", torch.bfloat16):
        found = other(ids, labels=ids)
    for name in ("loss", "logits"):
        assert_same_bits(name, getattr(found, name), getattr(expected, name))
    for output in (expected, found):
        output.loss.backward()
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert_same_bits(f"gradient of {name}", b.grad, a.grad)


@pytest.mark.parametrize(
    ("recipe", "field"),
    [
        ("delayed", dict(amax_compute_algo="most_recent")),
        ("current", dict(use_power_2_scales=True)),
    ],
)
def test_an_autocast_that_differs_in_a_field_is_a_warning(
    recipe: str, field: dict[str, Any]
) -> None:
    model = build(recipe)
    outer = get_recipe(recipe, **field).build(model.te)
    assert outer != model.te_recipe
    with (
        model.te.autocast(enabled=True, recipe=outer),
        pytest.warns(UserWarning, match=f"runs under its own recipe '{recipe}'"),
    ):
        model(tokens(model))


def test_an_autocast_with_the_same_recipe_or_none_is_no_warning() -> None:
    model = build("current")
    ids = tokens(model)
    with model.te.autocast(enabled=True, recipe=model.te_recipe):
        model(ids)  # a warning is an error in all tests
    with model.te.autocast(enabled=False):
        model(ids)


def pickled(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("make", "fp8_params"), every(2, [copy.deepcopy, pickled], [False, True]))
def test_a_copy_evaluates_and_trains_like_the_original(
    make: Callable[[Any], Any], fp8_params: bool, engine: str
) -> None:
    if engine == "native" and make is pickled:
        pytest.skip("a compiled model is saved with save_pretrained")
    model = build("delayed", engine, fp8_params=fp8_params)
    ids = tokens(model)
    train(model, ids)
    twin, before = make(model), state(model)
    assert_same_bits("logits", evaluated(twin, ids, 1)[0], evaluated(model, ids, 1)[0])
    train(twin, ids)
    if (
        not fp8_params
    ):  # a step records the amax of an FP8 weight, which the next pass of any model takes up
        assert_same_state("the original while its copy trains", model, before)
    trained = state(twin)
    train(model, ids)
    assert_same_state("the copy", model, trained)
    assert any(not torch.equal(before[name], tensor) for name, tensor in trained.items())
