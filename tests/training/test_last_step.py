"""A run that ends in the middle of a step leaves a checkpoint of the step before, as if it had saved there."""

import json
import math
import re
import shutil
import signal
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import assert_same_tensors
from fewer import every
from tiny_runs import losses, tiny_model, tiny_trainer

from te_models import CausalLM, load_tokenizer
from te_models.distributed.control import Ranks
from te_models.errors import CheckpointError, DataError, DataUnavailable, Diverged, UsageError
from te_models.files.tensors import all_finite
from te_models.model.expert_parallel import stand_in
from te_models.saving.checkpoint_choice import describe_choice
from te_models.saving.folder import load_folder
from te_models.training.failed_run import broken_tensor
from te_models.training.run_saves import wants_save
from te_models.training.trainer import Callback, Trainer

STEPS, GOOD = 6, 3


def trainer(out: Path, recipe: str, ahead: bool, **fields: Any) -> Trainer:
    usual = dict(steps=STEPS, batch_size=2, eval_every=0, keep_best=False, keep_last=STEPS)
    run = tiny_trainer(tiny_model(recipe), out, **{**usual, **fields})
    run.ahead = ahead and run.optimizer.can_skip
    return run


def failing_in(run: Trainer, step: int, failure: Any) -> Trainer:
    """The run whose model fails in this step: `failure` gets the output and may raise."""
    passes = 0

    def forward(**batch: Any) -> Any:
        nonlocal passes
        passes += 1
        output = run.model(**batch)
        return failure(output) if passes == step else output

    run.passes.train_model = forward
    return run


def spoil(output: Any) -> Any:
    return output._replace(loss=output.loss * math.nan)


def lose_data(output: Any) -> Any:
    raise DataUnavailable("the server no longer answers")


