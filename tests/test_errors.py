"""Error types and exit codes; optional packages that are missing, too old or broken."""

import ast
import importlib
import io
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from te_models import errors
from te_models.cli import commands
from te_models.config.data import DataConfig
from te_models.config.training import TrainConfig
from te_models.errors import (
    PLACES,
    SYNONYMS,
    CheckpointError,
    DataError,
    DataUnavailable,
    Diverged,
    EngineError,
    LostPeer,
    MissingPackage,
    OutOfMemory,
    SaveError,
    TeModelsError,
    UsageError,
    needs,
    unknown,
)
from te_models.huggingface.registration import OLDEST
from te_models.model.options import ModelOptions
from te_models.training import loggers
from te_models.training.settings import SETTINGS

ROOT = Path(__file__).parent.parent
RUN_FAILURES = (Diverged, EngineError, LostPeer, OutOfMemory)
Pretend = Callable[[str, str | None], None]


@pytest.mark.parametrize(
    "kind", [TeModelsError, UsageError, DataUnavailable, MissingPackage, errors.OutputInUse]
)
def test_a_message_is_one_short_line_of_text(kind: type[TeModelsError]) -> None:
    text = str(kind("a\nb\r\x1b[31mc\x9bd\u2028\ud800 \u00e9" + "x" * 5000 + "end"))
    assert text.startswith("a b  [31mc d \\ud800 \u00e9xx") and text.endswith("xxend")
    assert len(text) <= errors.LONGEST and len(text.splitlines()) == 1 and text.encode()
    assert str(kind("as it is: 'a  b'")) == "as it is: 'a  b'"


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (None, "drawing needs numpy 1.26 or newer: pip install -U 'te-models[train]'"),
        (
            "1.25.9",
            "drawing needs numpy 1.26 or newer, not 1.25.9: pip install -U 'te-models[train]'",
        ),
        ("1.3", "drawing needs numpy 1.26 or newer, not 1.3: pip install -U 'te-models[train]'"),
        ("0.99", "drawing needs numpy 1.26 or newer, not 0.99: pip install -U 'te-models[train]'"),
        ("1.26", None),
        ("1.26.1.dev0+cpu", None),
        ("2", None),
    ],
)
def test_a_version_is_compared_by_its_numbers(
    pretend: Pretend, version: str | None, message: str | None
) -> None:
    pretend("numpy", version)
    if message is None:
        with needs("drawing", "numpy", "1.26", "train"):
            return
    with (
        pytest.raises(MissingPackage, match=f"^{re.escape(message)}$"),
        needs("drawing", "numpy", "1.26", "train"),
    ):
        raise AssertionError("not to be reached")


def test_torchao_logs_nothing_while_a_package_that_needs_it_is_imported(
    pretend: Pretend, caplog: pytest.LogCaptureFixture
) -> None:
    pretend("numpy", "2.0")
    logger = logging.getLogger("torchao")
    with needs("drawing", "numpy", "1.26", "train"):
        logger.warning("Failed to load a kernel")
    assert not caplog.records
    logger.warning("of a call of the user's own")
    assert len(caplog.records) == 1


def test_a_package_that_cannot_be_imported_is_named(pretend: Pretend) -> None:
    """Importing torchao 0.18 on torch 2.9 fails, since torch lacks a name."""
    pretend("numpy", "2.0")
    message = (
        "drawing needs numpy, and the installed 2.0 cannot be imported (no name 'x'): "
        "pip install -U torch 'te-models"
    )
    with (
        pytest.raises(MissingPackage, match=re.escape(message)),
        needs("drawing", "numpy", "1.26", "train"),
    ):
        raise ImportError("no\n name 'x'")


@pytest.mark.parametrize("version", [None, "0.18.1"])
def test_lora_without_peft_is_one_line(
    pretend: Pretend, monkeypatch: pytest.MonkeyPatch, version: str | None
) -> None:
    pretend("peft", version)
    monkeypatch.delitem(sys.modules, "te_models.training.lora", raising=False)
    with pytest.raises(
        ImportError,
        match=r"^te_models.training.lora needs peft .* or newer.*: pip install -U 'te-models\[lora\]'$",
    ):
        importlib.import_module("te_models.training.lora")


