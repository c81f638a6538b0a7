"""Quantized weights kept from one generation to the next: used while the weights are the same, and never after."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoding import PROMPTS, build

from te_models import CausalLM
from te_models.fp8 import kept_weights
from te_models.fp8.kept_weights import te_linears
from te_models.fp8.scaling_state import delayed_states

RECIPES = ["delayed", "current", "blockwise"]


class Casts:
    """Counts how many passes had to quantize the weights, by `is_first_microbatch` of the model."""

    def __init__(self, model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        forward = type(model).forward

        def counted(model: CausalLM, *given: Any, **options: Any) -> Any:
            self.count += options.get("is_first_microbatch") is not False
            return forward(model, *given, **options)

        monkeypatch.setattr(type(model), "forward", counted)


def tokens(model: CausalLM) -> torch.Tensor:
    return model.generate(PROMPTS, max_new_tokens=4, eos_token_id=None)


def fresh(model: CausalLM) -> torch.Tensor:
    """Return the tokens of a model that has never generated, with the same weights and scales."""
    return tokens(copy.deepcopy(model))


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_next_prompt_quantizes_no_weight(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(recipe)
    wanted = fresh(model)
    casts = Casts(model, monkeypatch)
    assert torch.equal(tokens(model), wanted)
    assert casts.count == 1
    assert not any(module._fp8_workspaces for module in te_linears(model, model.te))
    for _ in range(2):
        assert torch.equal(tokens(model), wanted)
    stream = model.stream(PROMPTS, max_new_tokens=4)
    next(stream)
    stream.close()  # a reader that stops early
    assert torch.equal(tokens(model), wanted)
    assert casts.count == 1


def weight(model: CausalLM) -> torch.nn.Parameter:
    return model.layers[2].mlp.down_proj.weight


def edit_in_place(model: CausalLM) -> None:
    with torch.no_grad():
        weight(model)[0, 0] += 300.0


def edit_a_view(model: CausalLM) -> None:
    weight(model).detach()[:, 1].mul_(-30)


def merge_by_data(model: CausalLM) -> None:
    """As peft merges an adapter."""
    weight(model).data += torch.randn_like(weight(model))


def replace_data(model: CausalLM) -> None:
    weight(model).data = torch.randn_like(weight(model))


def replace_parameter(model: CausalLM) -> None:
    model.layers[2].mlp.down_proj.weight = torch.nn.Parameter(torch.randn_like(weight(model)))


def load(model: CausalLM) -> None:
    state = {
        name: value.clone() for name, value in model.state_dict().items() if "_extra" not in name
    }
    state["layers.2.mlp.down_proj.weight"] *= -30
    model.load_state_dict(state, strict=False)


def load_by_assignment(model: CausalLM) -> None:
    state = {"layers.2.mlp.down_proj.weight": torch.randn_like(weight(model))}
    model.load_state_dict(state, strict=False, assign=True)


def step(model: CausalLM) -> None:
    """An optimizer's step after a pass in evaluation mode, which does not count as training."""
    ids = torch.randint(0, 256, (2, 16))
    optimizer = torch.optim.SGD([weight(model)], lr=300.0)
    model(ids, labels=ids).loss.backward()
    optimizer.step()


def change_recipe(model: CausalLM) -> None:
    model.set_recipe("current", fp8_format="E4M3")


CHANGES: list[Callable[[CausalLM], None]] = [
    edit_in_place,
    edit_a_view,
    merge_by_data,
    replace_data,
    replace_parameter,
    load,
    load_by_assignment,
    step,
    change_recipe,
]


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_quantized_again(
    change: Callable[[CausalLM], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("current").eval()
    tokens(model)
    change(model)
    casts = Casts(model, monkeypatch)
    found = tokens(model)
    assert casts.count == 1
    assert torch.equal(found, fresh(model))


def test_a_changed_scale_quantizes_again() -> None:
    """Under delayed scaling a weight is cast by its scale, which a checkpoint or a calibration may change alone."""
    model = build("delayed").eval()
    tokens(model)
    for state in delayed_states(model, ("scaling_fwd",)).values():
        state.scale[1] *= 4096  # of the weight: most values saturate
    found = model(torch.tensor(PROMPTS[:1])).logits[:, -1].argmax(-1)
    assert torch.equal(tokens(model), fresh(model))
    assert torch.equal(model.generate(PROMPTS[:1], max_new_tokens=1)[:, -1], found)


def test_a_training_pass_frees_them() -> None:
    model = build("current")
    tokens(model)
    assert model in kept_weights._KEPT
    ids = torch.randint(0, 256, (2, 16))
    model.train()(ids, labels=ids).loss.backward()
    assert model not in kept_weights._KEPT
    tokens(model)  # a sample between two steps, which keeps nothing
    assert model not in kept_weights._KEPT
    tokens(model.eval())
    assert model in kept_weights._KEPT


def test_a_conversion_and_the_end_of_a_model_free_them() -> None:
    model = build("current")
    tokens(model)
    model.to(torch.float32)
    assert model not in kept_weights._KEPT
    tokens(model)
    sample = weakref.ref(kept_weights._KEPT[model].source.sample[0])
    del model
    gc.collect()
    assert sample() is None


def test_a_failed_generation_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("current")
    wanted = fresh(model)

    def fails(*given: Any, **options: Any) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(model.layers[2].mlp, "forward", fails)
        patched.setattr(model.layers[2].mlp, "hidden", fails)
        with pytest.raises(RuntimeError, match="no memory"):
            tokens(model)
    assert model not in kept_weights._KEPT
    assert torch.equal(tokens(model), wanted)


def test_stored_fp8_weights_are_compared_by_their_data() -> None:
    """The emulated engine keeps what its products derive from them."""
    model = build("current", fp8_params=True).eval()
    tokens(model)
    data = model.layers[2].mlp.down_proj.weight._data
    data.copy_(data.flip(0))
    assert torch.equal(tokens(model), fresh(model))
