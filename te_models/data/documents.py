"""Documents from files: text, JSONL and Parquet, plain or compressed, here or at a URL, whole or in ranges.

In memory and streamed, a corpus is found and read by the functions below, so both read the same files and refuse the
same ones. fsspec opens the files, so a path may be a glob or a URL such as hf://datasets/... or s3://...
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import stat
import sys
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from pydoc_data.topics import topics
from typing import IO, Any, NamedTuple

import fsspec
from fsspec.implementations.local import LocalFileSystem

from te_models.errors import DataError, DataUnavailable, TeModelsError, UsageError, needs
from te_models.files.atomic import first_line

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".lz4": "lz4"}
FORMATS = {".jsonl": "JSONL", ".ndjson": "JSONL", ".json": "JSONL", ".parquet": "Parquet"}  # any other suffix: text
TABLES = (".csv", ".tsv")
MAX_LINE_BYTES = 64 * 2**20
MAX_EXPANDED_BYTES = 2**30  # of a compressed text file, which is one document

_SNIFFED = 8000  # bytes at the start of a file that tell binary files from text
_EXPANSION = 4  # estimated text bytes per compressed byte
_SLICES = 32  # most ranges of a Parquet row group: reading one decodes those before it
_END = 2**62
_NOT_CORPUS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__", "pydoc_data"}
_HELP = "give a text, JSONL or Parquet file, a folder or a glob"


@dataclass(frozen=True)
class Document:
    """One text to train on. With a `prompt`, the loss counts only `text`, which continues it.

    `name` is the document's file, or file and row; `source` is the corpus.
    """

    text: str
    prompt: str | None = None
    name: str = ""
    source: str = ""


class FileRange(NamedTuple):
    """Bytes [start, stop) of a file, or rows [start, stop) of one of its Parquet row groups (-1: not Parquet)."""

    path: str
    row_group: int
    start: int
    stop: int


def load_documents(path: str | Path | None) -> list[Document]:
    """Load all documents at `path`, sorted by file name.

    * A .jsonl (.ndjson, .json) file has one object per line and a .parquet file one row per document: `text`, or else
      `prompt` and `completion`.
    * Any other file is one document of UTF-8 text.
    * A folder is read recursively; hidden files, __pycache__, links to folders and binary files (a NUL byte in the
      first 8000, as git defines it) are skipped.
    * None gives the running Python's language documentation and the sources of its standard library.

    Documents of nothing but white space are left out.

    Raises:
        DataError: a file cannot be read or is of another format, or there is no text.
    """
    if path is None:
        return _python_corpus()
    system, files = find_files(str(path))
    ranges = (found for file in files for found, _ in file_ranges(system, file, sys.maxsize))
    documents = [document for part in ranges for document in read_range(part, str(path)) if has_text(document)]
    if not documents:
        raise DataError(f"{path}: there is no text in it; {_HELP}")
    return documents


def split_documents(
    documents: Sequence[Document], eval_fraction: float = 0.05, seed: int = 0
) -> tuple[list[Document], list[Document]]:
    """Split documents into those to train on and those to evaluate on, both in the order given and never empty.

    Evaluation gets the `eval_fraction` of distinct documents whose hashes of (seed, content) are lowest. A seeded
    shuffle would depend on the order of the documents and could put copies of one on both sides. A single document is
    cut at a line break, and its end is for evaluation.

    Raises:
        UsageError: `eval_fraction` is not between 0 and 1.
        DataError: one side would be empty.
    """
    if not 0 < eval_fraction < 1:
        raise UsageError(f"eval_fraction={eval_fraction} is out of range: give a share between 0 and 1, such as 0.05")
    if len(documents) == 1:
        return _cut(documents[0], eval_fraction)
    hashes = [hash_document(seed, document) for document in documents]
    distinct = sorted(set(hashes))
    if len(distinct) < 2:
        raise DataError(
            f"{len(documents)} documents, all with the same content, cannot be split into training and evaluation: "
            "give at least two different ones"
        )
    count = min(max(1, round(eval_fraction * len(distinct))), len(distinct) - 1)
    evaluated = set(distinct[:count])
    sides: tuple[list[Document], list[Document]] = ([], [])
    for document, key in zip(documents, hashes, strict=True):
        sides[key in evaluated].append(document)
    return sides


def has_text(document: Document) -> bool:
    """Return whether there is more than white space to train on."""
    return bool(document.text.strip() or document.prompt)


def hash_document(seed: int, document: Document) -> bytes:
    """Return 16 evenly distributed bytes that depend only on seed, prompt and text."""
    digest = hashlib.blake2b(f"{seed} {len(document.prompt or '')} {document.prompt}".encode(), digest_size=16)
    digest.update(document.text.encode())
    return digest.digest()


def find_files(path: str) -> tuple[Any, list[str]]:
    """Find the files of a corpus: a file, a folder (recursive, without hidden files), a glob or a URL.

    Returns:
        the fsspec file system, and the sorted paths in it (absolute here, with the protocol elsewhere).

    Raises:
        DataError: there is nothing, it cannot be read, or a file is a table or no regular file.
    """
    with readable_errors(path):
        system, root = fsspec.core.url_to_fs(path)
        if not isinstance(system, LocalFileSystem):
            files = [system.unstrip_protocol(file) if "://" in path else file for file in _find(system, root)]
        elif os.path.isdir(root):
            files = sorted(_walk(root, skip={"__pycache__"}))
        else:
            files = [root] if os.path.lexists(root) else sorted(f for f in system.glob(root) if not os.path.isdir(f))
        if not files and os.path.isdir(root):
            raise DataError(f"{path}: there is no text in it; {_HELP}")
        if not files:
            raise DataUnavailable(f"{path}: no such file or folder; {_HELP}")
        for file in files:
            if isinstance(system, LocalFileSystem) and not stat.S_ISREG(os.stat(file).st_mode):
                raise DataError(f"{file}: not a regular file; {_HELP}")
            if _suffix(file) in TABLES:
                raise DataError(
                    f"{file}: a table, which would be trained on as raw text: convert it to JSONL or Parquet "
                    "with a field 'text', or choose files with a glob"
                )
    return system, files


def file_ranges(system: Any, file: str, range_bytes: int) -> Iterator[tuple[FileRange, int]]:
    """Yield the ranges of a file, of about `range_bytes` each, and an estimate of the bytes of text in each.

    A compressed file cannot be entered in the middle, so it is one range.
    """
    if file_format(file) == "Parquet":
        with _open(file) as opened, _parquet(opened, file) as table:
            fields = _document_fields(table.schema_arrow.names, file)
            columns = [i for i in range(table.metadata.num_columns) if table.schema.column(i).path in fields]
            for group in range(table.num_row_groups):
                rows = table.metadata.row_group(group).num_rows
                size = sum(table.metadata.row_group(group).column(i).total_uncompressed_size for i in columns)
                count = min(max(1, size // range_bytes), _SLICES, rows)
                for i in range(count):
                    yield FileRange(file, group, i * rows // count, (i + 1) * rows // count), size // count
        return
    size = text_bytes(system, file)
    if _compression(file):
        yield FileRange(file, -1, 0, _END), size
        return
    for start in range(0, size, range_bytes):
        stop = min(size, start + range_bytes)
        yield FileRange(file, -1, start, stop), stop - start


def text_bytes(system: Any, file: str) -> int:
    """Return the size of a file, of a compressed one an estimate of its text."""
    return (_EXPANSION if _compression(file) else 1) * (system.size(file) or 0)


def read_range(part: FileRange, source: str) -> Iterator[Document]:
    """Yield the documents of a range. A text file is one document, unless the range is a part of it.

    Raises:
        DataError: it cannot be read or is damaged; the message names the file and the line, byte or row.
    """
    with readable_errors(part.path):
        if part.row_group >= 0:
            yield from _read_rows(part, source)
            return
        with _open(part.path) as file:
            lines = _lines(file, part)
            if file_format(part.path) == "JSONL":
                for place, at, line in lines:
                    if text := _decode(line, place, at).strip():
                        yield _json_document(text, place, source)
            elif (part.start or part.stop < _SNIFFED) and _is_binary(file.read(_SNIFFED), 0):
                return  # `lines` below seeks to the range
            elif text := _read_text(lines, part.path):
                yield Document(text, name=part.path, source=source)


def file_format(path: str) -> str:
    """Return "JSONL", "Parquet" or "text", by the file's suffix."""
    return FORMATS.get(_suffix(path), "text")


