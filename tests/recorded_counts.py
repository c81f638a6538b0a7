"""The fields of a recorded cast, computed in plain PyTorch in FP64 from the values before it and the scales."""

import math

import torch
from torch import Tensor

FP8 = {7: torch.float8_e4m3fn, 8: torch.float8_e5m2}
LARGEST, BEYOND, NORMAL = {7: 448, 8: 57344}, {7: 464, 8: 61440}, {7: 2**-6, 8: 2**-14}


def block_scales(x: Tensor, fp8: int, block: tuple[int, int]) -> Tensor:
    """The power of two of each element's block, FP64: the largest that brings the block into the format's range."""
    scales = torch.ones_like(x)
    for i in range(0, x.shape[0], block[0]):
        for j in range(0, x.shape[1], block[1]):
            amax = x[i : i + block[0], j : j + block[1]].abs().max().item()
            if amax:
                scale = 2.0 ** math.floor(math.log2(LARGEST[fp8] / amax))
                scales[i : i + block[0], j : j + block[1]] = scale
    return scales


def reference(x: Tensor, fp8: int, scales: Tensor) -> dict[str, float]:
    x = x.double()
    scaled = (x.float() * scales.float()).clamp(-LARGEST[fp8], LARGEST[fp8])
    codes = scaled.to(FP8[fp8]).double()
    after = codes / scales
    return {
        "amax": x.abs().max().item(),
        "elements": x.numel(),
        "zeros": (x == 0).sum().item(),
        "saturated": ((x * scales).abs() > BEYOND[fp8]).sum().item(),
        "flushed": ((x != 0) & (codes == 0)).sum().item(),
        "subnormal": ((codes != 0) & (codes.abs() < NORMAL[fp8])).sum().item(),
        "nonfinite": 0,
        "signal": x.square().sum().item(),
        "noise": (x - after).square().sum().item(),
        "scale_min": scales[x != 0].min().item(),
        "format": fp8,
    }
