"""Transformer Engine itself, under the names that the layers use. Only the files engine/native*.py import it.

Beyond its public names: linears for PyTorch's interface and for stored weights, LayerNorm without a bias,
`reset_fp8_state`, so that the recipe of a live model can change, and `handover`, the operations that write FP8 for a
te.Linear (native_handover.py). Sections are in docs/internals/transformer_engine.md.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import torch
import transformer_engine.pytorch as _te
import transformer_engine_torch as tex
from torch import Tensor
from transformer_engine.common import recipe
from transformer_engine.pytorch import (
    DType,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
    GroupedLinear,
    Linear,
    MXFP8Quantizer,
    QuantizedTensor,
    RMSNorm,
    RotaryPositionEmbedding,
    TransformerLayer,
    checkpoint,
    get_default_recipe,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
)
from transformer_engine.pytorch.quantization import (
    DelayedScalingRecipeState,
    FP8GlobalStateManager,
    get_align_size_for_quantization,
)

from te_models.engine import native_experts, native_observers, native_scales
from te_models.engine.native_handover import handover
from te_models.engine.native_linear import LinearOfTorch, StoredLinear
from te_models.engine.native_norm import LayerNormWithoutBias
from te_models.engine.native_observers import (
    observe_quantizer,
    set_observers,
)

__version__ = version("transformer-engine")
autocast = _te.autocast
fp8_autocast = _te.fp8_autocast
quantized_model_init = _te.quantized_model_init


native_scales.install()
native_observers.install(tex)
StoredGroupedLinear = native_experts.StoredGroupedLinear
runs_stored_experts = native_experts.runs_stored_experts
STORED_RECIPES = native_experts.STORED_RECIPES
# The layers that quantize: each has `fp8_meta` and quantizers.
LINEARS = (Linear, GroupedLinear)
# The emulated engine refuses recomputes whose caller does not restore its state.
restored_recompute = contextlib.nullcontext

__all__ = [
    "DType",
    "FP8GlobalStateManager",
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8Tensor",
    "GroupedLinear",
    "LINEARS",
    "LayerNormWithoutBias",
    "Linear",
    "LinearOfTorch",
    "MXFP8Quantizer",
    "QuantizedTensor",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "StoredGroupedLinear",
    "StoredLinear",
    "TransformerLayer",
    "autocast",
    "checkpoint",
    "fp8_autocast",
    "get_align_size_for_quantization",
    "get_default_recipe",
    "handover",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "observe_quantizer",
    "outside_autocast",
    "quantized_model_init",
    "recipe",
    "region_lock",
    "reset_fp8_state",
    "restored_recompute",
    "row_padding",
    "runs_stored_experts",
    "separate_copy",
    "set_observers",
    "drop_cached_weights",
    "give_cached_weights",
    "take_cached_weights",
]


@contextlib.contextmanager
def outside_autocast() -> Iterator[recipe.Recipe | None]:
    """Leave all autocasts around the caller, and yield the recipe of the enabled one, if there is one.

    An autocast inside behaves as if nested in a disabled one: its exit updates no scale (section 2.5).
    """
    state = FP8GlobalStateManager.quantization_state
    saved = FP8GlobalStateManager.get_autocast_state()
    depth = state.autocast_depth
    left = state.fp8_recipe if state.fp8_enabled else None
    state.fp8_enabled = False
    state.fp8_calibration = False
    state.is_first_fp8_module = False
    state.fp8_recipe = None
    state.fp8_distributed_group = None
    # Depth 1: an autocast inside is never the outermost one, whose exit updates scales.
    state.autocast_depth = 1
    try:
        yield left
    finally:
        FP8GlobalStateManager.set_autocast_state(saved)
        state.autocast_depth = depth


@contextlib.contextmanager
def row_padding(model: torch.nn.Module, tokens: Tensor, multiple: int) -> Iterator[int]:
    """Surround a forward pass; yield the multiple to pad its rows to, which on a GPU is always the recipe's."""
    yield multiple


_LOCK = threading.RLock()  # Transformer Engine's FP8 state belongs to the process


def region_lock(model: torch.nn.Module, quantized: bool) -> threading.RLock:
    """Return the lock that lets one forward pass run at a time, over all models in the process, also in BF16."""
    return _LOCK


def reset_fp8_state(module: Linear) -> None:
    """Drop a te.Linear's FP8 state, so that its next forward starts afresh under any recipe.

    Otherwise Transformer Engine keeps the old quantizers within one recipe class, and after a change of class and back
    the scales stay 1 forever, since a module registers for updates only once (sections 2.8 and 7.12).
    """
    registry = FP8GlobalStateManager.quantization_state
    for direction in ("scaling_fwd", "scaling_bwd"):
        state = module.fp8_meta.pop(direction, None)
        if not isinstance(state, DelayedScalingRecipeState):
            continue
        history = state.amax_history
        for key, histories in registry.global_amax_history_buffer.items():
            # The three buffers of the registry are parallel lists: the same entries leave all of them.
            keep = [i for i, other in enumerate(histories) if other is not history]
            for buffers in (
                registry.global_amax_buffer,
                registry.global_amax_history_buffer,
                registry.global_scale_buffer,
            ):
                buffers[key] = [buffers[key][i] for i in keep]
    for name in (
        "recipe",
        FP8GlobalStateManager.get_buffer_info(),
        "global_fp8_buffer_pos_fwd_recompute",
    ):
        module.fp8_meta.pop(name, None)
    module.quantizers = {"scaling_fwd": [], "scaling_bwd": []}
    module.fp8_initialized = False
    module.fp8_meta_tensors_initialized = False
    module._fp8_workspaces.clear()


def separate_copy(module: Linear) -> None:
    """Give a copied te.Linear scales of its own to update.

    A copy looks registered to Transformer Engine, which then never updates its scales (section 2.8).
    """
    set_observers(module, None)  # else the observers of the original would count its casts
    for name in (FP8GlobalStateManager.get_buffer_info(), "global_fp8_buffer_pos_fwd_recompute"):
        module.fp8_meta.pop(name, None)
    for direction in ("scaling_fwd", "scaling_bwd"):
        state = module.fp8_meta.get(direction)
        if isinstance(state, DelayedScalingRecipeState):
            module.quantizers[direction] = state.make_quantizers()


def drop_cached_weights(module: Linear) -> None:
    """Drop the FP8 weight that a te.Linear caches for is_first_microbatch=False."""
    module._fp8_workspaces.clear()


def take_cached_weights(module: Linear) -> dict[str, Any]:
    """Take the FP8 weights that a te.Linear caches out of it; {}: it has none."""
    cached = dict(module._fp8_workspaces)
    module._fp8_workspaces.clear()
    return cached


def give_cached_weights(module: Linear, weights: dict[str, Any]) -> None:
    """Give a te.Linear back what `take_cached_weights` returned."""
    module._fp8_workspaces.update(weights)
