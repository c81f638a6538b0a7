"""Rows of experts that lie below each other, whose numbers only the device knows."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Groups(NamedTuple):
    """Where the rows of each of E experts are: those of expert e are rows first[e] to first[e + 1].

    `first` is int64 [E + 1] on the device. Rows from first[E] to `most` belong to no expert.
    """

    first: Tensor
    most: int

    @classmethod
    def of(cls, rows: list[int], device: torch.device) -> Groups:
        """Return groups of these numbers of rows."""
        return cls(F.pad(torch.tensor(rows).cumsum(0), (1, 0)).to(device, non_blocking=True), sum(rows))

    @classmethod
    def equal(cls, count: int, rows: int, device: torch.device) -> Groups:
        """Return `count` groups of as many rows each."""
        return cls(torch.arange(count + 1, device=device) * rows, count * rows)

    @property
    def experts(self) -> int:
        """The number of experts."""
        return len(self.first) - 1

    def tiles(self, height: int) -> Tensor:
        """Return the number of tiles of `height` rows of each expert and those before it, int64 [E]."""
        return ((self.first.diff() + (height - 1)) // height).cumsum(0)

    def high(self, height: int) -> int:
        """Return a number of tiles of `height` rows that all experts together do not exceed."""
        return -(-self.most // height) + self.experts
