"""Activation checkpointing changes no bit, whatever happens between the forwards and the backwards."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from bits import assert_same_bits, assert_same_tensors
from fewer import every, slow
from small_model import Build, loss_of, registry, tokens
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from typed import gradient

from te_models import CausalLM
from te_models.errors import EngineError
from te_models.fp8.scaling_state import fp8_state
from te_models.model.block import Block

MODES = ["selective", "full", 2]
RECIPES = ["bf16", "delayed", "delayed_max", "current", "blockwise", "mxfp8"]


@pytest.fixture
def make(small: Build) -> Build:
    def build(recipe: str, mode: str | int, **options: Any) -> CausalLM:
        fields: dict[str, Any] = dict(num_hidden_layers=4, activation_checkpointing=mode)
        if recipe.startswith("delayed"):
            fields |= dict(
                amax_history_len=6,
                amax_compute_algo="max" if recipe == "delayed_max" else "most_recent",
            )
        model = small(recipe.removesuffix("_max"), **fields, **options)
        registry(model).reset()
        return model

    return build


def update(model: CausalLM) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.05 * gradient(parameter)
            parameter.grad = None


def trace(model: CausalLM) -> dict[str, torch.Tensor]:
    """Everything a step changes: weights, gradients, scales and amax histories."""
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    found |= {
        f"{name}.grad": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }
    return found | {name: t.clone() for name, t in fp8_state(model).items()}


def assert_recompute_changes_no_bit(
    make: Build, recipe: str, mode: str | int, step: Callable[[CausalLM, int], None]
) -> None:
    """Compare everything that three steps change, `step` being the passes of one, with that of no recompute."""
    traces = []
    for which in ("none", mode):
        model = make(recipe, which)
        for number in range(3):
            step(model, number)
            traces.append(trace(model))
            update(model)
    for one, other in zip(traces[:3], traces[3:], strict=True):
        assert_same_tensors(other, one)


def eventful_run(
    model: CausalLM, steps: int, cached: bool
) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Steps of three micro-batches with an evaluation after one of them, one abandoned forward and one exception."""
    losses, traces = [], []
    for step in range(steps):
        if step == 1:
            hook = model.layers[2].mlp.register_forward_pre_hook(fail)
            hook2 = model.layers[2].mlp.down_proj.register_forward_pre_hook(fail)
            with contextlib.suppress(ZeroDivisionError):
                loss_of(model, 901, is_first_microbatch=True if cached else None)
            hook.remove()
            hook2.remove()
        for micro in range(3):
            loss = loss_of(
                model, 10 * step + micro, is_first_microbatch=micro == 0 if cached else None
            )
            if (step, micro) == (2, 2):
                loss_of(
                    model, 900, is_first_microbatch=False if cached else None
                )  # its backward never comes
            loss.backward()
            losses.append(loss.item())
            if (step % 3, micro) == (1, 0):
                model.eval()
                with torch.no_grad():
                    losses.append(loss_of(model, 500 + step).item())
                model.train()
        traces.append(trace(model))
        update(model)
    return losses, traces


def fail(module: Any, inputs: Any) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("recipe", "mode", "steps"),
    every(6, RECIPES, ["none", *MODES], [4], rest=2)
    + slow(every(2, RECIPES, ["none", *MODES], [12], rest=2)),
)
def test_eventful_steps_change_no_bit(
    make: Build, recipe: str, mode: str | int, steps: int
) -> None:
    """Nor does caching FP8 weights between micro-batches, but under delayed scaling, where they keep their scale."""
    moves = recipe.startswith("delayed")
    for cached in (False, True) if moves else (True,):
        losses, traces = eventful_run(make(recipe, "none"), steps, cached and moves)
        assert len(set(losses)) > 2 * steps
        again, recomputed = eventful_run(make(recipe, mode), steps, cached)
        assert losses == again
        for one, other in zip(traces, recomputed, strict=True):
            assert_same_tensors(other, one)


def checkpoint_of_torch_2_11(
    function: Any,
    *args: Any,
    use_reentrant: bool,
    context_fn: Any,
    preserve_rng_state: bool,
    **kwargs: Any,
) -> Any:
    """Newer ones tell the generator that the function has failed; here its hooks stay until it is freed."""
    assert not use_reentrant
    options = (preserve_rng_state, context_fn, "default", False, True)
    generator = torch.utils.checkpoint._checkpoint_without_reentrant_generator(
        function, *options, *args, **kwargs
    )
    next(generator)
    result = function(*args, **kwargs)
    with contextlib.suppress(StopIteration):
        next(generator)
    return result


