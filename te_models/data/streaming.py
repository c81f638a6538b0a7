"""A corpus larger than memory to batches, on any number of ranks, with exact resume on any other number.

The blocks of the corpus (te_models.data.corpus_chunks) are permuted by (seed, epoch) and dealt out to L **lanes**; a lane reads its
blocks one after another, the documents of each permuted by (seed, epoch, block), and cuts the tokens into windows without
end: its next epoch begins where its last one stopped. So in each epoch each document comes exactly once, in one lane.

Window n of the run is the next one of lane n mod L, whatever the number of ranks: rank r of W takes the windows n with
n mod W = r, and reads the lanes that these come from and no others. L follows from the data alone. So the batches of all
ranks together, and the position, do not depend on W, and the position is: n, and for each lane its epoch, its block and
the tokens taken from it. Fixing such a number apart from the ranks is the idea of MosaicML's `num_canonical_nodes`.

Worker processes read and encode the next block of each lane in advance. They hold no state, so nothing depends on them.
"""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from te_models.data.corpus_chunks import BLOCK_BYTES, FIRST, LEARNT, BlockReader, Blocks, Piece, find_blocks
from te_models.data.dataset import Document, check_windows, pack_window, stack_windows
from te_models.data.tokenizer import Tokenizer
from te_models.distributed.control import Ranks

MAX_LANES = 64
HELD_BYTES = 2**30  # of text in all lanes of one process, which bounds their number where blocks are large

Position = list[int]  # epoch, which of the lane's blocks in it, and how many of that block's tokens are taken
Request = Callable[[], NDArray[np.int32]]


