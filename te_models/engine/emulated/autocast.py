"""The autocast context, the process-wide FP8 state, and delayed scaling's amax reduction and scale update.

The state machine is Transformer Engine's: forward scales are updated when the outermost enabled autocast is left with
grad enabled; backward scales when the backward of the first module of that autocast has run.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from te_models.engine.emulated import fused
from te_models.engine.emulated.numerics import FLT_MAX, FP8_MAX
from te_models.engine.emulated.recipe import DelayedScaling, MXFP8BlockScaling, Recipe
from te_models.engine.emulated.recipe_state import DelayedScalingRecipeState, fp8_dtype

_SUPPORT: dict[str, tuple[bool, str]] = dict.fromkeys(("fp8", "mxfp8", "fp8_block_scaling", "nvfp4"), (True, ""))


def _is_available(kind: str, return_reason: bool) -> bool | tuple[bool, str]:
    return _SUPPORT[kind] if return_reason else _SUPPORT[kind][0]


def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether DelayedScaling and Float8CurrentScaling can run: always, unless `set_support` says otherwise."""
    return _is_available("fp8", return_reason)


def is_mxfp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether MXFP8BlockScaling can run: always, unless `set_support` says otherwise."""
    return _is_available("mxfp8", return_reason)


def is_fp8_block_scaling_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether Float8BlockScaling can run: always, unless `set_support` says otherwise."""
    return _is_available("fp8_block_scaling", return_reason)


