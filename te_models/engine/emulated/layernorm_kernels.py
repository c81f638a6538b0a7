"""LayerNorm in the order in which Transformer Engine's CUDA kernels add; te_models.engine.emulated.rmsnorm_kernels.

Tuned kernels, for 25 sizes and a multiple of four rows, take mean and centered squares of each warp and merge them as
variances are; the general ones, for the rest, add numbers and then centered squares.

Output and input gradient are added in the order of the source. Unlike RMSNorm's, their bits have not been compared with
a GPU's: where several warps share a row, which multiply-adds the compiler fuses in their merge is a guess. The weight
gradient is added over rows as RMSNorm's is, since the extent of LayerNorm's grid is not known.

Source: transformer_engine/common/normalization (layernorm/*_kernels.cuh, *_cuda_kernel.cu) and common/utils.cuh.
"""

import torch
from torch import Tensor

from te_models.engine.emulated.rmsnorm_kernels import (
    LANES,
    Kernel,
    dot,
    fma,
    reciprocal,
    sequence,
    tree,
)

# (stage, bytes of an element) -> (blocks per row, warps per row and block, bytes per load) -> sizes.
_TUNED = {
    ("forward", 2): {
        (1, 1, 16): (768, 1024, 1536, 2048, 2304),
        (1, 4, 16): (3072, 4096, 5120, 6144, 8192, 10240),
        (1, 4, 4): (3840,),
        (2, 4, 16): (12288, 16384, 18432, 20480, 24576),
        (2, 4, 4): (12800,),
        (2, 4, 8): (15360, 25600),
        (4, 4, 16): (32768, 40960, 49152),
        (4, 4, 4): (30720,),
        (8, 4, 16): (65536,),
    },
    ("forward", 4): {
        (1, 1, 16): (768, 1024, 1536, 2048, 2304),
        (1, 4, 16): (3072, 4096, 5120, 6144, 8192),
        (1, 4, 4): (3840,),
        (2, 4, 16): (10240, 12288, 16384, 20480),
        (2, 4, 4): (12800,),
        (2, 4, 8): (15360,),
        (4, 4, 16): (18432, 24576, 32768, 40960),
        (4, 4, 4): (25600, 30720),
        (8, 4, 16): (49152, 65536),
    },
    ("backward", 2): {
        (1, 1, 16): (768, 1024),
        (1, 4, 16): (2048, 3072, 4096, 5120),
        (1, 4, 8): (1536,),
        (1, 4, 4): (2304, 3840),
        (1, 8, 16): (6144,),
        (2, 4, 16): (8192, 10240),
        (4, 4, 16): (12288, 16384, 20480),
        (5, 4, 16): (25600,),
        (5, 4, 8): (12800,),
        (4, 4, 8): (18432,),
        (4, 4, 4): (15360,),
        (4, 8, 16): (24576, 32768, 40960),
        (4, 8, 4): (30720,),
        (8, 8, 16): (49152, 65536),
    },
    ("backward", 4): {
        (1, 1, 16): (768, 1024),
        (1, 4, 16): (1536, 2048, 3072, 4096, 5120),
        (1, 4, 8): (2304, 3840),
        (1, 8, 16): (6144,),
        (2, 4, 16): (8192, 10240),
        (4, 4, 16): (12288, 16384, 18432, 20480),
        (5, 4, 16): (12800, 25600),
        (4, 4, 8): (15360,),
        (4, 8, 16): (24576, 32768, 40960),
        (4, 8, 8): (30720,),
        (8, 8, 16): (49152, 65536),
    },
}
_TUNED_ROWS = 4  # the tuned kernels' multiple of rows
_GENERAL = {"forward": (128, 512, 1024, 2048, 8192), "backward": (128, 512, 1024, 2048, 4096)}
# The largest general kernel that gives a row to one warp; else four.
_ONE_WARP = {"forward": 2048, "backward": 1024}


def row_multiple(cols: int, dtype: torch.dtype) -> int:
    """Return the number whose multiples of rows have one kernel, and other rows another."""
    return 1 if _tuned("forward", cols, dtype) is None else _TUNED_ROWS


def _tuned(stage: str, cols: int, dtype: torch.dtype) -> tuple[int, int, int] | None:
    """Return blocks and warps of a row, and bytes per load, of the tuned kernel of this size; None: there is none."""
    for spread, sizes in _TUNED[stage, dtype.itemsize].items():
        if cols in sizes:
            return spread
    return None


