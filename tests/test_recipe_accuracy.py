"""Every recipe is as exact as its number formats allow: one product, and the logits of a model."""

from typing import Any

import pytest
import torch

import te_models.engine.emulated as te
from benchmarks import recipe_accuracy
from te_models import CausalLM, list_recipes
from te_models.config.recipe import get_recipe

QUANTIZED = [name for name in list_recipes() if name != "bf16"]
SHAPE: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4
)
SHAPE |= dict(num_key_value_heads=2, max_position_embeddings=64)


@pytest.mark.parametrize("name", QUANTIZED)
def test_one_product_has_the_noise_of_its_mantissas(name: str) -> None:
    """Both ways: less noise than the formats make would mean that nothing was rounded."""
    recipe = get_recipe(name)
    layer = te.Linear(256, 256, bias=False, params_dtype=torch.float32)
    x = torch.randn(256, 256)
    for _ in range(2):  # the second pass of delayed scaling has a scale
        with te.autocast(enabled=True, recipe=recipe.build(te)):
            y = layer(x)
    exact = x.double() @ layer.weight.double().T
    operand = recipe_accuracy.rounding_db(recipe.formats)
    slack = (
        0.3 if name != "nvfp4" else 1.0
    )  # a good part of E2M1's values are below its normal range
    assert (
        abs(recipe_accuracy.sqnr_db(exact, y.double()) - recipe_accuracy.add_db(operand, operand))
        < slack
    )


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("accuracy") / "model"
    torch.manual_seed(0)
    model = CausalLM.from_preset("gated-nano", device="cpu", engine="emulated", **SHAPE)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    ids = torch.randint(0, 256, (4, 32))
    batches = [{"input_ids": part, "labels": part} for part in ids.split(2)]
    return {
        row["recipe"]: row
        for row in recipe_accuracy.measure(folder, batches, device="cpu", engine="emulated")
    }


@pytest.mark.parametrize("name", QUANTIZED)
def test_logits_are_as_far_off_as_noise_of_that_size_makes_them(
    name: str, rows: dict[str, dict[str, Any]]
) -> None:
    assert abs(rows[name]["sqnr_db"] - rows[name]["predicted_db"]) < 1.0


def test_fewer_bits_are_worse(rows: dict[str, dict[str, Any]]) -> None:
    fp8 = [rows[name]["sqnr_db"] for name in QUANTIZED if name != "nvfp4"]
    assert rows["bf16"]["sqnr_db"] > max(fp8) + 10 and min(fp8) > rows["nvfp4"]["sqnr_db"] + 6
    printed = recipe_accuracy.table(list(rows.values()))
    assert printed.count("\n") == len(rows) + 1 and "+0.00 %" in printed
