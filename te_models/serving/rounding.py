"""The rounding of weights onto the numbers of a format whose scales are given.

Rounding to the nearest number takes the same number for a weight and for the weight after a small change. Stochastic
rounding takes the lower or the upper neighbor, in proportion to the distance: no change is lost on average, and each
weight has more noise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from te_models.interop.quantized import E4M3, GLOBAL_SCALE, WeightStorage
from te_models.numerics.blocks import scale_blocks_
from te_models.numerics.e8m0 import e8m0_to_float
from te_models.numerics.formats import FP8_MAX, DType
from te_models.numerics.nvfp4 import FP4_MAX, encode_e2m1, pack
from te_models.serving.formats import Parts

ROUNDINGS = ("nearest", "stochastic")
# Of stochastic rounding, so that an export can be repeated. No small number: weights that were drawn with the same seed
# would be rounded in step with their values.
SEED = 0x5D3A_71C9


def scales_of(storage: WeightStorage, parts: Parts) -> Tensor:
    """Return the scales of a quantized weight, FP32 [rows, columns of the grid]: values are data times these."""
    name = next(name for name in storage.scales if name in parts)
    scales = parts[name]
    values = e8m0_to_float(scales) if scales.dtype == torch.uint8 else scales.float()
    return values / parts[GLOBAL_SCALE] if storage.packed else values


def round_stochastically(
    storage: WeightStorage, weight: Tensor, parts: Parts, generator: torch.Generator
) -> Parts:
    """Return the parts of a weight [out, in] with the same scales and its data rounded at random."""
    rows, columns = weight.shape
    shape = (rows, columns)
    scales = scales_of(storage, parts).reshape(storage.grid(shape))
    divisors = scale_blocks_(torch.ones(shape, device=weight.device), scales, storage.steps(shape))
    values = torch.where(divisors > 0, weight.float() / divisors, 0.0)
    # Neighbors are 2^(exponent - fraction bits) apart; numbers below the smallest normal one like those above it.
    if storage.packed:
        largest = FP4_MAX
        fraction_bits = 1
        least_exponent = 0
    else:
        largest = FP8_MAX[DType.kFloat8E4M3]
        fraction_bits = 3
        least_exponent = -6
    values = values.clamp_(-largest, largest)
    exponents = (torch.frexp(values).exponent - 1).clamp_(min=least_exponent)
    spacing = torch.ldexp(torch.ones_like(values), exponents - fraction_bits)
    # On the CPU, so that the numbers do not depend on the device.
    noise = torch.rand(shape, generator=generator).to(values.device)
    rounded = (values / spacing).add_(noise).floor_().mul_(spacing).clamp_(-largest, largest)
    data = pack(encode_e2m1(rounded.contiguous())) if storage.packed else rounded.to(E4M3)
    return {**parts, storage.data: data}


def to_bfloat16(tensor: Tensor, rounding: str, generator: torch.Generator) -> Tensor:
    """Return a tensor in BF16, rounded to the nearest number or, `rounding` "stochastic", at random."""
    if rounding == "nearest" or tensor.dtype == torch.bfloat16:
        return tensor.to(torch.bfloat16)
    values = tensor.float()
    # BF16 is FP32 without its 16 lowest bits: adding noise below them carries in proportion to the distance.
    noise = torch.randint(2**16, values.shape, dtype=torch.int32, generator=generator)
    bits = (values.view(torch.int32) + noise.to(values.device)) & ~0xFFFF
    rounded = bits.view(torch.float32).bfloat16()
    # Infinity and NaN have no neighbors, and the largest number has none above it.
    return torch.where(rounded.isfinite() & values.isfinite(), rounded, tensor.to(torch.bfloat16))
