"""Errors of the tokenizers library as one line: exceptions, panics, and files that would end the process."""

import base64
import contextlib
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from te_models.errors import DataError
from te_models.files.atomic import first_line


def check_charsmaps(document: object, file: Path) -> None:
    """Raise a DataError if the table of a Precompiled normalizer says that it is longer than its data.

    Its first four bytes are its size in bytes. The tokenizers library (0.23) reserves twice as much memory before it
    reads the rest, and ends the process if there is less.
    """
    pending = [document]
    while pending:
        value = pending.pop()
        if isinstance(value, dict) and isinstance(
            encoded := value.get("precompiled_charsmap"), str
        ):
            size = 0
            with contextlib.suppress(ValueError):  # not base64, which the library says itself
                size = int.from_bytes(base64.b64decode(encoded[:8])[:4], "little")
            if size > len(encoded):
                raise DataError(
                    f"{file}: a precompiled_charsmap says that it is longer than it is: get it again"
                )
        pending += (
            value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        )


@contextlib.contextmanager
def library_errors(file: Path, doing: str) -> Iterator[None]:
    """Turn errors of the tokenizers library in the block into a DataError; its panics are BaseExceptions."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError, DataError):
        raise
    except BaseException as error:
        raise DataError(f"{file}: {doing} ({first_line(error)})") from None


_STANDARD_ERROR = threading.Lock()


@contextlib.contextmanager
def without_panics() -> Iterator[None]:
    """Hold back what the block prints on standard error, and drop it if the block fails.

    The library prints a few lines from Rust before a panic becomes an exception.
    """
    with _STANDARD_ERROR, tempfile.TemporaryFile() as printed, contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # standard error is closed
            before = os.dup(2)
            stack.callback(os.close, before)
            stack.callback(os.dup2, before, 2)
            os.dup2(printed.fileno(), 2)
        yield
        stack.close()
        printed.seek(0)
        if text := printed.read():
            os.write(2, text)
