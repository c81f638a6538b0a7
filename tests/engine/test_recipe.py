"""The emulated engine's recipe classes: fields, defaults, checks, keys."""

import copy
import dataclasses
import importlib.util
import sys
from typing import Any

import pytest

from te_models.engine.emulated import recipe as R

DEFAULTS: dict[type, dict[str, Any]] = {
    R.DelayedScaling: dict(
        margin=0, fp8_format=R.Format.HYBRID, amax_history_len=1024, amax_compute_algo="max",
        scaling_factor_compute_algo=None, reduce_amax=True, fp8_dpa=False, fp8_mha=False, backward_override=None,
    ),
    R.Float8CurrentScaling: dict(
        use_power_2_scales=False, fp8_format=R.Format.HYBRID, fp8_gemm_fprop=R.MMParams(False),
        fp8_gemm_dgrad=R.MMParams(True), fp8_gemm_wgrad=R.MMParams(True), fp8_dpa=False, fp8_mha=False,
        backward_override=None,
    ),
    R.Float8BlockScaling: dict(
        use_f32_scales=False, fp8_format=R.Format.E4M3, x_block_scaling_dim=1, w_block_scaling_dim=2,
        grad_block_scaling_dim=1, fp8_gemm_fprop=R.MMParams(True), fp8_gemm_dgrad=R.MMParams(True),
        fp8_gemm_wgrad=R.MMParams(True), fp8_dpa=False, fp8_mha=False, backward_override=None,
    ),
    R.MXFP8BlockScaling: dict(
        margin=0, fp8_format=R.Format.E4M3, fp8_dpa=False, fp8_mha=False, backward_override=None,
        enable_2d_quantization=False,
    ),
    R.NVFP4BlockScaling: dict(
        disable_rht=False, disable_stochastic_rounding=False, disable_2d_quantization=False,
        fp4_format=R.Format.E2M1, fp8_format=R.Format.E4M3, fp8_dpa=False,
        fp8_mha=False, backward_override=None,
    ),
}  # fmt: skip
PREDICATES = {
    R.DelayedScaling: {"delayed", "float8_per_tensor_scaling"},
    R.Float8CurrentScaling: {"float8_current_scaling", "float8_per_tensor_scaling"},
    R.Float8BlockScaling: {"float8_block_scaling"},
    R.MXFP8BlockScaling: {"mxfp8"},
    R.NVFP4BlockScaling: {"nvfp4"},
}
classes = pytest.mark.parametrize("cls", DEFAULTS)


@classes
def test_fields_and_defaults(cls: type) -> None:
    recipe = cls()
    assert {f.name: getattr(recipe, f.name) for f in dataclasses.fields(cls)} == DEFAULTS[cls]
    assert list(DEFAULTS[cls]) == [f.name for f in dataclasses.fields(cls)]


@classes
def test_predicates(cls: type) -> None:
    names = {name for names in PREDICATES.values() for name in names}
    assert {name for name in names if getattr(cls(), name)()} == PREDICATES[cls]
    assert {name for name in names if getattr(cls, name)()} == PREDICATES[cls]


def test_formats() -> None:
    values = {f.name: tuple(f.value) for f in R.Format}
    assert values == {
        "E2M1": (6, 6),
        "E4M3": (448, 448),
        "E5M2": (57344, 57344),
        "HYBRID": (448, 57344),
    }
    assert R.Format.HYBRID.value.max_bwd == 57344


@classes
def test_unknown_fields_name_the_nearest_one(cls: type) -> None:
    field = next(iter(DEFAULTS[cls]))
    with pytest.raises(
        ValueError, match=f"unknown field '{field}x' of {cls.__name__}: did you mean '{field}'"
    ):
        cls(**{field + "x": 1})


def test_class_attributes_are_not_fields() -> None:
    with pytest.raises(ValueError, match="assign it to the recipe after construction"):
        R.Float8CurrentScaling(fp8_quant_fwd_inp=R.QParams(power_2_scale=True))
    recipe = R.Float8CurrentScaling()
    recipe.fp8_quant_fwd_inp = R.QParams(power_2_scale=True)
    assert not R.Float8CurrentScaling().fp8_quant_fwd_inp.power_2_scale
    assert repr(recipe) != repr(R.Float8CurrentScaling())
    assert recipe == R.Float8CurrentScaling()


def test_constructor_options_do_not_change_the_operands() -> None:
    assert not R.Float8CurrentScaling(use_power_2_scales=True).fp8_quant_fwd_inp.power_2_scale
    assert R.Float8BlockScaling(use_f32_scales=True).fp8_quant_fwd_weight.power_2_scale


def test_values_are_coerced_where_nothing_is_lost() -> None:
    recipe = R.DelayedScaling(margin=2.0, amax_history_len="16", reduce_amax=1)
    assert (recipe.margin, recipe.amax_history_len, recipe.reduce_amax) == (2, 16, True)
    assert isinstance(recipe.margin, int) and isinstance(recipe.amax_history_len, int)


