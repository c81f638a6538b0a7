"""Optimizers that need whole tensors, over parameters that FSDP2 shards.

Each parameter has an owner, the only rank with its whole master weight and optimizer state. Shards of the gradient
travel to the owner, which runs the optimizer as a single process would, and the new values travel back. So Muon sees
whole matrices, blocks of 8-bit moments are the same as in a single process, and a checkpoint does not depend on the
number of ranks. Every rank sends and receives 1/N of the gradients and 1/N of the values, in all-to-alls of at most
EXCHANGE_CHUNK bytes, so that beside the whole tensors themselves an exchange takes three times that.

Owners are as in Muon's first distributed versions (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon), but
chosen by size: the largest parameter first, each to the rank that owns least.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from te_models.config.chunk_sizes import EXCHANGE_CHUNK
from te_models.config.shares import share_out
from te_models.distributed.control import Ranks
from te_models.distributed.dtensor import local, shares


class Transfer(NamedTuple):
    """`size` elements that travel from one rank to another in the dtype `kind`.

    The sender has a flat `source` and the receiver a flat `target` of any dtypes; the others have None.
    """

    sender: int
    receiver: int
    size: int
    kind: torch.dtype
    source: Tensor | None
    target: Tensor | None


class Owners:
    """The owners of `parameters`, DTensors split along their first dimension, among the ranks of `group`."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, ranks: Ranks
    ) -> None:
        self.group = group
        self.ranks = ranks
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)
        self.device = local(parameters[0]).device
        # Every rank computes the same owners, without communication.
        owners = share_out([parameter.numel() for parameter in parameters], self.world)
        self._owner = {
            id(parameter): owner for parameter, owner in zip(parameters, owners, strict=True)
        }

    def of(self, parameter: nn.Parameter) -> int:
        """Return the rank that owns the parameter."""
        return self._owner[id(parameter)]

    def mine(self, parameter: nn.Parameter) -> bool:
        """Return whether this rank owns the parameter."""
        return self.of(parameter) == self.rank

    def collect(
        self,
        parameters: Sequence[nn.Parameter],
        shards: Sequence[Tensor],
        dtypes: Sequence[torch.dtype] | None = None,
    ) -> list[Tensor | None]:
        """Send this rank's `shards` to the owners; return whole tensors of the parameters that it owns, else None.

        They travel as they are, and the whole tensors have these `dtypes`; None: the shards'.
        """
        if dtypes is None:
            dtypes = [shard.dtype for shard in shards]
        wholes: list[Tensor | None] = []
        for parameter, dtype in zip(parameters, dtypes, strict=True):
            whole = None
            if self.mine(parameter):
                whole = torch.empty(parameter.shape, dtype=dtype, device=self.device)
            wholes.append(whole)
        transfers = []
        for parameter, shard, whole in zip(parameters, shards, wholes, strict=True):
            for rank, part in enumerate(_parts(parameter)):
                # Every rank lists every transfer, and has the data of its own only.
                source = shard.reshape(-1) if rank == self.rank else None
                target = None if whole is None else whole.view(-1)[part]
                size = part.stop - part.start
                transfers.append(
                    Transfer(rank, self.of(parameter), size, shard.dtype, source, target)
                )
        self._exchange(transfers)
        return wholes

    def distribute(
        self,
        parameters: Sequence[nn.Parameter],
        wholes: Sequence[Tensor],
        dtypes: Sequence[torch.dtype],
    ) -> list[Tensor]:
        """Return this rank's shard of each parameter's tensor, in these dtypes; only owners read `wholes`."""
        shards = [
            torch.empty(shares(p)[self.rank], *p.shape[1:], dtype=dtype, device=self.device)
            for p, dtype in zip(parameters, dtypes, strict=True)
        ]
        transfers = []
        for parameter, whole, shard in zip(parameters, wholes, shards, strict=True):
            for rank, part in enumerate(_parts(parameter)):
                source = whole.reshape(-1)[part] if self.mine(parameter) else None
                target = shard.view(-1) if rank == self.rank else None
                size = part.stop - part.start
                transfers.append(
                    Transfer(self.of(parameter), rank, size, shard.dtype, source, target)
                )
        self._exchange(transfers)
        return shards

    def completed(self, entries: Sequence[object], owners: Sequence[int]) -> list[Any]:
        """Return `entries` (nested dicts of tensors and numbers) with the structure of the owners' on every rank.

        Tensors that another rank owns become placeholders of their shape and dtype; `fetch` brings the values.
        """
        # Only owners have state; the others learn its shapes and dtypes from them.
        own_entries = {}
        for number, entry in enumerate(entries):
            if owners[number] == self.rank:
                own_entries[str(number)] = _describe(entry)
        known: dict[int, Any] = {}
        for entries_of_rank in self.ranks.gather(own_entries):
            for i, entry in entries_of_rank.items():
                known[int(i)] = entry
        completed: list[Any] = []
        for i, entry in enumerate(entries):
            mine = owners[i] == self.rank
            completed.append(entry if mine else _as_placeholders(known[i]))
        return completed

    def fetch(self, tensor: Tensor, owner: int) -> Tensor:
        """Return the owner's values of a tensor, on every rank; the others pass one of its shape and dtype."""
        if owner == self.rank:
            tensor = tensor.contiguous()
        else:
            tensor = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        dist.broadcast(_bytes(tensor), group=self.group, group_src=owner)
        return tensor

    def _exchange(self, transfers: Sequence[Transfer]) -> None:
        """Carry out `transfers`, of which every rank has the same list; what stays on a rank is copied there."""
        for transfer in transfers:
            if transfer.source is not None and transfer.target is not None:
                # Also from one dtype to another, as a transfer would.
                transfer.target.copy_(transfer.source)
        for pieces in _rounds([t for t in transfers if t.sender != t.receiver], self.world):
            self._send(pieces)

    def _send(self, pieces: list[tuple[Transfer, slice]]) -> None:
        """Send pieces of transfers in one all-to-all, as bytes, since they may have several dtypes."""
        outgoing = [piece for piece in pieces if piece[0].sender == self.rank]
        # The order in which all_to_all_single splits and joins its buffers; stable, so both sides agree within a rank.
        outgoing.sort(key=lambda piece: piece[0].receiver)
        incoming = [piece for piece in pieces if piece[0].receiver == self.rank]
        incoming.sort(key=lambda piece: piece[0].sender)
        sent = [0] * self.world
        received = [0] * self.world
        for transfer, part in outgoing:
            sent[transfer.receiver] += _size(transfer, part)
        for transfer, part in incoming:
            received[transfer.sender] += _size(transfer, part)
        sent_bytes = [torch.empty(0, dtype=torch.uint8, device=self.device)]  # there may be nothing
        for transfer, part in outgoing:
            if transfer.source is not None:
                sent_bytes.append(_bytes(transfer.source[part].to(transfer.kind)))
        # uint8 [bytes to all ranks]
        data = torch.cat(sent_bytes)
        del sent_bytes
        buffer = torch.empty(sum(received), dtype=torch.uint8, device=self.device)
        dist.all_to_all_single(buffer, data, received, sent, group=self.group)
        del data
        for (transfer, part), piece in zip(
            incoming, buffer.split([_size(*each) for each in incoming]), strict=True
        ):
            assert transfer.target is not None
            # Cloned, since a piece may begin at an unaligned address.
            transfer.target[part].copy_(piece.clone().view(transfer.kind))


