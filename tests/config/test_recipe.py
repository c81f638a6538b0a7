"""Recipes: the shipped files, overrides by keyword, refusals, and the engine's objects built from them."""

import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

import te_models.engine.emulated as te
from te_models import CausalLM, TrainConfig, get_recipe, list_recipes
from te_models.config.recipe import RECIPE_FIELDS, SCHEMES, Recipe, recipe_from_dict
from te_models.errors import ELSEWHERE, UsageError
from te_models.training.run_settings import _recipe

QUANTIZED = [name for name in list_recipes() if name != "bf16"]


def test_six_recipes_are_listed_in_order() -> None:
    assert list_recipes() == ["bf16", "delayed", "current", "blockwise", "mxfp8", "nvfp4"]


@pytest.mark.parametrize("name", list_recipes())
def test_a_shipped_file_says_what_it_is_for(name: str) -> None:
    text = (Path(__file__).parents[2] / "recipes" / f"{name}.toml").read_text()
    assert "# When:" in text and "# Hardware:" in text
    recipe = get_recipe(name)
    assert recipe.description and recipe.hardware
    assert set(recipe.fields) == set(SCHEMES[recipe.scheme].fields), (
        "the file gives every field of its scheme"
    )


def test_delayed_is_the_users_own() -> None:
    fields = dict(
        margin=0,
        fp8_format="HYBRID",
        amax_history_len=1024,
        amax_compute_algo="most_recent",
        reduce_amax=True,
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
            have.name
            if field == "fp8_format"
            else have or "none"
            if field == "backward_override"
            else have
        ) == value


def test_power_of_two_scales_reach_the_operands() -> None:
    # Transformer Engine takes these from the environment, whatever its constructor was told (section 1.2).
    assert (
        get_recipe("current", use_power_2_scales=True).build(te).fp8_quant_fwd_weight.power_2_scale
        is True
    )
    assert get_recipe("current").build(te).fp8_quant_bwd_grad.power_2_scale is False
    assert get_recipe("blockwise").build(te).fp8_quant_fwd_inp.power_2_scale is True
    assert (
        get_recipe("blockwise", use_f32_scales=True).build(te).fp8_quant_fwd_inp.power_2_scale
        is False
    )


@pytest.mark.parametrize("name", list_recipes())
def test_a_recipe_survives_json(name: str) -> None:
    for start, end in ((0, 0), (1, 2)):  # no layer in BF16 was the default before 2026-11-23
        recipe = get_recipe(name, num_layers_at_start_in_bf16=start, num_layers_at_end_in_bf16=end)
        saved = json.loads(json.dumps(recipe.to_dict()))
        assert recipe_from_dict(saved).to_dict() == saved == recipe.to_dict()
        assert recipe_from_dict(saved) == recipe, "texts for people are no part of it"
        assert (saved["num_layers_at_start_in_bf16"], saved["num_layers_at_end_in_bf16"]) == (
            start,
            end,
        )
        assert saved["lm_head"] == "bf16"


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("delayd", {}, "did you mean 'delayed'"),
        ("delayed", dict(amax_histroy_len=3), "did you mean 'amax_history_len'"),
        (
            "delayed",
            dict(amax_history_len=0),
            "amax_history_len=0 is out of range: give 1 or more, below 65537",
        ),
        (
            "delayed",
            dict(amax_history_len="16"),
            "amax_history_len='16' is of a wrong type: give a whole number",
        ),
        ("delayed", dict(amax_compute_algo="latest"), "choose one of max, most_recent"),
        ("delayed", dict(reduce_amax=1), "reduce_amax=1 is of a wrong type: give true or false"),
        ("current", dict(margin=1), "unknown field 'margin' of recipe 'current'"),
        ("current", dict(fp8_format="E5M2"), "choose one of E4M3, HYBRID"),
        ("blockwise", dict(x_block_scaling_dim=3), "choose one of 1, 2"),
        (
            "blockwise",
            dict(x_block_scaling_dim=2),
            "x_block_scaling_dim and w_block_scaling_dim are 2, and a GEMM",
        ),
        ("mxfp8", dict(num_layers_at_start_in_bf16=-1), "out of range: give 0 or more"),
        ("missing.toml", {}, "cannot read missing.toml: No such file"),
        (
            "delayed",
            dict(use_f32_scales=True),
            "unknown field 'use_f32_scales' of recipe 'delayed': it is a field of ",
        ),
        (
            "bf16",
            dict(amax_history_len=4),
            "field 'amax_history_len' of recipe 'bf16': it is a field of 'delayed'",
        ),
        ("tensorwise", {}, "unknown recipe 'tensorwise': give 'current'"),
        ("hybrid", {}, "fp8_format='HYBRID'"),
        ("E4M3", {}, "fp8_format='E4M3'"),
    ],
)
def test_mistakes_are_refused(name: str, change: dict, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        get_recipe(name, **change)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'scheme = "DelayedScaling"\namax_history_len = 7\nnum_layers_at_start_in_bf16 = 2\n'
    )
    recipe = get_recipe(path)
    assert (recipe.name, recipe.fields["amax_history_len"], recipe.num_layers_at_start_in_bf16) == (
        "mine",
        7,
        2,
    )
    assert get_recipe(str(path), amax_history_len=9).fields == {
        **recipe.fields,
        "amax_history_len": 9,
    }
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


