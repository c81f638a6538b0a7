"""The training loop: it learns, resumes with the same bits, stops at a bad loss, and asks before it overwrites."""

import copy
import dataclasses
import itertools
import json
import math
import signal
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import assert_same_bits
from fewer import every, some
from tiny_runs import PRETRAIN, losses, said_at_the_end, tiny_model, tiny_trainer

from te_models import CausalLM, list_recipes
from te_models.cli import main
from te_models.data.dataset import TokenDataset
from te_models.errors import Diverged, SaveError, UsageError
from te_models.fp8.primary_weights import is_quantized, plain, quantized_weights
from te_models.fp8.scaling_state import fp8_state
from te_models.model.targets import next_token_targets
from te_models.saving.pretrained import saved_folder
from te_models.training.evaluation import evaluate
from te_models.training.metrics import MetricsLog, read_metrics
from te_models.training.parallel import Parallel
from te_models.training.trainer import Trainer

PRIMARY = ["delayed", "current", "blockwise", "mxfp8"]  # recipes with FP8 primary weights


def trainer(
    out: Path, recipe: str = "delayed", options: dict[str, Any] | None = None, **fields: Any
) -> Trainer:
    usual = dict(batch_size=2, eval_every=3, keep_best=True)
    return tiny_trainer(tiny_model(recipe, **options or {}), out, **usual | fields)


