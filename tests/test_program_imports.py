"""Benchmarks and examples import names that exist: most of them run on GPUs only, and would be found broken there."""

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAMS = sorted(
    path for folder in ("benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")
)


def imported(path: Path) -> list[tuple[str, str]]:
    """Module and name of each import from this project."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += [(node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
    return [(module, name) for module, name in found if module.split(".")[0] == "te_models"]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_name_exists(path: Path) -> None:
    for module, name in imported(path):
        if module.startswith("te_models.engine.native") or "_triton" in module:
            assert importlib.util.find_spec(module) is not None  # not importable on every machine
            continue
        found = importlib.import_module(module)
        is_module = (
            importlib.util.find_spec(f"{module}.{name}") if hasattr(found, "__path__") else None
        )
        assert not name or hasattr(found, name) or is_module, f"{module} has no {name}"
