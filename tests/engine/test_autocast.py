"""The autocast context and what surrounds it: nesting, refusals, availability, deprecated names."""

from __future__ import annotations

import pytest
import torch

import te_models.engine.emulated as te
from te_models.engine.emulated import recipe as R

Manager = te.FP8GlobalStateManager
AVAILABLE = {
    "fp8": te.is_fp8_available,
    "mxfp8": te.is_mxfp8_available,
    "fp8_block_scaling": te.is_fp8_block_scaling_available,
    "nvfp4": te.is_nvfp4_available,
}
NEEDS: list[tuple[str, R.Recipe]] = [
    ("fp8", R.DelayedScaling()),
    ("fp8", R.Float8CurrentScaling()),
    ("mxfp8", R.MXFP8BlockScaling()),
    ("fp8_block_scaling", R.Float8BlockScaling()),
    ("nvfp4", R.NVFP4BlockScaling()),
]


def test_everything_is_available() -> None:
    assert all(check() is True and check(return_reason=True) == (True, "") for check in AVAILABLE.values())


@pytest.mark.parametrize(("kind", "recipe"), NEEDS)
def test_a_missing_format_is_refused_with_its_reason(kind: str, recipe: R.Recipe) -> None:
    with te.set_support(**{kind: "needs a newer GPU"}):
        assert AVAILABLE[kind]() is False and AVAILABLE[kind](return_reason=True) == (False, "needs a newer GPU")
        with pytest.raises((RuntimeError, AssertionError), match="needs a newer GPU"), te.autocast(recipe=recipe):
            pass
        with te.autocast(enabled=False, recipe=recipe):
            pass
    # The refusal leaves nothing behind, unlike Transformer Engine's for NVFP4.
    state = Manager.quantization_state
    assert state.autocast_depth == 0 and not state.fp8_enabled
    assert AVAILABLE[kind]() is True
    with te.autocast(recipe=recipe):
        assert Manager.is_fp8_enabled()


def test_unknown_support() -> None:
    with pytest.raises(ValueError, match="unknown kind of support 'fp4'"), te.set_support(fp4="no"):
        pass


def test_default_recipe() -> None:
    assert te.get_default_recipe() == R.MXFP8BlockScaling()
    with te.set_support(mxfp8="no"):
        assert te.get_default_recipe() == R.DelayedScaling()


@pytest.mark.parametrize(
    ("recipe", "rows"),
    [
        (R.DelayedScaling(), 16),
        (R.Float8CurrentScaling(), 16),
        (R.Float8BlockScaling(), 16),
        (R.MXFP8BlockScaling(), 32),
        (R.NVFP4BlockScaling(), 128),
        (R.CustomRecipe(len, quantization_alignment=48), 48),
    ],
)
def test_alignment(recipe: R.Recipe, rows: int) -> None:
    assert te.get_align_size_for_quantization(recipe) == rows


def test_nesting_restores_the_outer_context() -> None:
    outer, inner = R.Float8CurrentScaling(), R.MXFP8BlockScaling()
    with te.autocast(recipe=outer):
        with te.autocast(enabled=False, recipe=inner):
            assert not Manager.is_fp8_enabled() and Manager.get_fp8_recipe() is inner
        assert Manager.is_fp8_enabled() and Manager.get_fp8_recipe() is outer
    assert not Manager.is_fp8_enabled()


def test_one_instance_again_but_not_within_itself() -> None:
    context = te.autocast(recipe=R.Float8CurrentScaling())
    for _ in range(2):
        with context:
            message = "autocast context manager cannot be entered more than once concurrently"
            with pytest.raises(RuntimeError, match=message), context:
                pass
    with pytest.raises(TypeError):
        context(lambda: None)  # type: ignore[operator]


def test_keys_separate_recipes_and_groups() -> None:
    group = object()
    keys = {
        Manager.get_unique_autocast_key(recipe, g)
        for recipe in (R.DelayedScaling(), R.DelayedScaling(margin=1))
        for g in (None, group)
    }
    assert len(keys) == 4
    assert Manager.get_unique_autocast_key(R.DelayedScaling(amax_compute_algo="most_recent")) in keys


def test_deprecated_names() -> None:
    with pytest.warns(DeprecationWarning, match="fp8_autocast is deprecated"):
        context = te.fp8_autocast(enabled=True, fp8_recipe=R.MXFP8BlockScaling())
    with context:
        assert Manager.get_fp8_recipe() == R.MXFP8BlockScaling()
    with pytest.warns(DeprecationWarning, match="fp8_model_init is deprecated"):
        context = te.fp8_model_init(recipe=R.Float8CurrentScaling())
    with context:
        assert isinstance(te.Linear(16, 16).weight, te.Float8Tensor)
    assert type(te.Linear(16, 16).weight) is torch.nn.Parameter


def test_calibration_without_fp8_computes_in_high_precision() -> None:
    m, x = te.Linear(16, 16), torch.randn(16, 16)
    with te.autocast(enabled=False, calibrating=True, recipe=R.DelayedScaling()):
        y = m(x)
    assert torch.equal(y, m(x))
    assert m.fp8_meta["scaling_fwd"].scale.tolist() == [1.0, 1.0, 1.0]
