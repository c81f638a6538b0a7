"""Small files are whole or not there, whatever fails while they are written."""

import errno
import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from te_models.cli.commands import main
from te_models.errors import SaveError
from te_models.files.atomic import replace_text, replacing_file
from te_models.training.plots import new_figure, save_figure
from te_models.training.profiling import StepProfiler

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/some/.hidden.name")


def draw(path: Path) -> None:
    pytest.importorskip("matplotlib")
    save_figure(new_figure((2, 1)), path)


def trace(path: Path) -> None:
    profiler = StepProfiler(torch.nn.Linear(2, 2), "1", path.parent.parent, last=1)
    with profiler.profiling(1):
        torch.ones(2) + 1


def show(path: Path) -> None:
    data = path.parent / "data.jsonl"
    data.write_text(json.dumps({"prompt": "q", "completion": "a"}))
    code = main(["data", "preview", "--data", str(data), "--html", str(path)])
    data.unlink()
    if code:
        raise SaveError(f"could not write {path}: No space left on device")


# What writes a file, and the file, in the folder of a test.
WRITERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "text": (lambda path: replace_text(path, "whole\n"), "file.txt"),
    "figure": (draw, "loss.png"),
    "trace": (trace, "profile/step-00000001.json.gz"),
    "page": (show, "page.html"),
}


@pytest.mark.parametrize("before", ["", "there"])
@pytest.mark.parametrize("name", WRITERS)
def test_a_file_is_whole_or_as_it_was(
    name: str, before: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, file = WRITERS[name]
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    if before:
        path.write_text(before)

    def full(*arguments: Any) -> None:
        raise FULL

    with monkeypatch.context() as patch:
        # The last call of each writer: by then the bytes have been written beside the place.
        patch.setattr(os, "replace", full)
        with pytest.raises(SaveError) as caught:
            write(path)
    assert str(caught.value) == f"could not write {path}: No space left on device"
    assert [one.name for one in path.parent.iterdir()] == ([path.name] if before else [])
    assert not before or path.read_text() == before
    write(path)
    content = path.read_bytes()
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    assert (
        content.startswith(b"\x89PNG")
        or b"whole" in content
        or b"</html>" in content
        or gzip.decompress(content)
    )


@pytest.mark.parametrize("name", ["text", "page"])
def test_a_disk_that_is_read_only_is_named_by_the_users_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """There not even a file that is not there can be deleted."""
    write, file = WRITERS[name]

    def refuse(path: Path, *arguments: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr("te_models.files.atomic.write_file", refuse)
    if name == "text":
        monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(SaveError) as caught:
        write(tmp_path / file)
    said = str(caught.value) if name == "text" else capsys.readouterr().err
    assert f"could not write {tmp_path / file}: Read-only file system" in said
    assert ".saving-" not in said


def test_an_error_that_is_not_the_disks_stays_itself(tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    with pytest.raises(ZeroDivisionError), replacing_file(path) as fresh:
        fresh.write_bytes(b"half")
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())
