"""Bases, ways of tuning and what becomes of them, paired at random: ids, text, logits and stops of last and first.

Each case is drawn by its number. `make test` runs the first few, the slow tests more, and TE_MODELS_SEED moves all of
them to cases that nobody has seen; benchmarks/random_tunings.py runs as many as there is time for.
"""

import importlib.util
import os
from pathlib import Path

import pytest
from random_tunings import draw, judge

pytest.importorskip("peft")

SEED = int(os.environ.get("TE_MODELS_SEED", "0"))
FEW, MANY = 4, 40
TRL = all(importlib.util.find_spec(name) for name in ("trl", "datasets"))
CASES = [pytest.param(SEED + n, marks=[] if n < FEW else [pytest.mark.slow]) for n in range(MANY)]


@pytest.mark.parametrize("number", CASES)
def test_what_becomes_of_a_tuned_model_is_the_model_that_was_tuned(
    number: int, tmp_path: Path
) -> None:
    refused = judge(draw(number), tmp_path)
    assert not any("\n" in line for line in refused.values())


@pytest.mark.slow
@pytest.mark.skipif(not TRL, reason="needs trl and datasets")
@pytest.mark.parametrize("number", range(SEED + 10_000, SEED + 10_012))
def test_with_trl_among_the_ways(number: int, tmp_path: Path) -> None:
    judge(draw(number, trl=True), tmp_path)
