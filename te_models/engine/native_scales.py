"""The update of delayed scaling for Transformer Engine, of which modules with many scales take a kernel of our own.

Transformer Engine updates all modules in one launch, whose programs take the scales of a module one after the other:
of linears with hundreds of experts' scales that is a hundredth of a step.
"""

from __future__ import annotations

import torch
import transformer_engine.pytorch  # noqa: F401  makes transformer_engine_torch known
import transformer_engine_torch as tex
from torch import Tensor
from transformer_engine.pytorch import DType

from te_models.kernels.delayed_update_triton import update

MANY = 48  # scales of a module from which on the kernel of our own is faster
_LARGEST = {DType.kFloat8E4M3: 448.0, DType.kFloat8E5M2: 57344.0}
_original_update = tex.fused_amax_and_scale_update_after_reduction  # before `install` replaces it


def update_scales(
    amaxes: Tensor,
    histories: list[Tensor],
    scales: list[Tensor],
    algorithm: str,
    form: DType,
    margin: float,
) -> None:
    """Do what tex.fused_amax_and_scale_update_after_reduction does, whose arguments these are.

    Args:
        amaxes: of all modules, FP32, one module's after another's.
        histories: FP32 [length, n] of each module, updated in place.
        scales: FP32 [n] of each module, updated in place.
        algorithm: "max" or "most_recent".
        form: the format of the casts.
        margin: scales are smaller by 2^margin than the format would allow.
    """
    parts = amaxes.split([len(scale) for scale in scales])
    # The modules that Transformer Engine's kernel updates.
    few_amaxes: list[Tensor] = []
    few_histories: list[Tensor] = []
    few_scales: list[Tensor] = []
    for amax, history, scale in zip(parts, histories, scales, strict=True):
        if len(scale) < MANY or not history.is_contiguous():
            few_amaxes.append(amax)
            few_histories.append(history)
            few_scales.append(scale)
            continue
        update(
            amax,
            history,
            scale,
            largest=_LARGEST[form] * 2.0**-margin,
            most_recent=algorithm == "most_recent",
        )
    if len(few_scales) == len(scales):
        _original_update(amaxes, histories, scales, algorithm, form, margin)
    elif few_scales:
        _original_update(torch.cat(few_amaxes), few_histories, few_scales, algorithm, form, margin)


def install() -> None:
    """Let Transformer Engine update its scales by `update_scales`."""
    tex.fused_amax_and_scale_update_after_reduction = update_scales
