"""The rules that turn an amax into a scale: of one cast, and under delayed scaling of the steps to come.

The scale of a block in E8M0 is in e8m0.py.
"""

import torch
from torch import Tensor

from te_models.numerics.formats import FLT_MAX


def scale_from_amax(
    amax: Tensor,
    fp8_max: float,
    power_of_2: bool = False,
    epsilon: float = 0.0,
    infinite: float = FLT_MAX,
) -> Tensor:
    """Return the FP32 multiplier that brings `amax` to `fp8_max`: 1 for 0 and infinity, `infinite` on overflow.

    `power_of_2` rounds down to a power of two. `epsilon` is a lower bound of the amax. A finite quotient may be larger
    than `infinite`, as in small FP16 blocks.
    """
    if epsilon > 0:
        amax = amax.clamp(min=epsilon)
    # A Python number divided by a tensor is a reciprocal and a product, which rounds twice.
    scale = torch.full_like(amax, fp8_max).div_(amax)
    scale = scale.masked_fill_(scale == torch.inf, infinite)
    scale = torch.where((amax > 0) & (amax < torch.inf), scale, 1.0)
    if power_of_2:
        scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)
    return scale


def delayed_update(
    history: Tensor,
    scale: Tensor,
    amax: Tensor,
    *,
    algorithm: str,
    margin: int,
    fp8_max: float,
) -> tuple[Tensor, Tensor]:
    """Return the next history and scales of n tensors under delayed scaling, after a step in which they had `amax`.

    A tensor without an amax in this step keeps both. A scale whose amax is infinite stays as it is. (Section 2.4 of
    docs/internals/transformer_engine.md.)

    Args:
        history: FP32 [length, n]; row 0 belongs to the step, the last row to the newest step before it.
        scale: FP32 [n].
        amax: FP32 [n], of the step.
        algorithm: "max" takes the largest amax of the history, "most_recent" the amax of the step.
        margin: the scale is smaller by 2^margin than the format would allow.
        fp8_max: the largest number of the format.
    """
    last = torch.where(amax != 0, amax, history[0])
    several = len(history) > 1
    used = last
    if several and algorithm == "max":
        used = torch.maximum(history[1:].nan_to_num(nan=0.0, posinf=torch.inf).amax(0), last)
    rolled = torch.zeros_like(history)
    if several:
        rolled = torch.cat([rolled[:1], history[2:], last[None]])
    silent = last == 0
    usable = ~silent & torch.isfinite(used) & (used > 0)
    new = torch.full_like(used, fp8_max * 2.0**-margin).div_(used).clamp_(max=FLT_MAX)
    return torch.where(silent, history, rolled), torch.where(usable, new, scale)