def content(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    found = load_folder(folder, ["config", "recipe", "training", "model"], optional=["fp8_state"])
    state = json.loads((folder / "training.json").read_text())
    tensors = {}
    for group, members in found.tensors.items():
        tensors |= {f"{group}.{name}": tensor for name, tensor in members.items()}
    return tensors, state


@pytest.mark.parametrize(
    ("failure", "error", "recipe", "ahead"),
    [
        pytest.param(*case.values[0], *case.values[1:], marks=case.marks)
        for case in every(
            3,
            [(spoil, Diverged), (lose_data, DataUnavailable)],
            ["bf16", "delayed", "current"],
            [False, True],
        )
    ],
)
def test_the_step_before_is_saved_to_the_bit(
    failure: Any, error: type[Exception], recipe: str, ahead: bool, tmp_path: Path
) -> None:
    """Weights, optimizer, scales, histories, random numbers and data; a resumed run has the bits of a whole one."""
    trainer(tmp_path / "whole", recipe, ahead, save_every=1).run()
    run = failing_in(trainer(tmp_path / "cut", recipe, ahead), GOOD + 1, failure)
    with pytest.raises(error):
        run.run()
    (saved,) = (tmp_path / "cut" / "checkpoints").glob("step-*")
    assert saved.name == f"step-{GOOD:08d}"
    (own, state), (other, expected) = content(saved), content(tmp_path / "whole/checkpoints" / saved.name)  # fmt: skip
    assert_same_tensors(own, other)
    for part in ("dataset", "rng"):
        assert state.get(part) == expected.get(part)
    assert len(losses(tmp_path / "cut")) == GOOD
    trainer(tmp_path / "cut", recipe, ahead).run(resume=True)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    last = f"checkpoints/step-{STEPS:08d}"
    assert_same_tensors(content(tmp_path / "cut" / last)[0], content(tmp_path / "whole" / last)[0])


@pytest.mark.parametrize("ahead", [False, True])
def test_a_change_of_recipe_that_diverges_saves_the_recipe_before(
    ahead: bool, tmp_path: Path
) -> None:
    changed = dict(recipe_schedule=f"bf16@{GOOD}")
    trainer(tmp_path / "whole", "delayed", ahead, save_every=1, **changed).run()
    run = failing_in(trainer(tmp_path / "cut", "delayed", ahead, **changed), GOOD + 1, spoil)
    with pytest.raises(Diverged):
        run.run()
    name = f"checkpoints/step-{GOOD:08d}"
    assert_same_tensors(content(tmp_path / "cut" / name)[0], content(tmp_path / "whole" / name)[0])
    assert json.loads((tmp_path / "cut" / name / "recipe.json").read_text())["name"] == "delayed"


def test_the_line_says_what_is_saved(tmp_path: Path) -> None:
    run = failing_in(trainer(tmp_path, "bf16", False), GOOD + 1, spoil)
    with pytest.raises(
        Diverged,
        match=f"before this step; step {GOOD} is saved in .*--resume continues from it: try a",
    ):
        run.run()


def test_a_failing_callback_loses_no_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With results read a step late, the step that follows is done when the callback is called."""

    class Bad(Callback):
        def on_step(self, trainer: Trainer, row: dict[str, Any]) -> None:
            if row["step"] == GOOD:
                raise RuntimeError("of the user's")

    run = trainer(tmp_path, "bf16", True)
    run.callbacks = [Bad()]
    with pytest.raises(RuntimeError, match="of the user's"):
        run.run()
    assert f"step {GOOD + 1} is saved in {tmp_path}" in caplog.text
    assert len(losses(tmp_path)) == GOOD + 1
    assert trainer(tmp_path, "bf16", True).run(resume=True).step == STEPS


@pytest.mark.parametrize("place", ["weight", "moment"])
@pytest.mark.parametrize("save_every", [1, 0])
def test_no_broken_checkpoint_is_written(save_every: int, place: str, tmp_path: Path) -> None:
    """Neither at a save that is due, nor after a NaN, nor at the end; earlier ones stay."""

    class Poison(Callback):
        def on_step(self, trainer: Trainer, row: dict[str, Any]) -> None:
            if row["step"] == GOOD:
                weight = trainer.model.layers[1].mlp.down_proj.weight
                state = trainer.optimizer.optimizers[0].state
                target = weight if place == "weight" else next(iter(state.values()))["exp_avg_sq"]
                target.data[0, 0] = math.inf

    run = trainer(tmp_path, "bf16", False, save_every=save_every)
    run.callbacks = [Poison()]
    with pytest.raises(Diverged, match="NaN or an infinity|loss is nan"):
        run.run()
    saved = sorted((tmp_path / "checkpoints").glob("step-*"))
    assert [folder.name[-1] for folder in saved] == (["1", "2"] if save_every else [])
    assert all(all_finite(tensor) for folder in saved for tensor in content(folder)[0].values())


def test_the_best_model_is_named_where_no_checkpoint_can_be_written(tmp_path: Path) -> None:
    """Of a run that an evaluation has seen, and whose weights then have a NaN."""

    class Poison(Callback):
        def on_eval(self, trainer: Trainer, row: dict[str, Any]) -> None:
            trainer.best.wait()
            trainer.model.layers[1].mlp.down_proj.weight.data[0, 0] = math.nan

    options = dict(save_every=0, eval_every=1, keep_best=True, learning_rate=1e-3)
    run = trainer(tmp_path, "bf16", False, **options)
    run.callbacks = [Poison()]
    said = f"no earlier one, but {tmp_path / 'best'} has the model of step 1"
    with pytest.raises(Diverged, match=re.escape(said)):
        run.run()
    alone = f"{tmp_path} has no checkpoint of the run; {tmp_path / 'best'} has the model"
    with pytest.raises(CheckpointError, match=re.escape(alone)):
        CausalLM.from_pretrained(tmp_path)
    with pytest.raises(DataError, match=re.escape(alone)):
        load_tokenizer(str(tmp_path))
    chosen = describe_choice(tmp_path / "best")
    assert chosen is not None and "step 1, the one with the lowest eval loss" in chosen
    CausalLM.from_pretrained(tmp_path / "best")


def test_a_first_step_that_fails_saves_nothing(tmp_path: Path) -> None:
    with pytest.raises(Diverged, match="The weights are as before this step: try"):
        failing_in(trainer(tmp_path, "bf16", False), 1, spoil).run()
    assert not list((tmp_path / "checkpoints").glob("step-*"))


@pytest.fixture
def terminal() -> Iterator[None]:
    """A terminal that can close, also where the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("terminal")
class Killed(Callback):
    def on_step(self, trainer: Any, row: Any) -> None:
        if row["step"] == 2:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    "recipe", ["bf16", "delayed", pytest.param("nvfp4", marks=pytest.mark.slow)]
)
def test_a_run_that_begins_again_begins_with_its_first_batches(recipe: str, tmp_path: Path) -> None:
    """The checkpoint of step 0 is written once calibration and the first evaluation have drawn from the data."""
    options: dict[str, Any] = dict(on_nan="rewind", gradient_accumulation=2, eval_every=3)
    whole, killed, resumed = (
        trainer(tmp_path / name, recipe, False, **options) for name in ("whole", "killed", "killed")
    )
    whole.run()
    killed.callbacks = (Killed(),)
    with pytest.raises(KeyboardInterrupt):
        killed.run()
    assert killed.checkpoints.to_resume().name == "step-00000000"
    resumed.run(resume=True)
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert_same_tensors(
        dict(resumed.model.named_parameters()), dict(whole.model.named_parameters())
    )


