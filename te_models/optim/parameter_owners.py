"""Optimizers that need whole tensors, over parameters that lie in pieces on several ranks (FSDP2).

Each parameter has an owner, which alone keeps its master and its optimizer state, whole: gradients travel there, piece by
piece, the owner's optimizer does what it does in one process, and the new values travel back. So Muon sees whole matrices,
blocks of 8-bit moments lie as they lie in one process, and a checkpoint's state is the same whoever made it. Every rank
sends and receives 1/N of the gradients and 1/N of the values, all owners at once (one all-to-all each way a chunk).

Owners are as Muon's first distributed versions have them (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon),
but chosen by size: the largest parameter first, each to the rank that owns least.
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
    """Which rank of `group` owns which of `parameters`, DTensors cut along their first dimension."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: Any, ranks: Ranks) -> None:
        self.group, self.ranks = group, ranks
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.device = local(parameters[0]).device
        self._owner: dict[int, int] = {}
        held = [0] * self.world
        for parameter in sorted(parameters, key=lambda p: -p.numel()):
            owner = held.index(min(held))
            held[owner] += parameter.numel()
            self._owner[id(parameter)] = owner

    def of(self, parameter: nn.Parameter) -> int:
        """The rank that owns the parameter."""
        return self._owner[id(parameter)]

    def mine(self, parameter: nn.Parameter) -> bool:
        """Whether this rank owns the parameter."""
        return self.of(parameter) == self.rank

    def collect(self, parameters: Sequence[nn.Parameter], own: Sequence[Tensor]) -> list[Tensor | None]:
        """For each parameter the whole tensor of which `own` holds this rank's pieces; None where another rank owns it."""
        outgoing: list[list[Tensor]] = [[] for _ in range(self.world)]
        for parameter, tensor in zip(parameters, own, strict=True):
            outgoing[self.of(parameter)].append(tensor)
        kinds = [(p, t.dtype) for p, t in zip(parameters, own, strict=True) if self.mine(p)]
        incoming = self._exchange(outgoing, [[(_piece(p, r), dtype) for p, dtype in kinds] for r in range(self.world)])
        wholes = iter([torch.cat(pieces) for pieces in zip(*incoming, strict=True)])
        return [next(wholes) if self.mine(parameter) else None for parameter in parameters]

    def distribute(
        self, parameters: Sequence[nn.Parameter], wholes: Sequence[Tensor], dtypes: Sequence[torch.dtype]
    ) -> list[Tensor]:
        """This rank's piece of each parameter's tensor, in these dtypes; `wholes` are read on their owners alone."""
        kinds = list(zip(parameters, dtypes, strict=True))
        mine = [
            (p, whole.to(dtype).split(shares(p)))
            for (p, dtype), whole in zip(kinds, wholes, strict=True)
            if self.mine(p)
        ]
        outgoing = [[pieces[rank] for _, pieces in mine] for rank in range(self.world)]
        expected = [[(_piece(p, self.rank), d) for p, d in kinds if self.of(p) == r] for r in range(self.world)]
        incoming = [iter(tensors) for tensors in self._exchange(outgoing, expected)]
        return [next(incoming[self.of(parameter)]) for parameter in parameters]

    def completed(self, entries: Sequence[Any], owners: Sequence[int]) -> list[Any]:
        """`entries`, nested dicts of tensors and numbers of which every rank has those it owns, with all ranks' shapes:
        where another rank owns a tensor, one of its shape and dtype without memory (`fetch` gives its values)."""
        own = {str(i): _described(entry) for i, entry in enumerate(entries) if owners[i] == self.rank}
        known = {int(i): entry for found in self.ranks.gather(own) for i, entry in found.items()}
        return [entry if owners[i] == self.rank else _without_memory(known[i]) for i, entry in enumerate(entries)]

    def fetch(self, tensor: Tensor, owner: int) -> Tensor:
        """The values that `owner` has of a tensor, on every rank; the others give one of its shape and dtype."""
        tensor = (
            tensor.contiguous()
            if owner == self.rank
            else torch.empty_like(tensor, memory_format=torch.contiguous_format)
        )
        dist.broadcast(_bytes(tensor), group=self.group, group_src=owner)
        return tensor

    def _exchange(
        self, outgoing: list[list[Tensor]], expected: list[list[tuple[Any, torch.dtype]]]
    ) -> list[list[Tensor]]:
        """Send each rank its tensors; returns those from each rank, of the `expected` shapes and dtypes. As bytes, since
        a chunk may hold several dtypes."""
        nothing = torch.empty(0, dtype=torch.uint8, device=self.device)
        sent = [torch.cat([nothing, *map(_bytes, ts)]) for ts in outgoing]
        sizes = [[torch.Size(shape).numel() * dtype.itemsize for shape, dtype in kinds] for kinds in expected]
        received = torch.empty(sum(map(sum, sizes)), dtype=torch.uint8, device=self.device)
        splits = [sum(each) for each in sizes], [len(part) for part in sent]
        dist.all_to_all_single(received, torch.cat(sent), *splits, group=self.group)
        pieces = iter(received.split([size for each in sizes for size in each]))
        return [[next(pieces).clone().view(dtype).view(shape) for shape, dtype in kinds] for kinds in expected]


def placeholder(shape: Sequence[int], dtype: torch.dtype, device: Any) -> Tensor:
    """A tensor of zeros that takes no memory, in place of one that another rank owns."""
    return torch.zeros((), dtype=dtype, device=device).expand(torch.Size(shape))


def _piece(parameter: Tensor, rank: int) -> torch.Size:
    """The shape of that rank's piece."""
    return torch.Size((shares(parameter)[rank], *parameter.shape[1:]))


def _bytes(tensor: Tensor) -> Tensor:
    """The tensor's memory, flat; of the same memory where it is contiguous."""
    return tensor.contiguous().flatten().view(torch.uint8)


def _described(entry: Any) -> Any:
    """What an entry of an optimizer's state is, as JSON: tensors by shape, dtype and kind of device."""
    if isinstance(entry, dict):
        return {"members": {name: _described(value) for name, value in entry.items()}}
    if isinstance(entry, Tensor):
        return {"tensor": [list(entry.shape), str(entry.dtype).removeprefix("torch."), entry.device.type]}
    return {"value": entry}


def _without_memory(described: dict[str, Any]) -> Any:
    """The entry that `_described` told of, its tensors placeholders."""
    if "members" in described:
        return {name: _without_memory(value) for name, value in described["members"].items()}
    if "tensor" in described:
        shape, dtype, device = described["tensor"]
        return placeholder(shape, getattr(torch, dtype), device)
    return described["value"]
