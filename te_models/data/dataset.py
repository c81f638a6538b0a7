"""Documents to batches: loading, the split into training and evaluation, packing into windows, exact resume.

An epoch is every document once, in an order drawn from (seed, epoch), each followed by the end-of-text token, laid back
to back and cut into windows of seq_len tokens. The last window of an epoch is filled up with padding that no loss counts.
So each token of each document comes exactly once an epoch. A document may go on in the next window, which need not be in
the same batch. Under the packing "documents" attention stays inside each document; under "stream" those that share a
window see each other. A corpus larger than memory is read by te_models.data.streaming.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from te_models.data.tokenizer import Tokenizer
from te_models.errors import needs, unknown

IGNORED = -100  # the label that no loss counts, Hugging Face's and PyTorch's convention
PACKINGS = ("stream", "documents")

_NOT_CORPUS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__", "pydoc_data"}


@dataclass(frozen=True)
class Document:
    """One text to learn from. With a `prompt`, only `text`, which continues it, is learnt.

    `name` says which document it is (a file, or a file and its row), `source` where the corpus is from.
    """

    text: str
    prompt: str | None = None
    name: str = ""
    source: str = ""


def load_documents(path: str | Path | None) -> list[Document]:
    """The documents at `path`, in an order that depends on their names only.

    * A .jsonl file has an object a line and a .parquet file a row a document: `text`, or else `prompt` and `completion`.
    * Any other file is one document of UTF-8 text.
    * A folder is read recursively, sorted; hidden files, __pycache__, links to folders and binary files (a NUL byte in
      the first 8000, as git has it) are skipped.
    * None is the running Python's language documentation and the sources of its standard library.

    Documents without anything but white space are left out.

    Raises:
        ValueError: something cannot be read, or there is no text in it.
    """
    if path is None:
        return _python_corpus()
    root = Path(path)
    if not root.exists():
        raise ValueError(f"{root}: no such file or folder; give a text, JSONL or Parquet file, or a folder of them")
    files = [file for file in _walk(root) if not _is_binary(file)] if root.is_dir() else [root]
    documents = [document for file in files for document in _read_file(file, str(root)) if has_text(document)]
    if not documents:
        raise ValueError(f"{root}: there is no text in it; give a text, JSONL or Parquet file, or a folder of them")
    return documents


def split_documents(
    documents: Sequence[Document], eval_fraction: float = 0.05, seed: int = 0
) -> tuple[list[Document], list[Document]]:
    """The documents to train on and those to evaluate on, each side in the order given and never empty.

    Evaluation gets the `eval_fraction` of distinct documents whose hashes of (seed, content) are lowest. A seeded shuffle
    would depend on the order of the documents and could put copies of one on both sides; this does neither.
    A single document is cut at a line break, and its end is for evaluation.

    Raises:
        ValueError: `eval_fraction` is not between 0 and 1, or one side would be empty.
    """
    if not 0 < eval_fraction < 1:
        raise ValueError(f"eval_fraction={eval_fraction} is out of range: give a share between 0 and 1, such as 0.05")
    if len(documents) == 1:
        return _cut(documents[0], eval_fraction)
    hashes = [hash_document(seed, document) for document in documents]
    distinct = sorted(set(hashes))
    if len(distinct) < 2:
        raise ValueError(
            f"{len(documents)} documents, all with the same content, cannot be split into training and evaluation: "
            "give at least two different ones"
        )
    count = min(max(1, round(eval_fraction * len(distinct))), len(distinct) - 1)
    held_out = set(distinct[:count])
    training = [document for document, key in zip(documents, hashes, strict=True) if key not in held_out]
    evaluation = [document for document, key in zip(documents, hashes, strict=True) if key in held_out]
    return training, evaluation


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises a ValueError if the tokenizer has ids that a model of this `vocab_size` has no embedding for."""
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} ids but the model's vocab_size is {vocab_size}: "
            f"use --vocab-size {tokenizer.vocab_size} or more, or for a model that is already trained its own tokenizer"
        )


@dataclass(frozen=True)
class _Packing:
    """Documents laid back to back: their `order` as indices, the token at which each one `starts`, and the order in which
    the `windows` cut from them are given."""

    order: NDArray[np.int64]
    starts: NDArray[np.int64]
    windows: NDArray[np.int64]


