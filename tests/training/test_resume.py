"""The folder of a run, and the settings that `--resume` reads from its checkpoint by default."""

import dataclasses
import os
import shutil
import socket
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from fewer import every
from ranks import run_process
from tiny_runs import PRETRAIN, SHORT, losses, tiny_model

from te_models import CausalLM, TrainConfig
from te_models.cli import main
from te_models.config.toml import read_toml
from te_models.errors import UsageError
from te_models.files.lock import locked
from te_models.saving.run_folder import Checkpoints
from te_models.training import run_state
from te_models.training.resume import run_choices, run_folder, saved_choices
from te_models.training.run_file import read_provenance
from te_models.training.run_settings import resumed_settings, run_settings
from te_models.training.settings import RunSettings
from te_models.training.trainer import Trainer

CHOSEN = [
    "--recipe",
    "current",
    "--num-layers-at-end-in-bf16",
    "0",
    "--engine",
    "emulated",
    "--fp8-params",
]
CHOSEN += ["--activation-checkpointing", "selective"]


@pytest.fixture
def run(texts: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the command in an empty folder; returns the model that was trained."""
    models: list[CausalLM] = []
    build = Trainer.__post_init__
    monkeypatch.setattr(
        Trainer, "__post_init__", lambda self: (models.append(self.model), build(self))[1]
    )

    def command(*options: str) -> CausalLM:
        assert main([*PRETRAIN, *options]) == 0
        return models[-1]

    return command


@pytest.mark.filterwarnings("default")
def test_a_resumed_run_keeps_the_choices_of_its_checkpoint(
    run: Any, capsys: pytest.CaptureFixture
) -> None:
    first = run("--steps", "1", *CHOSEN)
    assert (first.recipe.name, first.fp8_params, first.activation_checkpointing) == (
        "current",
        True,
        "selective",
    )
    resumed = run("--steps", "2", "--resume")  # the only run there is
    assert (resumed.recipe.to_dict(), run_choices(resumed)) == (
        first.recipe.to_dict(),
        run_choices(first),
    )
    again = ("--resume", "--out", "runs/gated-nano-current", "--recipe")
    other = run("--steps", "3", *again, "delayed", "--activation-checkpointing", "none")
    assert (other.recipe.name, other.fp8_params, other.activation_checkpointing) == (
        "delayed",
        True,
        "none",
    )
    assert "was trained under recipe 'current'; it goes on with" in capsys.readouterr().err
    other = run("--steps", "4", *again, "bf16")
    assert (other.recipe.name, other.fp8_params) == ("bf16", False)
    assert "recipe 'bf16' has no FP8 weights: the run goes on without" in capsys.readouterr().err


def test_a_checkpoint_from_before_they_were_saved_has_its_recipe_and_dtype() -> None:
    newest = Checkpoints(
        Path(__file__).parents[1] / "saving/fixtures/commit-3a41a4b/run/checkpoints"
    ).latest()
    assert newest is not None
    saved = saved_choices(newest)
    assert saved.pop("recipe").name == "delayed"
    assert saved == dict(dtype=torch.bfloat16, fp8_params=False)


@pytest.mark.parametrize("record", [True, False])
def test_a_resumed_run_asks_for_its_engine_again(
    record: bool, run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A run that began on another machine, with and without its run.toml."""
    with monkeypatch.context() as there:
        there.setattr(
            run_state, "run_choices", lambda model: {**run_choices(model), "engine": "native"}
        )
        run("--steps", "1", "--recipe", "current", "--out", "mine")
    if not record:
        Path("mine/run.toml").unlink()
    capsys.readouterr()
    resumed = run("--steps", "2", "--resume", "--out", "mine")
    assert (resumed.engine, resumed.recipe.name) == ("emulated", "current")
    line = f"changed: the engine is emulated ({resumed.engine_reason}), was native"
    assert " ".join(capsys.readouterr().out.split()).count(line) == 1
    run("--steps", "3", "--resume", "--out", "mine")
    assert "changed: the engine" not in capsys.readouterr().out


@pytest.mark.filterwarnings("default:.* was trained under recipe")
def test_another_recipe_is_said_once(run: Any, capsys: pytest.CaptureFixture) -> None:
    run("--steps", "1", "--recipe", "current", "--out", "mine")
    capsys.readouterr()
    run("--steps", "2", "--resume", "--out", "mine", "--recipe", "bf16")
    said = capsys.readouterr()
    assert "changed: recipe" not in said.out
    assert said.err.count("was trained under recipe 'current'; it goes on with") == 1
    resumed = run("--steps", "3", "--resume", "--out", "mine", "--recipe", "auto")
    said = capsys.readouterr()
    assert (
        resumed.recipe.name == "bf16"
        and "recipe" not in said.err + said.out.split("te-models pretrain")[0]
    )


@pytest.mark.parametrize(
    "record",
    ["record = 5", "[record]\ncommands = 5", "[record]\nid = [[1]]\ncommands = { a = 1 }", ""],
)
def test_a_damaged_record_is_no_record(record: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(record)
    assert read_provenance(tmp_path)["commands"] == []


def test_the_folder_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    nano = dict(preset="gated-nano")
    new = run_settings("pretrain", {**nano, "recipe": "delayed"})
    assert run_folder(new) == Path("runs/gated-nano-delayed")
    assert run_folder(dataclasses.replace(new, out="here")) == Path("here")
    with pytest.raises(
        UsageError, match="nothing to resume: there is no run of gated-nano in runs/"
    ):
        resumed_settings("pretrain", nano)
    for name in ("gated-nano-bf16", "gated-nano-delayed", "other-bf16"):
        Path("runs", name, "checkpoints").mkdir(parents=True)
        if name == "gated-nano-bf16":
            assert resumed_settings("pretrain", nano).out == "runs/gated-nano-bf16"
    assert (
        resumed_settings("pretrain", {**nano, "recipe": "delayed"}).out == "runs/gated-nano-delayed"
    )
    with pytest.raises(
        UsageError,
        match="several runs could be resumed .runs/gated-nano-bf16, runs/gated-nano-delayed.: give",
    ):
        resumed_settings("pretrain", nano)
    Path("runs/other-bf16/run.toml").touch()
    with pytest.raises(
        UsageError, match="other-bf16/checkpoints is part of a run: give --resume runs/other-bf16, "
    ):
        resumed_settings("pretrain", nano, Path("runs/other-bf16/checkpoints"))


def test_a_run_from_a_file_takes_a_free_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = RunSettings(preset="gated-nano", recipe="bf16", file=Path("run.toml"))
    places = [
        Path("runs/gated-nano-bf16"),
        Path("runs/gated-nano-bf16-2"),
        Path("runs/gated-nano-bf16-3"),
    ]
    for number, place in enumerate(places):
        assert run_folder(settings) == place
        assert run_folder(settings, restarted=True) == places[max(0, number - 1)], (
            "a restart goes on in the last one"
        )
        (place / "checkpoints/step-00000001").mkdir(parents=True)


@pytest.mark.parametrize(
    "choices",
    every(
        3,
        [
            ["--recipe", "delayed"],
            ["--recipe", "current", "--fp8-params"],
            ["--recipe", "bf16", "--seed", "5"],
        ],
    ),
)
def test_resume_needs_only_the_folder_and_repeats_every_bit(choices: list[str], run: Any) -> None:
    """The whole run and the one in two parts have equal losses; the model that both start from is then gone."""
    run("--steps", "3", "--recipe", "delayed", "--learning-rate", "0.01", "--out", "start")
    tune = [
        "--model",
        "start",
        *SHORT,
        "--learning-rate",
        "0.01",
        "--schedule",
        "constant",
        *choices,
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the scales of the start have no use under another recipe
        assert main(["finetune", *tune, "--steps", "4", "--out", "whole"]) == 0
        assert main(["finetune", *tune, "--steps", "2", "--out", "parts"]) == 0
    shutil.rmtree("start")
    assert main(["finetune", "--resume", "parts", "--steps", "4"]) == 0
    assert losses("parts") == losses("whole") and len(losses("parts")) == 4
    commands: Any = read_provenance(Path("parts"))["commands"]
    assert len(commands) == 2 and "--resume parts" in commands[1]


def test_a_file_runs_again_with_the_same_bits(run: Any, capsys: pytest.CaptureFixture) -> None:
    run(
        "--steps",
        "2",
        *CHOSEN,
        "--learning-rate",
        "0.01",
        "--warmup-steps",
        "1",
        "--schedule",
        "constant",
    )
    first = Path("runs/gated-nano-current")
    assert main(["finetune", str(first / "run.toml"), "--steps", "3"]) == 0
    again = Path("runs/gated-nano-current-2")
    assert losses(again)[:2] == losses(first) and len(losses(again)) == 3
    one, other = (read_toml(folder / "run.toml") for folder in (first, again))
    assert other["training"].pop("steps") == 3 and one["training"].pop("steps") == 2
    assert {**one, "record": 0} == {**other, "record": 0}
    for name in ("training_data", "evaluation_data", "versions", "processes"):
        assert one["record"][name] == other["record"][name]


def test_a_resumed_run_says_what_differs_and_refuses_another_seed(
    run: Any, capsys: pytest.CaptureFixture
) -> None:
    run("--steps", "1", "--recipe", "bf16", "--out", "mine")
    capsys.readouterr()
    assert (
        main(
            [
                "pretrain",
                "--resume",
                "mine",
                "--steps",
                "2",
                "--learning-rate",
                "0.5",
                "--sample-tokens",
                "3",
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert "changed: learning_rate = 0.5, was 0.001" in said and "changed: steps = 2, was 1" in said
    assert "changed: sample_tokens = 3, was " in said
    assert read_toml(Path("mine/run.toml"))["training"]["learning_rate"] == 0.5
    assert main(["pretrain", "--resume", "mine", "--steps", "3", "--seed", "1"]) == 2
    assert "a resumed run keeps its seed" in capsys.readouterr().err
    assert main(["pretrain", "--resume", "mine", "--out", "mine"]) == 2
    assert main(["pretrain", "mine/run.toml", "--resume", "mine"]) == 2
    assert main(["pretrain", "--resume", "elsewhere"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert (
        len(errors) == 3
        and "give the folder once" in errors[0]
        and "elsewhere does not exist" in errors[2]
    )


@pytest.mark.parametrize("name", ["training_data", "evaluation_data"])
def test_fingerprints_follow_the_data(name: str, run: Any) -> None:
    run("--steps", "1", "--recipe", "bf16", "--out", "a")
    for file in ("text", "more"):
        Path(f"texts/{file}.txt").write_text(f"other {file}, " * 400)
    run("--steps", "1", "--recipe", "bf16", "--out", "b")
    assert (
        read_toml(Path("a/run.toml"))["record"][name]
        != read_toml(Path("b/run.toml"))["record"][name]
    )


@pytest.mark.slow
@pytest.mark.parametrize("lora", [[], ["--lora", "4", "--fp8-params"]])
def test_a_file_runs_on_two_processes_and_resumes_on_one(lora: list[str], run: Any) -> None:
    run("--steps", "1", "--recipe", "current", "--out", "start")
    tune = [
        "--model",
        "start",
        *SHORT,
        "--batch-size",
        "2",
        *lora,
        "--schedule",
        "constant",
        "--recipe",
        "current",
    ]
    assert main(["finetune", *tune, "--steps", "2", "--out", "one"]) == 0
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "te_models",
        "finetune",
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    said = run_process([sys.executable, *command, "one/run.toml", "--out", "two"], env=env).stdout
    assert f"2, {'ddp' if lora else 'fsdp'} (batches in 2)" in said
    assert losses("two") == pytest.approx(losses("one"), rel=1e-3)
    one, two = (read_toml(Path(folder, "run.toml")) for folder in ("one", "two"))
    for name in ("training_data", "evaluation_data"):
        assert one["record"][name] == two["record"][name]
    assert {**one, "record": 0} == {**two, "record": 0}
    for folder in ("one", "two"):
        assert main(["finetune", "--resume", folder, "--steps", "4"]) == 0
    assert losses("two") == pytest.approx(losses("one"), rel=1e-3) and len(losses("two")) == 4


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(
    ("then", "now", "said"),
    [
        ("none", "layers.0.", "layers.0.input_layernorm.weight, .* and 4 more were trained then and not now"),
        ("layers.0.", "none", "layers.0.input_layernorm.weight, .* and 4 more were frozen then and not now"),
        ("layers.0.", "layers.1.", "layers.1.* trained then and not now, layers.0.* frozen then and not now"),
        ("embed", "none", "embed_tokens.weight was frozen then and not now"),
        ("embed", "embed", None),
    ],
)  # fmt: skip
def test_a_resumed_run_trains_the_parameters_that_it_trained(
    then: str, now: str, said: str | None, optimizer: str, tmp_path: Path
) -> None:
    def trained(frozen: str, steps: int) -> Trainer:
        model = tiny_model()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))
        ids = torch.arange(32)[None]
        batches = [dict(input_ids=ids, labels=ids)] * 4
        config = TrainConfig(steps=steps, seq_len=32, batch_size=1, optimizer=optimizer)
        return Trainer(model, batches, eval_batches=None, config=config, out=tmp_path)

    trained(then, steps=1).run()
    resumed = trained(now, steps=2)
    before = [parameter.detach().clone() for parameter in resumed.model.parameters()]
    if said is None:
        assert resumed.run(resume=True).step == 2
        return
    with pytest.raises(UsageError, match=said) as error:
        resumed.run(resume=True)
    assert "\n" not in str(error.value)
    after = resumed.model.parameters()
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


def test_a_folder_with_a_run_is_refused_before_data_is_read(
    texts: None, capsys: pytest.CaptureFixture
) -> None:
    command = [*PRETRAIN, "--recipe", "bf16", "--out", "run"]
    assert main([*command, "--steps", "1"]) == 0
    shutil.rmtree("texts")
    capsys.readouterr()
    assert main([*command, "--steps", "2"]) == 2
    error = capsys.readouterr().err
    assert error == (
        "te-models: run already holds a run of 1 step: add --resume or give another --out\n"
    )


@pytest.mark.parametrize("options", [[], ["--resume"]], ids=["new", "resumed"])
def test_a_folder_in_use_is_refused_before_data_is_read(
    texts: None, capsys: pytest.CaptureFixture, options: list[str]
) -> None:
    """Data and model may take minutes, and the folder is another run's all that time."""
    run = Path("run")
    (run / "checkpoints").mkdir(parents=True)
    shutil.rmtree("texts")
    with locked(run):
        before = sorted(path.name for path in run.iterdir())
        assert main([*PRETRAIN, "--recipe", "bf16", "--out", "run", *options]) == 2
        assert sorted(path.name for path in run.iterdir()) == before
    assert capsys.readouterr().err == (
        f"te-models: run is in use by process {os.getpid()} on host {socket.gethostname()!r}: wait for it, or give "
        "another --out\n"
    )


def test_a_run_does_not_begin_in_the_folder_of_a_model(
    texts: None, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """`--model FOLDER` would go on to mean that model, and the run's own advice would try it."""
    folder = tmp_path / "model"
    CausalLM.from_preset("gated-nano", num_hidden_layers=1, recipe="bf16").save_pretrained(folder)
    before = sorted(path.name for path in folder.iterdir())
    capsys.readouterr()
    assert main([*PRETRAIN, "--recipe", "bf16", "--steps", "1", "--out", str(folder)]) == 2
    error = capsys.readouterr().err
    assert error == f"te-models: {folder} already holds a model: give another --out\n"
    assert main(["capture", str(folder), "--step", "2"]) == 2
    error = capsys.readouterr().err
    assert "holds a model and no run: give the folder of a run" in error
    assert sorted(path.name for path in folder.iterdir()) == before


@pytest.mark.filterwarnings("default:--data-workers has no effect")
def test_workers_that_have_nothing_to_do_are_noted(
    texts: None, capsys: pytest.CaptureFixture
) -> None:
    command = [*PRETRAIN, "--recipe", "bf16", "--steps", "1", "--out"]
    note = "te-models: note: --data-workers has no effect: the data was read into memory"
    assert main([*command, "memory", "--data-workers", "3"]) == 0
    assert note in capsys.readouterr().err
    assert main([*command, "streamed", "--data-workers", "0", "--streaming"]) == 0
    assert note not in capsys.readouterr().err


def test_a_run_does_not_begin_in_a_folder_of_adapters(
    texts: None, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """peft and servers would go on to read the adapters, and commands the run."""
    folder = tmp_path / "adapters"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    assert main([*PRETRAIN, "--recipe", "bf16", "--steps", "1", "--out", str(folder)]) == 2
    error = capsys.readouterr().err
    assert error == f"te-models: {folder} already holds adapters: give another --out\n"
    assert [path.name for path in folder.iterdir()] == ["adapter_config.json"]


def test_a_run_before_its_first_save_is_named_as_such(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "checkpoints").mkdir()
    assert main(["plan", "--model", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error == (
        f"te-models: {tmp_path} is the folder of a run that has no checkpoint: a run saves its first after some "
        "minutes, or at its end\n"
    )
