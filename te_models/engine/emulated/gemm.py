"""Products of quantized matrices: on the tensor cores where there are some, as they compute where it is affordable.

Three ways, chosen by what is there:

* on a GPU with FP8 units, per-tensor schemes multiply with those (torch._scaled_mm), as Transformer Engine does;
* up to `exact_gemm`'s limit, per-tensor and block schemes are computed as Hopper's tensor cores do, bit for bit;
* anything else is an FP32 product of the same values, which differs from a GPU's in the order and width of the sum.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from te_models.engine.emulated import fused
from te_models.engine.emulated.tensor_core import PROMOTION_K, hopper_matmul
from te_models.engine.emulated.tensors import Codes, Float8TensorStorage, Operand, QuantizedTensorStorage


class _Exact:
    """Products M*N*K up to which a GEMM is computed as the tensor cores do; a millisecond or two on a CPU core."""

    products: float = 2**20


@contextlib.contextmanager
def exact_gemm(products: float = float("inf")) -> Iterator[None]:
    """Inside, every GEMM of up to `products` = M*N*K is computed as Hopper's tensor cores do; 0 for none.

    The cost is about 1.5 ns a product on a CPU core: 0.2 s for 512 x 512 x 512.
    """
    before, _Exact.products = _Exact.products, products
    try:
        yield
    finally:
        _Exact.products = before


def gemm(
    a: QuantizedTensorStorage,
    b: QuantizedTensorStorage,
    columnwise: tuple[bool, bool],
    bias: Tensor | None,
    dtype: torch.dtype,
    split_accumulator: bool,
) -> Tensor:
    """The product [M, N] of two quantized matrices over their common dimension, plus `bias` [N], rounded to `dtype`.

    A rowwise copy is contracted over its last dimension, a columnwise one over its first, as `columnwise` says of both.
    """
    per_tensor = isinstance(a, Float8TensorStorage) and isinstance(b, Float8TensorStorage)
    on_tensor_cores = per_tensor and _tensor_cores(a._scale_inv.device)  # type: ignore[attr-defined]
    if on_tensor_cores or _products(a, b, columnwise[1]) <= _Exact.products:
        a_codes, b_codes = a.codes(columnwise[0]), b.codes(columnwise[1])
        if a_codes is not None and b_codes is not None:
            if on_tensor_cores:
                return _on_tensor_cores(a_codes, b_codes, bias, dtype, split_accumulator)
            return _round(_exact(a_codes, b_codes, split_accumulator), bias, dtype)
    a_blocks, b_blocks = a.blocks(columnwise[0]), b.blocks(columnwise[1])
    if a_blocks is not None and b_blocks is not None and fused.decodes(a_blocks, b_blocks):
        left, right, factor = fused.decode(a_blocks, b_blocks)
        out = _narrow_product(left.t() if columnwise[0] else left, right if columnwise[1] else right.t())
        return _round(out if factor is None else out.mul_(factor), bias, dtype)
    x, y = a.operand(columnwise[0]), b.operand(columnwise[1])
    return _fp32(x.t if columnwise[0] else x, y if columnwise[1] else y.t, bias, dtype)


def _products(a: QuantizedTensorStorage, b: QuantizedTensorStorage, columnwise: bool) -> int:
    """M*N*K."""
    return a._shape.numel() * b._matrix[columnwise]


@functools.cache
def _tensor_cores(device: torch.device) -> bool:
    """Whether the device multiplies FP8 itself."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _on_tensor_cores(a: Codes, b: Codes, bias: Tensor | None, dtype: torch.dtype, split_accumulator: bool) -> Tensor:
    left, right = (data if data.is_contiguous() else data.contiguous() for data in (a.data, b.data))
    return torch._scaled_mm(
        left, right.t(), a.scale, b.scale, bias=bias, out_dtype=dtype, use_fast_accum=not split_accumulator
    )


def _exact(a: Codes, b: Codes, split_accumulator: bool) -> Tensor:
    """FP32 [M, N], scales included. Block scales enter as each 128 elements of K leave the tensor core."""
    floors = a.floor, b.floor
    left, right = a.data.float(), b.data.float()
    if a.per_tensor:
        return hopper_matmul(left, right, floors, split_accumulator) * (a.scale * b.scale)
    total = left.new_zeros(len(left), len(right))
    for block, start in enumerate(range(0, left.shape[1], PROMOTION_K)):
        part = slice(start, start + PROMOTION_K)
        product = hopper_matmul(left[:, part], right[:, part], floors, False)
        total += product * (a.scale[:, block, None] * b.scale[None, :, block])
    return total


def _fp32(a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    out = _product(a, b)
    scales = [scale for scale in (a.scale, b.scale) if scale is not None]
    if scales:
        out *= scales[0] * scales[1] if len(scales) > 1 else scales[0]
    return _round(out, bias, dtype)


def _round(out: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The epilogue: the bias is added in FP32, and there is one rounding."""
    if bias is not None:
        out += bias.float()
    return out.to(dtype)


def _product(a: Operand, b: Operand) -> Tensor:
    """The FP32 product of the values."""
    if a.narrow and b.narrow:
        return _narrow_product(a.values, b.values)
    return a.values.float() @ b.values.float()


def _narrow_product(a: Tensor, b: Tensor) -> Tensor:
    """The FP32 product of BF16 numbers: the faster BF16 units give the same products."""
    if a.is_cuda:
        return torch.mm(a.bfloat16(), b.bfloat16(), out_dtype=torch.float32)
    options: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = options.fp32_precision
    # FP32 in and out, BF16 between: processors without BF16 instructions ignore it.
    options.fp32_precision = "bf16"
    try:
        return a.float() @ b.float()
    finally:
        options.fp32_precision = before
