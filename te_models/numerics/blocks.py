"""Casts to FP8 with one scale per block of a matrix. The rules of casts.py apply."""

import torch
from torch import Tensor
from torch.nn import functional as F

from te_models.numerics.casts import nan_to_zero_, row_tiles, saturated
from te_models.numerics.formats import TORCH_FP8, DType


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
        [split_blocks(nan_to_zero_(x[rows].float().abs()), block).amax((1, 3)) for rows in tiles]
    )


def cast_fp8_blocks(x: Tensor, scale: Tensor, block: tuple[int, int], dtype: DType) -> Tensor:
    """Return FP8 data (uint8) `[M, K]` of `x * scale`, computed in FP32, with one multiplier per block."""
    data = torch.empty(x.shape, dtype=TORCH_FP8[dtype], device=x.device)
    for rows in row_tiles(x, block[0]):
        multipliers = scale[rows.start // block[0] : -(-rows.stop // block[0]), None, :, None]
        out = data[rows]
        out.copy_(
            merge_blocks(saturated(split_blocks(x[rows], block), multipliers, dtype), *out.shape)
        )
    return data.view(torch.uint8)


def scale_blocks_(x: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Multiply each block of contiguous x `[M, K]` by its entry of `scale`, overwriting x where possible."""
    return merge_blocks(split_blocks(x, block).mul_(scale[:, None, :, None]), *x.shape)
