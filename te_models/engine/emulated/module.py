"""The FP8 side of a te module: its state, its quantizers, and what happens before and after a forward pass."""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from te_models.engine.emulated.autocast import FP8GlobalStateManager
from te_models.engine.emulated.numerics import device_type
from te_models.engine.emulated.recipe import Recipe
from te_models.engine.emulated.recipe_state import (
    BACKWARD_SLOTS,
    FORWARD_SLOTS,
    DelayedScalingRecipeState,
    QuantizerRole,
    delayed_state,
    make_state,
)
from te_models.engine.emulated.tensors import QuantizedTensor

DIRECTIONS = ("scaling_fwd", "scaling_bwd")
_REGISTERED = "buffer_index_and_autocast_key"


class _Restored:
    depth = 0


@contextlib.contextmanager
def restored_recompute() -> Iterator[None]:
    """Inside, recomputes in the backward pass are not refused: the caller restores autocast and scales itself."""
    _Restored.depth += 1
    try:
        yield
    finally:
        _Restored.depth -= 1


def empty_extra_state() -> Tensor:
    """What `_extra_state` holds in a state_dict: the FP8 state is saved elsewhere, and never as a pickle."""
    return torch.empty(0, dtype=torch.uint8)


def check_extra_state(owner: str, state: Tensor | None) -> None:
    """Accept an absent or empty extra state; Transformer Engine's pickled one is refused."""
    if state is not None and (not isinstance(state, Tensor) or state.numel()):
        raise RuntimeError(
            f"Refusing to load pickled Transformer Engine extra state for {owner}. "
            "Replace the _extra_state entry by torch.empty(0, dtype=torch.uint8)"
        )


