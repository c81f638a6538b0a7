"""The places of experts' rows in Triton: one launch where PyTorch's operations take five or six.

A step of a model with experts asks for them some times per layer, and each launch costs two microseconds.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _ends_kernel(
    first, out, count, size, SHIFT: tl.constexpr, ALIGN: tl.constexpr, EXPERTS: tl.constexpr
):
    """Write the sums, up to each expert, of its rows divided by `size` and rounded up, times `size` with ALIGN.

    With SHIFT they begin at out[1], behind a zero.
    """
    e = tl.arange(0, EXPERTS)
    begin = tl.load(first + e, e < count, 0)
    end = tl.load(first + e + 1, e < count, 0)
    parts = (end - begin + size - 1) // size
    if ALIGN:
        parts *= size
    ends = tl.cumsum(parts, 0)
    if SHIFT:
        tl.store(out + e, tl.zeros_like(ends), e == 0)
        out += 1
    tl.store(out + e, ends, e < count)


def tiles(first: Tensor, height: int) -> Tensor:
    """Compute Groups.tiles of groups that begin at `first`, int64 [E + 1] on a GPU."""
    return _ends(first, height, begins=False)


def apart(first: Tensor, line: int) -> Tensor:
    """Return where groups begin if each begins at a multiple of `line`, int64 [E + 1] (`Groups.apart`)."""
    return _ends(first, line, begins=True)


def _ends(first: Tensor, size: int, *, begins: bool) -> Tensor:
    count = len(first) - 1
    out = torch.empty(count + begins, dtype=torch.int64, device=first.device)
    with torch.cuda.device_of(first):
        _ends_kernel[(1,)](
            first,
            out,
            count,
            size,
            SHIFT=begins,
            ALIGN=begins,
            EXPERTS=triton.next_power_of_2(count),
            num_warps=1,
        )
    return out