@contextlib.contextmanager
def readable_errors(path: str) -> Iterator[None]:
    """Turn an error about a file in the block into a DataError of one line that names it."""
    try:
        yield
    except TeModelsError:
        raise
    except ValueError as error:
        raise DataError(f"{path}: not readable ({first_line(error)}): check the file") from None
    except ImportError as error:  # fsspec names the package that a protocol needs
        raise UsageError(f"{path}: {first_line(error)}") from None
    except OSError as error:
        name, reason = error.filename or path, error.strerror or first_line(error)
        raise DataUnavailable(f"{name}: cannot be read ({reason}): check it and its permissions") from None
    except Exception as error:  # the libraries of remote file systems have no common base but this one
        if "://" not in path:
            raise
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise DataUnavailable(f"{path}: cannot be read ({reason}): check the address and the network") from None


def _cut(document: Document, eval_fraction: float) -> tuple[list[Document], list[Document]]:
    """Cut the only document at the last line break before the evaluation's share begins."""
    at = document.text.rfind("\n", 0, int(len(document.text) * (1 - eval_fraction))) + 1
    if at == 0 or document.prompt is not None:
        raise DataError(
            "the only document cannot be cut into training and evaluation: give more documents, or one with more lines"
        )
    halves = (document.text[:at], document.text[at:])
    first, last = (Document(half, name=document.name, source=document.source) for half in halves)
    return [first], [last]


