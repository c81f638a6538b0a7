"""The autocast context and the FP8 state of the thread that runs in it.

Forward scales of delayed scaling are updated when the outermost enabled autocast is left with grad enabled; backward
scales when the backward of the first module of that autocast has run (sections 2.5 and 2.6 of
docs/internals/transformer_engine.md). Unlike Transformer Engine's, the state belongs to the thread: an autocast in one
thread does not reach another, and an autocast that is left by an exception updates nothing.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch.distributed import ProcessGroup

from te_models.engine.emulated.delayed_scaling import ScaleRegistry
from te_models.engine.emulated.recipe import MXFP8BlockScaling, Recipe
from te_models.errors import require

if TYPE_CHECKING:
    from te_models.engine.emulated.recompute import Frame


def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Return True: DelayedScaling and Float8CurrentScaling run on any device."""
    return (True, "") if return_reason else True


is_mxfp8_available = is_fp8_block_scaling_available = is_nvfp4_available = is_fp8_available


def get_default_recipe() -> Recipe:
    """Return MXFP8BlockScaling, Transformer Engine's default where MXFP8 runs."""
    return MXFP8BlockScaling()


def get_align_size_for_quantization(recipe: Recipe) -> int:
    """Return the number that the rows of an input must be a multiple of."""
    if recipe.mxfp8():
        return 32
    return 128 if recipe.nvfp4() else 16


class FP8GlobalState(threading.local):
    """The FP8 state of a thread: each thread that reads it has its own, initially as here."""

    def __init__(self) -> None:
        self.fp8_enabled = False
        self.fp8_recipe: Recipe | None = None
        self.fp8_distributed_group: ProcessGroup | None = None
        self.is_first_fp8_module = False
        self.autocast_depth = 0
        self.fp8_parameters = False
        self.high_precision_init_val = False
        # The te.checkpoint whose first pass (recompute_phase False) or recompute (True) is running.
        self.recompute_frame: Frame | None = None
        self.recompute_phase = False
        # Above 0, recomputes in the backward pass are allowed: their caller restores autocast and scales.
        self.restored_recomputes = 0
        self.scales = ScaleRegistry()


class FP8GlobalStateManager:
    """Access to the thread's state, under Transformer Engine's names."""

    quantization_state = FP8GlobalState()

    @classmethod
    def reset(cls) -> None:
        """Forget everything, in all threads. Modules register their scales again at their next forward."""
        cls.quantization_state = FP8GlobalState()

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """Return True inside an enabled autocast."""
        return cls.quantization_state.fp8_enabled

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        """Return the active recipe, or the default one."""
        return cls.quantization_state.fp8_recipe or get_default_recipe()

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        """Return True to the first caller within an autocast, whose backward then updates the backward scales."""
        first = cls.quantization_state.is_first_fp8_module
        cls.quantization_state.is_first_fp8_module = False
        return first

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
        """Update the scales of the modules that this thread trains."""
        cls.quantization_state.scales.update(forward)

    @classmethod
    def update_backward(cls, scales: ScaleRegistry) -> None:
        """Update backward scales at the end of a backward, which autograd may run in a thread of its own."""
        state = cls.quantization_state
        before = state.scales
        state.scales = scales
        try:
            cls.reduce_and_update_fp8_tensors(forward=False)
        finally:
            state.scales = before


