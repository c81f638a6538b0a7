"""Keep quantized weights, and the graphs that read them, for the next generation while the weights stay the same.

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
import threading
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
    """The quantized weights as one generation sees them, from its first pass on.

    Attributes:
        ready: whether the te.Linears have them, so that a pass need not make them. `is_first_microbatch` of a pass is
            the opposite.
        left: what a generation leaves for the next one and is worth nothing with other weights, such as a graph that
            reads them; None: nothing.
    """

    def __init__(self, linears: list[nn.Module], keep: bool, shared: _Shared) -> None:
        self.linears = linears
        self.keep = keep
        self.ready = False
        self.left: object = None
        self._shared = shared

    def note_pass(self) -> None:
        """Note that a pass has ended, which made the quantized weights unless they were there."""
        if not self.ready:
            if self.keep:  # to look at hundreds of weights takes a millisecond
                self._shared.source = _source(self.linears)
            self.ready = True


@contextlib.contextmanager
def reused_weights(model: nn.Module, te: ModuleType, keep: bool) -> Iterator[WeightReuse]:
    """Surround a generation: its passes use the weights that the last one quantized, if they are still the model's.

    Generations that overlap, as streams may that are read in turn, use the same ones, and the last to end takes them
    out of the modules: until then a graph may read them. Weights that the te.Linears cache for the next micro-batch of
    a step are put aside, and are back afterwards.

    Args:
        model: the network, whose weights must not change inside.
        te: the engine.
        keep: whether to keep the quantized weights for the next generation.
    """
    linears = te_linears(model, te)
    with _LOCK:
        shared = _UNDER_WAY.get(model)
        is_first = shared is None
        if shared is None:
            shared = _UNDER_WAY[model] = _begin(model, te, linears)
        shared.generations += 1
    reuse = WeightReuse(linears, keep, shared)
    try:
        reuse.ready = shared.source is not None
        if is_first:
            reuse.left = shared.left
        elif shared.source is None or not _is_source(shared.source, linears):
            # This generation makes its own. Graphs of the first one read those before.
            reuse.ready = False
            shared.has_one_version = False
        yield reuse
    except GeneratorExit:  # a reader that has seen enough
        raise
    except BaseException:
        shared.source = None
        raise
    finally:
        with _LOCK:
            if is_first:
                shared.left = reuse.left if shared.has_one_version else None
            shared.generations -= 1
            if not shared.generations:
                _UNDER_WAY.pop(model, None)
                _end(model, te, reuse, shared)


def _begin(model: nn.Module, te: ModuleType, linears: list[nn.Module]) -> _Shared:
    """Put the caches of a step aside, and give the te.Linears the weights that are kept, if they are the model's."""
    of_step = [te.take_cached_weights(module) for module in linears]
    shared = _Shared(of_step)
    if any(of_step):
        # By which it is known afterwards whether they are still of the model's weights, and may go back.
        shared.source_of_step = _source(linears)
    kept = _KEPT.pop(model, None)
    if kept is not None and _is_source(kept.source, linears):
        for module, weights in zip(linears, kept.weights, strict=True):
            te.give_cached_weights(module, weights)
        shared.source = kept.source
        shared.left = kept.left
    # Outdated ones are freed here, before new ones are made.
    return shared


def _end(model: nn.Module, te: ModuleType, reuse: WeightReuse, shared: _Shared) -> None:
    """Take the quantized weights out of the te.Linears and keep them, and put the caches of a step back."""
    weights = [te.take_cached_weights(module) for module in reuse.linears]
    has_weights = reuse.keep and any(weights)
    if shared.source is not None and (has_weights or shared.left is not None):
        _KEPT[model] = _Kept(shared.source, weights, shared.left)
    if shared.source_of_step is not None and _is_source(shared.source_of_step, reuse.linears):
        for module, cached in zip(reuse.linears, shared.of_step, strict=True):
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


class _Shared:
    """The quantized weights of a model, shared by all generations of it that are under way.

    Args:
        of_step: of each te.Linear, what it had cached for the next micro-batch of a step.

    Attributes:
        generations: how many have begun and not ended.
        source_of_step: the weights that `of_step` was made from; None: they cannot be compared, or there are none.
        source: the weights that the quantized ones were made from; None: there are none, or they cannot be kept.
        left: WeightReuse.left of the first generation, before it has begun and after it has ended.
        has_one_version: whether all have used the same quantized weights.
    """

    def __init__(self, of_step: list[dict[str, Any]]) -> None:
        self.of_step = of_step
        self.generations = 0
        self.source_of_step: _Source | None = None
        self.source: _Source | None = None
        self.left: object = None
        self.has_one_version = True


# Reentrant: whoever holds it may collect garbage, and with it a stream that ends then.
_LOCK = threading.RLock()
_KEPT: weakref.WeakKeyDictionary[nn.Module, _Kept] = weakref.WeakKeyDictionary()
_UNDER_WAY: weakref.WeakKeyDictionary[nn.Module, _Shared] = weakref.WeakKeyDictionary()


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
