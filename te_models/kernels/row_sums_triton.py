"""The sums of each expert's rows, such as the gradients of biases, in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_models.kernels.groups import Groups

# The rows and columns that a program reads at a time, and its warps.
ROWS = 64
COLUMNS = 64
WARPS = 4


@triton.jit
def _sums_kernel(x, first, out, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write some columns of the sum of one expert's rows."""
    e = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    begin = tl.load(first + e)
    inside = (column < width)[None, :]
    rows = (tl.load(first + e + 1) - begin).to(tl.int32)
    at = x + (begin + tl.arange(0, ROWS))[:, None] * width + column[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, rows, ROWS):
        present = (start + tl.arange(0, ROWS) < rows)[:, None] & inside
        total += tl.load(at, present, 0.0).to(tl.float32)
        at += ROWS * width
    tl.store(out + e * width + column, tl.sum(total, 0).to(out.dtype.element_ty), column < width)


def sums_of_rows(x: Tensor, groups: Groups) -> Tensor:
    """Return the sum of each expert's rows of x [R, width], in FP32 and rounded once: [E, width]."""
    out = x.new_empty(groups.experts, x.shape[1])
    with torch.cuda.device_of(x):
        grid = (triton.cdiv(x.shape[1], COLUMNS), groups.experts)
        _sums_kernel[grid](
            x=x,
            first=groups.first,
            out=out,
            width=x.shape[1],
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            num_warps=WARPS,
        )
    return out
