"""Callbacks, early stopping and the best checkpoint of a run."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import losses, said_at_the_end, tiny_model, tiny_trainer

from te_models import CausalLM, Trainer, load_tokenizer
from te_models.errors import UsageError
from te_models.fp8.scaling_state import fp8_state
from te_models.saving.run_folder import Checkpoints
from te_models.training.check_state import check_patience
from te_models.training.metrics import read_metrics
from te_models.training.trainer import Callback


def trainer(out: Path, recipe: str = "bf16", **fields: Any) -> Trainer:
    return tiny_trainer(tiny_model(recipe), out, **dict(keep_best=True) | fields)


def evaluating(run: Trainer, losses: list[float], monkeypatch: pytest.MonkeyPatch) -> Trainer:
    """Have the run's evaluations return these losses, the first before the first step."""
    left = iter(losses)
    monkeypatch.setattr(run, "_evaluate", lambda: next(left))
    return run


class Recorder(Callback):
    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def on_step(self, trainer: Trainer, row: dict[str, Any]) -> None:
        self.calls.append(("step", row["step"]))
        assert trainer.result.step == row["step"]

    def on_eval(self, trainer: Trainer, row: dict[str, Any]) -> None:
        self.calls.append(("eval", (row["step"], row["eval_loss"])))

    def on_save(self, trainer: Trainer, folder: Path) -> None:
        self.calls.append(("save", folder.name))


def test_callbacks_are_called_in_order(tmp_path: Path) -> None:
    run, recorder = trainer(tmp_path, steps=5, eval_every=2, save_every=4), Recorder()
    run.callbacks = [Callback(), recorder]
    result = run.run()
    evals = {
        row["step"]: row["eval_loss"]
        for row in read_metrics(tmp_path / "metrics.jsonl")
        if "eval_loss" in row
    }
    assert list(evals) == [2, 4, 5] and result.eval_loss == evals[5]
    assert recorder.calls == [
        ("step", 1), ("step", 2), ("eval", (2, evals[2])), ("step", 3), ("step", 4), ("eval", (4, evals[4])),
        ("save", "step-00000004"), ("step", 5), ("eval", (5, evals[5])), ("save", "step-00000005"),
    ]  # fmt: skip


def test_a_callback_stops_the_run_as_ctrl_c_does(tmp_path: Path) -> None:
    class Stop(Callback):
        def on_step(self, trainer: Trainer, row: dict[str, Any]) -> None:
            if row["step"] == 3:
                trainer.stop()

    run = trainer(tmp_path, steps=8)
    run.callbacks = [Stop()]
    result = run.run()
    assert (result.step, result.interrupted, result.stopped_early) == (4, True, False)
    assert trainer(tmp_path).run(resume=True).step == 8


def test_a_callback_changes_the_recipe_in_the_middle(tmp_path: Path) -> None:
    """Steps after the change have the numbers of the new recipe, from the same weights."""

    class Swap(Callback):
        def on_step(self, trainer: Trainer, row: dict[str, Any]) -> None:
            if row["step"] == 2:
                trainer.model.set_recipe("delayed")

    for name, callbacks in (("bf16", []), ("swap", [Swap()])):
        run = trainer(tmp_path / name, steps=5)
        run.callbacks = callbacks
        run.run()
    plain, swap = losses(tmp_path / "bf16"), losses(tmp_path / "swap")
    assert swap[:2] == plain[:2] and swap[2:] != plain[2:]
    assert swap == pytest.approx(plain, rel=0.05)
    saved = CausalLM.from_pretrained(tmp_path / "swap", device="cpu")
    assert saved.recipe.name == "delayed" and fp8_state(saved)