class StreamingDataset:
    """An endless iterator of batches as TokenDataset's, of a corpus that is read as it goes.

    Args:
        path: a file, folder, glob or URL of JSONL, Parquet or text files (te_models.data.corpus_chunks.find_blocks).
        tokenizer: must have an end-of-text token.
        seq_len: tokens a window.
        batch_size: windows a batch, of each rank.
        seed: of the order, together with the epoch.
        packing: "stream", or "documents" to keep attention inside each document.
        shuffle: False keeps the order of the files, in one lane.
        eval_fraction: the share of documents, chosen by content, that is left out for `held_out`.
        num_lanes: how many blocks are read at a time, over all ranks; None: 64, or fewer where there are fewer blocks or
            where so many would hold more than 1 GiB of text. Ranks read disjoint lanes if world_size divides it.
        num_workers: processes that encode ahead; 0 encodes when a block is needed. No batch depends on it.
        rank: which of the processes this is.
        world_size: how many processes share the data.
        ranks: all processes of the run, which `state_dict` asks for the positions of their lanes; None: this one only.
        block_bytes: text a block, about.

    Raises:
        ValueError: no files, several formats, unreadable files, or sizes out of range.
    """

    def __init__(
        self,
        path: str,
        tokenizer: Tokenizer,
        seq_len: int,
        *,
        batch_size: int,
        seed: int,
        packing: str = "stream",
        shuffle: bool = True,
        eval_fraction: float = 0.0,
        num_lanes: int | None = None,
        num_workers: int = 0,
        rank: int = 0,
        world_size: int = 1,
        ranks: Ranks | None = None,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        check_windows(seq_len, batch_size, packing)
        some_lanes = num_lanes is None or num_lanes > 0
        if not (0 <= rank < world_size and 0 <= eval_fraction < 1 and num_workers >= 0 and some_lanes):
            raise ValueError(
                f"rank={rank}, world_size={world_size}, eval_fraction={eval_fraction}, num_workers={num_workers} or "
                f"num_lanes={num_lanes} is out of range: give 0 <= rank < world_size, a share below 1, 0 or more workers "
                "and 1 or more lanes"
            )
        self.seq_len, self.batch_size, self.seed, self.packing = seq_len, batch_size, seed, packing
        self.shuffle, self.rank, self.world_size, self.num_workers = shuffle, rank, world_size, num_workers
        self.blocks = find_blocks(path, block_bytes)
        self.num_lanes = _count_lanes(self.blocks, num_lanes) if shuffle else 1
        side = "train" if eval_fraction else "all"
        self.reader = BlockReader(self.blocks.source, tokenizer, seed, eval_fraction, side)
        self._ranks = ranks or Ranks()
        self._fingerprint = self._hash_data(tokenizer)
        self._pool: ProcessPoolExecutor | None = None
        self._lanes: dict[int, Lane] = {}
        self._positions: list[Position] = [[0, 0, 0] for _ in range(self.num_lanes)]
        self._loaded_at = self._next_window = 0  # windows counted over all epochs, lanes and ranks
        self.order = lru_cache(maxsize=4)(self._order)

    def describe(self) -> str:
        """The corpus in one line."""
        blocks, size = self.blocks, f"{int(self.blocks.sizes.sum()) / 2**20:,.1f} MiB of {self.blocks.format}"
        return f"{size} in {len(blocks.files):,} files, streamed in {self.num_lanes} lanes from {blocks.source}"

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """The dataset itself: a second iterator goes on where the first one stopped."""
        return self

    def __next__(self) -> dict[str, Tensor]:
        """This rank's next batch."""
        if not self._lanes:  # the workers begin with all of them, rather than with the second block of the first
            for lane in self._mine:
                self._lane(lane)
        first = self._next_window + self.rank
        windows = [divmod(first + i * self.world_size, self.num_lanes) for i in range(self.batch_size)]
        rows = [self._lane(lane).window(index) for index, lane in windows]
        self._next_window += self.batch_size * self.world_size
        return stack_windows([pack_window(*row, self.packing) for row in rows])

    def state_dict(self) -> dict[str, Any]:
        """Return the positions of all lanes; every rank must call it, since ranks exchange the positions of their lanes.

        Without `ranks` it contains only this rank's lanes: see `merge_states`.
        """
        positions = {str(lane): self._position(lane) for lane in self._mine}
        positions = {lane: place for part in self._ranks.gather(positions) for lane, place in part.items()}
        return {"windows": self._next_window, "fingerprint": self._fingerprint, "lanes": positions}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the batches that would have come after `state` was taken, on whatever ranks it was.

        Raises:
            ValueError: the state is of other data, another tokenizer, seq_len, packing, seed or number of lanes, or
                lacks the lanes of some ranks.
        """
        if state["fingerprint"] != self._fingerprint:
            raise ValueError(
                "the saved data position is of other data: resume with the same --data, --tokenizer, --seq-len, --packing "
                "and --seed, or start a new run"
            )
        if len(state["lanes"]) != self.num_lanes:
            raise ValueError(
                f"the saved data position has {len(state['lanes'])} of {self.num_lanes} lanes: it is of one rank alone; "
                "call state_dict on every rank"
            )
        self._positions = [list(state["lanes"][str(lane)]) for lane in range(self.num_lanes)]
        self._loaded_at = self._next_window = state["windows"]
        self._lanes = {}

    def held_out(self, num_tokens: int) -> list[Document]:
        """Documents of the `eval_fraction` left out, at least about `num_tokens` tokens of them if there are so many.

        The same on every rank. Reads blocks in an order of their own until it has enough: 1 / eval_fraction times as
        much text as it returns.

        Raises:
            ValueError: no document falls to evaluation.
        """
        reader = BlockReader(
            self.blocks.source, self.reader.tokenizer, self.seed, self.reader.eval_fraction, side="eval"
        )
        found: list[Document] = []
        held = 0
        for block in np.random.default_rng((self.seed, 0, 0)).permutation(len(self.blocks)):
            for document in reader.documents(self.blocks[block]):
                found.append(document)
                held += len(document.text) + len(document.prompt or "")
            if held >= 8 * num_tokens:  # a token is seldom longer than 8 characters
                break
        if not found:
            raise ValueError(
                f"{self.blocks.source}: none of its documents falls to evaluation (a share of "
                f"{self.reader.eval_fraction:g}): leave out --streaming or give more data"
            )
        return found

    def close(self) -> None:
        """End the worker processes; the iterator can go on, and starts them again."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
            for lane in self._lanes.values():
                lane.ahead = None

    @property
    def _mine(self) -> range:
        """The lanes that this rank's windows come from."""
        stride = math.gcd(self.num_lanes, self.world_size)
        return range((self._next_window + self.rank) % stride, self.num_lanes, stride)

    def _lane(self, number: int) -> Lane:
        if number not in self._lanes:
            given = _windows_before(self._loaded_at, number, self.num_lanes)
            self._lanes[number] = Lane(self, number, self._positions[number], given)
        return self._lanes[number]

    def _position(self, number: int) -> Position:
        """Where a lane stands once all windows up to now are taken from it, those of other ranks too."""
        lane = self._lane(number)
        lane.skip_to(_windows_before(self._next_window, number, self.num_lanes))
        return [lane.epoch, lane.place, lane.taken]

    def _order(self, epoch: int) -> NDArray[np.int64]:
        """The blocks in the order of an epoch; lane l has every num_lanes-th from the l-th on."""
        if not self.shuffle:
            return np.arange(len(self.blocks))
        return np.random.default_rng((self.seed, epoch)).permutation(len(self.blocks))

    def request(self, lane: int, epoch: int, place: int) -> Request:
        """What returns the tokens of a lane's block; workers begin with it at once."""
        block = int(self.order(epoch)[lane :: self.num_lanes][place])
        order = (self.seed, epoch, block) if self.shuffle else None
        if not self.num_workers:
            return partial(self.reader.encode, self.blocks[block], order)
        if self._pool is None:
            self._pool = _start_pool(self.num_workers, self.reader)
        future = self._pool.submit(_encode, self.blocks[block], order)

        def wait() -> NDArray[np.int32]:
            try:
                return future.result()
            except BrokenProcessPool:
                raise OSError(
                    "a process that reads data died, perhaps for want of memory: use fewer --data-workers"
                ) from None

        return wait

    def _hash_data(self, tokenizer: Tokenizer) -> int:
        """What a position is relative to: files and blocks, tokens, windows and order."""
        blocks = self.blocks
        kind = [self.seq_len, self.packing, self.seed, self.shuffle, self.num_lanes, self.reader.eval_fraction]
        names = [name.rpartition("/")[2] for name in blocks.files]
        digest = hashlib.blake2b(json.dumps([kind, names]).encode(), digest_size=6)  # exact in a JSON double
        digest.update(json.dumps(tokenizer.documents(), sort_keys=True).encode())
        for array in (blocks.pieces, blocks.bounds, blocks.sizes):
            digest.update(np.ascontiguousarray(array).data)
        return int.from_bytes(digest.digest(), "big")


class Lane:
    """An endless stream of windows from every num_lanes-th block, and its position."""

    def __init__(self, data: StreamingDataset, number: int, position: Position, given: int) -> None:
        self.data, self.number, self.given = data, number, given
        self.epoch, self.place, self.taken = position
        self._block: NDArray[np.int32] | None = None
        self.ahead: Request | None = data.request(number, self.epoch, self.place)

    def window(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]]:
        """Window `index` of this lane, no earlier than the last: ids, which are learnt and which begin a document."""
        self.skip_to(index)
        ids, flags = np.concatenate(list(self._take(self.data.seq_len)), axis=1)
        self.given += 1
        return ids.astype(np.int64), (flags & LEARNT).astype(bool), (flags & FIRST).astype(bool)

    def skip_to(self, index: int) -> None:
        """Pass over the windows before `index`, which are other ranks'."""
        for _ in self._take((index - self.given) * self.data.seq_len):
            pass
        self.given = index

    def _take(self, count: int) -> Iterator[NDArray[np.int32]]:
        """The next `count` tokens, in parts of one block each."""
        while count > 0:
            part = self._tokens_left()[:, :count]
            self.taken += part.shape[1]
            count -= part.shape[1]
            yield part

    def _tokens_left(self) -> NDArray[np.int32]:
        """What is left of the block at the position; moves on to the next block that has some."""
        for _ in range(64 + 16 * len(self.data.blocks)):
            if self._block is None:
                self._block = (self.ahead or self.data.request(self.number, self.epoch, self.place))()
                self.ahead = self.data.request(self.number, *self._next_place())
            if self.taken < self._block.shape[1]:
                return self._block[:, self.taken :]
            (self.epoch, self.place), self.taken, self._block = self._next_place(), 0, None
        raise ValueError(f"{self.data.blocks.source}: there is no text in it; give JSONL, Parquet or text with some")

    def _next_place(self) -> tuple[int, int]:
        count = len(range(self.number, len(self.data.blocks), self.data.num_lanes))
        return (self.epoch, self.place + 1) if self.place + 1 < count else (self.epoch + 1, 0)


