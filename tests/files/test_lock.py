"""One run at a time writes to a folder; locks of dead processes lock nothing."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from te_models.errors import OutputInUse, SaveError, UsageError
from te_models.files.lock import LOCK, locked

HOLDER = "import sys, time\nfrom pathlib import Path\nfrom te_models.files.lock import locked\n" \
    "with locked(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(60)\n"  # fmt: skip


def holder(folder: Path) -> subprocess.Popen[str]:
    """A process that holds the lock of `folder`."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_another_process_is_named_and_its_crash_releases_the_lock(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with holder(tmp_path / "run") as process:
        with pytest.raises(OutputInUse) as caught, locked(tmp_path / "run"):
            pass
        assert str(caught.value) == (
            f"{tmp_path / 'run'} is in use by process {process.pid} on host {socket.gethostname()!r}: wait for it, or "
            "give another --out"
        )
        process.send_signal(signal.SIGKILL)
    assert (tmp_path / "run" / LOCK).exists()
    with locked(tmp_path / "run"):
        assert json.loads((tmp_path / "run" / LOCK).read_text())["process"] == os.getpid()
    assert f"process {process.pid}" in caplog.text and "taking it over" in caplog.text
    assert not (tmp_path / "run" / LOCK).exists()


def test_two_runs_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(OutputInUse, match=str(os.getpid())), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


@pytest.mark.parametrize("content", [b"", b"not JSON", b"[]", b'{"process": "x"}', b"\xff" * 5000,
                                     b"[" * 4096, b'{"process": 1e999, "host": "x"}'])  # fmt: skip
def test_any_content_of_the_file_is_survived(content: bytes, tmp_path: Path) -> None:
    (tmp_path / LOCK).write_bytes(content)
    with locked(tmp_path):
        pass


def link_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


@pytest.mark.parametrize(
    "make", [os.mkfifo, os.mkdir, *map(link_to, (LOCK, "/dev/zero", "precious"))]
)
def test_what_is_no_file_is_one_line(make: Callable[[Path], Any], tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    make(tmp_path / LOCK)
    with (
        pytest.raises(UsageError, match=r"\.lock cannot be locked \(.*\): remove it"),
        locked(tmp_path),
    ):
        pass
    assert os.path.lexists(tmp_path / LOCK) and (tmp_path / "precious").read_text() == "precious"


def test_an_error_inside_releases_the_lock(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), locked(tmp_path):
        raise ZeroDivisionError
    with locked(tmp_path):
        pass


def test_a_full_disk_names_the_file_and_releases_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(SaveError, match=r"\.lock: .*No space left"), locked(tmp_path):
            pass
    with locked(tmp_path):
        pass
