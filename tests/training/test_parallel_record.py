"""Two processes record what one does: sums over both, each copy once; they skip, rewind and capture together."""

import json
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed_job import alone, digest, make_trainer, solo, start
from ranks import run_process
from tiny_runs import PRETRAIN

from te_models.config.recipe import get_recipe
from te_models.errors import TeModelsError
from te_models.inspect import replay_processes
from te_models.inspect.against import verify_against
from te_models.inspect.replay import replay
from te_models.inspect.replay_processes import run_share, start_processes, write_job
from te_models.recorder.record import read_record
from te_models.training.captures import Marks, captured_steps, write_marks
from te_models.training.metrics import read_events, read_metrics
from te_models.training.parallel import Parallel
from te_models.training.trainer import Trainer

pytestmark = pytest.mark.slow  # sixteen runs in two processes

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

CAPTURED: dict[str, dict[str, Any]] = {
    "replay-fsdp": dict(parallel="fsdp", recipe="delayed", gradient_accumulation=2),
    "replay-ddp": dict(parallel="ddp", recipe="current"),
    "replay-random": dict(parallel="fsdp", recipe="nvfp4"),  # of numbers that differ by process
    "replay-fp8": dict(parallel="fsdp", recipe="current", fp8_params=True),
    "replay-adapters": dict(
        parallel="ddp", recipe="current", gradient_accumulation=2, folder=True,
        lora=dict(rank=4, alpha=8.0, dropout=0.1),
    ),
    # Gradients are summed over the processes in the adapters' own dtype.
    "replay-bf16-adapters": dict(
        parallel="ddp", recipe="current", dtype="bfloat16", folder=True, lora=dict(rank=4, alpha=8.0)
    ),
    "replay-tokens": dict(parallel="fsdp", recipe="blockwise", context_parallel_size=2),
    "replay-layers": dict(parallel="tp", recipe="current", sequence_parallel=True),
    "replay-lengths": dict(parallel="ddp", recipe="current", gradient_accumulation=2),
    "replay-experts": dict(parallel="fsdp+ep", recipe="current", experts=True),
}  # fmt: skip


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


def of_any_length(rank: int) -> list[dict[str, torch.Tensor]]:
    """Batches of a process, whose lengths are others in the other process."""
    generator = torch.Generator().manual_seed(rank)
    batches = []
    for number in range(8):
        length = 16 * (1 + (number + rank) % 2)
        ids = torch.randint(0, 250, (2, length), generator=generator)
        batches.append(dict(input_ids=ids, labels=ids.clone()))
    return batches


def captured(shared: Parallel, root: Path, name: str) -> list[str]:
    """A run whose third step is captured, and that step again, twice and in BF16, in the same processes."""
    out = root / name
    if shared.ranks.first:
        write_marks(out, Marks((3,)))
    shared.ranks.gather(None)
    run = make_trainer(shared, out, {**CAPTURED[name], "steps": 4})
    if name == "replay-lengths":
        batches = of_any_length(shared.ranks.rank)
        run = Trainer(run.model, batches, None, run.config, out, parallel=run.parallel)
    run.run()
    job = root / f"{name}-job"
    if shared.ranks.first:
        job.mkdir()
        recipes = [run.model.recipe, run.model.recipe, get_recipe("bf16")]
        write_job(job, out, 3, recipes, device="cpu", engine="emulated")
    shared.ranks.gather(None)
    run_share(job, run.parallel)
    return []


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    runs = {name: {**case, **RECORD} for name, case in RUNS.items()}
    policies = {name: partial(guarded, name=name) for name in GUARDED}
    steps = {name: partial(captured, name=name) for name in CAPTURED}
    found = start(folder, 2, {**runs, **policies, **steps})
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


@pytest.mark.parametrize("name", CAPTURED)
def test_a_step_of_two_processes_comes_out_bit_for_bit(
    name: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copied(folder: Path, processes: int) -> None:
        assert processes == 2
        shutil.copytree(root / f"{name}-job", folder, dirs_exist_ok=True)

    monkeypatch.setattr(replay_processes, "start_processes", copied)
    run = root / name
    assert captured_steps(run) == [3] and read_record(run).steps == [3]
    found = replay(run, 3, recipes=["bf16"])
    row = read_metrics(run / "metrics.jsonl")[2]
    assert found.first.loss == row["loss"]
    assert found.first.grad_norm == pytest.approx(row["grad_norm"], rel=1e-6)
    assert found.repeatable and found.tensors
    assert [one.tensor.name for one in found.tensors if not one.equal] == []
    assert found.recorded_on == found.place == "cpu, emulated, 2 processes"
    assert found.verdict.endswith("the step does the same again")
    (other,) = found.variants
    assert other.finite and other.loss == pytest.approx(row["loss"], rel=0.02)


@pytest.mark.parametrize("name", CAPTURED)
def test_a_step_of_two_processes_is_replayed_by_one(name: str, root: Path) -> None:
    found = replay(root / name, 3, one_process=True)
    row = read_metrics(root / name / "metrics.jsonl")[2]
    assert found.first.loss == pytest.approx(row["loss"], rel=1e-2)
    weights = [one for one in found.tensors if one.tensor.operand == "weight"]
    if name not in ("replay-layers", "replay-fp8"):
        assert weights and all(one.equal for one in weights)
    # Shares one after another have the scales of the run.
    if name in ("replay-ddp", "replay-fp8", "replay-lengths", "replay-bf16-adapters"):
        assert all(one.equal for one in found.tensors)
    # Elsewhere one process adds in another order than two: no difference speaks for a fault of the hardware.
    else:
        assert not all(one.equal for one in found.tensors)
        assert found.verdict.endswith(
            "; 1 process here in place of 2, whose scales and sums are others"
        )
    assert found.repeatable and found.place == "cpu, emulated" and "fault" not in found.verdict


def test_a_run_of_torchrun_is_replayed_by_the_command(tmp_path: Path) -> None:
    """Processes and all: `te-models replay` starts as many as the run had."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "text.txt").write_text(
        "the quick brown fox jumps over the lazy dog\n" * 99
    )
    program = [sys.executable, "-m", "te_models"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += ["2", "-m", "te_models", *PRETRAIN, "--steps", "2", "--record", "1", "--parallel"]
    command += ["ddp", "--recipe", "current", "--batch-size", "2", "--out", "run"]
    run_process([*program, "capture", "run", "--step", "2"], cwd=tmp_path)
    run_process(command, cwd=tmp_path)
    said = run_process([*program, "replay", "run", "--step", "2", "--once", "--json"], cwd=tmp_path)
    found = json.loads(said.stdout)
    assert found["processes"] == 2 and found["tensors"]
    assert all(one["equal"] for one in found["tensors"])
    assert found["runs"][0]["loss"] == found["recorded_loss"]


def test_the_reason_why_processes_failed_is_told(tmp_path: Path) -> None:
    write_job(tmp_path, tmp_path / "none", 3, [], device="cpu", engine="emulated")
    with pytest.raises(TeModelsError, match="CheckpointError: .*none.* --one-process"):
        start_processes(tmp_path, 2)
