"""A preview of data as a run would learn it: the first records with the learned parts marked, lengths, and losses."""

import dataclasses
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from te_models.config.data import DataConfig, parse_columns, split_names
from te_models.data.bad_records import BadRecords
from te_models.data.documents import (
    has_text,
    ignored_lines,
    load_documents,
    refuse_mixture,
    unused_lines,
)
from te_models.data.encoding import Encoded, encode_documents, fit_records
from te_models.data.formats import Document
from te_models.data.named_templates import use_template
from te_models.data.python_docstrings import PYTHON_DOCS, PYTHON_DOCSTRINGS, python_docstrings
from te_models.data.rows import file_ranges, read_range
from te_models.data.sources import Source, open_sources
from te_models.data.tokenizer_base import Tokenizer
from te_models.errors import DataError, UsageError, plural
from te_models.files.formats import Fields
from te_models.planning.printable import Printable

LEARNED = "learned"
READ = "read"
CUT = "cut"  # what becomes of a part of a record
STYLES = {LEARNED: "bold green", READ: "dim", CUT: "red strike"}
# Where there are no colours.
MARKS = {LEARNED: ("\u27e6", "\u27e7"), READ: ("", ""), CUT: ("[cut: ", "]")}
LONGEST = 4000  # characters shown of a record
RECORDS = 3
LIMIT = 10_000
_QUANTILES = {"shortest": 0.0, "median": 0.5, "90 %": 0.9, "99 %": 0.99, "longest": 1.0}
_RANGE_BYTES = 2**22  # read at a time
_BAR = 30  # characters


@dataclass(frozen=True)
class TextPart:
    """A piece of a record's text, and what becomes of it: LEARNED, READ or CUT."""

    text: str
    kind: str