def is_nvfp4_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Whether NVFP4BlockScaling can run: always, unless `set_support` says otherwise."""
    return _is_available("nvfp4", return_reason)


@contextmanager
def set_support(**reasons: str) -> Iterator[None]:
    """Pretend that hardware lacks something: `set_support(mxfp8="needs compute capability 10.0")`; "" is support.

    Keywords are fp8, mxfp8, fp8_block_scaling and nvfp4.
    """
    before = dict(_SUPPORT)
    try:
        for kind, reason in reasons.items():
            if kind not in _SUPPORT:
                raise ValueError(f"unknown kind of support {kind!r}: choose one of {', '.join(_SUPPORT)}")
            _SUPPORT[kind] = (not reason, reason)
        yield
    finally:
        _SUPPORT.update(before)


def _support(recipe: Recipe) -> tuple[bool, str]:
    if recipe.mxfp8():
        return _SUPPORT["mxfp8"]
    if recipe.float8_block_scaling():
        return _SUPPORT["fp8_block_scaling"]
    return _SUPPORT["nvfp4"] if recipe.nvfp4() else _SUPPORT["fp8"]


def get_default_recipe() -> Recipe:
    """MXFP8BlockScaling where it is available, else DelayedScaling."""
    return MXFP8BlockScaling() if _SUPPORT["mxfp8"][0] else DelayedScaling()


def get_align_size_for_quantization(recipe: Recipe) -> int:
    """What the number of rows must be a multiple of."""
    if recipe.custom():
        return recipe.quantization_alignment  # type: ignore[attr-defined]
    if recipe.mxfp8():
        return 32
    return 128 if recipe.nvfp4() else 16


@dataclasses.dataclass
class FP8GlobalState:
    """What autocast and delayed scaling keep for the process."""

    fp8_enabled: bool = False
    fp8_calibration: bool = False
    fp8_recipe: Recipe | None = None
    fp8_distributed_group: Any = None
    is_first_fp8_module: bool = False
    fp8_graph_capturing: bool = False
    fp8_parameters: bool = False
    high_precision_init_val: bool = False
    autocast_depth: int = 0
    # The checkpoint whose first pass (recompute_phase False) or recomputation (True) is running.
    recompute_frame: Any = None
    recompute_phase: bool = False
    # Registered states by registry key and id, in order of registration: the order of the amax reduction.
    registry: dict[str, dict[int, DelayedScalingRecipeState]] = dataclasses.field(default_factory=dict)
    autocast_arguments: dict[str, tuple[Recipe | None, Any]] = dataclasses.field(default_factory=dict)
    latest_arguments: tuple[Recipe | None, Any] = (None, None)


class FP8GlobalStateManager:
    """Access to the process-wide state, under Transformer Engine's names."""

    quantization_state = FP8GlobalState()

    @classmethod
    def reset(cls) -> None:
        """Forget everything. A module that has run under DelayedScaling then needs `reset_fp8_state`."""
        cls.quantization_state = FP8GlobalState()

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """Whether an enabled autocast is active."""
        return cls.quantization_state.fp8_enabled

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        """Whether a calibrating autocast is active."""
        return cls.quantization_state.fp8_calibration

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        """Whether modules are made with quantized weights."""
        return cls.quantization_state.fp8_parameters

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        """The active recipe, or the default one."""
        return cls.quantization_state.fp8_recipe or get_default_recipe()

    @classmethod
    def get_fp8_group(cls) -> Any:
        """The active amax reduction group."""
        return cls.quantization_state.fp8_distributed_group

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        """True for the first caller within an autocast, which then has to update the backward scales."""
        first = cls.quantization_state.is_first_fp8_module
        cls.quantization_state.is_first_fp8_module = False
        return first

    @classmethod
    def get_unique_autocast_key(cls, recipe: Recipe | None = None, group: Any = None) -> str:
        """The key under which the states of a recipe and a reduction group are kept."""
        return f"recipe={recipe},group={None if group is None else id(group)}"

    @classmethod
    def use_arguments(cls, recipe: Recipe | None, group: Any) -> None:
        """Update the states of this recipe and group with these objects, which may have other callables, from now on."""
        state = cls.quantization_state
        if state.latest_arguments[0] is not recipe or state.latest_arguments[1] is not group:
            state.latest_arguments = (recipe, group)
            state.autocast_arguments[cls.get_unique_autocast_key(recipe, group)] = (recipe, group)

    @classmethod
    def register(cls, state: DelayedScalingRecipeState, recipe: Recipe, group: Any) -> None:
        """Let the updates reach `state`."""
        key = cls.get_unique_autocast_key(recipe, group)
        cls.quantization_state.autocast_arguments.setdefault(key, (recipe, group))
        cls.quantization_state.registry.setdefault(f"{state.mode}_{key}", {})[id(state)] = state

    @classmethod
    def is_registered(cls, state: DelayedScalingRecipeState) -> bool:
        """Whether updates reach `state`."""
        return any(id(state) in states for states in cls.quantization_state.registry.values())

    @classmethod
    def unregister(cls, state: DelayedScalingRecipeState) -> None:
        """Undo `register`."""
        for states in cls.quantization_state.registry.values():
            states.pop(id(state), None)

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
        """Reduce the amaxes of all registered modules over their group, then update histories and scales."""
        direction = "forward_" if forward else "backward_"
        for key, registered in cls.quantization_state.registry.items():
            if not registered or not key.startswith(direction):
                continue
            recipe, group = cls.quantization_state.autocast_arguments[key.removeprefix(direction)]
            assert isinstance(recipe, DelayedScaling)
            for device in dict.fromkeys(state.scale.device for state in registered.values()):
                states = [state for state in registered.values() if state.scale.device == device]
                _update(states, _reduced_amaxes(states, recipe, group), recipe, FP8_MAX[fp8_dtype(recipe, forward)])


def _world_size(group: Any) -> int:
    initialised = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size(group) if initialised else 1


def _reduced_amaxes(states: list[DelayedScalingRecipeState], recipe: DelayedScaling, group: Any) -> Tensor | None:
    """The largest amaxes of the step in progress over the group, concatenated; None where each rank has its own."""
    if not recipe.reduce_amax or _world_size(group) == 1:
        return None
    amaxes = torch.cat([state.amax_history[0] for state in states])
    torch.distributed.all_reduce(amaxes, torch.distributed.ReduceOp.MAX, group=group)
    return amaxes


