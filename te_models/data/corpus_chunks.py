"""A corpus as chunks: parts of about half a MiB of text that can each be read separately, in any order.

The index of chunks is light and needs no pass over the text: byte ranges of JSONL and text files (a line belongs to the
range in which it begins), row ranges of Parquet files (from their footers), whole compressed files.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from te_models.data.documents import (
    Document,
    FileRange,
    file_format,
    file_ranges,
    find_files,
    has_text,
    hash_document,
    read_range,
    readable_errors,
    text_bytes,
)
from te_models.data.tokenizer import Tokenizer, end_of_text
from te_models.errors import DataError

CHUNK_BYTES = 2**19
TARGET, FIRST = 1, 2  # flags of a token: the loss counts its prediction; it begins a document


@dataclass(frozen=True)
class Chunks:
    """The index of a corpus: `len` chunks, each a list of file ranges.

    ranges int64 [P, 4]: file, row group, start, stop. Chunk i consists of the ranges bounds[i] to bounds[i + 1] and has
    about sizes[i] bytes of text. A chunk of one range takes 48 bytes of memory.
    """

    source: str
    format: str  # such as "JSONL"
    files: list[str]
    ranges: NDArray[np.int64]
    bounds: NDArray[np.int64]
    sizes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> list[FileRange]:
        rows = self.ranges[self.bounds[index] : self.bounds[index + 1]].tolist()
        return [FileRange(self.files[file], group, start, stop) for file, group, start, stop in rows]


def find_chunks(path: str, chunk_bytes: int = CHUNK_BYTES) -> Chunks:
    """Index the corpus at `path`; te_models.data.documents.find_files says what that may be.

    Raises:
        DataError: there is nothing, or it cannot be read.
    """
    system, files = find_files(path)
    ranges: list[tuple[int, int, int, int]] = []
    sizes: list[int] = []
    for number, file in enumerate(files):
        with readable_errors(file):
            for part, size in file_ranges(system, file, chunk_bytes):
                ranges.append((number, *part[1:]))
                sizes.append(size)
    if not ranges:
        raise DataError(f"{path}: there is no text in it; give a text, JSONL or Parquet file, a folder or a glob")
    bounds = _grouped(sizes, chunk_bytes)
    totals = np.add.reduceat(np.array(sizes), bounds[:-1])
    formats = " and ".join(sorted({file_format(file) for file in files}))
    return Chunks(path, formats, files, np.array(ranges, dtype=np.int64), np.array(bounds), totals)


def corpus_size(path: str) -> int:
    """Estimate the bytes of text in all files of the corpus at `path`."""
    system, files = find_files(path)
    with readable_errors(path):
        return sum(text_bytes(system, file) for file in files)


@dataclass
class ChunkReader:
    """Reads chunks and encodes them; each worker process has one.

    `side` is "all", or "train" or "eval" for the documents of one side of a split by content: evaluation gets those
    whose hash of (seed, content) is among the lowest `eval_fraction`, so copies are on one side.
    """

    source: str
    tokenizer: Tokenizer
    seed: int
    eval_fraction: float = 0.0
    side: str = "all"
    end: int = field(init=False)

    def __post_init__(self) -> None:
        self.end = end_of_text(self.tokenizer)

    def documents(self, chunk: list[FileRange]) -> list[Document]:
        """Return the documents of a chunk in file order, without blank ones and those of the other side."""
        found = chain.from_iterable(read_range(part, self.source) for part in chunk)
        return [document for document in found if has_text(document) and self._wanted(document)]

    def encode(self, chunk: list[FileRange], order: tuple[int, ...] | None) -> NDArray[np.int32]:
        """Return int32 [2, tokens]: ids and flags of a chunk's documents, each ended by the end-of-text token.

        `order` is the seed of a permutation of the documents; None keeps their order.
        """
        documents = self.documents(chunk)
        if order is not None:
            documents = [documents[i] for i in np.random.default_rng(order).permutation(len(documents))]
        prompts = self.tokenizer.encode_batch([document.prompt or "" for document in documents])
        texts = self.tokenizer.encode_batch([document.text for document in documents])
        encoded = np.empty((2, sum(map(len, prompts)) + sum(map(len, texts)) + len(texts)), dtype=np.int32)
        at = 0
        for prompt, text in zip(prompts, texts, strict=True):
            begin, stop = at + len(prompt), at + len(prompt) + len(text)
            encoded[0, at:begin], encoded[0, begin:stop], encoded[0, stop] = prompt, text, self.end
            encoded[1, at:begin], encoded[1, begin : stop + 1] = 0, TARGET
            encoded[1, at] |= FIRST
            at = stop + 1
        return encoded

    def _wanted(self, document: Document) -> bool:
        if self.side == "all":
            return True
        in_eval = int.from_bytes(hash_document(self.seed, document)[:8], "big") < self.eval_fraction * 2**64
        return in_eval == (self.side == "eval")


def _grouped(sizes: list[int], chunk_bytes: int) -> list[int]:
    """Return the first range of each chunk, and the end: consecutive ranges share a chunk while they fit."""
    bounds, filled = [0], 0
    for index, size in enumerate(sizes):
        if filled and filled + size > chunk_bytes:
            bounds.append(index)
            filled = 0
        filled += size
    return [*bounds, len(sizes)]
