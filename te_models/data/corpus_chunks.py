"""A corpus as chunks: parts of about half a MiB of text that can each be read separately, in any order.

The index of chunks is made without a pass over the text. A chunk consists of

- ranges of bytes of JSONL and text files; a line belongs to the range in which it begins;
- ranges of rows of Parquet files (from their footers) and of Hub datasets;
- whole files, if they are compressed, JSON arrays or tables.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from te_models.data.bad_records import BadRecords
from te_models.data.documents import has_text, hash_document, refuse_mixture
from te_models.data.encoding import Encoded, Fit, encode_documents, fit_records
from te_models.data.files import check_text, file_format, readable_errors
from te_models.data.formats import Document
from te_models.data.packing import RecordEpoch, begins_piece, flags_of
from te_models.data.rows import FileRange, file_ranges, read_range
from te_models.data.sources import Source, open_sources
from te_models.data.tokenizer_base import Tokenizer, end_of_text

CHUNK_BYTES = 2**19


@dataclass(frozen=True)
class Chunks:
    """The index of a corpus: `len` chunks, each a list of file ranges.

    Arrays and not lists of objects: a corpus of a TiB has two million chunks, and one of them takes 56 bytes.

    Attributes:
        sources: of the corpus, in order.
        files: the paths of all files.
        ranges: int64 [P, 4], of each range the number of its file, and the group, start and stop of FileRange.
        bounds: int64 [len + 1]; chunk i consists of the ranges bounds[i] to bounds[i + 1].
        sizes: int64 [len], about as many bytes of text.
        weights: [len], occurrences per epoch, on average.
    """

    sources: list[Source]
    files: list[str]
    ranges: NDArray[np.int64]
    bounds: NDArray[np.int64]
    sizes: NDArray[np.int64]
    weights: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> list[FileRange]:
        rows = self.ranges[self.bounds[index] : self.bounds[index + 1]].tolist()
        return [
            FileRange(self.files[file], group, start, stop) for file, group, start, stop in rows
        ]

    @property
    def source(self) -> str:
        """The paths of the sources."""
        return " and ".join(source.path for source in self.sources)

    @property
    def format(self) -> str:
        """The formats of the files, such as "JSONL"."""
        return " and ".join(sorted({file_format(file) for file in self.files}))


def find_chunks(corpus: str | Sequence[Source], chunk_bytes: int = CHUNK_BYTES) -> Chunks:
    """Index a corpus: sources, or a path; te_models.data.files.find_files says what that may be.

    Raises:
        DataError: there is nothing, or it cannot be read.
    """
    sources = open_sources([corpus], {}) if isinstance(corpus, str) else list(corpus)
    files: list[str] = []
    ranges: list[tuple[int, int, int, int]] = []
    bounds = [0]
    totals = []
    weights = []
    for source in sources:
        # Ranges of bytes of all files in a row; consecutive ones are grouped below, so that small files share a chunk.
        sizes: list[int] = []
        for file in source.files:
            with readable_errors(file):
                for part, size in file_ranges(source.system, file, chunk_bytes):
                    ranges.append((len(files), *part[1:]))
                    sizes.append(size)
            files.append(file)
        check_text(source.path, sizes)
        grouped = _grouped(sizes, chunk_bytes)
        # The sum of each group: a group begins at its bound and ends at the next.
        totals += np.add.reduceat(np.array(sizes), grouped[:-1]).tolist()
        weights += [source.weight] * (len(grouped) - 1)
        # The bounds of a source count its own ranges; in the corpus they follow the ones before.
        bounds += [bounds[-1] + bound for bound in grouped[1:]]
    return Chunks(
        sources,
        files,
        ranges=np.array(ranges, dtype=np.int64),
        bounds=np.array(bounds),
        sizes=np.array(totals),
        weights=np.array(weights),
    )


@dataclass
class ChunkReader:
    """A reader of chunks, which encodes them; each worker process has one.

    Attributes:
        source: the name of the corpus in messages.
        tokenizer: encodes the text.
        seed: of the hashes that choose the documents for evaluation.
        eval_fraction: the share of documents that is reserved for evaluation and left out: the ones with the lowest
            hashes of (seed, content), so that copies of a document are on one side.
        columns: from te_models.config.data.parse_columns.
        whole: whether documents are packed whole into windows, as records are unless `packing` is "stream".
        seq_len: tokens of such a window.
        longest: tokens per document in a window (te_models.data.packing.longest_document).
        packing, truncate: as in DataConfig.
        records: whether all documents must be records (True) or texts (False); None: there may be both.
        bad: receives records that cannot be read.
    """

    source: str
    tokenizer: Tokenizer
    seed: int
    eval_fraction: float = 0.0
    columns: Mapping[str, str] = field(default_factory=dict)
    whole: bool = False
    seq_len: int = 0
    longest: int = 0
    packing: str = "stream"
    truncate: str = "drop"
    records: bool | None = None
    bad: BadRecords = field(default_factory=BadRecords)

    def documents(self, chunk: list[FileRange]) -> list[Document]:
        """Return the documents of a chunk in file order, leaving out blank and reserved ones."""
        in_order = chain.from_iterable(
            read_range(part, self.source, self.columns, self.bad) for part in chunk
        )
        documents = [document for document in in_order if has_text(document)]
        if self.eval_fraction:
            documents = [d for d in documents if self.place(d) >= self.eval_fraction * 2**64]
        return refuse_mixture(documents, self.records, self.bad)

    def encode(self, chunk: list[FileRange], order: tuple[int, ...] | None) -> NDArray[np.int32]:
        """Return int32 [2, tokens]: ids and flags of a chunk's documents; with `whole`, of windows of whole records.

        `order` is the seed of a permutation of the documents; None keeps their order.
        """
        documents = self.documents(chunk)
        if order is not None:
            documents = [
                documents[i] for i in np.random.default_rng(order).permutation(len(documents))
            ]
        if not documents:
            return np.empty((2, 0), dtype=np.int32)
        encoded = encode_documents(documents, self.tokenizer, self.whole, self.bad)
        if self.whole:
            return self._pack(self.fit(encoded)[0])
        if encoded.counted is None:
            counted = np.ones(encoded.num_tokens, dtype=np.bool_)
        else:
            counted = encoded.counted
        # A window may begin anywhere in a stream, so the beginnings of documents are marked per token.
        offset = np.arange(encoded.num_tokens) - np.repeat(encoded.starts, encoded.lengths)
        firsts = begins_piece(offset, self.seq_len, self.longest)
        return np.stack([encoded.tokens, flags_of(counted, firsts)])

    def fit(self, encoded: Encoded) -> tuple[Encoded, Fit]:
        """Return the records that fit a window, cut if `truncate` says so, and how many did not fit."""
        _, fitted, fit = fit_records(
            encoded, self.longest, self.truncate, self.tokenizer.bos_token_id
        )
        return fitted, fit

    def fitting(self, documents: Sequence[Document]) -> list[Document]:
        """Return the documents that fit a window, which texts always do."""
        if not self.whole:
            return list(documents)
        bad = BadRecords(self.bad.skip)  # of its own: training counts them once more
        encoded = encode_documents(documents, self.tokenizer, begin_prompts=True, bad=bad)
        indices, _, _ = fit_records(
            encoded, self.longest, self.truncate, self.tokenizer.bos_token_id
        )
        return [documents[index] for index in indices]

    def windows(self, encoded: Encoded) -> RecordEpoch:
        """Return windows of whole records in their order."""
        end = end_of_text(self.tokenizer)
        pad = end if self.tokenizer.pad_token_id is None else self.tokenizer.pad_token_id
        return RecordEpoch(
            encoded=encoded,
            order=np.arange(len(encoded)),
            seq_len=self.seq_len,
            longest=self.longest,
            packing=self.packing,
            pad=pad,
            random=None,
        )

    def _pack(self, encoded: Encoded) -> NDArray[np.int32]:
        """Return int32 [2, windows x seq_len]: ids and flags of windows of whole records, one after the other."""
        epoch = self.windows(encoded)
        rows = [epoch.marked_window(index) for index in range(epoch.num_windows)]
        packed = np.empty((2, len(rows) * self.seq_len), dtype=np.int32)
        for index, row in enumerate(rows):
            packed[:, index * self.seq_len : (index + 1) * self.seq_len] = row
        return packed

    def place(self, document: Document) -> int:
        """Return a number below 2**64 that depends on seed and content only: evaluation gets the lowest."""
        return int.from_bytes(hash_document(self.seed, document)[:8], "big")


def _grouped(sizes: list[int], chunk_bytes: int) -> list[int]:
    """Return the first range of each chunk, and the end: consecutive ranges share a chunk while they fit."""
    bounds = [0]
    filled = 0
    for index, size in enumerate(sizes):
        if filled and filled + size > chunk_bytes:
            bounds.append(index)
            filled = 0
        filled += size
    return [*bounds, len(sizes)]