class TransformerEngineBaseModule(nn.Module):
    """Base of modules with quantizers. `fp8_meta` holds the states under "scaling_fwd" and "scaling_bwd"."""

    weight_names: list[str]
    _made = 0

    def __init__(self, name: str | None = None) -> None:
        """No FP8 state yet: the first forward under an autocast makes it."""
        super().__init__()
        TransformerEngineBaseModule._made += 1
        self.name = name or f"Layer_{TransformerEngineBaseModule._made}"
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False, "fp8_group": None}
        self.quantizers: dict[str, list[Any]] = {direction: [] for direction in DIRECTIONS}
        self._fp8_workspaces: dict[str, Any] = {}
        self.activation_dtype: torch.dtype | None = None
        self.fp8 = self.fp8_calibration = self.fp8_initialized = self.fp8_meta_tensors_initialized = False
        state = FP8GlobalStateManager.quantization_state
        self._is_fsdp2 = False  # set by who cuts the parameters up; Transformer Engine looks for it by itself
        self.primary_weights_in_fp8 = state.fp8_parameters
        self.preserve_high_precision_init_val = state.high_precision_init_val
        # Delayed scaling under activation checkpointing: (checkpoint, history, scale) of each first pass, oldest first.
        self._stash: deque[tuple[Any, Tensor, Tensor]] = deque()
        self._current: tuple[Tensor, Tensor] | None = None
        self._tracked = False  # the last forward ran with grad enabled

    @property
    def _delayed(self) -> DelayedScalingRecipeState | None:
        """The forward state of delayed scaling, if the module runs under it."""
        return delayed_state(self.fp8_meta.get("scaling_fwd"))

    def get_quantizer_roles(self, *, fwd: bool) -> list[QuantizerRole | None]:
        """The roles of the module's tensor slots; None for a consumer that the module does not know."""
        slots, known = (FORWARD_SLOTS, 2) if fwd else (BACKWARD_SLOTS, 1)
        return [QuantizerRole("linear", slot, self.name) if i < known else None for i, slot in enumerate(slots)]

    def set_meta_tensor(self, fwd: bool, recipe: Recipe) -> None:
        """Make the state and the quantizers of one direction; existing delayed-scaling state is kept."""
        key = DIRECTIONS[not fwd]
        old = self.fp8_meta.get(key)
        if recipe.delayed() and isinstance(old, DelayedScalingRecipeState):
            rows, asked = len(old.amax_history), recipe.amax_history_len  # type: ignore[attr-defined]
            if rows != asked:
                raise RuntimeError(
                    f"{self.name} has an amax history of {rows} rows, the recipe asks for {asked}: "
                    "use that length, or call reset_fp8_state(module) first"
                )
            old.recipe = recipe
            return
        if recipe.custom() and old is not None and old.recipe is recipe:
            return
        device = getattr(self, self.weight_names[0]).device
        device = torch.get_default_device() if device.type == "meta" else device
        state = make_state(recipe, fwd, self.get_quantizer_roles(fwd=fwd), device)
        self.fp8_meta[key] = state
        self.quantizers[key] = state.make_quantizers()

    def init_fp8_meta_tensors(self, recipe: Recipe) -> None:
        """Make scales and amax histories before the first forward, for instance to copy loaded values into them."""
        self.fp8_meta.setdefault("num_gemms", 1)
        for fwd in (True, False):
            self.set_meta_tensor(fwd, recipe)
        self.fp8_meta_tensors_initialized = True

    def reset_fp8_meta_tensors(self) -> None:
        """Set scales to 1 and amax histories to 0, in place."""
        for key in DIRECTIONS:
            if state := delayed_state(self.fp8_meta.get(key)):
                state.scale.fill_(1.0)
                state.amax_history.zero_()

    def init_fp8_metadata(self) -> None:
        """Bring the module's FP8 state in line with the active autocast."""
        state, meta = FP8GlobalStateManager.quantization_state, self.fp8_meta
        # Only what changes is assigned, here and below: nn.Module's assignment takes the host microseconds.
        if self.fp8 != state.fp8_enabled or self.fp8_calibration != state.fp8_calibration:
            self.fp8, self.fp8_calibration = state.fp8_enabled, state.fp8_calibration
        enabled = meta["fp8_checkpoint"] = self.fp8 or self.fp8_calibration
        if not (enabled or state.fp8_parameters):
            if self.fp8_initialized:
                self.fp8_initialized = False
            return
        recipe, old = FP8GlobalStateManager.get_fp8_recipe(), meta.get("recipe")
        if self.fp8_initialized and (recipe is old or (recipe == old and repr(recipe) == repr(old))):
            return
        self._check_recipe_change(old, recipe)
        meta["recipe"] = recipe
        meta["num_gemms"] = 1
        meta["fp8_group"] = FP8GlobalStateManager.get_fp8_group()
        meta["fp8_max_fwd"], meta["fp8_max_bwd"] = recipe.fp8_format.value
        self.init_fp8_meta_tensors(recipe)
        self.fp8_initialized = enabled
        if old is not None and type(old) is not type(recipe):
            warnings.warn(
                f"Recipe type changed from {type(old).__name__} to {type(recipe).__name__}. "
                "This may affect model behavior.",
                stacklevel=2,
            )
            self._fp8_workspaces.clear()

    def _check_recipe_change(self, old: Recipe | None, new: Recipe) -> None:
        """Refuse changes that Transformer Engine accepts without a word and then does not carry out."""
        if _REGISTERED not in self.fp8_meta or not new.delayed():
            return
        if old is None or not old.delayed():
            raise RuntimeError(
                f"{self.name} went from DelayedScaling to another recipe and back, which would freeze its scales: "
                "call reset_fp8_state(module) at each change"
            )
        if repr(old) != repr(new):
            raise RuntimeError(
                f"{self.name} is already registered with DelayedScaling({old!r}), so the change to ({new!r}) "
                "would have no effect: call reset_fp8_state(module) first"
            )

    def set_activation_dtype(self, inp: Tensor) -> None:
        """The dtype of outputs: torch.autocast's, else the input's, which the parameters must then share."""
        device = device_type(inp)
        if torch.is_autocast_enabled(device):
            self.activation_dtype = torch.get_autocast_dtype(device)
            return
        if self.activation_dtype == inp.dtype:
            return
        for name, param in self.named_parameters():
            if param.dtype != inp.dtype:
                raise TypeError(
                    "Data types for parameters must match when outside of autocasted region. "
                    f"Found input dtype: {inp.dtype} and {name!r} dtype: {param.dtype}"
                )
        self.activation_dtype = inp.dtype

    def prepare_forward(self, inp: Tensor, weights: list[Any]) -> None:
        """What has to be in place before the operands are quantized; `weights` in the order of `weight_names`."""
        state = FP8GlobalStateManager.quantization_state
        if self.fp8 and state.recompute_phase:
            self._restore_stash(state.recompute_frame)
            return
        self._refuse_foreign_recompute()
        self.set_activation_dtype(inp)
        self._check_weight_recipe(weights)
        self.init_fp8_metadata()
        forward = self._delayed if self.fp8 else None
        if forward is None:
            return
        self._register()
        if state.recompute_frame is not None:
            self._stash.append((state.recompute_frame, forward.amax_history.clone(), forward.scale.clone()))

    def end_forward(self) -> None:
        """Put delayed scaling's state back after a recomputation."""
        if self._current is None:
            return
        if (forward := self._delayed) is not None:
            forward.amax_history.copy_(self._current[0])
            forward.scale.copy_(self._current[1])
        self._current = None

    def _restore_stash(self, frame: Any) -> None:
        """Recompute with the scales of the first pass; what the casts record is undone by `end_forward`."""
        forward = self._delayed
        if forward is None:
            return
        if not self._stash or self._stash[0][0] is not frame:
            raise RuntimeError(
                f"{self.name} ran under te.checkpoint and delayed scaling in a forward whose backward never came, or "
                "backwards run in another order than forwards, so the stashed scales belong to another forward: "
                "call reset_fp8_state(module), and run forwards without a backward under torch.no_grad()"
            )
        _, history, scale = self._stash.popleft()
        self._current = (forward.amax_history.clone(), forward.scale.clone())
        forward.amax_history.copy_(history)
        forward.scale.copy_(scale)

    def _refuse_foreign_recompute(self) -> None:
        """torch.utils.checkpoint recomputes in the backward pass, where the autocast of the forward is gone."""
        before, now = self._tracked, torch.is_grad_enabled()
        if now != before:
            self._tracked = now
        if torch._C._current_graph_task_id() == -1 or _Restored.depth:
            return
        enabled = FP8GlobalStateManager.is_fp8_enabled()
        if self.fp8 and not enabled:
            raise RuntimeError(
                f"{self.name} ran in FP8 and is recomputed without te.autocast (torch.utils.checkpoint?): "
                "use te.checkpoint, or open te.autocast inside the checkpointed function"
            )
        if enabled and before and self._delayed is not None:
            raise RuntimeError(
                f"{self.name} is recomputed by torch.utils.checkpoint(use_reentrant=False) with delayed scales that "
                "have changed since the forward: use te.checkpoint"
            )

    def _register(self) -> None:
        states = [delayed_state(self.fp8_meta[key]) for key in DIRECTIONS]
        if _REGISTERED not in self.fp8_meta:
            self.fp8_meta[_REGISTERED] = []
            for state in states:
                if state is not None:
                    FP8GlobalStateManager.register(state, state.recipe, self.fp8_meta["fp8_group"])
        elif not all(state is None or FP8GlobalStateManager.is_registered(state) for state in states):
            raise RuntimeError(
                f"{self.name} is a copy of a module that has run under DelayedScaling, or the global FP8 state was "
                "reset after it ran: its scales would never be updated; call reset_fp8_state(module) first"
            )

    def _check_weight_recipe(self, weights: list[Any]) -> None:
        """Quantized weights run under the recipe that they were made for, or dequantized."""
        pairs = zip(self.weight_names, weights, strict=True)
        quantized = [(name, weight) for name, weight in pairs if isinstance(weight, QuantizedTensor)]
        if quantized and not FP8GlobalStateManager.is_fp8_enabled():
            warnings.warn(
                "You are using quantized weights without quantized compute. Please make sure this is intentional.",
                stacklevel=4,
            )
            return
        for name, weight in quantized:
            recipe, expected = FP8GlobalStateManager.get_fp8_recipe(), weight._quantizer._get_compatible_recipe()
            if not isinstance(recipe, expected):
                raise RuntimeError(
                    f"Recipe mismatch for {name!r}: tensor supports recipe {expected.__name__}, but got "
                    f"{type(recipe).__name__}. Use the same recipe in quantized_model_init() and autocast()."
                )

    def reset_fp8_state(self) -> None:
        """See `te_models.engine.emulated.reset_fp8_state`."""
        for key in DIRECTIONS:
            if (state := delayed_state(self.fp8_meta.get(key))) is not None:
                FP8GlobalStateManager.unregister(state)
        self.fp8_meta = {"fp8_checkpoint": False, "fp8_group": None}
        self.quantizers = {direction: [] for direction in DIRECTIONS}
        self._fp8_workspaces.clear()
        self._stash.clear()
        self._current = None
        self.fp8 = self.fp8_calibration = self.fp8_initialized = self.fp8_meta_tensors_initialized = False

    def _apply(self, fn: Any, recurse: bool = True) -> TransformerEngineBaseModule:
        """Move the FP8 state along with the parameters."""
        super()._apply(fn, recurse)
        device = getattr(self, self.weight_names[0]).device
        for key in DIRECTIONS:
            state = delayed_state(self.fp8_meta.get(key))
            if state is not None and state.scale.device != device:
                state.scale, state.amax_history = state.scale.to(device), state.amax_history.to(device)
                self.quantizers[key] = state.make_quantizers()
        return self

    def get_extra_state(self) -> Tensor:
        """An empty tensor: the key has to be there, as in Transformer Engine."""
        return empty_extra_state()

    def set_extra_state(self, state: Tensor | None) -> None:
        """Accept an empty state."""
        check_extra_state(type(self).__name__, state)


def reset_fp8_state(module: nn.Module) -> None:
    """Drop a module's FP8 state, cached weights and registry entry; the next forward starts afresh under any recipe.

    Works on a te.Linear, and on any other module by way of the te.Linear modules in it.
    """
    for child in module.modules():
        if isinstance(child, TransformerEngineBaseModule):
            child.reset_fp8_state()


def drop_cached_weights(module: TransformerEngineBaseModule) -> None:
    """Forget the weight codes that a te.Linear keeps for is_first_microbatch=False."""
    module._fp8_workspaces.clear()