def _python_corpus() -> list[Document]:
    """Return the topics of Python's language documentation, then its standard library, both sorted by name."""
    root, version = Path(sysconfig.get_path("stdlib")), sysconfig.get_python_version()
    documents = [
        Document(text, name=f"topics/{name}", source=f"Python {version} documentation")
        for name, text in sorted(topics.items())
    ]
    for file in sorted(_walk(str(root), _NOT_CORPUS)):
        if file.endswith(".py"):
            name = Path(file).relative_to(root).as_posix()
            text = Path(file).read_text(encoding="utf-8-sig")
            documents.append(Document(text, name=name, source=f"Python {version} standard library"))
    return [document for document in documents if has_text(document)]


def _find(system: Any, root: str) -> list[str]:
    """Return the files below a remote folder, without hidden ones and __pycache__, or matching a glob; sorted."""
    if system.isfile(root):
        return [root]
    if not system.isdir(root):
        return sorted(file for file in system.glob(root) if system.isfile(file))
    below = {file: PurePosixPath(file.removeprefix(root).lstrip("/")).parts for file in system.find(root)}
    return sorted(file for file, parts in below.items() if not any(p[0] == "." or p == "__pycache__" for p in parts))


def _walk(root: str, skip: Collection[str]) -> Iterator[str]:
    """Yield the files below a local folder; not hidden ones, nor those in folders of these names or behind links."""
    for folder, subfolders, names in os.walk(root, onerror=_refuse):
        subfolders[:] = [name for name in subfolders if name not in skip and not name.startswith(".")]
        yield from (os.path.join(folder, name) for name in names if not name.startswith("."))


def _refuse(error: OSError) -> None:
    raise error


def _suffix(path: str) -> str:
    """Return the suffix that names the format, in lower case, without that of a compression."""
    file = PurePosixPath(path.lower())
    return PurePosixPath(file.stem).suffix if file.suffix in COMPRESSIONS else file.suffix


def _compression(path: str) -> str | None:
    return COMPRESSIONS.get(PurePosixPath(path.lower()).suffix)


@contextlib.contextmanager
def _open(path: str) -> Iterator[IO[bytes]]:
    """Open a file's bytes, decompressed."""
    compression = None if file_format(path) == "Parquet" else _compression(path)
    opened: Any = fsspec.open(path, "rb")
    with opened as file:
        if compression is None:
            yield file
            return
        with needs(f"{path}: {compression}", "pyarrow", "15", "train"):
            import pyarrow  # noqa: PLC0415
        with pyarrow.CompressedInputStream(file, compression) as stream, io.BufferedReader(stream, 2**20) as buffered:
            yield buffered


def _lines(file: IO[bytes], part: FileRange) -> Iterator[tuple[str, int, bytes]]:
    """Yield (place for messages, offset, line) of the lines that begin in the range."""
    at = number = 0
    if part.stop < _SNIFFED:
        file.seek(0)
    if part.start:
        file.seek(part.start - 1)
        # A line that does not end inside the range belongs to an earlier one: no need to read on to its end.
        skipped = file.readline(part.stop - part.start + 1)
        if not skipped.endswith(b"\n"):
            return
        at = part.start - 1 + len(skipped)
    while at < part.stop and (line := file.readline(MAX_LINE_BYTES + 1)):
        number += 1
        place = f"{part.path} at byte {at}" if part.start else f"{part.path}:{number}"
        if len(line) > MAX_LINE_BYTES:
            raise DataError(f"{place}: a line of more than {MAX_LINE_BYTES >> 20} MiB: break it into shorter ones")
        yield place, at, line
        at += len(line)


