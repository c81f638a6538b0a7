"""Windows of an epoch: documents back to back and cut, or whole records, as many as fit into each window."""

import bisect
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from te_models.config.data import PACKINGS
from te_models.data.encoding import Encoded
from te_models.errors import check_known, check_least
from te_models.model.targets import IGNORED, PAD_DOCUMENT

GROUP = 4096  # records that are packed together: the fuller windows, the larger
# Flags of a token.
TARGET = 1  # the loss counts its prediction
FIRST = 2  # it begins a document
PADDING = 4

Window = dict[str, NDArray[np.int64]]
# The ids of a window, and their flags, [seq_len] each.
Marked = tuple[NDArray[np.int64], NDArray[np.int32]]


class Epoch(ABC):
    """The windows of an epoch; each has a counted label after its first token.

    Args:
        encoded: the documents.
        order: int64, the documents in the order of the epoch.
        seq_len: tokens per window.
        longest: tokens per document in a window: longer texts are cut (`longest_document`).
        packing: "stream", "documents" to keep attention inside each document, or "none".
        pad: id of padding.
        random: draws the order of the windows; None keeps it.
    """

    num_tokens: int

    def __init__(
        self,
        encoded: Encoded,
        order: NDArray[np.int64],
        seq_len: int,
        longest: int,
        packing: str,
        pad: int,
        random: np.random.Generator | None,
    ) -> None:
        self.encoded = encoded
        self.order = order
        self.seq_len = seq_len
        self.longest = longest
        self.packing = packing
        self.pad = pad
        count = self._lay()
        # Windows are shuffled, not tokens: a window stays what the packing made of it.
        self.windows = np.arange(count) if random is None else random.permutation(count)
        self.num_windows = count

    def window(self, index: int) -> Window:
        """Return one window; its padding has the document id PAD_DOCUMENT."""
        return pack_window(*self.marked_window(index), self.packing)

    def padding(self) -> float:
        """Return the share of padding among all tokens."""
        return max(0.0, 1 - self.num_tokens / max(1, self.num_windows * self.seq_len))

    @abstractmethod
    def _lay(self) -> int:
        """Lay the documents into windows; return how many."""

    @abstractmethod
    def marked_window(self, index: int) -> Marked:
        """Return one window before it is packed."""


