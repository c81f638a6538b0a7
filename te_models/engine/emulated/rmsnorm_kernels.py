"""RMSNorm in the order in which Transformer Engine's CUDA kernels add, bit for bit.

A row of H numbers is spread over the lanes of one or four warps (and, beyond the largest kernel, over several blocks).
A lane adds its numbers one after the other with fused multiply-adds, the lanes of a warp add as a tree, and the warps
of a row in sequence. Two families of kernels differ in the way there: the tuned ones, for six sizes and a multiple of
four rows, take the mean square as variance plus squared mean; the general ones, for the rest, add squares.

The weight gradient is added over rows in steps of the grid, whose extent is the number of blocks that fit the GPU: the
numbers of blocks per multiprocessor are those measured on an H200 (TE 2.20.2, kernels compiled by CUDA 13.0).

All outputs equal an H200's in every bit in BF16, FP16 and FP32, but for the weight gradient of the tuned FP32 kernel of
8192 columns, where the compiler leaves most multiply-adds unfused.

Source: transformer_engine/common/normalization (rmsnorm/*_kernels.cuh, kernel_traits.h) and common/utils.cuh.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from te_models.device.host import on_host
from te_models.device.measured import once
from te_models.engine.norm_widths import TUNED

LANES = 32
_FEW = 2**13  # elements of a step of generation
_TUNED_ROWS = 4  # the multiple that the rows of a tuned kernel must be
# Columns that each general kernel handles at most.
_GENERAL = {"forward": (128, 512, 1024, 2048, 8192), "backward": (128, 512, 1024, 2048, 4096)}
# The size of the largest kernel that gives a row to one warp; larger ones give it to four.
_ONE_WARP = {"forward": 2048, "backward": 1024}
_H200_MULTIPROCESSORS = 132
# Size -> blocks of a backward kernel that fit one multiprocessor: by their registers, so also by dtype where noted.
_TUNED_BLOCKS = {512: 5, 768: 4, 1024: 3, 2048: 5, 4096: 3, 8192: 2}
_GENERAL_BLOCKS = {128: 12, 512: 4, 1024: 3, 2048: 5, 4096: 3}
# (tuned, size, dtype) -> blocks, where they differ from the tables above.
_BLOCKS_OF_DTYPE = {
    (True, 512, torch.bfloat16): 6,
    (False, 512, torch.float32): 5,
    (False, 2048, torch.float32): 4,
}


class Kernel(NamedTuple):
    """The kernel of a [rows, cols] problem: its size, and how it spreads a row."""

    tuned: bool
    size: int  # the columns that it is compiled for
    warps: int  # per row and block
    blocks: int  # per row
    width: int  # consecutive elements of a lane
    dtype: torch.dtype

    @classmethod
    def of(cls, stage: str, x: Tensor) -> Kernel:
        """Return the kernel for x [rows, cols]; `stage` is "forward" or "backward"."""
        rows, cols = x.shape
        tuned = rows % row_multiple(cols) == 0 and cols in TUNED
        if tuned:
            size = cols
        else:
            sizes = _GENERAL[stage]
            size = next((s for s in sizes if s >= cols), sizes[-1])
        return cls(
            tuned=tuned,
            size=size,
            warps=1 if size <= _ONE_WARP[stage] else 4,
            blocks=-(-cols // size),
            # Loads of 16 bytes; of 8 for 16-bit numbers in the kernel of 128.
            width=4 if x.dtype == torch.float32 or size == 128 else 8,
            dtype=x.dtype,
        )

    @property
    def rows(self) -> int:
        """Rows that a block works on at a time."""
        return 4 // self.warps

    @property
    def lanes(self) -> int:
        """Lanes that share a row, over its warps and blocks."""
        return self.warps * self.blocks * LANES

    def spread(self, t: Tensor) -> list[Tensor]:
        """Return t [T, H] as the sequence of [T, lanes] that the lanes see, as views; narrower where the row ends."""
        steps: list[Tensor] = []
        for step in t.split(self.lanes * self.width, dim=1):
            if step.shape[1] % self.width:
                step = pad(step, (0, -step.shape[1] % self.width))
            steps += step.view(len(step), step.shape[1] // self.width, self.width).unbind(-1)
        return steps

    def row_sum(self, lanes: Tensor) -> Tensor:
        """Return the sums over rows [T, 1] of what the lanes [T, lanes] hold."""
        lanes = lanes.view(lanes.shape[0], self.warps, self.blocks, LANES)  # [T, W, B, 32]
        if self.warps * self.blocks == 1:
            return tree(lanes)[:, 0, 0]
        # Lanes of each warp first, then warps, then blocks.
        warps = _halving_tree(lanes)[..., 0]  # [T, W, B]
        blocks = sequence(warps.unbind(1))  # [T, B]
        # One warp adds the sums of the blocks.
        return tree(pad(blocks, (0, -blocks.shape[-1] % LANES)))

    def grid_rows(self, rows: int, device: torch.device) -> int:
        """Return the number of rows that the whole grid of the backward kernel works on at a time."""
        if device.type == "cuda":
            multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        else:
            multiprocessors = _H200_MULTIPROCESSORS
        table = _TUNED_BLOCKS if self.tuned else _GENERAL_BLOCKS
        key = (self.tuned, self.size, self.dtype)
        blocks_each = _BLOCKS_OF_DTYPE.get(key, table[self.size])
        grid = multiprocessors * blocks_each // self.blocks
        if not self.tuned:
            # The general kernels launch no block without rows.
            grid = min(grid, -(-rows // self.rows))
        return self.rows * grid


def row_multiple(cols: int) -> int:
    """Return the number whose multiples of rows have one kernel, and other rows another."""
    return _TUNED_ROWS if cols in TUNED else 1


def reciprocal_rms(x: Tensor, wide: Tensor, eps: float) -> Tensor:
    """Return `rsqrt(mean(x^2) + eps)` of x [T, H] as FP32 [T, 1]; `wide` is x in FP32.

    The rsqrt is the device's: a GPU's approximation and a CPU's differ in the last bit of one in five numbers. A graph
    for other programs (torch.export) adds in their order, for any number of rows.
    """
    if torch.compiler.is_exporting():
        return torch.rsqrt(wide.square().mean(dim=1, keepdim=True) + eps)
    kernel = Kernel.of("forward", x)
    cols = x.shape[1]
    if not kernel.tuned:
        if _is_few(kernel, x):
            return torch.rsqrt(fma(_squares_of_few_rows(kernel, wide), *_on_host(1.0 / cols, eps)))
        return torch.rsqrt(
            fma(
                kernel.row_sum(dot(kernel, wide, wide)),
                reciprocal(cols, x),
                wide.new_full((), eps),
            )
        )
    # A tuned kernel: the mean and the centered squares of each warp, merged below as variances are.
    per_warp = cols // kernel.warps
    by_warp = (x.shape[0], kernel.warps, LANES)
    # [T, warps, 1]
    mean = tree(sequence(kernel.spread(wide)).view(by_warp)) * reciprocal(per_warp, x)
    # A row as [loads, warps, numbers that a warp loads at once], so that each warp's mean meets its own numbers.
    columns = (
        x.shape[0],
        cols // (kernel.lanes * kernel.width),
        kernel.warps,
        LANES * kernel.width,
    )
    centered = (wide.view(columns) - mean[:, None]).view_as(wide)
    squares = tree(dot(kernel, centered, centered).view(by_warp))
    mean = mean[..., 0]  # [T, warps]
    squares = squares[..., 0]
    count = per_warp
    while mean.shape[1] > 1:
        mean, squares, count = _merge(mean, squares, count)
    return torch.rsqrt(fma(mean, mean, squares * reciprocal(cols, x)) + eps)


def input_gradient(dy: Tensor, gamma: Tensor, x: Tensor, y_hat: Tensor, r: Tensor) -> Tensor:
    """Return `r * (g dy - y_hat * mean(g dy y_hat))` in FP32 [T, H]; all arguments in FP32, but x, for its dtype."""
    kernel = Kernel.of("backward", x)
    scaled = dy * gamma
    mean = kernel.row_sum(dot(kernel, scaled, y_hat)) * reciprocal(x.shape[1], x)
    return _add_product(scaled, -mean, y_hat).mul_(r)


def weight_gradient(dy: Tensor, x: Tensor, y_hat: Tensor) -> Tensor:
    """Return `sum(dy * y_hat)` over rows as FP32 [H]; dy and y_hat in FP32 [T, H], x for its dtype."""
    kernel = Kernel.of("backward", x)
    rows, cols = x.shape
    grid = kernel.grid_rows(rows, x.device)
    # [grid rows, H]: partial sums of each row of the grid, which steps over the matrix. Blocks without rows add zeros,
    # and are left out.
    sums = dy.new_zeros(min(grid, rows + -rows % kernel.rows), cols)
    for start in range(0, rows, max(1, grid)):
        part = slice(start, start + grid)
        _add_product(sums[: min(grid, rows - start)], dy[part], y_hat[part])
    sums = _block_sums(kernel, sums.view(len(sums) // kernel.rows, kernel.rows, cols))
    if kernel.tuned:
        return tree(_strided_sum(sums, LANES).t())[:, 0]
    return _halving_tree(_strided_sum(sums, 4).t())[:, 0]


def _block_sums(kernel: Kernel, sums: Tensor) -> Tensor:
    """Add [blocks, rows, H] over the rows of each block in sequence, a general kernel from the column's writer on."""
    if kernel.tuned or kernel.rows == 1:
        return sequence(sums.unbind(1))
    parts = []
    for step, columns in enumerate(sums.split(LANES * kernel.width, dim=-1)):
        warps = list(columns.unbind(1))
        # The warp that writes a column begins with its own sum, and adds the others in order.
        parts.append(sequence([warps.pop(step % kernel.rows), *warps]))
    return torch.cat(parts, dim=-1)


