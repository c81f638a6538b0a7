"""Bytes of masters and optimizer state, of the optimizers that training uses (te_models.optim)."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from te_models.config.chunk_sizes import FP32
from te_models.config.shares import share_out
from te_models.optim import OPTIMIZERS, Choice, resolve_options, state_bytes
from te_models.optim.projected import is_projected, sum_elements
from te_models.planning.measured import HeldTensor

# The options of an optimizer, as from te_models.optim.resolve_options; those left out have their defaults.
Options = Mapping[str, Any]
DEFAULTS: Options = MappingProxyType({})
DTYPES = {2: torch.bfloat16, 4: torch.float32}


def has_masters(options: Options) -> bool:
    """Return whether parameters that are not FP32 have FP32 masters."""
    return not options.get("stochastic_rounding", False)


def optimizer_bytes(
    name: str,
    tensors: Mapping[HeldTensor, int],
    options: Options = DEFAULTS,
    ranks: int = 1,
    expert_ranks: int | None = None,
) -> int:
    """Return the bytes of optimizer state and FP32 masters on the GPU that has most of them.

    Args:
        name: one of te_models.optim.OPTIMIZERS.
        tensors: the parameters of a rank's model with their numbers; those that are not trained have no state.
        options: of the optimizer.
        ranks: the GPUs among which FSDP2 shares them.
        expert_ranks: the GPUs among which it shares the experts' parameters; None: `ranks`.
    """
    choice = OPTIMIZERS[name]
    options = {**resolve_options(name, {}), **options}
    trained = {tensor: count for tensor, count in tensors.items() if tensor.trained}
    if ranks == 1 or choice.elementwise:
        size = 0.0
        for tensor, count in trained.items():
            shares = ranks if expert_ranks is None or not tensor.expert else expert_ranks
            size += count * _bytes_of(name, choice, tensor, options) / shares
        return round(size)
    # An owner has whole masters even of FP32 parameters, of which FSDP2 leaves it a shard.
    sizes: list[int] = []
    owned_bytes: list[int] = []
    for tensor, count in trained.items():
        size = _bytes_of(name, choice, tensor, options, owned=True)
        sizes += [tensor.numel] * count
        owned_bytes += [size] * count
    owned = [0] * ranks
    for size, owner in zip(owned_bytes, share_out(sizes, ranks), strict=True):
        owned[owner] += size
    return max(owned)


def _bytes_of(
    name: str, choice: Choice, tensor: HeldTensor, options: Options, owned: bool = False
) -> int:
    """Return the bytes of the state of a parameter, and of its master if it has one that is not itself."""
    masters = has_masters(options)
    itemsize = FP32 if masters else tensor.itemsize
    # A parameter that is FP32 already, and on this rank as a whole, is its own master.
    copied = owned or tensor.quantized or itemsize != tensor.itemsize
    size = tensor.numel * itemsize if copied else 0
    views: list[tuple[tuple[int, ...], bool]] = [(tensor.shape, False)]
    if choice.matrices:
        views = [(shape, role == "hidden") for role, shape in tensor.parts]
    for shape, hidden in views:
        size += _state_bytes(choice, name, tuple(options.items()), shape, itemsize, hidden)
    return size


@functools.lru_cache(4096)
def _state_bytes(
    choice: Choice,
    name: str,
    options: tuple[tuple[str, Any], ...],
    shape: tuple[int, ...],
    itemsize: int,
    hidden: bool,
) -> int:
    """Return the bytes of the state of one tensor; `choice` tells optimizers apart that had one name at times."""
    view = torch.empty(shape, dtype=DTYPES[itemsize], device="meta")
    return state_bytes(name, dict(options), view, hidden)


def trained_elements(tensors: Mapping[HeldTensor, int]) -> int:
    """Return the number of parameters that are trained."""
    return sum(count * tensor.numel for tensor, count in tensors.items() if tensor.trained)


def projected_sums(tensors: Mapping[HeldTensor, int], rank: int) -> tuple[int, int]:
    """Return the elements of the trained parameters that backward projects, and of the sums that it leaves of them.

    `rank` is GaLore's; 0: nothing is projected.
    """
    elements = 0
    sums = 0
    for tensor, count in tensors.items():
        if not rank or not tensor.trained:
            continue
        if not any(is_projected(role, shape, rank) for role, shape in tensor.parts):
            continue
        elements += count * tensor.numel
        # A fused parameter may have rows that are projected and rows that are not, such as a gate's.
        for role, shape in tensor.parts:
            if is_projected(role, shape, rank):
                sums += count * sum_elements(shape, rank)
            else:
                sums += count * math.prod(shape)
    return elements, sums


def matrix_elements(tensors: Counter[HeldTensor] | Mapping[HeldTensor, int]) -> int:
    """Return the number of elements of weights, without norms and biases."""
    return sum(count * tensor.numel for tensor, count in tensors.items() if tensor.is_matrix)
