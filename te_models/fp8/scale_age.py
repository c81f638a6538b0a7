"""Delayed scales by their histories: how long ago the amax of each was measured, and the largest one since a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_models.fp8.scaling_state import WIDTHS, DelayedState, delayed_states, gemms_of

NEVER = -1.0  # the age of a scale that no amax has changed yet
# The place in OPERANDS of the first scales of each GEMM in a direction; further ones are of no FP8 tensor.
OPERANDS_OF = {"scaling_fwd": (0, 1), "scaling_bwd": (2,)}
WEIGHT = 1  # its place in OPERANDS


class ScalePlace(NamedTuple):
    """A scale: the name of its te module, the GEMM in it, and the place of the operand in OPERANDS."""

    module: str
    gemm: int
    operand: int


class ScaleHistories(NamedTuple):
    """The histories of some scales.

    Attributes:
        places: the scales.
        ages: steps since the amax was measured that gave the scale, FP32 [places]; NEVER before the first one.
        amaxes: the largest amax of the last steps that were asked for, FP32 [places]; NEVER where none is known.
        amax_ages: how many steps ago that was, FP32 [places]; NEVER without one.
    """

    places: list[ScalePlace]
    ages: Tensor
    amaxes: Tensor
    amax_ages: Tensor


class _Kind(NamedTuple):
    """The scales whose ages are computed together: as many of a module, and made by one rule."""

    length: int
    width: int
    newest_alone: bool
    largest: float


@torch.no_grad()
def scale_histories(
    modules: Mapping[str, Any],
    micro_batches: int = 1,
    weight_casts: int = 1,
    last_steps: int = 0,
) -> Iterator[ScaleHistories]:
    """Yield what the histories of te modules under delayed scaling say, by groups.

    The scales of a model are few groups, since each costs the device some thirty small operations.

    Args:
        modules: by name.
        micro_batches: of a step, as often as inputs and gradients are cast and their scales updated.
        weight_casts: how often a step casts each weight.
        last_steps: finished steps of which the largest amax is wanted, as far as the histories reach.
    """
    for direction, operands in OPERANDS_OF.items():
        without: list[ScalePlace] = []
        kinds: dict[_Kind, list[tuple[str, DelayedState]]] = {}
        for name, module in modules.items():
            state = delayed_states(module, (direction,)).get(f".{direction}")
            if state is None:
                without += _places(name, gemms_of(module), operands)
            else:
                kinds.setdefault(_kind(state, module, direction), []).append((name, state))
        if without:
            never = torch.full((len(without),), NEVER)
            yield ScaleHistories(without, never, never, never)
        for kind, states in kinds.items():
            histories = torch.stack([state.amax_history for _, state in states])
            scales = torch.stack([state.scale for _, state in states])
            gemms = kind.width // WIDTHS[direction]
            per_gemm = (gemms, WIDTHS[direction])  # of which the first columns are the operands'
            updates = _updates(histories, scales, kind).unflatten(1, per_gemm)
            newest_first = histories[:, 1:].flip(1).unflatten(2, per_gemm)
            ages, amaxes, amax_ages = [], [], []
            for column, operand in enumerate(operands):
                casts = weight_casts if operand == WEIGHT else micro_batches
                ages.append(_in_steps(updates[:, :, column], casts))
                # [modules, GEMMs] of [modules, updates, GEMMs].
                amax, ago = _largest(newest_first[:, : last_steps * casts, :, column])
                amaxes.append(amax)
                amax_ages.append(_in_steps(ago, casts))
            places: list[ScalePlace] = []
            for name, _ in states:
                places += _places(name, gemms, operands)
            yield ScaleHistories(
                places=places,
                ages=torch.stack(ages, 2).reshape(-1),
                amaxes=torch.stack(amaxes, 2).reshape(-1),
                amax_ages=torch.stack(amax_ages, 2).reshape(-1),
            )


def _places(name: str, gemms: int, operands: tuple[int, ...]) -> list[ScalePlace]:
    """Return the places of a module's scales, by GEMM."""
    places = []
    for gemm in range(gemms):
        for operand in operands:
            places.append(ScalePlace(name, gemm, operand))
    return places


def _kind(state: DelayedState, module: Any, direction: str) -> _Kind:
    length, width = state.amax_history.shape
    recipe = module.fp8_meta["recipe"]
    newest_alone = length == 1 or recipe.amax_compute_algo == "most_recent"
    largest = _largest_number(recipe, direction) * 2.0**-recipe.margin
    return _Kind(length, width, newest_alone, largest)


def _updates(histories: Tensor, scales: Tensor, kind: _Kind) -> Tensor:
    """Return how many updates ago the amax of each scale was measured, FP32 [modules, width]; NEVER without one.

    Row 0 of a history [modules, length, width] is the pass in progress and the last row the newest finished one, 1
    update ago. The row that the last update dropped, as many updates ago as the history has rows, still counted for it.
    """
    never = (scales == 1) & (histories.amax(1) == 0)
    if kind.newest_alone:
        ages = torch.ones_like(scales)
    else:
        newest_first = histories[:, 1:].flip(1)
        largest, place = newest_first.max(1)  # the first of equal ones: the newest
        ages = (place + 1).float()
        used = kind.largest / scales
        # Rounding aside, the scale came from a larger amax than the history still has.
        ages = torch.where(largest < used * (1 - 1e-5), float(kind.length), ages)
    return torch.where(never, NEVER, ages)


def _largest(newest_first: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest amax of updates [modules, updates, GEMMs], and how many updates ago it was; NEVER of none."""
    if not newest_first.shape[1]:
        never = newest_first.new_full((len(newest_first), newest_first.shape[2]), NEVER)
        return never, never
    amaxes, place = newest_first.max(1)  # the first of equal ones: the newest
    return amaxes, torch.where(amaxes > 0, (place + 1).float(), NEVER)


def _in_steps(updates: Tensor, per_step: int) -> Tensor:
    """Return how many steps ago something was that many updates ago; NEVER stays."""
    return torch.where(updates > 0, (updates / per_step).ceil(), updates)


def _largest_number(recipe: Any, direction: str) -> float:
    fp8_format = str(recipe.fp8_format).rpartition(".")[2]
    wide = direction == "scaling_bwd" and fp8_format != "E4M3"
    return 57344.0 if wide else 448.0