class autocast:
    """Context in which te.Linear runs in low precision under `recipe` (None: the default recipe)."""

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: ProcessGroup | None = None,
    ) -> None:
        """Reduce the amaxes of DelayedScaling over the processes of `amax_reduction_group` (None: all)."""
        require(
            not calibrating, "calibrating=True is not emulated: leave it out", NotImplementedError
        )
        self._enabled = enabled
        self._recipe = recipe
        self._amax_reduction_group = amax_reduction_group
        self._saved: AutocastFields | None = None

    def __enter__(self) -> autocast:
        again = "autocast context manager cannot be entered more than once concurrently"
        require(self._saved is None, again, RuntimeError)
        recipe = self._recipe or (get_default_recipe() if self._enabled else None)
        state = FP8GlobalStateManager.quantization_state
        frame = state.recompute_frame
        delayed = recipe is not None and recipe.delayed()
        if self._enabled and delayed and frame is not None and frame.reentrant and not frame.fp8:
            raise RuntimeError(
                "te.autocast with DelayedScaling inside a function under te.checkpoint(use_reentrant=True) would never "
                "update its scales: open te.autocast outside, or pass use_reentrant=False"
            )
        self._saved = _autocast_fields(state)
        # A nested autocast keeps the flag of the outer one, unless a module there has taken it.
        first = state.is_first_fp8_module or state.autocast_depth == 0
        _set_autocast_fields(state, (self._enabled, recipe, self._amax_reduction_group, first))
        state.autocast_depth += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        state = FP8GlobalStateManager.quantization_state
        assert self._saved is not None
        _set_autocast_fields(state, self._saved)
        self._saved = None
        state.autocast_depth -= 1
        # A disabled outermost autocast updates nothing, which is how te_models.fp8.region takes the update over.
        if self._enabled and state.autocast_depth == 0 and torch.is_grad_enabled():
            if kind is None:
                FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)
            else:
                # Half of a pass must not enter the history; Transformer Engine itself updates with it.
                state.scales.discard_amaxes()


AutocastFields = tuple[bool, Recipe | None, ProcessGroup | None, bool]


def _autocast_fields(state: FP8GlobalState) -> AutocastFields:
    return (
        state.fp8_enabled,
        state.fp8_recipe,
        state.fp8_distributed_group,
        state.is_first_fp8_module,
    )


def _set_autocast_fields(state: FP8GlobalState, values: AutocastFields) -> None:
    state.fp8_enabled, state.fp8_recipe, state.fp8_distributed_group, state.is_first_fp8_module = (
        values
    )


@contextmanager
def outside_autocast() -> Iterator[Recipe | None]:
    """Leave all autocasts around the caller, and yield the recipe of the enabled one, if there is one.

    An autocast inside behaves as if nested in a disabled one: its exit updates no scale.
    """
    state = FP8GlobalStateManager.quantization_state
    saved = _autocast_fields(state)
    depth = state.autocast_depth
    left = state.fp8_recipe if state.fp8_enabled else None
    # Depth 1 below: an autocast inside is then never the outermost one, whose exit updates scales.
    _set_autocast_fields(state, (False, None, None, False))
    state.autocast_depth = 1
    try:
        yield left
    finally:
        _set_autocast_fields(state, saved)
        state.autocast_depth = depth


_LOCKS: weakref.WeakKeyDictionary[torch.nn.Module, threading.RLock] = weakref.WeakKeyDictionary()


def region_lock(model: torch.nn.Module, quantized: bool) -> AbstractContextManager[object]:
    """Return the lock of a model, for threads that share its quantizers and scales; a model in BF16 has none."""
    return _LOCKS.setdefault(model, threading.RLock()) if quantized else nullcontext()


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: ProcessGroup | None = None,
) -> autocast:
    """Return an `autocast`; deprecated name."""
    warnings.warn(
        "fp8_autocast is deprecated: use autocast(recipe=...)", DeprecationWarning, stacklevel=2
    )
    return autocast(enabled, calibrating, fp8_recipe, fp8_group)


@contextmanager
def quantized_model_init(
    enabled: bool = True,
    recipe: Recipe | None = None,
    preserve_high_precision_init_val: bool = False,
) -> Iterator[None]:
    """Make the weights of te modules built inside quantized tensors.

    With `preserve_high_precision_init_val` each keeps its initial value on the CPU: `p.get_high_precision_init_val()`,
    `p.clear_high_precision_init_val()`.
    """
    state = FP8GlobalStateManager.quantization_state
    saved = state.fp8_parameters, state.fp8_recipe, state.high_precision_init_val
    state.fp8_parameters = enabled
    state.fp8_recipe = recipe if recipe is not None else get_default_recipe()
    state.high_precision_init_val = preserve_high_precision_init_val
    try:
        yield
    finally:
        state.fp8_parameters, state.fp8_recipe, state.high_precision_init_val = saved