def _update(
    states: list[DelayedScalingRecipeState], amaxes: Tensor | None, recipe: DelayedScaling, fp8_max: float
) -> None:
    """Update states that share a recipe and a device, given their reduced amaxes, or from those in their histories."""
    unfused = bool(int(os.getenv("NVTE_UNFUSED_FP8_UPDATE", "0")))
    unfused = unfused or callable(recipe.amax_compute_algo) or callable(recipe.scaling_factor_compute_algo)
    if not unfused and fused.active(states[0].scale):
        latest = recipe.amax_compute_algo != "max"
        fused.update([(s.amax_history, s.scale) for s in states], amaxes, latest, recipe.margin, fp8_max)
        return
    with torch.no_grad():
        _update_plain(states, amaxes, recipe, fp8_max, unfused)


def _update_plain(
    states: list[DelayedScalingRecipeState],
    amaxes: Tensor | None,
    recipe: DelayedScaling,
    fp8_max: float,
    unfused: bool,
) -> None:
    if amaxes is None:
        amaxes = torch.cat([state.amax_history[0] for state in states])
    split = amaxes.split([s.scale.numel() for s in states])
    if unfused:
        for state, amax in zip(states, split, strict=True):
            state.amax_history[0].copy_(amax)
            _update_unfused(state.amax_history, state.scale, recipe, fp8_max)
        return
    # Loaded state may have histories of another length than the recipe's: one pass for each length.
    for length in {s.amax_history.shape[0] for s in states}:
        pairs = [(s, a) for s, a in zip(states, split, strict=True) if s.amax_history.shape[0] == length]
        same = [s for s, _ in pairs]
        history, scale = _update_fused(
            torch.cat([s.amax_history for s in same], 1),
            torch.cat([s.scale for s in same]),
            torch.cat([a for _, a in pairs]),
            recipe,
            fp8_max,
        )
        widths = [s.scale.numel() for s in same]
        for state, rows, values in zip(same, history.split(widths, 1), scale.split(widths), strict=True):
            state.amax_history.copy_(rows)
            state.scale.copy_(values)


def _update_fused(
    history: Tensor, scale: Tensor, amax: Tensor, recipe: DelayedScaling, fp8_max: float
) -> tuple[Tensor, Tensor]:
    """New history `[len, n]` and scale `[n]`. A tensor that was silent in this step keeps both."""
    last = torch.where(amax != 0, amax, history[0])
    if recipe.amax_compute_algo == "max":
        used = (
            torch.maximum(history[1:].nan_to_num(nan=0.0, posinf=torch.inf).amax(0), last) if len(history) > 1 else last
        )
    else:
        used = last
    rolled = (
        torch.cat([torch.zeros_like(last)[None], history[2:], last[None]])
        if len(history) > 1
        else torch.zeros_like(history)
    )
    silent = last == 0
    usable = ~silent & torch.isfinite(used) & (used > 0)
    new = torch.full_like(used, fp8_max * 2.0**-recipe.margin).div_(used).clamp_(max=FLT_MAX)
    return torch.where(silent, history, rolled), torch.where(usable, new, scale)


def _update_unfused(history: Tensor, scale: Tensor, recipe: DelayedScaling, fp8_max: float) -> None:
    """The update in Python, which serves callables; unlike the fused one it rolls silent tensors too."""
    if callable(recipe.amax_compute_algo):
        amax = recipe.amax_compute_algo(history)
    else:
        amax = history.amax(0) if recipe.amax_compute_algo == "max" else history[0].clone()
    history.copy_(history.roll(-1, 0))
    history[0].zero_()
    if recipe.scaling_factor_compute_algo is not None:
        scale.copy_(recipe.scaling_factor_compute_algo(amax, scale, fp8_max, recipe))
        return
    new = (torch.full_like(amax, fp8_max).div_(amax) / 2**recipe.margin).clamp_(max=FLT_MAX)
    scale.copy_(torch.where((amax > 0) & torch.isfinite(amax), new, scale))