class CutEpoch(Epoch):
    """Documents back to back, cut into windows of `seq_len` tokens; the last one is filled up with padding.

    Windows with nothing to predict are left out: a last one of one token, or one inside a long prompt.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.windows = self.windows[[self._counts(index) for index in range(self.num_windows)]]
        self.num_windows = len(self.windows)

    def _lay(self) -> int:
        lengths = self.encoded.lengths[self.order]
        self.starts = np.cumsum(lengths) - lengths
        self.num_tokens = int(lengths.sum())
        return math.ceil(self.num_tokens / self.seq_len)

    def marked_window(self, index: int) -> Marked:
        place = int(self.windows[index])
        # Positions in the stream, [seq_len].
        positions = np.arange(place * self.seq_len, (place + 1) * self.seq_len)
        # The document of each position, as its number in the order of the epoch, [seq_len]. A binary search per token
        # needs no list of the stream's tokens, which may not fit into memory.
        slots = np.searchsorted(self.starts, positions, side="right") - 1
        document = self.order[slots]
        offset = positions - self.starts[slots]
        inside = positions < self.num_tokens
        # Places in the tokens of the corpus, [tokens].
        at = (self.encoded.starts[document] + offset)[inside]
        ids = np.full(self.seq_len, self.pad, dtype=np.int64)
        ids[inside] = self.encoded.tokens[at]
        counted = inside.copy()
        if self.encoded.counted is not None:
            counted[inside] = self.encoded.counted[at]
        firsts = begins_piece(offset, self.seq_len, self.longest)
        return ids, flags_of(counted, inside & firsts, ~inside)

    def _counts(self, index: int) -> bool:
        """Return whether a window has a counted label after its first token."""
        whole = (int(self.windows[index]) + 1) * self.seq_len <= self.num_tokens
        if self.encoded.counted is None and whole and self.seq_len > 3:
            # Known without reading the window: reading each would go through the whole corpus. A document has two
            # tokens or more; of four in a row, two are in one piece of it, even if pieces are cut.
            return True
        return bool((self.window(index)["labels"][1:] != IGNORED).any())


class RecordEpoch(Epoch):
    """Whole records, several to a window where they fit; texts among them are cut at `longest` tokens.

    The packing "none" gives each record a window of its own. No record may be longer than `longest`, and each must have
    a counted label after its first token (te_models.data.encoding.fit_records).
    """

    def _lay(self) -> int:
        starts, lengths = cut_texts(
            self.encoded.starts[self.order], self.encoded.lengths[self.order], self.longest
        )
        if self.packing == "none":
            # A window for each record, in their order.
            pieces = np.arange(len(lengths))
            self.bounds = np.arange(len(lengths) + 1)
        else:
            pieces, self.bounds = pack_records(lengths, self.seq_len)
        self.starts = starts[pieces]
        self.lengths = lengths[pieces]
        self.num_tokens = int(lengths.sum())
        return len(self.bounds) - 1

    def marked_window(self, index: int) -> Marked:
        pieces = slice(self.bounds[self.windows[index]], self.bounds[self.windows[index] + 1])
        starts = self.starts[pieces]
        lengths = self.lengths[pieces]
        total = int(lengths.sum())
        begins = np.cumsum(lengths) - lengths  # of the records in the window, [records]
        # Places in the tokens of the corpus, [tokens]: records that are side by side here may be far apart there.
        at = np.repeat(starts - begins, lengths) + np.arange(total)
        ids = np.full(self.seq_len, self.pad, dtype=np.int64)
        counted = np.zeros(self.seq_len, dtype=np.bool_)
        ids[:total] = self.encoded.tokens[at]
        counted[:total] = True if self.encoded.counted is None else self.encoded.counted[at]
        firsts = np.zeros(self.seq_len, dtype=np.bool_)
        firsts[begins] = True
        return ids, flags_of(counted, firsts, np.arange(self.seq_len) >= total)


def longest_document(seq_len: int, packing: str, limit: int | None) -> int:
    """Return how many tokens of a document a window may have: all, or as many as a model takes in one sequence.

    Args:
        seq_len: tokens per window.
        packing: "documents": a window may be longer than the model's sequences, since positions begin anew in each.
        limit: tokens of a sequence of the model; None: any number.
    """
    if limit is None or packing != "documents":
        return seq_len
    return min(seq_len, limit)


def begins_piece(offset: NDArray[np.int64], seq_len: int, longest: int) -> NDArray[np.bool_]:
    """Return which tokens begin a document or a piece of one, by their places in it, `offset` [tokens]."""
    if longest == seq_len:
        return offset == 0
    return offset % longest == 0


def cut_texts(
    starts: NDArray[np.int64], lengths: NDArray[np.int64], longest: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cut documents longer than `longest` into pieces of that length; pieces of one token are left out."""
    counts = -(-lengths // longest)
    # The number of each piece in its document.
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(starts, counts) + number * longest
    lengths = np.minimum(np.repeat(lengths, counts) - number * longest, longest)
    return starts[lengths > 1], lengths[lengths > 1]


def pack_records(
    lengths: NDArray[np.int64], seq_len: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pack records of at most `seq_len` tokens into windows: best fit, the longest first, in groups of GROUP records.

    Args:
        lengths: int64 [R], in the order of the epoch.
        seq_len: tokens per window.

    Returns:
        int64 [R], the records in the order of the windows; and int64 [W + 1], where each window begins among them. The
        records of a window are in the order of the epoch.
    """
    windows: list[list[int]] = []
    for first in range(0, len(lengths), GROUP):
        group = lengths[first : first + GROUP]
        # Windows are filled within a group only, so that the work per record does not grow with the corpus.
        room: list[tuple[int, int]] = []  # tokens free in a window and its number, sorted
        # Longest first, so that short ones fill the gaps; stable, so that every rank lays the same windows.
        for record in np.argsort(-group, kind="stable").tolist():
            length = int(group[record])
            # The window with the least room that is enough; -1 is below every number of a window.
            at = bisect.bisect_left(room, (length, -1))
            free, number = room.pop(at) if at < len(room) else (seq_len, len(windows))
            if number == len(windows):
                windows.append([])
            windows[number].append(first + record)
            if free > length:
                bisect.insort(room, (free - length, number))
    # Sorted, since the longest came first: inside a window the order of the epoch counts.
    order = [record for window in windows for record in sorted(window)]
    return np.array(order, dtype=np.int64), np.cumsum([0, *map(len, windows)])


def flags_of(
    counted: NDArray[np.bool_], firsts: NDArray[np.bool_], padding: NDArray[np.bool_] | None = None
) -> NDArray[np.int32]:
    """Return the flags of tokens: those that the loss counts, that begin a document, and that only fill a window."""
    flags = counted * TARGET + firsts * FIRST
    return (flags if padding is None else flags + padding * PADDING).astype(np.int32)


def pack_window(ids: NDArray[np.int64], flags: NDArray[np.int32], packing: str) -> Window:
    """Return one window of a batch: input_ids, labels and, unless packed as a stream, document_ids, int64 [seq_len]."""
    counted = flags & TARGET != 0
    if packing == "stream":
        return {"input_ids": ids, "labels": np.where(counted, ids, IGNORED)}
    firsts = flags & FIRST != 0
    # The first token of a document would be predicted by the one before it, which is another's.
    labels = np.where(counted & ~firsts, ids, IGNORED)
    documents = np.where(flags & PADDING, PAD_DOCUMENT, np.cumsum(firsts, dtype=np.int64))
    return {"input_ids": ids, "labels": labels, "document_ids": documents}


def stack_windows(windows: Sequence[Window]) -> dict[str, Tensor]:
    """Stack windows into a batch, each entry [len(windows), seq_len]."""
    return {
        name: torch.from_numpy(np.stack([window[name] for window in windows]))
        for name in windows[0]
    }


def check_windows(seq_len: int, batch_size: int, packing: str) -> None:
    """Raise a UsageError for sizes out of range or an unknown packing."""
    check_least(2, seq_len=seq_len)
    check_least(1, batch_size=batch_size)
    check_known("packing", packing, PACKINGS)


def repeats(weights: NDArray[np.float64], epoch: int) -> NDArray[np.int64]:
    """Return how often each of some documents or chunks occurs in an epoch.

    Args:
        weights: float64 [D], the average number of times per epoch; one source's are equal and side by side.
        epoch: counted from 0.

    Returns:
        int64 [D]. Of a weight of 0.25, every fourth occurs in each epoch, and others in the next, so that each has
        occurred within one of weight * epochs times.
    """
    # Spreads neighbors evenly over [0, 1).
    phase = np.arange(len(weights)) * 0.6180339887498949 % 1
    # Over all epochs the differences add up to floor(weight * epochs + phase): nothing is lost by rounding.
    before = np.floor(weights * epoch + phase)
    after = np.floor(weights * (epoch + 1) + phase)
    return (after - before).astype(np.int64)
