"""Documents to batches: packing into windows, and exact resume.

An epoch is every document once, in an order drawn from (seed, epoch), each followed by the end-of-text token, laid back
to back and cut into windows of seq_len tokens. The last window of an epoch is filled up with padding that the loss does
not count. So each token of each document occurs exactly once per epoch. A document may continue in the next window,
which need not be in the same batch. Under the packing "documents" attention stays inside each document; under "stream"
documents that share a window see each other. te_models.data.streaming reads a corpus larger than memory.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from te_models.data.documents import Document
from te_models.data.tokenizer import Tokenizer, end_of_text
from te_models.errors import DataError, UsageError, unknown

IGNORED = -100  # label of tokens that the loss does not count: Hugging Face's and PyTorch's convention
PACKINGS = ("stream", "documents")


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise a UsageError if the tokenizer has ids that a model of this `vocab_size` has no embedding for."""
    if tokenizer.vocab_size > vocab_size:
        raise UsageError(
            f"the tokenizer has {tokenizer.vocab_size} ids but the model's vocab_size is {vocab_size}: "
            f"use --vocab-size {tokenizer.vocab_size} or more, or for a model that is already trained its own tokenizer"
        )


@dataclass(frozen=True)
class _Packing:
    """Documents laid back to back: their `order` as indices, the token at which each `starts`, and the order of the
    `windows` cut from them."""

    order: NDArray[np.int64]
    starts: NDArray[np.int64]
    windows: NDArray[np.int64]


