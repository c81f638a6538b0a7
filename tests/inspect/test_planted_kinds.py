"""Failures planted in other kinds of models and in two processes: the record names the tensor, and the advice heals."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from distributed_job import start
from planted import Site
from planted_kinds import (
    DRAWN,
    MODELS,
    PROCESSES,
    Case,
    config_of,
    draw,
    fault_of,
    run_case,
    sites_of,
)

from te_models.inspect.advice import diagnose
from te_models.inspect.run_facts import read_facts
from te_models.training.parallel import Parallel

LAST = Site("layers.1.mlp.down_proj", expert=3)  # of four, which two processes share
EXPERTS = Case("experts", "NaN in one linear", "delayed", "fsdp+ep", LAST)
GRADIENTS = Case(
    "Kimi Delta Attention",
    "gradients overflow E5M2",
    "delayed",
    "one",
    Site("layers.1.self_attn.kv_b_proj"),  # of which less saturates than of what it spreads to
)
QUICK = (  # others are planted by test_advice.py
    Case("Mamba 2", "dead layer", "current", "one", Site("layers.2.mamba.out_proj")),
)
# A product of two tensors with the outlier shows it sooner.
PRODUCT = Case(
    "Mamba 2", "outlier in every block", "blockwise", "one", Site("layers.2.mamba.zxbcdt_proj")
)
NAMES = tuple(MODELS)
ALONE = (
    Case("experts", "NaN in FP8 alone", "delayed", "one", Site("layers.0.mlp.gate_up_proj", 3)),
    GRADIENTS,
    PRODUCT,
    *(
        draw(random.Random(seed), "one", failure, NAMES[seed % len(NAMES)])
        for seed, failure in enumerate(DRAWN)
    ),
)
# Weights of the last process's experts, what its own share of the batch does, and others at random.
TOGETHER = (
    EXPERTS,
    replace(EXPERTS, failure="NaN in FP8 alone", recipe="blockwise"),
    replace(EXPERTS, model="Kimi Delta Attention, experts", failure="outlier channel grows"),
    replace(EXPERTS, model="shared expert", failure="gradients overflow E5M2"),
    # Half of the batch has it, so that less than the bound saturates anywhere.
    replace(GRADIENTS, processes="fsdp", site=replace(GRADIENTS.site, last_rank=True)),
    # And the first micro-batch has a far larger scale than the second, by which the amax of the step fits.
    Case(
        "attention",
        "gradients overflow E5M2",
        "delayed",
        "fsdp",
        Site("layers.1.self_attn.qkvg_proj", last_rank=True),
        recompute="full",
        micro_batches=2,
    ),
    *(
        draw(random.Random(seed), PROCESSES[1 + seed % 3], DRAWN[seed])
        for seed in range(len(DRAWN))
    ),
)


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_the_record_names_the_tensor(case: Case, tmp_path: Path) -> None:
    run_case(Parallel(), tmp_path, case)
    assert not fault_of(case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", ALONE, ids=str)
def test_so_it_does_in_other_kinds(case: Case, tmp_path: Path) -> None:
    run_case(Parallel(), tmp_path, case)
    assert not fault_of(case, tmp_path)


def together(shared: Parallel, root: Path, case: Case, name: str) -> dict[str, Any]:
    """Run a case in this process's share of it."""
    run_case(shared, root / name, case)
    return {}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs of all cases of two processes."""
    folder = tmp_path_factory.mktemp("two")
    cases = {
        str(number): partial(together, case=case, name=str(number))
        for number, case in enumerate(TOGETHER)
    }
    found = start(folder, 2, cases)
    for name in found:
        assert found[name] == {}
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(TOGETHER)), ids=lambda number: str(TOGETHER[number]))
def test_two_processes_name_the_tensor(number: int, root: Path) -> None:
    assert not fault_of(TOGETHER[number], root / str(number))


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_healthy_models_get_no_advice(model: str, tmp_path: Path) -> None:
    site = sites_of(model, "current", fp8=True)[0]
    recipes = ["current", "blockwise"]
    # Experts get few tokens here, from none to 60 in a step: their scales of steps before saturate, which advice says.
    if config_of(model).moe is None:
        recipes.append("delayed")
    for recipe in recipes:
        out = tmp_path / recipe
        run_case(Parallel(), out, Case(model, "", recipe, "one", site))
        diagnosis = diagnose(read_facts(out / "ill"))
        assert not diagnosis.findings, diagnosis


def test_every_failure_is_planted() -> None:
    for cases in (ALONE, TOGETHER):
        assert {case.failure for case in cases} == set(DRAWN)
    assert {case.model for case in (*QUICK, *ALONE, *TOGETHER)} == set(MODELS)
    assert {case.processes for case in TOGETHER} == set(PROCESSES[1:])
