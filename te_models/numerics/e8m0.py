"""E8M0, the scale bytes of MXFP8: powers of two from 2^-127 to 2^127."""

import torch
from torch import Tensor

from te_models.numerics.formats import INVERSE_MAX, DType


def e8m0_from_amax(amax: Tensor, dtype: DType) -> Tensor:
    """Return MXFP8 scale bytes: `ceil(log2(amax / fp8_max)) + 127`, of the FP32 product `amax * (1 / fp8_max)`.

    0 gives 0, infinity 254. A subnormal product of up to 2^-127 gives 0.
    """
    bits = (amax * INVERSE_MAX[dtype]).view(torch.int32)
    exponent = bits >> 23
    mantissa = bits & 0x7FFFFF
    up = torch.where(exponent == 0, mantissa > 0x400000, mantissa > 0)
    return (exponent + up).clamp_(max=254).to(torch.uint8)


def e8m0_to_float(e: Tensor, inverse: bool = False) -> Tensor:
    """Return `2^(e - 127)` in FP32, or `2^(127 - e)`; 255 is NaN."""
    e = e.to(torch.int32)
    exponent = 254 - e if inverse else e
    value = torch.where(exponent > 0, exponent << 23, 0x400000).view(torch.float32)
    return value.masked_fill(e == 255, torch.nan)
