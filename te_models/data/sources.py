"""The sources of a run's data: each a path with a weight, checked by its first record before anything is trained."""

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from fsspec import AbstractFileSystem

from te_models.config.data import MAX_WEIGHT, split_weight
from te_models.data.bad_records import BadRecords
from te_models.data.files import (
    COMPRESSIONS,
    file_format,
    find_files,
    open_bytes,
    readable_errors,
    text_bytes,
    without_outputs,
)
from te_models.data.formats import TEXT, Document, recognize, rename, row_document
from te_models.data.row_values import without_nulls
from te_models.data.rows import TEXT as TEXT_FILE
from te_models.data.rows import FileRange, file_ranges, first_rows
from te_models.data.unrecognized_rows import misspelled
from te_models.errors import DataError, UsageError

STREAMED_BYTES = 2**30  # larger corpora are streamed by default


@dataclass(frozen=True)
class Source:
    """One source of documents.

    Attributes:
        path: file, folder, glob, URL or name of a Hub dataset.
        weight: how often each of its documents occurs per epoch, on average.
        files: its files, sorted.
        system: the fsspec file system that they are in.
        format: its format, recognized by its first record: a key of te_models.data.formats, or "text files".
        talks: True if the first record is a conversation, which needs a chat template.
        first: the first record of a file.
        left_out: folders of runs and models in it, which are not read.
        documents: of records in memory; None: they are in the files.
    """

    path: str
    weight: float
    files: tuple[str, ...]
    system: AbstractFileSystem | None
    format: str
    talks: bool
    documents: Sequence[Document] | None = None
    first: Document | None = None
    left_out: tuple[str, ...] = ()

    @property
    def is_text(self) -> bool:
        """True if its documents are texts of any length rather than records."""
        return self.format in (TEXT, "text files")

    def describe(self) -> str:
        """Return path, format and weight in a few words."""
        files = " and ".join(sorted({file_format(file) for file in self.files}))
        kind = f"{self.format} in {files}" if files and self.format != "text files" else self.format
        weight = "" if self.weight == 1 else f", {self.weight:g} times per epoch"
        first = ""
        if len(self.files) > 1 and self.format != "text files":
            first = ", by the first record"
        left_out = ""
        if self.left_out:
            left_out = f", {without_outputs(self.left_out)}"
        return f"{self.path}: {kind}{first}{left_out}{weight}"

    def text_bytes(self) -> int:
        """Estimate the bytes of text in all files."""
        with readable_errors(self.path):
            if self.system is not None:
                return sum(text_bytes(self.system, file) for file in self.files)
            return 0


def open_sources(
    paths: Sequence[str],
    columns: Mapping[str, str],
    required: bool = True,
    skip_bad: bool = False,
) -> list[Source]:
    """Find the files of "path" or "path:weight" each, and recognize their formats.

    The first record of a source decides; with `skip_bad` the first one that can be read. Some source must have one of
    the `columns` (te_models.config.data.parse_columns) if they are `required`. No paths stand for built-in data, which
    has no columns of yours.
    """
    sources = []
    renamed = False
    for path_and_weight in paths:
        path = path_and_weight
        weight = None
        # A file may have a colon in its name, so a path that exists is taken as a whole.
        if not os.path.lexists(path):
            path, weight = split_weight(path_and_weight)
        if weight is not None and not 0 < weight <= MAX_WEIGHT:
            raise UsageError(
                f"{path_and_weight}: the weight {weight:g} is out of range: give above 0 and at most {MAX_WEIGHT:,}"
            )
        system, files, left_out = find_files(path)
        kind, row, first = _first_row(system, files, path, columns, skip_bad)
        # Sources of different formats may share --columns, so it is enough that one has such a column.
        renamed = renamed or not columns.keys().isdisjoint((*row, *_turn_fields(row)))
        talks = first is not None and first.conversation is not None
        source = Source(
            path=path,
            weight=weight or 1.0,
            files=tuple(files),
            system=system,
            format=kind,
            talks=talks,
            first=first,
            left_out=tuple(left_out),
        )
        sources.append(source)
    if required and columns and not renamed:
        shown = ", ".join(map(repr, columns))
        names = " and ".join(paths) or "Python's own documentation"
        raise UsageError(
            f"--columns: the first records of {names} have no {shown}: name columns of yours"
        )
    return sources


def first_documents(sources: Iterable[Source]) -> list[Document]:
    """Return the first record of each source that has one: files of text have none."""
    return [source.first for source in sources if source.first is not None]


def must_stream(sources: Sequence[Source]) -> bool:
    """Return whether to stream by default: URLs, data that may not fit in memory, and text in globs or compressed."""
    texts = [source for source in sources if source.is_text]
    globs = []
    for source in texts:
        globs.append(not os.path.lexists(source.path) and any(c in source.path for c in "*?["))
    if any(globs) or any(source.path.endswith(tuple(COMPRESSIONS)) for source in texts):
        return True
    return (
        any("://" in source.path for source in sources)
        or sum(s.text_bytes() for s in sources) > STREAMED_BYTES
    )


