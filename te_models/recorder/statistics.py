"""The counts of one cast, in plain PyTorch: from the values before it and the quantized data after it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from te_models.numerics import casts
from te_models.numerics.code_weights import BLOCK_MIX, COLUMN_MIX, ROW_WEIGHTS
from te_models.numerics.formats import DType
from te_models.recorder.layout import FIELDS, INDEX

# Transformer Engine's numbers of the formats.
E4M3 = 7
E5M2 = 8
E2M1 = 10
TILE = 1 << 20  # elements that are counted at a time
# A count that could not be made, since the values before the cast were not in memory. Sums with a NaN stay unknown.
UNKNOWN = math.nan


@dataclass(frozen=True)
class FormatLimits:
    """The limits of a format's numbers.

    Attributes:
        largest: its largest finite number.
        beyond: halfway from `largest` to where the next number would be: larger values are clipped, not rounded.
        normal: its smallest normal number.
    """

    largest: float
    beyond: float
    normal: float


LIMITS = {
    E4M3: FormatLimits(largest=448.0, beyond=464.0, normal=2.0**-6),
    E5M2: FormatLimits(largest=57344.0, beyond=61440.0, normal=2.0**-14),
    E2M1: FormatLimits(largest=6.0, beyond=7.0, normal=1.0),
}


@dataclass(frozen=True)
class Cast:
    """The rowwise copy of a quantized tensor.

    Attributes:
        codes: the quantized data, uint8 [M, K]; FP4 also has one element per byte here.
        inverse: inverse scales, FP32 [ceil(M / block[0]), ceil(K / block[1])]: value = number of the code * inverse.
        block: rows and columns that share a scale; (M, K) where the tensor has one.
        format: Transformer Engine's number of the format.
        scale: the scale of the tensor where it was given, FP32 [1]; None: it follows from `inverse`.
    """

    codes: Tensor
    inverse: Tensor
    block: tuple[int, int]
    format: int
    scale: Tensor | None = None


@torch.no_grad()
def count_cast(source: Tensor | None, cast: Cast) -> tuple[Tensor, Tensor]:
    """Return the fields of a cast, float64 [fields], and the hash of its codes, int64 [].

    Args:
        source: the values before the cast, [M, K] of any float dtype; None: they are not in memory.
        cast: the result.
    """
    rows, columns = cast.codes.shape
    counts = torch.zeros(len(FIELDS), dtype=torch.float64, device=cast.codes.device)
    codes = torch.zeros((), dtype=torch.int64, device=cast.codes.device)
    # fill_, since an assignment copies a number from the host, which a CUDA graph does not allow.
    counts[INDEX["elements"]].fill_(rows * columns)
    counts[INDEX["format"]].fill_(cast.format)
    counts[INDEX["scale_age"]].fill_(-1.0)  # Table.set_scale_ages sets it, and larger values win
    if not rows * columns:
        counts[INDEX["scale_min"]].fill_(math.inf)
        return counts, codes
    occupied = []  # whether each block has a value other than 0, by rows of blocks
    # Whole blocks, and whole groups of the four rows that the hash takes together.
    for part in row_tiles(rows, columns, math.lcm(cast.block[0], 4)):
        values = decode(cast.codes[part], cast.format)
        inverse = _spread(cast.inverse, cast.block, part, columns)
        tile_source = None if source is None else source[part]
        _count_tile(counts, tile_source, values, inverse, LIMITS[cast.format])
        codes += hash_codes(cast.codes[part], first_row=part.start)
        occupied.append(block_largest(values.abs(), cast.block) > 0)
    if source is None:
        for name in ("zeros", "flushed", "signal", "noise"):
            counts[INDEX[name]].fill_(UNKNOWN)
    _count_scales(counts, cast, torch.cat(occupied))
    return counts, codes


def decode(codes: Tensor, format: int) -> Tensor:
    """Return the numbers that codes stand for before scaling, FP32, from uint8 of the same shape."""
    if format != E2M1:
        return casts.decode_fp8(codes, DType.cast(format))
    # Sign, two bits of exponent, one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6.
    exponent = (codes >> 1 & 3).float()
    half = (codes & 1) * 0.5
    magnitudes = torch.where(exponent > 0, (1 + half) * torch.exp2(exponent - 1), half)
    return torch.where(codes > 7, -magnitudes, magnitudes)


def row_tiles(rows: int, columns: int, multiple: int) -> Iterator[slice]:
    """Yield slices of about TILE elements, of whole blocks of `multiple` rows."""
    step = max(1, TILE // max(1, columns * multiple)) * multiple
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def hash_codes(codes: Tensor, first_row: int = 0) -> Tensor:
    """Return the hash of codes, uint8 [M, K], an int64 scalar; hashes of all parts of a tensor add up to its own.

    `first_row` is the number of the first row in the whole tensor, a multiple of 4. te_models.numerics.code_weights
    describes the hash.
    """
    rows, columns = codes.shape
    padded = F.pad(codes, (0, -columns % 64, 0, -rows % 4))
    # Blocks of 4 rows and 64 columns: [rows / 4, 4, columns / 64, 64].
    blocks = padded.reshape(-1, 4, padded.shape[1] // 64, 64).float()
    device = codes.device
    block_row = torch.arange(first_row // 4, first_row // 4 + len(blocks), device=device)[:, None]
    block_column = torch.arange(blocks.shape[2], device=device)
    total = torch.zeros((), dtype=torch.int64, device=device)
    for row_word, mix, (down, across, added) in zip(
        ROW_WEIGHTS, COLUMN_MIX, BLOCK_MIX, strict=True
    ):
        # Weights are computed on the device: a CUDA graph cannot copy constants from the host.
        row_weights = row_word >> 8 * torch.arange(4, device=device) & 0xFF  # [4]
        column_weights = (torch.arange(1, 65, device=device) * mix & 0xFFFFFFFF) >> 24 | 1  # [64]
        # FP32 holds these sums exactly: they are below 2^22.
        sums = (blocks @ column_weights.float()).to(torch.int64)  # [rows / 4, 4, columns / 64]
        sums = (sums * row_weights[:, None]).sum(1)  # [rows / 4, columns / 64]
        word = (block_row * down + block_column * across + added) & 0xFFFFFFFF
        total += (sums * (word ^ word >> 16)).sum()
    return total


def block_largest(magnitudes: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the largest of each block of [M, K], NaN as 0: [ceil(M / block[0]), ceil(K / block[1])]."""
    rows, columns = magnitudes.shape
    height = min(block[0], rows)
    width = min(block[1], columns)
    padded = F.pad(magnitudes.nan_to_num(nan=0.0), (0, -columns % width, 0, -rows % height))
    return padded.reshape(-(-rows // height), height, -(-columns // width), width).amax((1, 3))


def _spread(inverse: Tensor, block: tuple[int, int], part: slice, columns: int) -> Tensor:
    """Return the inverse scale of each element of the rows `part`: [rows, columns], or [1, 1] for a single scale."""
    if inverse.numel() == 1:
        return inverse.reshape(1, 1)
    row_scales = inverse[part.start // block[0] : -(-part.stop // block[0])]
    row_scales = row_scales.repeat_interleave(block[0], 0)[: part.stop - part.start]
    return row_scales.repeat_interleave(block[1], 1)[:, :columns]


def _count_tile(
    counts: Tensor, source: Tensor | None, values: Tensor, inverse: Tensor, limits: FormatLimits
) -> None:
    """Add the counts of some rows, except about scales.

    Args:
        counts: float64 [fields], changed.
        source: the values before the cast [rows, K]; None: they are not in memory.
        values: the numbers of the codes before scaling, FP32 [rows, K].
        inverse: their inverse scales, of that shape or [1, 1].
        limits: of the format.
    """
    magnitude = values.abs()
    after = values * inverse
    before = after if source is None else source.float()
    finite = before.isfinite() & values.isfinite()
    at_largest = magnitude == limits.largest
    clipped = at_largest
    if source is not None:
        clipped = at_largest & (before.abs() > limits.beyond * inverse) & (inverse > 0) & finite
        exact = torch.where(finite, source, 0).double()
        change = torch.where(finite, source.double() - after.double(), 0)
        counts[INDEX["zeros"]] += (source == 0).sum()
        counts[INDEX["flushed"]] += ((source != 0) & (after == 0) & finite).sum()
        counts[INDEX["signal"]] += exact.square().sum()
        counts[INDEX["noise"]] += change.square().sum()
    counts[INDEX["saturated"]] += clipped.sum()
    counts[INDEX["subnormal"]] += ((values != 0) & (magnitude < limits.normal)).sum()
    counts[INDEX["nonfinite"]] += (~finite).sum()
    largest = before.abs().nan_to_num(nan=0.0, posinf=math.inf).amax().double()
    counts[INDEX["amax"]] = torch.maximum(counts[INDEX["amax"]], largest)


def _count_scales(counts: Tensor, cast: Cast, occupied: Tensor) -> None:
    """Set the fields about scales, without blocks that hold only zeros, whose scale says nothing.

    `occupied` is bool [blocks of rows, blocks of columns]: whether a block has another value.
    """
    scales = cast.inverse.reciprocal() if cast.scale is None else cast.scale.reshape(1, 1)
    if scales.numel() == 1:
        occupied = torch.ones_like(occupied)
    scales = scales.double()
    occupied = occupied & scales.isfinite()  # a block's scale may itself be flushed to zero
    logarithms = torch.where(occupied, scales, 1.0).log2()
    smallest = torch.where(occupied, scales, math.inf).amin()
    largest = torch.where(occupied, scales, 0.0).amax()
    counts[INDEX["scale_min"]] = smallest
    counts[INDEX["scale_max"]] = largest
    counts[INDEX["blocks"]] = occupied.sum()
    counts[INDEX["block_log2"]] = logarithms.sum()
    counts[INDEX["block_log2_squares"]] = logarithms.square().sum()
