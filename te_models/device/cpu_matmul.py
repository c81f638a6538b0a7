"""The product of two matrices in their own dtype, at FP32's speed on processors without BF16 instructions."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def matmul(
    a: Tensor, b: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None, out: Tensor | None = None
) -> Tensor:
    """a [M, K] @ b [K, N], plus `bias` [N]: summed in FP32 and rounded once, to `dtype` (None: that of a), or into `out`.

    A processor without BF16 instructions multiplies BF16 itself 8 to 30 times slower than it multiplies FP32.
    """
    dtype = dtype or a.dtype
    if out is not None:
        return torch.mm(a, b, out=out) if a.is_cuda else out.copy_(matmul(a, b, bias, dtype))
    if a.dtype in (torch.bfloat16, torch.float16) and a.device.type == "cpu" and not _has_units(a.dtype):
        out = a.float() @ b.float()
        return (out if bias is None else out + bias.float()).to(dtype)
    if bias is not None:
        return torch.addmm(bias, a, b).to(dtype)
    if dtype == torch.float32 and a.is_cuda and a.dtype != dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total [M, N] FP32 += a [M, K] @ b [K, N], summed in FP32: on a GPU within the GEMM, where the sum passes by anyway."""
    if a.is_cuda and a.dtype != torch.float32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += matmul(a, b, dtype=torch.float32)


@functools.cache
def _has_units(dtype: torch.dtype) -> bool:
    """Whether this CPU has instructions for products of `dtype`."""
    name = "bf16" if dtype == torch.bfloat16 else "fp16"
    return getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")()
