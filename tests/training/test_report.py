"""The summary of a run: compiled or not, a CUDA graph or not, and why."""

import io
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tiny_runs import TINY, said_at_the_end, tiny_model, tiny_trainer

from te_models import CausalLM
from te_models.cli import main
from te_models.config.training import TrainConfig
from te_models.kernels.dispatch import COMPILE_MODES, compile_mode
from te_models.training import report
from te_models.training.next_commands import _broken
from te_models.training.progress import progress
from te_models.training.report import _optimizer_options, _parameters, speed_rows
from te_models.training.result import Result

GRAPH, COMPILED = "forward and backward", "elementwise operations"


@pytest.mark.parametrize(
    "options, fields, compiled, graph",
    [
        ({}, {}, COMPILED, GRAPH),
        (dict(compile="max-autotune"), {}, f"{COMPILED}, max-autotune", GRAPH),
        (
            dict(compile=False),
            dict(cuda_graph=False),
            "off, because compile=False",
            "off, because cuda_graph=False",
        ),
        ({}, dict(gradient_accumulation=2), COMPILED, GRAPH),
        ({}, dict(gradient_accumulation=2, parallel="ddp"), COMPILED, GRAPH),
        ({}, dict(parallel="ddp"), COMPILED, GRAPH),
        (
            dict(activation_offload=True),
            {},
            COMPILED,
            "off, because activation offload copies to the host",
        ),
    ],
)
def test_on_a_gpu(
    options: dict[str, Any],
    fields: dict[str, Any],
    compiled: str,
    graph: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Planned on the meta device, where a GPU would be the default."""
    model = CausalLM.from_preset("gated-nano", device="meta", engine="emulated", **TINY, **options)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert speed_rows(model, TrainConfig(**fields)) == {"compiled": compiled, "CUDA graph": graph}


def test_the_plan_says_so_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["plan", "--preset", "gated-nano"]) == 0
    said = capsys.readouterr().out
    for name in ("compiled", "CUDA graph"):
        assert f"{name}: off, because the model is on cpu" in said


def test_modes_of_compilation() -> None:
    assert [compile_mode(given) for given in (True, False, *COMPILE_MODES)] == [
        "default",
        None,
        *COMPILE_MODES,
    ]
    with pytest.raises(
        ValueError, match="unknown compile 'max_autotune': did you mean 'max-autotune'"
    ):
        CausalLM.from_preset("gated-nano", device="meta", compile="max_autotune")


def test_a_run_has_the_parameters_of_its_plan() -> None:
    """Without rows of padding, as of a gate per head; of a model with adapters too."""
    model = CausalLM.from_preset(
        "gated-nano", device="meta", engine="emulated", attention_gate="headwise", **TINY
    )
    count = model.config.num_parameters
    assert (
        model.config.num_padding_parameters > 0 and _parameters(model) == f"{count:,} in bfloat16"
    )
    model.requires_grad_(False)
    model.norm.weight.requires_grad_(True)
    assert _parameters(model) == f"{count:,} in bfloat16, 32 of them trained"


@pytest.mark.parametrize(("peak", "printed"), [(37 * 2**20, "37.00 MiB"), (3 * 2**30, "3.00 GiB")])
def test_peak_memory_has_the_unit_of_its_size(peak: int, printed: str) -> None:
    said = said_at_the_end(Result(peak_memory=peak, checkpoint="a"), TrainConfig(), Path("runs"))
    match = re.search(r"peak memory +(.+?) *\n", said)
    assert match is not None and match[1] == printed


def logged(steps: int, start: int = 0, seconds: float = 0.0, evaluated: int = 0) -> list[str]:
    """The lines of a run in a log, whose steps take so long, and of which every `evaluated`-th is evaluated."""
    out, now = io.StringIO(), 0.0
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("te_models.training.progress.time.monotonic", lambda: now)
        with progress(Console(file=out, width=140), TrainConfig(steps=steps), start) as show:
            for step in range(start + 1, steps + 1):
                now += seconds
                row = dict(step=step, loss=2.0, tokens_per_second=1000.0)
                show(row | ({"eval_loss": 3.0} if evaluated and step % evaluated == 0 else {}))
    return [line for line in out.getvalue().splitlines() if line.startswith("step")]


def test_a_log_has_lines_of_some_steps() -> None:
    assert len(logged(1000)) == 20 and "step     50  loss 2.0000  1,000 tokens/s" in logged(1000)
    assert len(logged(7)) == 7
    assert len(logged(1000, start=900)) == 20
    assert len(logged(1000, evaluated=10)) == 100
    assert len(logged(1000, seconds=61.0)) == 1000  # slow steps


def test_a_bar_is_in_place_of_these_lines() -> None:
    out = io.StringIO()
    terminal = Console(file=out, width=80, force_terminal=True)
    with progress(terminal, TrainConfig(steps=3), 0) as show:
        for step in (1, 2, 3):
            show(dict(step=step, loss=2.0, tokens_per_second=1000.0))
    assert "tokens/s" in out.getvalue() and "loss 2.0000" not in out.getvalue()


@pytest.mark.parametrize("shown", [True, False])
def test_a_trainer_shows_progress_if_asked(
    shown: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_trainer(tiny_model(), tmp_path, steps=3).run(progress=shown)
    tiny_trainer(tiny_model(), tmp_path, steps=4).run(resume=True, progress=shown)
    said = capsys.readouterr().out
    assert said.count("eval loss") == (4 if shown else 0)


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_long_command_is_broken_between_options(width: int) -> None:
    command = ["te-models", "generate", "--model", "runs/a run", "--prompt", "say it"]
    text = _broken(command, width)
    assert shlex.split(text.replace("\\\n", " ")) == command
    assert all(len(line) <= width for line in text.splitlines())


def test_without_evaluation_the_outcome_has_the_training_loss(tmp_path: Path) -> None:
    said = said_at_the_end(Result(step=3, loss=2.5), TrainConfig(steps=3), tmp_path)
    assert "2.5000 nats per token" in said and "eval loss" not in said and "nan" not in said


@pytest.mark.parametrize(
    "options",
    [
        "momentum=0.9,rest=adamw8bit,rest_lr=0.05",
        dict(momentum=0.9, rest="adamw8bit", rest_lr=0.05),
    ],
)
def test_a_narrow_terminal_breaks_the_options_of_an_optimizer_between_them(options: Any) -> None:
    config = TrainConfig(optimizer="muon8bit", optimizer_options=options)
    assert _optimizer_options(config) == ", momentum=0.9, rest=adamw8bit, rest_lr=0.05"
    assert _optimizer_options(TrainConfig()) == ""


def test_a_run_without_progress_leaves_what_a_callback_prints_in_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with progress(Console(quiet=True, force_terminal=True), TrainConfig(steps=3), 0):
        sys.stdout.write("step 1 of my own\n")
    assert capsys.readouterr().out == "step 1 of my own\n"


@pytest.mark.parametrize(("columns", "width"), [(None, report.LOG_WIDTH), ("90", 90), ("", 100)])
def test_a_redirected_log_has_the_width_that_is_asked_for(
    columns: str | None, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    assert report.run_console().width == width


@pytest.mark.parametrize("terminal", [False, True])
def test_a_log_breaks_no_path(terminal: bool) -> None:
    """A terminal does, rather than cut it."""
    path = "/runs/" + "a-long-name/" * 12 + "metrics.jsonl"
    written = io.StringIO()
    console = Console(file=written, width=80, force_terminal=terminal)
    rows = {"eval loss before": "5.0 nats per token", "metrics": f"{path}, which plots read"}
    report.print_table(console, report.table_of(rows))
    lines = written.getvalue().splitlines()
    assert (path in lines[1]) is not terminal
    assert console.width == 80
    if terminal:
        assert path in "".join(line[18:].strip() for line in lines[1:])
