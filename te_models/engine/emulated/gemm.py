"""Products of quantized matrices, computed in one of three ways:

* on a GPU with FP8 units, per-tensor schemes use those (torch._scaled_mm), as Transformer Engine does;
* up to `exact_gemm`'s limit, per-tensor and block schemes are computed as Hopper's tensor cores do, bit for bit, or, as
  `exact_gemm` asks, as Ada's do;
* anything else is an FP32 product of the same values, which differs from a GPU's in the order and width of the sum.
"""

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch import Tensor

from te_models.device.host import on_host
from te_models.engine.emulated.short_rows import are_short, full_rows, multiply
from te_models.engine.emulated.split_sums import runs_of_k
from te_models.engine.emulated.tensor_core import (
    HOPPER,
    PROMOTION_K,
    TENSOR_CORES,
    Factor,
    TensorCore,
    tensor_core_matmul,
)
from te_models.errors import check_known
from te_models.numerics import fused
from te_models.numerics.matrices import FP8Matrix, Operand, pad_to
from te_models.numerics.tensors import Float8TensorStorage, QuantizedTensorStorage

# The largest M*N*K that is computed as the tensor cores do, by default a millisecond or two on a CPU core.
_USUAL_PRODUCTS = 2**20
_EXACT_PRODUCTS: ContextVar[float] = ContextVar("exact_products", default=_USUAL_PRODUCTS)

_TENSOR_CORE: ContextVar[TensorCore] = ContextVar("tensor_core", default=HOPPER)


@contextlib.contextmanager
def exact_gemm(products: float = float("inf"), gpu: str = "hopper") -> Iterator[None]:
    """Compute every GEMM of up to `products` = M*N*K as a GPU's tensor cores do; 0 for none.

    This applies to the thread, and to the backward of the operations inside. It costs about 1.5 ns per product on a CPU
    core: 0.2 s for 512 x 512 x 512.

    Args:
        products: the largest M*N*K.
        gpu: "hopper", of H100 and H200, or "ada", of cards such as RTX 4090 and L4, for per-tensor recipes.

    Raises:
        UsageError: there is no such GPU here; the message names those that there are.
    """
    check_known("gpu", gpu, TENSOR_CORES)
    limit = _EXACT_PRODUCTS.set(products)
    core = _TENSOR_CORE.set(TENSOR_CORES[gpu])
    try:
        yield
    finally:
        _EXACT_PRODUCTS.reset(limit)
        _TENSOR_CORE.reset(core)


@contextlib.contextmanager
def exact_unless_set() -> Iterator[None]:
    """Compute every GEMM as a GPU's tensor cores do, unless an `exact_gemm` around it says which ones."""
    if _EXACT_PRODUCTS.get() != _USUAL_PRODUCTS:
        yield
        return
    limit = _EXACT_PRODUCTS.set(float("inf"))
    try:
        yield
    finally:
        _EXACT_PRODUCTS.reset(limit)


def tensor_core() -> TensorCore:
    """Return the tensor core that exact products are computed on."""
    return _TENSOR_CORE.get()


def gemm(
    a: QuantizedTensorStorage,
    b: QuantizedTensorStorage,
    columnwise: tuple[bool, bool],
    bias: Tensor | None,
    dtype: torch.dtype,
    split_accumulator: bool,
    rows: int | None = None,
) -> Tensor:
    """Return the product [M, N] of two quantized matrices, plus `bias` [N], rounded to `dtype`.

    Args:
        a: the left matrix [M, K], quantized.
        b: the right one [N, K], quantized.
        columnwise: for a and b, whether the columnwise copy is used, which is contracted over its first dimension; the
            rowwise one is contracted over its last.
        bias: FP32 or BF16 [N], or None.
        dtype: of the result.
        split_accumulator: add to an FP32 accumulator every 128 elements of K, as Transformer Engine asks cuBLAS.
        rows: return the first of the M rows only; None: all.
    """
    # torch._scaled_mm has one scale per tensor; block scales are applied by the paths below.
    per_tensor = isinstance(a, Float8TensorStorage) and isinstance(b, Float8TensorStorage)
    on_tensor_cores = per_tensor and _tensor_cores(a._scale_inv.device)
    if on_tensor_cores or is_exact(*a._matrix, b._matrix[columnwise[1]]):
        left = a.fp8_matrix(columnwise[0])
        right = b.cached("fp8", columnwise[1], lambda: b.fp8_matrix(columnwise[1]))
        if left is not None and right is not None:
            if on_tensor_cores:
                return _on_tensor_cores(left, right, bias, dtype, split_accumulator)
            factor = b.cached(
                "factor", columnwise[1], lambda: Factor.of(right.data.float(), right.floor)
            )
            m, k = left.data.shape
            splits = runs_of_k(full_rows(m), k, len(right.data), tensor_core())
            # Rows of zeros at the end cost as much as others, and are filled in afterwards.
            nonzero = left.first(_rows_before_padding(left.data))
            out = _exact(nonzero, right, factor, split_accumulator, splits)
            return finish(pad_to(out, len(left.data), 1), None, bias, dtype)
    x, y = _operands(a, b, columnwise, bf16=bias is None and dtype == torch.bfloat16)
    # The rows after them are the zeros that filled a block; their results are not wanted.
    if rows is not None:
        x = x._replace(values=x.values[:rows])
    if x.scale is None:
        scale = y.scale
    elif y.scale is None:
        scale = x.scale
    else:
        scale = x.scale * y.scale
    if scale is None and bias is None:
        return _product(x, y, dtype)
    return finish(_product(x, y, torch.float32), scale, bias, dtype)


