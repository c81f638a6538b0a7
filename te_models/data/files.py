"""The files of a corpus: found in folders, globs and URLs, opened plain or decompressed, read by lines.

fsspec opens the files, so a path may be a glob or a URL such as hf://datasets/... or s3://...
"""

import contextlib
import io
import os
import re
import stat
from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import PurePosixPath
from typing import IO, NamedTuple, cast

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from te_models.errors import (
    DataError,
    DataUnavailable,
    TeModelsError,
    UsageError,
    needs,
    plural,
)
from te_models.files.atomic import first_line
from te_models.files.formats import list_some, lookalike

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".lz4": "lz4"}
FORMATS = {  # any other suffix: text
    ".jsonl": "JSONL",
    ".ndjson": "JSONL",
    ".json": "JSON",
    ".parquet": "Parquet",
    ".csv": "CSV",
    ".tsv": "TSV",
}
HUB = "hub://"  # before the name of a dataset that the `datasets` package loads
MAX_LINE_BYTES = 64 * 2**20
MAX_EXPANDED_BYTES = 2**30  # of a file that must be read whole
HELP = "give a text, JSONL, JSON, CSV or Parquet file, a folder or a glob"

_EXPANSION = 4  # estimated text bytes per compressed byte
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(#[\w.-]+(/[\w.-]+)?)?")
_ABOUT_DATA = (
    "readme",
    "license",
    "licence",
    "dataset_info",
    "dataset_infos",
    "state",
    "changelog",
)


class Found(NamedTuple):
    """The files of a corpus.

    Attributes:
        system: the fsspec file system that they are in; None: a Hub dataset.
        files: their sorted paths (absolute here, with the protocol elsewhere).
        left_out: folders of runs and of models below a folder, whose files are no data; sorted, relative to it.
    """

    system: AbstractFileSystem | None
    files: list[str]
    left_out: list[str]


def find_files(path: str) -> Found:
    """Find the files of a corpus: a file, a folder (recursive, without hidden files), a glob, a URL or a Hub dataset.

    In a folder with JSONL, JSON, CSV or Parquet files, those that are about the data (README, LICENSE,
    dataset_info.json) are skipped. Folders of runs and models below a local folder are left out: `--data .` means a
    project's texts, and not what was trained on them. A Hub dataset, named "owner/name", "owner/name#split" or
    "owner/name#config/split", is one file, with HUB before its name.

    Raises:
        UsageError: the path is empty, which would stand for the current folder.
        DataError: there is nothing, it cannot be read, or something is no regular file.
    """
    if not path.strip():
        raise UsageError(f"the path of the data is empty; {HELP}")
    if path.startswith(HUB) or is_hub_name(path):
        return Found(None, [HUB + path.removeprefix(HUB)], [])
    left_out: list[str] = []
    with readable_errors(path):
        system, root = fsspec.core.url_to_fs(path)
        if not isinstance(system, LocalFileSystem):
            # The library returns paths without the protocol, which opening them later needs.
            files = _find(system, root)
            if "://" in path:
                files = [system.unstrip_protocol(file) for file in files]
        elif os.path.isdir(root):
            files = sorted(walk(root, skip={"__pycache__"}, left_out=left_out))
        else:
            # A name with brackets or stars may be a file's own name, which comes before the pattern.
            files = [root] if os.path.lexists(root) else _matching(system, root)
        check_text(path, files or not os.path.isdir(root), left_out)
        if not files:
            raise DataUnavailable(f"{path}: no such file or folder; {HELP}")
        # A README beside Parquet files describes the data. In a folder of texts it is one of them.
        data_files = []
        for file in files:
            if PurePosixPath(file).name.split(".")[0].lower() not in _ABOUT_DATA:
                data_files.append(file)
        if any(file_format(file) != "text" for file in data_files):
            files = data_files
        for file in files:
            # Reading from a pipe or a device may wait forever.
            if isinstance(system, LocalFileSystem) and not stat.S_ISREG(os.stat(file).st_mode):
                raise DataError(f"{file}: not a regular file; {HELP}")
    return Found(system, files, sorted(os.path.relpath(folder, root) for folder in left_out))


def without_outputs(left_out: Sequence[str]) -> str:
    """Return the words that name the folders of runs and models that are not read."""
    return f"without {list_some(left_out)} (runs or models)"


def check_text(source: str, content: object, left_out: Sequence[str] = ()) -> None:
    """Raise a DataError if nothing was found in a source, of which folders of runs and models were left out."""
    if not content:
        beside = f" beside {plural(len(left_out), 'folder')} of runs or models" if left_out else ""
        raise DataError(f"{source}: there is no text in it{beside}; {HELP}")


def is_hub_name(path: str) -> bool:
    """Return whether `path` names a dataset of the Hugging Face Hub: "owner/name", and no local path has that name."""
    name = path.partition("#")[0]
    suffix = PurePosixPath(name.lower()).suffix
    known = suffix in FORMATS or suffix in COMPRESSIONS or suffix in (".txt", ".md")
    return (
        _HUB_NAME.fullmatch(path) is not None
        and not known
        and not os.path.lexists(name.split("/")[0])
    )


def text_bytes(system: AbstractFileSystem, file: str) -> int:
    """Return the size of a file, or if it is compressed an estimate of the size of its text."""
    return (_EXPANSION if compression_of(file) else 1) * (system.size(file) or 0)


def file_format(path: str) -> str:
    """Return "JSONL", "JSON", "Parquet", "CSV", "TSV", "Hub dataset" or "text", by the file's suffix."""
    file = PurePosixPath(path.lower())
    suffix = PurePosixPath(file.stem).suffix if file.suffix in COMPRESSIONS else file.suffix
    return "Hub dataset" if path.startswith(HUB) else FORMATS.get(suffix, "text")


def compression_of(path: str) -> str | None:
    """Return the compression that the file's suffix names, None without one."""
    return COMPRESSIONS.get(PurePosixPath(path.lower()).suffix)


@contextlib.contextmanager
def readable_errors(path: str) -> Iterator[None]:
    """Turn an error about a file in the block into a one-line DataError that names it."""
    try:
        yield
    except TeModelsError:
        raise
    except ValueError as error:
        raise DataError(f"{path}: not readable ({first_line(error)}): check the file") from None
    except ImportError as error:  # fsspec names the package that a protocol needs
        raise UsageError(f"{path}: {first_line(error)}") from None
    except OSError as error:
        name = error.filename or path
        reason = error.strerror or first_line(error)
        raise DataUnavailable(
            f"{name}: cannot be read ({reason}): check it and its permissions"
        ) from None
    # The libraries of remote file systems have no common base but this one.
    except Exception as error:
        # The one URL of fsspec without slashes.
        if "://" not in path and not path.startswith("data:"):
            raise
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise DataUnavailable(
            f"{path}: cannot be read ({reason}): check the address and the network"
        ) from None


@contextlib.contextmanager
def open_bytes(path: str) -> Iterator[IO[bytes]]:
    """Open a file's bytes, decompressed, with `readable_errors` in the block."""
    compression = None if file_format(path) == "Parquet" else compression_of(path)
    with readable_errors(path), fsspec.open(path, "rb") as file:
        if compression is None:
            yield cast(IO[bytes], file)
            return
        with needs(f"{path}: {compression}", "pyarrow", "15", "train"):
            import pyarrow  # noqa: PLC0415
        with (
            pyarrow.CompressedInputStream(file, compression) as stream,
            io.BufferedReader(stream, 2**20) as buffered,
        ):
            yield buffered


def read_lines(
    file: IO[bytes], path: str, start: int, stop: int
) -> Iterator[tuple[str, int, bytes]]:
    """Yield (place for messages, offset, line) of the lines that begin in bytes [start, stop)."""
    at = number = 0
    if start:
        file.seek(start - 1)
        # A line that does not end inside the range belongs to an earlier one: no need to read on to its end.
        skipped = file.readline(stop - start + 1)
        if not skipped.endswith(b"\n"):
            return
        at = start - 1 + len(skipped)
    while at < stop and (line := file.readline(MAX_LINE_BYTES + 1)):
        number += 1
        place = f"{path} at byte {at}" if start else f"{path}:{number}"
        if len(line) > MAX_LINE_BYTES:
            raise DataError(
                f"{place}: a line of more than {MAX_LINE_BYTES >> 20} MiB: break it into shorter ones"
            )
        yield place, at, line
        at += len(line)


def decode(raw: bytes, place: str, at: int) -> str:
    """Return UTF-8 text read at offset `at` of a file, without a byte order mark.

    Raises:
        DataError: it is not UTF-8.
    """
    try:
        return raw.decode().removeprefix("\ufeff") if at == 0 else raw.decode()
    except UnicodeDecodeError as error:
        if at == 0 and (other := lookalike(raw)):
            raise DataError(f"{place}: {other}") from None
        kind = "not UTF-8 text"
        if has_utf16_mark(raw, at):
            kind = "UTF-16 text"
        if at == 0 and raw.startswith((b"\xff\xfe\0\0", b"\0\0\xfe\xff")):
            kind = "UTF-32 text"
        where = f"byte 0x{raw[error.start]:02x} at offset {at + error.start}"
        raise DataError(f"{place}: {kind} ({where}): convert it to UTF-8") from None


def has_utf16_mark(raw: bytes, at: int) -> bool:
    """Return whether bytes read at offset `at` of a file begin with UTF-16's byte order mark."""
    return at == 0 and raw.startswith((b"\xff\xfe", b"\xfe\xff"))


def walk(root: str, skip: Collection[str], left_out: list[str] | None = None) -> Iterator[str]:
    """Yield the files below a local folder; not hidden ones, nor those in folders of these names or behind links.

    With `left_out`, files of runs and models below it are left out too, and their folders appended to this list.
    """
    for folder, subfolders, names in os.walk(root, onerror=_refuse):
        if left_out is not None and folder != root and _is_output({*names, *subfolders}):
            left_out.append(folder)
            subfolders.clear()
            continue
        subfolders[:] = [
            name for name in subfolders if name not in skip and not name.startswith(".")
        ]
        yield from (os.path.join(folder, name) for name in names if not name.startswith("."))


def _is_output(names: set[str]) -> bool:
    """Return whether a folder with these entries is a run, or a model of te-models or Hugging Face."""
    if "run.toml" in names and names & {"metrics.jsonl", "checkpoints"}:
        return True
    described = names & {"config.json", "adapter_config.json"}
    return bool(described) and any(name.endswith(".safetensors") for name in names)


def _refuse(error: OSError) -> None:
    raise error


def _find(system: AbstractFileSystem, root: str) -> list[str]:
    """Return the files below a remote folder, without hidden ones and __pycache__, or matching a glob; sorted."""
    if system.isfile(root):
        return [root]
    if not system.isdir(root):
        return _matching(system, root)
    files = []
    for file in map(str, system.find(root)):
        parts = PurePosixPath(file.removeprefix(root).lstrip("/")).parts
        if not any(part[0] == "." or part == "__pycache__" for part in parts):
            files.append(file)
    return sorted(files)


def _matching(system: AbstractFileSystem, pattern: str) -> list[str]:
    """Return the files that match a glob, sorted; hidden ones only where the glob names them."""
    named = [part for part in PurePosixPath(pattern).parts if part.startswith(".")]

    def shown(file: str) -> bool:
        hidden = (part for part in PurePosixPath(file).parts if part.startswith("."))
        return all(any(fnmatch(part, name) for name in named) for part in hidden)

    return sorted(file for file in system.glob(pattern) if shown(file) and system.isfile(file))
