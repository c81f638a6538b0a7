"""The largest magnitude of a tensor, its cast to FP8 with one scale, and the values of FP8 data.

Rounding is to nearest, ties to even; overflow and infinities saturate; NaN stays NaN and does not count for an amax.
Everything is computed in FP32 and on the device of the input, without host synchronization.
"""

import torch
from torch import Tensor

from te_models.numerics.formats import FP8_MAX, TORCH_FP8, DType

_TILE = 1 << 18  # elements of an intermediate on a CPU
_FEW = 1 << 13  # elements that a CPU decodes faster by torch's own conversion, with fewer calls


def row_tiles(x: Tensor, multiple: int = 1) -> list[slice]:
    """Return slices of the rows of x `[M, K]`, each a multiple of `multiple`, that fit a CPU's cache; one on a GPU.

    Fresh memory for a large intermediate costs a CPU more than the arithmetic on it.
    """
    if x.device.type != "cpu" or x.numel() <= _TILE:
        return [slice(0, len(x))]
    step = max(1, _TILE // (multiple * x.shape[1])) * multiple
    return [slice(start, start + step) for start in range(0, len(x), step)]


def amax(x: Tensor) -> Tensor:
    """Return the largest magnitude in FP32, shape []; NaN is ignored, infinity counts, an empty tensor gives 0."""
    if not x.numel():
        return torch.zeros((), dtype=torch.float32, device=x.device)
    x = x.reshape(-1, x.shape[-1] if x.ndim else 1)
    parts = [nan_to_zero_(x[rows].abs()).amax() for rows in row_tiles(x)]
    return (parts[0] if len(parts) == 1 else torch.stack(parts).amax()).float()


def nan_to_zero_(magnitudes: Tensor) -> Tensor:
    """Replace NaN by 0, since it does not count for an amax; infinity does."""
    return magnitudes.nan_to_num_(nan=0.0, posinf=torch.inf)


def cast_fp8(x: Tensor, scale: Tensor, dtype: DType) -> Tensor:
    """Return FP8 data (uint8, shape of x) of `x * scale`, computed in FP32. `scale` is the tensor's, `[1]`."""
    if x.numel() <= _TILE:
        return saturated(x, scale, dtype).to(TORCH_FP8[dtype]).view(torch.uint8)
    data = torch.empty(x.shape, dtype=TORCH_FP8[dtype], device=x.device)
    size = _TILE if x.device.type == "cpu" else max(1, x.numel())
    for part, out in zip(x.reshape(-1).split(size), data.view(-1).split(size), strict=True):
        out.copy_(saturated(part, scale, dtype))
    return data.view(torch.uint8)


def saturated(x: Tensor, scale: Tensor, dtype: DType) -> Tensor:
    """Return `x * scale` in FP32 within the range of the FP8 format; `scale` broadcasts against x."""
    # Clamp first: the cast alone saturates for E4M3 but gives infinity for E5M2 (torch 2.13 on CPU).
    return (x.float() * scale).clamp_(-FP8_MAX[dtype], FP8_MAX[dtype])


def decode_fp8(data: Tensor, dtype: DType) -> Tensor:
    """Return the FP32 values of FP8 data (uint8)."""
    # torch's own conversion is scalar on CPU (2.13). E5M2 is the upper byte of FP16. E4M3's seven bits, put where FP32
    # has its exponent and mantissa, are the value times 2^-120; only its NaN, of magnitude 127, would become 480.
    if data.device.type != "cpu" or data.numel() <= _FEW:
        return data.view(TORCH_FP8[dtype]).float()
    if dtype == DType.kFloat8E5M2:
        return data.to(torch.int16).bitwise_left_shift_(8).view(torch.float16).float()
    if (data & 127).amax() == 127:
        return data.view(TORCH_FP8[dtype]).float()
    bits = data.view(torch.int8).to(torch.int32).bitwise_left_shift_(20).bitwise_and_(-0x78100000)
    return bits.view(torch.float32).mul_(2.0**120)
