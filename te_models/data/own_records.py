"""Records that a program has in memory, such as a list of dicts or a datasets.Dataset, as a source of documents."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeGuard

from te_models.data.formats import misspelled, recognize, rename, row_document, without_nulls
from te_models.data.sources import Source
from te_models.errors import DataError, UsageError

Formatting = Callable[
    [Mapping[str, object]], object
]  # a record -> its text, its messages, or a dict with a format's fields


def is_records(data: object) -> TypeGuard[Iterable[object]]:
    """Return whether `data` is records rather than a path or a list of paths."""
    if data is None or isinstance(data, str | os.PathLike) or not isinstance(data, Iterable):
        return False
    return not isinstance(data, list | tuple) or not all(isinstance(member, str | os.PathLike) for member in data)


def read_records(data: Iterable[Any], columns: Mapping[str, str], formatting: Formatting | None, name: str) -> Source:
    """Return the source of records, which has their documents and no files.

    Args:
        data: the records; read once, as a whole.
        columns: your column names -> those of the formats (te_models.config.data.parse_columns).
        formatting: makes of each record a text, a list of messages, or a dict with the fields of a format.
        name: of the data, in messages.

    Raises:
        DataError: there is no record, one is of no known format, or texts are among records.
        UsageError: `formatting` returns something else.
    """
    if isinstance(data, Mapping):
        raise UsageError(f"{name} is a {type(data).__name__}: give a list of records, or one split of a DatasetDict")
    documents, first = [], None
    for number, record in enumerate(data, start=1):
        place = f"{name}, record {number}"
        row = _formatted(record if formatting is None else formatting(record), place, formatting is not None)
        if first is None:
            if (wrong := misspelled(columns, row, place)) is not None:
                raise UsageError(wrong)
            first = row
        documents.append(row_document(row, columns, place, name))
    if first is None:
        raise DataError(f"{name} has no record: give at least one")
    kind, talks = str(recognize(rename(first, columns))), documents[0].conversation is not None
    return Source(name, 1.0, (), None, kind, talks, documents)


def _formatted(made: object, place: str, by_function: bool) -> dict[str, object]:
    """Return the fields of a record; a list of messages, and a text that a function made, get the names of theirs."""
    if isinstance(made, Mapping):
        return {name: without_nulls(value) for name, value in made.items()}
    if isinstance(made, list):
        return {"messages": made}
    if isinstance(made, str) and by_function:
        return {"text": made}
    if by_function:
        raise UsageError(
            f"{place}: formatting returned a {type(made).__name__}: return a text, a list of messages, or a dict such "
            "as {'prompt': ..., 'completion': ...}"
        )
    raise DataError(f"{place} is a {type(made).__name__}: give a dict, such as {{'text': ...}}, or a list of messages")