def _size(transfer: Transfer, part: slice) -> int:
    """Return the bytes of a part of a transfer."""
    return (part.stop - part.start) * transfer.kind.itemsize


def _rounds(transfers: Sequence[Transfer], world: int) -> Iterator[list[tuple[Transfer, slice]]]:
    """Yield the parts of transfers that travel together: from and to each rank at most EXCHANGE_CHUNK bytes."""
    pieces: list[tuple[Transfer, slice]] = []
    sent = [0] * world
    received = [0] * world
    for transfer in transfers:
        start = 0
        while start < transfer.size:
            # The fuller of the two ends decides: every rank has to see the same rounds.
            room = EXCHANGE_CHUNK - max(sent[transfer.sender], received[transfer.receiver])
            part = slice(start, min(transfer.size, start + room // transfer.kind.itemsize))
            if part.stop == start:
                yield pieces
                pieces = []
                sent = [0] * world
                received = [0] * world
                continue
            pieces.append((transfer, part))
            sent[transfer.sender] += _size(transfer, part)
            received[transfer.receiver] += _size(transfer, part)
            start = part.stop
    if pieces:
        yield pieces


def placeholder(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return a tensor of zeros that takes no memory, in place of one that another rank owns."""
    return torch.zeros((), dtype=dtype, device=device).expand(torch.Size(shape))


def _parts(parameter: Tensor) -> list[slice]:
    """Return each rank's elements of the flat parameter."""
    ends = list(
        itertools.accumulate(
            torch.Size((rows, *parameter.shape[1:])).numel() for rows in shares(parameter)
        )
    )
    return [slice(start, stop) for start, stop in zip([0, *ends], ends, strict=False)]


def _bytes(tensor: Tensor) -> Tensor:
    """Return the tensor's memory as flat bytes, shared where it is contiguous."""
    return tensor.contiguous().flatten().view(torch.uint8)


def _describe(entry: object) -> dict[str, Any]:
    """Return an entry of an optimizer's state as JSON: tensors by shape, dtype and type of device."""
    if isinstance(entry, dict):
        return {"members": {name: _describe(value) for name, value in entry.items()}}
    if isinstance(entry, Tensor):
        return {
            "tensor": [
                list(entry.shape),
                str(entry.dtype).removeprefix("torch."),
                entry.device.type,
            ]
        }
    return {"value": entry}


def _as_placeholders(described: dict[str, Any]) -> Any:
    """Return the entry that `_describe` was given, with placeholders for its tensors."""
    if "members" in described:
        return {name: _as_placeholders(value) for name, value in described["members"].items()}
    if "tensor" in described:
        shape, dtype, device = described["tensor"]
        # Torch offers no other way from name to dtype.
        return placeholder(shape, getattr(torch, dtype), device)
    return described["value"]
