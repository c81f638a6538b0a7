"""Documents from the ranges of files: lines of JSONL and text, JSON arrays, tables, Parquet and Hub datasets.

In memory and streamed, a corpus is read by the functions below, so both read the same files and refuse the same ones.
"""

import contextlib
import csv
import functools
import json
import logging
from collections.abc import Iterator, Mapping
from typing import IO, Any, NamedTuple

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from te_models.data.bad_records import BadRecords
from te_models.data.files import (
    HUB,
    MAX_EXPANDED_BYTES,
    MAX_LINE_BYTES,
    compression_of,
    decode,
    file_format,
    has_utf16_mark,
    open_bytes,
    read_lines,
    readable_errors,
    text_bytes,
)
from te_models.data.formats import ROW_COLUMNS, Document, may_be_recognized, rename, row_document
from te_models.data.row_values import without_nulls
from te_models.data.unrecognized_rows import misspelled, unrecognized
from te_models.errors import DataError, DataUnavailable, needs
from te_models.files.atomic import first_line
from te_models.files.formats import LFS_POINTER, lookalike
from te_models.garbage import collecting_later

# The group of a range that is not of Parquet.
TEXT, JSON_LINES, JSON_ARRAY, TABLE, HUB_ROWS, BINARY = range(-1, -7, -1)
SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars", ",": "commas"}  # of columns
Columns = Mapping[str, str]  # your names -> the formats'
Row = Mapping[str, object] | DataError  # a record, or why it cannot be read

_SNIFFED = 8000  # bytes at the start of a file that identify its kind
_SLICES = 32  # most ranges of a Parquet row group: reading one decodes those before it
_END = 2**62
UNREAD = "..."  # the value of a column that no format has


class FileRange(NamedTuple):
    """Bytes [start, stop) of a file, or rows [start, stop) of one of its Parquet row groups or of a Hub dataset.

    `group` is the row group or, below zero, the kind of file: TEXT, JSON_LINES, and so on.
    """

    path: str
    group: int
    start: int
    stop: int


