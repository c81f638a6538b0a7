"""A corpus as blocks: parts of about half a MiB of text that can each be read by itself, in any order.

The index of blocks is light and needs no pass over the text: byte ranges of JSONL and text files (a line belongs to the
range in which it begins), row ranges of Parquet files (from their footers). A compressed file cannot be entered in the
middle, so it is one block. Files are opened through fsspec, so that a path may also be a URL that fsspec knows, such as
hf://datasets/... or s3://..., and a glob.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import PurePosixPath
from typing import IO, Any, NamedTuple

import fsspec
import numpy as np
from numpy.typing import NDArray

from te_models.data.dataset import (
    Document,
    document_fields,
    end_of_text,
    has_text,
    hash_document,
    json_document,
    row_document,
)
from te_models.data.tokenizer import Tokenizer
from te_models.errors import MissingPackage, needs
from te_models.files.atomic import first_line

BLOCK_BYTES = 2**19
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".lz4": "lz4"}
LEARNT, FIRST = 1, 2  # flags of a token: it is to be predicted; it begins a document

_FORMATS = {".jsonl": "JSONL", ".parquet": "Parquet"}
_EXPANSION = 4  # text bytes a compressed byte, for the size of a block
_SLICES = 32  # of a Parquet row group: reading one decodes those before it
_END = 2**62


class Piece(NamedTuple):
    """Bytes [start, stop) of a file, or rows [start, stop) of one of its Parquet row groups (-1: not Parquet)."""

    path: str
    row_group: int
    start: int
    stop: int


@dataclass(frozen=True)
class Blocks:
    """The index of a corpus: `len` blocks, each a list of pieces of files of one format.

    pieces int64 [P, 4]: file, row group, start, stop. Block i is the pieces bounds[i] to bounds[i + 1], and has
    about sizes[i] bytes of text. 48 bytes of memory a block of one piece.
    """

    source: str
    format: str  # "JSONL", "Parquet" or "text"
    files: list[str]
    pieces: NDArray[np.int64]
    bounds: NDArray[np.int64]
    sizes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> list[Piece]:
        rows = self.pieces[self.bounds[index] : self.bounds[index + 1]].tolist()
        return [Piece(self.files[file], group, start, stop) for file, group, start, stop in rows]


def find_blocks(path: str, block_bytes: int = BLOCK_BYTES) -> Blocks:
    """The blocks of the corpus at `path`: a file, a folder (recursive, without hidden files), a glob or a URL.

    Raises:
        ValueError: there is nothing, it cannot be read, or the files are of several formats.
    """
    with readable_errors(str(path)):
        system, root = fsspec.core.url_to_fs(str(path))
        files = _find_files(system, root)
        if not files:
            raise ValueError(f"{path}: no such file or folder; give a text, JSONL or Parquet file, a folder or a glob")
        kind = _one_format(str(path), files)
        remote = "://" in str(path)
        names = [system.unstrip_protocol(file) if remote else file for file in files]
        pieces: list[tuple[int, int, int, int]] = []
        sizes: list[int] = []
        for number, file in enumerate(files):
            for piece, size in _pieces(system, file, kind, block_bytes):
                pieces.append((number, *piece))
                sizes.append(size)
    if not pieces:
        raise ValueError(f"{path}: there is no text in it; give a text, JSONL or Parquet file, a folder or a glob")
    bounds = _grouped(sizes, block_bytes)
    totals = np.add.reduceat(np.array(sizes), bounds[:-1])
    return Blocks(str(path), kind, names, np.array(pieces, dtype=np.int64), np.array(bounds), totals)


def corpus_size(path: str) -> int:
    """Bytes of all files of the corpus at `path`, as they are stored; 0 if there is nothing."""
    with readable_errors(path):
        system, root = fsspec.core.url_to_fs(path)
        return sum(system.size(file) or 0 for file in _find_files(system, root))


@dataclass
class BlockReader:
    """Reads blocks into tokens; what a worker process holds.

    `side` is "all", or "train" or "eval" for the documents of one side of a split by content: to evaluation go those
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

    def documents(self, block: list[Piece]) -> list[Document]:
        """The documents of a block in their order in the files, without blank ones and those of the other side."""
        found = chain.from_iterable(read_piece(piece, self.source) for piece in block)
        return [document for document in found if has_text(document) and self._wanted(document)]

    def encode(self, block: list[Piece], order: tuple[int, ...] | None) -> NDArray[np.int32]:
        """int32 [2, tokens]: ids and flags of a block's documents, each ended; permuted by the seed `order`, if any."""
        documents = self.documents(block)
        if order is not None:
            documents = [documents[i] for i in np.random.default_rng(order).permutation(len(documents))]
        prompts = self.tokenizer.encode_batch([document.prompt or "" for document in documents])
        texts = self.tokenizer.encode_batch([document.text for document in documents])
        encoded = np.empty((2, sum(map(len, prompts)) + sum(map(len, texts)) + len(texts)), dtype=np.int32)
        at = 0
        for prompt, text in zip(prompts, texts, strict=True):
            learnt, stop = at + len(prompt), at + len(prompt) + len(text)
            encoded[0, at:learnt], encoded[0, learnt:stop], encoded[0, stop] = prompt, text, self.end
            encoded[1, at:learnt], encoded[1, learnt : stop + 1] = 0, LEARNT
            encoded[1, at] |= FIRST
            at = stop + 1
        return encoded

    def _wanted(self, document: Document) -> bool:
        if self.side == "all":
            return True
        held_out = int.from_bytes(hash_document(self.seed, document)[:8], "big") < self.eval_fraction * 2**64
        return held_out == (self.side == "eval")


