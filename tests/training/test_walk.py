"""The walk from the command `finetune` to the first step, followed through real calls."""

import dataclasses
import functools
import re
import sys
from pathlib import Path
from types import FrameType

import pytest
from tiny_runs import SHORT, tiny_model

import te_models
from te_models.cli import main
from te_models.config.data import DataConfig
from te_models.config.training import TrainConfig

ROOT = Path(te_models.__file__).parent
PAGE = ROOT.parent / "docs/internals/design.md"
Call = tuple[str, str, str, str]  # file and function that calls, file and function that is called


class Arrived(BaseException):
    """The first optimizer step begins."""


@functools.cache
def file_of(name: str) -> str | None:
    """The file of a function in te_models, such as "training/finetune.py"."""
    path = Path(name)
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else None


def follow(arguments: list[str]) -> list[Call]:
    """The calls from one file of te_models to another until the first optimizer step, each pair of functions once."""
    found: dict[Call, None] = {}

    def note(frame: FrameType, event: str, argument: object) -> None:
        called = file_of(frame.f_code.co_filename) if event == "call" else None
        if called is None:
            return
        above = frame.f_back
        while above is not None and file_of(above.f_code.co_filename) is None:
            above = above.f_back
        importing = above is not None and above.f_code.co_name == "<module>"
        caller = file_of(above.f_code.co_filename) if above is not None and not importing else None
        if (
            above is not None
            and caller is not None
            and caller != called
            and frame.f_code.co_name != "<module>"
        ):
            found[caller, above.f_code.co_name, called, frame.f_code.co_name] = None
        if called == "optim/master.py" and frame.f_code.co_name == "step":
            sys.setprofile(None)
            raise Arrived

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        main(arguments)
    except Arrived:
        return list(found)
    finally:
        sys.setprofile(before)
    raise AssertionError("the run ended before its first step")


@pytest.mark.filterwarnings("ignore")
def test_the_walk_of_finetune(texts: None) -> None:
    """It has at most the calls that the page states, and passes the files that the page lists in their order."""
    tiny_model().save_pretrained("m")
    calls = follow(
        ["finetune", "--model", "m", *SHORT, "--steps", "1", "--recipe", "bf16", "--out", "run"]
    )
    own = [call for call in calls if call[0].split("/")[0] in ("cli", "training", "data")]
    text = PAGE.read_text()
    (stated,) = re.findall(r"at most (\d+) calls between files", text)
    assert len(own) <= int(stated), len(own)
    (walk,) = re.findall(r"<!-- walk: fine-tuning -->(.*?)<!-- end walk -->", text, re.DOTALL)
    listed = re.findall(r"\]\(../../te_models/([\w/.]+)\)", walk)
    entered = list(dict.fromkeys(called for _, _, called, _ in calls))
    assert listed == sorted(listed, key=entered.index)


def test_the_page_says_where_each_setting_takes_effect() -> None:
    (table,) = re.findall(
        r"<!-- settings -->(.*?)<!-- end settings -->", PAGE.read_text(), re.DOTALL
    )
    rows = [row.split("|")[1] for row in table.strip().splitlines()[2:]]
    named = [name.strip() for row in rows for name in row.split(",")]
    fields = [one.name for owner in (DataConfig, TrainConfig) for one in dataclasses.fields(owner)]
    assert sorted(named) == sorted(fields)


def test_the_functions_and_files_where_settings_take_effect_exist() -> None:
    text = PAGE.read_text()
    (table,) = re.findall(r"### The fine-tuning loop(.*?)<!-- end settings -->", text, re.DOTALL)
    source = "\n".join(path.read_text() for path in ROOT.rglob("*.py"))
    defined = set(re.findall(r"^ *(?:def|class) (\w+)", source, re.MULTILINE))
    defined |= set(re.findall(r"^    (\w+): ", source, re.MULTILINE))  # fields
    rows = [line for line in table.splitlines() if line.startswith("|")]
    named = re.findall(r"`([\w./]+)`", "".join(row.split("|")[2] for row in rows))
    assert len(named) > 30
    for name in named:
        if "/" in name:
            assert (ROOT / name).is_file(), name
        else:
            assert name.rpartition(".")[2] in defined, name
