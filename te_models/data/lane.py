"""A lane of a streamed corpus (te_models.data.streaming): an endless series of windows from some of its chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from te_models.data.packing import Marked
from te_models.errors import DataError

if TYPE_CHECKING:
    from te_models.data.streaming import StreamingDataset

# Epoch, which of the lane's chunks in it, and how many of that chunk's tokens are taken.
Position = list[int]
Request = Callable[[], NDArray[np.int32]]


class Lane:
    """An endless stream of windows from every num_lanes-th chunk, and its position."""

    def __init__(
        self, data: StreamingDataset, number: int, position: Position, windows: int
    ) -> None:
        self.data = data
        self.number = number
        self.windows = windows
        self.epoch, self.place, self.taken = position
        # At the start of a chunk; inside one, the saved place has a chunk for certain.
        if not self.taken:
            self.epoch, self.place = data.next_place(number, self.epoch, self.place)
        self._chunk: NDArray[np.int32] | None = None
        self.ahead: Request | None = data.request(number, self.epoch, self.place)

    def window(self, index: int) -> Marked:
        """Return window `index`, which is no earlier than the last."""
        self.skip_to(index)
        ids, flags = np.concatenate(list(self._take(self.data.seq_len)), axis=1)
        self.windows += 1
        return ids.astype(np.int64), flags

    def skip_to(self, index: int) -> None:
        """Skip the windows before `index`, which belong to other ranks."""
        for _ in self._take((index - self.windows) * self.data.seq_len):
            pass
        self.windows = index

    def _take(self, count: int) -> Iterator[NDArray[np.int32]]:
        """Yield the next `count` tokens, in parts of one chunk each."""
        while count > 0:
            part = self._tokens_left()[:, :count]
            self.taken += part.shape[1]
            count -= part.shape[1]
            yield part

    def _tokens_left(self) -> NDArray[np.int32]:
        """Return the rest of the chunk at the position, or the next chunk that has tokens."""
        # A chunk whose documents are all held out or too long has no tokens; of such chunks alone this would not end.
        for _ in range(64 + 16 * len(self.data.chunks)):
            if self._chunk is None:
                wait = self.ahead or self.data.request(self.number, self.epoch, self.place)
                self._chunk = wait()
                # Ask for the next chunk now: a worker encodes it while this one is used.
                epoch, place = self._next_place()
                self.ahead = self.data.request(self.number, epoch, place)
            if self.taken < self._chunk.shape[1]:
                return self._chunk[:, self.taken :]
            self.epoch, self.place = self._next_place()
            self.taken = 0
            self._chunk = None
        raise DataError(
            f"{self.data.chunks.source}: there is no text in it, or no record fits seq_len={self.data.seq_len}; give "
            "JSONL, Parquet or text with some"
        )

    def _next_place(self) -> tuple[int, int]:
        return self.data.next_place(self.number, self.epoch, self.place + 1)
