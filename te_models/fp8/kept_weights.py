"""What stays from one generation to the next while the weights stay the same: their quantized copies, and graphs.

The first pass of a generation quantizes the weights: 8 to 9 of the 61 ms that 2,048 tokens of an 8B take on an H100.
Between generations the result is kept here, one byte per parameter, and not in the modules: a training pass, a copy or
a save finds them as if nothing had been generated. CUDA graphs that read it are kept with it (`WeightReuse.left`).

The next generation takes it back if the weights are the same tensors, at the same addresses, with the same versions, by
which PyTorch counts the operations that changed a tensor in place. Kernels outside of PyTorch and operations on `.data`
count nothing, so a few hundred elements of each weight are compared too: an optimizer's step or a merged adapter
changes them all. An edit of single elements through `.data` is not noticed.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from te_models.fp8.primary_weights import is_quantized, quantized_weights
from te_models.numerics.stored import StoredWeight

# Elements of each weight that are compared.
SAMPLE = 256


def te_linears(model: nn.Module, te: ModuleType) -> list[nn.Module]:
    """Return every te.Linear and te.GroupedLinear of the model."""
    return [module for module in model.modules() if isinstance(module, te.LINEARS)]


class WeightReuse:
    """The quantized weights of one generation, from its first pass on.

    Attributes:
        ready: whether the te.Linears have them, so that a pass need not make them. `is_first_microbatch` of a pass is
            the opposite.
        source: the weights that they were made from; None: they cannot be kept.
        left: what a generation leaves for the next one and is worth nothing with other weights, such as a graph that
            reads them; None: nothing.
    """

    def __init__(self, linears: list[nn.Module], keep: bool = False) -> None:
        self.linears = linears
        self.keep = keep
        self.ready = False
        self.source: _Source | None = None
        self.left: object = None

    def note_pass(self) -> None:
        """Note that a pass has ended, which made the quantized weights unless they were there."""
        if not self.ready:
            if self.keep:  # to look at hundreds of weights takes a millisecond
                self.source = _source(self.linears)
            self.ready = True


@contextlib.contextmanager
def reused_weights(model: nn.Module, te: ModuleType, keep: bool) -> Iterator[WeightReuse]:
    """Surround a generation: its passes use the weights that the last one quantized, if they are still the model's.

    Weights that the te.Linears cache for the next micro-batch of a step are put aside, and are back afterwards.

    Args:
        model: the network, whose weights must not change inside.
        te: the engine.
        keep: whether to keep the quantized weights for the next generation.
    """
    reuse = WeightReuse(te_linears(model, te), keep)
    # Caches that are there while another generation is read, as streams may be in turn, are its own.
    alone = model not in _GENERATING
    of_step = [te.take_cached_weights(module) for module in reuse.linears] if alone else []
    # By which it is known afterwards whether they are still of the model's weights, and may go back.
    source_of_step = _source(reuse.linears) if any(of_step) else None
    reusable = _KEPT.pop(model, None)
    if reusable is not None and _is_source(reusable.source, reuse.linears):
        for module, weights in zip(reuse.linears, reusable.weights, strict=True):
            te.give_cached_weights(module, weights)
        reuse.ready = True
        reuse.source = reusable.source
        reuse.left = reusable.left
    del reusable  # outdated ones are freed before new ones are made
    if alone:
        _GENERATING.add(model)
    try:
        yield reuse
    except GeneratorExit:  # a reader that has seen enough
        raise
    except BaseException:
        reuse.source = None
        raise
    finally:
        weights = [te.take_cached_weights(module) for module in reuse.linears]
        # Where generations overlap, the weights that this one has used may be those of another.
        left = reuse.left if alone else None
        has_weights = keep and any(weights)
        if reuse.source is not None and (has_weights or left is not None):
            _KEPT[model] = _Kept(reuse.source, weights, left)
        if alone:
            _GENERATING.discard(model)
        if source_of_step is not None and _is_source(source_of_step, reuse.linears):
            for module, cached in zip(reuse.linears, of_step, strict=True):
                te.give_cached_weights(module, cached)


def forget_kept_weights(model: nn.Module) -> None:
    """Free the quantized weights that are kept for the next generation."""
    _KEPT.pop(model, None)


class _Source(NamedTuple):
    """The weights that quantized ones were made from."""

    # To each tensor: its identity, its address and its version.
    tensors: list[tuple[weakref.ref[Tensor], int, int]]
    sample: list[Tensor]  # uint8 [bytes] per dtype, the elements in the middle of each tensor
    scales: Tensor  # FP32 [scales], by which delayed scaling casts


class _Kept(NamedTuple):
    """Quantized weights, and what else one generation leaves for the next."""

    source: _Source
    # Of each te.Linear, as the engine's take_cached_weights returned them.
    weights: list[dict[str, Any]]
    left: object  # WeightReuse.left


_KEPT: weakref.WeakKeyDictionary[nn.Module, _Kept] = weakref.WeakKeyDictionary()
_GENERATING: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models with a generation under way


def _source(linears: list[nn.Module]) -> _Source | None:
    """Return the weights as they are now; None where they cannot be compared."""
    weights = _weights(linears)
    if not weights:
        return None
    tensors = [(weakref.ref(weight), weight.data_ptr(), _version(weight)) for weight in weights]
    return _Source(tensors, _sample(weights), _scales(linears, weights[0]))


def _is_source(source: _Source, linears: list[nn.Module]) -> bool:
    """Return whether the weights still have the values of `source`. On a GPU this waits for the device."""
    weights = _weights(linears)
    if len(weights) != len(source.tensors):
        return False
    for weight, (same, address, version) in zip(weights, source.tensors, strict=True):
        if same() is not weight or weight.data_ptr() != address or _version(weight) != version:
            return False
    if not torch.equal(_scales(linears, weights[0]), source.scales):
        return False
    return all(map(torch.equal, _sample(weights), source.sample))


def _weights(linears: list[nn.Module]) -> list[Tensor]:
    """Return the weights as tensors in memory, of FP8 ones data and scales; [] where some are not of this kind."""
    weights = []
    for module in linears:
        for name, parameter in module._parameters.items():
            if parameter is None or not name.startswith("weight"):
                continue
            if isinstance(parameter, (DTensor, StoredWeight)) or parameter.is_meta:
                return []
            if is_quantized(parameter):
                weights += quantized_weights(module).values()
                break  # these are of all weights of the module
            weights.append(parameter)
    if not all(weight.is_contiguous() for weight in weights):
        return []
    return weights


def _version(weight: Tensor) -> int:
    # Inference tensors count no versions, and cannot change outside inference mode.
    return 0 if weight.is_inference() else weight._version


def _sample(weights: list[Tensor]) -> list[Tensor]:
    """Return the bytes of some elements in the middle of each weight, a tensor uint8 [bytes] per dtype."""
    of_dtypes: dict[torch.dtype, list[Tensor]] = {}
    for weight in weights:
        count = weight.numel()
        size = min(SAMPLE, count - count // 2)
        start = weight.storage_offset() + count // 2
        elements = weight.detach().as_strided((size,), (1,), start)
        of_dtypes.setdefault(weight.dtype, []).append(elements)
    return [torch.cat(elements).view(torch.uint8) for elements in of_dtypes.values()]


def _scales(linears: list[nn.Module], like: Tensor) -> Tensor:
    """Return the forward scales of delayed scaling of all modules, FP32 [scales], on the device of `like`."""
    scales = [torch.empty(0, device=like.device)]
    for module in linears:
        state = vars(module)["fp8_meta"].get("scaling_fwd")
        # Recipes without delayed scaling have no history.
        if getattr(state, "amax_history", None) is not None:
            scales.append(state.scale)
    return torch.cat(scales)
