"""Reading of small files from elsewhere: regular files only, of bounded size."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from te_models.errors import DataError


def read_bounded(path: Path, limit: int, error: type[Exception] = DataError) -> bytes | None:
    """Return the content of a regular file of at most `limit` bytes, None if there is no such file.

    Opening does not wait for a pipe's writer, and the file that was opened is the one that is checked.

    Raises:
        error: the file is larger, is a pipe, device or folder, or cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as problem:
        raise error(f"{path}: cannot be read ({problem.strerror})") from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise error(f"{path}: cannot be read (not a regular file)")
    with open(descriptor, "rb") as file:
        content = file.read(limit + 1) if status.st_size <= limit else None
    if content is None or len(content) > limit:
        raise error(f"{path}: larger than the limit of {limit >> 20} MiB")
    return content
