"""The decoder's pass: all parameters train, any size works, scales move once per step, both ways to the loss agree."""

from collections.abc import Callable

import pytest
import torch
from bits import assert_same_bits
from fewer import every
from kinds import KINDS
from kinds import build as build_kind
from kinds import tokens as tokens_of
from small_model import RECIPES, SHAPE, Build, registry, same, snapshot, step, tokens

from te_models import CausalLM, list_recipes
from te_models.errors import UsageError
from te_models.fp8.region import Autocasts
from te_models.fp8.scaling_state import fp8_state
from te_models.huggingface.modeling import TEModelsForCausalLM
from te_models.model.forward_context import ForwardContext, forward_context
from te_models.model.recompute import Recompute


@pytest.mark.parametrize("mode", ["none", "full"])
def test_every_scale_is_updated_exactly_once_a_step(
    small: Build, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small("delayed", amax_compute_algo="max", activation_checkpointing=mode)
    calls = {True: 0, False: 0}
    original = registry(model).reduce_and_update_fp8_tensors

    def spy(forward: bool = True) -> None:
        calls[forward] += 1
        original(forward)

    monkeypatch.setattr(registry(model), "reduce_and_update_fp8_tensors", staticmethod(spy))
    for count in range(1, 5):
        step(model, tokens(seed=count))
        if mode == "none":
            assert calls == {True: count, False: count}
        for name, history in fp8_state(model).items():
            if name.endswith("amax_history"):
                slots = history.shape[1] - 1  # the last slot, of outputs in FP8, is unused
                assert (history[:, :slots] > 0).sum() == count * slots, name
                assert history[0].abs().sum() == 0, "the row under way was rolled into the history"


@pytest.mark.parametrize(("recipe", "size"), every(2, RECIPES, [(1, 1), (1, 5), (3, 7), (2, 33)]))
def test_any_batch_and_length_works(small: Build, recipe: str, size: tuple[int, int]) -> None:
    model = small(recipe)
    ids = tokens(*size).to(model.device)
    logits = model(ids).logits
    assert logits.shape == (*size, SHAPE["vocab_size"])
    logits.float().square().mean().backward()
    assert model.embed_tokens.weight.grad.isfinite().all()


@pytest.mark.parametrize("how", ["eval", "no_grad", "generate"])
def test_a_forward_outside_training_changes_no_scale(small: Build, how: str) -> None:
    model = small("delayed", amax_compute_algo="max")
    for seed in range(3):
        step(model, tokens(seed=seed))
    before = snapshot(model)
    loud = tokens(seed=9).to(model.device)
    with torch.no_grad():
        model.embed_tokens.weight.mul_(50)
    if how == "eval":
        model.eval()(loud)
        model.train()
    elif how == "no_grad":
        with torch.no_grad():
            model(loud)
    else:
        model.generate(loud[:, :3], max_new_tokens=2)
        assert model.training
    assert before and same(before, fp8_state(model))


@torch.no_grad()
@pytest.mark.parametrize("recipe", list_recipes())
def test_last_logits_equal_those_of_a_full_pass(recipe: str) -> None:
    model = build_kind(
        KINDS["attention"], recipe, dtype=torch.float32 if recipe == "bf16" else torch.bfloat16
    ).eval()
    ids = tokens_of(model, 2, 9)
    whole = model(ids).logits
    for kept in (1, 3, 20):
        torch.testing.assert_close(
            model(ids, logits_to_keep=kept).logits, whole[:, -kept:], atol=1e-5, rtol=0
        )
    assert model(ids, labels=ids, logits_to_keep=1).logits.shape == whole.shape


def test_positions_count_from_the_start_of_each_document() -> None:
    """RoPE is relative, so no logit of FP32 would tell; the BF16 rounding of its tables would."""
    model, lengths = build_kind(KINDS["attention"]), (3, 9, 2, 10)
    ids = tokens_of(model, 1)

    def described(tokens: torch.Tensor, documents: torch.Tensor | None = None) -> ForwardContext:
        recompute = Recompute("none", model.te, model.te_recipe, 4)
        how = (recompute, model.kernels, model.fp8_layers, model.dtype)
        autocasts = Autocasts(model.te, model.te_recipe, None, {})
        return forward_context(model.specs, tokens, None, None, documents, *how, autocasts)

    together = described(
        ids, torch.repeat_interleave(torch.tensor((7, 8, 9, 7)), torch.tensor(lengths))[None]
    )
    tables = together.rotary[model.config.rope][0][0].split(lengths)
    for own, table in zip(ids.split(lengths, 1), tables, strict=True):
        assert_same_bits("cos of RoPE", table, described(own).rotary[model.config.rope][0])
    assert list(described(ids).masks.values()) == [None], "without documents: the causal kernel"


def _loss(model: CausalLM, ids: torch.Tensor) -> torch.Tensor:
    return model(ids, labels=ids).loss


def _logits(model: CausalLM, ids: torch.Tensor) -> torch.Tensor:
    return model(ids).logits.float().square().mean()


def _hidden_states(model: CausalLM, ids: torch.Tensor) -> torch.Tensor:
    wrapped = TEModelsForCausalLM.wrap(model)
    return wrapped(ids, output_hidden_states=True).hidden_states[-1].float().square().mean()


@pytest.mark.parametrize("start", [_loss, _logits, _hidden_states])
@pytest.mark.parametrize("mode", ["none", "full"])
def test_second_derivatives_are_refused_in_a_line(
    small: Build, mode: str, start: Callable[[CausalLM, torch.Tensor], torch.Tensor]
) -> None:
    model = small("delayed", activation_checkpointing=mode)
    ids = tokens().to(model.device)
    # Autograd's own message would be about views that were changed in place.
    with pytest.raises(UsageError, match=r"^create_graph=True asks for derivatives of the grad"):
        torch.autograd.grad(
            start(model, ids), list(model.parameters()), create_graph=True, allow_unused=True
        )
    start(model, ids).backward()  # the error leaves the model as it was
