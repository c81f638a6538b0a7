"""From a recipe to the quantizers of a module: one state for the forward slots and one for the backward slots.

te.Linear has the forward slots input, weight, output and the backward slots grad_output, grad_input. Only
DelayedScaling has state to keep: `scale` FP32 `[n]`, initially 1, and `amax_history` FP32 `[len, n]`, initially 0,
whose row 0 is the step in progress and whose last row is the newest finished step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import torch

from te_models.engine.emulated.numerics import DType
from te_models.engine.emulated.nvfp4 import NVFP4Quantizer
from te_models.engine.emulated.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    Quantizer,
)
from te_models.engine.emulated.recipe import DelayedScaling, Format, NVFP4BlockScaling, QParams, Recipe

FORWARD_SLOTS = ("input", "weight", "output")
BACKWARD_SLOTS = ("grad_output", "grad_input")


@dataclasses.dataclass(frozen=True)
class QuantizerRole:
    """What a tensor slot is for; a CustomRecipe's factory receives it."""

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""


@dataclasses.dataclass(frozen=True)
class QuantizerRequest:
    """Base of what a CustomRecipe's factory may return in place of a quantizer."""


@dataclasses.dataclass(frozen=True)
class DelayedScalingRequest(QuantizerRequest):
    """Asks for a delayed-scaling quantizer whose state the module keeps; fields as in DelayedScaling."""

    fp8_format: Format = Format.HYBRID
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[..., Any] = "max"
    scaling_factor_compute_algo: Callable[..., Any] | None = None
    reduce_amax: bool = True


def fp8_dtype(recipe: Recipe, forward: bool) -> DType:
    """The FP8 format of forward or backward tensors."""
    e4m3 = recipe.fp8_format == Format.E4M3 or (recipe.fp8_format == Format.HYBRID and forward)
    return DType.kFloat8E4M3 if e4m3 else DType.kFloat8E5M2


class RecipeState:
    """Quantizers of one direction of a module, without state of their own."""

    def __init__(self, recipe: Recipe, forward: bool, roles: list[QuantizerRole | None], device: torch.device) -> None:
        """One quantizer for each role."""
        self.recipe = recipe
        self.forward = forward
        self.mode = "forward" if forward else "backward"
        self.roles = roles
        self.device = device
        self.dtype = fp8_dtype(recipe, forward)
        self.num_quantizers = len(roles)

    def _slot(self, index: int) -> str:
        role = self.roles[index]
        defaults = FORWARD_SLOTS if self.forward else BACKWARD_SLOTS
        known = role is not None and role.tensor_type in FORWARD_SLOTS + BACKWARD_SLOTS
        return role.tensor_type if role is not None and known else defaults[index % len(defaults)]

    def make_quantizers(self) -> list[Any]:
        """One quantizer a slot."""
        return [self._make(self._slot(i)) for i in range(self.num_quantizers)]

    def _make(self, slot: str) -> Quantizer:
        raise NotImplementedError

    def _operand(self, slot: str, prefix: str) -> QParams:
        operand = {"weight": "fwd_weight", "grad_output": "bwd_grad", "grad_input": "bwd_grad"}.get(slot, "fwd_inp")
        return getattr(self.recipe, f"{prefix}_{operand}")


class DelayedScalingRecipeState(RecipeState):
    """Scales and amax histories; `FP8GlobalStateManager` updates them in place."""

    def __init__(self, recipe: Recipe, forward: bool, roles: list[QuantizerRole | None], device: torch.device) -> None:
        """Scale 1, history 0."""
        super().__init__(recipe, forward, roles, device)
        length = recipe.amax_history_len  # type: ignore[attr-defined]
        # A first forward under torch.inference_mode must not make tensors that training cannot update.
        with torch.inference_mode(False):
            self.scale = torch.ones(len(roles), dtype=torch.float32, device=device)
            self.amax_history = torch.zeros(length, len(roles), dtype=torch.float32, device=device)

    def make_quantizers(self) -> list[Any]:
        """Quantizers that share this state's tensors."""
        return [
            Float8Quantizer(self.scale[i], self.amax_history[0, i].view(1), self.dtype)
            for i in range(self.num_quantizers)
        ]


class Float8CurrentScalingRecipeState(RecipeState):
    """Per-tensor current scaling."""

    def _make(self, slot: str) -> Quantizer:
        """Outputs follow `use_power_2_scales`, the operands of a GEMM `fp8_quant_*`, as in Transformer Engine."""
        if slot in ("output", "grad_input"):
            power_of_2, epsilon = self.recipe.use_power_2_scales, 0.0  # type: ignore[attr-defined]
        else:
            params = self._operand(slot, "fp8_quant")
            power_of_2, epsilon = params.power_2_scale, params.amax_epsilon
        return Float8CurrentScalingQuantizer(
            self.dtype, self.device, force_pow_2_scales=power_of_2, amax_epsilon=epsilon
        )