class TokenDataset:
    """An endless iterator of batches {"input_ids", "labels"}, both int64 [batch_size, seq_len].

    Labels equal input_ids (the model shifts them), except IGNORED on prompts and padding. With packing="documents" there
    is also "document_ids", and the first token of each document is not learnt, since nothing before it is seen. Each epoch lays the documents
    back to back in an order of its own and gives the windows cut from that in random order, so that a batch is not of one
    document. Batches go on from one epoch to the next, and rank `r` of `world_size` takes the r-th of every `world_size` batches.

    Args:
        documents: what to learn from; encoded here, once.
        tokenizer: must have an end-of-text token; padding is its pad token, or else that one.
        seq_len: tokens a window.
        batch_size: windows a batch, of each rank.
        seed: of the order of the documents, together with the epoch.
        shuffle: False keeps the order given, as for evaluation; the data may then be shorter than one window.
        packing: "stream", or "documents" to keep attention inside each document.
        rank: which of the processes this is.
        world_size: how many processes share the data.

    Raises:
        ValueError: no documents, no end-of-text token, sizes out of range, or data to shuffle shorter than one window.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        tokenizer: Tokenizer,
        seq_len: int,
        *,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        packing: str = "stream",
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        check_windows(seq_len, batch_size, packing)
        self.seq_len, self.batch_size, self.seed, self.shuffle = seq_len, batch_size, seed, shuffle
        self.packing = packing
        self.rank, self.world_size = rank, world_size
        self._encode(documents, tokenizer)
        if shuffle and self.num_tokens < seq_len:
            raise ValueError(
                f"the data has {self.num_tokens} tokens, less than one window of seq_len={seq_len}: lower --seq-len or give "
                "more data"
            )
        self._sources = sorted({document.source for document in documents} - {""})
        self._fingerprint = self._hash_data()
        self._in_order = self._pack(np.arange(self.num_documents), np.arange(self.num_windows))
        self._epoch, self._epoch_packing = -1, self._in_order
        self._next_window = 0  # counted over all epochs and ranks

    @property
    def num_documents(self) -> int:
        """How many documents there are."""
        return len(self._lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens an epoch, with an end-of-text token for each document."""
        return len(self._tokens)

    @property
    def num_windows(self) -> int:
        """Windows an epoch, over all ranks."""
        return math.ceil(self.num_tokens / self.seq_len)

    def describe(self) -> str:
        """The corpus in one line."""
        size = f"{self.num_documents:,} documents, {self.num_tokens:,} tokens in {self.num_windows:,} windows"
        return f"{size}, from {' and '.join(self._sources)}" if self._sources else size

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """The dataset itself: a second iterator goes on where the first one stopped."""
        return self

    def __next__(self) -> dict[str, Tensor]:
        """This rank's next batch."""
        first = self._next_window + self.rank * self.batch_size
        self._next_window += self.world_size * self.batch_size
        places = [divmod(window, self.num_windows) for window in range(first, first + self.batch_size)]
        packings = [self._shuffled(epoch) for epoch, _ in places]
        return stack_windows(
            [self._window(p, p.windows[index]) for p, (_, index) in zip(packings, places, strict=True)]
        )

    def eval_batches(self, max_batches: int) -> list[dict[str, Tensor]]:
        """This rank's `max_batches` batches of windows spread evenly over the documents, or all there are if fewer.

        They never change and do not move the iterator. What the last batches lack in windows is padding, so that all
        ranks have as many batches of the same shape; one without any label that counts is possible.
        """
        count = min(max_batches, math.ceil(self.num_windows / (self.batch_size * self.world_size)))
        total = count * self.world_size * self.batch_size
        stride = max(1.0, self.num_windows / max(1, total))
        firsts = [(number * self.world_size + self.rank) * self.batch_size for number in range(count)]
        places = [[int((first + i) * stride) for i in range(self.batch_size)] for first in firsts]
        return [stack_windows([self._window(self._in_order, place) for place in batch]) for batch in places]

    def state_dict(self) -> dict[str, int]:
        """Where the iterator stands; the same on every rank.

        `epoch`, and in it `position`, count whole windows of all ranks, so batch_size and world_size may change on resume.
        """
        epoch, position = divmod(self._next_window, self.num_windows)
        return {"epoch": epoch, "position": position, "seed": self.seed, "fingerprint": self._fingerprint}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue with the batches that would have come after `state` was taken; its seed replaces this one's.

        Raises:
            ValueError: the state is of other documents, another tokenizer, seq_len or shuffle.
        """
        if state["fingerprint"] != self._fingerprint:
            raise ValueError(
                "the saved data position is of other data: resume with the same --data, --tokenizer, --seq-len, --packing "
                "and --seed, or start a new run"
            )
        self.seed, self._epoch = state["seed"], -1
        self._next_window = state["epoch"] * self.num_windows + state["position"]

    def _encode(self, documents: Sequence[Document], tokenizer: Tokenizer) -> None:
        """Set the flat tokens of all documents, and each document's start, length and prompt length in them."""
        if not documents:
            raise ValueError("there are no documents to make batches of: give at least one")
        end = np.array([end_of_text(tokenizer)])
        prompts = tokenizer.encode_batch([document.prompt or "" for document in documents])
        texts = tokenizer.encode_batch([document.text for document in documents])
        pieces = [piece for prompt, text in zip(prompts, texts, strict=True) for piece in (prompt, text, end)]
        self._tokens = np.concatenate(pieces, dtype=np.int32)
        self._prompt_lengths = np.array([len(prompt) for prompt in prompts])
        self._lengths = self._prompt_lengths + np.array([len(text) + 1 for text in texts])
        self._starts = np.cumsum(self._lengths) - self._lengths
        self._padding = end[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    def _hash_data(self) -> int:
        """What a position is relative to: the tokens, where documents and prompts end, the windows, and shuffle."""
        kind = f"{self.seq_len} {self.shuffle}" + (f" {self.packing}" if self.packing != "stream" else "")
        digest = hashlib.blake2b(kind.encode(), digest_size=6)  # exact in a JSON double
        for array in (self._tokens, self._lengths, self._prompt_lengths):
            digest.update(array.data)
        return int.from_bytes(digest.digest(), "big")

    def _pack(self, order: NDArray[np.int64], windows: NDArray[np.int64]) -> _Packing:
        lengths = self._lengths[order]
        return _Packing(order, np.cumsum(lengths) - lengths, windows)

    def _shuffled(self, epoch: int) -> _Packing:
        """The packing of an epoch; that of the last one asked for is kept."""
        if not self.shuffle:
            return self._in_order
        if epoch != self._epoch:
            random = np.random.default_rng((self.seed, epoch))
            order, windows = random.permutation(self.num_documents), random.permutation(self.num_windows)
            self._epoch, self._epoch_packing = epoch, self._pack(order, windows)
        return self._epoch_packing

    def _window(self, packing: _Packing, index: int) -> Window:
        """Window `index` of an epoch; behind the last token all is padding, as a document of its own."""
        positions = np.arange(index * self.seq_len, (index + 1) * self.seq_len)
        slots = np.searchsorted(packing.starts, positions, side="right") - 1
        document, offset = packing.order[slots], positions - packing.starts[slots]
        inside = positions < self.num_tokens
        ids = np.full(self.seq_len, self._padding, dtype=np.int64)
        ids[inside] = self._tokens[(self._starts[document] + offset)[inside]]
        learnt = inside & (offset >= self._prompt_lengths[document])
        firsts = np.where(inside, offset == 0, positions == self.num_tokens)
        return pack_window(ids, learnt, firsts, self.packing)


Window = dict[str, NDArray[np.int64]]


def pack_window(ids: NDArray[np.int64], learnt: NDArray[np.bool_], firsts: NDArray[np.bool_], packing: str) -> Window:
    """What a batch holds of one window, each int64 [seq_len]: input_ids, labels and, by documents, document_ids.

    `learnt` says which tokens to predict, `firsts` which begin a document.
    """
    if packing == "stream":
        return {"input_ids": ids, "labels": np.where(learnt, ids, IGNORED)}
    labels = np.where(learnt & ~firsts, ids, IGNORED)
    return {"input_ids": ids, "labels": labels, "document_ids": np.cumsum(firsts, dtype=np.int64)}


def stack_windows(windows: Sequence[Window]) -> dict[str, Tensor]:
    """The batch of some windows: each entry [len(windows), seq_len]."""
    return {name: torch.from_numpy(np.stack([window[name] for window in windows])) for name in windows[0]}


def check_windows(seq_len: int, batch_size: int, packing: str) -> None:
    """Raises a ValueError for sizes out of range or a packing that there is not."""
    if seq_len < 2 or batch_size < 1:
        raise ValueError(
            f"seq_len={seq_len} and batch_size={batch_size} are out of range: give at least 2 tokens and 1 window"
        )
    if packing not in PACKINGS:
        raise unknown("packing", packing, PACKINGS)


def end_of_text(tokenizer: Tokenizer) -> int:
    """The id that ends each document; a ValueError if the tokenizer has none."""
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "the tokenizer has no end-of-text token to put between documents: name one as eos_token in "
            "tokenizer_config.json beside its tokenizer.json"
        )
    return tokenizer.eos_token_id


