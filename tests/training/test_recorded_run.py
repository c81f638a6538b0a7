"""Training with the recorder: no bit changes, and its record is that of the steps."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bits import assert_same_tensors
from fewer import every
from tiny_runs import losses, tiny_model, tiny_trainer

from te_models import list_recipes
from te_models.recorder.record import Record, read_record
from te_models.saving.folder import load_folder

HISTORY = dict(amax_history_len=8)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    recipe: (recipe, {}, {}) for recipe in list_recipes()
}
CASES |= {
    "recompute": ("delayed", dict(activation_checkpointing="full"), {}),
    "accumulation": ("delayed", {}, dict(gradient_accumulation=2)),
    "fp8-weights": ("current", dict(fp8_params=True), {}),
    "ahead": ("delayed", {}, dict(ahead=True)),
}
STEPS = 6


def finished(
    folder: Path, record: int, case: str, steps: int = STEPS, resume: bool = False, **fields: Any
) -> None:
    recipe, build, options = CASES[case]
    options = {**options, **fields}
    ahead = options.pop("ahead", False)
    sizes = dict(steps=steps, eval_every=3, batch_size=2, seq_len=64)
    run = tiny_trainer(tiny_model(recipe, **build), folder, record=record, **sizes, **options)
    run.ahead = ahead and run.optimizer.can_skip
    run.run(resume=resume)


def saved(folder: Path, step: int = STEPS) -> dict[str, Any]:
    path = folder / f"checkpoints/step-{step:08d}"
    content = load_folder(path, ["training", "model"], optional=["fp8_state", "fp8_weights"])
    tensors = {}
    for group, members in content.tensors.items():
        tensors |= {f"{group}.{name}": tensor for name, tensor in members.items()}
    return tensors


@pytest.mark.parametrize("case", every(2, CASES))
def test_no_bit_of_training_changes(case: str, tmp_path: Path) -> None:
    finished(tmp_path / "plain", 0, case)
    finished(tmp_path / "recorded", 2, case)
    assert losses(tmp_path / "plain") == losses(tmp_path / "recorded")
    assert_same_tensors(saved(tmp_path / "plain"), saved(tmp_path / "recorded"))
    record = read_record(tmp_path / "recorded")
    assert record.steps == [2, 4, 6] and not (tmp_path / "plain" / "record").exists()
    counted = record.counted.any(0)
    assert counted.any() == (case != "bf16")
    exact = record.sqnr()[:, counted]
    assert (exact[~(exact == float("inf"))] > 10).all()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_no_bit_of_fifty_steps_changes(case: str, tmp_path: Path) -> None:
    finished(tmp_path / "plain", 0, case, steps=50)
    finished(tmp_path / "recorded", 1, case, steps=50)
    assert losses(tmp_path / "plain") == losses(tmp_path / "recorded")
    assert_same_tensors(saved(tmp_path / "plain", 50), saved(tmp_path / "recorded", 50))
    assert read_record(tmp_path / "recorded").steps == list(range(1, 51))


def test_a_resumed_run_has_the_record_of_a_whole_one(tmp_path: Path) -> None:
    constant = dict(schedule="constant", save_every=3)
    finished(tmp_path / "whole", 2, "delayed", **constant)
    finished(tmp_path / "cut", 2, "delayed", steps=3, **constant)
    finished(tmp_path / "cut", 2, "delayed", resume=True, **constant)
    whole, cut = (read_record(tmp_path / name) for name in ("whole", "cut"))
    assert whole.steps == cut.steps == [2, 4, 6] and whole.tensors == cut.tensors
    assert np.array_equal(whole.values, cut.values) and np.array_equal(whole.codes, cut.codes)


@pytest.mark.parametrize(
    "case", [pytest.param("delayed", marks=pytest.mark.slow), "accumulation", "current"]
)
def test_the_largest_amax_between_recorded_steps_is_known_where_histories_are(
    case: str, tmp_path: Path
) -> None:
    """By a run that records each step. Under `current` nothing keeps the amaxes of steps between."""
    finished(tmp_path / "some", 3, case, steps=3, schedule="constant", warmup_steps=0)
    finished(tmp_path / "each", 1, case, schedule="constant", warmup_steps=0)
    finished(tmp_path / "some", 3, case, resume=True, schedule="constant", warmup_steps=0)
    each = read_record(tmp_path / "each")
    some = read_record(tmp_path / "some")
    assert some.steps == [3, 6]
    found = some.field("amax_between")
    ages = some.field("amax_between_age")
    if case == "current":
        assert np.isnan(found).all() and np.isnan(ages).all()
        return
    assert np.isnan(each.field("amax_between")).all()  # there is no step between
    counted = some.counted.all(0)
    assert counted.sum() == each.counted.all(0).sum() > 0
    amax = each.field("amax")[:, counted]
    for row, (first, last) in enumerate([(0, 2), (3, 5)]):
        assert np.array_equal(found[row, counted], amax[first:last].max(0))
        newest_first = amax[first:last][::-1]
        assert np.array_equal(ages[row, counted], 1 + newest_first.argmax(0))
    assert ages_by_amaxes(each) > 0.4 * counted.sum() * (STEPS - 1)


def ages_by_amaxes(record: Record) -> int:
    """Hold the age of each scale against the newest amax that gives this scale; return how many have one."""
    largest = np.where(record.field("format") == 8, 57344.0, 448.0)
    amax = record.field("amax")
    held = 0
    for step in range(1, len(record.steps)):
        used = largest[step] / record.field("scale_min")[step]
        for tensor in np.flatnonzero(record.counted[step]):
            newest_first = amax[:step, tensor][::-1]
            same = np.flatnonzero(np.isclose(newest_first, used[tensor], rtol=1e-5))
            if len(same):  # else of the calibration before the first step
                assert record.field("scale_age")[step, tensor] == 1 + same[0], (step, tensor)
                held += 1
    return held
