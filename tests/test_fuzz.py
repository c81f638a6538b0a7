"""Saved folders damaged at random: refused in one line, or harmless, and never a crash, a hang,
or a changed live model."""

import os
from pathlib import Path

import pytest
import torch

from benchmarks.fuzz import fuzz, load_all, run_case
from benchmarks.fuzz_kinds import KINDS, Kind, Live, make_folders

SEED = int(os.environ.get("TE_MODELS_FUZZ_SEED", 1))


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="needs Linux to measure peak memory"
)
def test_some_cases_of_every_kind(tmp_path: Path) -> None:
    """In this process: a case that fails can be run again by its number."""
    pytest.importorskip("peft")
    make_folders(tmp_path)
    live = Live(tmp_path)
    references = load_all(tmp_path, live)
    found = [run_case(tmp_path, SEED, case, live, references) for case in range(60)]
    assert not [
        f"case {number} of seed {SEED}: {case}"
        for number, case in enumerate(found)
        if "failure" in case[2]
    ]
    assert {case[0] for case in found} == set(KINDS)
    assert sum(case[2] == "refused" for case in found) > 20


@pytest.mark.slow
def test_half_a_minute_of_cases() -> None:
    found = fuzz(SEED, 10**6, budget=float(os.environ.get("TE_MODELS_FUZZ_SECONDS", 30)))
    assert not found["failures"]
    assert found["cases"] > 10


def test_a_changed_live_model_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fuzzer sees what it looks for: a loader that writes before it refuses, and one that raises another type."""
    make_folders(tmp_path)
    live = Live(tmp_path)

    def writes(folder: Path, live: Live) -> None:
        with torch.no_grad():
            live.model.norm.get_parameter("weight").add_(1)
        raise KeyError("x")

    monkeypatch.setitem(KINDS, "own, damaged", Kind("own", False, writes))
    (outcome,) = [run_case(tmp_path, 0, 1, live, {"own, damaged": None})[2]]
    assert outcome.startswith("failure: the live model changed (failure: builtins.KeyError")
