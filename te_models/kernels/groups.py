"""The rows of several experts in one tensor, one expert's below another's; only the device knows how many each has."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LINE = 128  # bytes that a GPU reads at once


@dataclass(eq=False)
class Groups:
    """The places of the rows of E experts: expert e has rows first[e] to first[e + 1], without the latter.

    Three experts with 3, 0 and 2 rows have first = [0, 3, 3, 5]. A router decides these numbers on the device. To read
    them there would make the host wait, so kernels and memory are sized by `most`, which the host knows.

    Attributes:
        first: int64 [E + 1] on the device.
        most: the rows of the tensor. Those from first[E] on belong to no expert.
    """

    first: Tensor
    most: int
    # Made once for all kernels of a pass: tiles by their height, parts by their first and last expert.
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
    def aligned(self) -> Groups:
        """The groups with gaps: each expert's rows begin at a multiple of LINE.

        A transposed copy [K, rows] has its rows beside each other in memory: there an expert begins with a whole line.
        """
        # Each expert gets less than one line of padding.
        most = self.most + self.experts * (LINE - 1)
        # -(-a // b) rounds a / b up.
        if self.first.is_cuda:
            first = _kernels().aligned(self.first, LINE)
        else:
            first = _ends(-(-self.first.diff() // LINE) * LINE)
        return Groups(first, -(-most // LINE) * LINE)

    def tiles(self, height: int) -> Tensor:
        """Return how many tiles of `height` rows each expert and all before it have together, int64 [E]."""
        if height not in self._tiles:
            if self.first.is_cuda:
                self._tiles[height] = _kernels().tiles(self.first, height)
            else:
                self._tiles[height] = (-(-self.first.diff() // height)).cumsum(0)
        return self._tiles[height]

    def most_tiles(self, height: int) -> int:
        """Return an upper bound, known to the host, on the tiles of `height` rows that all experts have together."""
        # Each expert has at most one tile that is not full.
        return -(-self.most // height) + self.experts


def _kernels() -> Any:
    """Return te_models.kernels.groups_triton, which only GPUs need: Triton is not everywhere."""
    return importlib.import_module("te_models.kernels.groups_triton")


def _ends(rows: Tensor) -> Tensor:
    """Return 0 and the sums of rows up to each expert."""
    return F.pad(rows.cumsum(0), (1, 0))
