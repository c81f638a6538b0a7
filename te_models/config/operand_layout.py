"""The bytes of a quantized operand of a GEMM in each of Transformer Engine's layouts: its data and its padded scales.

A layout describes a rowwise copy [rows, columns]. A columnwise copy is the rowwise copy of the transposed matrix.
te_models/numerics/tensors.py has the tensors themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

FP32 = 4


def round_up(size: int, step: int) -> int:
    """Return the smallest multiple of `step` that is at least `size`."""
    return -(-size // step) * step


@dataclass(frozen=True)
class OperandLayout:
    """The memory of a quantized matrix.

    Attributes:
        copy_bytes: (rows, columns, square) -> bytes of a rowwise copy; `square` says whether its blocks are, where a
            recipe has the choice.
        shared_bytes: bytes that exist once, whether one copy is kept or both.
    """

    copy_bytes: Callable[[int, int, bool], int]
    shared_bytes: int = 0


def _fp8_data(rows: int, columns: int, square: bool) -> int:
    return rows * columns


def _fp8_blocks(rows: int, columns: int, square: bool) -> int:
    """Return the bytes with an FP32 scale per 128 x 128 values, or per 128 values of a row."""
    across = round_up(columns, 128) // 128
    if square:
        down = round_up(rows, 128) // 128
        return rows * columns + FP32 * down * round_up(across, 4)
    return rows * columns + FP32 * across * round_up(rows, 4)


def _mxfp8(rows: int, columns: int, square: bool) -> int:
    """Return the bytes with an E8M0 scale per 32 values of a row; square blocks repeat theirs for every row."""
    return rows * columns + round_up(rows, 128) * round_up(columns // 32, 4)


def _nvfp4(rows: int, columns: int, square: bool) -> int:
    """Return the bytes of half a byte per value, an E4M3 scale per 16 values of a row, and the amax of the copy."""
    return rows * columns // 2 + round_up(rows, 128) * round_up(columns // 16, 4) + FP32


PER_TENSOR = OperandLayout(_fp8_data, shared_bytes=FP32)
BLOCKS_OF_128 = OperandLayout(_fp8_blocks)
MXFP8 = OperandLayout(_mxfp8)
NVFP4 = OperandLayout(_nvfp4)
