"""Matrix products that stay fast on CPUs without BF16 instructions."""

import torch
from torch import Tensor

from te_models.device.allocations import on_gpu
from te_models.device.measured import once

# The most rows that are multiplied by a packed weight: a step of generation has a few. From 33 rows on, Intel's matrix
# units (AMX) sum in another order than `matmul`, and the bits would differ.
PACKED_ROWS = 16


def matmul(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return a [M, K] @ b [K, N] + bias [N], summed in FP32 and rounded once to `dtype` (None: a.dtype), into `out`.

    A CPU without BF16 instructions multiplies BF16 8 to 30 times slower than FP32, so there the product runs in FP32.
    """
    dtype = dtype or a.dtype
    if out is not None:
        if on_gpu(a):
            return torch.mm(a, b, out=out)
        return out.copy_(matmul(a, b, bias, dtype))
    if (
        a.dtype in (torch.bfloat16, torch.float16)
        and a.device.type == "cpu"
        and not _has_units(a.dtype)
    ):
        out = a.float() @ b.float()
        return (out if bias is None else out + bias.float()).to(dtype)
    if bias is not None:
        return torch.addmm(bias, a, b).to(dtype)
    # The GEMM writes its FP32 sums; rounding to the inputs' dtype first would lose them.
    if dtype == torch.float32 and on_gpu(a) and a.dtype != dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)


def packed(weight: Tensor) -> Tensor | None:
    """Return weight [N, K] as `packed_matmul` takes it; None where this CPU has no products of packed weights.

    A product in BF16 instructions lays its weight out anew, which for a few rows takes as long as the rest.
    """
    usable = weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and _packing_is_exact()
    return torch.ops.mkldnn._reorder_linear_weight(weight, 1) if usable else None


def packed_matmul(a: Tensor, weight: Tensor) -> Tensor:
    """Return a [M, K] @ weight [N, K] transposed, of a `packed` weight, as `matmul` does; M is PACKED_ROWS at most."""
    return torch.ops.mkldnn._linear_pointwise(a, weight, None, "none", [], "")


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a [M, K] @ b [K, N] to `total` [M, N] in FP32; on a GPU the GEMM itself accumulates."""
    if on_gpu(a) and a.dtype != torch.float32:
        if a.is_meta:
            return  # a plan: the GEMM allocates nothing, and torch 2.10 and 2.11 cannot run it on meta
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += matmul(a, b, dtype=torch.float32)


@once
def _packing_is_exact() -> bool:
    """Return whether this CPU has products of packed weights, with the bits of `matmul`."""
    if not _has_units(torch.bfloat16):
        return False
    generator = torch.Generator().manual_seed(0)
    equal = []
    for rows, inputs, outputs in ((1, 192, 512), (4, 512, 192), (PACKED_ROWS, 2048, 40)):
        x = torch.randn(rows, inputs, generator=generator).bfloat16()
        weight = torch.randn(outputs, inputs, generator=generator).bfloat16()
        product = packed_matmul(x, torch.ops.mkldnn._reorder_linear_weight(weight, 1))
        equal.append(torch.equal(product, matmul(x, weight.t())))
    return all(equal)


@once
def _has_units(dtype: torch.dtype) -> bool:
    """Return whether this CPU has instructions for products of `dtype`."""
    ops = torch.ops.mkldnn
    if dtype == torch.bfloat16:
        return ops._is_mkldnn_bf16_supported()
    return ops._is_mkldnn_fp16_supported()
