"""FP8 matrix products as the tensor cores of Hopper or Ada compute them, bit for bit.

A tensor core of Hopper adds 32 products and its accumulator at a time, and not in FP32: every term is aligned to the
largest exponent among them and cut off (not rounded) 13 bits below it, the cut terms are added exactly, and the sum is
cut to 13 fraction bits. Without split accumulation the accumulator stays in that form over the whole of K; with it, or
with block scales, it is added to an FP32 accumulator after every 128 elements of K.

The widths are those that reproduce every bit of the products of an H200 (the vectors in tests/golden: forward, input
and weight gradients of the per-tensor and block recipes, E4M3 and E5M2); a plain FP32 product differs from them in the
last BF16 bit of 1 to 3 % of the elements. The form of the arithmetic is that found by probing for earlier formats (Fasi
et al. 2021, "Numerical behavior of NVIDIA tensor cores"; Khattak and Mikaitis 2025, arXiv 2512.07004). Ada's adds 16
products at a time, and is otherwise the same; here no Ada card was measured, but the package mmaemu, whose model of an
RTX 4060 equals that card's bits, gives the same (tests/engine/test_tensor_core_oracle.py).

Where a result has few elements and K is long, cuBLAS splits K over several blocks of threads: each adds a run of tiles
of 128 as above, and the partial sums are added in FP32, in order. The number of runs is a choice of cuBLAS
(te_models.engine.emulated.split_sums); `splits` takes it.

The cost is proportional to M*N*K elementwise operations, about 1.5 ns each on a CPU core, so this is for small products
and exact comparisons, not training at size.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

Array: TypeAlias = np.ndarray  # of any shape and dtype

INSTRUCTION_K = 32  # products that Hopper adds at a time: one wgmma of 8-bit operands
PROMOTION_K = 128  # elements of K between additions to the FP32 accumulator, and of a tile
FRACTION_BITS = 13
# Clears the fraction bits of an FP32 number beyond the 13th.
_CUT = ~((1 << (23 - FRACTION_BITS)) - 1)
_OUTPUTS = 1 << 14  # elements of the result that are computed at a time, at least one row
_PRODUCTS = 1 << 19  # products that are made at a time, at least one instruction
# Exponents are integers at the place where FP32 has its own, so that no shift is needed.
_ONE = 1 << 23
_EXPONENT_BITS = 255 * _ONE
_BIAS = 127 * _ONE
_ZERO = -120 * _ONE  # the exponent of zero: its sum with any other is below _LOWEST
_SMALL_ZERO = (
    -60
)  # the same in an int8: its sum with any other is below the exponent of every product
_LOWEST = -100 * _ONE  # of a largest term; nothing that counts is smaller
_INFINITE = 63 * _ONE  # the exponent of infinity and NaN, of which two can still be added


class TensorCore(NamedTuple):
    """The kind of a tensor core: the number of products that it adds at a time."""

    instruction_k: int


TENSOR_CORES = {"hopper": TensorCore(INSTRUCTION_K), "ada": TensorCore(16)}
HOPPER = TENSOR_CORES["hopper"]


class Factor(NamedTuple):
    """A matrix for `tensor_core_matmul`: FP32 `values` and int32 `exponents`, both [K, R], K padded to instructions."""

    values: Tensor
    exponents: Tensor

    @classmethod
    def of(cls, x: Tensor, floor: int) -> Factor:
        """Return the factor of x [R, K], FP8 values in FP32; `floor` is the exponent of the format's smallest normal
        number (E4M3 -6, E5M2 -14), which subnormal numbers have too."""
        x = torch.nn.functional.pad(x, (0, -x.shape[1] % INSTRUCTION_K)).t().contiguous()
        exponents = (
            (x.view(torch.int32) & _EXPONENT_BITS).sub_(_BIAS).clamp_(floor * _ONE, _INFINITE)
        )
        return cls(x, exponents.masked_fill_(x == 0, _ZERO))

    def of_rows(self, rows: slice) -> Factor:
        """Return the factor of some of the rows R."""
        return Factor(self.values[:, rows], self.exponents[:, rows])

    def of_columns(self, columns: slice) -> Factor:
        """Return the factor of some of the columns K, whole instructions."""
        return Factor(self.values[columns], self.exponents[columns])


def tensor_core_matmul(
    a: Factor, b: Factor, promote: bool, core: TensorCore = HOPPER, splits: int = 1
) -> Tensor:
    """Multiply a [M, K] by b [N, K] transposed: FP32 [M, N].

    Args:
        a: the left factor.
        b: the right factor.
        promote: split accumulation: add to an FP32 accumulator after every 128 elements of K.
        core: the tensor core that computes it.
        splits: number of runs of 128-wide tiles of K, each summed by itself; the last may be shorter, or empty.
    """
    if splits == 1:  # nearly always, and slices of all columns take time
        return _matmul(a, b, promote, core)
    first, *others = _runs(len(a.values), splits)
    total = _matmul(a.of_columns(first), b.of_columns(first), promote, core)
    for run in others:
        total = total + _matmul(a.of_columns(run), b.of_columns(run), promote, core)
    return total


def _runs(k: int, splits: int) -> list[slice]:
    """Return `splits` runs of K, each as many whole tiles as make the last the short one; fewer if some were empty."""
    tiles = -(-k // PROMOTION_K)
    length = max(1, -(-tiles // splits)) * PROMOTION_K
    return [slice(start, start + length) for start in range(0, max(1, k), length)]


def _matmul(a: Factor, b: Factor, promote: bool, core: TensorCore) -> Tensor:
    """Multiply without splitting K, some rows at a time."""
    rows = a.values.shape[1]
    columns = b.values.shape[1]
    step = max(1, _OUTPUTS // max(1, columns))
    if 0 < rows <= step:
        return _tile(a, b, promote, core)
    tiles = []
    for start in range(0, rows, step):
        tiles.append(_tile(a.of_rows(slice(start, start + step)), b, promote, core))
    return torch.cat(tiles) if tiles else a.values.new_zeros(0, columns)


class HostFactor(NamedTuple):
    """A Factor for `row_product` in NumPy: values FP32 and exponents int8, [K, R]; zero's exponent is `_SMALL_ZERO`."""

    values: Array
    exponents: Array

    @classmethod
    def of(cls, x: Tensor, floor: int) -> HostFactor:
        """Return the factor of x [R, K]; arguments as in `Factor.of`."""
        values, exponents = Factor.of(x, floor)
        return cls(values.numpy(), (exponents >> 23).clamp_(min=_SMALL_ZERO).to(torch.int8).numpy())

    def of_columns(self, columns: slice) -> HostFactor:
        """Return the factor of some of the columns K, whole instructions."""
        return HostFactor(self.values[columns], self.exponents[columns])


