"""The update of delayed scaling for modules with many scales, such as all experts of a linear.

Transformer Engine's kernel takes the scales of a module one after the other: 0.6 ms for 128 experts of eight linears.
Here programs share them. The numbers are the same (section 2.4 of docs/internals/transformer_engine.md).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_models.numerics.fp8_triton import magnitude_bits

ROWS, COLUMNS = 128, 16  # of a history that a program reads at a time, and scales of a program
_FLT_MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _update_kernel(
    # amaxes of the step FP32 [n], and to be updated: history [length, n] and scale [n]
    amax,
    history,
    scale,
    length,
    n,
    # the largest number of the format by 2^-margin
    largest,
    MOST_RECENT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Move the amaxes of a step into the histories of COLUMNS tensors, and set their scales."""
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there = j < n
    newest = tl.load(amax + j, there, 0.0)
    # Row 0 belongs to the step, before its amaxes were reduced.
    last = tl.where(newest != 0, newest, tl.load(history + j, there, 0.0))
    sounds = there & (last != 0)  # a tensor that was not cast keeps its history
    largest_bits = tl.zeros([COLUMNS], tl.int32)
    for start in range(1, length, ROWS):
        i = start + tl.arange(0, ROWS)
        at = history + i[:, None] * n + j[None, :]
        old = tl.load(at, (i < length)[:, None] & there[None, :], 0.0)
        largest_bits = tl.maximum(largest_bits, tl.max(magnitude_bits(old), 0))
        # Each row moves up by one: all are read before the first is written.
        tl.debug_barrier()
        tl.store(at - n, old, ((i > 1) & (i < length))[:, None] & sounds[None, :])
    tl.debug_barrier()
    tl.store(history + (length - 1) * n + j, last, sounds & (length > 1))
    tl.store(history + j, tl.zeros_like(last), sounds)
    if MOST_RECENT:
        used = last
    else:
        used = tl.maximum(largest_bits.to(tl.float32, bitcast=True), last)
    usable = sounds & (used > 0) & (used < float("inf"))
    fresh = tl.minimum(tl.div_rn(tl.zeros_like(used) + largest, used), _FLT_MAX)
    tl.store(scale + j, fresh, usable)


def update(
    amax: Tensor, history: Tensor, scale: Tensor, *, largest: float, most_recent: bool
) -> None:
    """Update a state of delayed scaling in place after a step, as te_models.numerics.scale_rules.delayed_update says.

    Args:
        amax: the amaxes of the step, reduced over all processes: FP32 [n].
        history: the amaxes of the steps before it, FP32 [length, n], contiguous.
        scale: FP32 [n].
        largest: the largest number of the format by 2^-margin.
        most_recent: whether the newest amax counts alone, rather than the largest.
    """
    length, n = history.shape
    with torch.cuda.device_of(scale):
        _update_kernel[(triton.cdiv(n, COLUMNS),)](
            amax,
            history,
            scale,
            length,
            n,
            largest,
            MOST_RECENT=most_recent,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            num_warps=4,
        )
