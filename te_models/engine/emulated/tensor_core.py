"""FP8 matrix products as Hopper's tensor cores compute them, bit for bit.

A tensor core adds 32 products and its accumulator at a time, and not in FP32: every term is aligned to the largest
exponent among them and cut off (not rounded) 13 bits below it, the cut terms are added exactly, and the sum is cut to
13 fraction bits. Without split accumulation the accumulator stays in that form over the whole of K; with it, or with
block scales, it is added to an FP32 accumulator after every 128 elements of K.

The widths are those that reproduce every bit of the products of an H200 (the vectors in tests/golden: forward, input
and weight gradients of the per-tensor and block recipes, E4M3 and E5M2); a plain FP32 product differs from them in the
last BF16 bit of 1 to 3 % of the elements. The form of the arithmetic is that found by probing for earlier formats (Fasi
et al. 2021, "Numerical behavior of NVIDIA tensor cores"; Khattak and Mikaitis 2025, arXiv 2512.07004).

The cost is proportional to M*N*K elementwise operations, about 1.5 ns each on a CPU core, so this is for small products
and exact comparisons, not training at size.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

Array: TypeAlias = np.ndarray  # of any shape and dtype

INSTRUCTION_K = 32  # products added at a time: one wgmma of 8-bit operands
PROMOTION_K = (
    128  # elements of K between additions to the FP32 accumulator under split accumulation
)
FRACTION_BITS = 13
_CUT = ~(
    (1 << (23 - FRACTION_BITS)) - 1
)  # clears the fraction bits of an FP32 number beyond the 13th
_OUTPUTS = 1 << 14  # elements of the result that are computed at a time, at least one row
_PRODUCTS = 1 << 19  # products that are made at a time, at least one instruction
# Exponents are integers at the place where FP32 has its own, so that no shift is needed.
_ONE = 1 << 23
_EXPONENT_BITS = 255 * _ONE
_BIAS = 127 * _ONE
_NONE = -120 * _ONE  # the exponent of zero: with any other below _LOWEST
_NOTHING = -60  # the same as a small integer: with any other below that of every product
_LOWEST = -100 * _ONE  # of a largest term; nothing that counts is smaller
_INFINITE = 63 * _ONE  # that of infinity and NaN, of which two can still be added


class Factor(NamedTuple):
    """A matrix for `hopper_matmul`: FP32 `values` and int32 `exponents`, both [K, R], K padded to instructions."""

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
        return cls(x, exponents.masked_fill_(x == 0, _NONE))

    def of_rows(self, part: slice) -> Factor:
        """Return the factor of some of the rows R."""
        return Factor(self.values[:, part], self.exponents[:, part])

    def of_columns(self, part: slice) -> Factor:
        """Return the factor of some of the columns K, whole instructions."""
        return Factor(self.values[part], self.exponents[part])


def hopper_matmul(a: Factor, b: Factor, promote: bool) -> Tensor:
    """Multiply a [M, K] by b [N, K] transposed: FP32 [M, N]. `promote` is split accumulation."""
    rows = a.values.shape[1]
    columns = b.values.shape[1]
    step = max(1, _OUTPUTS // max(1, columns))
    parts = [
        _tile(a.of_rows(slice(start, start + step)), b, promote) for start in range(0, rows, step)
    ]
    return torch.cat(parts) if parts else a.values.new_zeros(0, columns)


class HostFactor(NamedTuple):
    """A Factor for `row_product`: values FP32 and exponents int8, [K, R] in NumPy, the exponent of zero `_NOTHING`."""

    values: Array
    exponents: Array

    @classmethod
    def of(cls, x: Tensor, floor: int) -> HostFactor:
        """Return the same factor as `Factor.of`."""
        values, exponents = Factor.of(x, floor)
        return cls(values.numpy(), (exponents >> 23).clamp_(min=_NOTHING).to(torch.int8).numpy())


def row_product(a: HostFactor, b: HostFactor, promote: bool) -> Array:
    """Return `hopper_matmul` of a single row a [K, 1] and b [K, N], FP32 [N], in a third of the time on a CPU."""
    columns = b.values.shape[1]
    tops = (a.exponents + b.exponents).reshape(-1, INSTRUCTION_K, columns).max(1).astype(np.int32)
    tops = np.maximum(tops * _ONE, _LOWEST) + _BIAS
    terms = np.empty(
        (INSTRUCTION_K + 1, columns), np.float32
    )  # one instruction's, which stay in a cache
    products, accumulator = terms[:-1], terms[-1]
    total, sums, unit = np.zeros((3, columns), np.float32)
    accumulator[:] = 0.0
    bits, unit_bits = accumulator.view(np.int32), unit.view(np.int32)
    factors = (values.reshape(len(tops), INSTRUCTION_K, -1) for values in (a.values, b.values))
    for done, (left, right, top) in enumerate(zip(*factors, tops, strict=True), 1):
        np.multiply(left, right, out=products)
        np.bitwise_and(bits, _EXPONENT_BITS, out=unit_bits)
        np.maximum(unit_bits, top, out=unit_bits)
        unit_bits -= FRACTION_BITS * _ONE
        terms /= unit
        np.add.reduce(np.trunc(terms, out=terms), out=sums)  # exact in any order
        np.multiply(sums, unit, out=accumulator)
        bits &= _CUT
        if promote and done % (PROMOTION_K // INSTRUCTION_K) == 0:
            total += accumulator
            accumulator[:] = 0.0
    return total + accumulator


def _tile(a: Factor, b: Factor, promote: bool) -> Tensor:
    total = a.values.new_zeros(a.values.shape[1], b.values.shape[1])
    accumulator = torch.zeros_like(total)
    step = INSTRUCTION_K * max(1, _PRODUCTS // (INSTRUCTION_K * max(1, total.numel())))
    done = 0
    for start in range(0, len(a.values), step):
        part = slice(start, start + step)
        for terms, top in zip(*_instructions(a.of_columns(part), b.of_columns(part)), strict=True):
            accumulator = _add_products(accumulator, terms, top)
            done += INSTRUCTION_K
            if promote and done % PROMOTION_K == 0:
                total = total + accumulator
                accumulator = torch.zeros_like(accumulator)
    return total + accumulator


def _instructions(a: Factor, b: Factor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return for each instruction its products [33, M, N], the last for the accumulator, and their largest biased
    exponents [M, N]."""
    (left, left_exponents), (right, right_exponents) = (
        (t.unflatten(0, (-1, INSTRUCTION_K)) for t in factor) for factor in (a, b)
    )
    tops = (
        (left_exponents[..., None] + right_exponents[:, :, None])
        .amax(1)
        .clamp_(min=_LOWEST)
        .add_(_BIAS)
    )
    terms = left.new_empty(len(left), INSTRUCTION_K + 1, left.shape[2], right.shape[2])
    torch.mul(left[..., None], right[:, :, None], out=terms[:, :INSTRUCTION_K])
    return terms.unbind(), tops.unbind()


def _add_products(accumulator: Tensor, terms: Tensor, top: Tensor) -> Tensor:
    """Run one instruction, overwriting `terms`.

    The sum of 33 cut terms has at most 21 bits, so that adding them in FP32 is exact in any order.
    """
    terms[-1] = accumulator
    top = torch.maximum(accumulator.view(torch.int32) & _EXPONENT_BITS, top)
    unit = (top - FRACTION_BITS * _ONE).view(torch.float32)  # of the last bit that is kept
    sums = terms.mul_(unit.reciprocal()).trunc_().sum(0).mul_(unit)
    sums.view(torch.int32).bitwise_and_(_CUT)
    return sums