def row_product(
    a: HostFactor, b: HostFactor, promote: bool, core: TensorCore = HOPPER, splits: int = 1
) -> Array:
    """Return the product of a single row a [K, 1] and b [K, N], FP32 [N], in a third of the time on a CPU.

    Arguments as of `tensor_core_matmul`.
    """
    if splits == 1:
        return _whole_row_product(a, b, promote, core)
    first, *others = _runs(len(a.values), splits)
    total = _whole_row_product(a.of_columns(first), b.of_columns(first), promote, core)
    for run in others:
        total = total + _whole_row_product(a.of_columns(run), b.of_columns(run), promote, core)
    return total


def _whole_row_product(a: HostFactor, b: HostFactor, promote: bool, core: TensorCore) -> Array:
    """Multiply without splitting K."""
    columns = b.values.shape[1]
    width = core.instruction_k
    tops = (a.exponents + b.exponents).reshape(-1, width, columns).max(1).astype(np.int32)
    tops = np.maximum(tops * _ONE, _LOWEST) + _BIAS
    terms = np.empty((width + 1, columns), np.float32)  # one instruction's, which stay in a cache
    products = terms[:-1]
    accumulator = terms[-1]
    total, sums, unit = np.zeros((3, columns), np.float32)
    accumulator[:] = 0.0
    bits = accumulator.view(np.int32)
    unit_bits = unit.view(np.int32)
    factors = (values.reshape(len(tops), width, -1) for values in (a.values, b.values))
    for done, (left, right, top) in enumerate(zip(*factors, tops, strict=True), 1):
        np.multiply(left, right, out=products)
        np.bitwise_and(bits, _EXPONENT_BITS, out=unit_bits)
        np.maximum(unit_bits, top, out=unit_bits)
        # The value of the last bit kept, 13 below the largest exponent, by arithmetic on the exponent field.
        unit_bits -= FRACTION_BITS * _ONE
        terms /= unit
        np.add.reduce(np.trunc(terms, out=terms), out=sums)  # exact in any order
        np.multiply(sums, unit, out=accumulator)
        # The sum itself keeps 13 fraction bits again, cut and not rounded.
        bits &= _CUT
        # Split accumulation: CUDA cores add the finished 128 elements in FP32.
        if promote and done % (PROMOTION_K // width) == 0:
            total += accumulator
            accumulator[:] = 0.0
    return total + accumulator


def _tile(a: Factor, b: Factor, promote: bool, core: TensorCore) -> Tensor:
    """Multiply some rows of a by all of b, instruction by instruction along K: FP32 [M, N]."""
    total = a.values.new_zeros(a.values.shape[1], b.values.shape[1])
    accumulator = torch.zeros_like(total)
    width = core.instruction_k
    step = width * max(1, _PRODUCTS // (width * max(1, total.numel())))
    done = 0
    for start in range(0, len(a.values), step):
        columns = slice(start, start + step)
        all_terms, all_tops = _instructions(a.of_columns(columns), b.of_columns(columns), width)
        for terms, top in zip(all_terms, all_tops, strict=True):
            accumulator = _add_products(accumulator, terms, top)
            done += width
            if promote and done % PROMOTION_K == 0:
                total = total + accumulator
                accumulator = torch.zeros_like(accumulator)
    return total + accumulator


def _instructions(
    a: Factor, b: Factor, width: int
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return for each instruction its products [width + 1, M, N], the last for the accumulator, and their largest
    biased exponents [M, N]."""
    left, left_exponents = (t.unflatten(0, (-1, width)) for t in a)
    right, right_exponents = (t.unflatten(0, (-1, width)) for t in b)
    tops = (left_exponents[..., None] + right_exponents[:, :, None]).amax(1)
    tops = tops.clamp_(min=_LOWEST).add_(_BIAS)
    terms = left.new_empty(len(left), width + 1, left.shape[2], right.shape[2])
    torch.mul(left[..., None], right[:, :, None], out=terms[:, :width])
    return terms.unbind(), tops.unbind()


def _add_products(accumulator: Tensor, terms: Tensor, top: Tensor) -> Tensor:
    """Run one instruction, overwriting `terms`.

    The sum of the cut terms, 33 on Hopper, has at most 21 bits, so that adding them in FP32 is exact in any order.
    """
    terms[-1] = accumulator
    top = torch.maximum(accumulator.view(torch.int32) & _EXPONENT_BITS, top)
    unit = (top - FRACTION_BITS * _ONE).view(torch.float32)  # of the last bit that is kept
    # Multiplying by a power of two is exact, so trunc cuts each term at the unit.
    sums = terms.mul_(unit.reciprocal()).trunc_().sum(0).mul_(unit)
    sums.view(torch.int32).bitwise_and_(_CUT)
    return sums