def has_text(document: Document) -> bool:
    """Whether there is more than white space to learn."""
    return bool(document.text.strip() or document.prompt)


def hash_document(seed: int, document: Document) -> bytes:
    """16 bytes that depend on seed, prompt and text alone, evenly distributed."""
    digest = hashlib.blake2b(f"{seed} {len(document.prompt or '')} {document.prompt}".encode(), digest_size=16)
    digest.update(document.text.encode())
    return digest.digest()


def _cut(document: Document, eval_fraction: float) -> tuple[list[Document], list[Document]]:
    """The only document as two, at the last line break before the evaluation's share begins."""
    at = document.text.rfind("\n", 0, int(len(document.text) * (1 - eval_fraction))) + 1
    if at == 0 or document.prompt is not None:
        raise ValueError(
            "the only document cannot be cut into training and evaluation: give more documents, or one with more lines"
        )
    halves = (document.text[:at], document.text[at:])
    first, last = (Document(half, name=document.name, source=document.source) for half in halves)
    return [first], [last]


def _python_corpus() -> list[Document]:
    """The topics of Python's language documentation, then its standard library, both sorted by name."""
    root, version = Path(sysconfig.get_path("stdlib")), sysconfig.get_python_version()
    documents = [
        Document(text, name=f"topics/{name}", source=f"Python {version} documentation")
        for name, text in sorted(topics.items())
    ]
    for file in _walk(root, _NOT_CORPUS):
        if file.suffix == ".py":
            name = file.relative_to(root).as_posix()
            documents.append(Document(_read_text(file), name=name, source=f"Python {version} standard library"))
    return [document for document in documents if has_text(document)]


