"""The data of a run: a dataset to train on, in memory or streamed, and batches to evaluate on."""

import dataclasses
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from te_models.config.data import DataConfig, parse_columns, split_names
from te_models.config.training import TrainConfig
from te_models.data.bad_records import BadRecords
from te_models.data.dataset import TokenDataset
from te_models.data.documents import (
    ignored_lines,
    in_evaluation,
    load_documents,
    refuse_mixture,
    split_documents,
    unused_lines,
)
from te_models.data.encoding import Encoded, counted_line, encode_documents, keep_fitting
from te_models.data.formats import Document
from te_models.data.named_templates import use_template
from te_models.data.python_docstrings import PYTHON_DOCS, PYTHON_DOCSTRINGS, python_docstrings
from te_models.data.sources import (
    Formatting,
    Source,
    first_documents,
    is_records,
    must_stream,
    open_sources,
    read_records,
)
from te_models.data.streaming import StreamingDataset
from te_models.data.tokenizer import TokenizerLike, as_tokenizer
from te_models.data.tokenizer_base import Tokenizer
from te_models.distributed.control import Ranks
from te_models.errors import DataError, UsageError, plural
from te_models.files.formats import Fields

OWN = "the data in memory"
OWN_EVALUATION = "the evaluation data in memory"
EVAL_SPLIT = 0.05  # of the documents in memory
STREAMED_EVAL_SPLIT = 0.01
BUILT_IN = ((), (PYTHON_DOCSTRINGS,))  # values of DataConfig.data; () is Python's documentation

Data = str | os.PathLike[str] | Sequence[str] | DataConfig | Iterable[object] | None


def open_data(
    data: Data,
    tokenizer: TokenizerLike,
    config: TrainConfig,
    *,
    formatting: Formatting | None = None,
    limit: int | None = None,
    rank: int = 0,
    world_size: int = 1,
    ranks: Ranks | None = None,
    **options: object,
) -> tuple[TokenDataset | StreamingDataset, list[dict[str, Tensor]]]:
    """Open the data of a run. Lines about it are in `describe()` of the dataset.

    Args:
        data: a file, folder, glob, URL or Hub dataset, several of them, each with an optional weight ("a.jsonl:3"), or
            a DataConfig; records in memory: a list, a datasets.Dataset, or another iterable of dicts or lists of
            messages; "python-docstrings": functions and docstrings of Python's standard library; None or "python-docs":
            Python's own documentation and sources.
        tokenizer: encodes the text; or a tokenizer of transformers, which is copied, or what `load_tokenizer` takes. If
            there are conversations and it has no chat template, it gets a plain one, which it saves
            (`Tokenizer.set_chat_template`).
        config: seq_len, batch_size, gradient_accumulation, seed and eval_batches.
        formatting: makes of each record in memory, and of each of `eval_data` there, a text, a list of messages, or a
            dict with the fields of a format, such as prompt and completion.
        limit: the longest sequence that the model allows (`model.config.longest_sequence`); packed documents are cut to
            it or left out, so that config.seq_len may be larger. None: any length.
        rank: number of this process among those that share the data; the processes of one replica have the same.
        world_size: number of ranks that share the data.
        ranks: the processes that exchange positions of a streamed corpus when a checkpoint is saved.
        options: fields of DataConfig, unless `data` is a DataConfig; `eval_data` may be records too.

    Returns:
        this rank's dataset of training batches, and its evaluation batches; none where eval_split is 0.

    Raises:
        UsageError: an argument is out of range, or options contradict each other or the data.
        DataError: the data cannot be read, is of no known format, or is too short.
    """
    tokenizer = as_tokenizer(tokenizer)
    _check_config(config)
    settings, in_memory = _settings(data, options)
    _check_formatting(formatting, in_memory)
    columns = parse_columns(settings.columns)
    bad = BadRecords(skip=settings.on_bad_record == "skip")
    sources, evaluated = _open_sources(settings, in_memory, columns, formatting, bad)
    packing = _packing(settings, sources)
    streaming = _streams(settings, sources, in_memory)
    opening = _Opening(
        settings=settings,
        packing=packing,
        sources=sources,
        evaluated=evaluated,
        columns=columns,
        tokenizer=tokenizer,
        config=config,
        limit=limit,
        rank=rank,
        world_size=world_size,
        ranks=ranks,
        bad=bad,
        # Before any text is encoded: special tokens and the template change the ids of a conversation.
        about_template=_prepare_tokenizer(tokenizer, settings),
    )
    return opening.streamed() if streaming else opening.in_memory()


