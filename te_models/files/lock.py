"""A lock on a folder that one process at a time writes to."""

import contextlib
import fcntl
import json
import logging
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from te_models.errors import OutputInUse, SaveError, UsageError
from te_models.files.atomic import reraising

LOCK = ".lock"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder`, which is created if it does not exist; readers need no lock.

    The operating system releases the lock when its process ends, for whatever reason, so a file left behind by a crash
    locks nothing: its owner is logged and replaced. File systems shared by several hosts must support flock across
    them, as NFS 4 and Lustre do.

    Raises:
        OutputInUse: another process, or another run of this one, holds the lock; one line that names it.
        UsageError: the lock file is a link, a folder or another special file.
        SaveError: the lock file cannot be written, since the disk is full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    holder = {"process": os.getpid(), "host": socket.gethostname()}
    descriptor = _acquire(path)
    if (before := _owner(descriptor)) is not None:
        logging.getLogger(__name__).warning(
            "%s: %s ended without releasing it; taking it over", path, before
        )
    try:
        with reraising(path, OSError, error=SaveError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(holder).encode(), 0)
        yield
    finally:
        with contextlib.suppress(OSError):
            # While the lock is held: whoever opened this file meanwhile opens it again.
            os.unlink(path)
        os.close(descriptor)


def refuse_in_use(folder: Path) -> None:
    """Raise as `locked` does where another run holds the lock of `folder`; write nothing, and hold nothing afterwards.

    For a check before work that would be lost; `locked` still decides, since another run may begin in between.
    """
    if os.path.lexists(folder / LOCK):
        os.close(_acquire(folder / LOCK))


def _acquire(path: Path) -> int:
    """Return the descriptor of the locked file at `path`."""
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = _open(path, flags)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _owner(descriptor) or "another process"
            os.close(descriptor)
            raise OutputInUse(
                f"{path.parent} is in use by {owner}: wait for it, or give another --out"
            ) from None
        except BaseException:
            os.close(descriptor)
            raise
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(descriptor)):
                return descriptor
        os.close(descriptor)


def _open(path: Path, flags: int) -> int:
    """Return the descriptor of the file at `path`; a UsageError if that is a link, a folder or another special file."""
    try:
        descriptor = os.open(path, flags, 0o644)
    except OSError as error:
        if not os.path.lexists(path) or isinstance(error, PermissionError):
            raise
        reason = error.strerror
    else:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
        reason = "not a regular file"
    raise UsageError(f"{path} cannot be locked ({reason}): remove it, or give another --out")


def _owner(descriptor: int) -> str | None:
    """Return the owner that the lock file names; None if it names none."""
    try:
        owner = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {int(owner['process'])} on host {str(owner['host'])[:100]!r}"
    except (KeyError, TypeError, ValueError, ArithmeticError, RecursionError):
        return None
