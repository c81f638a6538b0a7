"""Imports point down, between packages and within them, and heavy libraries are imported only where they are named."""

import ast
import functools
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "te_models"
ORDER = (  # packages and modules at the top, lowest first
    "errors", "entry_points", "garbage", "config", "files", "distributed", "device", "numerics", "kernels", "recorder",
    "engine", "fp8", "model", "interop", "extensions", "saving", "optim", "planning", "data", "serving", "generation",
    "causal_lm", "adapters", "huggingface", "training", "inspect", "cli", "__main__",
)  # fmt: skip
# Packages that may import a library, and those that run without torch.
ONLY_IN = {
    "transformer_engine": {"engine"},
    "transformer_engine_torch": {"engine"},
    "click": {"cli"},
    "jinja2": {"data"},
    "peft": {"adapters", "training"},
    "huggingface_hub": {"interop"},
    "transformers": {"data", "huggingface", "inspect", "serving"},
    "vllm": {"serving"},
    "safetensors": {"files"},
    "matplotlib": {"training"},
    "rich": {"cli", "planning", "serving", "training", "inspect"},
    "triton": {"numerics", "kernels", "optim"},
    "torchao": {"optim", "inspect"},
    "lm_eval": {"inspect"},
    "pickle": set(),
}
NO_TORCH = {"errors", "config"}


def _name(path: Path) -> str:
    return (
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        or "__init__"
    )


# Code for transformers that is copied into folders and never imported here.
COPIED = ROOT / "interop/remote_code"
FILES = {_name(path): path for path in sorted(ROOT.rglob("*.py")) if path.parent != COPIED}


@functools.cache
def _nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


@functools.cache
def _imports(path: Path, at_run_time: bool = False) -> set[str]:
    """Return the modules that a file imports, inside functions too; `at_run_time`: not those for type checkers."""
    found: set[str] = set()
    nodes = _nodes(path)
    if at_run_time:
        tests = ((node, node.test) for node in nodes if isinstance(node, ast.If))
        checked = [
            node
            for node, test in tests
            if isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"
        ]
        left_out = {id(inner) for node in checked for inner in ast.walk(node)}
        nodes = [node for node in nodes if id(node) not in left_out]
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, f"{path}: use absolute imports"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                # A module that is named through its package is no import of what the package itself defines.
                found |= {full} if full.removeprefix("te_models.") in FILES else {node.module, full}
    return found


def _arrows(name: str) -> set[str]:
    """Return the modules of te_models that `name` imports at run time."""
    inner = {
        target.removeprefix("te_models.")
        for target in _imports(FILES[name], True)
        if "te_models." in target
    }
    return {target for target in inner if target in FILES and target != name}


PACKAGES = sorted({name.split(".")[0] for name in FILES} - {"__init__"})


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_down(package: str) -> None:
    assert package in ORDER, f"give te_models/{package} a place in ORDER"
    wrong = []
    for name in FILES:
        if name.split(".")[0] != package:
            continue
        for target in _arrows(name):
            if ORDER.index(target.split(".")[0]) > ORDER.index(package):
                wrong.append(f"{name} imports {target}, which is above it")
        for target in _imports(FILES[name]):
            top = target.split(".")[0]
            if package not in ONLY_IN.get(top, {package}):
                wrong.append(f"{name} may not import {top}")
            if top == "torch" and package in NO_TORCH:
                wrong.append(f"{name} must not import torch")
    assert not wrong, "\n".join(wrong)


def test_an_engine_is_reached_through_get_engine_alone() -> None:
    """The name counts in a type annotation as well: whatever both engines need is in te_models.numerics."""
    for name, path in FILES.items():
        if name.split(".")[0] == "engine":
            continue
        inner = {
            target
            for target in _imports(path)
            if target.startswith(("te_models.engine.emulated", "te_models.engine.native"))
        }
        assert not inner, f"{name} imports {sorted(inner)}: take it from get_engine"


def test_transformer_engine_comes_before_its_library() -> None:
    """Python finds transformer_engine_torch, a library inside that package, once the package is imported."""
    found = 0
    for path in FILES.values():
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            if line.startswith("import transformer_engine_torch"):
                found += 1
                before = [line for line in lines[:number] if not line.startswith(" ")]
                assert any(
                    line.startswith("import transformer_engine.pytorch") for line in before
                ), path
    assert found


