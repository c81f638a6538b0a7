"""The sums of each expert's rows, such as the gradients of biases, in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_models.kernels.grouped_gemm_triton import SUM
from te_models.kernels.groups import Groups


@triton.jit
def _sums_kernel(x, first, out, width, HIGH: tl.constexpr, WIDE: tl.constexpr):
    e = tl.program_id(1)
    column = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    begin = tl.load(first + e)
    inside = (column < width)[None, :]
    rows = (tl.load(first + e + 1) - begin).to(tl.int32)
    at = x + (begin + tl.arange(0, HIGH))[:, None] * width + column[None, :]
    total = tl.zeros([HIGH, WIDE], tl.float32)
    for start in range(0, rows, HIGH):
        there = (start + tl.arange(0, HIGH) < rows)[:, None] & inside
        total += tl.load(at, there, 0.0).to(tl.float32)
        at += HIGH * width
    tl.store(out + e * width + column, tl.sum(total, 0).to(out.dtype.element_ty), column < width)


def sums_of_rows(x: Tensor, groups: Groups) -> Tensor:
    """Return the sum of each expert's rows of x [R, width], in FP32 and rounded once: [E, width]."""
    out = x.new_empty(groups.experts, x.shape[1])
    with torch.cuda.device_of(x):
        grid = (triton.cdiv(x.shape[1], SUM.width), groups.experts)
        _sums_kernel[grid](
            x, groups.first, out, x.shape[1], HIGH=SUM.height, WIDE=SUM.width, num_warps=SUM.warps
        )
    return out