def _check_config(config: object) -> None:
    """Raise a UsageError if `config` is no TrainConfig."""
    if not isinstance(config, TrainConfig):
        kind = type(config).__name__
        raise UsageError(f"config is a {kind}: give te_models.TrainConfig(seq_len=...)")


def _check_formatting(formatting: Formatting | None, in_memory: Mapping[str, object]) -> None:
    """Raise a UsageError for a function that has no records to format."""
    if formatting is not None and not in_memory:
        raise UsageError(
            "formatting is for records in memory: give a list or a datasets.Dataset, or for files columns"
        )


def _settings(data: Data, options: Fields) -> tuple[DataConfig, dict[str, Iterable[object]]]:
    """Return the settings that `data` and options of open_data give, and the records in memory among them, by name."""
    # Popped: DataConfig takes the names of files alone, and these may be records.
    eval_data = options.pop("eval_data", ())
    by_option = {OWN: data, OWN_EVALUATION: eval_data}
    in_memory = {}
    for name, records in by_option.items():
        if is_records(records):
            in_memory[name] = cast(Iterable[object], records)
    if isinstance(data, DataConfig):
        return _without_default(data), in_memory
    # Their names stand for records where the settings need names of files.
    paths: object = OWN if OWN in in_memory else data
    evaluated: object = OWN_EVALUATION if OWN_EVALUATION in in_memory else eval_data
    settings = DataConfig(data=paths, eval_data=evaluated, **options)
    if data is not None and not settings.data:
        raise UsageError(
            "no data in the list: give a path, or None for Python's own documentation and sources"
        )
    return _without_default(settings), in_memory


def _without_default(settings: DataConfig) -> DataConfig:
    """Return the settings with no data in place of "python-docs", which means the same."""
    if settings.data == (PYTHON_DOCS,):
        return dataclasses.replace(settings, data=())
    return settings


def _prepare_tokenizer(tokenizer: Tokenizer, settings: DataConfig) -> list[str]:
    """Give the tokenizer the special tokens and the template of a run; return the lines to print about these."""
    if tokens := split_names(settings.special_tokens):
        tokenizer.add_special_tokens(tokens)
    if settings.chat_template is None:
        return []
    return use_template(tokenizer, settings.chat_template)


def _open_sources(
    settings: DataConfig,
    in_memory: Mapping[str, Iterable[object]],
    columns: Mapping[str, str],
    formatting: Formatting | None,
    bad: BadRecords,
) -> tuple[list[Source], list[Source]]:
    """Return the sources to train on, none of built-in data, and the sources to evaluate on, none if not given."""
    opened = {}
    for name, records in in_memory.items():
        # Checked and formatted once, here: an iterator may not be read twice.
        opened[name] = [read_records(records, columns, formatting, name, bad)]
    sources = opened.get(OWN, [])
    if not sources:
        paths = () if settings.data in BUILT_IN else settings.data
        # Columns beside built-in data may be meant for eval_data.
        required = bool(paths) or not settings.eval_data
        sources = open_sources(paths, columns, required, skip_bad=bad.skip)
    evaluated = opened.get(OWN_EVALUATION) or open_sources(
        settings.eval_data, columns, required=False, skip_bad=bad.skip
    )
    return sources, evaluated


