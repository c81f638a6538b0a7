"""The folder of a run, and what `--resume` takes from its checkpoint where the user says nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from te_models import CausalLM
from te_models.cli import main
from te_models.errors import UsageError
from te_models.training.resume import run_folder, saved_choices
from te_models.training.trainer import Trainer

TINY = ["--hidden-size", "32", "--intermediate-size", "32", "--num-hidden-layers", "3", "--num-attention-heads", "1"]
TINY += [
    "--num-key-value-heads",
    "1",
    "--seq-len",
    "16",
    "--batch-size",
    "1",
    "--sample-tokens",
    "0",
    "--eval-every",
    "0",
]
RUN = ["finetune", "--preset", "gated-nano", "--device", "cpu", "--eval-batches", "1", *TINY]
CHOSEN = ["--recipe", "current", "--num-layers-at-end-in-bf16", "0", "--engine", "emulated", "--fp8-params"]
CHOSEN += ["--activation-checkpointing", "selective"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the command in an empty folder; returns the model that was trained."""
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    for name in ("text", "more"):
        Path(f"texts/{name}.txt").write_text(f"hello {name}, " * 400)
    models: list[CausalLM] = []
    build = Trainer.__post_init__
    monkeypatch.setattr(Trainer, "__post_init__", lambda self: (models.append(self.model), build(self))[1])

    def command(*options: str) -> CausalLM:
        assert main([*RUN, "--data", "texts", *options]) == 0
        return models[-1]

    return command


def choices(model: CausalLM) -> tuple[Any, ...]:
    return (
        model.recipe.to_dict(),
        model.engine,
        model.fp8_params,
        model.activation_checkpointing,
        model.activation_offload,
    )


def test_a_resumed_run_keeps_the_choices_of_its_checkpoint(run: Any, recwarn: pytest.WarningsRecorder) -> None:
    first = run("--steps", "1", *CHOSEN)
    assert (first.recipe.name, first.fp8_params, first.activation_checkpointing) == ("current", True, "selective")
    resumed = run("--steps", "2", "--resume")  # the only run there is
    assert choices(resumed) == choices(first)
    other = run("--steps", "3", "--resume", "--out", "runs/gated-nano-current", "--recipe", "bf16",
                "--activation-checkpointing", "none")  # fmt: skip
    assert (other.recipe.name, other.fp8_params, other.activation_checkpointing) == ("bf16", False, "none")
    assert "was trained under recipe 'current'; it goes on with" in str(recwarn.pop(UserWarning).message)


def test_a_checkpoint_from_before_they_were_saved_has_its_recipe_and_dtype() -> None:
    saved = saved_choices(Path(__file__).parents[1] / "saving/fixtures/commit-3a41a4b/run")
    assert saved.pop("recipe").name == "delayed"
    assert saved == dict(dtype=torch.bfloat16, fp8_params=False)


def test_the_folder_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_folder("here", "nano", "delayed", True) == Path("here")
    assert run_folder(None, "nano", "delayed", False) == Path("runs/nano-delayed")
    assert run_folder(None, "nano", None, True) is None
    for name in ("nano-bf16", "nano-delayed", "other-bf16"):
        Path("runs", name, "checkpoints").mkdir(parents=True)
        assert run_folder(None, "nano", None, False) is None
        if name == "nano-bf16":
            assert run_folder(None, "nano", None, True) == Path("runs/nano-bf16")
    with pytest.raises(UsageError, match="several runs could be resumed .runs/nano-bf16, runs/nano-delayed.: give one"):
        run_folder(None, "nano", None, True)
