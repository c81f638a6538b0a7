"""Metrics sent to TensorBoard, Weights & Biases and trackio."""

import importlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_runs import PRETRAIN

from te_models.cli import main
from te_models.errors import MissingPackage, UsageError
from te_models.training.loggers import LOGGERS, Loggers
from te_models.training.metrics import read_metrics
from te_models.training.run_file import read_provenance

RUN = [*PRETRAIN, "--recipe", "bf16", "--steps", "2", "--out", "run"]


@pytest.mark.filterwarnings("ignore")  # tensorboard's own
def test_tensorboard_reads_every_number_of_metrics_jsonl(texts: None) -> None:
    pytest.importorskip("tensorboard")
    reader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    assert main([*RUN, "--log", "tensorboard"]) == 0
    events = reader.EventAccumulator("run/tensorboard")
    events.Reload()
    rows = read_metrics(Path("run/metrics.jsonl"))
    # All but the step, and the recipe, which is no number.
    names = {name for row in rows for name in row} - {"step", "recipe"}
    assert set(events.Tags()["scalars"]) == names and "eval_loss" in names
    for name in names:
        found = {event.step: event.value for event in events.Scalars(name)}
        assert found == pytest.approx(
            {row["step"]: row[name] for row in rows if name in row}, rel=1e-6
        )


@pytest.mark.parametrize("library", ["wandb", "trackio"])
def test_a_run_is_one_run_there_over_a_resume(
    library: str, texts: None, pretend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for the library, which this machine need not have."""
    started: list[dict[str, Any]] = []
    sent: list[tuple[int, dict[str, Any]]] = []
    ended: list[int] = []

    def init(**options: Any) -> Any:
        started.append(options)
        return SimpleNamespace(
            log=lambda values, step: sent.append((step, values)), finish=lambda: ended.append(1)
        )

    pretend(library, "9.0")
    monkeypatch.setitem(sys.modules, library, SimpleNamespace(init=init))
    assert main([*RUN, "--log", library]) == 0
    assert main(["pretrain", "--resume", "run", "--steps", "3"]) == 0, (
        "the logger is a setting of the run"
    )
    assert [step for step, _ in sent] == [1, 2, 3] and len(ended) == 2
    rows = read_metrics(Path("run/metrics.jsonl"))
    numbers = [{name: row[name] for name in row if name != "recipe"} for row in rows]
    assert [{"step": step, **values} for step, values in sent] == numbers
    assert started[0]["name"] == started[1]["name"] == f"run-{read_provenance(Path('run'))['id']}"
    assert started[0]["config"]["steps"] == 2 and started[0]["config"]["scheme"] == "none"
    assert started[0]["project"] == "te-models" and started[0]["resume"] == "allow"
    assert library != "wandb" or started[0]["id"] == started[1]["id"]


def test_no_record_is_begun_of_a_run_that_is_refused(
    texts: None, pretend: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The Trainer refuses before any record exists, though the loggers are among its callbacks."""
    started: list[dict[str, Any]] = []
    pretend("wandb", "9.0")
    library = SimpleNamespace(init=lambda **options: started.append(options))
    monkeypatch.setitem(sys.modules, "wandb", library)
    assert main([*RUN, "--log", "wandb", "--balance-loss", "0.1"]) == 2
    assert "balance_loss and z_loss are for experts" in capsys.readouterr().err
    assert started == []


@pytest.mark.parametrize("name", LOGGERS)
def test_a_missing_library_is_one_line_before_anything_is_done(
    name: str, texts: None, pretend: Any, capsys: pytest.CaptureFixture
) -> None:
    pretend(name, None)
    with pytest.raises(MissingPackage):
        Loggers(name)
    assert main([*RUN, "--log", name]) == 2
    line = rf"te-models: --log {name} needs {name} [\d.]+ or newer: pip install -U 'te-models\[{name}\]'\n"
    assert re.fullmatch(line, capsys.readouterr().err) and not Path("run").exists()


def test_names_are_checked() -> None:
    assert Loggers("").names == Loggers(" , ").names == []
    with pytest.raises(UsageError, match="unknown logger 'tensorbord': did you mean 'tensorboard'"):
        Loggers("tensorbord")
