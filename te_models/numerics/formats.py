"""Number formats: Transformer Engine's data types with its numbers, and the largest values of the FP8 formats."""

from __future__ import annotations

from enum import IntEnum

import torch

FLT_MAX = torch.finfo(torch.float32).max


class DType(IntEnum):
    """Transformer Engine's data types, with its numbers."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10

    @classmethod
    def cast(cls, dtype: int) -> DType:
        """Return the member with this number."""
        return cls(int(dtype))


TORCH_FP8 = {DType.kFloat8E4M3: torch.float8_e4m3fn, DType.kFloat8E5M2: torch.float8_e5m2}
FP8_MAX = {DType.kFloat8E4M3: 448.0, DType.kFloat8E5M2: 57344.0}
# 1 / FP8_MAX, rounded to FP32.
INVERSE_MAX = {
    dtype: torch.ones((), dtype=torch.float32).div(value).item() for dtype, value in FP8_MAX.items()
}
