"""The processes of one job and what they tell each other beside tensors: JSON values, decisions of the first, votes.

They talk over a gloo group of their own, on the CPU, whose timeout is long: waiting for a checkpoint to reach a slow disk
must not look like the death of a peer, which the group of the gradients reports within a minute. Values travel as JSON in
tensors of bytes; torch's own object collectives would send pickles.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks:
    """Rank `rank` of `world`; without a group it is alone, and nothing is ever sent."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.world = dist.get_world_size(group) if group is not None else 1

    @property
    def first(self) -> bool:
        """Whether this is the one that logs, prints and names checkpoints."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """The JSON values of all ranks, in their order; everybody gets them."""
        if self.world == 1:
            return [value]
        mine = _encoded(value)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([len(mine)]), group=self.group)
        room = max(int(size) for size in sizes)
        parts = [torch.zeros(room, dtype=torch.uint8) for _ in range(self.world)]
        padded = torch.zeros(room, dtype=torch.uint8)
        padded[: len(mine)] = mine
        dist.all_gather(parts, padded, group=self.group)
        return [_decoded(part[: int(size)]) for part, size in zip(parts, sizes, strict=True)]

    def from_first(self, action: Callable[[], Any], error: type[Exception] = RuntimeError) -> Any:
        """What `action`, which rank 0 alone runs, returns there (a JSON value), on every rank.

        Raises:
            error: it raised, on every rank; the ranks that only heard of it say so.
        """
        if self.world == 1:
            return action()
        value, failure, cause = None, None, None
        if self.first:
            try:
                value = action()
            except Exception as problem:
                failure, cause = str(problem) or type(problem).__name__, problem
        value, failure = self._broadcast([value, failure])
        if cause is not None:
            raise cause
        if failure is not None:
            raise error(f"rank 0: {failure}")
        return value

    def _broadcast(self, value: Any) -> Any:
        mine = _encoded(value)
        size = torch.tensor([len(mine)])
        dist.broadcast(size, group=self.group, group_src=0)
        text = mine if self.first else torch.zeros(int(size), dtype=torch.uint8)
        dist.broadcast(text, group=self.group, group_src=0)
        return _decoded(text)


def _encoded(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decoded(text: Tensor) -> Any:
    return json.loads(text.numpy().tobytes())