BAD: list[tuple[type, dict[str, Any], str]] = [
    (R.DelayedScaling, {"margin": 1.5}, "DelayedScaling.margin must be of type int, not 1.5"),
    (R.DelayedScaling, {"margin": "two"}, "must be of type int"),
    (R.DelayedScaling, {"fp8_format": "HYBRID"}, "must be of type Format"),
    (R.DelayedScaling, {"reduce_amax": "no"}, "must be of type bool"),
    (R.DelayedScaling, {"fp8_format": R.Format.E5M2}, "Pure E5M2 training is not supported."),
    (R.DelayedScaling, {"amax_history_len": 0}, "amax_history_len must be at least 1"),
    (
        R.DelayedScaling,
        {"amax_compute_algo": "mxa"},
        "unknown amax_compute_algo 'mxa': did you mean 'max'",
    ),
    (
        R.DelayedScaling,
        {"scaling_factor_compute_algo": max},
        "scaling_factor_compute_algo is not emulated",
    ),
    (
        R.DelayedScaling,
        {"backward_override": "dequantized"},
        "Delayed scaling only supports backward_override=None.",
    ),
    (
        R.Float8CurrentScaling,
        {"backward_override": "fp32"},
        "NVTE_BACKWARD_OVERRIDE must be unset or one of",
    ),
    (R.Float8CurrentScaling, {"fp8_format": R.Format.E5M2}, "Pure E5M2"),
    (R.Float8CurrentScaling, {"fp8_gemm_fprop": True}, "must be of type MMParams"),
    (R.Float8BlockScaling, {"x_block_scaling_dim": 3}, "Only 1D or 2D blocks supported for x"),
    (R.Float8BlockScaling, {"x_block_scaling_dim": 2}, "2D by 2D block gemm not supported."),
    (R.Float8BlockScaling, {"grad_block_scaling_dim": 2}, "2D by 2D block gemm not supported."),
    (
        R.Float8BlockScaling,
        {"fp8_gemm_dgrad": R.MMParams(False)},
        "Split accumulator required for dgrad.",
    ),
    (
        R.Float8BlockScaling,
        {"fp8_dpa": True},
        "FP8 attention is not supported for Float8BlockScaling.",
    ),
    (R.MXFP8BlockScaling, {"fp8_format": R.Format.E5M2}, "Pure E5M2"),
    (
        R.NVFP4BlockScaling,
        {"fp4_format": R.Format.E4M3},
        "Only E2M1 is supported for NVFP4 scaling",
    ),
    (
        R.NVFP4BlockScaling,
        {"fp8_format": R.Format.HYBRID},
        "Only E4M3 is supported for NVFP4 scaling",
    ),
    (
        R.NVFP4BlockScaling,
        {"nvfp4_4over6": "all"},
        "unknown field 'nvfp4_4over6' of NVFP4BlockScaling",
    ),
]


@pytest.mark.parametrize(("cls", "fields", "message"), BAD)
def test_bad_values(cls: type, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        cls(**fields)
    assert "\n" not in str(raised.value)


def test_nvfp4_derives_operands() -> None:
    r = R.NVFP4BlockScaling()
    assert r.fp4_quant_fwd_inp == R.QParams(random_hadamard_transform=True)
    assert r.fp4_quant_fwd_weight == R.QParams(fp4_2d_quantization=True)
    assert r.fp4_quant_bwd_grad == R.QParams(
        random_hadamard_transform=True, stochastic_rounding=True
    )
    r = R.NVFP4BlockScaling(
        disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True
    )
    assert r.fp4_quant_fwd_inp == r.fp4_quant_fwd_weight == r.fp4_quant_bwd_grad == R.QParams()


def test_repr_is_the_registry_key() -> None:
    assert repr(R.DelayedScaling(margin=1)) == (
        "recipe_type=DelayedScaling, margin=1, format=HYBRID, amax_history_len=1024, reduce_amax=True, fp8_dpa=False, "
        "fp8_mha=False, backward_override=None"
    )
    assert repr(R.DelayedScaling(amax_compute_algo="most_recent")) == repr(R.DelayedScaling())
    assert repr(R.MXFP8BlockScaling()) == (
        "recipe_type=MXFP8BlockScaling, margin=0, format=E4M3, backward_override=None, enable_2d_quantization=False"
    )


@classes
def test_equality_copies_and_hash(cls: type) -> None:
    recipe = cls()
    assert recipe == cls() == copy.deepcopy(recipe)
    with pytest.raises(TypeError):
        hash(recipe)


ENVIRONMENT = {
    "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": (
        "1",
        lambda R: R.Float8CurrentScaling().fp8_quant_bwd_grad.power_2_scale,
    ),
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": (
        "1",
        lambda R: not R.Float8BlockScaling().fp8_quant_fwd_inp.power_2_scale,
    ),
    "NVTE_NVFP4_DISABLE_RHT": (
        "1",
        lambda R: not R.NVFP4BlockScaling().fp4_quant_fwd_inp.random_hadamard_transform,
    ),
    "NVTE_BACKWARD_OVERRIDE": (
        "dequantized",
        lambda R: R.MXFP8BlockScaling().backward_override == "dequantized",
    ),
}


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_environment_is_read_at_import(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value, condition = ENVIRONMENT[name]
    monkeypatch.setenv(name, value)
    assert condition(imported(monkeypatch))
    monkeypatch.delenv(name)
    assert not condition(imported(monkeypatch))


def imported(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the module once more, under another name."""
    found = importlib.util.spec_from_file_location("another_recipe", R.__file__)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    monkeypatch.setitem(sys.modules, "another_recipe", module)
    found.loader.exec_module(module)
    return module