@pytest.mark.parametrize(
    "patience, losses, last, best",
    [
        (1, [9, 3, 4, 1, 1, 1, 1, 1, 1], 2, 1),
        (2, [9, 3, 4, 2, 2, 5, 1, 1, 1], 5, 3),  # an equal loss is no lower one
        (2, [9, 3, math.nan, math.nan, 1, 1, 1, 1, 1], 3, 1),
        (2, [math.nan, 3, 4, 2, 3, 3, 1, 1, 1], 5, 3),
        (0, [9, 1, 2, 3, 4, 5, 6, 7, 8], 8, 1),
        (1, [9, 8, 7, 6, 5, 4, 3, 2, 3], 8, 7),  # the last step ends the run anyway
    ],
)
def test_a_run_ends_after_evaluations_without_a_lower_loss(
    patience: int,
    losses: list[float],
    last: int,
    best: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = evaluating(trainer(tmp_path, patience=patience), losses, monkeypatch).run()
    assert (result.step, result.best_step, result.best_eval_loss) == (last, best, losses[best])
    assert result.stopped_early == (last < 8) and not result.interrupted
    newest, kept = (
        Checkpoints(tmp_path / name).latest() for name in ("checkpoints", "best/checkpoints")
    )
    assert newest is not None and newest.name == f"step-{last:08d}"
    assert (
        kept is not None
        and kept.name == f"step-{best:08d}"
        and len(Checkpoints(kept.parent).all()) == 1
    )


def test_the_evaluation_before_the_first_step_may_be_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer(tmp_path, patience=3)
    result = evaluating(run, [1, 9, 8, 7, 6, 5, 4, 3, 2], monkeypatch).run()
    assert (result.step, result.best_step, result.stopped_early) == (3, 0, True)
    assert not (tmp_path / "best").exists()
    said = said_at_the_end(result, run.config, tmp_path)
    assert "1.0000, before the first step: training made the model worse" in said
    line = "the run stopped early at step 3: 1 evaluation brought no lower loss; give a larger --patience, or 0"
    with pytest.raises(UsageError, match=f"^{line}$"):
        check_patience(dataclasses.replace(result, evaluations_since_best=1), 1)


def test_patience_is_counted_over_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluating(trainer(tmp_path, steps=4, patience=3), [9, 3, 4, 4, 2.5], monkeypatch).run()
    result = evaluating(trainer(tmp_path, patience=3), [5, 5, 5, 5], monkeypatch).run(resume=True)
    assert (result.step, result.best_step, result.stopped_early) == (7, 4, True)
    with pytest.raises(
        UsageError,
        match="stopped early at step 7: 3 evaluations brought no lower loss; give a larger",
    ):
        trainer(tmp_path, patience=3).run(resume=True)
    result = evaluating(trainer(tmp_path, patience=4), [5], monkeypatch).run(resume=True)
    assert (result.step, result.stopped_early) == (8, False)


def test_the_best_model_is_that_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights: dict[int, torch.Tensor] = {}

    class Weights(Callback):
        def on_step(self, trainer: Trainer, row: dict[str, Any]) -> None:
            weights[row["step"]] = trainer.model.embed_tokens.weight.detach().clone()

    words = load_tokenizer(None)
    words.set_chat_template()
    run = tiny_trainer(
        tiny_model("delayed"), tmp_path, documents=words.files(), steps=4, keep_best=True
    )
    evaluating(run, [9, 5, 2, 3, 4], monkeypatch).callbacks = [Weights()]
    run.run()
    best = CausalLM.from_pretrained(tmp_path / "best", device="cpu")
    assert torch.equal(best.embed_tokens.weight, weights[2]) and not torch.equal(
        weights[2], weights[4]
    )
    assert best.recipe.name == "delayed" and fp8_state(best)
    assert (
        load_tokenizer(tmp_path / "best").files()
        == load_tokenizer(tmp_path).files()
        == words.files()
    )
    assert torch.equal(
        CausalLM.from_pretrained(tmp_path, device="cpu").embed_tokens.weight, weights[4]
    )


@pytest.mark.parametrize("eval_every", [0, 2, 3])
@pytest.mark.parametrize("keep_best", [True, False])
def test_the_best_model_may_be_that_of_the_last_step(
    keep_best: bool, eval_every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where that is the only evaluation."""
    losses = [9, 3, 2] if eval_every == 2 else [9, 3]
    run = evaluating(
        trainer(tmp_path, steps=3, eval_every=eval_every, keep_best=keep_best), losses, monkeypatch
    )
    result = run.run()
    assert (result.best_step, result.best_eval_loss) == (3, losses[-1])
    kept = Checkpoints(tmp_path / "best/checkpoints").latest()
    assert (kept.name if kept else None) == ("step-00000003" if keep_best else None)


@pytest.mark.parametrize("given", [Callback, lambda trainer, row: None])
def test_a_class_or_a_function_is_no_callback(given: Any, tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match="callbacks are instances of subclasses of te_models.Callback"
    ):
        dataclasses.replace(trainer(tmp_path), callbacks=[given])
