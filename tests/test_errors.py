"""Optional packages: what is missing, too old or cannot be imported is named in one line, with what to install."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from te_models.errors import MissingPackage, needs

ROOT = Path(__file__).parent.parent
Pretend = Callable[[str, str | None], None]


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (None, "drawing needs numpy 1.26 or newer: pip install -U 'te-models[train]'"),
        ("1.25.9", "drawing needs numpy 1.26 or newer, not 1.25.9: pip install -U 'te-models[train]'"),
        ("1.3", "drawing needs numpy 1.26 or newer, not 1.3: pip install -U 'te-models[train]'"),
        ("0.99", "drawing needs numpy 1.26 or newer, not 0.99: pip install -U 'te-models[train]'"),
        ("1.26", None),
        ("1.26.1.dev0+cpu", None),
        ("2", None),
    ],
)
def test_a_version_is_compared_by_its_numbers(pretend: Pretend, version: str | None, message: str | None) -> None:
    pretend("numpy", version)
    if message is None:
        with needs("drawing", "numpy", "1.26", "train"):
            return
    with pytest.raises(MissingPackage, match=f"^{re.escape(message)}$"), needs("drawing", "numpy", "1.26", "train"):
        raise AssertionError("not to be reached")


def test_a_package_that_cannot_be_imported_is_named(pretend: Pretend) -> None:
    """As torchao 0.18 on torch 2.9, whose import asks torch for a name that is not there."""
    pretend("numpy", "2.0")
    message = (
        "drawing needs numpy, and the installed 2.0 cannot be imported (no name 'x'): pip install -U torch 'te-models"
    )
    with pytest.raises(MissingPackage, match=re.escape(message)), needs("drawing", "numpy", "1.26", "train"):
        raise ImportError("no\n name 'x'")


@pytest.mark.parametrize("version", [None, "0.18.1"])
def test_lora_without_peft_is_one_line(pretend: Pretend, monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    pretend("peft", version)
    monkeypatch.delitem(sys.modules, "te_models.training.lora", raising=False)
    with pytest.raises(
        ImportError, match=r"^te_models.training.lora needs peft .* or newer.*: pip install -U 'te-models\[lora\]'$"
    ):
        importlib.import_module("te_models.training.lora")


def test_the_oldest_versions_are_those_of_pyproject() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    asked = {
        tuple(ast.literal_eval(argument) for argument in node.args[1:])
        for path in (ROOT / "te_models").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "needs"
    }
    assert {package for package, _, _ in asked} == {
        "huggingface_hub", "matplotlib", "peft", "pyarrow", "tokenizers", "torchao"
    }  # fmt: skip
    for package, oldest, extra in asked:
        (line,) = re.findall(rf"^{extra} = (.*)$", text, re.MULTILINE)
        assert f'"{package}>={oldest}"' in line