class Float8BlockScalingRecipeState(RecipeState):
    """1x128 and 128x128 blocks."""

    def _make(self, slot: str) -> Quantizer:
        params = self._operand(slot, "fp8_quant")
        side = {"weight": "w", "grad_output": "grad", "grad_input": "grad"}.get(slot, "x")
        return Float8BlockQuantizer(
            self.dtype,
            rowwise=True,
            columnwise=True,
            amax_epsilon=params.amax_epsilon,
            force_pow_2_scales=params.power_2_scale,
            block_scaling_dim=getattr(self.recipe, f"{side}_block_scaling_dim"),
        )


class MXFP8BlockScalingRecipeState(RecipeState):
    """Blocks of 32."""

    def _make(self, slot: str) -> Quantizer:
        two_d = self.recipe.enable_2d_quantization and slot == "weight"  # type: ignore[attr-defined]
        return MXFP8Quantizer(self.dtype, with_2d_quantization=two_d)


class NVFP4BlockScalingRecipeState(RecipeState):
    """Blocks of 16 with two levels of scales."""

    def _make(self, slot: str) -> Quantizer:
        params, recipe = self._operand(slot, "fp4_quant"), cast(NVFP4BlockScaling, self.recipe)
        gradient = slot in BACKWARD_SLOTS
        scope = "weights" if slot == "weight" else "activations"
        four_over_six = not gradient and recipe.nvfp4_4over6 in ("all", scope)
        if four_over_six and params.random_hadamard_transform:
            raise ValueError("NVFP4 4over6 quantization does not support RHT: set disable_rht=True")
        return NVFP4Quantizer(
            with_rht=params.random_hadamard_transform,
            with_post_rht_amax=params.random_hadamard_transform,
            with_2d_quantization=params.fp4_2d_quantization,
            stochastic_rounding=params.stochastic_rounding,
            row_scaled_nvfp4=self.forward and slot != "weight" and recipe.row_scaled_activation,
            nvfp4_use_4over6=four_over_six,
            nvfp4_e4m3_max=256 if recipe.nvfp4_4over6_e4m3_use_256 in ("all", scope) else 448,
            nvfp4_4over6_err_mode=recipe.nvfp4_4over6_err_mode,
        )


class CustomRecipeState(RecipeState):
    """Quantizers from a factory; requests for delayed scaling share one inner state."""

    delayed: DelayedScalingRecipeState | None = None

    def make_quantizers(self) -> list[Any]:
        """What `recipe.qfactory` returns for each slot."""
        made = [self.recipe.qfactory(role or QuantizerRole()) for role in self.roles]  # type: ignore[attr-defined]
        for i, quantizer in enumerate(made):
            if quantizer is None:
                raise ValueError(f"CustomRecipe qfactory returned None for slot {i} (role={self.roles[i]})")
        slots = [i for i, quantizer in enumerate(made) if isinstance(quantizer, DelayedScalingRequest)]
        if not slots:
            return made
        if any(made[i] != made[slots[0]] for i in slots):
            raise ValueError("All DelayedScalingRequests in one CustomRecipeState must match.")
        inner = DelayedScaling(**dataclasses.asdict(made[slots[0]]))
        self.delayed = DelayedScalingRecipeState(inner, self.forward, [None] * len(slots), self.device)
        for i, quantizer in zip(slots, self.delayed.make_quantizers(), strict=True):
            made[i] = quantizer
        return made

    @property
    def scale(self) -> torch.Tensor | None:
        """Scales of the delayed-scaling slots."""
        return None if self.delayed is None else self.delayed.scale

    @property
    def amax_history(self) -> torch.Tensor | None:
        """Amax history of the delayed-scaling slots."""
        return None if self.delayed is None else self.delayed.amax_history


def make_state(recipe: Recipe, forward: bool, roles: list[QuantizerRole | None], device: torch.device) -> RecipeState:
    """The state class that belongs to the recipe."""
    classes = (
        (recipe.delayed, DelayedScalingRecipeState),
        (recipe.float8_current_scaling, Float8CurrentScalingRecipeState),
        (recipe.float8_block_scaling, Float8BlockScalingRecipeState),
        (recipe.mxfp8, MXFP8BlockScalingRecipeState),
        (recipe.nvfp4, NVFP4BlockScalingRecipeState),
        (recipe.custom, CustomRecipeState),
    )
    for matches, state in classes:
        if matches():
            return state(recipe, forward, roles, device)
    raise ValueError(f"{type(recipe).__name__} is not supported")


def delayed_state(state: RecipeState | None) -> DelayedScalingRecipeState | None:
    """The delayed-scaling state in `state`, if there is one."""
    if isinstance(state, CustomRecipeState):
        return state.delayed
    return state if isinstance(state, DelayedScalingRecipeState) else None