@dataclass(frozen=True)
class PreviewRecord:
    """One record as a run learns it.

    Attributes:
        name: its file and row.
        parts: its text, special tokens spelled out.
        tokens: their number, before anything is cut.
        learned: the tokens that the loss counts.
        left_out: why a run leaves it out, or "".
    """

    name: str
    parts: tuple[TextPart, ...]
    tokens: int
    learned: int
    left_out: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the title and the text, in colours, or with marks where there are none."""
        yield Text(f"\n{self.title()}", "bold")
        plain = console.color_system is None
        text = Text()
        room = LONGEST
        for part in self.parts:
            shown = part.text[:room]
            # LONGEST bounds the record, not each part.
            room -= len(shown)
            before, after = MARKS[part.kind] if plain else ("", "")
            text.append(f"{before}{shown}{after}", "" if plain else STYLES[part.kind])
        size = sum(len(part.text) for part in self.parts)
        if size > LONGEST:
            text.append(f"\n... {size - LONGEST:,} more characters", "italic")
        yield text

    def title(self) -> str:
        """Return a line about the record."""
        title = f"{self.name}: {plural(self.tokens, 'token')}, {self.learned:,} learned"
        return f"{title}; left out: {self.left_out}" if self.left_out else title


@dataclass(frozen=True)
class Preview(Printable):
    """The part of some data that a run would learn. Print it; `to_dict` returns plain JSON values.

    Attributes:
        lines: about the data: sources, format, template, and records that are left out, cut, skipped or ignored.
        records: the first ones.
        count: the records that were read.
        seq_len: the length of a window.
        context: the longest sequence that the model allows; None if it is not known.
        tokens: their tokens, and in `learned` those that the loss counts, of the records that are not left out.
        quantiles: of the records' lengths in tokens, by name.
        lengths: for each power of two, how many records have at most so many tokens, and more than the one before.
    """

    width: ClassVar[int] = 120
    lines: tuple[str, ...]
    records: tuple[PreviewRecord, ...]
    count: int
    seq_len: int
    context: int | None
    tokens: int
    learned: int
    quantiles: Mapping[str, int]
    lengths: Mapping[int, int]

    def to_dict(self) -> Fields:
        """Return the result as plain JSON values."""
        return dataclasses.asdict(self)

    @property
    def longest(self) -> int:
        """Tokens of the longest record that fits as it is."""
        return _longest(self.seq_len, self.context)

    @property
    def bound(self) -> str:
        """The option or the model that limits the length of a record, in words."""
        return _bound(self.seq_len, self.context)

    def __rich__(self) -> Group:
        """Return the lines, the records and the table of lengths."""
        legend = Text("\n")
        legend.append("learned", STYLES[LEARNED])
        legend.append("  ")
        legend.append("read only", STYLES[READ])
        legend.append("  ")
        legend.append("cut", STYLES[CUT])
        legend.append("  (without colours: \u27e6learned\u27e7, read only, [cut: ...])")
        lines = [Text(line) for line in self.lines]
        tables = [Text(), self._quantiles(), Text(), self._bars()]
        return Group(*lines, legend, *self.records, *tables)

    def _quantiles(self) -> Table:
        table = Table(title="tokens per record", title_justify="left", box=None)
        for name in self.quantiles:
            table.add_column(name, justify="right")
        table.add_row(*(f"{value:,}" for value in self.quantiles.values()))
        return table

    def _bars(self) -> Table:
        table = Table(box=None, show_header=False)
        table.add_column(justify="right")
        table.add_column(justify="right")
        table.add_column()
        most = max(self.lengths.values(), default=1)
        for least, (limit, count) in zip([0, *self.lengths], self.lengths.items(), strict=False):
            longer = f" (longer than {self.bound})" if least >= self.longest else ""
            bar = "\u2588" * max(1, round(_BAR * count / most)) if count else ""
            table.add_row(
                f"{least + 1:,} to {limit:,}", f"{count:,}", f"{bar}{longer if count else ''}"
            )
        return table


def preview(
    settings: DataConfig,
    tokenizer: Tokenizer,
    seq_len: int,
    *,
    records: int = RECORDS,
    limit: int = LIMIT,
    context: int | None = None,
) -> Preview:
    """Read data as a run would, and return the parts of it that would be learned.

    Args:
        settings: where the data is, and how it becomes sequences.
        tokenizer: gets the chat template and special tokens of `settings`, as in a run.
        seq_len: tokens per window.
        records: how many are returned as text.
        limit: the most records to read; several sources have equal shares of them.
        context: the longest sequence that the model allows (`config.longest_sequence`); None: any length.

    Raises:
        DataError: a record cannot be read, unless `settings` skips those; or there is none.
        UsageError: no data is given, or nothing of it is to be read.
    """
    _check_preview(settings, records, limit, seq_len)
    bad = BadRecords(skip=settings.on_bad_record == "skip")
    if tokens := split_names(settings.special_tokens):
        tokenizer.add_special_tokens(tokens)
    about_template = (
        use_template(tokenizer, settings.chat_template) if settings.chat_template else []
    )
    documents, lines, more = _read(settings, bad, limit)
    if any(document.conversation is not None for document in documents):
        if tokenizer.ensure_chat_template():
            lines.append("the tokenizer has no chat template: a plain one is used")
        lines += about_template
    lines += ignored_lines(documents)
    lines += unused_lines(documents, settings.truncate, settings.chat_template)
    whole = any(document.is_record for document in documents)
    encoded = encode_documents(documents, tokenizer, begin_prompts=whole, bad=bad)
    unfitted = encoded.tokens.copy()  # fit_records may write a bos token over others
    fitting, fitted, fit = fit_records(
        encoded, _longest(seq_len, context), settings.truncate, tokenizer.bos_token_id
    )
    encoded = dataclasses.replace(encoded, tokens=unfitted)
    lines += fit.describe(int(encoded.records.sum()), seq_len, settings.truncate, context)
    if not whole and context is not None and seq_len > context:
        # Records are packed as documents by default, which fit each; texts fill whole windows.
        lines.append(
            f"a run refuses windows of --seq-len {seq_len}: the model allows {plural(context, 'token')}"
        )
    lines += bad.describe()
    # Number of a document -> its number among those that fit.
    places = dict(zip(fitting.tolist(), range(len(fitting)), strict=True))
    shown = []
    for index, document in enumerate(documents[:records]):
        place = places.get(index)
        cut = 0 if place is None else int(fitted.starts[place] - encoded.starts[index])
        record = _record(document, encoded, index, tokenizer, cut, place is None)
        if place is None and not record.left_out:
            reason = f"it is longer than {_bound(seq_len, context, number=True)}"
            record = dataclasses.replace(record, left_out=reason)
        shown.append(record)
    counted = sum(int(_counted(fitted, place).sum()) for place in range(len(fitted)))
    return Preview(
        lines=(_total_line(documents, more, fitted, counted), *lines),
        records=tuple(shown),
        count=len(documents),
        seq_len=seq_len,
        context=context,
        tokens=fitted.num_tokens,
        learned=counted,
        quantiles=_quantiles(encoded.lengths),
        lengths=_histogram(encoded.lengths),
    )


def _longest(seq_len: int, context: int | None) -> int:
    """Return the tokens of the longest record that fits as it is."""
    return seq_len if context is None else min(seq_len, context)


def _bound(seq_len: int, context: int | None, number: bool = False) -> str:
    """Name the option or the model that limits the length of a record, with the limit itself if `number`."""
    if context is not None and seq_len > context:
        return f"the {plural(context, 'token')} that the model allows"
    return f"--seq-len {seq_len}" if number else "--seq-len"


def _check_preview(settings: DataConfig, records: int, limit: int, seq_len: int) -> None:
    """Raise a UsageError where there is nothing to read, or a number is out of range."""
    if not settings.data:
        raise UsageError("give --data PATH: a file, folder, glob, URL or Hub dataset")
    if limit < 1 or records < 0 or seq_len < 2:
        raise UsageError(
            "give a --limit of 1 or more, --records of 0 or more, --seq-len of 2 or more"
        )


def _total_line(documents: Sequence[Document], more: bool, fitted: Encoded, counted: int) -> str:
    """Return the line on how much was read, of `more` data or of all, how much is kept, and how much is learned."""
    read = plural(len(documents), "record")
    if more:
        read = f"the first {read}"
    total = fitted.num_tokens
    share = f"{counted / total:.0%}" if total else "none"
    return f"{read}, {plural(total, 'token')} in {plural(len(fitted), 'record')} that are kept, {share} learned"


def _read(
    settings: DataConfig, bad: BadRecords, limit: int
) -> tuple[list[Document], list[str], bool]:
    """Return documents, lines about where they are from, and whether there are more of them."""
    columns = parse_columns(settings.columns)
    built_in = settings.data in ((PYTHON_DOCSTRINGS,), (PYTHON_DOCS,))
    sources = open_sources(() if built_in else settings.data, columns, skip_bad=bad.skip)
    if settings.data == (PYTHON_DOCSTRINGS,):
        documents = python_docstrings()[0]
        return (
            documents[:limit],
            [f"{PYTHON_DOCSTRINGS}: prompt/completion"],
            len(documents) > limit,
        )
    if settings.data == (PYTHON_DOCS,):
        documents = load_documents(None)
        return documents[:limit], [f"{PYTHON_DOCS}: text"], len(documents) > limit
    # Equal shares: else a preview would show only the first source.
    share = max(1, limit // len(sources))
    documents = []
    more = False
    for source in sources:
        # One more than is shown tells whether there are others.
        read_documents = list(itertools.islice(_documents(source, columns, bad), share + 1))
        more = more or len(read_documents) > share
        documents += read_documents[:share]
    # A run refuses a mixture of records and running text; so does its preview.
    kinds = {not source.is_text for source in sources}
    documents = refuse_mixture(documents, kinds.pop() if len(kinds) == 1 else None, bad)
    if not documents:
        names = " and ".join(settings.data)
        bad.refuse_all(names)
        raise DataError(f"{names}: there is no record in it")
    return documents, [source.describe() for source in sources], more


def _documents(source: Source, columns: Mapping[str, str], bad: BadRecords) -> Iterator[Document]:
    """Yield the documents of a source, as far as they are asked for."""
    if source.system is None:  # a Hub dataset
        yield from load_documents(source.path, columns, bad)
        return
    size = sys.maxsize if source.format == "text files" else _RANGE_BYTES
    for file in source.files:
        for part, _ in file_ranges(source.system, file, size):
            yield from filter(has_text, read_range(part, source.path, columns, bad))


def _record(
    document: Document,
    encoded: Encoded,
    index: int,
    tokenizer: Tokenizer,
    cut: int,
    left_out: bool,
) -> PreviewRecord:
    """Return one record in parts; its first `cut` tokens are cut by --truncate.

    One that is left out for its length has no reason yet.
    """
    start = int(encoded.starts[index])
    length = int(encoded.lengths[index])
    ids = encoded.tokens[start : start + length].tolist()
    counted = _counted(encoded, index)
    kinds = np.where(counted, LEARNED, READ)
    kinds[:cut] = CUT
    reason = ""
    if left_out and encoded.refused is not None and encoded.refused[index]:
        reason = "the chat template refuses it"
    elif left_out and not counted.any():
        reason = "it has no answer to learn"
    parts = tuple(_parts(ids, kinds.tolist(), tokenizer))
    return PreviewRecord(
        document.name, parts, length, 0 if left_out else int(counted.sum()), reason
    )


def _counted(encoded: Encoded, index: int) -> np.ndarray:
    """Return which tokens of a document are learned, bool [n]: not the first of a record, which nothing precedes."""
    start = int(encoded.starts[index])
    length = int(encoded.lengths[index])
    if encoded.counted is None:
        return np.ones(length, dtype=np.bool_)
    counted = encoded.counted[start : start + length].copy()
    # A loss needs a token before the one that it predicts.
    counted[:1] = False
    return counted


def _parts(ids: Sequence[int], kinds: Sequence[str], tokenizer: Tokenizer) -> Iterator[TextPart]:
    """Yield the text of tokens in runs of one kind.

    The text of a run is the difference that it makes to the text before it, since decoders like SentencePiece's drop
    the space at the start of a text, and a character may take several tokens.
    """
    before = ""
    at = 0
    for kind, run in itertools.groupby(kinds):
        at += len(list(run))
        text = tokenizer.spell(ids[:at])
        common = len(_common_prefix(before, text))
        if text[common:]:
            yield TextPart(text[common:], kind)
        before = text


def _common_prefix(one: str, other: str) -> str:
    """Return the beginning that two texts share, without a replacement for half a character."""
    end = 0
    for a, b in zip(one.rstrip("\ufffd"), other, strict=False):
        if a != b:
            break
        end += 1
    return one[:end]


def _quantiles(lengths: np.ndarray) -> dict[str, int]:
    ordered = np.sort(lengths)
    last = len(ordered) - 1
    return {name: int(ordered[round(share * last)]) for name, share in _QUANTILES.items()}


def _histogram(lengths: np.ndarray) -> dict[int, int]:
    """Return how many documents have at most each power of two of tokens, from the first that has any to the last."""
    exponents = np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)
    first = int(exponents.min())
    counts = np.bincount(exponents - first)
    return {2 ** (first + place): int(count) for place, count in enumerate(counts)}
