"""A trace of some steps: which steps, what it names, and that no bit of training changes."""

import gzip
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import PRETRAIN, losses, tiny_model, tiny_trainer

from te_models.cli import main
from te_models.errors import UsageError
from te_models.training.profiling import profiled_steps


def traces(folder: Path) -> dict[str, list[dict[str, Any]]]:
    found = {}
    for path in sorted((folder / "profile").glob("*")):
        found[path.name] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return found


@pytest.mark.parametrize("checkpointing", [pytest.param("none", marks=pytest.mark.slow), "full"])
def test_the_traces_name_the_layers_and_change_no_bit(checkpointing: str, tmp_path: Path) -> None:
    for name, steps in (("plain", ""), ("traced", "2:3")):
        model = tiny_model("current", activation_checkpointing=checkpointing)
        tiny_trainer(model, tmp_path / name, steps=4, profile=steps, record=2).run()
    assert losses(tmp_path / "plain") == losses(tmp_path / "traced")
    assert not (tmp_path / "plain" / "profile").exists()
    found = traces(tmp_path / "traced")
    assert list(found) == ["step-00000002.json.gz", "step-00000003.json.gz"]
    for events in found.values():
        spans = {event["name"]: event for event in events if event.get("ph") == "X"}
        for name in ("layers.0", "layers.1.self_attn", "layers.1.mlp.down_proj"):
            assert name in spans
        block, linear = spans["layers.1"], spans["layers.1.mlp.down_proj"]
        assert block["ts"] <= linear["ts"]
        assert linear["ts"] + linear["dur"] <= block["ts"] + block["dur"] or checkpointing == "full"
        assert any("aten::" in name for name in spans)


@pytest.mark.parametrize("dora", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_trace_of_adapters_changes_no_bit(dora: bool, tmp_path: Path) -> None:
    """Their layers on rows of a fused linear run as one product with it, traced or not, with the same dropout."""
    pytest.importorskip("peft")
    from te_models.training.lora_run import LoraRun  # noqa: PLC0415  needs peft
    from te_models.training.settings import LoraSettings  # noqa: PLC0415

    for name, steps in (("plain", ""), ("traced", "1:2")):
        model = tiny_model("bf16")
        adapters = LoraRun(model, LoraSettings(rank=4, dropout=0.3, dora=dora))
        tiny_trainer(model, tmp_path / name, saved=adapters, steps=3, profile=steps).run()
    assert losses(tmp_path / "plain") == losses(tmp_path / "traced")
    spans = {event["name"] for event in traces(tmp_path / "traced")["step-00000002.json.gz"]}
    assert {"layers.0.self_attn.qkvg_proj", "layers.0.mlp.down_proj"} <= spans


@pytest.mark.parametrize(("text", "steps"), [("", []), ("7", [7]), ("3:5", [3, 4, 5])])
def test_steps(text: str, steps: list[int]) -> None:
    assert list(profiled_steps(text)) == steps


@pytest.mark.parametrize("text", ["x", "5:3", "0", "1:", "-2", "1:2:3"])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=f"profile='{text}'"):
        profiled_steps(text)


@pytest.mark.usefixtures("texts")
def test_a_run_names_its_record_and_its_traces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "a run"
    command = [*PRETRAIN, "--steps", "2", "--recipe", "current", "--record", "1", "--profile", "2"]
    assert main([*command, "--out", str(run)]) == 0
    said = capsys.readouterr()
    record = f"record {run}/record, which `te-models report '{run}'` shows"
    assert record in " ".join(said.out.split())
    assert f"{run}/profile, for ui.perfetto.dev" in " ".join(said.out.split())


@pytest.mark.slow
@pytest.mark.usefixtures("texts")
def test_the_profiler_writes_no_lines_of_its_own(tmp_path: Path) -> None:
    """In a process of its own: PyTorch reads once per process how much its profiler is to say."""
    command = [sys.executable, "-m", "te_models", *PRETRAIN, "--steps", "2", "--profile", "2"]
    environment = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    ended = subprocess.run(
        [*command, "--out", str(tmp_path / "run")], capture_output=True, text=True, env=environment
    )
    assert ended.returncode == 0, ended.stderr
    assert "profiler_start" not in ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("steps", "late"), [("1", False), ("2", False), ("3", True), ("2:4", True)]
)
def test_steps_after_the_end_are_told(steps: str, late: bool, tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tiny_trainer(tiny_model("bf16"), tmp_path, steps=2, profile=steps)
    said = [str(one.message) for one in caught if "--profile asks for step" in str(one.message)]
    assert len(said) == late
    assert not late or "the run ends after step 2" in said[0]