def merge_states(states: list[dict[str, Any]]) -> dict[str, Any]:
    """The state of all ranks from one of each; `StreamingDataset.state_dict` does it over the process group."""
    return {**states[0], "lanes": {lane: at for state in states for lane, at in state["lanes"].items()}}


def _count_lanes(blocks: Blocks, wanted: int | None) -> int:
    if wanted is None:
        wanted = min(MAX_LANES, max(1, HELD_BYTES // int(blocks.sizes.max())))
    return min(wanted, len(blocks))


def _windows_before(window: int, lane: int, num_lanes: int) -> int:
    """How many of the run's first `window` windows are from this lane."""
    return max(0, -((lane - window) // num_lanes))


def _start_pool(num_workers: int, reader: BlockReader) -> ProcessPoolExecutor:
    """Workers that share no thread, lock or device with this process: it may already use CUDA."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["te_models.data.corpus_chunks"])
    return ProcessPoolExecutor(num_workers, context, _start_worker, (reader,))


_READER: list[BlockReader] = []  # of this worker process


def _start_worker(reader: BlockReader) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    os.setpgrp()  # Ctrl-C and torchrun signal the group; a run that stops cleanly still needs its next batch
    _READER[:] = [reader]
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    """End with the process that started this one, even if that is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode(block: list[Piece], order: tuple[int, ...] | None) -> NDArray[np.int32]:
    return _READER[0].encode(block, order)
