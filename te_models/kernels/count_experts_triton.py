"""Counts about the FP8 of all experts at once, each expert's added to rows of its own in the table on the device.

A program counts a share of one expert's rows, with the functions of te_models.kernels.count_cast_triton. Values before
the cast are read as the cast read them: through the places of weights, or the tokens whose copies the rows are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_models.kernels.count_cast_triton import (
    _BITS,
    _BLOCK_LOG2,
    _BLOCK_LOG2_SQUARES,
    _BLOCKS,
    _INF,
    _SCALE_MAX,
    _SCALE_MIN,
    _WIDTH,
    COLUMNS,
    ROWS,
    SQUARE,
    _add,
    _add_counts,
    _count,
    _lower,
    _note_tensor,
    _raise,
    _row_scales,
    code_weights,
)
from te_models.kernels.expert_blocks_triton import Blocks, WeightBlocks
from te_models.kernels.expert_cast_triton import FP8Matrices, Matrices, load_rows
from te_models.kernels.groups import Groups

PROGRAMS = 528  # of all experts together: four per multiprocessor of an H100


class ExpertCounts(NamedTuple):
    """Where the counts of one operand of every expert go.

    Attributes:
        fields: float64 [>= (E - 1) * apart + 1, spread, fields]: expert e's row is e * apart.
        codes: int64 [>= (E - 1) * apart + 1], the hashes.
        apart: rows from one expert to the next.
    """

    fields: Tensor
    codes: Tensor
    apart: int


@triton.jit
def count_experts_kernel(
    # the values before the cast, as expert_cast_triton.Matrices
    data,
    source,
    factor,
    tokens,
    places,
    # where each expert begins, int64 [E + 1]
    first,
    # the cast: uint8 [R, columns], and inverse scales and scales, FP32 [E]
    cast_codes,
    scales_inverse,
    scales,
    # ExpertCounts
    fields,
    codes,
    columns,
    spread,
    apart,
    E5M2: tl.constexpr,
    VALUES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Count expert program_id(0)'s matrix; its programs share its tiles. Without VALUES, the data alone."""
    e = tl.program_id(0).to(tl.int64)
    begin = tl.load(first + e)
    rows = tl.load(first + e + 1) - begin
    # An expert without rows casts nothing, and its fields keep what they have.
    if rows > 0:
        program_fields = fields + (e * apart * spread + tl.program_id(1) % spread) * _WIDTH
        address = data
        if VALUES:
            if places is not None:
                address = data + tl.load(places + e)
            elif source is None:
                address = data + begin * columns
            if source is not None:
                source += begin
            if factor is not None:
                factor += begin
        inverse = tl.load(scales_inverse + e)
        wide = tl.cdiv(columns, COLUMNS)
        zeros = tl.zeros((), tl.int64)
        saturated = tl.zeros((), tl.int64)
        flushed = tl.zeros((), tl.int64)
        subnormal = tl.zeros((), tl.int64)
        wrong = tl.zeros((), tl.int64)
        hashed = tl.zeros((), tl.int64)
        signal = tl.zeros((), tl.float64)
        noise = tl.zeros((), tl.float64)
        largest = tl.zeros((), tl.float32)
        units = tl.cdiv(rows, ROWS) * wide
        for unit in range(tl.program_id(1), units, tl.num_programs(1)):
            i = (unit // wide).to(tl.int64) * ROWS + tl.arange(0, ROWS)
            j = (unit % wide).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
            inside = (i < rows)[:, None] & (j < columns)[None, :]
            code = tl.load(cast_codes + (begin + i)[:, None] * columns + j[None, :], inside, 0)
            if VALUES:
                x = load_rows(address, source, factor, tokens, i, j, rows, columns)
            else:
                x = tl.zeros((ROWS, COLUMNS), tl.float32)
            packed, exact, change, codes_of, magnitude = _count(
                x, code, inverse, inside, code_weights(i, j), E5M2, VALUES
            )
            counts = tl.sum(tl.sum(packed, 1), 0)
            zeros += counts & _BITS
            saturated += (counts >> 12) & _BITS
            flushed += (counts >> 24) & _BITS
            subnormal += (counts >> 36) & _BITS
            wrong += (counts >> 48) & _BITS
            hashed += tl.sum(tl.sum(codes_of, 1), 0)
            signal += tl.sum(tl.sum(exact, 1), 0)
            noise += tl.sum(tl.sum(change, 1), 0)
            largest = tl.maximum(largest, tl.max(tl.max(magnitude, 1), 0))
        _add_counts(
            fields=program_fields,
            codes=codes + e * apart,
            zeros=zeros,
            saturated=saturated,
            flushed=flushed,
            subnormal=subnormal,
            wrong=wrong,
            signal=signal,
            noise=noise,
            hashed=hashed,
            largest=largest,
            SOURCE=VALUES,
        )
        if tl.program_id(1) == 0:
            elements = tl.full((), 1.0, tl.float64) * rows * columns
            _note_tensor(program_fields, elements, tl.load(scales + e), E5M2, VALUES, False)


@triton.jit
def count_expert_blocks_kernel(
    # the values before the cast, as expert_cast_triton.Matrices
    data,
    source,
    factor,
    tokens,
    places,
    # where each expert begins, int64 [E + 1]
    first,
    # the cast: uint8 [R, columns], and inverse scales FP32
    cast_codes,
    scales_inverse,
    # from one expert's inverse scales to the next one's, and between blocks of an expert
    inverse_expert,
    inverse_row,
    inverse_column,
    # ExpertCounts
    fields,
    codes,
    columns,
    spread,
    apart,
    VALUES: tl.constexpr,
    # rows and columns that share a scale, and the unit that a program reads at a time
    BLOCK_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEIGHT: tl.constexpr,
):
    """Count expert program_id(0)'s matrix of E4M3 with a scale per block of BLOCK_ROWS rows and COLUMNS columns.

    Its programs share its units of HEIGHT rows: BLOCK_ROWS is 1, or HEIGHT. Without VALUES, the data alone.
    """
    e = tl.program_id(0).to(tl.int64)
    begin = tl.load(first + e)
    rows = tl.load(first + e + 1) - begin
    # An expert without rows casts nothing, and its fields keep what they have.
    if rows > 0:
        program_fields = fields + (e * apart * spread + tl.program_id(1) % spread) * _WIDTH
        address = data
        if VALUES:
            if places is not None:
                address = data + tl.load(places + e)
            elif source is None:
                address = data + begin * columns
            if source is not None:
                source += begin
            if factor is not None:
                factor += begin
        inverse = scales_inverse + e * inverse_expert
        if BLOCK_ROWS == 1:
            inverse += begin * inverse_row
        wide = tl.cdiv(columns, COLUMNS)
        zeros = tl.zeros((), tl.int64)
        saturated = tl.zeros((), tl.int64)
        flushed = tl.zeros((), tl.int64)
        subnormal = tl.zeros((), tl.int64)
        wrong = tl.zeros((), tl.int64)
        hashed = tl.zeros((), tl.int64)
        signal = tl.zeros((), tl.float64)
        noise = tl.zeros((), tl.float64)
        largest = tl.zeros((), tl.float32)
        lowest = tl.full((), _INF, tl.float32)
        highest = tl.zeros((), tl.float32)
        blocks = tl.zeros((), tl.int64)
        logarithms = tl.zeros((), tl.float64)
        squares = tl.zeros((), tl.float64)
        units = tl.cdiv(rows, HEIGHT) * wide
        for unit in range(tl.program_id(1), units, tl.num_programs(1)):
            across = (unit % wide).to(tl.int64)
            j = across * COLUMNS + tl.arange(0, COLUMNS)
            in_block = tl.zeros((), tl.float32)  # the largest code of a square block
            for start in range(0, HEIGHT, ROWS):
                i = (unit // wide).to(tl.int64) * HEIGHT + start + tl.arange(0, ROWS)
                inside = (i < rows)[:, None] & (j < columns)[None, :]
                code = tl.load(cast_codes + (begin + i)[:, None] * columns + j[None, :], inside, 0)
                if VALUES:
                    x = load_rows(address, source, factor, tokens, i, j, rows, columns)
                else:
                    x = tl.zeros((ROWS, COLUMNS), tl.float32)
                scales = inverse + (i // BLOCK_ROWS) * inverse_row + across * inverse_column
                by = tl.load(scales, i < rows, 0.0)
                packed, exact, change, codes_of, magnitude = _count(
                    x, code, by[:, None], inside, code_weights(i, j), False, VALUES
                )
                counts = tl.sum(tl.sum(packed, 1), 0)
                zeros += counts & _BITS
                saturated += (counts >> 12) & _BITS
                flushed += (counts >> 24) & _BITS
                subnormal += (counts >> 36) & _BITS
                wrong += (counts >> 48) & _BITS
                hashed += tl.sum(tl.sum(codes_of, 1), 0)
                signal += tl.sum(tl.sum(exact, 1), 0)
                noise += tl.sum(tl.sum(change, 1), 0)
                largest = tl.maximum(largest, tl.max(tl.max(magnitude, 1), 0))
                # Codes without their sign are ordered as magnitudes are; only 0 matters here.
                size = tl.where(inside, (code & 0x7F).to(tl.float32), 0.0)
                if BLOCK_ROWS > 1:
                    in_block = tl.maximum(in_block, tl.max(tl.max(size, 1), 0))
                else:
                    number, total, total_squares, low, high = _row_scales(
                        scales[:, None], tl.reshape(size, (ROWS, 1, COLUMNS))
                    )
                    blocks += number
                    logarithms += total
                    squares += total_squares
                    lowest = tl.minimum(lowest, low)
                    highest = tl.maximum(highest, high)
            # A square block is as high as the unit, so its scale is counted once its rows have been read.
            if BLOCK_ROWS > 1:
                square = tl.load(inverse + unit // wide * inverse_row + across * inverse_column)
                if (in_block > 0) & (square > 0):
                    block_scale = tl.div_rn(tl.full((), 1.0, tl.float32), square)
                    logarithm = tl.log2(block_scale).to(tl.float64)
                    blocks += 1
                    logarithms += logarithm
                    squares += logarithm * logarithm
                    lowest = tl.minimum(lowest, block_scale)
                    highest = tl.maximum(highest, block_scale)
        _add_counts(
            fields=program_fields,
            codes=codes + e * apart,
            zeros=zeros,
            saturated=saturated,
            flushed=flushed,
            subnormal=subnormal,
            wrong=wrong,
            signal=signal,
            noise=noise,
            hashed=hashed,
            largest=largest,
            SOURCE=VALUES,
        )
        _lower(program_fields, _SCALE_MIN, lowest)
        _raise(program_fields, _SCALE_MAX, highest)
        _add(program_fields, _BLOCKS, blocks)
        _add(program_fields, _BLOCK_LOG2, logarithms)
        _add(program_fields, _BLOCK_LOG2_SQUARES, squares)
        if tl.program_id(1) == 0:
            elements = tl.full((), 1.0, tl.float64) * rows * columns
            _note_tensor(program_fields, elements, 1.0, False, VALUES, True)


def count_experts(
    matrices: Matrices | None,
    groups: Groups,
    quantized: FP8Matrices,
    form: torch.dtype,
    counts: ExpertCounts,
) -> None:
    """Add the counts of a cast of every expert's matrix to a table.

    Args:
        matrices: the matrices before the cast; None: they are not in memory.
        groups: the rows of each.
        quantized: the result.
        form: torch.float8_e4m3fn or float8_e5m2.
        counts: where they go.
    """
    columns = quantized.data.shape[1]
    with torch.cuda.device_of(quantized.data):
        count_experts_kernel[_grid(groups, columns, ROWS)](
            **_values(matrices, quantized.data),
            first=groups.first,
            cast_codes=quantized.data,
            scales_inverse=quantized.scale_inv,
            scales=quantized.scale,
            fields=counts.fields,
            codes=counts.codes,
            columns=columns,
            spread=counts.fields.shape[1],
            apart=counts.apart,
            E5M2=form == torch.float8_e5m2,
            VALUES=matrices is not None,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            num_warps=4,
        )


def count_expert_blocks(
    matrices: Matrices | None,
    groups: Groups,
    quantized: Blocks | WeightBlocks,
    counts: ExpertCounts,
) -> None:
    """Add the counts of a cast of every expert's matrix to E4M3 with a scale per block to a table.

    Args:
        matrices: the matrices before the cast; None: they are not in memory.
        groups: the rows of each.
        quantized: the result, whose straight copy is counted: rows with a scale per 1 x 128, or weights per 128 x 128.
        counts: where they go.
    """
    data = quantized.data
    inverse = quantized.scale_inv
    assert data is not None and inverse is not None
    columns = data.shape[1]
    if isinstance(quantized, WeightBlocks):
        block_rows = height = SQUARE
        inverse_expert, inverse_row, inverse_column = inverse.stride()
    else:
        block_rows = 1
        height = ROWS
        inverse_expert = 0  # the scales of rows lie where the rows do
        inverse_column, inverse_row = inverse.stride()
    with torch.cuda.device_of(data):
        count_expert_blocks_kernel[_grid(groups, columns, height)](
            **_values(matrices, data),
            first=groups.first,
            cast_codes=data,
            scales_inverse=inverse,
            inverse_expert=inverse_expert,
            inverse_row=inverse_row,
            inverse_column=inverse_column,
            fields=counts.fields,
            codes=counts.codes,
            columns=columns,
            spread=counts.fields.shape[1],
            apart=counts.apart,
            VALUES=matrices is not None,
            BLOCK_ROWS=block_rows,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            HEIGHT=height,
            num_warps=4,
        )


def _values(matrices: Matrices | None, codes: Tensor) -> dict[str, Any]:
    """Return the arguments of a kernel for the values before a cast; without them it reads none."""
    if matrices is None:
        return dict(data=codes, source=None, factor=None, tokens=0, places=None)
    return dict(
        data=matrices.data,
        source=matrices.source,
        factor=matrices.factor,
        tokens=len(matrices.data),
        places=matrices.places,
    )


def _grid(groups: Groups, columns: int, height: int) -> tuple[int, int]:
    """Return the experts, and the programs of each, which go through units of `height` rows."""
    units = triton.cdiv(max(groups.most, 1), height) * triton.cdiv(columns, COLUMNS)
    return groups.experts, max(1, min(units, PROGRAMS) // groups.experts)