def test_the_oldest_versions_are_those_of_pyproject() -> None:
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    asked = {
        tuple(ast.literal_eval(argument) for argument in node.args[1:])
        for path in (ROOT / "te_models").rglob("*.py")
        if " needs(" in path.read_text("utf-8") or "\nneeds(" in path.read_text("utf-8")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "needs"
        if path.name != "loggers.py"
    }
    asked |= {(name, library.oldest, name) for name, library in loggers.LOGGERS.items()}
    assert {package for package, _, _ in asked} == {
        "datasets", "huggingface_hub", "lm-eval", "matplotlib", "peft", "pyarrow", "tensorboard", "tokenizers",
        "torchao", "trackio", "transformers", "wandb",
    }  # fmt: skip
    assert ("transformers", ".".join(map(str, OLDEST)), "hf") in asked
    for package, oldest, extra in asked:
        (line,) = re.findall(rf"^{extra} = (.*)$", text, re.MULTILINE)
        (floor,) = re.findall(rf'"{package}>=([0-9.]+)', line)
        assert [int(part) for part in floor.split(".")] >= [
            int(part) for part in oldest.split(".")
        ], package


def test_every_error_is_a_type_with_an_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command line goes by the type alone: an error with another exit code needs no change there."""
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, TeModelsError)
    ]
    assert len(kinds) > 10
    for kind in kinds:

        def fail(*args: object, kind: type[TeModelsError] = kind, **options: object) -> None:
            raise kind("first\n line")

        monkeypatch.setattr(commands.cli, "main", fail)
        assert (
            commands.main([])
            == kind.exit_code
            == (1 if issubclass(kind, RUN_FAILURES) or kind is TeModelsError else 2)
        )
        assert capsys.readouterr().err == "te-models: first line\n"


def test_callers_may_catch_python_s_own_types() -> None:
    assert all(issubclass(kind, ValueError) for kind in (UsageError, CheckpointError, DataError))
    assert issubclass(DataUnavailable, OSError) and issubclass(MissingPackage, ImportError)
    assert all(issubclass(kind, RuntimeError) for kind in (SaveError, Diverged))


def test_names_of_other_libraries_lead_to_ours() -> None:
    flags = [f"--{name.replace('_', '-')}" for name in SETTINGS] + ["--max-new-tokens"]
    theirs = {
        other: name for name, others in reversed(SYNONYMS.items()) for other in others.split()
    }
    for other, name in theirs.items():
        flag = f"--{name.replace('_', '-')}"
        assert flag in flags
        assert (
            f"--{other.replace('_', '-')}" not in flags or name == "preset"
        )  # bench has no --model
        assert f"did you mean {flag!r}?" in str(
            unknown("option", f"--{other}", flags, "--help-all")
        )
        assert f"did you mean {name!r}?" in str(unknown("keyword", other, [name, "seed"]))
    assert "did you mean 'mxfp8'?" in str(unknown("recipe", "MXFP8", ["mxfp8", "nvfp4"]))
    assert "did you mean 'fp8-block'?" in str(
        unknown("format", "fp8", ["fp8-block", "fp8-tensor", "mxfp8"])
    )
    assert "did you mean '--batch-size'?" in str(unknown("option", "--bs", flags))


def test_an_argument_of_another_constructor_is_told_where_it_goes() -> None:
    """The command line has one list of options; in Python they are divided, and each has its place."""
    places = {
        "open_data": DataConfig.__dataclass_fields__,
        "CausalLM.from_pretrained or from_preset": ModelOptions.__annotations__,
        "add_lora(model, r=...)": ["lora", "lora_alpha", "lora_dropout"],
        "TrainConfig": TrainConfig.__dataclass_fields__,
    }
    assert places.keys() == PLACES.keys()
    for place, arguments in PLACES.items():
        assert not set(arguments.split()) - set(places[place])
    for owner in (TrainConfig, DataConfig):
        known = owner.__dataclass_fields__
        for place, arguments in PLACES.items():
            for name in set(arguments.split()) - set(known):
                line = re.escape(f"{name!r} of {owner.__name__}: give it to {place}")
                with pytest.raises(UsageError, match=f"{line}$"):
                    owner(**{name: 1})
    with pytest.raises(
        UsageError, match="'max_length' of DataConfig: give seq_len to TrainConfig$"
    ):
        DataConfig(max_length=512)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="'max_length' of TrainConfig: did you mean 'seq_len'"):
        TrainConfig(max_length=512)  # type: ignore[call-arg]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_long_line_breaks_between_words_in_a_terminal_alone(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    monkeypatch.setenv("COLUMNS", "80")
    text = "te-models: note: " + "a-long-word " * 20 + "/one/path/of/" + "x" * 90
    shown = errors.for_stream(text, stream)
    assert shown.split() == text.split()
    if terminal:
        first, *others = shown.split("\n")
        assert all(len(line) <= 80 for line in [first, *others[:-1]])
        assert others and all(line.startswith("  ") for line in others)
    else:
        assert shown == text
