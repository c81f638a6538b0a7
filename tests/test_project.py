"""Files for people who work on the project: one version, and forms and workflows that agree with the code."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

import te_models
from benchmarks.mutations import PLANTED
from te_models.cli.commands import cli
from te_models.config.toml import read_toml

ROOT = Path(__file__).parent.parent
YAML = [ROOT / "CITATION.cff", ROOT / ".pre-commit-config.yaml", *(ROOT / ".github").rglob("*.yml")]
DOTTED = re.compile(
    r"""(?<!['"])\bte_models((?:\.\w+)+)"""
)  # a string by itself may be a key of click's
FILES = re.compile(r"\b(?:te_models|tests|benchmarks|examples)/[\w./-]+\.(?:py|sh)\b")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def pinned(package: str) -> str:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith(f"{package}==")).split("==")[1].strip()


def test_the_version_stands_in_one_place() -> None:
    about = read_toml(ROOT / "pyproject.toml")
    assert "version" not in about["project"] and "version" in about["project"]["dynamic"]
    source = ROOT / about["tool"]["hatch"]["version"]["path"]
    assert source == Path(te_models.__file__).resolve()
    assert re.findall(r'^__version__ = "(.+?)"', source.read_text(), re.M) == [
        te_models.__version__
    ]
    assert "version" not in yaml.safe_load((ROOT / "CITATION.cff").read_text())


def test_what_is_printed_and_saved_has_that_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where another version of the package is installed, or none."""
    monkeypatch.setattr(te_models, "__version__", "9.8.7")
    model = te_models.CausalLM.from_preset(
        "gated-nano", recipe="bf16", device="cpu", num_hidden_layers=1
    )
    model.save_pretrained(tmp_path / "saved")
    assert '"te_models": "9.8.7"' in (tmp_path / "saved/manifest.json").read_text()


def test_the_command_prints_the_version() -> None:
    assert te_models.__version__ in CliRunner().invoke(cli, ["--version"]).output


def test_the_changelog_has_this_version_and_what_is_unreleased() -> None:
    headings = re.findall(
        r"^## \[?([^\]\s]+)\]?", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert headings[:2] == ["Unreleased", te_models.__version__]


@pytest.mark.parametrize("path", YAML, ids=name)
def test_yaml_is_yaml(path: Path) -> None:
    assert isinstance(yaml.safe_load(path.read_text()), dict)


def test_hooks_run_the_pinned_ruff() -> None:
    repos: list[dict[str, Any]] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())[
        "repos"
    ]
    (ruff,) = [repo for repo in repos if "ruff" in repo["repo"]]
    assert ruff["rev"] == f"v{pinned('ruff')}"
    assert [hook["id"] for hook in ruff["hooks"]] == ["ruff-check", "ruff-format"]


def test_the_workflow_covers_the_oldest_python_and_calls_the_checks() -> None:
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    jobs = yaml.safe_load(workflow)["jobs"]
    versions = jobs["checks"]["strategy"]["matrix"]["python"]
    oldest = read_toml(ROOT / "pyproject.toml")["project"]["requires-python"].removeprefix(">=")
    assert versions == ["3.10", "3.11", "3.12", "3.13"] and versions[0] == oldest
    assert any(step.get("run", "").startswith(".ci/run") for step in jobs["checks"]["steps"])
    systems = jobs["quickstart"]["strategy"]["matrix"]["os"]
    assert systems == ["macos-latest", "windows-latest"]


WITHOUT_POSIX = """
import os, runpy, shutil, sys
import torch, safetensors.torch
shutil._use_fd_functions = False  # as there: Python 3.13 deletes folders by flags that go below
for name in ("fcntl", "resource"):
    sys.modules[name] = None
for name in ("O_NONBLOCK", "O_NOFOLLOW", "O_CLOEXEC", "pread", "fork"):
    delattr(os, name)
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@pytest.mark.slow
def test_the_quickstart_needs_nothing_that_windows_lacks() -> None:
    """As far as that can be tried elsewhere: the modules and flags of POSIX are gone."""
    command = [sys.executable, "-c", WITHOUT_POSIX, str(ROOT / ".ci/quickstart.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert f"te-models {te_models.__version__} ran" in ran.stdout


def texts() -> list[Path]:
    """All pages and programs but the log, which names things as they were, and recordings."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    code = [
        path
        for folder in ("te_models", "tests", "examples", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
    ]
    log = {ROOT / "docs/LOG.md", *(ROOT / "docs/log").glob("*.md")}
    return [path for path in pages + code if path not in log and path.name != "CHANGELOG.md"]


def exists(dotted: str) -> bool:
    """Return whether a name such as te_models.model.kv_cache.KVState is that of a module, or of a name in it."""
    here = ROOT / "te_models"
    parts = dotted.split(".")[1:]
    while parts and (here / parts[0]).is_dir():
        here /= parts.pop(0)
    if parts and (here / f"{parts[0]}.py").is_file():
        here /= f"{parts.pop(0)}.py"
    if not parts:
        return True
    if here == ROOT / "te_models":
        return parts[0] in (*te_models.__all__, "__version__", "__file__", "__all__")
    source = here if here.suffix else here / "__init__.py"
    named: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            named.add(node.name)
        elif isinstance(node, ast.alias):
            named.add(node.asname or node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            named.add(node.id)
    return parts[0] in named


def test_names_and_files_in_the_text_exist() -> None:
    stale = []
    for path in texts():
        text = path.read_text()
        found = {f"te_models{match}" for match in DOTTED.findall(text)}
        wrong = [
            dotted for dotted in found if not exists(dotted) and not dotted.endswith((".py", ".md"))
        ]
        wrong += [file for file in set(FILES.findall(text)) if not (ROOT / file).exists()]
        stale += [f"{name(path)}: {one}" for one in sorted(wrong)]
    assert not stale


def test_every_planted_mistake_still_has_its_place() -> None:
    """A mutation whose text has changed plants nothing, and no longer says that a test would notice."""
    gone = []
    for name, mutations, _ in PLANTED:
        text = (ROOT / "te_models" / name).read_text()
        for description, mutation in mutations.items():
            if mutation.planted(text) is None:
                gone.append(f"{name}: {description}")
    assert not gone
