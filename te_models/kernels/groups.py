"""Rows of experts that lie below each other, whose numbers only the device knows."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

LINE = 128  # bytes that a GPU reads at once


@dataclass(eq=False)
class Groups:
    """Where the rows of each of E experts are: expert e has rows first[e] to first[e + 1].

    `first` is int64 [E + 1] on the device. Rows from first[E] to `most` belong to no expert.
    """

    first: Tensor
    most: int
    _tiles: dict[int, Tensor] = field(default_factory=dict)
    _parts: dict[tuple[int, int], Groups] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: list[int], device: torch.device) -> Groups:
        """Return groups of these numbers of rows."""
        return cls(_ends(torch.tensor(rows)).to(device, non_blocking=True), sum(rows))

    @classmethod
    def equal(cls, count: int, rows: int, device: torch.device) -> Groups:
        """Return `count` groups of as many rows each."""
        return cls(torch.arange(count + 1, device=device) * rows, count * rows)

    def part(self, start: int, stop: int) -> Groups:
        """Return the groups of the experts from `start` to `stop` alone, whose rows stay where they are."""
        if (start, stop) == (0, self.experts):
            return self
        if (start, stop) not in self._parts:
            self._parts[start, stop] = Groups(self.first[start : stop + 1], self.most)
        return self._parts[start, stop]

    @property
    def experts(self) -> int:
        """The number of experts."""
        return len(self.first) - 1

    @cached_property
    def apart(self) -> Groups:
        """The groups with each expert's rows from a multiple of LINE on, as transposed copies have them."""
        most = self.most + self.experts * (LINE - 1)
        return Groups(_ends(-(-self.first.diff() // LINE) * LINE), -(-most // LINE) * LINE)

    def tiles(self, height: int) -> Tensor:
        """Return the number of tiles of `height` rows of each expert and those before it, int64 [E]."""
        if height not in self._tiles:
            self._tiles[height] = (-(-self.first.diff() // height)).cumsum(0)
        return self._tiles[height]

    def high(self, height: int) -> int:
        """Return a number of tiles of `height` rows that all experts together do not exceed."""
        return -(-self.most // height) + self.experts


def _ends(rows: Tensor) -> Tensor:
    """Return 0 and the sums of rows up to each expert."""
    return F.pad(rows.cumsum(0), (1, 0))
