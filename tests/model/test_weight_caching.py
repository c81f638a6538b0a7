"""FP8 weights cached between the micro-batches of a step: quantized once, used by all, and nothing else differs."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bits import assert_same_tensors
from fewer import every
from small_model import loss_of
from typed import gradient

from te_models import CausalLM, TEModelsForCausalLM
from te_models.fp8.kept_weights import te_linears
from te_models.fp8.scaling_state import fp8_state

SHAPE = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=1,
    num_key_value_heads=1,
)
PROMPT = torch.tensor([[5, 6, 7]])
ALL_FP8 = dict(num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0, lm_head="fp8")


def build(recipe: str, mode: str | int, **fields: Any) -> CausalLM:
    torch.manual_seed(1)
    options = {**(dict(amax_history_len=4) if recipe == "delayed" else {}), **fields}
    return CausalLM.from_preset(
        "gated-nano", recipe=recipe, device="cpu", activation_checkpointing=mode, **SHAPE, **options
    )


def run(
    model: CausalLM,
    cache: bool,
    swap: str | None = None,
    between: Callable[[CausalLM], object] = lambda model: None,
) -> tuple[list[float], list[torch.Tensor]]:
    """Return the losses and gradients of two steps of three micro-batches, with a swap after each second one.

    `between` runs after each micro-batch.
    """
    losses, gradients = [], []
    for number in range(6):
        loss = loss_of(model, number, is_first_microbatch=number % 3 == 0 if cache else None)
        loss.backward()
        losses.append(loss.item())
        between(model)
        if number % 3 == 1 and swap:
            model.set_recipe(swap)
        if number % 3 == 2:
            gradients += [p.grad.clone() for p in model.parameters()]
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * gradient(p)
                    p.grad = None
    return losses, gradients


def test_a_recipe_swapped_between_micro_batches_is_followed() -> None:
    (losses, gradients), (again, found) = (
        run(build("current", "full"), cache, "blockwise") for cache in (False, True)
    )
    assert losses == again and all(map(torch.equal, gradients, found))


def test_under_delayed_scaling_a_weight_counts_once_a_step() -> None:
    """Cached FP8 weights keep the scale of the first micro-batch, as in Transformer Engine; losses lag."""
    cached, plain = build("delayed", "none"), build("delayed", "none")
    losses, expected = run(cached, cache=True)[0], run(plain, cache=False)[0]
    for name, history in fp8_state(cached).items():
        if name.endswith("scaling_fwd.amax_history"):
            assert (history[:, 1] != 0).sum() == 2 and (history[:, 0] != 0).sum() == 3, (
                "two steps, six micro-batches"
            )
    assert losses == pytest.approx(expected, rel=2e-3)


def generate(model: CausalLM) -> None:
    model.generate(PROMPT, 3, do_sample=False)


def generate_as_transformers(model: CausalLM) -> None:
    wrapped = TEModelsForCausalLM.wrap(model).eval()
    wrapped.generate(PROMPT, max_new_tokens=3, do_sample=False)
    model.train()


def stop_reading(model: CausalLM) -> None:
    steps = model.stream(PROMPT, 3, do_sample=False)
    next(steps)
    steps.close()


@pytest.mark.parametrize(
    ("recipe", "between"),
    every(
        3,
        ["delayed", "current", "mxfp8"],
        [generate, generate_as_transformers, stop_reading],
    ),
)
def test_a_generation_between_micro_batches_changes_nothing(
    recipe: str, between: Callable[[CausalLM], object]
) -> None:
    """Under delayed scaling, weights that are quantized anew have other scales than the step's first micro-batch."""
    twin, model = build(recipe, "none"), build(recipe, "none")
    losses, gradients = run(twin, cache=True)
    found, found_gradients = run(model, cache=True, between=between)
    assert found == losses
    assert all(map(torch.equal, found_gradients, gradients))
    assert_same_tensors(fp8_state(model), fp8_state(twin))


def test_streams_that_are_read_in_turn_leave_no_cached_weights() -> None:
    model = build("current", "none").eval()
    first, second = (model.stream(PROMPT, 3, do_sample=False) for _ in range(2))
    next(first)
    next(second)
    first.close()
    second.close()
    assert not any(map(model.te.take_cached_weights, te_linears(model, model.te)))


def test_weights_that_change_during_a_generation_are_quantized_anew() -> None:
    """The caches of a step that ended while a stream was read are not those of the step after it."""
    results = []
    for late in (True, False):
        model = build("current", "none")
        loss_of(model, 0, is_first_microbatch=True)
        steps = model.stream(PROMPT, 3, do_sample=False)
        next(steps)
        if not late:
            steps.close()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= 1.5
        model.train()
        loss_of(model, 1, is_first_microbatch=True)
        if late:
            steps.close()
            model.train()
        results.append(loss_of(model, 2, is_first_microbatch=False).item())
    assert results[0] == results[1]


@pytest.mark.parametrize(
    "recipe, mode",
    [("current", "none"), ("mxfp8", "none"), ("current", "full"), ("mxfp8", "selective")],
)
def test_a_weight_is_quantized_once_a_step_also_by_recomputes(
    recipe: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(recipe, mode, **ALL_FP8, tie_word_embeddings=False)
    loss_of(model, 0).backward()
    counts = {"now": 0}
    for module in model.modules():
        if isinstance(module, model.te.Linear):
            quantizer: Any = module.quantizers["scaling_fwd"][1]
            original = quantizer._build

            def spy(*args: Any, original: Any = original) -> Any:
                counts["now"] += 1
                return original(*args)

            monkeypatch.setattr(quantizer, "_build", spy)
    for flag, expected in (
        (True, 1),
        (False, 0),
        (False, 0),
        (None, 2 if mode == "full" else None),
    ):
        counts["now"] = 0
        loss_of(model, 1, is_first_microbatch=flag).backward()
        if expected is not None:
            blocks, head = 4 * 4, 1
            assert counts["now"] == expected * blocks + min(expected, 1) * head, flag


def test_an_exception_leaves_nothing_kept_that_is_stale() -> None:
    model = build("current", "full")
    hook = model.layers[2].register_forward_pre_hook(lambda *a: 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        loss_of(model, 0, is_first_microbatch=True)
    hook.remove()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    fresh = build("current", "none")
    fresh.load_state_dict(model.state_dict())
    assert loss_of(model, 1, is_first_microbatch=True).item() == loss_of(fresh, 1).item()
