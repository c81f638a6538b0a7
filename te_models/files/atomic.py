"""Files and folders that appear complete or not at all, even after a crash, a full disk or a kill at any moment.

A folder is written under a hidden name beside its place, every file and the folder fsynced, then renamed into place. A
folder that was there before is first renamed aside and deleted last, so at any moment one of the two is whole;
`readable` finds it and `sweep` tidies up. This relies on rename and on fsync of folders, which Windows does not have:
there a crash of the system may lose a folder that was just written.

One process writes to a path at a time. If two do, one of them fails with `SaveError`; their files never mix.
"""

import contextlib
import glob
import hashlib
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from te_models.errors import CheckpointError, SaveError

CHUNK_BYTES = 4 * 2**20
STAGED = "staged"  # in the names of folders that `staging_folder` makes
_ERRNO = re.compile(r"^\[Errno \d+\] ")


def first_line(error: BaseException) -> str:
    """Return the message of an exception as one line of bounded length, without the number of a system error."""
    return _ERRNO.sub("", (str(error).splitlines() or [type(error).__name__])[0])[:300]


@contextlib.contextmanager
def reraising(
    place: str | Path,
    *kinds: type[Exception],
    error: type[Exception] = CheckpointError,
    advice: str = "",
) -> Iterator[None]:
    """Turn exceptions of these kinds in the block into an `error` of one line, from the place to the advice."""
    try:
        yield
    except kinds as problem:
        raise error(f"{place}: {first_line(problem)}{advice}") from None


@contextlib.contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Provide an empty folder to write into, which replaces `path` when the block ends.

    Files written in it must be durable by themselves, as `write_file` makes them.

    Raises:
        SaveError: the block or the replacement failed; `path` is unchanged and nothing is left behind.
    """
    temp = _hidden(path)
    try:
        _make_folder(path.parent)
        sweep(path.parent, glob.escape(path.name))
        temp.mkdir()
        yield temp
        # The folders inside first, so that the name of each is durable before the whole is.
        for folder in (*temp.glob("*/"), temp):
            _fsync_folder(folder)
        _swap(temp, path)
    except BaseException as error:
        shutil.rmtree(temp, ignore_errors=True)
        if isinstance(error, Exception):
            raise SaveError(
                f"could not save {path}: {reason(error)}; what was there before is intact"
            ) from error
        raise
    # Last: until here the previous folder could still be put back.
    discard(_aside(path))


@contextlib.contextmanager
def staging_folder(folder: Path) -> Iterator[Path]:
    """Provide an empty folder inside `folder`, from which to move finished files into it; it is deleted at the end.

    What a killed writer left of its own is deleted first.

    Raises:
        SaveError: a save into the new folder failed; the message names `folder`.
    """
    sweep(folder, STAGED)
    temp = _hidden(folder / STAGED)
    temp.mkdir()
    try:
        yield temp
    except SaveError as error:
        cause = error.__cause__
        if not isinstance(cause, Exception):
            raise
        raise SaveError(
            f"could not save {folder}: {reason(cause)}; what was there before is intact"
        ) from cause
    finally:
        shutil.rmtree(temp, ignore_errors=True)


def write_file(path: Path, content: bytes) -> tuple[int, str]:
    """Write a new small file durably and return its size and SHA-256."""
    # "x" fails where the name exists: the files of two writers never mix.
    with open(path, "xb") as file:
        file.write(content)
    return make_durable(path)


def make_durable(path: Path) -> tuple[int, str]:
    """Wait until a file that was just written is on the disk; return its size and SHA-256, without the GIL."""
    digest = hashlib.sha256()
    size = 0
    with open(path, "r+b") as file:  # Windows syncs no file that is open for reading only
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def replace_text(path: Path, text: str) -> None:
    """Replace a small text file atomically and durably.

    Raises:
        SaveError: it could not be written; the file is unchanged.
    """
    temp = _hidden(path)
    try:
        write_file(temp, text.encode())
        os.replace(temp, path)
        _fsync_folder(path.parent)
    except OSError as error:
        _unlink(temp)
        raise SaveError(f"could not write {path}: {reason(error)}") from error


@contextlib.contextmanager
def replacing_file(path: Path) -> Iterator[Path]:
    """Provide a new name to write a file to, which replaces `path` when the block ends, and not if it fails.

    The name has the suffix of `path`, by which libraries choose a format. For files that a run can make again: it
    does not wait until they are on the disk.

    Raises:
        SaveError: it could not be written; what was there before is unchanged.
    """
    temp = _hidden(path)
    temp = temp.with_name(temp.name + path.suffix)
    try:
        yield temp
        os.replace(temp, path)
    except BaseException as error:
        _unlink(temp)
        if isinstance(error, OSError):
            raise SaveError(f"could not write {path}: {reason(error)}") from error
        raise


def readable(path: Path) -> Path:
    """Return where to read the folder `path`: a writer killed between its two renames left the old one aside."""
    aside = _aside(Path(os.path.realpath(path)))
    return aside if not path.exists() and aside.is_dir() else path


def sweep(parent: Path, pattern: str) -> None:
    """Recover from a writer that was killed: restore a folder left aside without a successor, delete other leftovers.

    `pattern` is the glob pattern of the names in `parent` whose leftovers to sweep.
    """
    for aside in parent.glob(f".{pattern}.replaced"):
        original = parent / aside.name.removeprefix(".").removesuffix(".replaced")
        if original.exists():
            discard(aside)
        else:
            os.rename(aside, original)
    for leftover in parent.glob(f".{pattern}.saving-*"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def discard(path: Path) -> None:
    """Delete a folder if it exists; killed at any moment, it leaves all of it or leftovers that `sweep` deletes."""
    # What cannot be deleted now is deleted by a later `sweep`.
    with contextlib.suppress(OSError):
        temp = _hidden(path)
        os.rename(path, temp)
        shutil.rmtree(temp)


def _unlink(path: Path) -> None:
    """Delete a file if it exists; a disk that takes no file, for which this is called, may refuse that too."""
    with contextlib.suppress(OSError):
        path.unlink()


def reason(error: Exception) -> str:
    """Return why a file was not written; a system error names a hidden file, which says nothing to a user."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return first_line(error)


def _hidden(path: Path) -> Path:
    """Return a new name, which `sweep` recognizes, beside `path`, which may be a folder renamed aside."""
    name = path.name.removeprefix(".").removesuffix(".replaced")
    return path.with_name(f".{name}.saving-{secrets.token_hex(4)}")


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.replaced")


def _make_folder(path: Path) -> None:
    """Create a folder and its parents, durably, unless they exist."""
    if path.is_dir():
        return
    _make_folder(path.parent)
    path.mkdir(exist_ok=True)
    _fsync_folder(path.parent)


def _fsync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    if sys.platform == "win32":
        return  # it opens no folder
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _swap(temp: Path, path: Path) -> None:
    """Put `temp` at `path` and the previous folder aside, or leave both where they were."""
    aside = _aside(path)
    try:
        if path.exists():
            os.rename(path, aside)
        os.rename(temp, path)
        _fsync_folder(path.parent)
    except BaseException:
        # Undone in reverse order: the new folder goes back first, since its place has to be free.
        if not temp.exists():
            os.rename(path, temp)
        if aside.exists():
            os.rename(aside, path)
        raise
