"""The ranks of a DeviceMesh of one dimension that share a model."""

from dataclasses import dataclass

from torch.distributed import ProcessGroup, barrier
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Self

from te_models.errors import UsageError


@dataclass(frozen=True)
class MeshRanks:
    """Base of what has a `mesh`; None stands for one rank. A copy of a model shares it."""

    mesh: DeviceMesh | None

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def check(self, name: str, ranks: str, alone: str) -> None:
        """Raise a UsageError for a mesh `name` that is not one of these `ranks`, or `alone` where there is none."""
        dimensions = 1 if self.mesh is None else self.mesh.ndim
        wrong = f"{name} has {dimensions} dimensions: give the one of {ranks}"
        if self.mesh is None and bool(alone):
            raise UsageError(alone)
        if dimensions != 1:
            raise UsageError(wrong)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return 1 if self.mesh is None else self.mesh.size()

    @property
    def rank(self) -> int:
        """This rank's number among them."""
        return 0 if self.mesh is None else self.mesh.get_local_rank()

    @property
    def group(self) -> ProcessGroup | None:
        """Their process group."""
        return None if self.mesh is None else self.mesh.get_group()

    def wait(self) -> None:
        """Wait until all ranks are here."""
        if self.size > 1:
            barrier(self.group)