@pytest.mark.parametrize("cached, flags", [(True, [True, False, False]), (False, [None] * 3)])
def test_what_micro_batches_are_told(
    cached: bool, flags: list[bool | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is the last, by its place: a dataset may give one object again and again. FP8 weights, if asked."""
    told: list[bool | None] = []
    lasts: list[bool] = []
    monkeypatch.setattr(
        Parallel, "prepare_micro_batch", lambda self, model, last: lasts.append(last)
    )
    run = trainer(tmp_path, gradient_accumulation=3, cache_fp8_weights=cached)

    def forward(**batch: Any) -> Any:
        told.append(batch["is_first_microbatch"])
        return run.model(**batch)

    run.passes.train_model = forward
    run.step(iter([next(iter(run.dataset))] * 3))
    assert (lasts, told) == ([False, False, True], flags)


def calibrated_by_hand(run: Trainer) -> Trainer:
    """The run with the scales of its first step, and told to measure none itself."""
    run.model.calibrate(next(iter(trainer(run.out).dataset)))
    run.config = dataclasses.replace(run.config, calibrate=False)
    return run


def test_a_run_begins_with_the_scales_of_its_first_step(tmp_path: Path) -> None:
    """Data, random numbers, rows of metrics and the evaluation before the first step are those of a run that finds
    these scales; without them it is another run."""
    runs = {
        "own": trainer(tmp_path / "own", steps=3),
        "found": calibrated_by_hand(trainer(tmp_path / "found", steps=3)),
        "te": trainer(tmp_path / "te", steps=3, calibrate=False),
    }
    results = {name: run.run() for name, run in runs.items()}
    assert losses(tmp_path / "own") == losses(tmp_path / "found") != losses(tmp_path / "te")
    assert (
        results["own"].first_eval_loss
        == results["found"].first_eval_loss
        != results["te"].first_eval_loss
    )
    states: list[dict[str, Any]] = [
        {**fp8_state(runs[name].model), **runs[name].model.state_dict()} for name in runs
    ]
    assert [
        name for name, value in states[0].items() if not torch.equal(value, states[1][name])
    ] == []
    assert [len(losses(tmp_path / name)) for name in runs] == [3, 3, 3]
    read = trainer(tmp_path).dataset
    list(islice(read, 3))
    assert [run.dataset.state_dict() for run in runs.values()] == [read.state_dict()] * 3


def amax_rows(run: Trainer) -> set[int]:
    """How many amaxes the histories of the inputs of linears hold."""
    histories = [
        tensor for name, tensor in fp8_state(run.model).items() if name.endswith("fwd.amax_history")
    ]
    return {int((history[:, 0] != 0).sum()) for history in histories}


def test_micro_batches_and_a_new_recipe_are_calibrated(tmp_path: Path) -> None:
    """A history then has one amax more than there were steps under the recipe."""
    run = trainer(tmp_path, "current", steps=5, gradient_accumulation=2, eval_every=0)
    rows: list[set[int]] = []

    def note(row: dict[str, Any]) -> None:
        rows.append(amax_rows(run))
        if row["step"] == 2:
            run.model.set_recipe("delayed", amax_history_len=16)

    run.on_step = note
    run.run()
    assert rows == [set(), set(), {3}, {5}, {7}]  # two micro-batches per step


def test_a_resumed_run_measures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer(tmp_path, steps=2, calibrate=False).run()
    monkeypatch.setattr("te_models.fp8.calibration.Measurement.backward", lambda *given: 1 / 0)
    run = trainer(tmp_path, steps=4)
    run.run(resume=True)
    assert amax_rows(run) == {4}


@pytest.mark.parametrize("chosen", [True, False])
def test_deterministic_algorithms_are_on_for_the_run_alone(chosen: bool, tmp_path: Path) -> None:
    run = trainer(tmp_path, "bf16", steps=1, eval_every=0, deterministic=chosen)
    found: list[bool] = []
    run.on_step = lambda row: found.append(torch.are_deterministic_algorithms_enabled())
    run.run()
    assert found == [chosen] and not torch.are_deterministic_algorithms_enabled()


def test_a_run_in_python_replaces_no_other(tmp_path: Path) -> None:
    """As on the command line. `out` may be a str."""
    done = trainer(str(tmp_path), steps=2)  # type: ignore[arg-type]
    done.run()
    before = {path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(
        UsageError, match=r"already holds a run of 2 steps: continue it with run\(resume=True\), or"
    ):
        trainer(tmp_path, steps=3).run()
    assert before == {
        path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()
    }
    assert trainer(tmp_path, steps=3).run(resume=True).step == 3


@pytest.mark.parametrize(
    "file, content", [("config.json", "a model"), ("adapter_config.json", "adapters")]
)
def test_a_run_in_python_does_not_begin_in_the_folder_of_a_model(
    file: str, content: str, tmp_path: Path
) -> None:
    """Some readers would take the folder for the model, and some for the run."""
    (tmp_path / file).write_text("{}")
    with pytest.raises(UsageError, match=f"already holds {content}: give another out"):
        trainer(tmp_path, steps=1).run()
    assert not (tmp_path / "checkpoints").exists()


EXACT = every(8, list_recipes(), ("none", "selective", "full", 2), (False,))
EXACT += some(2, zip(PRIMARY, ("none", "selective", "full", 2), itertools.repeat(True)))


@pytest.mark.parametrize("recipe, mode, fp8_params", EXACT)
def test_a_resumed_run_is_exact(
    recipe: str, mode: str | int, fp8_params: bool, tmp_path: Path
) -> None:
    """Under every recipe in every mode, with accumulation, an evaluation and a save that fell behind."""

    def make(out: str, **fields: Any) -> Trainer:
        options = dict(fp8_params=fp8_params, activation_checkpointing=mode)
        fields = dict(steps=3, batch_size=1, eval_every=2, gradient_accumulation=2) | fields
        return trainer(tmp_path / out, recipe, options, **fields)

    whole = make("whole")
    whole.run()
    # Now, since later forwards of another model update the scales of this one, too: the engine has one registry.
    state = {
        name: t.clone()
        for of in (fp8_state, quantized_weights)
        for name, t in of(whole.model).items()
    }
    stop_after(make("half", save_every=2), 3)
    resumed = make("half")
    torch.manual_seed(99)  # the checkpoint's own random state must win
    assert resumed.run(resume=True).step == 3
    stored = [
        q
        for q in resumed.model.parameters()
        if is_quantized(q) and q.get_high_precision_init_val() is not None
    ]
    assert not stored, (
        "a copy of each FP8 weight in the host's memory, which the optimizer's master replaces"
    )
    assert (
        losses(tmp_path / "half") == losses(tmp_path / "whole")
        and len(set(losses(tmp_path / "half"))) == 3
    )
    for (name, p), q in zip(
        whole.model.named_parameters(), resumed.model.parameters(), strict=True
    ):
        assert_same_bits(name, plain(p), plain(q))
    for number, (p, q) in enumerate(
        zip(whole.optimizer.masters, resumed.optimizer.masters, strict=True)
    ):
        assert_same_bits(f"master {number}", p, q)
    again = {
        name: t for of in (fp8_state, quantized_weights) for name, t in of(resumed.model).items()
    }
    assert (
        state.keys() == again.keys()
        and [name for name in state if not torch.equal(state[name], again[name])] == []
    )
    assert whole.result.eval_loss == resumed.result.eval_loss


def stop_after(run: Trainer, step: int) -> None:
    """Run and kill at `step`, without the save that a clean stop makes."""

    class Killed(Exception):
        pass

    def kill(row: dict[str, Any]) -> None:
        if row["step"] == step:
            raise Killed

    run.on_step = kill
    with pytest.raises(Killed):
        run.run()


def test_the_trainer_learns_and_logs_every_step(tmp_path: Path) -> None:
    run = trainer(
        tmp_path,
        "current",
        dict(hidden_size=64, intermediate_size=96),
        steps=30,
        learning_rate=3e-3,
    )
    result = run.run()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 31))
    assert all(
        {"step", "loss", "tokens_per_second", "grad_norm", "learning_rate", "data_wait"}
        <= row.keys()
        for row in rows
    )
    assert [row["step"] for row in rows if "eval_loss" in row] == [*range(3, 31, 3)]
    assert result.first_eval_loss - result.eval_loss > 1.0
    assert result.eval_loss == evaluate(run.model, run.eval_batches)
    assert (
        saved_folder(tmp_path).name
        == saved_folder(tmp_path / "checkpoints").name
        == "step-00000030"
    )
    assert CausalLM.from_pretrained(tmp_path, device="cpu").recipe.name == "current"


@pytest.mark.parametrize(
    ("recipe", "advice"),
    [
        ("bf16", "try a lower --learning-rate"),
        ("current", "try a lower --learning-rate, --recipe bf16, or more BF16 layers"),
        ("delayed", "try a lower --learning-rate, --recipe current, or more BF16 layers"),
    ],
)
def test_a_bad_value_stops_the_run_and_names_step_and_layer(
    recipe: str, advice: str, tmp_path: Path
) -> None:
    run = trainer(tmp_path, recipe)

    def poison(row: dict[str, Any]) -> None:
        if row["step"] == 3:
            run.model.layers[2].mlp.down_proj.weight.data[0, 0] = math.nan

    run.on_step = poison
    with pytest.raises(
        Diverged, match=r"step 4: the loss is nan; the first layer.* is layers\.2\.mlp\.down_proj\."
    ) as stop:
        run.run()
    assert str(stop.value).endswith(f": {advice}")
    assert len(losses(tmp_path)) == 3


@pytest.mark.parametrize(
    "recipe, fields", [("delayed", {}), ("bf16", dict(gradient_accumulation=2, save_every=3))]
)
def test_reading_a_step_late_changes_nothing(
    recipe: str, fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host reads results a step late, as on a GPU, where it must not wait."""
    runs = []
    for ahead in (False, True):
        run = trainer(tmp_path / str(ahead), recipe, eval_every=4, **fields)
        run.ahead, order = ahead, []
        launch, run.on_step = run._queue, lambda row, order=order: order.append(row["step"])

        def queue(step: int, *rest: Any, order: list[int] = order, launch: Any = launch) -> Any:
            order.append(-step)
            return launch(step, *rest)

        monkeypatch.setattr(run, "_queue", queue)
        run.run()
        runs.append((run, order))
    (plain, one_by_one), (late, order) = runs
    assert one_by_one == [n for step in range(1, 9) for n in (-step, step)]
    assert order[:4] == [-1, -2, 1, -3] and sorted(order) == sorted(one_by_one)
    for step in (4, 8, *(range(3, 9, 3) if "save_every" in fields else ())):
        assert order[order.index(-step) :].index(step) <= 2, (
            "nothing else is queued before an evaluation or a save"
        )
    rows = [
        [
            {**r, "tokens_per_second": 0, "data_wait": 0}
            for r in read_metrics(run.out / "metrics.jsonl")
        ]
        for run in (plain, late)
    ]
    assert rows[0] == rows[1] and len(rows[0]) == 8
    assert all(
        torch.equal(p, q)
        for p, q in zip(plain.model.parameters(), late.model.parameters(), strict=True)
    )


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_bad_step_read_late_changes_no_weight(clip: float, tmp_path: Path) -> None:
    run = trainer(tmp_path, eval_every=0, clip_grad_norm=clip)
    run.ahead, seen, step = True, [], run.optimizer.step

    def recorded() -> None:
        step()
        seen.append(copy.deepcopy((list(run.model.parameters()), run.optimizer.state_dict())))

    def poisoned(**batch: Any) -> Any:
        output = run.model(**batch)
        return output._replace(loss=output.loss * (math.nan if len(seen) == 2 else 1))

    run.optimizer.step, run.passes.train_model = recorded, poisoned
    with pytest.raises(Diverged, match="step 3: the loss is nan"):
        run.run()
    assert len(seen) == 3 and [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [
        1,
        2,
    ]
    (before, state), (after, later) = seen[1:]
    assert all(torch.equal(p, q) for p, q in zip(before, after, strict=True))
    assert all(torch.equal(p, q) for p, q in zip(state["masters"], later["masters"], strict=True))
    assert str(state["state"]) == str(later["state"])


def test_a_bad_label_on_a_gpu_ends_the_run_with_the_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def as_on_a_gpu(labels: torch.Tensor, mask: Any, vocab_size: int, documents: Any) -> Any:
        invalid = labels >= vocab_size
        return next_token_targets(labels.masked_fill(invalid, -100), mask, vocab_size, documents)[
            0
        ], invalid.any()

    run = trainer(tmp_path, "bf16", steps=4, eval_every=0)
    batches = [next(run.dataset) for _ in range(4)]
    batches[1]["labels"][1, 7] = 288
    monkeypatch.setattr("te_models.model.decoder.next_token_targets", as_on_a_gpu)
    monkeypatch.setattr(TokenDataset, "__next__", lambda data: batches.pop(0))
    with pytest.raises(
        Diverged, match=r"^step 2: a label is 288: give 0 to 287 \(vocab_size=288\), or -100"
    ):
        run.run()


@pytest.mark.parametrize("table", [{}, {"*.down_proj": "bf16"}])
def test_resuming_under_another_recipe_says_so_and_goes_on(
    table: dict[str, str], tmp_path: Path
) -> None:
    trainer(tmp_path, "delayed", dict(precision=table), steps=2).run()
    other = trainer(tmp_path, "current", steps=4)
    with pytest.warns(UserWarning) as said:
        assert other.run(resume=True).step == 4
    text = [str(warning.message) for warning in said]
    assert (
        "trained under recipe 'delayed'; it goes on with name='current', scheme='Float8CurrentScaling'"
        in text[0]
    )
    assert (
        "has no use for its scales and amax histories, which are left out" in text[1]
        and len(text) == 2
    )
    assert ("precision={}" in text[0]) == bool(table)
    assert len(losses(tmp_path)) == 4


def test_resuming_another_shape_or_nothing_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path, "bf16", steps=1).run()
    with pytest.raises(ValueError, match="was trained with intermediate_size=32, not 64"):
        trainer(tmp_path, "bf16", dict(intermediate_size=64)).run(resume=True)
    with pytest.raises(ValueError, match="nothing to resume"):
        trainer(tmp_path / "empty", "delayed").run(resume=True)


def saving_badly(
    place: str,
    failures: int,
    pauses: tuple[float, ...],
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    **fields: Any,
) -> Trainer:
    """A run whose first saves at this place fail, and are tried again after these pauses."""
    monkeypatch.setattr("te_models.training.run_saves.SAVE_RETRY_PAUSES", pauses)
    run = trainer(out, "bf16", eval_every=1, learning_rate=0.01, **fields)
    checkpoints, left = getattr(run, place), iter(range(failures))
    commit = checkpoints._commit

    def full_at_first(*given: Any) -> None:
        if next(left, None) is not None:
            raise SaveError("the disk is full")
        commit(*given)

    monkeypatch.setattr(checkpoints, "_commit", full_at_first)
    return run


def test_a_background_save_that_fails_is_an_error_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = saving_badly("checkpoints", 99, (0.1, 0.1), tmp_path, monkeypatch, steps=3, save_every=2)
    with pytest.raises(SaveError, match="the disk is full"):
        run.run()


def test_a_failed_save_of_the_best_model_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = saving_badly("best", 99, (), tmp_path, monkeypatch, steps=3)
    monkeypatch.setattr("te_models.saving.run_folder.MAX_FAILED_SAVES", 9)
    result = run.run()
    assert result.best_step and "the disk is full" in caplog.text and run.best.latest() is None
    assert result.checkpoint is not None and Path(result.checkpoint).name == "step-00000003"
    assert "saved in" not in said_at_the_end(result, run.config, tmp_path)


@pytest.mark.parametrize("place", ["checkpoints", "best"])
def test_a_save_that_fails_once_is_tried_again(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = saving_badly(place, 1, (0.01,), tmp_path, monkeypatch, steps=2)
    assert run.run().step == 2
    assert caplog.messages.count("the disk is full; trying again in 0.01 s") == 1
    assert getattr(run, place).latest().name == "step-00000002"


@pytest.mark.parametrize("sent, code", [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_saves_and_ends_cleanly(
    sent: int,
    code: int,
    texts: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    write = MetricsLog.write

    def ask_to_stop(self: MetricsLog, row: dict[str, Any]) -> None:
        write(self, row)
        if row["step"] == 3:
            signal.raise_signal(sent)

    monkeypatch.setattr(MetricsLog, "write", ask_to_stop)
    assert main([*PRETRAIN, "--steps", "20", "--out", "run"]) == code
    assert "continues from it" in " ".join(capsys.readouterr().out.split())
    assert len(losses("run")) == 4
    newest = saved_folder("run")
    assert json.loads((newest / "training.json").read_text())["result"]["step"] == 4
    assert newest.name == "step-00000004"


@pytest.mark.parametrize(
    ("warmup", "said"),
    [
        (0.5, []),
        (2, []),
        (8, ["warmup_steps=8 is more than steps=2: the run ends within its warm-up, at 25% of learning_rate=0.001"]),
    ],
)  # fmt: skip
def test_a_warm_up_longer_than_the_run_is_told(
    warmup: float, said: list[str], tmp_path: Path
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tiny_trainer(tiny_model("bf16"), tmp_path, steps=2, warmup_steps=warmup, learning_rate=1e-3)
    assert [str(one.message) for one in caught if "warm-up" in str(one.message)] == said


def test_a_misspelled_argument_names_the_nearest() -> None:
    with pytest.raises(
        ValueError, match="unknown field 'eval_batch' of Trainer: did you mean 'eval_batches'"
    ):
        Trainer(eval_batch=[])
