"""The data of a training run and what is done with it, as options with their defaults. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from typing_extensions import TypedDict

from te_models.config.checks import refuse
from te_models.errors import ConfigError, NamedFields, documented, field_values, mistyped, unknown

PACKINGS = ("stream", "documents", "none")
TRUNCATIONS = ("drop", "prompt")
COLUMNS = ("messages", "role", "content", "tools", "instruction", "input", "output", "system", "prompt", "completion",
           "text")  # fmt: skip
_WEIGHTED = re.compile(r"(.+):([-+]?(?:(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|nan|inf))", re.DOTALL | re.IGNORECASE)
MAX_WEIGHT = 1000  # times per epoch: each is an entry in the order of the documents


@dataclass(frozen=True, kw_only=True)
class DataConfig(NamedFields):
    """Where the records of a run come from, and how they become sequences.

    Raises:
        ValueError: a field is unknown (the message names the nearest) or its value out of range.
    """

    data: tuple[str, ...] = documented(
        (), "File, folder, glob, URL or Hub dataset; a:2 twice per epoch. May be repeated; default: Python's own docs."
    )
    eval_data: tuple[str, ...] = documented((), "Data to evaluate on, as --data; default: a part of --data.")
    eval_split: float | None = documented(
        None, "Share of --data that is held out for evaluation; default: 0.05, streamed 0.01."
    )
    columns: str = documented("", 'Your names for a format\'s columns, such as "prompt=question,completion=answer".')
    truncate: str = documented(
        "drop", "Records longer than --seq-len: drop, or prompt to cut the prompt from the left. Answers stay whole."
    )
    packing: str | None = documented(
        None,
        "stream: whole windows of text; documents: attend only within each document or record; none: one record per "
        "window. Default: stream for text, documents for records.",
    )
    chat_template: str | None = documented(
        None, "Jinja file to use, and save, in place of the tokenizer's chat template."
    )
    streaming: bool | None = documented(
        None,
        "Read the data during training; default: for more than 1 GiB, URLs, and text in globs or compressed files.",
    )
    num_workers: int = documented(2, "Processes that encode streamed data ahead.")

    def __post_init__(self) -> None:
        refuse(self._mistakes())
        parse_columns(self.columns)

    def _mistakes(self) -> Iterator[str | Exception]:
        kinds = dict(eval_split=float, columns=str, chat_template=str, streaming=bool, num_workers=int)
        for name, value in field_values(self).items():
            if name in kinds and value is not None and (wanted := mistyped(value, kinds[name])):
                yield f"{name}={value!r} is of a wrong type: give {wanted}"
        if self.packing is not None and self.packing not in PACKINGS:
            yield unknown("packing", self.packing, PACKINGS)
        if self.truncate not in TRUNCATIONS:
            yield unknown("truncate", self.truncate, TRUNCATIONS)
        if self.eval_split is not None and not 0 < self.eval_split < 1:
            yield f"eval_split={self.eval_split} is out of range: give a share between 0 and 1, such as 0.05"
        if self.eval_split is not None and self.eval_data:
            yield "eval_split is a share of --data, and eval_data replaces it: give one of the two"
        if self.num_workers < 0:
            yield f"num_workers={self.num_workers} is out of range: give 0 or more"


DATA_HELP = {field.name: field.metadata["help"] for field in fields(DataConfig)}


class DataOptions(TypedDict, total=False):
    """The fields of DataConfig, which documents them, except `data`."""

    eval_data: str | Iterable[Any]
    eval_split: float | None
    columns: str
    truncate: str
    packing: str | None
    chat_template: str | None
    streaming: bool | None
    num_workers: int


def parse_columns(text: str) -> Mapping[str, str]:
    """Return your column names -> a format's names from "name=yours,name=yours".

    Raises:
        ConfigError: it is written otherwise, or a name is unknown or given twice.
    """
    columns: dict[str, str] = {}
    for pair in split_names(text):
        name, equals, yours = (part.strip() for part in pair.partition("="))
        if not equals or not yours:
            raise ConfigError(f'columns: {pair!r} is not of the form name=yours, as in "prompt=question"')
        if name not in COLUMNS:
            raise unknown("column", name, COLUMNS)
        if yours in columns or name in columns.values():
            raise ConfigError(f"columns: {pair!r} names a column a second time")
        columns[yours] = name
    return columns


def split_names(text: str) -> list[str]:
    """Return the names in "name, name"."""
    return [name for name in (part.strip() for part in text.split(",")) if name]


def split_weight(text: str) -> tuple[str, float | None]:
    """Return path and weight of "path:weight"; the weight is None if none is written."""
    found = _WEIGHTED.fullmatch(text)
    return (found[1], float(found[2])) if found else (text, None)
