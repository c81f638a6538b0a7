"""te.Linear for the few rows of a step of generation on a CPU, under schemes with one scale per tensor.

A call of torch takes a microsecond or two however few its numbers, and quantizers.py and gemm.py make some forty of
them for a row. The same numbers follow here from a dozen: scales are numbers of the host, and no amax is recorded,
since such a step changes no state.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from te_models.engine.emulated.gemm import finish, is_exact
from te_models.engine.emulated.numerics import FP8_MAX, TORCH_FP8, on_host
from te_models.engine.emulated.quantizers import Float8CurrentScalingQuantizer, Float8Quantizer, Quantizer
from te_models.engine.emulated.tensor_core import HostFactor, row_product
from te_models.engine.emulated.tensors import Float8TensorStorage, FP8Matrix, QuantizedTensorStorage, Value, as_matrix

_TINY = 2.0**-64  # of smaller amaxes scales may overflow
_CACHED = 2**18  # the largest weight, in elements, whose FP32 values stay in a core's cache until the product


class FewRows(NamedTuple):
    """Rows in FP8: the numbers [T, K], and their scale."""

    data: Tensor
    scale: np.float32


def cast(x: Value, quantizer: Quantizer) -> FewRows | None:
    """Return x [..., K] in FP8; None where quantizers.py and gemm.py have to serve."""
    per_tensor = isinstance(quantizer, (Float8Quantizer, Float8CurrentScalingQuantizer))
    if not per_tensor or isinstance(x, QuantizedTensorStorage) or not on_host(x):
        return None
    scale = _scale(x, quantizer)
    if scale is None:
        return None
    largest = FP8_MAX[quantizer.dtype]
    numbers = torch.mul(as_matrix(x).float(), float(scale)).clamp_(-largest, largest)
    return FewRows(numbers.to(TORCH_FP8[quantizer.dtype]), scale)


def product(
    x: FewRows, weight: QuantizedTensorStorage, bias: Tensor | None, dtype: torch.dtype, split_accumulator: bool
) -> Tensor:
    """Return x times `weight` [N, K] plus `bias` [N]: [T, N] in `dtype`."""
    assert isinstance(weight, Float8TensorStorage)
    if is_exact(len(x.data), *reversed(weight._matrix)):
        out = _exact(x.data, weight, split_accumulator)
    else:
        out = x.data.float() @ _columns(weight)
    scale = np.float32(1) / x.scale * np.float32(weight._scale_inv.item())
    return finish(out.mul_(float(scale)), None, bias, dtype)


def _scale(x: Tensor, quantizer: Float8Quantizer | Float8CurrentScalingQuantizer) -> np.float32 | None:
    """Return the scale of x as `numerics.scale_from_amax` does; None where that has a case of its own."""
    if isinstance(quantizer, Float8Quantizer):
        return np.float32(quantizer.scale.item())
    amax = np.float32(max(x.abs().amax().item(), quantizer.amax_epsilon))
    if not _TINY < amax < np.inf:  # as NaN is not
        return None
    scale = np.float32(FP8_MAX[quantizer.dtype]) / amax
    return np.float32(2.0 ** (math.frexp(scale)[1] - 1)) if quantizer.force_pow_2_scales else scale


def _columns(weight: Float8TensorStorage) -> Tensor:
    """Return the numbers of a weight in FP32, [K, N]: from BF16, which is exact, where reading them costs the most."""

    def numbers() -> Tensor:
        return weight.operand(False).values.t().bfloat16().contiguous()

    if weight.keeps and weight._shape.numel() <= _CACHED:
        return weight.kept("columns", False, numbers).float()
    return weight.kept("operand", False, lambda: weight.operand(False)).values.t()


def _exact(data: Tensor, weight: Float8TensorStorage, split_accumulator: bool) -> Tensor:
    """Return the product without scales as tensor cores compute it; rows of zeros, the padding, give zeros."""
    right = weight.kept("host factor", False, lambda: _host_factor(weight.fp8_matrix(False)))
    table = _every_number(data.dtype)
    bits = data.view(torch.uint8).numpy()
    bits = np.pad(bits, ((0, 0), (0, len(right.values) - bits.shape[1]))) if len(right.values) > bits.shape[1] else bits
    out = np.zeros((len(bits), right.values.shape[1]), np.float32)
    with np.errstate(all="ignore"):
        for row in bits.any(1).nonzero()[0]:
            left = HostFactor(table.values[bits[row]], table.exponents[bits[row]])
            out[row] = row_product(left, right, split_accumulator)
    return torch.from_numpy(out)


@functools.cache
def _every_number(dtype: torch.dtype) -> HostFactor:
    """Return the factor of all 256 numbers of an FP8 format, in the order of their bits."""
    return _host_factor(FP8Matrix(torch.arange(256, dtype=torch.uint8).view(dtype)[None], torch.ones(1)))


def _host_factor(matrix: FP8Matrix) -> HostFactor:
    return HostFactor.of(matrix.data.float(), matrix.floor)
