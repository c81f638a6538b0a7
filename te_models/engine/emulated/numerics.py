"""The arithmetic of Transformer Engine's casts, as pure functions on tensors: amax, scale, FP8 data, block scales.

Rounding is to nearest, ties to even; overflow and infinities saturate; NaN stays NaN and does not count for an amax.
Everything is computed in FP32 and on the device of the input, without host synchronization.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor
from torch.nn import functional as F

FLT_MAX = torch.finfo(torch.float32).max
_TILE = 1 << 18  # elements of an intermediate on a CPU
_FEW = 1 << 13  # elements that a CPU decodes faster by torch's own conversion, with fewer calls


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


def device_type(x: Tensor) -> str:
    """Return `x.device.type`, but ten times as fast on the host of a GPU."""
    return "cuda" if x.is_cuda else "cpu" if x.is_cpu else x.device.type


def on_host(x: Tensor) -> bool:
    """Return whether NumPy may work on x: it is on a CPU, and no compiler or mode records the operations of torch."""
    return (
        x.is_cpu and not torch.compiler.is_compiling() and not torch._C._len_torch_dispatch_stack()
    )


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
    parts = [_nan_to_zero_(x[rows].abs()).amax() for rows in row_tiles(x)]
    return (parts[0] if len(parts) == 1 else torch.stack(parts).amax()).float()


def _nan_to_zero_(magnitudes: Tensor) -> Tensor:
    """Replace NaN by 0, since it does not count for an amax; infinity does."""
    return magnitudes.nan_to_num_(nan=0.0, posinf=torch.inf)


def scale_from_amax(
    amax: Tensor,
    fp8_max: float,
    power_of_2: bool = False,
    epsilon: float = 0.0,
    infinite: float = FLT_MAX,
) -> Tensor:
    """Return the FP32 multiplier that brings `amax` to `fp8_max`: 1 for 0 and infinity, `infinite` on overflow.

    `power_of_2` rounds down to a power of two. `epsilon` is a lower bound of the amax. A finite quotient may be larger
    than `infinite`, as those of small FP16 blocks are.
    """
    if epsilon > 0:
        amax = amax.clamp(min=epsilon)
    # A Python number divided by a tensor is a reciprocal and a product, which rounds twice.
    scale = torch.full_like(amax, fp8_max).div_(amax)
    scale = scale.masked_fill_(scale == torch.inf, infinite)
    scale = torch.where((amax > 0) & (amax < torch.inf), scale, 1.0)
    if power_of_2:
        scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)
    return scale


def cast_fp8(x: Tensor, scale: Tensor, dtype: DType) -> Tensor:
    """Return FP8 data (uint8, shape of x) of `x * scale`, computed in FP32. `scale` is the tensor's, `[1]`."""
    if x.numel() <= _TILE:
        return _saturated(x, scale, dtype).to(TORCH_FP8[dtype]).view(torch.uint8)
    data = torch.empty(x.shape, dtype=TORCH_FP8[dtype], device=x.device)
    size = _TILE if x.device.type == "cpu" else max(1, x.numel())
    for part, out in zip(x.reshape(-1).split(size), data.view(-1).split(size), strict=True):
        out.copy_(_saturated(part, scale, dtype))
    return data.view(torch.uint8)


def _saturated(x: Tensor, scale: Tensor, dtype: DType) -> Tensor:
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


def split_blocks(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Return x `[M, K]`, zero-padded to whole blocks, as `[M/bm, bm, K/bk, bk]`."""
    m, k = x.shape
    bm, bk = block
    if m % bm or k % bk:
        x = F.pad(x, (0, -k % bk, 0, -m % bm))
    return x.reshape(-(-m // bm), bm, -(-k // bk), bk)


def merge_blocks(blocks: Tensor, m: int, k: int) -> Tensor:
    """Invert `split_blocks`: return `[M, K]` without the padding."""
    a, bm, b, bk = blocks.shape
    return blocks.reshape(a * bm, b * bk)[:m, :k]


def block_amax(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the largest magnitudes of the blocks of x `[M, K]`: FP32 `[ceil(M/bm), ceil(K/bk)]`; NaN is ignored."""
    tiles = row_tiles(x, block[0])
    return torch.cat(
        [split_blocks(_nan_to_zero_(x[rows].float().abs()), block).amax((1, 3)) for rows in tiles]
    )


def cast_fp8_blocks(x: Tensor, scale: Tensor, block: tuple[int, int], dtype: DType) -> Tensor:
    """Return FP8 data (uint8) `[M, K]` of `x * scale`, computed in FP32, with one multiplier per block."""
    data = torch.empty(x.shape, dtype=TORCH_FP8[dtype], device=x.device)
    for rows in row_tiles(x, block[0]):
        multipliers = scale[rows.start // block[0] : -(-rows.stop // block[0]), None, :, None]
        out = data[rows]
        out.copy_(
            merge_blocks(_saturated(split_blocks(x[rows], block), multipliers, dtype), *out.shape)
        )
    return data.view(torch.uint8)


def scale_blocks_(x: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Multiply each block of contiguous x `[M, K]` by its entry of `scale`, overwriting x where possible."""
    return merge_blocks(split_blocks(x, block).mul_(scale[:, None, :, None]), *x.shape)


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
