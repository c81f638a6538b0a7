"""Ranks that are not there: the mesh and the group of a model that runs without data for the memory plan."""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True)
class PlannedRanks:
    """Ranks as the plan needs them, of which this process is the first: a DeviceMesh of one dimension, and its group.

    Collectives among them (te_models.distributed.collectives) allocate their results and send nothing.
    """

    count: int
    ndim: int = 1

    def size(self) -> int:
        """The number of ranks."""
        return self.count

    def get_local_rank(self) -> int:
        """This rank's number."""
        return 0

    def get_group(self) -> Any:
        """The process group, which is this object too."""
        return self


def world_size(group: Any) -> int:
    """Return the number of ranks of a process group; None: of all processes."""
    return group.count if isinstance(group, PlannedRanks) else dist.get_world_size(group)