def _read_text(lines: Iterator[tuple[str, int, bytes]], path: str) -> str:
    """Return the lines as one text; nothing for a binary file."""
    parts, size = [], 0
    for place, at, line in lines:
        if _is_binary(line, at):
            return ""
        parts.append(_decode(line, place, at))
        size += len(line)
        if size > MAX_EXPANDED_BYTES and _compression(path):
            raise DataError(f"{path}: a text of more than {MAX_EXPANDED_BYTES >> 30} GiB: decompress it or use JSONL")
    return "".join(parts)


def _is_binary(raw: bytes, at: int) -> bool:
    """Return whether bytes at an offset show that a file is binary: a NUL in its first 8000, as git defines it."""
    return at < _SNIFFED and b"\0" in raw[: _SNIFFED - at] and not _has_utf16_mark(raw, at)


def _has_utf16_mark(raw: bytes, at: int) -> bool:
    return at == 0 and raw.startswith((b"\xff\xfe", b"\xfe\xff"))


def _decode(raw: bytes, place: str, at: int) -> str:
    try:
        return raw.decode().removeprefix("\ufeff") if at == 0 else raw.decode()
    except UnicodeDecodeError as error:
        kind = "UTF-16 text" if _has_utf16_mark(raw, at) else "not UTF-8 text"
        where = f"byte 0x{raw[error.start]:02x} at offset {at + error.start}"
        raise DataError(f"{place}: {kind} ({where}): convert it to UTF-8") from None


def _json_document(line: str, place: str, source: str) -> Document:
    """Return the document of one line of JSONL."""
    try:
        row = json.loads(line)
    except RecursionError:
        raise DataError(f"{place}: JSON that is nested too deeply: a document is an object of strings") from None
    except json.JSONDecodeError as error:
        raise DataError(
            f"{place}: not JSON ({error.msg}, column {error.colno}): JSONL has one object per line"
        ) from None
    if not isinstance(row, dict):
        raise DataError(f"{place}: a JSON {type(row).__name__}, not an object: JSONL has one object per line")
    return _row_document(row, _document_fields(row, place), place, source)


@contextlib.contextmanager
def _parquet(file: IO[bytes], path: str) -> Iterator[Any]:
    with needs(f"{path}: Parquet", "pyarrow", "15", "train"):
        import pyarrow  # noqa: PLC0415
        import pyarrow.parquet  # noqa: PLC0415
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            yield table
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable Parquet file ({first_line(error)})") from None


def _read_rows(part: FileRange, source: str) -> Iterator[Document]:
    with _open(part.path) as file, _parquet(file, part.path) as table:
        fields = _document_fields(table.schema_arrow.names, part.path)
        batches = table.iter_batches(batch_size=1024, row_groups=[part.row_group], columns=fields)
        at = 0
        for batch in batches:  # rows before the range are decoded, but never become Python objects
            first, last = max(part.start - at, 0), min(part.stop - at, len(batch))
            for number, row in enumerate(batch.slice(first, max(0, last - first)).to_pylist(), start=at + first + 1):
                yield _row_document(row, fields, f"{part.path}, row group {part.row_group}, row {number}", source)
            at += len(batch)
            if at >= part.stop:
                return


def _document_fields(names: Collection[str], place: str) -> list[str]:
    """Return the fields that make a document, among those that are there."""
    for fields in (["text"], ["prompt", "completion"]):
        if all(field in names for field in fields):
            return fields
    shown = ", ".join(repr(name)[:60] for name in list(names)[:8])
    raise DataError(
        f"{place}: has {shown or 'no fields'}, but needs 'text', or 'prompt' and 'completion': rename the fields"
    )


def _row_document(row: dict[str, Any], fields: list[str], place: str, source: str) -> Document:
    """Return the document of one row; `fields` ends with the text to train on and may begin with the prompt."""
    for field in fields:
        value = row[field]
        if not isinstance(value, str):
            raise DataError(
                f"{place}: {field!r} is {type(value).__name__}, not a string: fill it in or leave the row out"
            )
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{place}: {field!r} holds half of a surrogate pair at character {error.start}: "
                "write the pair or leave it out"
            ) from None
    return Document(row[fields[-1]], row[fields[0]] if len(fields) == 2 else None, place, source)