def is_exact(m: int, k: int, n: int) -> bool:
    """Return whether a product [m, k] x [k, n] is computed as tensor cores do; the rule knows sizes alone."""
    return full_rows(m) * k * n <= _EXACT_PRODUCTS.get()


def _rows_before_padding(a: Tensor) -> int:
    """Return how many rows of a [M, K] have to be multiplied: the zeros that end a step of generation give zeros."""
    # A captured step is replayed with more rows.
    if not are_short() or not on_host(a):
        return len(a)
    nonzero = a.view(torch.uint8).any(1).tolist()
    while len(nonzero) > 1 and not nonzero[-1]:
        nonzero.pop()
    return len(nonzero)


def _operands(
    a: QuantizedTensorStorage, b: QuantizedTensorStorage, columnwise: tuple[bool, bool], bf16: bool
) -> tuple[Operand, Operand]:
    """Return the matrices `[M, K]` and `[K, N]`; with `bf16`, a weight that is kept in BF16 where that is exact."""
    a_blocks = a.blocks(columnwise[0])
    b_blocks = b.blocks(columnwise[1])
    if a_blocks is not None and b_blocks is not None and fused.decodes(a_blocks, b_blocks):
        left, right, scale = fused.decode(a_blocks, b_blocks)
        x = Operand(left, scale, narrow=True)
        y = Operand(right, None, narrow=True)
    else:
        x = a.operand(columnwise[0])
        y = b.cached(
            "operand", columnwise[1], lambda: _narrowed(b.operand(columnwise[1]), bf16 and x.narrow)
        )
    return x.t if columnwise[0] else x, y if columnwise[1] else y.t


def _narrowed(operand: Operand, bf16: bool) -> Operand:
    """Return an operand for a product in BF16 in that dtype."""
    usable = bf16 and operand.narrow and operand.scale is None
    return operand._replace(values=operand.values.bfloat16()) if usable else operand


@functools.cache
def _tensor_cores(device: torch.device) -> bool:
    """Return True if the device multiplies FP8 itself."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _on_tensor_cores(
    a: FP8Matrix, b: FP8Matrix, bias: Tensor | None, dtype: torch.dtype, split_accumulator: bool
) -> Tensor:
    """Return the product [M, N] of a [M, K] and b [N, K] by the GPU's own FP8 units."""
    # cuBLAS takes FP8 as [M, K] and [N, K], both row by row (the TN layout) on Hopper.
    left = a.data.contiguous()
    right = b.data.contiguous()
    return torch._scaled_mm(
        left,
        right.t(),
        a.scale,
        b.scale,
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=not split_accumulator,
    )


def _exact(
    a: FP8Matrix, b: FP8Matrix, right: Factor, split_accumulator: bool, splits: int
) -> Tensor:
    """Return FP32 [M, N], scales included; `right` is made of b. Block scales are applied per 128 elements of K.

    With one scale per tensor K is summed in `splits` runs.
    """
    left = Factor.of(a.data.float(), a.floor)
    if a.per_tensor:
        product = tensor_core_matmul(left, right, split_accumulator, tensor_core(), splits)
        return product * (a.scale * b.scale)
    total = a.scale.new_zeros(len(a.data), len(b.data))
    for block, start in enumerate(range(0, a.data.shape[1], PROMOTION_K)):
        columns = slice(start, start + PROMOTION_K)
        product = tensor_core_matmul(
            left.of_columns(columns), right.of_columns(columns), False, tensor_core()
        )
        # One scale per row of a, and one per row of b, for these 128 elements.
        total += product * (a.scale[:, block, None] * b.scale[None, :, block])
    return total


def finish(out: Tensor, scale: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Apply the scale and add the bias in FP32, and round once."""
    if bias is not None:
        # Scale first, then bias: the order of the epilogue of cuBLAS, which shows in the last bit.
        if scale is not None:
            out = out.mul_(scale)
        return torch.add(out, bias, out=torch.empty_like(out, dtype=dtype))
    if scale is None:
        return out.to(dtype)
    return torch.mul(out, scale, out=torch.empty_like(out, dtype=dtype))


def _product(a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
    """Return the product of the values, summed in FP32 and rounded once."""
    if a.narrow and b.narrow:
        return _narrow_product(a.values, b.values, dtype)
    return multiply(a.values.float(), b.values.float()).to(dtype)


def _narrow_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the product of FP32 tensors that hold BF16 numbers, which the faster BF16 units multiply as exactly."""
    if a.is_cuda:  # rounding to BF16 within the product saves a launch; FP16 would round twice
        a = a.bfloat16()
        b = b.bfloat16()
        if dtype == a.dtype:
            return torch.mm(a, b)
        return torch.mm(a, b, out_dtype=torch.float32).to(dtype)
    # A CPU's BF16 units return BF16. With FP32 results they are reached only through a switch of the whole process,
    # under which the products of other threads would be rounded too.
    if dtype == torch.bfloat16:
        return multiply(a.bfloat16(), b.bfloat16())
    return multiply(a.float(), b.float()).to(dtype)