def _walk(root: Path, skip: Collection[str] = ("__pycache__",)) -> list[Path]:
    """The files below a folder, sorted by their path in it; not in hidden folders or those that `skip` names."""
    files = []
    for folder, subfolders, names in os.walk(root, onerror=_refuse):
        subfolders[:] = [name for name in subfolders if name not in skip and not name.startswith(".")]
        files += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(files, key=lambda file: file.relative_to(root).as_posix())


def _is_binary(file: Path) -> bool:
    return file.suffix.lower() != ".parquet" and b"\0" in _read_bytes(file)[:8000]


def _read_file(file: Path, source: str) -> Iterator[Document]:
    """The documents in one file, by its suffix."""
    match file.suffix.lower():
        case ".jsonl":
            yield from _read_jsonl(file, source)
        case ".parquet":
            yield from _read_parquet(file, source)
        case _:
            yield Document(_read_text(file), name=str(file), source=source)


def _read_bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        _refuse(error)


def _refuse(error: OSError) -> NoReturn:
    raise ValueError(f"{error.filename}: cannot be read ({error.strerror}): check it and its permissions") from None


def _read_text(file: Path) -> str:
    """A UTF-8 file, without its byte-order mark if it has one."""
    raw = _read_bytes(file)
    try:
        return raw.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{file}:{line}: not UTF-8 text (byte 0x{raw[error.start]:02x} at offset {error.start}): convert it to UTF-8"
        ) from None


def _read_jsonl(file: Path, source: str) -> Iterator[Document]:
    # Not splitlines: it also splits at characters such as U+2028, which JSON strings may hold.
    for number, line in enumerate(_read_text(file).split("\n"), start=1):
        if not line.strip():
            continue
        yield json_document(line, f"{file}:{number}", source)


def json_document(line: str, where: str, source: str) -> Document:
    """The document of one line of JSONL; `where` says which, for errors."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where}: not JSON ({error.msg}, column {error.colno}): JSONL has one object a line"
        ) from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: a JSON {type(row).__name__}, not an object: JSONL has one object a line")
    return row_document(row, document_fields(row, where), where, source)


def _read_parquet(file: Path, source: str) -> Iterator[Document]:
    with needs(f"{file}: Parquet", "pyarrow", "15", "train"):
        import pyarrow  # noqa: PLC0415
        import pyarrow.parquet  # noqa: PLC0415
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            fields = document_fields(table.schema_arrow.names, str(file))
            batches = (batch.to_pylist() for batch in table.iter_batches(columns=fields))
            for number, row in enumerate(chain.from_iterable(batches), start=1):
                yield row_document(row, fields, f"{file}, row {number}", source)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{file}: not a readable Parquet file ({str(error).splitlines()[0]})") from None


def document_fields(names: Collection[str], where: str) -> list[str]:
    """The fields that make a document, of those that there are."""
    for fields in (["text"], ["prompt", "completion"]):
        if all(field in names for field in fields):
            return fields
    raise ValueError(
        f"{where}: has {', '.join(map(repr, names)) or 'no fields'}, but needs 'text', or 'prompt' and 'completion': "
        "rename the fields"
    )


def row_document(row: dict[str, Any], fields: list[str], where: str, source: str) -> Document:
    """The document of one row; `fields` ends with the one to learn and may begin with the prompt."""
    for field in fields:
        value = row[field]
        if not isinstance(value, str):
            raise ValueError(
                f"{where}: {field!r} is {type(value).__name__}, not a string: fill it in or leave the row out"
            )
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{where}: {field!r} holds half of a surrogate pair at character {error.start}: write the pair or leave it out"
            ) from None
    return Document(row[fields[-1]], row[fields[0]] if len(fields) == 2 else None, where, source)
