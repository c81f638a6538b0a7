"""te.Linear for the few rows of a step of generation on a CPU, under schemes with one scale per tensor.

A call of torch takes a microsecond or two however few its numbers, and quantizers.py and gemm.py make some forty of
them for a row. The same numbers follow here from a dozen: scales are numbers of the host, and no amax is recorded,
since such a step changes no state.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor

from te_models.device.host import on_host
from te_models.engine.emulated.gemm import finish, is_exact, tensor_core
from te_models.engine.emulated.short_rows import enough_rows, full_rows, multiply
from te_models.engine.emulated.split_sums import runs_of_k
from te_models.engine.emulated.tensor_core import HostFactor, row_product
from te_models.numerics.formats import FP8_MAX, TORCH_FP8
from te_models.numerics.matrices import FP8Matrix, as_matrix
from te_models.numerics.quantizers import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Quantizer,
)
from te_models.numerics.tensors import Float8TensorStorage, MaybeQuantized, QuantizedTensorStorage

_TINY = 2.0**-64  # a smaller amax may have a scale that overflows FP32


def scale(x: MaybeQuantized, quantizer: Quantizer) -> np.float32 | None:
    """Return the scale with which `product` casts x [..., K]; None where quantizers.py and gemm.py have to serve."""
    if isinstance(x, QuantizedTensorStorage) or not on_host(x):
        return None
    if isinstance(quantizer, Float8Quantizer):
        return np.float32(quantizer.scale.item())
    if not isinstance(quantizer, Float8CurrentScalingQuantizer):
        return None
    # NumPy's scalars: a tensor of one element would cost as much as the product.
    amax = np.float32(max(x.abs().amax().item(), quantizer.amax_epsilon))
    if not _TINY < amax < np.inf:  # as NaN is not
        return None
    factor = np.float32(FP8_MAX[quantizer.dtype]) / amax  # as scale_from_amax does
    return (
        np.float32(2.0 ** (math.frexp(factor)[1] - 1)) if quantizer.force_pow_2_scales else factor
    )


def product(
    x: Tensor,
    scale: np.float32,
    quantizer: Quantizer,
    weight: QuantizedTensorStorage,
    bias: Tensor | None,
    dtype: torch.dtype,
    split_accumulator: bool,
) -> Tensor:
    """Return x [..., K], cast with `scale`, times `weight` [N, K] plus `bias` [N]: [T, N] in `dtype`."""
    assert isinstance(quantizer, (Float8Quantizer, Float8CurrentScalingQuantizer))
    assert isinstance(weight, Float8TensorStorage)
    largest = FP8_MAX[quantizer.dtype]
    # The cast without its container: nothing but the product reads these values.
    numbers = (
        torch.mul(as_matrix(x).float(), float(scale))
        .clamp_(-largest, largest)
        .to(TORCH_FP8[quantizer.dtype])
    )
    outputs, inputs = weight._matrix
    if is_exact(len(numbers), inputs, outputs):
        splits = runs_of_k(full_rows(len(numbers)), inputs, outputs, tensor_core())
        out = _exact(numbers, weight, split_accumulator, splits)
    else:
        out = multiply(numbers.float(), _columns(weight))
    # Kept with the weight from one step to the next.
    inverse = weight.cached("inverse scale", False, lambda: np.float32(weight._scale_inv.item()))
    return finish(out.mul_(float(np.float32(1) / scale * inverse)), None, bias, dtype)


def _columns(weight: Float8TensorStorage) -> Tensor:
    """Return the numbers of a weight in FP32, [K, N], in the layout in which fewer rows have the bits of many."""

    def numbers() -> Tensor:
        columns = weight.operand(False).values.t()
        outputs, inputs = weight._matrix
        # A copy in the other layout pays only if it is used again, and if one row then has the right bits.
        suits = weight.is_caching and enough_rows(
            1, inputs, outputs, columns.dtype, True, torch.get_num_threads()
        )
        return columns.contiguous() if suits else columns

    return weight.cached("columns", False, numbers)


def _exact(
    data: Tensor, weight: Float8TensorStorage, split_accumulator: bool, splits: int
) -> Tensor:
    """Return the product of the FP8 numbers `data` [T, K] and `weight` [N, K], without scales: FP32 [T, N].

    It is the sum of `splits` products of equal parts of K, each rounded as tensor cores do.
    """
    right = weight.cached("host factor", False, lambda: _host_factor(weight.fp8_matrix(False)))
    # FP8 has only 256 different numbers: the factors of a row are looked up, not computed.
    table = _every_number(data.dtype)
    bits = data.view(torch.uint8).numpy()
    # The weight's K is padded to whole runs of a tensor core.
    if len(right.values) > bits.shape[1]:
        bits = np.pad(bits, ((0, 0), (0, len(right.values) - bits.shape[1])))
    out = np.zeros((len(bits), right.values.shape[1]), np.float32)
    with np.errstate(all="ignore"):
        for row, numbers in zip(out, bits, strict=True):
            # A row of padding is all zeros, and so is its product.
            if numbers.any():
                row[:] = row_product(
                    HostFactor(table.values[numbers], table.exponents[numbers]),
                    right,
                    split_accumulator,
                    tensor_core(),
                    splits,
                )
    return torch.from_numpy(out)


@functools.cache
def _every_number(dtype: torch.dtype) -> HostFactor:
    """Return the factor of all 256 numbers of an FP8 format, in the order of their bits."""
    return _host_factor(
        FP8Matrix(torch.arange(256, dtype=torch.uint8).view(dtype)[None], torch.ones(1))
    )


def _host_factor(matrix: FP8Matrix) -> HostFactor:
    return HostFactor.of(matrix.data.float(), matrix.floor)