QUANTIZED_SCHEMES = [scheme for scheme in SCHEMES if scheme != "none"]


@pytest.mark.parametrize("scheme", QUANTIZED_SCHEMES)
@pytest.mark.parametrize(
    "way", ["file", "table", "recipe", "engine's object", "table of a run", "recipes/"]
)
def test_the_first_and_the_last_layer_are_in_bf16_however_a_recipe_is_made(
    way: str, scheme: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f'scheme = "{scheme}"\n')
    name = next(name for name in QUANTIZED if get_recipe(name).scheme == scheme)
    recipe = {
        "file": lambda: get_recipe(path),
        "table": lambda: recipe_from_dict({"scheme": scheme}),
        "recipe": lambda: Recipe("mine", scheme),
        "engine's object": lambda: get_recipe(getattr(te.recipe, scheme)()),
        "table of a run": lambda: _recipe({"name": name}),
        "recipes/": lambda: get_recipe(name),
    }[way]()
    assert recipe.edges == dict(
        num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=1, lm_head="bf16"
    )
    model = CausalLM.from_preset("gated-nano", device="meta", engine="emulated", recipe=recipe)
    assert model.fp8_layers == range(1, 5)
    model.set_recipe(recipe)
    assert model.fp8_layers == range(1, 5)


FORMATS = dict.fromkeys(("DelayedScaling", "Float8CurrentScaling"), "E4M3/E5M2")
FORMATS |= dict.fromkeys(("Float8BlockScaling", "MXFP8BlockScaling"), "E4M3") | {
    "NVFP4BlockScaling": "E2M1"
}


@pytest.mark.parametrize("scheme", QUANTIZED_SCHEMES)
def test_a_scheme_alone_has_transformer_engines_defaults(scheme: str) -> None:
    recipe = Recipe("mine", scheme)
    assert recipe.formats == FORMATS[scheme]
    built, default = recipe.build(te), getattr(te.recipe, scheme)()
    assert repr(built) == repr(default)
    for field, value in recipe.fields.items():
        assert getattr(getattr(default, field), "name", getattr(default, field) or "none") == (
            value or "none"
        )


@pytest.mark.parametrize("given", ["hybrid", "Hybrid", "HYBRID"])
def test_a_format_in_any_case(given: str) -> None:
    assert get_recipe("delayed", fp8_format=given).fields["fp8_format"] == "HYBRID"
    assert get_recipe("delayed", fp8_format="e4m3").formats == "E4M3"


@pytest.mark.parametrize("name", ELSEWHERE)
def test_names_of_other_libraries_are_translated(name: str, tmp_path: Path) -> None:
    """As a keyword, and in a file."""
    assert name not in RECIPE_FIELDS
    path = tmp_path / "mine.toml"
    path.write_text(f'scheme = "DelayedScaling"\n{name} = 1\n')
    for make in (
        lambda: CausalLM.from_preset("gated-nano", **{name: 1}),
        lambda: CausalLM.from_pretrained("gated-nano", **{name: 1}),
        lambda: get_recipe(path),
        lambda: TrainConfig(**{name: 1}),
    ):
        with pytest.raises(UsageError, match=f"unknown (field|keyword) '{name}'") as caught:
            make()
        assert str(caught.value).endswith(ELSEWHERE[name])


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
        (with_option(te.recipe.Float8BlockScaling(), "fp8_quant_bwd_grad", te.recipe.QParams(amax_epsilon=1e-4)),
         "Float8BlockScaling.fp8_quant_bwd_grad="),
    ],
)  # fmt: skip
def test_fields_of_an_object_that_are_not_taken_are_named(recipe: Any, field: str) -> None:
    with pytest.raises(UsageError, match=f"{re.escape(field)}.*is not supported: leave it at"):
        get_recipe(recipe)


@pytest.mark.parametrize("name", QUANTIZED)
def test_the_engines_object_gives_the_recipe_back(name: str) -> None:
    recipe = get_recipe(name)
    assert get_recipe(recipe.build(te)).fields == recipe.fields
    assert pickle.loads(pickle.dumps(recipe)) == recipe
