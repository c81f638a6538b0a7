"""A scheme that is added as docs/internals/design.md says goes through plans, training, saves and exports."""

import dataclasses
from pathlib import Path

import pytest
import torch

import te_models.engine.emulated.recipe as engine_recipes
from te_models import CausalLM, get_recipe
from te_models.config.operand_layout import OperandLayout
from te_models.config.recipe import SCHEMES, Scheme
from te_models.planning.memory_plan import plan_memory
from te_models.planning.operations import operand_bytes

SHAPE = dict(num_hidden_layers=4, hidden_size=64, intermediate_size=128, num_attention_heads=2)


@dataclasses.dataclass(repr=False)
class NewScaling(engine_recipes.Float8CurrentScaling):
    """A recipe class of its own name, with the quantizers of another."""


def _copy_bytes(rows: int, columns: int, square: bool) -> int:
    return 2 * rows * columns + rows


@pytest.fixture(params=[None, OperandLayout(_copy_bytes, shared_bytes=3)], ids=["default", "own"])
def recipe_file(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Path:
    """The steps of the page: a row of SCHEMES, a class of the engine, a TOML file."""
    layout = {} if request.param is None else {"layout": request.param}
    fields = dict(SCHEMES["Float8CurrentScaling"].fields)
    monkeypatch.setitem(SCHEMES, "NewScaling", Scheme(fields, **layout))
    monkeypatch.setattr(engine_recipes, "NewScaling", NewScaling, raising=False)
    path = tmp_path / "new.toml"
    path.write_text('scheme = "NewScaling"\nfp8_format = "E4M3"\n')
    return path


def test_operands_of_a_new_scheme_take_the_bytes_of_its_layout(recipe_file: Path) -> None:
    recipe = get_recipe(recipe_file)
    if SCHEMES["NewScaling"].layout.shared_bytes == 3:
        expected = {"rowwise": 2 * 96 + 12 + 3, "columnwise": 2 * 96 + 8 + 3}
        expected["both"] = 2 * 2 * 96 + 12 + 8 + 3
    else:
        expected = {"rowwise": 96 + 4, "columnwise": 96 + 4, "both": 2 * 96 + 4}
    for copies, size in expected.items():
        assert operand_bytes(recipe, 12, 8, "w", copies) == size


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
