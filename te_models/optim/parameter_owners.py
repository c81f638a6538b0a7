"""Optimizers that need whole tensors, over parameters that FSDP2 shards.

Each parameter has an owner, the only rank with its whole master weight and optimizer state. Shards of the gradient
travel to the owner, which runs the optimizer as a single process would, and the new values travel back. So Muon sees
whole matrices, blocks of 8-bit moments are those of a single process, and a checkpoint does not depend on the number of
ranks. Every rank sends and receives 1/N of the gradients and 1/N of the values, in one all-to-all each way per chunk.

Owners are as in Muon's first distributed versions (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon), but
chosen by size: the largest parameter first, each to the rank that owns least.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from te_models.distributed.control import Ranks
from te_models.distributed.dtensor import local, shares


class Owners:
    """The owners of `parameters`, DTensors split along their first dimension, among the ranks of `group`."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, ranks: Ranks) -> None:
        self.group, self.ranks = group, ranks
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.device = local(parameters[0]).device
        self._owner: dict[int, int] = {}
        owned = [0] * self.world  # elements per rank
        for parameter in sorted(parameters, key=lambda p: -p.numel()):
            owner = owned.index(min(owned))
            owned[owner] += parameter.numel()
            self._owner[id(parameter)] = owner

    def of(self, parameter: nn.Parameter) -> int:
        """Return the rank that owns the parameter."""
        return self._owner[id(parameter)]

    def mine(self, parameter: nn.Parameter) -> bool:
        """Return whether this rank owns the parameter."""
        return self.of(parameter) == self.rank

    def collect(self, parameters: Sequence[nn.Parameter], own: Sequence[Tensor]) -> list[Tensor | None]:
        """Send this rank's shards `own` to the owners; return the whole tensors of its own parameters, or None."""
        outgoing: list[list[Tensor]] = [[] for _ in range(self.world)]
        for parameter, tensor in zip(parameters, own, strict=True):
            outgoing[self.of(parameter)].append(tensor)
        kinds = [(p, t.dtype) for p, t in zip(parameters, own, strict=True) if self.mine(p)]
        incoming = self._exchange(outgoing, [[(_shard_shape(p, r), d) for p, d in kinds] for r in range(self.world)])
        wholes = iter([torch.cat(pieces) for pieces in zip(*incoming, strict=True)])
        return [next(wholes) if self.mine(parameter) else None for parameter in parameters]

    def distribute(
        self, parameters: Sequence[nn.Parameter], wholes: Sequence[Tensor], dtypes: Sequence[torch.dtype]
    ) -> list[Tensor]:
        """Return this rank's shard of each parameter's tensor, in these dtypes; only owners read `wholes`."""
        kinds = list(zip(parameters, dtypes, strict=True))
        mine = [
            (p, whole.to(dtype).split(shares(p)))
            for (p, dtype), whole in zip(kinds, wholes, strict=True)
            if self.mine(p)
        ]
        outgoing = [[pieces[rank] for _, pieces in mine] for rank in range(self.world)]
        expected = [[(_shard_shape(p, self.rank), d) for p, d in kinds if self.of(p) == r] for r in range(self.world)]
        incoming = [iter(tensors) for tensors in self._exchange(outgoing, expected)]
        return [next(incoming[self.of(parameter)]) for parameter in parameters]

    def completed(self, entries: Sequence[Any], owners: Sequence[int]) -> list[Any]:
        """Return `entries` (nested dicts of tensors and numbers) with the structure of the owners' on every rank.

        Tensors that another rank owns become placeholders of their shape and dtype; `fetch` brings the values.
        """
        own = {str(i): _describe(entry) for i, entry in enumerate(entries) if owners[i] == self.rank}
        known = {int(i): entry for found in self.ranks.gather(own) for i, entry in found.items()}
        return [entry if owners[i] == self.rank else _as_placeholders(known[i]) for i, entry in enumerate(entries)]

    def fetch(self, tensor: Tensor, owner: int) -> Tensor:
        """Return the owner's values of a tensor, on every rank; the others pass one of its shape and dtype."""
        if owner == self.rank:
            tensor = tensor.contiguous()
        else:
            tensor = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        dist.broadcast(_bytes(tensor), group=self.group, group_src=owner)
        return tensor

    def _exchange(
        self, outgoing: list[list[Tensor]], expected: list[list[tuple[Any, torch.dtype]]]
    ) -> list[list[Tensor]]:
        """Send each rank its tensors; return those from each rank, of the `expected` shapes and dtypes.

        They travel as bytes, since a chunk may mix dtypes.
        """
        nothing = torch.empty(0, dtype=torch.uint8, device=self.device)
        sent = [torch.cat([nothing, *map(_bytes, ts)]) for ts in outgoing]
        sizes = [[torch.Size(shape).numel() * dtype.itemsize for shape, dtype in kinds] for kinds in expected]
        received = torch.empty(sum(map(sum, sizes)), dtype=torch.uint8, device=self.device)
        splits = [sum(each) for each in sizes], [len(part) for part in sent]
        dist.all_to_all_single(received, torch.cat(sent), *splits, group=self.group)
        pieces = iter(received.split([size for each in sizes for size in each]))
        return [[next(pieces).clone().view(dtype).view(shape) for shape, dtype in kinds] for kinds in expected]


def placeholder(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return a tensor of zeros that takes no memory, in place of one that another rank owns."""
    return torch.zeros((), dtype=dtype, device=device).expand(torch.Size(shape))


def _shard_shape(parameter: Tensor, rank: int) -> torch.Size:
    return torch.Size((shares(parameter)[rank], *parameter.shape[1:]))


def _bytes(tensor: Tensor) -> Tensor:
    """Return the tensor's memory as flat bytes, shared where it is contiguous."""
    return tensor.contiguous().flatten().view(torch.uint8)


def _describe(entry: Any) -> Any:
    """Return an entry of an optimizer's state as JSON: tensors by shape, dtype and type of device."""
    if isinstance(entry, dict):
        return {"members": {name: _describe(value) for name, value in entry.items()}}
    if isinstance(entry, Tensor):
        return {"tensor": [list(entry.shape), str(entry.dtype).removeprefix("torch."), entry.device.type]}
    return {"value": entry}


def _as_placeholders(described: dict[str, Any]) -> Any:
    """Return the entry that `_describe` was given, with placeholders for its tensors."""
    if "members" in described:
        return {name: _as_placeholders(value) for name, value in described["members"].items()}
    if "tensor" in described:
        shape, dtype, device = described["tensor"]
        return placeholder(shape, getattr(torch, dtype), device)  # torch offers no other way from name to dtype
    return described["value"]
