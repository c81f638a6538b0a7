"""Delayed scaling: the scales and amax histories of a module, and the update that turns an amax into a scale.

Section 2 of docs/internals/transformer_engine.md. A cast multiplies by `scale` as it stands and records the tensor's
amax in row 0 of the history; the update after a pass moves that amax to the last row and computes the next scale.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from te_models.engine.emulated.recipe import DelayedScaling, fp8_dtype
from te_models.numerics import fused
from te_models.numerics.formats import FP8_MAX
from te_models.numerics.quantizers import Float8Quantizer
from te_models.numerics.scale_rules import delayed_update


class DelayedScalingRecipeState:
    """Scales and histories of one direction of a module, updated in place.

    `scale` is FP32 `[n]`, initially 1, and `amax_history` FP32 `[length, n]`, initially 0, for the n tensors that the
    module quantizes. Row 0 of the history belongs to the step in progress, the last row to the newest finished step.
    """

    recipe: DelayedScaling
    key: tuple[str, str]

    def __init__(self, recipe: DelayedScaling, forward: bool, n: int, device: torch.device) -> None:
        """Make the state of `n` tensors on `device`."""
        self.forward = forward
        self.group: ProcessGroup | None = None
        self.registry: ScaleRegistry | None = None
        # A first forward under torch.inference_mode must not make tensors that training cannot update.
        with torch.inference_mode(False):
            self.scale = torch.ones(n, dtype=torch.float32, device=device)
            self.amax_history = torch.zeros(
                recipe.amax_history_len, n, dtype=torch.float32, device=device
            )
        self.use_recipe(recipe)

    def use_recipe(self, recipe: DelayedScaling) -> None:
        """Update under `recipe` from now on."""
        self.recipe = recipe
        self.key = (repr(recipe), recipe.amax_compute_algo)

    def __getstate__(self) -> dict[str, object]:
        """Return what a copy or a pickle holds: a copy belongs to no registry until it first runs."""
        return self.__dict__ | {"registry": None, "group": None}

    def make_quantizers(self) -> list[Float8Quantizer]:
        """Return one quantizer per tensor, which share this state's memory."""
        dtype = fp8_dtype(self.recipe.fp8_format, self.forward)
        return [
            Float8Quantizer(s, a.view(1), dtype)
            for s, a in zip(self.scale, self.amax_history[0], strict=True)
        ]


class ScaleRegistry:
    """The states that one thread trains, in order of registration, which is the order of their amax reduction."""

    def __init__(self) -> None:
        self.states: dict[int, DelayedScalingRecipeState] = {}

    def add(self, state: DelayedScalingRecipeState, group: ProcessGroup | None) -> None:
        """Update `state` from here on, reducing its amaxes over `group`; another registry gives it up."""
        if state.registry is not None:
            state.registry.remove(state)
        else:
            state.group = group
        state.registry = self
        self.states[id(state)] = state

    def remove(self, state: DelayedScalingRecipeState) -> None:
        """Stop updating `state`."""
        self.states.pop(id(state), None)
        state.registry = None

    def update(self, forward: bool) -> None:
        """Reduce the amaxes of all states of one direction over their groups, then update histories and scales."""
        batches: dict[tuple[object, ...], list[DelayedScalingRecipeState]] = {}
        for state in list(self.states.values()):
            if state.forward == forward:
                # One reduction per recipe, group and device; grouped in order of registration, which is equal on all
                # ranks.
                batches.setdefault((state.key, id(state.group), state.scale.device), []).append(
                    state
                )
        for states in batches.values():
            _update(states, _reduced_amaxes(states))

    def discard_amaxes(self) -> None:
        """Forget the forward amaxes of the step in progress, after a pass that failed."""
        for state in list(self.states.values()):
            if state.forward:
                state.amax_history[0].zero_()


def _reduced_amaxes(states: list[DelayedScalingRecipeState]) -> Tensor | None:
    """Return the largest amaxes of the step over the group, concatenated; None where each rank uses its own."""
    group = states[0].group
    initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    several = initialized and torch.distributed.get_world_size(group) > 1
    planned = states[0].scale.is_meta  # of a model without data, which sends nothing
    if planned or not states[0].recipe.reduce_amax or not several:
        return None
    amaxes = torch.cat([state.amax_history[0] for state in states])
    torch.distributed.all_reduce(amaxes, torch.distributed.ReduceOp.MAX, group=group)
    return amaxes


@torch.no_grad()
def _update(states: list[DelayedScalingRecipeState], amaxes: Tensor | None) -> None:
    """Update states that share a recipe, a direction and a device, from reduced amaxes or their own."""
    recipe = states[0].recipe
    fp8_max = FP8_MAX[fp8_dtype(recipe.fp8_format, states[0].forward)]
    # One Triton launch for all modules instead of several per module.
    if fused.active(states[0].scale):
        fused.update(
            [(state.amax_history, state.scale) for state in states],
            amaxes,
            most_recent=recipe.amax_compute_algo == "most_recent",
            margin=recipe.margin,
            fp8_max=fp8_max,
        )
        return
    if amaxes is None:
        amaxes = torch.cat([state.amax_history[0] for state in states])
    # Loaded histories may have another length than the recipe's: one update per length.
    by_length: dict[int, list[tuple[DelayedScalingRecipeState, Tensor]]] = {}
    split = amaxes.split([state.scale.numel() for state in states])
    for state, amax in zip(states, split, strict=True):
        by_length.setdefault(len(state.amax_history), []).append((state, amax))
    for members in by_length.values():
        history, scale = delayed_update(
            torch.cat([state.amax_history for state, _ in members], 1),
            torch.cat([state.scale for state, _ in members]),
            torch.cat([amax for _, amax in members]),
            algorithm=recipe.amax_compute_algo,
            margin=recipe.margin,
            fp8_max=fp8_max,
        )
        widths = [state.scale.numel() for state, _ in members]
        new = zip(history.split(widths, 1), scale.split(widths), strict=True)
        for (state, _), (own_history, own_scale) in zip(members, new, strict=True):
            state.amax_history.copy_(own_history)
            state.scale.copy_(own_scale)