def read_piece(piece: Piece, source: str) -> Iterator[Document]:
    """The documents of a piece. A text file is one document, unless the piece is a part of it.

    Raises:
        ValueError: it cannot be read; one line that says where.
    """
    with readable_errors(piece.path):
        if piece.row_group >= 0:
            yield from _read_rows(piece, source)
            return
        with _open(piece.path) as file:
            if _FORMATS.get(_suffix(piece.path)) == "JSONL":
                for at, line in _lines(file, piece):
                    if text := _decode(line, piece.path, at).strip():
                        yield json_document(text, f"{piece.path} at byte {at}", source)
            elif lines := list(_lines(file, piece)):
                raw = b"".join(line for _, line in lines)
                if b"\0" not in raw[:8000]:  # a binary file, as git has it
                    yield Document(_decode(raw, piece.path, lines[0][0]), name=piece.path, source=source)


@contextlib.contextmanager
def readable_errors(path: str) -> Iterator[None]:
    """Inside, what goes wrong with a file becomes a ValueError of one line that names it."""
    try:
        yield
    except ValueError as error:
        if type(error) in (ValueError, MissingPackage):
            raise
        raise ValueError(f"{path}: not readable ({first_line(error)}): check the file") from None
    except ImportError as error:  # fsspec names the package that a protocol needs
        raise ValueError(f"{path}: {first_line(error)}") from None
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise ValueError(f"{path}: cannot be read ({reason}): check it and its permissions") from None


def _find_files(system: Any, root: str) -> list[str]:
    """Files below a folder, without hidden ones and __pycache__, or matching a glob; sorted."""
    if system.isfile(root):
        return [root]
    if not system.isdir(root):
        return sorted(file for file in system.glob(root) if system.isfile(file))
    below = {file: PurePosixPath(file.removeprefix(root).lstrip("/")).parts for file in system.find(root)}
    skipped = {file for file, parts in below.items() if any(p[0] == "." or p == "__pycache__" for p in parts)}
    return sorted(set(below) - skipped)


def _suffix(path: str) -> str:
    """The suffix that names the format, in lower case, without that of a compression."""
    file = PurePosixPath(path.lower())
    return PurePosixPath(file.stem).suffix if file.suffix in COMPRESSIONS else file.suffix


def _compression(path: str) -> str | None:
    return COMPRESSIONS.get(PurePosixPath(path.lower()).suffix)


