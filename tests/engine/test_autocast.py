"""The autocast context and what surrounds it: nesting, refusals, availability, deprecated names."""

import threading

import pytest
import torch
from bits import assert_same_bits

import te_models.engine.emulated as te
from te_models.engine.emulated import recipe as R

Manager = te.FP8GlobalStateManager


@pytest.mark.parametrize("scheme", ["fp8", "mxfp8", "fp8_block_scaling", "nvfp4"])
def test_everything_is_available(scheme: str) -> None:
    check = getattr(te, f"is_{scheme}_available")
    assert check() is True and check(return_reason=True) == (True, "")


def test_default_recipe() -> None:
    assert te.get_default_recipe() == R.MXFP8BlockScaling()


@pytest.mark.parametrize(
    ("recipe", "rows"),
    [
        (R.DelayedScaling(), 16),
        (R.Float8CurrentScaling(), 16),
        (R.Float8BlockScaling(), 16),
        (R.MXFP8BlockScaling(), 32),
        (R.NVFP4BlockScaling(), 128),
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


def test_an_autocast_is_reusable_but_not_nested_in_itself() -> None:
    context = te.autocast(recipe=R.Float8CurrentScaling())
    for _ in range(2):
        with context:
            message = "autocast context manager cannot be entered more than once concurrently"
            with pytest.raises(RuntimeError, match=message), context:
                pass
    with pytest.raises(TypeError):
        context(lambda: None)  # type: ignore[operator]


def test_the_deprecated_name() -> None:
    with pytest.warns(DeprecationWarning, match="fp8_autocast is deprecated"):
        context = te.fp8_autocast(enabled=True, fp8_recipe=R.MXFP8BlockScaling())
    with context:
        assert Manager.get_fp8_recipe() == R.MXFP8BlockScaling()


def test_calibration_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="calibrating=True is not emulated"):
        te.autocast(enabled=False, calibrating=True)


def test_the_state_belongs_to_the_thread() -> None:
    seen: list[bool] = []

    def look() -> None:
        seen.append(Manager.is_fp8_enabled())
        with te.autocast(recipe=R.MXFP8BlockScaling()):
            seen.append(Manager.is_fp8_enabled())

    with te.autocast(recipe=R.Float8CurrentScaling()):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert Manager.get_fp8_recipe() == R.Float8CurrentScaling()
    assert seen == [False, True] and not Manager.is_fp8_enabled()


def test_an_exception_updates_no_scale_and_leaves_no_amax() -> None:
    m, recipe = te.Linear(32, 32, params_dtype=torch.bfloat16), R.DelayedScaling(amax_history_len=4)
    x = torch.ones(32, 32, dtype=torch.bfloat16)
    with te.autocast(recipe=recipe):
        m(x)
    state = m.fp8_meta["scaling_fwd"]
    before = state.scale.clone(), state.amax_history.clone()
    with pytest.raises(ZeroDivisionError), te.autocast(recipe=recipe):
        m(1000 * x)
        raise ZeroDivisionError
    assert_same_bits("scale", state.scale, before[0])
    assert_same_bits("amax_history", state.amax_history, before[1])
