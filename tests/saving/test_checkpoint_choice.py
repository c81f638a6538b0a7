"""Commands say which checkpoint of a run they take, and hints name the one with the lowest evaluation loss."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from bases import CHATML, write_chats, write_model, write_tokenizer

pytest.importorskip("transformers")

from safetensors.torch import load_file

from te_models import CausalLM
from te_models.cli import main
from te_models.files.formats import read_json
from te_models.saving.checkpoint_choice import describe_choice

RUN = ["--recipe", "bf16", "--seq-len", "128", "--batch-size", "2", "--sample-tokens", "0"]
RUN += ["--device", "cpu", "--schedule", "constant", "--eval-every", "1"]
WORSE = ["--learning-rate", "0.3", "--steps", "6"]  # after a few steps


def train(tmp_path: Path, *more: str) -> tuple[Path, dict[str, Any]]:
    """Return a run's folder, and the result in its last checkpoint."""
    base = write_model(tmp_path / "base", tokenizer=write_tokenizer(CHATML))
    data, run = str(write_chats(tmp_path / "chats.jsonl")), tmp_path / "run"
    assert (
        main(["finetune", "--model", str(base), "--data", data, *RUN, *more, "--out", str(run)])
        == 0
    )
    newest = max((run / "checkpoints").glob("step-*"))
    return run, read_json(newest / "training.json")["result"]


def models_in_hints(said: str) -> set[str]:
    """Return what the commands below "next" name as the model."""
    lines = said[said.index("\nnext") :].splitlines()
    commands = [
        shlex.split(line, comments=True) for line in lines if line.startswith("  te-models")
    ]
    return {words[words.index("--model") + 1] for words in commands}


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(WORSE, marks=pytest.mark.slow),
        [*WORSE, "--patience", "1"],
        [*WORSE, "--steps", "2", "--lora", "4", "--lora-alpha", "400", "--merge"],
    ],
)
def test_a_run_that_became_worse(more: list[str], tmp_path: Path, capsys: Any) -> None:
    if "--lora" in more:
        pytest.importorskip("peft")
    run, result = train(tmp_path, *more)
    best, last = result["best_step"], result["step"]
    assert 0 < best < last and result["best_eval_loss"] < result["eval_loss"]
    said = capsys.readouterr().out
    assert models_in_hints(said) == {f"{run}/best"}
    losses = f"{result['best_eval_loss']:.4f}", f"{result['eval_loss']:.4f}"
    assert (
        f"next, with step {best}, the lowest eval loss: {losses[0]}; step {last}, the last" in said
    )
    assert said.index(losses[1], said.index("\nnext")) > 0
    if "--merge" in more:
        assert re.search(rf"merged from +step {last}, the last; step {best} has a lower eval", said)

    data = str(tmp_path / "chats.jsonl")
    asked = ["--chat", "--prompt", "What?", "--max-new-tokens", "2"]
    commands = {
        "evaluate": ["--data", data],
        "generate": asked,
        "export": ["--format", "bf16", "--overwrite", "--out", str(tmp_path / "export")],
        "convert": ["--overwrite", "--out", str(tmp_path / "convert")],
        "parity": ["--data", data, "--export", "bf16", "--seq-len", "64"],
        "plan": [],
    }
    for command, rest in commands.items():
        place = [] if command == "convert" else ["--device", "cpu"]
        for model, line in (
            (run, f"{run}: step {last}, the last, with an eval loss of {losses[1]}; step {best} has {losses[0]}: "
                  f"--model {run}/best takes it"),
            (run / "best", f"{run}/best: step {best}, with the lowest eval loss, {losses[0]}; the last, step {last}, "
                           f"has {losses[1]}"),
        ):  # fmt: skip
            capsys.readouterr()
            assert main([command, "--model", str(model), *place, *rest]) == 0
            found = capsys.readouterr()
            assert found.err.count(line) == 1, (command, found.err)
            assert line not in found.out
    # A run that starts from this one says it too.
    if "--lora" not in more:
        assert main(["finetune", "--model", str(run), "--data", data, *RUN, "--steps", "1",
                     "--out", str(tmp_path / "second")]) == 0  # fmt: skip
        assert f"{run}: step {last}, the last" in capsys.readouterr().out


def test_a_run_whose_last_step_is_its_best(tmp_path: Path, capsys: Any) -> None:
    run, result = train(tmp_path, "--steps", "3", "--learning-rate", "0.001")
    assert result["best_step"] == 3
    said = capsys.readouterr().out
    assert (
        models_in_hints(said) == {str(run)} and "next, with step 3, the last and the best" in said
    )
    line = f"{run}: step 3, the last and the best, with an eval loss of {result['eval_loss']:.4f}"
    assert describe_choice(run) == line


