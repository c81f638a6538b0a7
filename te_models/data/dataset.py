"""Documents in memory to batches, with exact resume.

An epoch is every document once, or as often as its source's weight says, in an order drawn from (seed, epoch).

* Texts, and all documents under the packing "stream": each is followed by the end-of-text token, and they are laid back
  to back and cut into windows of seq_len tokens. The last window of an epoch is filled up with padding that the loss
  does not count. So each token of each document occurs exactly once per epoch. A document may continue in the next
  window, which need not be in the same batch. Under the packing "documents" attention stays inside each document; under
  "stream" documents that share a window see each other.
* Records (a prompt with its completion, a conversation) under "documents" are never cut: windows are filled with whole
  ones, and attention stays inside each. Under "none" each has a window of its own.

Each window has a counted label. te_models.data.streaming reads a corpus larger than memory.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from te_models.config.model import ModelConfig
from te_models.config.shares import share_of
from te_models.data.answer_ends import answer_ends
from te_models.data.encoding import Encoded, encode_documents, keep_fitting
from te_models.data.formats import Document
from te_models.data.packing import (
    CutEpoch,
    Epoch,
    RecordEpoch,
    check_windows,
    longest_document,
    repeats,
    stack_windows,
)
from te_models.data.tokenizer_base import Tokenizer, end_of_text
from te_models.errors import DataError, UsageError, plural
from te_models.model.targets import IGNORED, PAD_DOCUMENT


def check_fit(
    tokenizer: Tokenizer, config: ModelConfig, seq_len: int = 0, packing: str = "stream"
) -> None:
    """Raise a UsageError for ids of the tokenizer without an embedding, or sequences longer than the model allows.

    Windows of packed documents may be longer, since TokenDataset and StreamingDataset cut these by their `limit`.
    """
    ids = tokenizer.vocab_size
    if ids > config.vocab_size:
        raise UsageError(
            f"the tokenizer has {ids} ids but the model's vocab_size is {config.vocab_size}: use --vocab-size {ids} or "
            "more, or for a model that is already trained its own tokenizer"
        )
    if seq_len > config.longest_sequence and packing != "documents":
        raise UsageError(
            f"--seq-len {seq_len} is longer than the model allows ({config.length_limit}): lower it, raise "
            "--max-position-embeddings, or fill windows with shorter documents (--packing documents)"
        )


def check_position(state: Mapping[str, object], fingerprint: int) -> None:
    """Raise a UsageError if a saved position is not in the data with this fingerprint."""
    if state["fingerprint"] != fingerprint:
        raise UsageError(
            "the saved data position is of other data: resume with the same --data (its files unchanged), "
            "--tokenizer, --seq-len, --packing and --seed, or start a new run"
        )


class TokenDataset:
    """An endless iterator of batches {"input_ids", "labels"}, both int64 [batch_size, seq_len].

    Labels equal input_ids (the model shifts them), except IGNORED on prompts and padding. Unless packing="stream" there
    is also "document_ids", below 0 at padding, and the first token of each document is IGNORED, since nothing before it
    is seen. Each epoch orders the documents anew and returns its windows in random order, so that a batch does not come
    from one document. Batches run on from one epoch to the next, and rank `r` of `world_size` takes the r-th of every
    `world_size` batches.

    Args:
        documents: encoded here, once, unless they are.
        tokenizer: must have an end-of-text token; padding is its pad token, or else that one.
        seq_len: tokens per window.
        batch_size: windows per batch and rank.
        seed: of the order of the documents, together with the epoch.
        shuffle: False keeps the order given, as for evaluation; the data may then be shorter than one window.
        packing: "stream", "documents" to keep attention inside each document, or "none".
        weights: how often each document occurs per epoch, on average; None: once.
        truncate: records longer than seq_len are left out ("drop") or their prompts cut from the left ("prompt").
        sources: describes where the documents come from; None: their sources.
        limit: the longest sequence that the model allows, to which packed documents are cut or left out; None: any.
        rank: number of this process.
        world_size: number of processes that share the data.

    Attributes:
        ends: ids of the tokens that end answers and texts (te_models.data.answer_ends).

    Raises:
        UsageError: no end-of-text token, or sizes out of range.
        DataError: no documents, texts to shuffle shorter than one window, or no record that fits.
    """

    def __init__(
        self,
        documents: Sequence[Document] | Encoded,
        tokenizer: Tokenizer,
        seq_len: int,
        *,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        packing: str = "stream",
        weights: NDArray[np.float64] | None = None,
        truncate: str = "drop",
        sources: Sequence[str] | None = None,
        limit: int | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        check_windows(seq_len, batch_size, packing)
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.packing = packing
        self.longest = longest_document(seq_len, packing, limit)
        self.weights = weights
        self.rank = rank
        self.world_size = world_size
        self.remarks: list[str] = []  # lines that `describe` ends with
        if not isinstance(documents, Encoded):
            if sources is None:
                sources = sorted({document.source for document in documents} - {""})
            whole = packing != "stream" and any(document.is_record for document in documents)
            documents = encode_documents(documents, tokenizer, begin_prompts=whole)
        self._sources = list(sources or [])
        self.whole = packing == "none" or (packing == "documents" and bool(documents.records.any()))
        if self.whole:
            fitting, documents, lines = keep_fitting(documents, tokenizer, seq_len, truncate, limit)
            self.weights = None if weights is None else weights[fitting]
            self.remarks += lines
        self._encoded = documents
        self.ends = answer_ends(documents, tokenizer)
        self._pad = (
            end_of_text(tokenizer) if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        )
        # A position counts windows, so it means nothing in other data.
        self.fingerprint = self._hash_data()
        self._in_order = self._lay(np.arange(self.num_documents), None)
        if shuffle and not self.whole and self.num_tokens < seq_len:
            raise DataError(
                f"the data has {self.num_tokens} tokens, less than one window of seq_len={seq_len}: lower --seq-len or "
                "give more data"
            )
        if not self._in_order.num_windows:
            raise DataError(
                "there is nothing to predict in the data: give longer documents or a larger --seq-len"
            )
        self._cached: tuple[int, Epoch] = (-1, self._in_order)
        self._epoch = self._position = 0  # the next window of all ranks: which of which epoch

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self._encoded)

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents, with one end-of-text token per text."""
        return self._encoded.num_tokens

    @property
    def num_windows(self) -> int:
        """Windows of all documents once, over all ranks."""
        return self._in_order.num_windows

    def windows_in(self, epochs: float) -> int:
        """Return the windows in the first epochs, over all ranks; a last epoch in part counts in part.

        Records are packed otherwise in each epoch: after 16, epochs count as their mean.
        """
        packed = min(int(epochs), 16)
        whole = sum(self._shuffled(epoch).num_windows for epoch in range(packed))
        whole += round(Fraction(whole * (int(epochs) - packed), max(1, packed)))
        fraction = share_of(epochs, 1) % 1
        return whole + (
            math.ceil(fraction * self._shuffled(int(epochs)).num_windows) if fraction else 0
        )

    def __repr__(self) -> str:
        about = self.describe().splitlines()[0]
        return f"{type(self).__name__}({about}, in batches of {self.batch_size} x {self.seq_len:,} tokens)"

    def describe(self) -> str:
        """Describe the corpus: one line, and one for each remark."""
        documents = plural(self.num_documents, "record" if self.whole else "document")
        windows = self.windows_in(1)
        cut = " in" if self.weights is None else "; with the weights, an epoch is"
        size = f"{documents}, {plural(self.num_tokens, 'token')}{cut} {plural(windows, 'window')}"
        if self.whole and windows:
            size += f" with {self._shuffled(0).padding():.1%} padding"
        line = f"{size}, from {' and '.join(self._sources)}" if self._sources else size
        return "\n".join([line, *self.remarks])

    def remark(self, lines: Iterable[str]) -> None:
        """Add lines that `describe` ends with."""
        self.remarks += lines

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Return the dataset itself: a second iterator continues where the first one stopped."""
        return self

    def __next__(self) -> dict[str, Tensor]:
        """Return this rank's next batch."""
        rows = []
        for number in range(self.batch_size * self.world_size):
            self._end_epochs()
            if number // self.batch_size == self.rank:
                # Every rank counts all windows, so that a position means the same on each.
                rows.append(self._shuffled(self._epoch).window(self._position))
            self._position += 1
        return stack_windows(rows)

    def eval_batches(self, max_batches: int) -> list[dict[str, Tensor]]:
        """Return this rank's `max_batches` batches of windows spread evenly over the documents, or all if there are
        fewer.

        They never change and do not move the iterator. Missing windows of the last batches are padding, so that all
        ranks have as many batches of the same shape; a batch whose labels are all IGNORED is possible on some ranks,
        but not on all.
        """
        count = min(max_batches, math.ceil(self.num_windows / (self.batch_size * self.world_size)))
        total = count * self.world_size * self.batch_size
        # Not the first windows: those would be of the first documents alone.
        spread = max(self.num_windows, total)
        filled = {"input_ids": self._pad, "labels": IGNORED, "document_ids": PAD_DOCUMENT}
        blank = {}
        for name, value in self._in_order.window(0).items():
            blank[name] = np.full_like(value, filled[name])
        batches = []
        for number in range(count):
            first = (number * self.world_size + self.rank) * self.batch_size
            windows = []
            for i in range(self.batch_size):
                place = (first + i) * spread // total
                windows.append(self._in_order.window(place) if place < self.num_windows else blank)
            batches.append(stack_windows(windows))
        return batches

    def state_dict(self) -> dict[str, int]:
        """Return the position of the iterator; it is the same on every rank.

        `position` in `epoch` counts whole windows of all ranks, so batch_size and world_size may change on resume.
        """
        self._end_epochs()
        position = {"epoch": self._epoch, "position": self._position}
        return {**position, "seed": self.seed, "fingerprint": self.fingerprint}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue with the batch that would have followed when `state` was taken; its seed replaces this one's.

        Raises:
            UsageError: the state is of other documents, another tokenizer, seq_len or shuffle.
        """
        check_position(state, self.fingerprint)
        self.seed = state["seed"]
        # The cached epoch may be in the order of another seed.
        self._cached = (-1, self._in_order)
        self._epoch = state["epoch"]
        self._position = state["position"]

    def _hash_data(self) -> int:
        """Hash everything that a position depends on: tokens, ends of documents and prompts, windows, shuffle."""
        encoded = self._encoded
        kind = f"{self.seq_len} {self.shuffle}"
        kind += f" {self.packing}" if self.packing != "stream" else ""
        kind += f" {self.longest}" if self.longest < self.seq_len else ""
        digest = hashlib.blake2b(kind.encode(), digest_size=6)  # exact in a JSON double
        for part in encoded.parts(encoded.tokens):
            digest.update(np.ascontiguousarray(part).data)
        digest.update(np.ascontiguousarray(encoded.lengths).data)
        digest.update(np.ascontiguousarray(encoded.prompts).data)
        if encoded.counted is not None:
            for part in encoded.parts(encoded.counted):
                digest.update(np.ascontiguousarray(part).data)
        if self.weights is not None:
            digest.update(np.ascontiguousarray(self.weights).data)
        return int.from_bytes(digest.digest(), "big")

    def _lay(self, order: NDArray[np.int64], random: np.random.Generator | None) -> Epoch:
        kind = RecordEpoch if self.whole else CutEpoch
        return kind(
            encoded=self._encoded,
            order=order,
            seq_len=self.seq_len,
            longest=self.longest,
            packing=self.packing,
            pad=self._pad,
            random=random,
        )

    def _shuffled(self, epoch: int) -> Epoch:
        """Return the windows of an epoch; the newest is cached."""
        if not self.shuffle:
            return self._in_order
        if epoch != self._cached[0]:
            # From seed and epoch alone: a resumed run needs no state of a generator.
            random = np.random.default_rng((self.seed, epoch))
            documents = np.arange(self.num_documents)
            if self.weights is not None:
                documents = np.repeat(documents, repeats(self.weights, epoch))
            self._cached = epoch, self._lay(documents[random.permutation(len(documents))], random)
        return self._cached[1]

    def _end_epochs(self) -> None:
        """Go on to the epoch that has the next window; with weights below 1, epochs may have none."""
        while self._position >= self._shuffled(self._epoch).num_windows:
            self._epoch = self._epoch + 1
            self._position = 0
