"""Adapters of a model that FSDP2 shards, with experts divided among processes or not: what one process computes."""

from pathlib import Path
from typing import Any

import pytest
from distributed_job import assert_same_checkpoints, by_one, start

pytest.importorskip("peft")

LORA = dict(rank=4, alpha=8.0)
ROWS = dict(LORA, targets=("q_proj", "v_proj", "down_proj"), dora=True)
ALL = dict(LORA, targets=("all-linear", "experts"))
SOME = dict(clip_grad_norm=0.05, save_every=2)
RUNS: dict[str, dict[str, Any]] = {
    "dense": dict(
        parallel="fsdp", recipe="delayed", lora=LORA, mode="selective", clip_grad_norm=0.05
    ),
    "in FP8": dict(
        parallel="fsdp", recipe="delayed", lora=LORA, fp8_params=True, gradient_accumulation=2
    ),
    "rows": dict(parallel="fsdp", recipe="current", lora=ROWS, fp8_params=True),
    "sharded": dict(SOME, parallel="fsdp", recipe="bf16", lora=ALL, experts=True),
    "divided": dict(SOME, parallel="fsdp+ep", recipe="bf16", lora=LORA, experts=True, answers=True),
    "divided in FP8": dict(SOME, parallel="fsdp+ep", recipe="delayed", lora=LORA, experts=True),
}
RESUMED = {"resumed": dict(RUNS["divided"], resume="divided")}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture(scope="module")
def two(root: Path) -> dict[str, Any]:
    return start(root, 2, {**RUNS, **RESUMED})


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_train_what_one_does(name: str, two: dict[str, Any], tmp_path: Path) -> None:
    expected, found = by_one(RUNS[name], tmp_path), two[name]
    close = 2e-6 if RUNS[name]["recipe"] == "bf16" else 1e-3
    for part in ("losses", "norms", "eval_loss"):
        assert found[part] == pytest.approx(expected[part], rel=close), part
    assert expected["losses"][-1] != expected["losses"][0]


def test_a_resumed_run_has_the_same_bits(two: dict[str, Any], root: Path) -> None:
    assert two["resumed"] == two["divided"]
    assert_same_checkpoints(root / "divided", root / "resumed")