def test_no_modules_import_each_other_in_a_circle() -> None:
    left = {name: _arrows(name) for name in FILES if name != "__init__"}
    while free := {name for name, targets in left.items() if not targets & left.keys()}:
        left = {name: targets for name, targets in left.items() if name not in free}
    assert not left, f"these import each other: {sorted(left)}"


def test_a_description_of_a_layer_does_not_know_the_config_that_it_is_made_from() -> None:
    """Not for type checkers either: it takes the values that it needs."""
    left = {
        name: {
            target.removeprefix("te_models.")
            for target in _imports(path)
            if target.startswith("te_models.config.")
        }
        for name, path in FILES.items()
        if name.startswith("config.")
    }
    while free := {name for name, targets in left.items() if not targets & left.keys()}:
        left = {name: targets for name, targets in left.items() if name not in free}
    assert not left, f"these import each other: {sorted(left)}"


def test_every_name_that_benchmarks_and_examples_import_exists() -> None:
    """No test imports them all, and the type checker lets missing imports pass."""
    missing = []
    for folder in ("benchmarks", "examples"):
        for path in sorted((ROOT.parent / folder).rglob("*.py")):
            for node in _nodes(path):
                module = node.module if isinstance(node, ast.ImportFrom) else None
                if module is None or not module.startswith("te_models."):
                    continue
                owner = module.removeprefix("te_models.")
                owner = owner if owner in FILES else f"{owner}.__init__"
                for alias in node.names if isinstance(node, ast.ImportFrom) else []:
                    whole = f"{module}.{alias.name}".removeprefix("te_models.")
                    defined = _defined(FILES[owner]) if owner in FILES else set()
                    if whole not in FILES and alias.name not in defined:
                        missing.append(f"{path.name}:{node.lineno}: {module}.{alias.name}")
    assert missing == []


@functools.cache
def _defined(path: Path) -> set[str]:
    """Return the names that a module defines or imports."""
    found = {node.id for node in _nodes(path) if isinstance(node, ast.Name)}
    for node in _nodes(path):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


# Names of Transformer Engine and of vLLM for a class that te-models has under the same name, and classes that engines
# have in common.
NAMED_TWICE = {
    "GatedAttention",
    "MLP",
    "Recipe",
    "Linear",
    "GroupedLinear",
    "LinearOfTorch",
    "LayerNormWithoutBias",
    "RMSNorm",
    "StoredLinear",
    "StoredGroupedLinear",
}


def test_no_two_classes_have_one_name() -> None:
    """A reader who has learned a name should not meet it with another meaning."""
    owners: dict[str, set[str]] = {}
    for name, path in FILES.items():
        for node in _nodes(path):
            public = isinstance(node, ast.ClassDef) and not node.name.startswith("_")
            if public and node.col_offset == 0:
                owners.setdefault(node.name, set()).add(name)
    twice = {one: names for one, names in owners.items() if len(names) > 1}
    assert twice.keys() - NAMED_TWICE == set(), twice


def test_the_design_lists_the_packages_in_this_order() -> None:
    block = (ROOT.parent / "docs/internals/design.md").read_text().split("```\n")[1]
    assert [line.split()[0] for line in block.splitlines()] == [
        name for name in reversed(ORDER) if name != "__main__"
    ]


def test_few_modules_lie_outside_packages() -> None:
    assert len(set(ROOT.glob("*.py")) - {ROOT / "__init__.py", ROOT / "__main__.py"}) <= 6


def test_every_file_is_of_readable_length() -> None:
    long = {name: len(path.read_text().splitlines()) for name, path in FILES.items()}
    assert {name: lines for name, lines in long.items() if lines > 500} == {}


def test_code_for_transformers_needs_only_torch_and_transformers() -> None:
    own = {path.stem for path in COPIED.glob("*.py")}
    for path in COPIED.glob("*.py"):
        nodes = [
            node
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        named = [
            node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
            for node in nodes
        ]
        tops = {str(name).split(".")[0] for name in named}
        assert tops <= {"torch", "transformers"} | own | sys.stdlib_module_names


def test_every_listed_package_exists() -> None:
    named = NO_TORCH.union(*ONLY_IN.values())
    assert named <= set(ORDER) and set(ORDER) <= {name.split(".")[0] for name in FILES}
