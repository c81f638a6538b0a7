"""The operations of expert_rows.py in Triton: each row is read once, and nothing is stored in between."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_models.kernels import router_triton
from te_models.kernels.expert_rows import RowKernels

COLUMNS = 2048  # read at a time
PRODUCTS = 2048  # of a token's row with its experts' rows, that a program computes at a time


@triton.jit
def _gather_kernel(
    # [T, D], and the token of each row, int64 [R]
    x,
    token,
    # FP32 [R] or None, and [R, D] or None
    factor,
    other,
    # [R, D], and FP32 [R] for the products with `other`
    out,
    dots,
    # T and D
    tokens,
    width,
    SCALED: tl.constexpr,
    WITH_DOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write one row of `out`; see expert_rows.gather."""
    r = tl.program_id(0).to(tl.int64)
    source = tl.load(token + r)
    if source > tokens:
        return  # behind the last expert's rows, which nothing reads
    # A token behind the last stands for padding: its row reads no column, and becomes zeros.
    present = tl.where(source < tokens, width, 0)  # columns
    by = tl.load(factor + r) if SCALED else 1.0
    product = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < width
        value = tl.load(x + source * width + column, column < present, 0.0)
        if WITH_DOTS:
            other_value = tl.load(other + r * width + column, inside, 0.0).to(tl.float32)
            product += other_value * value.to(tl.float32)
        if SCALED:
            value = (value.to(tl.float32) * by).to(out.dtype.element_ty)
        tl.store(out + r * width + column, value, inside)
    if WITH_DOTS:
        tl.store(dots + r, tl.sum(product, 0))


@triton.jit
def _total_kernel(
    rows, row, weights, out, count, width, k, WEIGHTED: tl.constexpr, COLUMNS: tl.constexpr
):
    """Write some columns of one token's sum of its rows; see expert_rows.total. There are `count` rows."""
    t = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    sums = tl.zeros([COLUMNS], tl.float32)
    # In the order of the token's experts, as the plain version adds them: no atomics, so the sum is reproducible.
    for j in range(k):
        source = tl.load(row + t * k + j)
        present = tl.where(source < count, width, 0)
        part = tl.load(rows + source * width + column, column < present, 0.0).to(tl.float32)
        if WEIGHTED:
            part = part * tl.load(weights + t * k + j)
        sums += part
    tl.store(out + t * width + column, sums.to(out.dtype.element_ty), inside)


@triton.jit
def _dots_kernel(
    x, rows, row, dots, amax, count, width, k, COLUMNS: tl.constexpr, PADDED_K: tl.constexpr
):
    """Write the products of one token's row of x with its k rows of `rows`, and its largest magnitude; see `dots`."""
    t = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, PADDED_K)
    # All k rows at once, [PADDED_K, COLUMNS], since k is small; PADDED_K is the next power of two.
    source = tl.load(row + t * k + number, number < k, count)
    present = (source < count)[:, None]
    largest = tl.zeros([COLUMNS], tl.float32)
    product = tl.zeros([PADDED_K, COLUMNS], tl.float32)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < width
        value = tl.load(x + t * width + column, inside, 0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(value))
        at = rows + source[:, None] * width + column[None, :]
        product += tl.load(at, present & inside[None, :], 0.0).to(tl.float32) * value[None, :]
    tl.store(amax + t, tl.max(largest, 0))
    tl.store(dots + t * k + number, tl.sum(product, 1), number < k)


def dots(x: Tensor, rows: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    """Return the products of each token's row of x [T, D] with its rows of `rows` [R, D], and its largest magnitude.

    All contiguous; FP32 [T, k], where `row` [T, k] names no row 0, and [T].
    """
    products = torch.empty(row.shape, dtype=torch.float32, device=x.device)
    amax = torch.empty(len(x), dtype=torch.float32, device=x.device)
    if len(x):
        padded_k = triton.next_power_of_2(row.shape[1])
        columns = min(triton.next_power_of_2(x.shape[1]), max(128, PRODUCTS // padded_k))
        with torch.cuda.device_of(x):
            _dots_kernel[(len(x),)](
                x=x,
                rows=rows,
                row=row,
                dots=products,
                amax=amax,
                count=rows.shape[0],
                width=rows.shape[1],
                k=row.shape[1],
                COLUMNS=columns,
                PADDED_K=padded_k,
                num_warps=4,
            )
    return products, amax


def gather(
    x: Tensor, token: Tensor, factor: Tensor | None = None, other: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Compute expert_rows.gather of contiguous tensors."""
    out = x.new_empty(len(token), x.shape[1])
    dots = None if other is None else torch.empty(len(token), dtype=torch.float32, device=x.device)
    if len(token):
        with torch.cuda.device_of(x):
            _gather_kernel[(len(token),)](
                x=x,
                token=token,
                factor=factor,
                other=other,
                out=out,
                dots=dots,
                tokens=x.shape[0],
                width=x.shape[1],
                SCALED=factor is not None,
                WITH_DOTS=other is not None,
                COLUMNS=_columns(x),
                num_warps=4,
            )
    return out, dots


def total(rows: Tensor, row: Tensor, weights: Tensor | None = None) -> Tensor:
    """Compute expert_rows.total of contiguous tensors."""
    out = rows.new_empty(len(row), rows.shape[1])
    columns = _columns(rows)
    if len(row):
        with torch.cuda.device_of(rows):
            _total_kernel[(len(row), triton.cdiv(rows.shape[1], columns))](
                rows=rows,
                row=row,
                weights=None if weights is None else weights.contiguous(),
                out=out,
                count=rows.shape[0],
                width=rows.shape[1],
                k=row.shape[1],
                WEIGHTED=weights is not None,
                COLUMNS=columns,
                num_warps=4,
                enable_fp_fusion=False,
            )
    return out


def _columns(x: Tensor) -> int:
    """Return how many columns of a row of x a program reads at a time, a power of two."""
    return min(COLUMNS, triton.next_power_of_2(x.shape[1]))


TRITON = RowKernels(
    gather=gather, total=total, choose=router_triton.choose, places=router_triton.places
)
