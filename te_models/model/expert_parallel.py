"""Expert parallelism of a CausalLM: each of several ranks holds some of every layer's experts and all other parameters.

Rank r of n has the experts from r * E / n on, as weights 0 to E / n - 1 of its te.GroupedLinears; each rank has tokens
of its own. A layer sends the rows of its tokens to the ranks of their experts and gets the experts' outputs back
(`Exchange`), or gives all tokens to all ranks (`GatheredTokens`). Each expert's rows are in the order of ranks and then
of tokens, as in one process that has all tokens.

Whatever holds one tensor per parameter (a state, an optimizer, a folder) has the names and the order of the whole
model: `every` lists them, with stand-ins for the experts of other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from te_models.config.layer import LayerSpec
from te_models.config.model import ModelConfig
from te_models.config.moe import with_local_experts
from te_models.config.recipe import Recipe
from te_models.distributed.collectives import all_gather, all_to_all
from te_models.distributed.mesh_ranks import MeshRanks
from te_models.errors import UsageError
from te_models.kernels.expert_rows import RowKernels
from te_models.model.gathered_tokens import MOST_RANKS, GatheredTokens, packed, unpacked
from te_models.model.router import Places
from te_models.model.tensor_parallel import Mapped

T = TypeVar("T")


@dataclass(frozen=True)
class ExpertParallel(MeshRanks):
    """The ranks that share the experts of a model; `mesh` None: one rank, which has all of them."""

    config: ModelConfig
    fp8: bool = False  # whether rows are sent to experts in FP8
    # The ranks that have the same experts, and share their amaxes.
    replicas: DeviceMesh | None = None

    def __post_init__(self) -> None:
        alone = "ep_fp8=True sends tokens to the ranks of ep_mesh in FP8: give ep_mesh"
        self.check("ep_mesh", "the experts, mesh['ep']", alone if self.fp8 else "")

    def local(self, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
        """Return the layers with one rank's experts.

        Raises:
            UsageError: there are none, or they cannot be divided evenly.
        """
        return layers if self.size == 1 else with_local_experts(layers, self.size)

    def check_recipe(self, recipe: Recipe, fp8_params: bool) -> None:
        """Raise if experts on different ranks could not have the scales that they have on one."""
        if self.size == 1:
            return
        if fp8_params:
            raise UsageError(
                "--fp8-params needs scales that all ranks share, which experts on different ranks have not: use "
                "--parallel fsdp"
            )
        if recipe.stateful and self.replicas is None:
            raise UsageError(
                f"recipe {recipe.name!r} shares the amaxes of an expert among the ranks that have it: give them "
                "as ep_replicas, or use recipe current, blockwise or bf16"
            )

    def divides(self, module: str) -> bool:
        """Return whether this rank has only some of the experts of the module of this name."""
        linear = self.config.linears.get(module[max(0, module.find("layers.")) :])
        return self.size > 1 and linear is not None and linear.experts > 0

    @cached_property
    def own_amaxes(self) -> dist.ProcessGroup | None:
        """The group of `replicas`. One object, since engines compare groups by identity."""
        return None if self.replicas is None else self.replicas.get_group()

    def amax_group(self, module: str, others: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
        """Return the processes that share the amaxes of a te module: `others`, but for divided experts."""
        return self.own_amaxes if self.divides(module) else others

    def whole_scales(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the FP8 state of the whole model, on every rank, from this rank's; a collective."""
        whole = {}
        for name, value in state.items():
            # <module>.<direction>.<part>: the scales of a divided linear are in the order of its experts.
            if self.divides(name.rsplit(".", 2)[0]):
                value = all_gather(value, self.group, dim=-1)
            whole[name] = value
        return whole

    def own_scales(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's part of the FP8 state of the whole model."""
        scales = {}
        for name, value in state.items():
            if self.divides(name.rsplit(".", 2)[0]):
                value = value.chunk(self.size, dim=-1)[self.rank]
            scales[name] = value
        return scales

    def owner(self, name: str) -> int | None:
        """Return the rank that has the parameter `name` of the whole model; None: all have it."""
        expert = self._expert(name)
        return None if expert is None else expert // self.held

    def every(
        self, named: Iterable[tuple[str, T]], stand_in: Callable[[T], T]
    ) -> Iterator[tuple[str, T]]:
        """Yield (name, value) of the whole model, in its order, from the parameters of this rank.

        Another rank's expert gets stand_in(value of the expert in the same place on this rank).
        """
        # Runs of parameters of one divided linear: its experts of all ranks follow each other, rank by rank.
        for _, run in groupby(named, key=lambda item: self._module(item[0]) or item[0]):
            entries = list(run)
            ranks = range(self.size) if self._module(entries[0][0]) else [self.rank]
            for rank in ranks:
                for name, value in entries:
                    yield (
                        self._renamed(name, rank * self.held),
                        value if rank == self.rank else stand_in(value),
                    )

    def local_parameters(self, named: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
        """Yield the (name, value) of the whole model that this rank has, under this rank's names."""
        for name, value in named:
            if self.owner(name) in (None, self.rank):
                yield self._renamed(name, -self.rank * self.held), value

    @torch.no_grad()
    def fetch(self, name: str, tensor: Tensor, device: torch.device) -> Tensor:
        """Return the parameter `name` of the whole model, or a tensor of its shape, from its owner; a collective.

        `tensor` is whole on the owner, and a stand-in of the same shape and dtype on the others.
        """
        owner = self.owner(name)
        if self.size == 1 or owner is None or not tensor.dim():
            return tensor
        if owner == self.rank:
            copy = tensor.to(device).contiguous()
        else:
            copy = tensor.new_empty(tensor.shape, device=device)
        dist.broadcast(copy, group=self.group, group_src=owner)
        return copy

    def gather(self, state: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """Return the state of the whole model, on every rank, from this rank's; a collective."""
        return {
            name: self.fetch(name, tensor, device)
            for name, tensor in self.every(state.items(), stand_in)
        }

    def exchange(
        self, sent: Places, alignment: int, kernels: RowKernels
    ) -> tuple[Places, Exchange]:
        """Agree with the other ranks on the way of rows whose places, without padding, are `sent`; a collective.

        The host waits once, for the numbers of rows. Return `sent` without the rows behind the last expert's,
        and the way.
        """
        # By rank, then by expert of this rank.
        # int64 [E]: by rank, how many rows it sends to each of the experts here.
        received_counts = all_to_all(sent.counts, self.group)
        held = self.held
        if sent.counts.is_meta:  # of a plan: experts share the rows evenly
            send_counts = _even(len(sent.token), len(sent.counts))
            theirs = send_counts[:held] * self.size
        else:
            # One copy to the host for both, since each waits for the device.
            send_counts, theirs = torch.stack((sent.counts, received_counts)).tolist()
        # Rows by rank, as all_to_all takes them.
        to_each = [
            sum(send_counts[first : first + held]) for first in range(0, len(send_counts), held)
        ]
        received = [sum(theirs[first : first + held]) for first in range(0, len(theirs), held)]
        count = sum(send_counts)
        where = Places(sent.token[:count], sent.row.clamp(max=count), send_counts, sent.counts)
        arrived = arrivals(received_counts.view(self.size, held), theirs, alignment)
        return where, Exchange(to_each, received, arrived, self.group, self.fp8, kernels)

    @property
    def gathered(self) -> GatheredTokens | None:
        """The way of tokens to experts without a wait; None where too many ranks share them, or one has all."""
        if not 1 < self.size <= MOST_RANKS:
            return None
        return GatheredTokens(self.group, self.fp8)

    @property
    def held(self) -> int:
        """The number of experts per layer and rank."""
        return 0 if self.config.moe is None else self.config.moe.num_experts // self.size

    def _module(self, name: str) -> str | None:
        """Return the module of the parameter `name` if it is a linear whose experts are divided."""
        module = name[max(0, name.find("layers.")) :].rpartition(".")[0]
        return module if self.divides(module) else None

    def _expert(self, name: str) -> int | None:
        return None if self._module(name) is None else int(name[len(name.rstrip("0123456789")) :])

    def _renamed(self, name: str, shift: int) -> str:
        expert = self._expert(name)
        return name if expert is None else f"{name.rstrip('0123456789')}{expert + shift}"


def arrivals(counts: Tensor, known: list[int], alignment: int) -> Places:
    """Return the places of rows that arrive in the order of ranks and then of experts among the rows of all experts.

    `counts` int64 [ranks, E] are their numbers, and `known` the same on the host. An expert's rows are in the order of
    ranks, and padded to a multiple of `alignment`.
    """
    experts = counts.shape[1]
    # The host knows the sizes already, so no further wait is needed for the shapes.
    padded = [-(-sum(known[e::experts]) // alignment) * alignment for e in range(experts)]
    most = sum(padded)
    total = sum(known)
    of_each = counts.sum(0)
    sizes = (of_each + alignment - 1) // alignment * alignment
    first = sizes.cumsum(0) - sizes  # the first row of each expert
    to = first + counts.cumsum(0) - counts  # of each rank's rows of each expert
    # From the order of arrival (by rank, then expert) to the order of experts (by expert, then rank).
    flat = counts.flatten()
    shift = to.flatten() - (flat.cumsum(0) - flat)
    number = torch.arange(total, device=counts.device)
    row = number + shift.repeat_interleave(flat, output_size=total)
    # Padding reads row `total`, one behind the last, which stands for zeros.
    token = torch.full((most,), total, device=counts.device).index_copy(0, row, number)
    return Places(token, row[:, None], padded, of_each)


def _even(rows: int, experts: int) -> list[int]:
    """Return numbers of rows of each expert that differ by one at most."""
    each, rest = divmod(rows, experts)
    return [each + (expert < rest) for expert in range(experts)]


def stand_in(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape and dtype that takes no memory; a scalar, such as a number of steps, is copied.

    Only its shape and dtype mean anything. Its values are zeros, in which a check for NaN finds nothing.
    """
    if not tensor.dim():
        return tensor.clone()
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


def scratch(tensor: Tensor) -> Tensor:
    """Return memory for values that only other ranks keep: every rank draws all random numbers."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


class Exchange(NamedTuple):
    """The way of one layer's rows [S, D] to the ranks of their experts, and back."""

    sent: list[int]  # rows to each rank
    received: list[int]  # rows from each rank
    places: Places  # of the received rows among all rows of this rank's experts, padding included
    group: dist.ProcessGroup | None
    fp8: bool  # whether rows travel to experts in FP8; outputs and gradients never do
    kernels: RowKernels

    def to_experts(self, rows: Tensor) -> Tensor:
        """Return the rows of this rank's experts [R, D], zeros for padding."""
        return Mapped.apply(rows, lambda x: self.forth(x, self.fp8), self.back)

    def from_experts(self, rows: Tensor) -> Tensor:
        """Return the rows of this rank's tokens [S, D] from the rows of the experts [R, D]."""
        return Mapped.apply(rows, self.back, self.forth)

    def forth(self, rows: Tensor, fp8: bool = False) -> Tensor:
        """Do what `to_experts` does, without a gradient."""
        arrived = all_to_all(packed(rows) if fp8 else rows, self.group, self.sent, self.received)
        if fp8:
            arrived = unpacked(arrived, rows.dtype)
        return self.kernels.gather(arrived, self.places.token, None, None)[0]

    def back(self, rows: Tensor) -> Tensor:
        """Do what `from_experts` does, without a gradient."""
        # [R, D] -> [received, D]: back into the order of arrival, without padding.
        leaving = rows.index_select(0, self.places.row[:, 0])
        return all_to_all(leaving, self.group, self.received, self.sent)