def _strided_sum(t: Tensor, stride: int) -> Tensor:
    """Add rows i, i + stride, ... of [N, H] in sequence: [stride, H]."""
    sums = t.new_zeros(stride, t.shape[1])
    for part in t.split(stride):
        sums[: len(part)] += part
    return sums


def dot(kernel: Kernel, a: Tensor, b: Tensor) -> Tensor:
    """Return the sums of products that the lanes [T, lanes] hold, added one after the other with FMAs."""
    sums = a.new_zeros(a.shape[0], kernel.lanes)
    terms = kernel.spread(a)
    others = terms if b is a else kernel.spread(b)
    part = sums
    for p, q in zip(terms, others, strict=True):
        # The row ends before the last lanes; slicing costs time, so only there.
        if part.shape[1] != p.shape[1]:
            part = sums[:, : p.shape[1]]
        _add_product(part, p, q)
    return sums


def _is_few(kernel: Kernel, x: Tensor) -> bool:
    """Return whether the calls of torch would cost more than the numbers: in a step of generation on a CPU."""
    one_warp = kernel.warps * kernel.blocks == 1
    return one_warp and x.numel() <= _FEW and x.dtype != torch.float32 and on_host(x)


def _squares_of_few_rows(kernel: Kernel, wide: Tensor) -> Tensor:
    """Return the sums of squares [T, 1] in the order of a kernel with one warp per row, by NumPy.

    Squares of BF16 and FP16 numbers are FP32 numbers, so that adding them rounds as an FMA does. (Some below 2^-126 are
    not; eps hides them.)
    """
    rows, cols = wide.shape
    squares = np.zeros((rows, -(-cols // (LANES * kernel.width)), LANES, kernel.width), np.float32)
    with np.errstate(over="ignore"):  # infinite, as on a GPU
        np.square(wide.numpy(), out=squares.reshape(rows, -1)[:, :cols])
    # [steps of a lane, T, lanes]
    steps = np.ascontiguousarray(squares.transpose(1, 3, 0, 2)).reshape(-1, rows, LANES)
    sums = np.add.reduce(steps)  # one after the other: NumPy adds in pairs along the last axis only
    while sums.shape[-1] > 1:
        sums = sums[:, ::2] + sums[:, 1::2]
    return torch.from_numpy(sums)


@functools.lru_cache(maxsize=64)
def _on_host(*numbers: float) -> list[Tensor]:
    """Return each number as an FP32 scalar."""
    with torch.inference_mode(False):
        return [torch.tensor(number, dtype=torch.float32) for number in numbers]


def sequence(terms: Iterable[Tensor]) -> Tensor:
    """Return the sum of FP32 terms, one after the other."""
    terms = iter(terms)
    total = next(terms)
    for term in terms:
        total = total + term
    return total


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return a * b + c in FP32, rounded once (without fused units: but for ties made by the FP64 sum, one in 2^29)."""
    if _fuses(c.device):
        return torch.addcmul(c, a, b)
    return torch.addcmul(c.double(), a.double(), b.double()).float()


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Add a * b to `total` in place, rounded as fma does, and return it."""
    return total.addcmul_(a, b) if _fuses(total.device) else total.copy_(fma(a, b, total))


@once
def _fuses(device: torch.device) -> bool:
    """Return whether torch.addcmul rounds once here, as where it is compiled to FMA instructions (AVX2, GPUs)."""
    a = torch.linspace(1.0, 1.9, 4099, device=device)
    b = torch.linspace(1.0, 1.7, 4099, device=device)
    # Contiguous numbers, strided ones and an outer product: PyTorch has a loop of its own for each.
    for p, q in ((a, b), (a[::2], b[::2]), (a[:, None], b[:8])):
        # The rounding error of p * q, which is zero if the product is rounded before it is added.
        error = torch.addcmul(-(p * q), p, q)
        exact = (p.double() * q.double() - (p * q).double()).float()
        if not torch.equal(error, exact):
            return False
    return True


_fuses(torch.device("cpu"))  # now: torch.export from cold has no numbers to measure


def tree(lanes: Tensor) -> Tensor:
    """Add the last dimension in pairs of neighbors, as a butterfly of shuffles does."""
    while lanes.shape[-1] > 1:
        even, odd = lanes.unflatten(-1, (-1, 2)).unbind(-1)
        lanes = even + odd
    return lanes


def _halving_tree(lanes: Tensor) -> Tensor:
    """Add the lower and the upper half of the last dimension, as shuffles down do."""
    while lanes.shape[-1] > 1:
        lower, upper = lanes.chunk(2, dim=-1)
        lanes = lower + upper
    return lanes


def _merge(mean: Tensor, squares: Tensor, count: int) -> tuple[Tensor, Tensor, int]:
    """Merge means and centered squares of the lower half of the warps with the upper half's (Chan's update).

    The counts are powers of two, so that scaling by them does not round.
    """
    mean_a, mean_b = mean.chunk(2, dim=1)
    squares_a, squares_b = squares.chunk(2, dim=1)
    delta = mean_a - mean_b
    return (mean_a + mean_b) * 0.5, squares_a + squares_b + delta * delta * (count / 2), 2 * count


def reciprocal(count: int, like: Tensor) -> Tensor:
    """Return 1 / count in FP32."""
    return torch.full((), 1.0 / count, dtype=torch.float32, device=like.device)
