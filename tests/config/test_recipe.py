"""Recipes: the shipped files, overrides by keyword, refusals, and the engine's objects built from them."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

import te_models.engine.emulated as te
from te_models import get_recipe, list_recipes
from te_models.config.recipe import SCHEMES, recipe_from_dict

QUANTIZED = [name for name in list_recipes() if name != "bf16"]


def test_six_recipes_are_listed_in_order() -> None:
    assert list_recipes() == ["bf16", "delayed", "current", "blockwise", "mxfp8", "nvfp4"]


@pytest.mark.parametrize("name", list_recipes())
def test_a_shipped_file_says_what_it_is_for(name: str) -> None:
    text = (Path(__file__).parents[2] / "recipes" / f"{name}.toml").read_text()
    assert "# When:" in text and "# Hardware:" in text
    recipe = get_recipe(name)
    assert recipe.description and recipe.hardware
    assert set(recipe.fields) == set(SCHEMES[recipe.scheme].fields), "the file gives every field of its scheme"


def test_delayed_is_the_users_own() -> None:
    fields = dict(
        margin=0, fp8_format="HYBRID", amax_history_len=1024, amax_compute_algo="most_recent", reduce_amax=True
    )
    assert get_recipe("delayed").fields == fields
    assert get_recipe("delayed").formats == "E4M3/E5M2" and get_recipe("mxfp8").formats == "E4M3"


@pytest.mark.parametrize("name", QUANTIZED)
def test_the_engine_gets_every_value(name: str) -> None:
    recipe = get_recipe(name)
    built = recipe.build(te)
    assert type(built).__name__ == recipe.scheme
    for field, value in recipe.fields.items():
        have = getattr(built, field)
        assert (
            have.name if field == "fp8_format" else have or "none" if field == "backward_override" else have
        ) == value


@pytest.mark.parametrize("name", QUANTIZED)
def test_an_engine_object_is_read_back(name: str) -> None:
    recipe = get_recipe(name)
    assert get_recipe(recipe.build(te)).fields == recipe.fields


def test_power_of_two_scales_reach_the_operands() -> None:
    # Transformer Engine takes these from the environment, whatever its constructor was told (section 1.2).
    assert get_recipe("current", use_power_2_scales=True).build(te).fp8_quant_fwd_weight.power_2_scale is True
    assert get_recipe("current").build(te).fp8_quant_bwd_grad.power_2_scale is False
    assert get_recipe("blockwise").build(te).fp8_quant_fwd_inp.power_2_scale is True
    assert get_recipe("blockwise", use_f32_scales=True).build(te).fp8_quant_fwd_inp.power_2_scale is False


@pytest.mark.parametrize("name", list_recipes())
def test_a_recipe_survives_json(name: str) -> None:
    recipe = get_recipe(name, num_layers_at_end_in_bf16=2)
    back = recipe_from_dict(json.loads(json.dumps(recipe.to_dict())))
    assert back.to_dict() == recipe.to_dict() and back.num_layers_at_end_in_bf16 == 2


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("delayd", {}, "did you mean 'delayed'"),
        ("delayed", dict(amax_histroy_len=3), "did you mean 'amax_history_len'"),
        ("delayed", dict(amax_history_len=0), "amax_history_len=0 is too small"),
        ("delayed", dict(amax_history_len="16"), "amax_history_len='16': give a whole number"),
        ("delayed", dict(amax_compute_algo="latest"), "'most_recent', 'max'"),
        ("delayed", dict(reduce_amax=1), "reduce_amax=1: give true or false"),
        ("current", dict(margin=1), "unknown field 'margin' of recipe 'current'"),
        ("current", dict(fp8_format="E5M2"), "'HYBRID', 'E4M3'"),
        ("blockwise", dict(x_block_scaling_dim=3), "choose one of 1, 2"),
        ("bf16", dict(amax_history_len=4), "unknown field 'amax_history_len' of recipe 'bf16'"),
        ("mxfp8", dict(num_layers_at_start_in_bf16=-1), "too small"),
        ("mxfp8", dict(lm_head="fp8"), "needs num_layers_at_end_in_bf16=0"),
        ("missing.toml", {}, "cannot read missing.toml: No such file"),
    ],
)
def test_mistakes_are_refused_in_one_line(name: str, change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=".") as error:
        get_recipe(name, **change)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('scheme = "DelayedScaling"\namax_history_len = 7\nnum_layers_at_start_in_bf16 = 2\n')
    recipe = get_recipe(path)
    assert (recipe.name, recipe.fields, recipe.num_layers_at_start_in_bf16) == ("mine", {"amax_history_len": 7}, 2)
    assert get_recipe(str(path), amax_history_len=9).fields == {"amax_history_len": 9}
    for text, message in (
        ("scheme = ", "is not TOML"),
        ("scheme = []", "description and hardware are text, not"),
        ('scheme = "none"\nname = 1', "description and hardware are text, not 1"),
        ("margin = 1", "needs scheme"),
        ('scheme = "Delayed"', "DelayedScaling"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            get_recipe(path)


@pytest.mark.parametrize(
    ("scheme", "formats"),
    [
        ("DelayedScaling", "E4M3/E5M2"),
        ("Float8CurrentScaling", "E4M3/E5M2"),
        ("Float8BlockScaling", "E4M3"),
        ("MXFP8BlockScaling", "E4M3"),
        ("NVFP4BlockScaling", "E2M1"),
    ],
)
def test_a_file_without_a_format_states_the_engines_default(scheme: str, formats: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f'scheme = "{scheme}"\n')
    recipe = get_recipe(path)
    assert recipe.formats == formats == recipe_from_dict(recipe.to_dict()).formats
    built = recipe.build(te)
    assert "E5M2" in formats or built.fp8_format != te.recipe.Format.HYBRID
    if scheme != "NVFP4BlockScaling":
        assert recipe.to_dict()["fp8_format"] == built.fp8_format.name


@pytest.mark.parametrize("given", ["hybrid", "Hybrid", "HYBRID"])
def test_a_format_in_any_case(given: str) -> None:
    assert get_recipe("delayed", fp8_format=given).fields["fp8_format"] == "HYBRID"
    assert get_recipe("delayed", fp8_format="e4m3").formats == "E4M3"


@pytest.mark.parametrize("name", ["mxfp8", "MXFP8", "nvfp4"])
def test_a_recipe_in_place_of_a_format(name: str) -> None:
    with pytest.raises(ValueError, match=f"use recipe='{name.lower()}'"):
        get_recipe("current", fp8_format=name)


def with_option(recipe: Any, name: str, value: Any) -> Any:
    setattr(recipe, name, value)
    return recipe


@pytest.mark.parametrize(
    ("recipe", "field"),
    [
        (te.recipe.DelayedScaling(fp8_dpa=True), "DelayedScaling.fp8_dpa=True"),
        (te.recipe.MXFP8BlockScaling(fp8_mha=True), "MXFP8BlockScaling.fp8_mha=True"),
        (with_option(te.recipe.DelayedScaling(), "scaling_factor_compute_algo", max), "scaling_factor_compute_algo="),
        (te.recipe.Float8CurrentScaling(fp8_gemm_fprop=te.recipe.MMParams(True)), "fp8_gemm_fprop="),
        (
            with_option(te.recipe.Float8BlockScaling(), "fp8_quant_bwd_grad", te.recipe.QParams(amax_epsilon=1e-4)),
            "Float8BlockScaling.fp8_quant_bwd_grad=",
        ),
    ],
)
def test_fields_of_an_object_that_are_not_taken_are_named(recipe: Any, field: str) -> None:
    with pytest.raises(ValueError, match="is not supported: leave it at") as raised:
        get_recipe(recipe)
    assert field in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("name", [name for name in list_recipes() if name != "bf16"])
def test_the_engines_object_gives_the_recipe_back(name: str) -> None:
    recipe = get_recipe(name)
    assert get_recipe(recipe.build(te)).fields == recipe.fields
    assert pickle.loads(pickle.dumps(recipe)) == recipe
