"""A scheme that is added as docs/internals/design.md says goes through plans, training, saves and exports."""

import dataclasses
from pathlib import Path

import pytest
import torch

import te_models.engine.emulated.recipe as engine_recipes
from te_models import CausalLM
from te_models.config.recipe import SCHEMES, Scheme
from te_models.planning.memory_plan import plan_memory

SHAPE = dict(num_hidden_layers=4, hidden_size=64, intermediate_size=128, num_attention_heads=2)


@dataclasses.dataclass(repr=False)
class NewScaling(engine_recipes.Float8CurrentScaling):
    """A recipe class of its own name, with the quantizers of another."""


@pytest.fixture
def recipe_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The steps of the page: a row of SCHEMES, a class of the engine, a TOML file."""
    fields = dict(SCHEMES["Float8CurrentScaling"].fields)
    monkeypatch.setitem(SCHEMES, "NewScaling", Scheme(fields))
    monkeypatch.setattr(engine_recipes, "NewScaling", NewScaling, raising=False)
    path = tmp_path / "new.toml"
    path.write_text('scheme = "NewScaling"\nfp8_format = "E4M3"\n')
    return path


def test_a_new_scheme_is_planned_trained_saved_and_exported(
    recipe_file: Path, tmp_path: Path
) -> None:
    options = dict(SHAPE, engine="emulated", device="cpu")
    model = CausalLM.from_preset("gated-nano", recipe=str(recipe_file), **options)
    planned = plan_memory(model.config, model.recipe, batch_size=2, seq_len=32)
    assert max(moment.fp8_weight_copies for moment in planned.moments) > 0
    assert "new" in str(model.plan())
    tokens = torch.randint(model.config.vocab_size, (2, 32))
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    assert torch.isfinite(loss)

    model.save_pretrained(tmp_path / "saved")
    loaded = CausalLM.from_pretrained(tmp_path / "saved", engine="emulated", device="cpu")
    assert loaded.recipe.scheme == "NewScaling"
    assert torch.equal(loaded(tokens, labels=tokens).loss, loss)
    assert model.export(tmp_path / "served", format="fp8-channel").quantized
