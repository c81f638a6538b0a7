"""Captured steps: kept in advance, by checkpoints and for bad steps; run again bit for bit, and under other recipes."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_runs import losses, tiny_model, tiny_trainer

from te_models.cli.commands import main
from te_models.errors import CheckpointError, Diverged
from te_models.inspect.replay import replay
from te_models.inspect.replay_report import TensorNumbers, outside_bounds
from te_models.recorder.record import FOLDER, STEPS, RecordWriter, read_record
from te_models.training.captures import Marks, captured_steps, read_marks, write_marks
from te_models.training.metrics import read_metrics
from te_models.training.trainer import Trainer

MARKED = 4


def trainer(out: Path, recipe: str, build: dict[str, Any] | None = None, **fields: Any) -> Trainer:
    usual = dict(steps=MARKED + 2, batch_size=2, seq_len=32, eval_every=0, keep_best=False)
    return tiny_trainer(tiny_model(recipe, **(build or {})), out, **{**usual, **fields})


def captured(out: Path, recipe: str = "delayed", **fields: Any) -> Path:
    write_marks(out, Marks((MARKED,)))
    trainer(out, recipe, **fields).run()
    return out


CASES: dict[str, dict[str, Any]] = {
    "delayed": {},
    "current": {},
    "blockwise": {},
    "mxfp8": {},
    "nvfp4": {},  # whose gradients are rounded at random
    "accumulation": dict(recipe="delayed", gradient_accumulation=2),
    "recompute": dict(recipe="delayed", build=dict(activation_checkpointing="full")),
    "fp8-weights": dict(recipe="current", build=dict(fp8_params=True)),
    "experts": dict(
        recipe="current",
        build=dict(
            moe=dict(num_experts=3, num_experts_per_tok=2, moe_intermediate_size=32), qk_norm=True
        ),
        balance_loss=0.5,
    ),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.slow] * (case in ("blockwise", "mxfp8")))
        for case in CASES
    ],
)
def test_a_step_comes_out_bit_for_bit(case: str, tmp_path: Path) -> None:
    fields = {"recipe": case, **CASES[case]}
    run = captured(tmp_path, **fields)
    found = replay(run, MARKED)
    row = read_metrics(run / "metrics.jsonl")[MARKED - 1]
    assert found.first.loss == row["loss"]
    # Its squares are summed in the order of the optimizer's groups, which a replay does not have.
    assert found.first.grad_norm == pytest.approx(row["grad_norm"], rel=1e-6)
    assert found.recorded_loss == row["loss"] and found.repeatable is True
    assert found.tensors and all(one.equal for one in found.tensors)
    # A healthy step has no cause to look for.
    assert found.verdict.endswith("the step does the same again")
    broken = replace(found, first=replace(found.first, grad_norm=math.nan), second=None)
    assert broken.verdict.endswith("the model, the data or the recipe, not in the hardware")
    for one in found.tensors:
        assert np.array_equal(
            [one.recorded.amax, one.recorded.scale, one.recorded.sqnr],
            [one.replayed.amax, one.replayed.scale, one.replayed.sqnr],
            equal_nan=True,
        )


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_step_of_a_run_with_adapters_comes_out_bit_for_bit(
    micro_batches: int, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    from te_models.training.lora_run import LoraRun  # noqa: PLC0415  needs peft
    from te_models.training.settings import LoraSettings  # noqa: PLC0415

    base = tmp_path / "base"
    model = tiny_model("current")
    model.save_pretrained(base)
    adapters = LoraRun(model, LoraSettings(rank=4, alpha=8.0), str(base))
    run = tmp_path / "run"
    write_marks(run, Marks((MARKED,)))
    # The batch after the second checkpoint drops those of checkpoints that are gone, and not this step.
    sizes = dict(steps=2 * MARKED - 1, batch_size=2, seq_len=32, eval_every=0)
    sizes |= dict(gradient_accumulation=micro_batches, save_every=MARKED + 1, record=MARKED)
    tiny_trainer(model, run, saved=adapters, **sizes).run()
    assert captured_steps(run) == [MARKED, MARKED + 2]
    found = replay(run, MARKED, twice=False)
    assert found.first.loss == losses(run)[MARKED - 1]
    norm = read_metrics(run / "metrics.jsonl")[MARKED - 1]["grad_norm"]
    assert found.first.grad_norm == pytest.approx(norm, rel=1e-6)
    assert found.tensors and all(one.equal for one in found.tensors)


def test_a_capture_changes_no_bit_of_the_run(tmp_path: Path) -> None:
    run = captured(tmp_path / "captured")
    trainer(tmp_path / "plain", "delayed").run()
    assert losses(run) == losses(tmp_path / "plain") and read_record(run).steps == [MARKED]


def test_with_a_record_the_step_after_a_checkpoint_can_be_replayed(tmp_path: Path) -> None:
    trainer(tmp_path, "current", save_every=2, record=1, keep_last=1).run()
    assert captured_steps(tmp_path) == []  # the checkpoints before have made room for the last
    trainer(tmp_path / "more", "current", save_every=2, record=1, keep_last=3).run()
    assert captured_steps(tmp_path / "more") == [3, 5]
    found = replay(tmp_path / "more", 5, twice=False)
    assert all(one.equal for one in found.tensors) and found.repeatable is None


def test_a_replay_without_a_record_of_its_step_says_so_and_what_it_shows(tmp_path: Path) -> None:
    """Step 3 follows a checkpoint, and each second step is recorded."""
    trainer(tmp_path, "current", save_every=2, record=2, keep_last=3).run()
    assert captured_steps(tmp_path) == [3, 5] and read_record(tmp_path).steps == [2, 4, 6]
    found = replay(tmp_path, 5)
    assert found.first.loss == losses(tmp_path)[4] and not found.tensors
    missing = (
        "no tensor is compared: the record does not have this step (of 3 steps the nearest is 4), since --record N "
        "takes one step of N, beside those that te-models capture marks"
    )
    assert found.verdict == (
        f"{missing}; the loss is the recorded one; two runs of the step here are equal"
    )
    other = replace(found.first, loss=found.first.loss + 0.25)
    changed = replace(found, first=other, second=None)
    assert changed.verdict == f"{missing}; the loss is +0.25 off the recorded one"
    unknown = replace(found, recorded_loss=None, second=None)
    assert unknown.verdict == missing
    shutil.rmtree(tmp_path / FOLDER)
    assert (
        "no tensor is compared: the run has no record (--record); "
        in replay(tmp_path, 5, twice=False).verdict
    )


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("later", ["delayed", "bf16"])
def test_the_first_step_under_another_recipe_comes_out_bit_for_bit(
    later: str, marked: bool, tmp_path: Path
) -> None:
    """The checkpoint before it has the recipe before, and `delayed` measures its first scales in this step."""
    write_marks(tmp_path, Marks((MARKED,) if marked else ()))
    options: dict[str, Any] = dict(recipe_schedule=f"{later}@{MARKED - 1}", save_every=MARKED - 1)
    trainer(tmp_path, "current", record=1, keep_last=9, **options).run()
    found = replay(tmp_path, MARKED, twice=False)
    assert found.first.loss == losses(tmp_path)[MARKED - 1]
    assert bool(found.tensors) == (later == "delayed")
    assert all(one.equal for one in found.tensors)
    in_bf16 = "no tensor is compared: nothing ran in FP8 in this step; the loss is the recorded one"
    assert (found.verdict == in_bf16) == (later == "bf16")


def test_with_a_record_the_first_step_of_a_resumed_run_can_be_replayed(tmp_path: Path) -> None:
    trainer(tmp_path, "current", record=1, steps=3).run()
    for steps in (4, 5):
        trainer(tmp_path, "current", record=1, steps=steps, keep_last=3).run(resume=True)
    assert captured_steps(tmp_path) == [4, 5]
    assert all(one.equal for one in replay(tmp_path, 5, twice=False).tensors)


def test_steps_that_have_passed_are_not_promised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = captured(tmp_path)
    last = MARKED + 2
    assert main(["capture", str(run), "--step", "3"]) == 2
    said = capsys.readouterr().err
    assert "has passed step 3" in " ".join(said.split()) and read_marks(run) == Marks((MARKED,))
    assert main(["capture", str(run), "--step", f"{MARKED}", "--step", f"{last + 1}"]) == 0
    with pytest.raises(CheckpointError, match="that step has passed.*--out NEW"):
        replay(run, 3)
    with pytest.raises(CheckpointError, match="run or --resume it"):
        replay(run, last + 1)


def test_what_cannot_run_is_told_in_a_line_of_its_own(tmp_path: Path) -> None:
    found = replay(captured(tmp_path, "current"), MARKED, margins=[1], twice=False)
    assert found.variants[0].finite is None
    lines = str(found).splitlines()
    assert any(line.startswith("margin 1 did not run: unknown field 'margin'") for line in lines)
    assert "what if" not in lines


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_state_with_a_nan_is_not_kept(policy: str, tmp_path: Path) -> None:
    write_marks(tmp_path, Marks((MARKED + 1,)))
    run = trainer(tmp_path, "delayed", record=1, on_nan=policy)

    def poison(row: dict[str, Any]) -> None:
        if row["step"] == MARKED - 1:
            run.model.layers[1].mlp.down_proj.weight.data[0, 0] = math.nan

    run.on_step = poison
    # Under "skip" each step from there on is bad, and the last state cannot be saved.
    with pytest.raises(Diverged):
        run.run()
    assert captured_steps(tmp_path) == [] and not list(tmp_path.glob("captures/*/model*"))


def test_a_difference_from_the_record_is_named(tmp_path: Path) -> None:
    """As after a fault of the hardware: one tensor's codes, then its amax too."""
    run = captured(tmp_path)
    record = read_record(run)
    row = next(r for r, t in enumerate(record.tensors) if record.counted[0, r])
    codes = record.codes.view(np.int64).copy()
    codes[0, row] += 1
    for amax, outside in ((1.0, 0), (2.0, 1)):
        values = record.values.copy()
        values[0, row, 0] *= amax
        (run / FOLDER / STEPS).unlink()
        writer = RecordWriter(run, record.tensors)
        writer.write(MARKED, values[0], codes[0])
        writer.close()
        found = replay(run, MARKED)
        assert [one.tensor for one in found.tensors if not one.equal] == [record.tensors[row]]
        assert sum(not one.within for one in found.tensors) == outside
        assert "fault of the hardware" in found.verdict
        assert record.tensors[row].name in found.verdict
    # Of an input late in the model and a gradient early in it, the input was computed first.
    names = [tensor.name for tensor in record.tensors]
    first = "layers.1.mlp.down_proj.input"
    shuffled = [
        replace(
            one, equal=one.tensor.name not in (first, "layers.1.self_attn.qkvg_proj.grad_output")
        )
        for one in found.tensors
    ]
    assert first in names
    assert f"from {first} on" in replace(found, tensors=shuffled).verdict
    backwards = [replace(one, equal=one.tensor.operand != "grad_output") for one in found.tensors]
    last = "layers.1.mlp.down_proj.grad_output"
    assert f"from {last} on" in replace(found, tensors=backwards).verdict