@pytest.mark.parametrize("mode", MODES)
def test_a_failed_pass_whose_error_is_kept_leaves_no_hook(
    make: Build, mode: str | int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the error of a capture that failed is, before the eager pass that takes its place."""
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", checkpoint_of_torch_2_11)
    traces = []
    for failing in (False, True):
        model = make("delayed", mode)
        loss_of(model).backward()
        if failing:
            hook = model.layers[1].mlp.gate_up_proj.register_forward_pre_hook(fail)
            with pytest.raises(ZeroDivisionError) as kept:
                loss_of(model)
            hook.remove()
            assert kept.tb is not None
        loss_of(model).backward()
        traces.append(trace(model))
    assert_same_tensors(traces[1], traces[0])


@pytest.mark.parametrize(
    ("recipe", "mode", "order"), every(4, ["delayed", "current", "mxfp8"], MODES, [(0, 1), (1, 0)])
)
def test_two_forwards_then_two_backwards_in_either_order(
    make: Build, recipe: str, mode: str | int, order: tuple[int, int]
) -> None:
    def step(model: CausalLM, number: int) -> None:
        # Each forward caches its FP8 weights, which its own backward takes again. Transformer Engine's second
        # forward overwrites those of the first, whose backward would then see another scale.
        first = None if model.engine == "native" else True
        losses = [
            loss_of(model, 2 * number + n, is_first_microbatch=first) * (1 + 2 * n)
            for n in range(2)
        ]
        for index in order:
            losses[index].backward()

    assert_recompute_changes_no_bit(make, recipe, mode, step)


@pytest.mark.parametrize(("recipe", "mode"), every(3, ["delayed", "blockwise"], MODES))
def test_an_inner_autograd_grad_returns_the_gradients(
    make: Build, recipe: str, mode: str | int
) -> None:
    results = []
    for which in ("none", mode):
        model = make(recipe, which)
        loss_of(model, 0).backward()
        update(model)
        parameters = list(model.parameters())
        results.append((torch.autograd.grad(loss_of(model, 1), parameters), trace(model)))
        assert all(p.grad is None for p in parameters)
    (grads, state), (again, state_again) = results
    assert all(map(torch.equal, grads, again)) and any(g.abs().sum() > 0 for g in grads)
    assert_same_tensors(state_again, state)


@pytest.mark.parametrize("mode", MODES)
def test_random_numbers_in_a_block_are_drawn_again(make: Build, mode: str | int) -> None:
    def dropout(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(output, 0.3, training=True)

    def dropping(recipe: str, mode: str | int) -> CausalLM:
        model = make(recipe, mode)
        for block in model.layers:
            block.self_attn.register_forward_hook(dropout)
            block.post_attention_layernorm.register_forward_hook(dropout)
        return model

    def step(model: CausalLM, number: int) -> None:
        torch.manual_seed(number)
        loss_of(model, number).backward()

    assert_recompute_changes_no_bit(dropping, "delayed", mode, step)


def by_torch(block: torch.nn.Module, reentrant: bool) -> None:
    """Wrap a block as Hugging Face's gradient checkpointing and activation wrappers do."""
    own = block.forward
    block.forward = lambda x, t: torch.utils.checkpoint.checkpoint(
        own, x, t, use_reentrant=reentrant
    )


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_third_party_checkpoint_round_a_block_is_refused_where_scales_move(
    make: Build, reentrant: bool
) -> None:
    model = make("delayed", "none")
    for block in model.layers:
        by_torch(block, reentrant)
    with pytest.raises(
        EngineError, match="use activation_checkpointing='full' or te_models.checkpoint"
    ):
        loss_of(model, 0).backward()


@pytest.mark.parametrize(
    ("wrapped", "recipe"),
    every(4, ["torch", "torch reentrant", "wrapper"], ["bf16", "current", "blockwise", "mxfp8"]),
)
def test_a_third_party_checkpoint_round_blocks_is_right_elsewhere(
    make: Build, recipe: str, wrapped: str
) -> None:
    traces = []
    for foreign in (False, True):
        # Fused, the first pass of a reentrant checkpoint, which is under no_grad, would round to BF16 where others do
        # not.
        model = make(recipe, "none", fused=False)
        if foreign and wrapped == "wrapper":  # FSDP's and accelerate's
            apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
        elif foreign:
            for block in model.layers:
                by_torch(block, wrapped == "torch reentrant")
        for step in range(2):
            loss_of(model, step).backward()
        traces.append(
            {
                name.replace("_checkpoint_wrapped_module.", ""): p.grad
                for name, p in model.named_parameters()
            }
        )
        assert not registry(model).is_fp8_enabled()
    assert_same_tensors(traces[1], traces[0])


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_foreign_checkpoint_round_the_model_is_refused_where_it_would_be_wrong(
    make: Build, reentrant: bool
) -> None:
    model = make("delayed", "none")
    ids = tokens().to(model.device)
    anchor = torch.ones((), device=model.device, requires_grad=True)
    with pytest.raises(RuntimeError, match="use activation_checkpointing='full' instead"):
        torch.utils.checkpoint.checkpoint(
            lambda a: model(ids, labels=ids).loss * a, anchor, use_reentrant=reentrant
        ).backward()


def test_hugging_faces_switch_turns_on_our_own(make: Build) -> None:
    model = make("delayed", "none")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    assert model.activation_checkpointing == "full"
    loss_of(model, 0).backward()
    model.gradient_checkpointing_disable()
    assert model.activation_checkpointing == "none"


@pytest.mark.parametrize("mode", ["ful", 0, -1, True, "0", 1.5])
def test_a_wrong_mode_is_refused(make: Build, mode: Any) -> None:
    with pytest.raises(
        ValueError, match="choose one of a number N of blocks, full, none, selective"
    ):
        make("bf16", mode)


def test_a_copied_model_is_its_own(make: Build) -> None:
    """The model, not a registry, owns what a recompute needs."""
    model = make("current", "full")
    twin = copy.deepcopy(model)
    one, other = loss_of(model, 0), loss_of(twin, 0)
    other.backward()
    one.backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert_same_bits("p.grad", p.grad, q.grad)