def _one_format(path: str, files: list[str]) -> str:
    """The format of all files; an error where there are several."""
    first: dict[str, str] = {}
    for file in files:
        first.setdefault(_FORMATS.get(_suffix(file), "text"), file)
    if len(first) > 1:
        examples = ", ".join(f"{kind} ({PurePosixPath(file).name})" for kind, file in sorted(first.items()))
        suffixes = sorted({_suffix(file) for kind, file in first.items() if kind != "text"})
        raise ValueError(
            f"{path}: mixes {examples}: name the files of one format with a glob, such as '{path}/**/*{suffixes[0]}'"
        )
    return next(iter(first))


def _pieces(system: Any, file: str, kind: str, block_bytes: int) -> Iterator[tuple[tuple[int, int, int], int]]:
    """(row group, start, stop) and about how many bytes of text, of each piece of a file."""
    if kind == "Parquet":
        with system.open(file, "rb") as opened, _parquet(opened, file) as table:
            fields = document_fields(table.schema_arrow.names, file)
            columns = [i for i in range(table.metadata.num_columns) if table.schema.column(i).path in fields]
            for group in range(table.num_row_groups):
                rows = table.metadata.row_group(group).num_rows
                parts = [table.metadata.row_group(group).column(i).total_uncompressed_size for i in columns]
                count = min(max(1, sum(parts) // block_bytes), _SLICES, rows)
                for i in range(count):
                    yield (group, i * rows // count, (i + 1) * rows // count), sum(parts) // count
        return
    size = system.size(file)
    if _compression(file):
        yield (-1, 0, _END), _EXPANSION * size
        return
    for start in range(0, size, block_bytes):
        yield (-1, start, min(size, start + block_bytes)), min(size - start, block_bytes)


def _grouped(sizes: list[int], block_bytes: int) -> list[int]:
    """Where each block begins, and the end: consecutive pieces together while they fit into `block_bytes`."""
    bounds, held = [0], 0
    for index, size in enumerate(sizes):
        if held and held + size > block_bytes:
            bounds.append(index)
            held = 0
        held += size
    return [*bounds, len(sizes)]


def _file(path: str) -> Any:
    """A context manager of the file's bytes, wherever it lies."""
    return fsspec.open(path, "rb")


@contextlib.contextmanager
def _open(path: str) -> Iterator[IO[bytes]]:
    with _file(path) as file:
        if (compression := _compression(path)) is None:
            yield file
            return
        with needs(f"{path}: {compression}", "pyarrow", "15", "train"):
            import pyarrow  # noqa: PLC0415
        with pyarrow.CompressedInputStream(file, compression) as stream, io.BufferedReader(stream, 2**20) as buffered:
            yield buffered


def _lines(file: IO[bytes], piece: Piece) -> Iterator[tuple[int, bytes]]:
    """(offset, line) of the lines that begin in the piece."""
    at = 0
    if piece.start:
        file.seek(piece.start - 1)
        at = piece.start - 1 + len(file.readline())
    while at < piece.stop and (line := file.readline()):
        yield at, line
        at += len(line)


def _decode(raw: bytes, path: str, at: int) -> str:
    try:
        return raw.decode().removeprefix("\ufeff") if at == 0 else raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: not UTF-8 text (byte 0x{raw[error.start]:02x} at offset {at + error.start}): convert it to UTF-8"
        ) from None


@contextlib.contextmanager
def _parquet(file: IO[bytes], path: str) -> Iterator[Any]:
    with needs(f"{path}: Parquet", "pyarrow", "15", "train"):
        import pyarrow  # noqa: PLC0415
        import pyarrow.parquet  # noqa: PLC0415
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            yield table
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a readable Parquet file ({first_line(error)})") from None


def _read_rows(piece: Piece, source: str) -> Iterator[Document]:
    with _file(piece.path) as file, _parquet(file, piece.path) as table:
        fields = document_fields(table.schema_arrow.names, piece.path)
        batches = table.iter_batches(batch_size=1024, row_groups=[piece.row_group], columns=fields)
        at = 0
        for batch in batches:  # those before the piece are decoded, but never become Python objects
            first, last = max(piece.start - at, 0), min(piece.stop - at, len(batch))
            for number, row in enumerate(batch.slice(first, max(0, last - first)).to_pylist(), start=at + first + 1):
                yield row_document(row, fields, f"{piece.path}, row group {piece.row_group}, row {number}", source)
            at += len(batch)
            if at >= piece.stop:
                return