def kernel_of(stage: str, x: Tensor) -> Kernel:
    """Return the kernel for x [rows, cols]; `stage` is "forward" or "backward"."""
    rows, cols = x.shape
    spread = _tuned(stage, cols, x.dtype)
    if spread is not None and rows % _TUNED_ROWS == 0:
        blocks, warps, loaded = spread
        return Kernel(True, cols, warps, blocks, loaded // x.dtype.itemsize, x.dtype)
    sizes = _GENERAL[stage]
    size = next((s for s in sizes if s >= cols), sizes[-1])
    warps = 1 if size <= _ONE_WARP[stage] else 4
    width = 4 if x.dtype == torch.float32 or size == 128 else 8
    return Kernel(False, size, warps, -(-cols // size), width, x.dtype)


def statistics(x: Tensor, wide: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return mean and `rsqrt(var(x) + eps)` of x [T, H] as FP32 [T, 1]; `wide` is x in FP32.

    A graph for other programs (torch.export) adds in their order, for any number of rows.
    """
    if torch.compiler.is_exporting():
        mean = wide.mean(dim=1, keepdim=True)
        return mean, torch.rsqrt((wide - mean).square().mean(dim=1, keepdim=True) + eps)
    kernel = kernel_of("forward", x)
    cols = x.shape[1]
    if kernel.tuned:
        mean, squares = _merged_statistics(kernel, wide)
    else:
        mean = kernel.row_sum(_lane_sums(kernel, wide)) * reciprocal(cols, x)
        centered = wide - mean
        squares = kernel.row_sum(dot(kernel, centered, centered))
    return mean, torch.rsqrt(fma(squares, reciprocal(cols, x), wide.new_full((), eps)))


def input_gradient(dy: Tensor, gamma: Tensor, x: Tensor, y_hat: Tensor, r: Tensor) -> Tensor:
    """Return `r * (g dy - y_hat * mean(g dy y_hat) - mean(g dy))`; all in FP32 [T, H], but x, for its dtype."""
    kernel = kernel_of("backward", x)
    scaled = dy * gamma
    share = reciprocal(x.shape[1], x)
    mean = _row_sum(kernel, _lane_sums(kernel, scaled)) * share
    product = _row_sum(kernel, dot(kernel, scaled, y_hat)) * share
    return (scaled - fma(product, y_hat, mean)).mul_(r)


def _lane_sums(kernel: Kernel, t: Tensor) -> Tensor:
    """Return the sums of numbers that the lanes [T, lanes] hold, added one after the other."""
    sums = t.new_zeros(t.shape[0], kernel.lanes)
    for part in kernel.spread(t):
        sums[:, : part.shape[1]] += part
    return sums


def _row_sum(kernel: Kernel, lanes: Tensor) -> Tensor:
    """Return the sums over rows [T, 1] of what the lanes [T, lanes] hold."""
    if kernel.tuned:
        # A row lies over blocks and then warps there, and over warps and then blocks in a general kernel.
        by_block = lanes.view(len(lanes), kernel.blocks, kernel.warps, LANES)
        lanes = by_block.transpose(1, 2).reshape(len(lanes), -1)
    return kernel.row_sum(lanes)


def _merged_statistics(kernel: Kernel, wide: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the warps' means and centered squares: return both for the rows of a tuned kernel, FP32 [T, 1] each."""
    rows, cols = wide.shape
    warps = kernel.blocks * kernel.warps
    per_warp = cols // warps
    by_warp = (rows, warps, LANES)
    # [T, warps, 1]
    mean = tree(sequence(kernel.spread(wide)).view(by_warp)) * reciprocal(per_warp, wide)
    columns = (rows, cols // (kernel.lanes * kernel.width), warps, LANES * kernel.width)
    centered = (wide.view(columns) - mean[:, None]).view_as(wide)
    squares = tree(dot(kernel, centered, centered).view(by_warp))
    count = per_warp
    # The warps of a block first, then its blocks.
    for group in (kernel.warps, kernel.blocks):
        mean = mean.reshape(-1, group)
        squares = squares.reshape(-1, group)
        while mean.shape[1] > 1:
            mean, squares = _merge(mean, squares, count)
            count *= 2
    return mean, squares


def _merge(mean: Tensor, squares: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Merge means and centered squares of `count` numbers of the lower half with the upper half's (Chan's update)."""
    mean_a, mean_b = mean.chunk(2, dim=1)
    squares_a, squares_b = squares.chunk(2, dim=1)
    delta = mean_a - mean_b
    share = reciprocal(2 * count, mean)
    number = mean.new_full((), float(count))
    merged = fma(delta * delta * number * number, share, squares_a + squares_b)
    return fma(number, mean_a, number * mean_b) * share, merged