def test_other_recipes_say_whether_they_would_have_been_finite_and_how_exact(
    tmp_path: Path,
) -> None:
    run = captured(tmp_path, build=dict(num_hidden_layers=4))
    found = replay(
        run, MARKED, recipes=["all"], bf16=["layers.1.*"], margins=[0, 3], histories=[1, 8], twice=False
    )  # fmt: skip
    by_name = {one.name: one for one in found.variants}
    same = by_name["margin 0"]
    assert (same.loss, same.grad_norm) == (found.first.loss, found.first.grad_norm)
    assert all(one.finite for one in found.variants), [one.reason for one in found.variants]
    assert math.isnan(by_name["recipe bf16"].sqnr) and by_name["recipe bf16"].layers == {}
    assert by_name["recipe nvfp4"].sqnr < by_name["recipe current"].sqnr - 5
    assert set(by_name["layers.1.* in BF16"].layers) == {2} and set(same.layers) == {1, 2}
    # Three bits of range less: the share of small numbers grows, and no value is nearer to the top.
    assert by_name["margin 3"].sqnr <= same.sqnr + 0.5 and by_name["margin 3"].loss != same.loss


def test_a_history_of_one_step_takes_the_newest_amax(tmp_path: Path) -> None:
    """The scale under another history is the one that its rule makes of the amaxes that the run has kept."""
    build = dict(amax_compute_algo="max", amax_history_len=8, num_hidden_layers=3)
    write_marks(tmp_path, Marks((MARKED,)))
    run = trainer(tmp_path, "delayed", build=build)
    module = run.model.layers[1].mlp.down_proj

    def shrink(row: dict[str, Any]) -> None:
        if row["step"] == 2:
            module.weight.data.mul_(1 / 4)

    run.on_step = shrink
    run.run()
    short = replay(tmp_path, MARKED, histories=[2, 8], twice=False).variants
    assert short[0].finite and short[0].layers != short[1].layers


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(tmp_path / "run")
    assert main(["capture", run, "--step", f"{MARKED}", "--step", "2"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(
        f"{run} keeps steps 2, {MARKED} when it gets there; then `te-models replay"
    )
    assert said[1].startswith(f"there is no run in {run} yet")
    assert main(["capture", run, "--every", "3"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(
        f"{run} keeps steps 2, {MARKED} and one step of every 3 when it gets there"
    )
    assert read_marks(Path(run)) == Marks((2, MARKED), 3)
    trainer(Path(run), "current").run()
    assert captured_steps(Path(run)) == [2, 3, MARKED, 6]
    assert main(["capture", run, "--step", "99"]) == 0
    assert "no run" not in capsys.readouterr().out
    assert main(["replay", run, "--step", "2", "--what-if", "bf16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == 2 and found["repeatable"] and all(t["equal"] for t in found["tensors"])
    assert found["what_if"][0]["finite"] and found["what_if"][0]["sqnr"] is None
    assert main(["replay", run, "--step", "2", "--once"]) == 0
    text = capsys.readouterr().out
    assert "layers, as recorded and replayed" in text and "does the same again" in text
    assert main(["replay", run, "--step", "5"]) == 2
    assert "has not kept state and batch of step 5 (but of 2, 3, 4, 6)" in capsys.readouterr().err
    for device in ("gpu", ""):
        assert main(["replay", run, "--step", "2", "--device", device]) == 2
        assert f"device {device!r} is not supported: give cpu" in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "none"), "--step", "5"]) == 2
    assert main(["capture", run]) == 2


def test_marks_are_seen_while_a_run_goes_on(tmp_path: Path) -> None:
    run = trainer(tmp_path, "current")
    run.on_step = lambda row: write_marks(tmp_path, Marks((5,))) if row["step"] == 2 else None
    run.run()
    assert captured_steps(tmp_path) == [5]
    with pytest.raises(CheckpointError, match="te-models capture"):
        replay(tmp_path, 3)


def test_the_statistic_that_is_outside_the_bounds_is_named() -> None:
    then = TensorNumbers(2.0, 100.0, 0.0, 0.0, 0.0, 32.0, 1)
    assert outside_bounds(then, replace(then, amax=2.05, sqnr=32.9)) == []
    assert outside_bounds(then, replace(then, amax=2.05, sqnr=30.9)) == ["sqnr"]
    assert outside_bounds(then, replace(then, flushed=0.02, scale=90.0)) == ["scale", "flushed"]
    assert outside_bounds(then, replace(then, sqnr=math.nan, nonfinite=0.1)) == ["nonfinite"]