def _packing(settings: DataConfig, sources: Sequence[Source]) -> str:
    """Return the packing of the settings, or the usual one: documents for records, a stream for texts."""
    records = settings.data == (PYTHON_DOCSTRINGS,) or not all(source.is_text for source in sources)
    packing = settings.packing or ("documents" if records else "stream")
    if packing == "stream" and records:
        raise UsageError(
            "packing stream would cut answers at the ends of windows: use documents, or none"
        )
    return packing


def _streams(
    settings: DataConfig, sources: Sequence[Source], in_memory: Mapping[str, object]
) -> bool:
    """Return whether the data is streamed, which built-in data and records in memory never are."""
    streaming = settings.streaming
    if streaming is None:
        streaming = must_stream(sources)
    if streaming and (settings.data in BUILT_IN or OWN in in_memory):
        raise UsageError(
            "--streaming needs --data PATH: built-in data and records in memory are there as a whole"
        )
    return streaming


def steps_of(dataset: TokenDataset | StreamingDataset, config: TrainConfig) -> int:
    """Return the steps of a run: as many as the config says, or as `config.epochs` takes, rounded up.

    Raises:
        UsageError: epochs of streamed data, whose size is not known.
    """
    if not config.epochs:
        return config.steps
    if isinstance(dataset, StreamingDataset):
        raise UsageError(
            "--epochs needs data in memory, where its size is known: give --steps, or --no-streaming"
        )
    windows = dataset.batch_size * dataset.world_size * config.gradient_accumulation
    return max(1, math.ceil(dataset.windows_in(config.epochs) / windows))


