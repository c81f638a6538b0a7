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

import torch
from torch import Tensor

INSTRUCTION_K = 32  # products added at a time: one wgmma of 8-bit operands
PROMOTION_K = 128  # elements of K between additions to the FP32 accumulator under split accumulation
FRACTION_BITS = 13
_CUT = ~((1 << (23 - FRACTION_BITS)) - 1)  # clears the fraction bits of an FP32 number beyond the 13th
_TILE = 1 << 24  # elements of an intermediate
_NONE = -1000.0  # the exponent of zero: below any other


def hopper_matmul(a: Tensor, b: Tensor, floors: tuple[int, int], promote: bool) -> Tensor:
    """Multiply a [M, K] by b [N, K] transposed: FP32 [M, N].

    `a` and `b` hold FP8 values in FP32; `floors` are the exponents of their formats' smallest normal numbers (E4M3 -6,
    E5M2 -14), which subnormal numbers have too. `promote` is split accumulation.
    """
    k = a.shape[1]
    pad = -k % INSTRUCTION_K
    if pad:
        a, b = (torch.nn.functional.pad(t, (0, pad)) for t in (a, b))
    exponents = _exponent(a, floors[0]), _exponent(b, floors[1])
    rows = max(1, _TILE // (b.shape[0] * INSTRUCTION_K))
    parts = [
        _tile(a[i : i + rows], exponents[0][i : i + rows], b, exponents[1], promote) for i in range(0, len(a), rows)
    ]
    return torch.cat(parts) if parts else a.new_zeros(0, len(b))


def _tile(a: Tensor, ea: Tensor, b: Tensor, eb: Tensor, promote: bool) -> Tensor:
    accumulator, total = a.new_zeros(len(a), len(b)), a.new_zeros(len(a), len(b))
    for start in range(0, a.shape[1], INSTRUCTION_K):
        part = slice(start, start + INSTRUCTION_K)
        accumulator = _add_products(accumulator, a[:, part], ea[:, part], b[:, part], eb[:, part])
        if promote and (start + INSTRUCTION_K) % PROMOTION_K == 0:
            total, accumulator = total + accumulator, torch.zeros_like(accumulator)
    return total + accumulator


def _add_products(accumulator: Tensor, a: Tensor, ea: Tensor, b: Tensor, eb: Tensor) -> Tensor:
    """Run one instruction. The sum of 33 cut terms has at most 21 bits, so that adding them in FP32 is exact."""
    top = (ea[:, None] + eb[None]).amax(-1)
    top = torch.maximum(top, _exponent(accumulator, -126)).clamp(min=-100)
    unit = torch.exp2(FRACTION_BITS - top)
    terms = (a[:, None] * b[None]).mul_(unit[..., None]).trunc_()
    sums = terms.sum(-1).add_((accumulator * unit).trunc_()) / unit
    return (sums.view(torch.int32) & _CUT).view(torch.float32)


def _exponent(x: Tensor, floor: int) -> Tensor:
    """Return the exponents of FP32 numbers as FP32, at least `floor`; _NONE for zero."""
    exponent = ((x.abs().view(torch.int32) >> 23) - 127).clamp(min=floor).float()
    return exponent.masked_fill(x == 0, _NONE)
