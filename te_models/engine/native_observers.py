"""Observers of the casts of Transformer Engine's modules (te_models.recorder): called with both sides of each cast.

A quantizer's Python methods make most casts, and an instance may have its own in their place; Transformer Engine's C++
recognizes a quantizer by its exact class, so a subclass would not do. Two functions of its C++ extension cast without
these methods, and are replaced by functions that call them and then the observers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from te_models.recorder.table import ExpertObserver, Observer, Observers

# The method by which te.Linear and te.GroupedLinear get their quantizers in each forward pass.
_GETTER = "_get_quantizers"
# Attributes of ours: of a module all its observers, of a copied quantizer its own.
_OBSERVERS = "_te_models_observers"
_OBSERVER = "_te_models_observer"
_METHODS = ("quantize_impl", "update_quantized")


def set_observers(module: Module, observers: Sequence[Observers] | None) -> None:
    """Let observers count the casts of a te.Linear from its next forward on; None: remove its observers.

    The quantizers of most recipes are made by the first forward pass, and a cached weight has one of its own, so they
    are looked for in each.
    """
    attributes = vars(module)
    attributes.pop(_GETTER, None)
    if observers is None:
        _attach(module, [])
        return
    getter: Callable[..., Any] = getattr(module, _GETTER)

    def getter_of_observed(*arguments: Any, **options: Any) -> Any:
        quantizers = getter(*arguments, **options)
        _attach(module, observers)
        return quantizers

    attributes[_GETTER] = getter_of_observed
    _attach(module, observers)


def give_observer(quantizer: Any, module: Module, direction: str, operand: int) -> None:
    """Give a copy of a te.Linear's quantizer, by which kernels of ours cast, the observer of that operand."""
    observers = vars(module).get(_OBSERVERS, ())
    observer = None
    if observers:
        # A te.Linear has one GEMM, with observers of input, weight and output gradient.
        observer = observers[0][2 if direction == "scaling_bwd" else operand]
    vars(quantizer)[_OBSERVER] = observer


def experts_observer(module: Module, operand: int) -> ExpertObserver | None:
    """Return the observer of an operand (0 input, 1 weight, 2 output gradient) of all experts of a te.GroupedLinear.

    None where there are none, or where they look at each tensor by itself, as the search for a NaN does.
    """
    observers = [of_expert[operand] for of_expert in vars(module).get(_OBSERVERS, ())]
    if observers and isinstance(observers[0], Observer):
        return ExpertObserver(observers)
    return None


def observer_of(quantizer: Any) -> Observer | None:
    """Return the observer that `give_observer` gave a quantizer."""
    return None if quantizer is None else vars(quantizer).get(_OBSERVER)


def observe(quantizer: Any, quantized: Any, compute: Callable[[], Tensor]) -> None:
    """Let the observer of a quantizer, if it has one, count a cast of Transformer Engine's kernels.

    Such a kernel computes values, rounds them to 16 bits, casts them, and returns only the quantized tensor. Where the
    observer wants the values too, `compute` runs the same kernel without the cast, which returns them.
    """
    observer = observer_of(quantizer)
    if observer is not None:
        values = compute() if observer.wants_values else None
        observer(values, quantized, known_scale(quantizer))


def observe_quantizer(quantizer: Any, observer: Observer | None) -> None:
    """Let an observer count the casts of a quantizer; None: remove its observer."""
    attributes = vars(quantizer)
    if observer is None:
        for name in _METHODS:
            attributes.pop(name, None)
        return
    for name in _METHODS:
        if getattr(attributes.get(name), "observer", None) is not observer:
            attributes[name] = _Observed(quantizer, observer, getattr(type(quantizer), name))


def install(extension: Any) -> None:
    """Let observers count the casts of Transformer Engine's C++ extension, the module `transformer_engine_torch`.

    It casts the output gradient of a linear with a bias, whose gradient the same kernel sums, and the rows of all
    experts of a te.GroupedLinear.
    """
    bgrad_quantize = extension.bgrad_quantize
    split_quantize = extension.split_quantize

    def observed_bgrad_quantize(grad_output: Tensor, quantizer: Any) -> Any:
        results = bgrad_quantize(grad_output, quantizer)  # gradient of the bias, quantized gradient
        _notify(quantizer, grad_output, results[1])
        return results

    def observed_split_quantize(
        tensor: Tensor, split_sizes: Sequence[int], quantizers: Sequence[Any], **options: Any
    ) -> Any:
        results = split_quantize(tensor, split_sizes, quantizers, **options)
        if any(_method_observer(quantizer) is not None for quantizer in quantizers):
            parts = torch.split(tensor, list(split_sizes))
            for quantizer, part, quantized in zip(quantizers, parts, results, strict=True):
                _notify(quantizer, part, quantized)
        return results

    extension.bgrad_quantize = observed_bgrad_quantize
    extension.split_quantize = observed_split_quantize


def _notify(quantizer: Any, source: Tensor, quantized: Any) -> None:
    """Call the observer of a quantizer, if it has one, with both sides of a cast that its methods did not make."""
    observer = _method_observer(quantizer)
    # An expert without rows has nothing to count.
    if observer is not None and source.numel():
        observer(source, quantized, known_scale(quantizer))


def _method_observer(quantizer: Any) -> Observer | None:
    """Return the observer that `observe_quantizer` gave a quantizer; None for none, and where nothing is quantized."""
    method = None if quantizer is None else vars(quantizer).get(_METHODS[0])
    return method.observer if isinstance(method, _Observed) else None


class _Observed:
    """A method of a quantizer that casts and then calls an observer."""

    def __init__(self, quantizer: Any, observer: Observer, method: Callable[..., Any]) -> None:
        self.quantizer = quantizer
        self.observer = observer
        self.method = method

    def __call__(self, tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        result = self.method(self.quantizer, tensor, *arguments, **options)
        self.observer(tensor, result, known_scale(self.quantizer))
        return result


def known_scale(quantizer: Any) -> Tensor | None:
    """Return the scale that delayed scaling casts with, FP32 [1]; None for scales that follow from the values."""
    delayed = type(quantizer).__name__ == "Float8Quantizer"
    return quantizer.scale.reshape(1) if delayed else None


def _attach(module: Any, observers: Sequence[Observers]) -> None:
    """Give the observers of each GEMM to the quantizers that a module has now; an empty sequence removes them."""
    vars(module)[_OBSERVERS] = observers
    forward = module.quantizers.get("scaling_fwd", ())
    backward = module.quantizers.get("scaling_bwd", ())
    for gemm in range(len(forward) // 3):
        x, weight, dy = observers[gemm] if observers else (None, None, None)
        observe_quantizer(forward[3 * gemm], x)
        observe_quantizer(forward[3 * gemm + 1], weight)
        if len(backward) > 2 * gemm:
            observe_quantizer(backward[2 * gemm], dy)
        # A te.Linear caches "weight", a te.GroupedLinear "weight0" and on.
        names = [f"weight{gemm}", "weight"] if gemm == 0 else [f"weight{gemm}"]
        for name in names:
            # A tensor of Transformer Engine keeps a copy of its quantizer, which casts when the cache is renewed.
            cached = getattr(module._fp8_workspaces.get(name), "_quantizer", None)
            if cached is not None:
                observe_quantizer(cached, weight)