@dataclasses.dataclass
class _Opening:
    """The arguments of open_data, checked, and the packing that they amount to."""

    settings: DataConfig
    packing: str
    sources: list[Source]
    evaluated: list[Source]
    columns: Mapping[str, str]
    tokenizer: Tokenizer
    config: TrainConfig
    limit: int | None
    rank: int
    world_size: int
    ranks: Ranks | None
    bad: BadRecords
    about_template: list[str]

    @property
    def share(self) -> Fields:
        """The arguments that all datasets of the run have in common."""
        return dict(
            batch_size=self.config.batch_size,
            seed=self.config.seed,
            packing=self.packing,
            limit=self.limit,
            rank=self.rank,
            world_size=self.world_size,
        )

    def records(self, sources: Sequence[Source]) -> bool | None:
        """Return whether all documents of these sources must be records, or texts; None if there are both."""
        if self.packing == "stream":
            return False
        kinds = {not source.is_text for source in sources}
        return kinds.pop() if len(kinds) == 1 else None

    def in_memory(self) -> tuple[TokenDataset, list[dict[str, Tensor]]]:
        """Read all documents, leave out what does not fit, and split them."""
        documents, weights, held_out = self._load()
        remarks = [source.describe() for source in self.sources] + self._template()
        remarks += ignored_lines([*documents, *held_out])
        remarks += self._unused([*documents, *held_out])
        # Documents of the other kind are left out, and their weights, which are by position, with them.
        fitting = refuse_mixture(documents, self.records(self.sources), self.bad)
        if len(fitting) < len(documents):
            in_kind = {id(document) for document in fitting}
            # By identity, since equal documents may have different weights.
            weights = weights[[id(document) in in_kind for document in documents]]
            documents = fitting
        # One text cannot be held out as a whole: its end is.
        cut = self.evaluates and not held_out
        if len(documents) == 1 and cut and not documents[0].is_record:
            documents, held_out = split_documents(
                documents, self._eval_split(EVAL_SPLIT), self.config.seed
            )
        whole = any(document.is_record for document in documents)
        left_out: list[str] = []
        encoded = encode_documents(documents, self.tokenizer, whole, self.bad)
        if whole:
            fitting, encoded, left_out = keep_fitting(
                encoded,
                self.tokenizer,
                self.config.seq_len,
                self.settings.truncate,
                self.limit,
            )
            documents = [documents[i] for i in fitting]
            weights = weights[fitting]
            remarks += left_out
        # Hold out after encoding, so that the records that do not fit are not among the ones to evaluate on.
        evaluated = None
        if held_out:
            evaluated = encode_documents(held_out, self.tokenizer, whole, self.bad)
        elif self.evaluates:
            try:
                aside = in_evaluation(documents, self._eval_split(EVAL_SPLIT), self.config.seed)
            except DataError as error:  # of the records that are left
                raise DataError("; ".join([str(error), *left_out])) from None
            evaluated = encoded.select(aside)
            encoded = encoded.select(~aside)
            # By position: they have to leave with their documents.
            weights = weights[~aside]
        dataset = TokenDataset(
            encoded,
            self.tokenizer,
            self.config.seq_len,
            **self.share,
            weights=weights if (weights != 1).any() else None,
            sources=sorted({document.source for document in documents} - {""}),
        )
        evaluation_remarks, batches = self._evaluation(evaluated)
        dataset.remark(remarks)
        dataset.remark(self.bad.describe())
        dataset.remark(counted_line(encoded))
        dataset.remark(self._shortage(dataset.windows_in(1)))
        dataset.remark(evaluation_remarks)
        return dataset, batches

    def streamed(self) -> tuple[StreamingDataset, list[dict[str, Tensor]]]:
        """Index the corpus, and read as much of it as evaluation needs."""
        settings = self.settings
        share = 0.0 if settings.eval_data else self._eval_split(STREAMED_EVAL_SPLIT)
        remarks = [source.describe() for source in self.sources]
        remarks += self._template()  # before the dataset, whose position depends on it
        dataset = StreamingDataset(
            self.sources,
            self.tokenizer,
            self.config.seq_len,
            **self.share,
            truncate=settings.truncate,
            columns=self.columns,
            records=self.records(self.sources),
            eval_fraction=share,
            num_workers=settings.num_workers,
            ranks=self.ranks,
            skip_bad=self.bad.skip,
        )
        eval_tokens = (
            self.config.eval_batches
            * self.config.batch_size
            * self.config.seq_len
            * self.world_size
        )
        # Read before training begins: the sample is in memory, and the same on every rank.
        evaluation = None
        if settings.eval_data:
            evaluation = self._load_evaluation(eval_tokens)
        elif self.evaluates:
            evaluation = dataset.held_out(eval_tokens, True)
        # The corpus is not read yet: the first chunk with text stands for it in what the run prints.
        if dataset.whole:
            sample = dataset.sample()
            remarks += sample.remarks
            lines = sample.fit.describe(
                sample.documents, self.config.seq_len, settings.truncate, self.limit
            )
            remarks += [f"in the first {sample.documents:,} of them: {line}" for line in lines]
            remarks.append(f"packed chunk by chunk, with {sample.padding:.1%} padding in the first")
        else:
            remarks += ignored_lines(first_documents(self.sources))
        remarks += self._unused(first_documents([*self.sources, *self.evaluated]))
        evaluated = None
        if evaluation is not None:
            evaluated = encode_documents(evaluation, self.tokenizer, dataset.whole, self.bad)
        evaluation_remarks, batches = self._evaluation(evaluated)
        dataset.remark([*remarks, *evaluation_remarks])
        return dataset, batches

    def _load(self) -> tuple[list[Document], NDArray[np.float64], list[Document]]:
        """Return all documents, their weights, and the documents to evaluate on, from --eval-data or built in."""
        held_out = self._load_evaluation(None) if self.settings.eval_data else []
        if not self.sources:
            pairs = self.settings.data == (PYTHON_DOCSTRINGS,)
            documents, built_in = python_docstrings() if pairs else (load_documents(None), [])
            return documents, np.ones(len(documents)), held_out or built_in * self.evaluates
        parts = [self._documents(source) for source in self.sources]
        weights = np.concatenate(
            [np.full(len(p), s.weight) for p, s in zip(parts, self.sources, strict=True)]
        )
        return [document for part in parts for document in part], weights, held_out

    def _documents(self, source: Source) -> Sequence[Document]:
        if source.documents is None:
            return load_documents(source.path, self.columns, self.bad)
        return source.documents

    def _load_evaluation(self, num_tokens: int | None) -> list[Document]:
        """Return the documents of --eval-data; of much data about `num_tokens` tokens, from everywhere in it."""
        sources = self.evaluated
        # Of data too large for memory, a stream's own sample, from chunks all over it.
        if num_tokens is not None and must_stream(sources):
            sample = StreamingDataset(
                sources,
                self.tokenizer,
                self.config.seq_len,
                batch_size=1,
                seed=self.config.seed,
                columns=self.columns,
                skip_bad=self.bad.skip,
            )
            documents = sample.held_out(num_tokens)
        else:
            documents = [document for source in sources for document in self._documents(source)]
        on_texts = self.records(self.sources) is False
        return refuse_mixture(
            documents, False if on_texts else self.records(self.evaluated), self.bad
        )

    def _template(self) -> list[str]:
        """Give the tokenizer a chat template if there are conversations and it has none; say so."""
        if not any(source.talks for source in (*self.sources, *self.evaluated)):
            return []
        if self.tokenizer.ensure_chat_template():
            return [
                "the tokenizer has no chat template: a plain one is used, and saved with the model"
            ]
        only_for_tools = self.tokenizer.template_source() is None
        marks = self.tokenizer.chat_template(tools=only_for_tools).marks_answers
        method = "by the chat template's marks" if marks else "by rendering the turns before each"
        return [f"answers found {method}", *self.about_template]

    def _unused(self, documents: Iterable[Document]) -> list[str]:
        """Return a line for each setting that changes nothing in these documents: all, or the first of each source."""
        settings = self.settings
        lines = unused_lines(documents, settings.truncate, settings.chat_template, saved=True)
        if settings.data == (PYTHON_DOCSTRINGS,) and settings.eval_split:
            lines.append(
                f"--eval-split has no effect: {PYTHON_DOCSTRINGS} has modules of its own to evaluate on"
            )
        return lines

    @property
    def evaluates(self) -> bool:
        """Return whether there is data to evaluate on."""
        return bool(self.settings.eval_data) or self.settings.eval_split != 0

    def _evaluation(self, encoded: Encoded | None) -> tuple[list[str], list[dict[str, Tensor]]]:
        """Return remarks on the data to evaluate on, and its batches."""
        if encoded is None:
            return ["no evaluation, since eval_split is 0"], []
        options: Fields = dict(**self.share, shuffle=False, truncate=self.settings.truncate)
        try:
            held = TokenDataset(encoded, self.tokenizer, self.config.seq_len, **options)
        except DataError as error:
            # The same message would be taken for one about the training data.
            raise DataError(f"evaluation data: {error}") from None
        origin = "held out"
        if self.settings.eval_data:
            origin = f"from {' and '.join(self.settings.eval_data)}"
        documents = plural(held.num_documents, "record" if held.whole else "document")
        remarks = [
            f"evaluation on {documents}, {plural(held.num_tokens, 'token')}, {origin}",
            *(f"in the evaluation data, {remark}" for remark in held.remarks),
        ]
        return remarks, held.eval_batches(self.config.eval_batches)

    def _eval_split(self, default: float) -> float:
        return default if self.settings.eval_split is None else self.settings.eval_split

    def _shortage(self, windows: int) -> list[str]:
        """Say if the data does not fill a step."""
        step = self.config.batch_size * self.world_size * self.config.gradient_accumulation
        if windows >= step:
            return []
        takes = plural(step, "window")
        has = f"{windows:,}" if windows else "none"
        return [
            f"too little data for a batch: a step takes {takes} and an epoch has {has}, so windows come more than once "
            "per step: lower --batch-size or --gradient-accumulation, or give more data"
        ]
