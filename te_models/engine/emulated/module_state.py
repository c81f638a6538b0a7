"""Functions of both engines that reach into the state of te modules: reset it, observe it, take cached weights out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from te_models.engine.emulated.module import TransformerEngineBaseModule
from te_models.numerics.quantizers import Quantizer
from te_models.recorder.table import Observer, Observers


def reset_fp8_state(module: nn.Module) -> None:
    """Drop the FP8 state, cached weights and registered scales of the te modules in `module`.

    The next forward starts afresh under any recipe.
    """
    for child in module.modules():
        if isinstance(child, TransformerEngineBaseModule):
            child.reset_fp8_state()


def separate_copy(module: TransformerEngineBaseModule) -> None:
    """Give a copied te.Linear scales of its own to update: done by `__setstate__` here, not in Transformer Engine."""


def set_observers(
    module: TransformerEngineBaseModule, observers: Sequence[Observers] | None
) -> None:
    """Let observers count the casts of a te.Linear from its next forward on; None: remove its observers."""
    module.observers = observers
    if observers is None:
        for quantizers in module.quantizers.values():
            for quantizer in quantizers:
                quantizer.observer = None


def observe_quantizer(quantizer: Quantizer, observer: Observer | None) -> None:
    """Let an observer count the casts of a quantizer; None: remove its observer."""
    quantizer.observer = observer


def drop_cached_weights(module: TransformerEngineBaseModule) -> None:
    """Drop the weights that a te.Linear keeps for is_first_microbatch=False."""
    module._fp8_workspaces.clear()
    module._packed.clear()


def take_cached_weights(module: TransformerEngineBaseModule) -> dict[str, Any]:
    """Take the weights that a te.Linear keeps for is_first_microbatch=False out of it; {}: it has none."""
    cached = {"quantized": dict(module._fp8_workspaces), "packed": dict(module._packed)}
    drop_cached_weights(module)
    return cached if any(cached.values()) else {}


def give_cached_weights(module: TransformerEngineBaseModule, weights: dict[str, Any]) -> None:
    """Give a te.Linear back what `take_cached_weights` returned."""
    module._fp8_workspaces.update(weights.get("quantized", {}))
    module._packed.update(weights.get("packed", {}))