def test_a_closed_terminal_ends_a_run_with_a_checkpoint(tmp_path: Path) -> None:
    run = trainer(tmp_path, "bf16", False)
    run.on_step = lambda row: signal.raise_signal(signal.SIGHUP) if row["step"] == GOOD else None
    result = run.run()
    assert (result.interrupted, result.signal) == (True, signal.SIGHUP)
    assert result.checkpoint is not None and result.checkpoint.endswith(f"{GOOD + 1:08d}")


@pytest.mark.parametrize("ahead", [False, True])
def test_a_long_run_saves_now_and_then(
    ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the clock, at most `keep_last`, and without a change of the bits."""
    now = 0.0
    clock = namedtuple("Clock", "monotonic sleep")(lambda: now, lambda seconds: None)
    for module in ("trainer", "run_saves"):
        monkeypatch.setattr(f"te_models.training.{module}.time", clock)
    saves: list[int] = []

    class Recorder(Callback):
        def on_step(self, trainer: Trainer, row: dict[str, Any]) -> None:
            nonlocal now
            now += 160.0  # two steps take more than five minutes

        def on_save(self, trainer: Trainer, folder: Path) -> None:
            saves.append(int(folder.name[5:]))

    trainer(tmp_path / "whole", "delayed", ahead, save_every=0).run()
    run = trainer(tmp_path / "timed", "delayed", ahead, steps=STEPS, keep_last=2)
    run.callbacks = [Recorder()]
    run.run()
    assert saves[-1] == STEPS and 2 <= len(saves) <= 3 and saves == sorted(set(saves))
    assert len(list((tmp_path / "timed" / "checkpoints").glob("step-*"))) == 2
    assert losses(tmp_path / "timed") == losses(tmp_path / "whole")


def test_slow_saves_are_rarer(tmp_path: Path) -> None:
    """They take at most a twentieth of the time."""
    run = trainer(tmp_path, "bf16", False)
    run.saved_at -= 1000
    assert wants_save(run)
    run.checkpoints.seconds = 60.0
    assert not wants_save(run)
    run.saved_at -= 300
    assert wants_save(run)


@pytest.mark.parametrize("free, refused", [(0.95, True), (1.05, False), (2.5, False), (4.0, False)])
def test_a_full_disk_is_refused_before_the_run(
    free: float, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: Any
) -> None:
    """Where the first checkpoint cannot fit; a line where not all will."""
    done = trainer(tmp_path / "done", "bf16", False, steps=1).run()
    assert done.checkpoint is not None
    size = sum(file.stat().st_size for file in Path(done.checkpoint).glob("*.safetensors"))
    disk = namedtuple("Usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk(int(free * size)))
    run = trainer(tmp_path / "out" / "run", "bf16", False, steps=1, keep_last=2)
    if refused:
        with pytest.raises(UsageError, match="a checkpoint takes .* of disk space free: make room"):
            run.run()
        assert not (tmp_path / "out" / "run" / "metrics.jsonl").exists()
    else:
        run.run()
        assert ("too little for 3 checkpoints" in str([str(w.message) for w in recwarn])) == (free < 3)  # fmt: skip


def test_the_state_that_a_loss_of_nan_leaves_is_not_the_models(tmp_path: Path) -> None:
    """After the run the model has the scales of its checkpoint."""
    run = failing_in(trainer(tmp_path, "delayed", True), GOOD + 1, spoil)
    with pytest.raises(Diverged):
        run.run()
    saved = load_folder(next((tmp_path / "checkpoints").glob("step-*")), ["fp8_state"])
    for name, tensor in run.model.copied_fp8_state().items():
        assert torch.equal(tensor, saved.tensors["fp8_state"][name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_what_stands_in_for_other_processes_experts_is_not_broken(dtype: torch.dtype) -> None:
    """Whatever was in the memory that it gets: here, that of tensors of NaN that are gone."""
    for _ in range(64):
        gone = [torch.full((), math.nan).to(dtype) for _ in range(8)]
        like = torch.zeros(4, 4, dtype=dtype)
        del gone
        assert broken_tensor({"model": {"weight": stand_in(like)}}, Ranks()) is None
