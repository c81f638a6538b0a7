"""Scales of the matrices of experts in a cast: delayed, or of amaxes that are known or measured before."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Delayed(NamedTuple):
    """The scale of each of E matrices and the amax that its cast raises: FP32 [E] each, with one stride.

    A matrix without rows raises none.
    """

    scale: Tensor
    amax: Tensor


@triton.jit
def current_scale(amax, LARGEST: tl.constexpr):
    """Return the factor from `amax` to the largest number of the format: 1 for 0, infinity and NaN."""
    counts = (amax > 0) & (amax < float("inf"))
    scale = tl.div_rn(tl.full((), LARGEST, tl.float32), tl.where(counts, amax, LARGEST))
    return tl.minimum(scale, 3.4028234663852886e38)


@triton.jit
def scale_of(e, scales, amax, stride, E5M2: tl.constexpr):
    """Return the scale of matrix e: delayed, or from its amax."""
    if scales is not None:
        scale = tl.load(scales + e * stride)
    else:
        scale = current_scale(tl.load(amax + e), 57344.0 if E5M2 else 448.0)
    return scale


@triton.jit
def note_scale(factors, first, e, count, scale, group, rows, place):
    """Write the scale and its inverse, from one program per matrix; they are 1 where it has no rows.

    Matrix e begins at row first[e]. The grid has at least as many programs as there are matrices.
    """
    own = tl.program_id(0)
    writes = (place == 0) & (own < count)
    empty = writes & (tl.load(first + own, writes, 0) == tl.load(first + own + 1, writes, 1))
    tl.store(factors + own, 1.0, empty)
    tl.store(factors + count + own, 1.0, empty)
    if (group == 0) & (rows > 0) & (place == 0):
        tl.store(factors + e, tl.div_rn(tl.full((), 1.0, tl.float32), scale))
        tl.store(factors + count + e, scale)


def scales_and_launches(
    delayed: Delayed | None, known: Tensor | None, count: int, device: torch.device
) -> tuple[Tensor | None, Tensor, tuple[bool, ...]]:
    """Return the scales of a cast of `count` matrices, their amaxes, and the launches that the cast needs.

    Args:
        delayed: scales that are known before the values, whose cast raises the amaxes; None: scales follow from amaxes.
        known: these amaxes, FP32 [E], where they have been measured; None: a launch before the cast measures them.
        count: E.
        device: where to make memory for amaxes.

    Returns:
        scales FP32 [E] or None; amaxes FP32 [E]; the argument MEASURES of each launch, one after the other.
    """
    if delayed is not None:
        return delayed.scale, delayed.amax, (False,)
    if known is not None:
        return None, known, (False,)
    return None, torch.zeros(count, device=device), (True, False)
