"""A checkpoint without the files that only a resume reads is still a model; a resume names what is gone."""

from pathlib import Path
from typing import Any

import pytest
from tiny_runs import PRETRAIN, SHORT

from te_models.cli import main
from te_models.saving.run_folder import Checkpoints

LAST = ["--steps", "1", "--recipe", "delayed", "--no-keep-best"]


def run_folder(kind: str) -> Path:
    """A run of one step in an empty folder, full or with adapters; returns its checkpoint."""
    Path("texts").mkdir()
    for name in ("text", "more"):
        Path(f"texts/{name}.txt").write_text(f"hello {name}, " * 40)
    assert main([*PRETRAIN, *LAST, "--out", "run"]) == 0
    if kind == "lora":
        pytest.importorskip("peft")
        assert (
            main(["finetune", "--model", "run", "--lora", "2", *SHORT, *LAST, "--out", "tuned"])
            == 0
        )
    newest = Checkpoints(Path("tuned" if kind == "lora" else "run", "checkpoints")).latest()
    assert newest is not None
    return newest


@pytest.mark.parametrize("kind", ["full", pytest.param("lora", marks=pytest.mark.slow)])
def test_a_checkpoint_without_its_optimizer(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint = run_folder(kind)
    run = str(checkpoint.parent.parent)
    capsys.readouterr()
    whole = spoken(run, capsys)
    (checkpoint / "training.safetensors").unlink()
    assert spoken(run, capsys) == whole
    assert main(["finetune", "--resume", run, "--steps", "2"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert (
        len(errors) == 1
        and "is incomplete: it lacks training.safetensors, which was saved" in errors[0]
    )
    (checkpoint / "fp8_state.safetensors").unlink()  # a model under `delayed` needs its scales
    assert main(["generate", "--model", run, "--prompt", "hello"]) == 2
    assert "is incomplete: it lacks fp8_state.safetensors" in capsys.readouterr().err


def spoken(run: str, capsys: Any) -> list[str]:
    """What commands print about the model of a run."""
    commands = [
        ["generate", "--prompt", "hello", "--greedy", "--max-new-tokens", "4", "--device", "cpu"],
        ["evaluate", "--data", "texts", "--seq-len", "16", "--device", "cpu"],
        ["export", "--format", "bf16", "--out", "exported", "--overwrite", "--device", "cpu"],
    ]
    said = []
    for command, *options in commands:
        assert main([command, "--model", run, *options]) == 0
        said.append(capsys.readouterr().out)
    return said