def _first_row(
    system: AbstractFileSystem | None,
    files: Sequence[str],
    path: str,
    columns: Mapping[str, str],
    skip_bad: bool,
) -> tuple[str, Mapping[str, object], Document | None]:
    """Return the format of a source, its first row, which is checked as a whole, and the document of that row.

    Files whose suffix says that they hold rows come first; without any, the first file that is not empty decides.
    """
    texts = []
    others = []
    for file in files:
        if file_format(file) == "text":
            texts.append(file)
        else:
            others.append(file)
    for file in (*others, *texts):
        part = _first_range(system, file)
        if part is None or (part.group == TEXT_FILE and not _has_text(part)):
            continue
        if part.group == TEXT_FILE:
            break
        first = _first_document(part, columns, path, skip_bad)
        if first is None:
            continue
        row, document = first
        kind = str(recognize(rename(row, columns)))
        # Text files belong with records of plain text, and not with records of another format.
        unexpected = [] if kind == TEXT else texts
        for text in unexpected:
            other = _first_range(system, text)
            if other is not None and other.group == TEXT_FILE and _has_text(other):
                raise DataError(
                    f"{other.path}: a text file among records of the format {kind}, which would be trained on as raw "
                    "text: choose files with a glob, or give it as --data of its own"
                )
        return kind, row, document
    return "text files", {}, None


def _first_document(
    part: FileRange, columns: Mapping[str, str], path: str, skip_bad: bool
) -> tuple[Mapping[str, object], Document] | None:
    """Return the first row of a range that can be read, and its document; None if there is none."""
    bad = BadRecords(skip_bad)
    for row, place in first_rows(part, columns):
        try:
            if isinstance(row, DataError):
                raise row
            # Before the row is read: a column that --columns misspells would be a field that nothing reads.
            mistake = misspelled(columns, (*row, *_turn_fields(row)), place)
            if mistake is not None:
                raise UsageError(mistake)
            return row, row_document(row, columns, place, path, part.path)
        except DataError as error:
            bad.meet(error)
    bad.refuse_all(path)
    return None


def _first_range(system: AbstractFileSystem | None, file: str) -> FileRange | None:
    """Return the first range of a file; None if the file is empty."""
    with readable_errors(file):
        return next((part for part, _ in file_ranges(system, file, sys.maxsize)), None)


def _has_text(part: FileRange) -> bool:
    """Return whether the beginning of a file is more than white space."""
    with open_bytes(part.path) as file:
        return bool(file.read(8000).strip())


def _turn_fields(row: Mapping[str, object]) -> list[str]:
    """Return the names of the fields that the turns of a conversation have."""
    names = []
    for value in row.values():
        turns = value if isinstance(value, list) else []
        for turn in turns:
            if isinstance(turn, dict):
                names += list(turn)
    return names


# A record -> its text, its messages, or a dict with a format's fields.
Formatting = Callable[[Mapping[str, object]], object]


def is_records(data: object) -> TypeGuard[Iterable[object]]:
    """Return whether `data` is records rather than a path or a list of paths."""
    if data is None or isinstance(data, str | os.PathLike) or not isinstance(data, Iterable):
        return False
    return not isinstance(data, list | tuple) or not all(
        isinstance(member, str | os.PathLike) for member in data
    )


def read_records(
    data: Iterable[Any],
    columns: Mapping[str, str],
    formatting: Formatting | None,
    name: str,
    bad: BadRecords | None = None,
) -> Source:
    """Return the source of records, which are read once, as a whole; it has their documents and no files.

    `columns` come from te_models.config.data.parse_columns, and `name` stands for the data in messages. `formatting`
    makes of each record a text, a list of messages, or a dict with the fields of a format. `bad` may skip records that
    cannot be read.
    """
    bad = bad or BadRecords()
    if isinstance(data, Mapping):
        raise UsageError(
            f"{name} is a {type(data).__name__}: give a list of records, or one split of a DatasetDict"
        )
    documents = []
    first = None
    for number, record in enumerate(data, start=1):
        place = f"{name}, record {number}"
        formatted = record if formatting is None else formatting(record)
        try:
            row = _formatted(formatted, place, formatting is not None)
            # Names of columns are compared with the first record alone, since rows may leave fields out.
            if first is None:
                mistake = misspelled(columns, row, place)
                if mistake is not None:
                    raise UsageError(mistake)
            documents.append(row_document(row, columns, place, name))
        except DataError as error:
            bad.meet(error)
        else:
            if first is None:
                first = row
    if first is None:
        bad.refuse_all(name)
        raise DataError(f"{name} has no record: give at least one")
    kind = str(recognize(rename(first, columns)))
    talks = documents[0].conversation is not None
    return Source(
        path=name,
        weight=1.0,
        files=(),
        system=None,
        format=kind,
        talks=talks,
        documents=documents,
    )


def _formatted(row: object, place: str, by_function: bool) -> dict[str, object]:
    """Return the fields of a record; a list of messages, and a text that a function made, get the names of theirs."""
    if isinstance(row, Mapping):
        # Datasets of Arrow have every field in every record, as null where it was not given.
        return {name: without_nulls(value) for name, value in row.items()}
    if isinstance(row, list):
        return {"messages": row}
    if isinstance(row, str) and by_function:
        return {"text": row}
    kind = type(row).__name__
    advice = (
        "return a text, a list of messages, or a dict such as {'prompt': ..., 'completion': ...}"
    )
    if by_function:
        raise UsageError(f"{place}: formatting returned a {kind}: {advice}")
    raise DataError(
        f"{place} is a {kind}: give a dict, such as {{'text': ...}}, or a list of messages"
    )
