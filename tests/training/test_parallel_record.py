"""Two processes record what one does: sums over both, each copy once; they skip, rewind and capture together."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed_job import alone, digest, make_trainer, solo, start

from te_models.inspect.against import verify_against
from te_models.inspect.replay import replay
from te_models.recorder.record import read_record
from te_models.training.captures import Marks, captured_steps, write_marks
from te_models.training.metrics import read_events, read_metrics
from te_models.training.parallel import Parallel

pytestmark = pytest.mark.slow  # ten runs in two processes

RECORD = dict(record=1, steps=2, save_every=2)
RUNS: dict[str, dict[str, Any]] = {
    "ddp-delayed": dict(parallel="ddp", recipe="delayed"),
    "ddp-accumulating": dict(parallel="ddp", recipe="delayed", gradient_accumulation=2),
    "fsdp-delayed": dict(parallel="fsdp", recipe="delayed", mode="full"),
    "fsdp-fp8": dict(parallel="fsdp", recipe="delayed", fp8_params=True),
    "tp-delayed": dict(parallel="tp", recipe="delayed"),
    "tp-tokens": dict(parallel="tp", recipe="delayed", sequence_parallel=True),
    "experts": dict(parallel="fsdp+ep", recipe="delayed", experts=True),
}
GUARDED = {
    "skip-ddp": dict(parallel="ddp", recipe="delayed", on_nan="skip", steps=5),
    "rewind-ddp": dict(parallel="ddp", recipe="delayed", on_nan="rewind", steps=5, save_every=1),
    "rewind-fsdp": dict(parallel="fsdp", recipe="current", on_nan="rewind", steps=5, save_every=1),
}


def guarded(shared: Parallel, root: Path, name: str) -> list[str]:
    """A run in which the loss of the last process is NaN once; returns a hash of each one's weights."""
    case = GUARDED[name] if shared.ranks.world > 1 else alone(GUARDED[name])
    run = make_trainer(shared, root / name, case)
    forward = run.passes.train_model

    def spoiled(**batch: Any) -> Any:
        run.passes.train_model = forward
        output = forward(**batch)
        return output._replace(loss=output.loss * float("nan"))

    def on_step(row: dict[str, Any]) -> None:
        if row["step"] == 2 and shared.ranks.rank == shared.ranks.world - 1 and not bad:
            bad.append(True)
            run.passes.train_model = spoiled

    bad: list[bool] = []
    run.on_step = on_step
    run.run()
    return shared.ranks.gather(digest(run.model))


def captured(shared: Parallel, root: Path) -> list[str]:
    """A run whose third step is captured."""
    out = root / "captured"
    if shared.ranks.first:
        write_marks(out, Marks((3,)))
    shared.ranks.gather(None)
    run = make_trainer(shared, out, dict(parallel="fsdp", recipe="delayed", steps=4))
    run.run()
    return []


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    runs = {name: {**case, **RECORD} for name, case in RUNS.items()}
    policies = {name: partial(guarded, name=name) for name in GUARDED}
    found = start(folder, 2, {**runs, **policies, "captured": captured})
    for name in found:
        assert found[name] is not None
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_record_what_one_does(name: str, root: Path, tmp_path: Path) -> None:
    solo(tmp_path, {**RUNS[name], **RECORD})
    two = read_record(root / name)
    one = read_record(tmp_path)
    assert two.tensors == one.tensors and two.steps == one.steps == [1, 2]
    weights = np.array([tensor.operand == "weight" for tensor in one.tensors])
    # Experts have their rows padded on each process.
    routed = np.array([tensor.expert is not None for tensor in one.tensors]) & ~weights
    exact = ~routed
    assert np.array_equal(two.field("elements")[:, exact], one.field("elements")[:, exact], equal_nan=True)  # fmt: skip
    for field in ("amax", "scale_min", "signal", "scale_age"):
        assert np.allclose(two.field(field), one.field(field), rtol=0.1, equal_nan=True), field
    for field in ("saturated", "flushed", "subnormal"):
        then, now = one.share(field)[:, exact], two.share(field)[:, exact]
        assert np.allclose(then, now, atol=0.01, equal_nan=True), field
    # The weights of the first step are equal in every bit, and their copies count once.
    if name != "fsdp-fp8":
        for field in ("amax", "signal", "noise", "flushed", "subnormal", "zeros"):
            then, now = one.field(field)[0, weights], two.field(field)[0, weights]
            assert np.allclose(then, now, rtol=1e-12, equal_nan=True), field


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_keep_their_card(name: str, root: Path) -> None:
    found = verify_against(root / name)
    assert found.products and found.same, found
    assert found.loss == pytest.approx(found.card.loss, rel=1e-3)


@pytest.mark.parametrize("name", GUARDED)
def test_processes_act_together(name: str, root: Path) -> None:
    path = root / name / "metrics.jsonl"
    (event,) = read_events(path)
    policy = GUARDED[name]["on_nan"]
    assert (event["step"], event["action"], event["reproduced"]) == (3, policy, False)
    steps = [row["step"] for row in read_metrics(path)]
    assert steps == ([1, 2, 4, 5] if policy == "skip" else [1, 2, 3, 4, 5])
    weights = json.loads((root / f"{name}.json").read_text())
    if GUARDED[name]["parallel"] == "ddp":
        assert weights[0] == weights[1]


@pytest.mark.parametrize("name", [name for name in GUARDED if name.startswith("rewind")])
def test_processes_rewind_to_where_one_does(name: str, root: Path, tmp_path: Path) -> None:
    guarded(Parallel(), tmp_path, name)
    two, one = ([row["loss"] for row in read_metrics(folder / name / "metrics.jsonl")]
                for folder in (root, tmp_path))  # fmt: skip
    assert two == pytest.approx(one, rel=2e-3)
    assert len(set(one)) == len(one)


def test_a_step_of_two_processes_is_replayed_by_one(root: Path) -> None:
    run = root / "captured"
    assert captured_steps(run) == [3] and read_record(run).steps == [3]
    found = replay(run, 3)
    row = read_metrics(run / "metrics.jsonl")[2]
    assert found.first.loss == pytest.approx(row["loss"], rel=1e-3)
    weights = [one for one in found.tensors if one.tensor.operand == "weight"]
    assert weights and all(one.equal for one in weights)
    assert all(one.within for one in found.tensors if one.tensor.operand == "input")
    # One process adds in another order than two: no difference speaks for a fault of the hardware.
    assert not all(one.equal for one in found.tensors) and found.repeatable
    assert found.recorded_on == "cpu, emulated, 2 processes" and "fault" not in found.verdict
