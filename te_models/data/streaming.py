"""A corpus larger than memory to batches, on any number of ranks, with exact resume on any other number.

The chunks of the corpus (te_models.data.corpus_chunks) are permuted by (seed, epoch) and dealt out to L **lanes**. A
lane reads its chunks one after another, the documents of each permuted by (seed, epoch, chunk), and cuts the tokens
into an endless series of windows: its next epoch begins where the last one stopped. So in each epoch each document
occurs exactly once, in one lane; chunks of a source with a weight occur as often as it says. Records that must not be
cut are packed into whole windows chunk by chunk, so that a chunk ends where a window does.

Window n of the run is the next one of lane n mod L, whatever the number of ranks: rank r of W takes the windows n with
n mod W = r, and reads only the lanes that these come from. L follows from the data. So the batches of all ranks
together, and the position, do not depend on W, and the position is: n, and for each lane its epoch, its chunk and the
tokens taken from it. The idea of fixing such a number independently of the ranks is MosaicML's `num_canonical_nodes`.

Worker processes read and encode the next chunk of each lane in advance. They have no state, so no batch depends on
them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from te_models.data.answer_ends import answer_ends
from te_models.data.bad_records import BadRecords
from te_models.data.chunk_workers import encode_chunk, handler_waits, interrupts_wait, worker_pool
from te_models.data.corpus_chunks import CHUNK_BYTES, ChunkReader, Chunks, find_chunks
from te_models.data.dataset import check_position
from te_models.data.documents import ignored_lines
from te_models.data.encoding import Fit, Sample, encode_documents
from te_models.data.files import check_text
from te_models.data.formats import Document
from te_models.data.lane import Lane, Position, Request
from te_models.data.packing import (
    check_windows,
    longest_document,
    pack_window,
    repeats,
    stack_windows,
)
from te_models.data.sources import Source
from te_models.data.tokenizer_base import Tokenizer
from te_models.distributed.control import Ranks
from te_models.errors import DataError, DataUnavailable, UsageError, plural
from te_models.files.formats import Fields

MAX_LANES = 64
# Limit of the text in all lanes of one process, which bounds their number where chunks are large.
LANE_BYTES = 2**30


class StreamingDataset:
    """An endless iterator of batches as TokenDataset's, of a corpus that is read while training.

    Args:
        corpus: sources, or a file, folder, glob or URL (te_models.data.files.find_files).
        tokenizer, seq_len, batch_size, seed, truncate, limit, rank, world_size: as for TokenDataset.
        packing: "stream", "documents" to keep attention inside each document, or "none". Under the last two, documents
            that are records stay whole if any source has them; "none" gives each a window of its own.
        columns: your column names -> the formats' (te_models.config.data.parse_columns).
        records: True or False refuses a document that is no record with an answer, or one that is.
        skip_bad: leaves out records that cannot be read.
        shuffle: False keeps the order of the files, in one lane.
        eval_fraction: the share of documents, chosen by content, that is reserved for `held_out`.
        num_lanes: number of chunks that are read at a time, over all ranks; None: 64, or fewer where there are fewer
            chunks or where so many would take more than 1 GiB of text. Ranks read disjoint lanes if world_size divides
            it.
        num_workers: processes that encode ahead; 0 encodes when a chunk is needed. No batch depends on it.
        ranks: the processes that exchange positions in `state_dict`; None: no exchange (`merge_states` combines
            states).
        chunk_bytes: approximate text per chunk.

    Attributes:
        ends: ids of the tokens that end answers and texts (te_models.data.answer_ends).

    Raises:
        UsageError: sizes out of range.
        DataError: no files, or files that cannot be read.
    """

    def __init__(
        self,
        corpus: str | Sequence[Source],
        tokenizer: Tokenizer,
        seq_len: int,
        *,
        batch_size: int,
        seed: int,
        packing: str = "stream",
        truncate: str = "drop",
        limit: int | None = None,
        columns: Mapping[str, str] | None = None,
        records: bool | None = None,
        skip_bad: bool = False,
        shuffle: bool = True,
        eval_fraction: float = 0.0,
        num_lanes: int | None = None,
        num_workers: int = 0,
        rank: int = 0,
        world_size: int = 1,
        ranks: Ranks | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        check_windows(seq_len, batch_size, packing)
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.seed = seed
        self.packing = packing
        self.limit = limit
        self.shuffle = shuffle
        self.rank = rank
        self.world_size = world_size
        self.num_workers = num_workers
        self.ranks = ranks or Ranks()
        self.chunks = find_chunks(corpus, chunk_bytes)
        self.num_lanes = _count_lanes(self.chunks, num_lanes) if shuffle else 1
        # Records must not be cut: they are packed whole into windows.
        self.whole = _keeps_whole(packing, self.chunks.sources)
        self.ends = self._text_ends(tokenizer)
        self.reader = ChunkReader(
            source=self.chunks.source,
            tokenizer=tokenizer,
            seed=seed,
            eval_fraction=eval_fraction,
            columns=columns or {},
            whole=self.whole,
            seq_len=seq_len,
            longest=longest_document(seq_len, packing, limit),
            packing=packing,
            truncate=truncate,
            records=records,
            bad=BadRecords(skip_bad),
        )
        self.remarks: list[str] = []  # lines that `describe` ends with
        self.fingerprint = self._hash_data(tokenizer)
        self._pool: ProcessPoolExecutor | None = None
        self._answered = False  # whether a worker has encoded a chunk
        self._lanes: dict[int, Lane] = {}
        self._positions: list[Position] = [[0, 0, 0] for _ in range(self.num_lanes)]
        # Windows, counted over all epochs, lanes and ranks: where the state was taken, and the next one.
        self._loaded_at = 0
        self._next_window = 0
        self.order = lru_cache(maxsize=4)(self._order)

    def _text_ends(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Return the ids of the tokens that end texts; `sample` finds the ones that end records."""
        if self.whole or tokenizer.eos_token_id is None:
            return ()
        return (tokenizer.eos_token_id,)

    def __repr__(self) -> str:
        about = self.describe().splitlines()[0]
        return f"{type(self).__name__}({about}, in batches of {self.batch_size} x {self.seq_len:,} tokens)"

    def describe(self) -> str:
        """Describe the corpus: one line, and one for each remark."""
        chunks = self.chunks
        size = int(self.chunks.sizes.sum())
        shown = f"{size / 2**20:,.1f} MiB" if size >= 2**20 else f"{size / 2**10:,.1f} KiB"
        files = plural(len(chunks.files), "file")
        lanes = plural(self.num_lanes, "lane")
        line = f"{shown} of {chunks.format} in {files}, streamed in {lanes} from {chunks.source}"
        return "\n".join([line, *self.remarks])

    def remark(self, lines: Iterable[str]) -> None:
        """Add lines that `describe` ends with."""
        self.remarks += lines

    def sample(self) -> Sample:
        """Read the first chunk with a document that fits a window; describe it.

        The tokens that end its answers become `ends`.

        Raises:
            DataError: no document of any chunk fits a window.
        """
        number = 0
        total = Fit()
        bad = BadRecords(self.reader.bad.skip)
        reader = replace(self.reader, bad=bad)
        for chunk in self.order(0).tolist():
            # The order of an epoch may name a chunk several times, by the weight of its source.
            documents = reader.documents(self.chunks[chunk % len(self.chunks)])
            if not documents:
                continue
            encoded = encode_documents(documents, reader.tokenizer, begin_prompts=True, bad=bad)
            fitted, fit = reader.fit(encoded)
            if len(fitted):
                self.ends = answer_ends(fitted, reader.tokenizer)
                return Sample(
                    documents=len(documents),
                    fit=fit,
                    padding=reader.windows(fitted).padding(),
                    remarks=[*ignored_lines(documents), *bad.describe()],
                )
            # Nothing of this chunk fits: add up what was wrong, for the message at the end.
            number = number + len(documents)
            total = total + fit
        if not total.unanswered and not total.too_long:
            # No record was too long or without an answer, so all of them were unreadable, if there were any.
            bad.refuse_all(self.chunks.source)
        total.refuse(
            number,
            self.seq_len,
            self.reader.truncate,
            limit=self.limit,
            source=f"{self.chunks.source}: ",
        )

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Return the dataset itself: a second iterator continues where the first one stopped."""
        return self

    def __next__(self) -> dict[str, Tensor]:
        """Return this rank's next batch."""
        if not self._lanes:  # start the workers on the first chunk of every lane
            for lane in self._own_lanes:
                self._lane(lane)
        first = self._next_window + self.rank
        windows = []
        for i in range(self.batch_size):
            # Window n of the run is window n // L of lane n mod L, on any number of ranks.
            index, lane = divmod(first + i * self.world_size, self.num_lanes)
            tokens, flags = self._lane(lane).window(index)
            windows.append(pack_window(tokens, flags, self.packing))
        self._next_window += self.batch_size * self.world_size
        return stack_windows(windows)

    def state_dict(self) -> dict[str, object]:
        """Return the position of the iterators of all ranks; every rank must call it, since they exchange positions.

        Without `ranks` it has only the lanes of this rank.
        """
        return self.whole_state(self.own_state())

    def own_state(self) -> dict[str, object]:
        """Return the position of this rank's iterator, without waiting for the others."""
        positions = {str(lane): self._position(lane) for lane in self._own_lanes}
        return {"windows": self._next_window, "fingerprint": self.fingerprint, "lanes": positions}

    def whole_state(self, local_state: dict[str, object]) -> dict[str, object]:
        """Return `state_dict` as of the time when every rank took its `own_state`, which they exchange here."""
        return merge_states(self.ranks.gather(local_state))

    def load_state_dict(self, state: Fields) -> None:
        """Continue with the batch that would have followed when `state` was taken, on any number of ranks.

        Raises:
            UsageError: the state is of other data, another tokenizer, seq_len, packing, seed or number of lanes, or
                lacks the lanes of some ranks.
        """
        check_position(state, self.fingerprint)
        if len(state["lanes"]) != self.num_lanes:
            raise UsageError(
                f"the saved data position has {len(state['lanes'])} of {self.num_lanes} lanes: it is of one rank only; "
                "call state_dict on every rank"
            )
        self._positions = [list(state["lanes"][str(lane)]) for lane in range(self.num_lanes)]
        # Lanes in use are dropped: they are made anew at these positions when they are next asked for.
        self._loaded_at = state["windows"]
        self._next_window = state["windows"]
        self._lanes = {}

    def held_out(self, num_tokens: int, at_least_one: bool = False) -> list[Document]:
        """Return documents reserved for evaluation, of about `num_tokens` tokens, or all if there are fewer.

        Without an eval_fraction they are any documents. They are the same on every rank. Chunks are read in
        a random order of the seed until there are enough: 1 / eval_fraction times as much text as is returned.

        Args:
            num_tokens: about as many as evaluation needs.
            at_least_one: of data so small that the share has no document, or none that fits a window, reserve the one
                that fits whose hash is lowest. This raises `eval_fraction` of the training data accordingly.

        Raises:
            DataError: no document is reserved for evaluation.
        """
        share = self.reader.eval_fraction
        # The reader of training leaves these documents out; this one reads all.
        reader = replace(self.reader, eval_fraction=0.0)
        documents: list[Document] = []
        size = 0  # characters of `documents`
        empty = True
        for chunk in np.random.default_rng((self.seed, 0, 0)).permutation(len(self.chunks)):
            for document in reader.documents(self.chunks[chunk]):
                empty = False
                place = reader.place(document) if share else 0
                if place < share * 2**64 or not share:
                    documents.append(document)
                    size += (
                        len(document.text)
                        + len(document.prompt or "")
                        + len(document.conversation or "")
                    )
            if size >= 8 * num_tokens:  # a token is seldom longer than 8 characters
                break
        # One by one, since the first mostly fits.
        if at_least_one and not any(reader.fitting([document]) for document in documents):
            lowest = self._lowest_place(reader)
            if lowest is not None and lowest >= share * 2**64:
                # Above the lowest hash by more than a double rounds it, so that exactly its document is reserved.
                self.reader.eval_fraction = (lowest + 2**12) / 2**64
                return self.held_out(num_tokens)
        check_text(self.chunks.source, not empty)
        if not documents:
            raise DataError(
                f"{self.chunks.source}: none of its documents is reserved for evaluation (a share of {share:g}): leave "
                "out --streaming or give more data"
            )
        return documents

    def _lowest_place(self, reader: ChunkReader) -> int | None:
        """Return the lowest hash of a document that fits a window, or of any, if fewer than two fit.

        It is None where there are not two different documents, of which one could be held out.
        """
        # Records that are skipped were counted when the share was looked for.
        reader = replace(reader, bad=BadRecords(reader.bad.skip))
        # The two lowest hashes: of a single document nothing can be held out.
        lowest_fitting: list[int] = []
        lowest: list[int] = []
        for chunk in range(len(self.chunks)):
            documents = reader.documents(self.chunks[chunk])
            if not documents:
                continue
            places = {reader.place(document) for document in documents}
            lowest = sorted({*lowest, *places})[:2]
            places = {reader.place(document) for document in reader.fitting(documents)}
            lowest_fitting = sorted({*lowest_fitting, *places})[:2]
        if len(lowest_fitting) == 2:
            return lowest_fitting[0]
        return lowest[0] if len(lowest) == 2 else None

    def close(self) -> None:
        """End the worker processes; the iterator may continue, which starts them again."""
        if self._pool is not None:
            pool = self._pool
            self._pool = None
            for lane in self._lanes.values():
                lane.ahead = None
            # Python would take the pool's thread for ended, and wait for its workers for ever.
            with handler_waits():
                pool.shutdown(cancel_futures=True)

    @property
    def _own_lanes(self) -> range:
        """Return the lanes that this rank's windows come from."""
        # Windows n, n + W, n + 2 W, ... modulo L meet every gcd(L, W)-th lane.
        stride = math.gcd(self.num_lanes, self.world_size)
        return range((self._next_window + self.rank) % stride, self.num_lanes, stride)

    def _lane(self, number: int) -> Lane:
        """Return a lane, which is made at its saved position when it is first asked for."""
        if number not in self._lanes:
            windows = _windows_before(self._loaded_at, number, self.num_lanes)
            self._lanes[number] = Lane(self, number, self._positions[number], windows)
        return self._lanes[number]

    def _position(self, number: int) -> Position:
        """Return the position of a lane after all windows up to now, other ranks' included."""
        lane = self._lane(number)
        lane.skip_to(_windows_before(self._next_window, number, self.num_lanes))
        return [lane.epoch, lane.place, lane.taken]

    def _order(self, epoch: int) -> NDArray[np.int64]:
        """Return the chunks in the order of an epoch; lane l has every num_lanes-th from the l-th on.

        A chunk that occurs again in the epoch has len(chunks) added to its number each time.
        """
        counts = repeats(self.chunks.weights, epoch)
        number = np.arange(len(self.chunks))
        occurrences = [
            number[:0]
        ]  # not an empty list, of which concatenate would not know the dtype
        for times in range(counts.max(initial=0)):
            occurrences.append(number[counts > times] + times * len(number))
        chunks = np.concatenate(occurrences)
        if self.shuffle:
            return chunks[np.random.default_rng((self.seed, epoch)).permutation(len(chunks))]
        return chunks

    def next_place(self, lane: int, epoch: int, place: int) -> tuple[int, int]:
        """Return epoch and place of a lane's first chunk at this place of an epoch or later."""
        while place >= len(self.order(epoch)[lane :: self.num_lanes]):
            epoch = epoch + 1
            place = 0
        return epoch, place

    def request(self, lane: int, epoch: int, place: int) -> Request:
        """Return a function that returns the tokens of a lane's chunk; a worker starts on it at once."""
        numbered = int(self.order(epoch)[lane :: self.num_lanes][place])
        # How often the chunk came before in this epoch (see `_order`), and its own number.
        time, chunk = divmod(numbered, len(self.chunks))
        order: tuple[int, ...] | None = None
        if self.shuffle:
            order = (self.seed, epoch, chunk)
            if time:
                # A chunk that comes again within an epoch has its documents in another order.
                order = (*order, time)
        if not self.num_workers:
            return partial(self.reader.encode, self.chunks[chunk], order)
        with interrupts_wait(), self._worker_errors():  # it may start a worker
            self._pool = self._pool or worker_pool(self.num_workers, self.reader)
            future = self._pool.submit(encode_chunk, self.chunks[chunk], order)

        def wait() -> NDArray[np.int32]:
            with self._worker_errors():
                tokens = future.result()
            self._answered = True
            return tokens

        return wait

    @contextlib.contextmanager
    def _worker_errors(self) -> Iterator[None]:
        """Turn the errors of a pool whose workers died, or never began, into a line."""
        try:
            yield
        except (BrokenProcessPool, BrokenPipeError, EOFError):
            why = "a process that reads data died, perhaps out of memory: use fewer --data-workers"
            if not self._answered:
                why = (
                    "a process that reads data did not start: a script of your own needs `if __name__ == "
                    '"__main__":` around what it does, since each process imports it; or memory ran out: use fewer '
                    "--data-workers"
                )
            raise DataUnavailable(why) from None

    def _hash_data(self, tokenizer: Tokenizer) -> int:
        """Hash everything that a position depends on: files and chunks, tokens, windows and order."""
        chunks = self.chunks
        kind: list[object] = [
            self.seq_len,
            self.packing,
            self.seed,
            self.shuffle,
            self.num_lanes,
            self.reader.eval_fraction,
        ]
        # Only where they have an effect: other positions do not depend on them, and stay as they were.
        if self.whole or self.reader.columns:
            kind += [self.reader.truncate, dict(self.reader.columns)]
        if (chunks.weights != 1).any():
            kind.append(chunks.weights.tolist())
        if self.reader.longest < self.seq_len:
            kind.append(self.reader.longest)
        # Names without folders: a corpus may be moved between two runs.
        names = [name.rpartition("/")[2] for name in chunks.files]
        # Six bytes, which a JSON double holds exactly.
        digest = hashlib.blake2b(json.dumps([kind, names]).encode(), digest_size=6)
        raw = {}
        for name, file in tokenizer.documents().items():
            raw[name] = file.decode() if isinstance(file, bytes) else file
        digest.update(json.dumps(raw, sort_keys=True).encode())
        for array in (chunks.ranges, chunks.bounds, chunks.sizes):
            digest.update(np.ascontiguousarray(array).data)
        return int.from_bytes(digest.digest(), "big")


def merge_states(states: list[Fields]) -> Fields:
    """Combine the states of all ranks into one."""
    lanes: Fields = {}
    for state in states:
        lanes |= state["lanes"]
    return {**states[0], "lanes": lanes}


def _keeps_whole(packing: str, sources: Sequence[Source]) -> bool:
    """Return whether each document stays in one window: texts may be cut anywhere, unless packing is "none"."""
    if packing == "none":
        return True
    return packing == "documents" and not all(source.is_text for source in sources)


def _count_lanes(chunks: Chunks, lanes: int | None) -> int:
    """Return the number of lanes: no more than there are chunks in an average epoch, so that none stays empty."""
    if lanes is None:
        lanes = min(MAX_LANES, max(1, LANE_BYTES // max(1, int(chunks.sizes.max()))))
    return min(lanes, len(chunks), max(1, int(chunks.weights.sum())))


def _windows_before(window: int, lane: int, num_lanes: int) -> int:
    """Return the number of the run's first `window` windows that come from this lane."""
    # Of the windows lane, lane + L, lane + 2 L, ... those below `window`: (window - lane) / L, rounded up.
    return max(0, -((lane - window) // num_lanes))