def test_the_best_adapters_run_as_they_were_trained(tmp_path: Path) -> None:
    """In the shape of the run, and on weights that are in FP8 alone."""
    pytest.importorskip("peft")
    more = [
        "--steps",
        "2",
        "--lora",
        "4",
        "--recipe",
        "current",
        "--fp8-params",
        "--rope-theta",
        "300",
    ]
    run, result = train(
        tmp_path, *more, "--num-layers-at-start-in-bf16", "0", "--num-layers-at-end-in-bf16", "0"
    )
    assert result["best_step"]
    for folder in (run, run / "best"):
        model = CausalLM.from_pretrained(folder, device="cpu")
        assert (model.fp8_params, model.recipe.name, model.config.rope_theta) == (
            True,
            "current",
            300,
        )


def test_a_best_checkpoint_that_was_not_saved(tmp_path: Path, capsys: Any) -> None:
    run, result = train(tmp_path, *WORSE, "--no-keep-best")
    said = capsys.readouterr().out
    assert "not saved: --keep-best does" in said
    hints = said[said.index("\nnext") :]
    assert "training made the model worse" in hints and "export" not in hints
    (again,) = [
        shlex.split(line, comments=True)
        for line in hints.splitlines()
        if line.startswith("  te-models")
    ]
    assert main(again[1:]) == 0  # the same run, which keeps the step that the first one lost
    best = describe_choice(f"{run}-best/best")
    assert best is not None and f"step {result['best_step']}, with the lowest eval loss" in best
    line = describe_choice(run)
    assert line is not None and line.endswith(
        f"had {result['best_eval_loss']:.4f} and was not saved"
    )


def test_other_folders_need_no_line(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base")
    (tmp_path / "empty/checkpoints").mkdir(parents=True)
    assert [describe_choice(name) for name in (base, tmp_path / "empty", "owner/model")] == [
        None
    ] * 3


def test_adapters_in_a_model_are_named(tmp_path: Path) -> None:
    """An export with --format stored is a base, with adapters beside its files that no command adds to it."""
    base = write_model(tmp_path / "a base")
    (base / "adapter").mkdir()
    assert describe_choice(base) is None
    (base / "adapter/adapter_config.json").write_text("{}")
    assert describe_choice(base) == (
        f"{base}: without the adapters in it: --model '{base}/adapter' takes both"
    )


@pytest.mark.parametrize(
    "command", ["evaluate --data held_out.txt --model", "plan --model", "finetune --resume"]
)
def test_a_folder_of_runs_is_not_a_run(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        checkpoints = tmp_path / "runs" / name / "checkpoints"
        checkpoints.mkdir(parents=True)
        (checkpoints / "latest").write_text("step-00000001\n")
    Path("held_out.txt").write_text("What is 2 + 2?")
    assert main([*command.split(), "runs"]) == 2
    said = capsys.readouterr().err
    assert "runs holds runs: give one of them" in said
    assert "(runs/one, runs/two)" in said


@pytest.mark.parametrize(
    "command", [["convert"], ["export", "--format", "bf16", "--device", "cpu"]], ids=" ".join
)
@pytest.mark.parametrize("recipe", ["current", "blockwise"])
def test_fp8_weights_leave_a_run_as_the_optimizer_has_them(
    recipe: str, command: list[str], tmp_path: Path
) -> None:
    """A checkpoint has the masters in BF16, of which the FP8 weights of the model are a rounding."""
    run, _ = train(tmp_path, "--steps", "2", "--recipe", recipe, "--fp8-params",
                   "--num-layers-at-start-in-bf16", "0", "--num-layers-at-end-in-bf16", "0")  # fmt: skip
    out = tmp_path / "out"
    assert main([*command, "--model", str(run), "--out", str(out)]) == 0
    newest = max((run / "checkpoints").glob("step-*"))
    saved = load_file(newest / "model.safetensors")
    written = dict(CausalLM.from_pretrained(out, device="cpu", recipe="bf16").named_parameters())
    in_fp8 = dict(CausalLM.from_pretrained(run, device="cpu").named_parameters())
    rounded = 0
    for name, weight in written.items():
        assert torch.equal(weight, saved[name].to(weight.dtype)), name
        values = in_fp8[name].detach().float()
        rounded += not torch.equal(values, saved[name].float())
    assert rounded > 4