class TokenDataset:
    """An endless iterator of batches {"input_ids", "labels"}, both int64 [batch_size, seq_len].

    Labels equal input_ids (the model shifts them), except IGNORED on prompts and padding. With packing="documents"
    there is also "document_ids", and the first token of each document is IGNORED, since nothing before it is seen. Each
    epoch lays the documents back to back in its own order and returns the windows cut from that in random order, so
    that a batch does not come from one document. Batches run on from one epoch to the next, and rank `r` of
    `world_size` takes the r-th of every `world_size` batches.

    Args:
        documents: encoded here, once.
        tokenizer: must have an end-of-text token; padding is its pad token, or else that one.
        seq_len: tokens per window.
        batch_size: windows per batch and rank.
        seed: of the order of the documents, together with the epoch.
        shuffle: False keeps the order given, as for evaluation; the data may then be shorter than one window.
        packing: "stream", or "documents" to keep attention inside each document.
        rank: number of this process.
        world_size: number of processes that share the data.

    Raises:
        UsageError: no end-of-text token, or sizes out of range.
        DataError: no documents, or data to shuffle shorter than one window.
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
            raise DataError(
                f"the data has {self.num_tokens} tokens, less than one window of seq_len={seq_len}: "
                "lower --seq-len or give more data"
            )
        self._sources = sorted({document.source for document in documents} - {""})
        self._fingerprint = self._hash_data()
        self._in_order = self._pack(np.arange(self.num_documents), np.arange(self.num_windows))
        self._epoch, self._epoch_packing = -1, self._in_order
        self._next_window = 0  # counted over all epochs and ranks

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self._lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens per epoch, with one end-of-text token per document."""
        return len(self._tokens)

    @property
    def num_windows(self) -> int:
        """Windows per epoch, over all ranks."""
        return math.ceil(self.num_tokens / self.seq_len)

    def describe(self) -> str:
        """Describe the corpus in one line."""
        size = f"{self.num_documents:,} documents, {self.num_tokens:,} tokens in {self.num_windows:,} windows"
        return f"{size}, from {' and '.join(self._sources)}" if self._sources else size

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Return the dataset itself: a second iterator continues where the first one stopped."""
        return self

    def __next__(self) -> dict[str, Tensor]:
        """Return this rank's next batch."""
        first = self._next_window + self.rank * self.batch_size
        self._next_window += self.world_size * self.batch_size
        places = [divmod(window, self.num_windows) for window in range(first, first + self.batch_size)]
        packings = [self._shuffled(epoch) for epoch, _ in places]
        return stack_windows(
            [self._window(p, p.windows[index]) for p, (_, index) in zip(packings, places, strict=True)]
        )

    def eval_batches(self, max_batches: int) -> list[dict[str, Tensor]]:
        """Return this rank's `max_batches` batches of windows spread evenly over the documents, or all if there are
        fewer.

        They never change and do not move the iterator. Missing windows of the last batches are padding, so that all
        ranks have as many batches of the same shape; a batch whose labels are all IGNORED is possible.
        """
        count = min(max_batches, math.ceil(self.num_windows / (self.batch_size * self.world_size)))
        total = count * self.world_size * self.batch_size
        stride = max(1.0, self.num_windows / max(1, total))
        firsts = [(number * self.world_size + self.rank) * self.batch_size for number in range(count)]
        places = [[int((first + i) * stride) for i in range(self.batch_size)] for first in firsts]
        return [stack_windows([self._window(self._in_order, place) for place in batch]) for batch in places]

    def state_dict(self) -> dict[str, int]:
        """Return the position of the iterator; it is the same on every rank.

        `position` in `epoch` counts whole windows of all ranks, so batch_size and world_size may change on resume.
        """
        epoch, position = divmod(self._next_window, self.num_windows)
        return {"epoch": epoch, "position": position, "seed": self.seed, "fingerprint": self._fingerprint}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue with the batch that would have followed when `state` was taken; its seed replaces this one's.

        Raises:
            UsageError: the state is of other documents, another tokenizer, seq_len or shuffle.
        """
        if state["fingerprint"] != self._fingerprint:
            raise UsageError(
                "the saved data position is of other data: resume with the same --data, --tokenizer, --seq-len, "
                "--packing and --seed, or start a new run"
            )
        self.seed, self._epoch = state["seed"], -1
        self._next_window = state["epoch"] * self.num_windows + state["position"]

    def _encode(self, documents: Sequence[Document], tokenizer: Tokenizer) -> None:
        """Encode all documents into one flat array, with each document's start, length and prompt length in it."""
        if not documents:
            raise DataError("there are no documents to make batches of: give at least one")
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
        """Hash everything that a position depends on: tokens, ends of documents and prompts, windows, shuffle."""
        kind = f"{self.seq_len} {self.shuffle}" + (f" {self.packing}" if self.packing != "stream" else "")
        digest = hashlib.blake2b(kind.encode(), digest_size=6)  # exact in a JSON double
        for array in (self._tokens, self._lengths, self._prompt_lengths):
            digest.update(array.data)
        return int.from_bytes(digest.digest(), "big")

    def _pack(self, order: NDArray[np.int64], windows: NDArray[np.int64]) -> _Packing:
        lengths = self._lengths[order]
        return _Packing(order, np.cumsum(lengths) - lengths, windows)

    def _shuffled(self, epoch: int) -> _Packing:
        """Return the packing of an epoch; the newest is cached."""
        if not self.shuffle:
            return self._in_order
        if epoch != self._epoch:
            random = np.random.default_rng((self.seed, epoch))
            order, windows = random.permutation(self.num_documents), random.permutation(self.num_windows)
            self._epoch, self._epoch_packing = epoch, self._pack(order, windows)
        return self._epoch_packing

    def _window(self, packing: _Packing, index: int) -> Window:
        """Return window `index` of an epoch; positions after the last token are padding, as a separate document."""
        positions = np.arange(index * self.seq_len, (index + 1) * self.seq_len)
        slots = np.searchsorted(packing.starts, positions, side="right") - 1
        document, offset = packing.order[slots], positions - packing.starts[slots]
        inside = positions < self.num_tokens
        ids = np.full(self.seq_len, self._padding, dtype=np.int64)
        ids[inside] = self._tokens[(self._starts[document] + offset)[inside]]
        counted = inside & (offset >= self._prompt_lengths[document])
        firsts = np.where(inside, offset == 0, positions == self.num_tokens)
        return pack_window(ids, counted, firsts, self.packing)


Window = dict[str, NDArray[np.int64]]


def pack_window(ids: NDArray[np.int64], counted: NDArray[np.bool_], firsts: NDArray[np.bool_], packing: str) -> Window:
    """Return one window of a batch: input_ids, labels and, packed by documents, document_ids, each int64 [seq_len].

    `counted` marks the tokens whose prediction the loss counts, `firsts` those that begin a document.
    """
    if packing == "stream":
        return {"input_ids": ids, "labels": np.where(counted, ids, IGNORED)}
    labels = np.where(counted & ~firsts, ids, IGNORED)
    return {"input_ids": ids, "labels": labels, "document_ids": np.cumsum(firsts, dtype=np.int64)}


def stack_windows(windows: Sequence[Window]) -> dict[str, Tensor]:
    """Stack windows into a batch, each entry [len(windows), seq_len]."""
    return {name: torch.from_numpy(np.stack([window[name] for window in windows])) for name in windows[0]}


def check_windows(seq_len: int, batch_size: int, packing: str) -> None:
    """Raise a UsageError for sizes out of range or an unknown packing."""
    if seq_len < 2 or batch_size < 1:
        raise UsageError(
            f"seq_len={seq_len} and batch_size={batch_size} are out of range: give at least 2 tokens and 1 window"
        )
    if packing not in PACKINGS:
        raise unknown("packing", packing, PACKINGS)