def file_ranges(
    system: AbstractFileSystem | None, file: str, range_bytes: int
) -> Iterator[tuple[FileRange, int]]:
    """Yield the ranges of a file, of about `range_bytes` each, and an estimate of the bytes of text in each.

    A compressed file, a JSON array and a table cannot be entered in the middle, so they are one range. A binary file
    has none.
    """
    kind = file_format(file)
    if kind == "Parquet":
        yield from _parquet_ranges(file, range_bytes)
        return
    if kind == "Hub dataset":
        rows = _hub_dataset(file)
        size = max(1, rows.dataset_size or 0)
        # Rows of about equal size: the library knows the bytes of the whole set only.
        count = min(max(1, size // range_bytes), max(1, len(rows)))
        for i in range(count):
            yield (
                FileRange(file, HUB_ROWS, i * len(rows) // count, (i + 1) * len(rows) // count),
                size // count,
            )
        return
    assert system is not None  # of a Hub dataset only
    size = text_bytes(system, file)
    if not size and isinstance(system, LocalFileSystem):
        return  # an empty file, or one of /proc, which may never answer
    group = _text_kind(file, kind)
    if group == BINARY:
        return
    if compression_of(file) or group in (TABLE, JSON_ARRAY):
        yield FileRange(file, group, 0, _END), size
        return
    for start in range(0, size, range_bytes):
        stop = min(size, start + range_bytes)
        yield FileRange(file, group, start, stop), stop - start


def read_range(
    part: FileRange,
    source: str,
    columns: Columns | None = None,
    bad: BadRecords | None = None,
) -> Iterator[Document]:
    """Yield the documents of a range. A text file is one document, unless the range is a part of it.

    Raises:
        DataError: it cannot be read or is damaged, or a row is of no known format, unless `bad` skips those; the
            message names the file and the line, byte or row.
    """
    bad = bad or BadRecords()
    with readable_errors(part.path):
        if part.group == TEXT:
            with open_bytes(part.path) as file:
                if text := _read_text(file, part):
                    yield Document(text, name=part.path, source=source)
            return
        for row, place in _read_rows(part, columns or {}):
            try:
                if isinstance(row, DataError):
                    raise row
                document = row_document(row, columns or {}, place, source, part.path)
            # `bad` raises it again, or counts it and goes on, as on_bad_record says.
            except DataError as error:
                bad.meet(error)
            else:
                yield document


def first_rows(part: FileRange, columns: Columns) -> Iterator[tuple[Row, str]]:
    """Yield the first rows of a range that is not text, or why they cannot be read, each with its place."""
    with readable_errors(part.path):
        yield from _read_rows(part, columns)


def _read_rows(part: FileRange, columns: Columns) -> Iterator[tuple[Row, str]]:
    """Yield the rows of a range, or why they cannot be read, each with the place that names it."""
    # A range of a Parquet file is one of its row groups; the other kinds have negative numbers.
    if part.group >= 0:
        yield from _parquet_rows(part, columns)
    elif part.group == HUB_ROWS:
        rows = _hub_dataset(part.path)
        for number in range(part.start, min(part.stop, len(rows))):
            yield _filled(rows[number]), f"{part.path.removeprefix(HUB)}, row {number + 1}"
    else:
        with open_bytes(part.path) as file:
            if part.group == TABLE:
                yield from _table_rows(file, part.path)
            elif part.group == JSON_ARRAY:
                yield from _array_rows(file, part.path)
            else:
                holds = "JSONL has one object per line"
                if file_format(part.path) == "JSON":
                    holds = "a .json file is an array of objects, [{...}, ...], with nothing around it, or JSONL"
                for place, at, line in read_lines(file, part.path, part.start, part.stop):
                    try:
                        text = decode(line, place, at).strip()
                        row = _object(_json(text, place, holds), place, holds) if text else None
                    except DataError as error:
                        # Given to the caller and not raised, so that reading goes on behind a bad line.
                        row = error
                    if row is not None:
                        yield row, place


def _text_kind(path: str, kind: str) -> int:
    """Return the kind of a file of lines from its beginning: any JSON file may be an array, and a text file JSONL.

    A file with a NUL in its first 8000 bytes is binary, as git defines it.
    """
    with open_bytes(path) as file:
        head = file.read(_SNIFFED)
        if head.startswith(LFS_POINTER):
            # As text it would be learned, and its lines are no JSON.
            raise DataError(f"{path}: {lookalike(head)}")
        if kind in ("CSV", "TSV"):
            return TABLE
        start = head.removeprefix(b"\xef\xbb\xbf").lstrip()  # without UTF-8's byte order mark
        if kind in ("JSONL", "JSON"):
            return JSON_ARRAY if start.startswith(b"[") else JSON_LINES
        if b"\0" in head and not has_utf16_mark(head, 0):
            return BINARY
        line = start if b"\n" in start else start + file.readline(MAX_LINE_BYTES)
    if start.startswith(b"{"):  # never train on records as on raw text
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(json.loads(line.split(b"\n", 1)[0]), dict):
                return JSON_LINES
    return TEXT


def _read_text(file: IO[bytes], part: FileRange) -> str:
    """Return the lines of a range as one text."""
    parts = []
    size = 0
    for place, at, line in read_lines(file, part.path, part.start, part.stop):
        parts.append(decode(line, place, at))
        size += len(line)
        if size > MAX_EXPANDED_BYTES and compression_of(part.path):
            raise DataError(
                f"{part.path}: a text of more than {MAX_EXPANDED_BYTES >> 30} GiB: decompress it or use JSONL"
            )
    return "".join(parts)


def _object(row: object, place: str, holds: str) -> dict[str, object]:
    """Return a row that is an object; in an error, `holds` says what the file should contain."""
    if not isinstance(row, dict):
        raise DataError(f"{place}: a JSON {type(row).__name__}, not an object: {holds}")
    return row


def _json(text: str, place: str, holds: str, whole: bool = False) -> Any:
    """Return the value of a JSON text, the `whole` of a file or a line of it; a DataError if it is none."""
    try:
        # A whole file makes many objects at once, and searches for cycles would go through them again and again.
        with collecting_later() if whole else contextlib.nullcontext():
            return json.loads(text)
    except RecursionError:
        why = "JSON that is nested too deeply: a record is an object of strings"
    except json.JSONDecodeError as error:
        kind = lookalike(text[:_SNIFFED].encode())
        why = kind or f"not JSON ({error.msg}, column {error.colno}): {holds}"
        if whole:
            place = f"{place}:{error.lineno}"
    except ValueError as error:  # a number of thousands of digits
        why = f"not JSON that can be read ({first_line(error)})"
    raise DataError(f"{place}: {why}")


def _array_rows(file: IO[bytes], path: str) -> Iterator[tuple[Row, str]]:
    # An array has to be parsed as a whole, hence the bound.
    raw = file.read(MAX_EXPANDED_BYTES + 1)
    if len(raw) > MAX_EXPANDED_BYTES:
        raise DataError(
            f"{path}: a JSON array of more than {MAX_EXPANDED_BYTES >> 30} GiB: write it as JSONL"
        )
    rows = _json(decode(raw, path, 0), path, "give an array of objects, or JSONL", whole=True)
    for number, row in enumerate(rows, start=1):
        place = f"{path}, record {number}"
        try:
            yield _object(row, place, "give an array of objects"), place
        except DataError as error:
            yield error, place


def _table_rows(file: IO[bytes], path: str) -> Iterator[tuple[Row, str]]:
    """Yield the rows of a CSV or TSV file, whose first row names the columns."""
    # Python's own limit, 128 Ki characters, is less than a long document.
    csv.field_size_limit(MAX_LINE_BYTES)
    lines = (decode(line, place, at) for place, at, line in read_lines(file, path, 0, _END))
    # Strict: a quote that is never closed is an error, and not a cell with all the lines behind it.
    rows = csv.reader(lines, "excel-tab" if file_format(path) == "TSV" else "excel", strict=True)
    names: list[str] | None = None
    try:
        for row in rows:
            if not row:
                continue  # a blank line
            if names is None:
                names = _column_names(row, path)
                continue
            place = f"{path}:{rows.line_num}"
            if len(row) != len(names):
                problem = (
                    f"{len(row)} cells, but {len(names)} columns: quote cells that hold separators"
                )
                yield DataError(f"{place}: {problem}"), place
                continue
            yield dict(zip(names, row, strict=True)), place
    except csv.Error as error:
        raise DataError(
            f"{path}:{rows.line_num}: not a readable table ({error}): check its quotes"
        ) from None


def _column_names(header: list[str], path: str) -> list[str]:
    """Return the names in the first row of a table; a DataError if another character separates its cells."""
    names = [name.strip() for name in header]
    separator = ","
    right = "commas, or with tabs in a .tsv file"
    if file_format(path) == "TSV":
        separator = "\t"
        right = "tabs"
    # A header of one cell that holds another separator is a table in another dialect, not a table of one column.
    if len(names) == 1:
        for mark, mark_name in SEPARATORS.items():
            if mark in names[0] and mark != separator:
                raise DataError(
                    f"{path}:1: the columns are separated by {mark_name}: save the table with {right}"
                )
    for name in names:
        # Two columns of a name that no format reads do no harm.
        if name in ROW_COLUMNS and names.count(name) > 1:
            raise DataError(
                f"{path}:1: {name!r} is the name of more than one column: rename all but one"
            )
    return names


@contextlib.contextmanager
def _parquet(file: IO[bytes], path: str) -> Iterator[Any]:
    with needs(f"{path}: Parquet", "pyarrow", "15", "train"):
        import pyarrow  # noqa: PLC0415
        import pyarrow.parquet  # noqa: PLC0415
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            yield table
    except (pyarrow.ArrowException, OSError) as error:
        kind = _kind_of(path) or f"not a readable Parquet file ({first_line(error)})"
        raise DataError(f"{path}: {kind}") from None


def _kind_of(path: str) -> str:
    """Return what a file that cannot be read is, as its first bytes say; "" if they do not, or cannot be read."""
    try:
        with open_bytes(path) as file:
            return lookalike(file.read(_SNIFFED))
    except (DataError, OSError):
        return ""


def _parquet_ranges(file: str, range_bytes: int) -> Iterator[tuple[FileRange, int]]:
    with open_bytes(file) as opened, _parquet(opened, file) as table:
        for group in range(table.num_row_groups):
            about = table.metadata.row_group(group)
            columns = [about.column(i) for i in range(about.num_columns)]
            # The columns that no format has are not decoded, so they are not counted either.
            known = [c for c in columns if c.path_in_schema.split(".")[0] in ROW_COLUMNS] or columns
            size = sum(column.total_uncompressed_size for column in known)
            count = min(max(1, size // range_bytes), _SLICES, about.num_rows)
            for i in range(count):
                start = i * about.num_rows // count
                stop = (i + 1) * about.num_rows // count
                yield FileRange(file, group, start, stop), size // count


def _parquet_rows(part: FileRange, columns: Columns) -> Iterator[tuple[Row, str]]:
    with open_bytes(part.path) as file, _parquet(file, part.path) as table:
        names = table.schema_arrow.names
        if not may_be_recognized(rename(dict.fromkeys(names), columns)):
            fields = next(table.iter_batches(1, row_groups=[part.group])).to_pylist()[0]
            raise DataError(
                misspelled(columns, fields, part.path) or unrecognized(fields, part.path)
            )
        read_columns = []
        for name in names:
            if name in ROW_COLUMNS or name in columns:
                read_columns.append(name)
        # A line names the columns that nothing reads, so that rows show them, without their values.
        unread = dict.fromkeys((name for name in names if name not in read_columns), UNREAD)
        batches = table.iter_batches(batch_size=1024, row_groups=[part.group], columns=read_columns)
        at = 0
        for batch in batches:  # rows before the range are decoded, but never become Python objects
            first = max(part.start - at, 0)
            last = min(part.stop - at, len(batch))
            for number, row in enumerate(
                batch.slice(first, max(0, last - first)).to_pylist(), start=at + first + 1
            ):
                yield _filled(row) | unread, f"{part.path}, row group {part.group}, row {number}"
            at += len(batch)
            if at >= part.stop:
                return


def _filled(row: Mapping[str, object]) -> dict[str, object]:
    """Return a row of an Arrow table whose lists and objects have only what was written in them."""
    return {name: without_nulls(value) for name, value in row.items()}


@functools.lru_cache(maxsize=8)
def _hub_dataset(path: str) -> Any:
    """Return a split of a dataset of the Hugging Face Hub, which the `datasets` package keeps in its cache."""
    name, _, part = path.removeprefix(HUB).partition("#")
    config, _, split = part.rpartition("/")
    with needs(f"the Hub dataset {name}", "datasets", "3.0", "datasets"):
        import datasets  # noqa: PLC0415
    with _hub_errors(name):
        return datasets.load_dataset(name, config or None, split=split or "train")


@contextlib.contextmanager
def _hub_errors(name: str) -> Iterator[None]:
    """Turn an error of the datasets library in the block into one line that names the dataset, without its warnings."""
    loggers = [logging.getLogger(library) for library in ("datasets", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)  # every attempt to reach the Hub is a line or two
    try:
        yield
    except Exception as error:  # the library and those below it have no common base but this one
        raise DataUnavailable(
            f"{name}: no such file or folder, and no dataset of the Hub that can be read "
            f"({type(error).__name__}: {first_line(error)[:200]}): check the path or the name, written owner/name#split"
        ) from None
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
