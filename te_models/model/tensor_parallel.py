"""Tensor parallelism of a CausalLM: which rank has which heads and channels, and how the ranks communicate.

Each rank runs the same model code on `local(config)`, a model of its share of the heads and of the MLP's channels.
te.Linear does the rest: the projections into attention and MLP are column-parallel, those out of them row-parallel. The
embedding, the norms and the head are replicated.

With sequence parallelism a rank has only its own rows of the residual stream and of everything between a row-parallel
and the next column-parallel layer, norms included. The number of elements sent is the same; in one direction they are
FP8.

Parameters are plain tensors with an attribute `tp_sharded`: where it is False the parameter and its gradient are the
same on all ranks, where it is True they are this rank's part of a larger one (a norm of all gradients sums the squares
of those over the ranks).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from te_models.config.layer import LayerSpec, LinearSpec, Section
from te_models.config.model import ModelConfig
from te_models.config.recipe import Recipe
from te_models.device.autograd import Context
from te_models.distributed.collectives import all_gather, all_reduce
from te_models.distributed.dtensor import filling, whole
from te_models.distributed.mesh_ranks import MeshRanks
from te_models.errors import UsageError
from te_models.fp8.primary_weights import is_quantized, write_weight

Map = Callable[[Tensor], Tensor]


def divided_linear(name: str, config: ModelConfig) -> LinearSpec | None:
    """Return the te.Linear whose parameter `name` is divided between the ranks; None: every rank has all of it.

    A vector that is divided like the rows of a te.Linear is described as one. `name` may have a prefix, as the state
    of an optimizer has.
    """
    # Without a prefix such as "model." or an optimizer's.
    name = name[max(0, name.find("layers.")) :]
    module, _, kind = name.rpartition(".")
    linear = config.linears.get(module)
    if linear is None:
        return config.divided_vectors.get(name)
    if linear.split is None:
        return None
    return linear if kind == "weight" or (kind == "bias" and linear.split == "column") else None


@dataclass(frozen=True)
class TensorParallel(MeshRanks):
    """The ranks that share a model; `mesh` None: one rank, for which every method here is the identity."""

    mesh: DeviceMesh | None = None
    sequence: bool = False

    def __post_init__(self) -> None:
        alone = (
            "sequence_parallel=True divides the tokens between the ranks of tp_mesh: give tp_mesh"
        )
        self.check("tp_mesh", "tensor parallelism, mesh['tp']", alone if self.sequence else "")

    @property
    def scatters(self) -> bool:
        """Return whether a rank has only its own rows of the residual stream."""
        return self.sequence and self.size > 1

    def linear(self, mode: str) -> dict[str, Any]:
        """Return te.Linear's arguments for a "column" or "row" parallel layer."""
        if self.size == 1:
            return {}
        return dict(
            parallel_mode=mode,
            tp_group=self.group,
            tp_size=self.size,
            sequence_parallel=self.sequence,
        )

    def local(self, config: ModelConfig) -> tuple[LayerSpec, ...]:
        """Return one rank's share of the layers.

        Raises:
            UsageError: they cannot be divided evenly between the ranks.
        """
        if self.size == 1:
            return config.layers
        counts: dict[str, int] = {}
        for part in config.parts:
            obstacle = part.parallel_obstacle(self.sequence)
            if obstacle:
                raise UsageError(obstacle)
            # Heads, channels and the like, by name, each of which the ranks have to divide.
            counts |= part.divided
        # Any divisor of all counts will do, and the message lists them.
        common = math.gcd(*counts.values())
        fits = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
        for name, count in counts.items():
            if count % self.size:
                raise UsageError(
                    f"{name}={count} cannot be divided between {self.size} ranks: use {fits}"
                )
        return tuple(layer.local(self.size) for layer in config.layers)

    @property
    def each(self) -> str:
        """Text for messages about `local` sizes."""
        return "" if self.size == 1 else f" on each of {self.size} ranks"

    def check_recipe(self, recipe: Recipe) -> None:
        """Raise if the ranks could not read each other's FP8 data under this recipe."""
        for used in recipe.in_use:
            if self.scatters and not used.fields.get("reduce_amax", True):
                raise UsageError(
                    f"recipe {used.name!r} has reduce_amax=False, and sequence parallelism needs the same scales on "
                    "all ranks: use reduce_amax=True or sequence_parallel=False"
                )

    def rows(self, count: int, alignment: int) -> int:
        """Return the rows that `count` tokens are padded to; each rank's share is a multiple of `alignment`."""
        step = alignment * (self.size if self.scatters else 1)
        return -(-count // step) * step

    def scatter(self, x: Tensor) -> Tensor:
        """Return this rank's rows of x [N, D], which all ranks have; its gradient is again whole on all ranks."""
        if not self.scatters:
            return x
        # A copy, since a view would keep the rows of all ranks alive.
        return Mapped.apply(x, lambda x: self._own(x).clone(), self._all)

    def gather(self, x: Tensor) -> Tensor:
        """Return the rows of all ranks [N, D], which all of them use in the same way."""
        # All ranks compute the same gradient.
        if self.scatters:
            return Mapped.apply(x, self._all, lambda dy: self._own(dy).contiguous())
        return x

    def _own(self, x: Tensor) -> Tensor:
        return x.chunk(self.size)[self.rank]

    def _all(self, x: Tensor) -> Tensor:
        return all_gather(x, self.group)

    def _sum(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks, in FP32."""
        # A copy even in FP32: autograd may give a gradient, which the collective would overwrite, to other nodes too.
        # In FP32: the sum of as many BF16 numbers as ranks would be rounded once per rank.
        return all_reduce(x.to(torch.float32, copy=True), self.group).to(x.dtype)

    def norm(self, norm: nn.Module, x: Tensor, partial: bool) -> Tensor:
        """Return norm(x). Where x is a part of what the weight acts on, the weight's gradient is summed over the ranks.

        This happens in the graph, not in a hook on the parameter, which FSDP replaces.
        """
        if not partial or self.size == 1:
            return norm(x)
        return torch.func.functional_call(norm, {"weight": self.partial_weight(norm)}, (x,))

    def partial_weight(self, norm: nn.Module) -> Tensor:
        """Return the weight of a norm that acts on this rank's heads only: its gradient is summed over the ranks."""
        weight = norm.get_parameter("weight")
        if self.size == 1:
            return weight
        return Mapped.apply(weight, lambda weight: weight.view_as(weight), self._sum)

    def mark(self, model: nn.Module, config: ModelConfig) -> None:
        """Set `tp_sharded` on each parameter."""
        for name, parameter in model.named_parameters():
            divided = self.size > 1 and divided_linear(name, config) is not None
            parameter.tp_sharded = divided  # type: ignore[attr-defined]  # our attribute

    @contextmanager
    def filling(
        self, name: str, target: Tensor, config: ModelConfig, for_master: bool = True
    ) -> Iterator[Tensor]:
        """Yield a tensor to write all values of the whole parameter into; this rank's part of it goes to `target`.

        Every rank draws all random numbers, so that a model starts with the same values on any number of ranks. An FP8
        weight is quantized once all its values are there, and stores them for its master if `for_master`.
        """
        linear = None if self.size == 1 else divided_linear(name, config)
        if linear is None and not is_quantized(target):
            with filling(target) as values:
                yield values
            return
        shape = target.shape if linear is None else whole_shape(linear, target.shape, self.size)
        full = torch.empty(shape, dtype=target.dtype, device=target.device)
        yield full
        # Only now: an FP8 weight has one scale, which follows from all its values.
        write_weight(target, shard(name, full, config, self), for_master)

    def check_same_random_state(self, device: torch.device) -> None:
        """Raise if the ranks would draw different random numbers for the parameters that they share."""
        if self.size == 1:
            return
        state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        # uint8 [ranks, bytes of the state]
        states = all_gather(state.to(device)[None], self.group)
        if not bool((states == states[0]).all()):
            raise UsageError(
                "the tensor-parallel ranks have different random states: call torch.manual_seed with one seed on all"
            )


def whole_shape(linear: LinearSpec, local: torch.Size, size: int) -> tuple[int, ...]:
    """Return the shape of the whole parameter of a divided linear, given the shape of a rank's part."""
    if linear.split == "row":
        return (local[0], local[1] * size)
    # Not local[0] * size: each rank pads its sections by itself.
    return (linear.outputs, *local[1:])


def shard(name: str, whole: Tensor, config: ModelConfig, tp: TensorParallel) -> Tensor:
    """Return this rank's part of a parameter, or of a tensor of its shape; a copy if it is divided.

    The rows that pad a section are zeros.
    """
    linear = None if tp.size == 1 else divided_linear(name, config)
    if linear is None:
        return whole
    if linear.split == "row":
        return whole.chunk(tp.size, 1)[tp.rank].contiguous()
    parts = []
    for block, sections in zip(
        whole.split(linear.rows), _own_sections(name, config, tp), strict=True
    ):
        # q, k, v and gate lie one below the other in the weight: each is divided by itself, so that a rank has whole
        # heads.
        parts.append(
            _padded(block[tp.rank * sections.used : (tp.rank + 1) * sections.used], sections.stored)
        )
    return torch.cat(parts)


def unshard(name: str, parts: list[Tensor], config: ModelConfig, tp: TensorParallel) -> Tensor:
    """Return the whole parameter from the parts of all ranks: the inverse of `shard`."""
    linear = divided_linear(name, config)
    assert linear is not None
    if linear.split == "row":
        # Row-parallel: each rank has some of the input features.
        return torch.cat(parts, 1)
    # Sections (such as q, k, v and gate) are divided one by one: a rank's part has a piece of each.
    sections = _own_sections(name, config, tp)
    split = [part.split([section.stored for section in sections]) for part in parts]
    blocks = []
    for i, section in enumerate(linear.sections):
        blocks.append(
            _padded(torch.cat([part[i][: sections[i].used] for part in split]), section.stored)
        )
    return torch.cat(blocks)


def _own_sections(name: str, config: ModelConfig, tp: TensorParallel) -> tuple[Section, ...]:
    """Return the sections of one rank's share of the parameter `name`, which is divided by rows."""
    layer, inside = name[name.find("layers.") :].removeprefix("layers.").split(".", 1)
    local = config.layers[int(layer)].local(tp.size)
    sections = local.divided_vectors.get(inside) or local.linears[inside.rpartition(".")[0]]
    return sections.sections


def _padded(rows: Tensor, count: int) -> Tensor:
    # F.pad counts from the last dimension: nothing there, and rows behind the last of the first dimension.
    nothing = (0, 0) * (rows.ndim - 1)
    return F.pad(rows, (*nothing, 0, count - len(rows)))


def shard_state(
    full: Mapping[str, Tensor], config: ModelConfig, mesh: DeviceMesh | None
) -> dict[str, Tensor]:
    """Return this rank's part of every tensor of a state; those that are not divided are passed on.

    A tensor's name ends in the parameter's, and it has the parameter's shape: weights, masters, moments.
    """
    tp = TensorParallel(mesh)
    return {name: shard(name, tensor, config, tp) for name, tensor in full.items()}


@torch.no_grad()
def gather_state(
    state: Mapping[str, Tensor], config: ModelConfig, tp: TensorParallel
) -> dict[str, Tensor]:
    """Return the whole tensors of `state`, of which each rank has its parts, on every rank.

    A collective: all ranks call it, with the same names. One tensor at a time, on the device of the part.
    """
    if tp.size == 1:
        return dict(state)
    gathered = {}
    for name, tensor in state.items():
        if divided_linear(name, config) is not None:
            parts = all_gather(whole(tensor.detach())[None], tp.group)
            tensor = unshard(name, list(parts.unbind()), config, tp)
        gathered[name] = tensor
    return gathered


class Mapped(torch.autograd.Function):
    """A function of a tensor in forward, another of the gradient in backward."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, forward: Map, backward: Map) -> Tensor:
        ctx.gradient = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        return ctx.gradient(grad), None, None
