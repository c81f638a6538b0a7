"""The age of delayed scales: how long ago the amax was measured that a scale was made from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_models.fp8.scaling_state import WIDTHS, DelayedState, delayed_states, gemms_of

NEVER = -1.0  # the age of a scale that no amax has changed yet
Ages = tuple[Tensor | float, ...]  # of the scales of input, weight and gradient of the output


@torch.no_grad()
def scale_ages(module: Any, micro_batches: int = 1) -> list[Ages]:
    """Return the ages of the scales of each GEMM of a te module under delayed scaling in steps, [] each.

    Scales are updated once per micro-batch, of which a step has `micro_batches`. An age is NEVER before the first one.
    """
    states = delayed_states(module)
    forward = _ages(states.get(".scaling_fwd"), module, "scaling_fwd", micro_batches)
    backward = _ages(states.get(".scaling_bwd"), module, "scaling_bwd", micro_batches)
    found: list[Ages] = []
    for gemm in range(gemms_of(module)):
        first = WIDTHS["scaling_fwd"] * gemm
        found.append((forward[first], forward[first + 1], backward[WIDTHS["scaling_bwd"] * gemm]))
    return found


def _ages(
    state: DelayedState | None, module: Any, direction: str, micro_batches: int
) -> Tensor | list[float]:
    """Return the ages of all scales of a direction in steps, rounded up: FP32 [width]."""
    if state is None:
        return [NEVER] * (WIDTHS[direction] * gemms_of(module))
    updates = _updates(state, module, direction)
    return torch.where(updates > 0, (updates / micro_batches).ceil(), updates)


def _updates(state: DelayedState, module: Any, direction: str) -> Tensor:
    """Return how many updates ago the amax of each scale was measured, FP32 [width]; NEVER without one.

    Row 0 of the history is the pass in progress and the last row the newest finished one, 1 update ago. The row that
    the last update dropped, as many updates ago as the history has rows, still counted for it.
    """
    history = state.amax_history
    length, width = history.shape
    recipe = module.fp8_meta["recipe"]
    never = (state.scale == 1) & (history.amax(0) == 0)
    if length == 1 or recipe.amax_compute_algo == "most_recent":
        ages = torch.ones(width, device=history.device)
    else:
        newest_first = history[1:].flip(0)
        largest, place = newest_first.max(0)  # the first of equal ones: the newest
        ages = (place + 1).float()
        used = _largest_number(recipe, direction) * 2.0**-recipe.margin / state.scale
        # Rounding aside, the scale came from a larger amax than the history still has.
        ages = torch.where(largest < used * (1 - 1e-5), float(length), ages)
    return torch.where(never, NEVER, ages)


def _largest_number(recipe: Any, direction: str) -> float:
    fp8_format = str(recipe.fp8_format).rpartition(".")[2]
    wide = direction == "scaling_bwd" and fp8_format != "E4M3"
    return 57344.0 if wide else 448.0
