"""The places of experts' rows in Triton: one launch where PyTorch's operations take five or six.

A step of a model with experts asks for them some times per layer, and each launch costs two microseconds.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _ends_kernel(
    first,
    out,
    count,
    size,
    LEADING_ZERO: tl.constexpr,
    IN_ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Write how many tiles of `size` rows each expert and all before it have together, with IN_ROWS times `size`.

    With LEADING_ZERO the sums begin at out[1], behind a zero.
    """
    e = tl.arange(0, EXPERTS)
    begin = tl.load(first + e, e < count, 0)
    end = tl.load(first + e + 1, e < count, 0)
    tiles = (end - begin + size - 1) // size
    if IN_ROWS:
        tiles *= size
    ends = tl.cumsum(tiles, 0)
    if LEADING_ZERO:
        tl.store(out + e, tl.zeros_like(ends), e == 0)
        out += 1
    tl.store(out + e, ends, e < count)


def tiles(first: Tensor, height: int) -> Tensor:
    """Compute Groups.tiles of groups that begin at `first`, int64 [E + 1] on a GPU."""
    return _ends(first, height, rows=False)


def aligned(first: Tensor, line: int) -> Tensor:
    """Return where groups begin if each begins at a multiple of `line`, int64 [E + 1] (`Groups.aligned`)."""
    return _ends(first, line, rows=True)


def _ends(first: Tensor, size: int, *, rows: bool) -> Tensor:
    """Return the sums of the experts' tiles of `size` rows, int64 [E]; with `rows` in rows, behind a zero, [E + 1]."""
    count = len(first) - 1
    out = torch.empty(count + 1 if rows else count, dtype=torch.int64, device=first.device)
    with torch.cuda.device_of(first):
        _ends_kernel[(1,)](
            first,
            out,
            count,
            size,
            LEADING_ZERO=rows,
            IN_ROWS=rows,
            EXPERTS=triton.next_power_of_2(count),
            num_warps=1,
        )
    return out