class autocast:
    """Context in which te.Linear runs in low precision under `recipe` (None: the default recipe)."""

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: Any = None,
        _graph: bool = False,
    ) -> None:
        """`amax_reduction_group` is the process group over which DelayedScaling reduces amaxes (None: all)."""
        self._enabled = enabled
        self._calibrating = calibrating
        self._recipe = recipe
        self._amax_reduction_group = amax_reduction_group
        self._graph = _graph
        self._saved: tuple[Any, ...] | None = None

    def __enter__(self) -> autocast:
        if self._saved is not None:
            raise RuntimeError("autocast context manager cannot be entered more than once concurrently")
        recipe = self._recipe or (get_default_recipe() if self._enabled else None)
        # Before any state is set, so that a refusal leaves nothing behind; Transformer Engine refuses NVFP4 and the
        # default recipe after it, which leaves FP8 on.
        supported, reason = _support(recipe) if self._enabled and recipe else (True, "")
        if not supported:
            named = self._recipe is not None and not self._recipe.nvfp4()
            raise RuntimeError(reason) if named else AssertionError(reason)
        state = FP8GlobalStateManager.quantization_state
        frame, delayed = state.recompute_frame, recipe is not None and recipe.delayed()
        if self._enabled and delayed and frame is not None and frame.reentrant and not frame.fp8:
            raise RuntimeError(
                "te.autocast with DelayedScaling inside a function under te.checkpoint(use_reentrant=True) would never "
                "update its scales: open te.autocast outside, or pass use_reentrant=False"
            )
        self._saved = _autocast_fields(state)
        if delayed:  # the others have no state to update
            FP8GlobalStateManager.use_arguments(recipe, self._amax_reduction_group)
        state.fp8_enabled, state.fp8_calibration, state.fp8_recipe = self._enabled, self._calibrating, recipe
        state.fp8_distributed_group, state.fp8_graph_capturing = self._amax_reduction_group, self._graph
        if state.autocast_depth == 0:
            state.is_first_fp8_module = True
        state.autocast_depth += 1
        return self

    def __exit__(self, *exception: Any) -> None:
        state = FP8GlobalStateManager.quantization_state
        saved, self._saved = self._saved, None
        for name, value in zip(_AUTOCAST_FIELDS, saved or (), strict=True):
            setattr(state, name, value)
        state.autocast_depth -= 1
        if self._enabled and state.autocast_depth == 0 and not self._graph and torch.is_grad_enabled():
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)


_AUTOCAST_FIELDS = (
    "fp8_enabled", "fp8_calibration", "fp8_recipe", "fp8_distributed_group", "is_first_fp8_module",
    "fp8_graph_capturing",
)  # fmt: skip
_autocast_fields = attrgetter(*_AUTOCAST_FIELDS)


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> autocast:
    """The former name of `autocast`, deprecated."""
    warnings.warn("fp8_autocast is deprecated: use autocast(recipe=...)", DeprecationWarning, stacklevel=2)
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)


@contextmanager
def quantized_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """Make the weights of te modules built inside quantized tensors.

    With `preserve_high_precision_init_val` each keeps its initial value on the CPU: `p.get_high_precision_init_val()`,
    `p.clear_high_precision_init_val()`.
    """
    state = FP8GlobalStateManager.quantization_state
    names = ("fp8_parameters", "fp8_recipe", "high_precision_init_val")
    saved = [getattr(state, name) for name in names]
    state.fp8_parameters = enabled
    state.fp8_recipe = recipe if recipe is not None else get_default_recipe()
    state.high_precision_init_val = preserve_high_precision_init_val
    try:
        yield
    finally:
        for name, value in zip(names, saved, strict=True):
            setattr(state, name, value)


def fp8_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> Any:
    """The former name of `quantized_model_init`, deprecated."""
    warnings.warn("fp8_model_init is deprecated: use quantized_model_init", DeprecationWarning, stacklevel=2)
    return quantized_model_init(enabled, recipe, preserve_high_precision_init_val)
