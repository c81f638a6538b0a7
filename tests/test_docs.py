"""README and docs: generated tables are current, and every link, file, section, flag and snippet exists."""

import ast
import json
import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from safetensors.torch import load_file

import benchmarks.make_tables as make_tables
import te_models
from te_models.cli.commands import cli
from te_models.data.formats import ALPACA, MESSAGES, PAIRS, SHAREGPT, TEXT, recognize, row_document

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
LOG = {ROOT / "docs/LOG.md", *(ROOT / "docs/log").glob("*.md")}
CURRENT = [page for page in PAGES if page not in LOG]  # the log names things as they were
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)(?:#[^)]*)?\)")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    return [code for found, code in BLOCK.findall(page.read_text()) if found == language]


# The table of predicted peaks plans all of them.
PLANS = ROOT / "docs/results/memory.md"


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=[pytest.mark.slow] if p == PLANS else []) for p in CURRENT],
    ids=name,
)
def test_generated_tables_are_current(page: Path) -> None:
    text = page.read_text()
    assert (
        text.count("<!-- generated: ")
        == text.count("<!-- end -->")
        == len(make_tables.MARKED.findall(text))
    )
    assert make_tables.filled(text) == text, "run make tables"


def test_every_table_is_on_a_page() -> None:
    shown = {
        found for page in CURRENT for _, found, _ in make_tables.MARKED.findall(page.read_text())
    }
    assert shown == set(make_tables.TABLES)


@pytest.mark.slow
def test_plots_are_drawn(tmp_path: Path) -> None:
    make_tables.draw_plots(tmp_path)
    assert {path.name for path in tmp_path.glob("*.png")} == {
        path.name for path in (ROOT / "docs/results").glob("*.png")
    }


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_files(page: Path) -> None:
    generated = {f"te_models{suffix}.md" for suffix in ("", *package_suffixes())}
    missing = [
        target
        for target in LINK.findall(page.read_text())
        if not (page.parent / target).exists()
        and not (page.parent.name == "reference" and target in generated)
    ]
    assert not missing


def package_suffixes() -> list[str]:
    folders = (
        path.parent.relative_to(ROOT / "te_models")
        for path in (ROOT / "te_models").rglob("*/__init__.py")
    )
    return ["." + ".".join(folder.parts) for folder in folders]


def test_the_reference_lists_the_public_names() -> None:
    rows = re.findall(r"\[(`.*?)\]\(te_models", (ROOT / "docs/reference/index.md").read_text())
    assert sorted(found for row in rows for found in re.findall(r"`(\w+)`", row)) == sorted(
        te_models.__all__
    )


@pytest.mark.parametrize("page", CURRENT, ids=name)
def test_commands_have_known_flags(page: Path) -> None:
    for code in blocks(page, "bash"):
        for line in code.replace("\\\n", " ").splitlines():
            words = [word for word in shlex.split(line, comments=True) if word != "..."]
            if words[:1] == ["te-models"]:
                command = cli.commands[words[1]]
            elif "te_models" in words and words[0] == "torchrun":
                words = words[words.index("te_models") - 1 :]
                command = cli.commands[words[2]]
                words = words[1:]
            else:
                continue
            command.make_parser(click.Context(command)).parse_args(words[2:])


@pytest.mark.parametrize("page", CURRENT, ids=name)
def test_python_is_python(page: Path) -> None:
    for code in blocks(page, "python"):
        ast.parse(code)


RUNNABLE = [
    ("README.md", 0),
    ("docs/guide/quickstart.md", 0),
    ("docs/guide/recipes.md", 0),
    ("docs/guide/checkpoints.md", 0),
    ("docs/guide/generation.md", 0),
    ("docs/internals/emulation.md", 0),
    ("docs/guide/data.md", 0),
    ("docs/guide/fine_tuning.md", 0),
    ("docs/guide/hybrids.md", 0),
    ("docs/guide/hybrids.md", 1),
    ("docs/reference/families.md", 0),
    ("docs/guide/experts.md", 0),
    ("docs/reference/experts.md", 0),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("page", "place"), RUNNABLE)
def test_snippets_run(
    page: str, place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(blocks(ROOT / page, "python")[place], page, "exec"), {"__name__": "__main__"})


@pytest.mark.filterwarnings("ignore")
def test_own_modules_go_to_disk_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page as one program: the restored block has the weights and the scales of the first."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for code in blocks(ROOT / "docs/guide/own_modules.md", "python"):
        exec(compile(code, "own_modules.md", "exec"), names)
    restored, block = names["restored"], names["block"]
    assert all(
        torch.equal(restored.get_parameter(name), value) for name, value in block.named_parameters()
    )
    saved = load_file(tmp_path / "scales.safetensors")
    assert saved and any(
        bool((value != 0).any()) for name, value in saved.items() if "amax" in name
    )
    assert names["again"].shape == names["x"].shape


@pytest.mark.parametrize("page", ["README.md", "docs/guide/data.md"])
def test_records_in_the_guide_are_of_all_formats(page: str) -> None:
    lines = [json.loads(line) for code in blocks(ROOT / page, "json") for line in code.splitlines()]
    assert [recognize(line) for line in lines] == [MESSAGES, SHAREGPT, ALPACA, PAIRS, TEXT]
    for line in lines:
        assert row_document(line, {}, page, page)
