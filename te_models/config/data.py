"""Options of the data of a training run, with their defaults. No torch."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from te_models.config.settings import EVERYDAY, Settings, setting
from te_models.errors import ConfigError, check_known, field_values

PACKINGS = ("stream", "documents", "none")
TRUNCATIONS = ("drop", "prompt")
BAD_RECORDS = ("raise", "skip")
COLUMNS = (
    "messages",
    "role",
    "content",
    "tools",
    "instruction",
    "input",
    "output",
    "system",
    "prompt",
    "completion",
    "text",
)
# A path and its weight: "a.jsonl:2", "a.jsonl:.5" or "a.jsonl:1e-2". "nan" and "inf" match so that they are refused.
_WEIGHTED = re.compile(
    r"(.+):([-+]?(?:(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|nan|inf))", re.DOTALL | re.IGNORECASE
)
MAX_WEIGHT = 1000  # times per epoch: each is an entry in the order of the documents
DATA = "Data"  # heading of the help


@dataclass(frozen=True, kw_only=True)
class DataConfig(Settings):
    """Where the records of a run come from, and how they become sequences.

    `data` and `eval_data` are one path or several.

    Raises:
        ValueError: a field is unknown (the message names the nearest) or its value out of range.
    """

    heading = DATA
    data: tuple[str, ...] = setting(
        (),
        "File, folder, glob, URL or Hub dataset; :2 reads it twice an epoch. Repeatable; default, for a preset or a "
        "shipped model: Python's own docs.",
        group=EVERYDAY,
        path=True,
        metavar="PATH[:WEIGHT]",
    )
    eval_data: tuple[str, ...] = setting(
        (), "Data to evaluate on, as --data; default: a part of --data.", path=True, metavar="PATH"
    )
    eval_split: float | None = setting(
        None,
        "Share of --data that is held out for evaluation; 0: no evaluation; default: 0.05, streamed 0.01.",
        below=1,
        fixed=True,
        metavar="SHARE",
    )
    columns: str = setting(
        "",
        'Your names for a format\'s columns, such as "prompt=question,completion=answer".',
        fixed=True,
        metavar="NAMES",
    )
    truncate: str = setting(
        "drop",
        "Records longer than --seq-len: drop, or prompt to cut the prompt from the left. Answers stay whole.",
        choices=TRUNCATIONS,
        fixed=True,
        metavar="WAY",
    )
    on_bad_record: str = setting(
        "raise",
        "A record that cannot be read: raise ends the run; skip leaves it out, and counts it.",
        choices=BAD_RECORDS,
        fixed=True,
        metavar="WAY",
    )
    packing: str | None = setting(
        None,
        "stream: whole windows of text; documents: attend only within each document or record; none: one record per "
        "window. Default: stream for text, documents for records.",
        choices=PACKINGS,
        fixed=True,
        metavar="NAME",
    )
    chat_template: str | None = setting(
        None,
        "Jinja file, or chatml, llama3 or gemma, to use, and save, in place of the tokenizer's chat template.",
        fixed=True,
        path=True,
        metavar="FILE|NAME",
    )
    special_tokens: str = setting(
        "",
        "Tokens to add to the tokenizer, such as '<|im_start|>,<|im_end|>'; the model gets a row for each, at the "
        "mean of the others.",
        fixed=True,
        metavar="TOKENS",
    )
    streaming: bool | None = setting(
        None,
        "Read the data during training; default: for more than 1 GiB, URLs, and text in globs or compressed files.",
        fixed=True,
    )
    num_workers: int = setting(2, "Processes that encode streamed data ahead.", name="data_workers")

    def __post_init__(self) -> None:
        for name in ("data", "eval_data"):
            paths = field_values(self)[name] or ()
            if isinstance(paths, (str, os.PathLike)):
                paths = [paths]
            object.__setattr__(self, name, tuple(os.fspath(path) for path in paths))
        super().__post_init__()
        if self.eval_split and self.eval_data:
            raise ConfigError(
                "eval_split is a share of --data, and eval_data replaces it: give one of the two"
            )
        parse_columns(self.columns)


def parse_columns(text: str) -> Mapping[str, str]:
    """Return your column names -> a format's names from "name=yours,name=yours".

    Raises:
        ConfigError: it is written otherwise, or a name is unknown or given twice.
    """
    columns: dict[str, str] = {}
    for pair in split_names(text):
        name, yours = split_pair("columns:", pair, 'name=yours, as in "prompt=question"')
        check_known("column", name, COLUMNS)
        if yours in columns or name in columns.values():
            raise ConfigError(f"columns: {pair!r} names a column a second time")
        columns[yours] = name
    return columns


def split_names(text: str) -> list[str]:
    """Return the names in "name, name"."""
    names = [name.strip() for name in text.split(",")]
    return [name for name in names if name]


def split_pair(label: str, text: str, form: str) -> tuple[str, str]:
    """Return name and value of "name=value".

    Raises:
        ConfigError: one of them is missing; the message begins with `label` and shows the `form` to write.
    """
    name, _, value = (part.strip() for part in text.partition("="))
    if not (name and value):
        raise ConfigError(f"{label} {text!r} has no value or no name: write {form}")
    return name, value


def split_weight(text: str) -> tuple[str, float | None]:
    """Return path and weight of "path:weight"; the weight is None if none is written."""
    match = _WEIGHTED.fullmatch(text)
    return (match[1], float(match[2])) if match else (text, None)
