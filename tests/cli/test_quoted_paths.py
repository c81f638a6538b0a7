"""A command or an option that a message offers can be copied, whatever is in the names of folders."""

import shlex
from pathlib import Path

import pytest

from te_models.cli.commands import main
from te_models.data.unrecognized_rows import unrecognized
from te_models.errors import CheckpointError
from te_models.saving.checkpoint_choice import ADAPTER_CONFIG
from te_models.saving.pretrained import read_shape
from te_models.training.merging import _merged_step
from te_models.training.result import Result

RUN = "my run's"  # with a space and a quote
QUOTED = shlex.quote(RUN)
RUN_TOML = shlex.quote(f"{RUN}/run.toml")


@pytest.mark.parametrize(
    "command, advice",
    [
        (["finetune", RUN], f"{RUN_TOML} runs it once more, and --resume {QUOTED} continues it"),
        (["finetune", "my data"], "as --model 'my data', data as --data 'my data'"),
        (["finetune", "--resume", RUN, "--out", RUN], f"--resume {QUOTED} or --resume --out {QUOTED}"),
        (["finetune", "--resume", f"{RUN}/checkpoints"], f"give --resume {QUOTED}, which continues"),
        (["capture", RUN, "--step", "3"], f"`te-models replay {QUOTED} --step N`"),
        (["capture", RUN, "--step", "3"], f"started with --out {QUOTED} keeps them"),
        (["replay", RUN, "--step", "3"], f"`te-models capture {QUOTED} --step 3`, and run or --resume it"),
    ],
)  # fmt: skip
def test_folders_are_quoted(
    command: list[str],
    advice: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(RUN, "checkpoints").mkdir(parents=True)
    Path(RUN, "run.toml").touch()
    Path("my data").mkdir()
    main(command)
    said = capsys.readouterr()
    assert advice in said.out + said.err


def test_the_folder_of_merged_adapters_is_quoted(tmp_path: Path) -> None:
    adapters = tmp_path / RUN / "adapter"
    adapters.mkdir(parents=True)
    (adapters / ADAPTER_CONFIG).write_text("{}")
    with pytest.raises(CheckpointError) as refused:
        read_shape(adapters)
    convert = f"te-models convert --format te --model {shlex.quote(str(adapters))} --out MERGED"
    assert f"{convert}, then --model MERGED has both" in str(refused.value)
    merged = tmp_path / RUN / "merged"
    merged.mkdir()
    with pytest.raises(CheckpointError) as refused:
        read_shape(adapters)
    assert f"not a model: --model {shlex.quote(str(merged))} has both" in str(refused.value)


def test_the_command_for_the_best_adapters_is_quoted(tmp_path: Path) -> None:
    run = tmp_path / RUN
    best = run / "best/checkpoints/step-00000002"
    best.mkdir(parents=True)
    (best.parent / "latest").write_text(best.name)
    line = _merged_step(run, Result(step=3, eval_loss=2.0, best_step=2, best_eval_loss=1.0))
    words = shlex.split(line.partition("eval loss: ")[2])
    assert words[-3:] == [str(run / "best"), "--out", str(run / "merged-best")]


def test_a_column_with_a_space_is_quoted() -> None:
    advice = unrecognized({"prompt ": "q", "completion": "a"}, "a.csv:1")
    assert advice.endswith("--columns 'prompt=prompt '")


@pytest.mark.parametrize("command", ["pretrain", "export"])
def test_a_folder_named_like_a_home_is_not_made(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A shell leaves the ~ of --out=~/mine as it is."""
    home = tmp_path / "a home"
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(home))
    assert main([command, "--out=~/mine"]) == 2
    whole = shlex.quote(f"{home}/mine")
    assert (
        f"--out ~/mine: the shell has not replaced ~: give --out {whole}" in capsys.readouterr().err
    )
