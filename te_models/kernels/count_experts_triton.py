"""Counts about the FP8 of all experts at once, each expert's added to rows of its own in the table on the device.

A program counts a share of one expert's rows, with the functions of te_models.kernels.count_cast_triton. Values before
the cast are read as the cast read them: through the places of weights, or the tokens whose copies the rows are. Those
that a kernel computed and cast at once, an activation and its gradient, are computed once more by its own functions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_models.kernels.count_cast_triton import (
    _WIDTH,
    COLUMNS,
    ROWS,
    SQUARE,
    _note_tensor,
    add_scale_sums,
    add_sums,
    code_weights,
    count_row_scales,
    count_square_scale,
    count_tile,
    new_scale_sums,
    new_sums,
)
from te_models.kernels.expert_blocks_triton import Blocks, WeightBlocks
from te_models.kernels.expert_cast_triton import FP8Matrices, Matrices, load_rows
from te_models.kernels.expert_hidden_triton import Activation, gradient_values, hidden_values
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


class Activated(NamedTuple):
    """Values that are cast where they are computed: an activation [R, F], or its gradient [R, 2F].

    Attributes:
        gate_up: [R, 2F] = [gate | up].
        activation: of gate_up.
        dy: the gradient of the activation [R, F]; None: the values are the activation.
    """

    gate_up: Tensor
    activation: Activation
    dy: Tensor | None = None


@triton.jit
def _values(
    # as the arguments of the kernels below
    data,
    source,
    factor,
    tokens,
    places,
    dy,
    alpha,
    # the expert, and its first row
    e,
    begin,
    # rows and columns of the tile, and how many the expert has
    i,
    j,
    rows,
    columns,
    VALUES: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Return values before the cast, FP32 [i, j]."""
    if source is not None:
        source += begin
    if VALUES == "rows":
        if places is not None:
            data += tl.load(places + e)
        elif source is None:
            data += begin * columns
        if factor is not None:
            factor += begin
        x = load_rows(data, source, factor, tokens, i, j, rows, columns)
    elif VALUES == "activation":
        data += begin * 2 * columns
        x = hidden_values(data, source, tokens, i, j, rows, columns, alpha, LIMIT)
    else:
        tl.static_assert(VALUES == "gradient")
        # The left half is of the gate, the right one of up; a tile may have columns of both.
        half = columns // 2
        place = tl.where(j < half, j, j - half)
        of_gate, of_up, _ = gradient_values(
            dy + begin * half,
            data + begin * columns,
            source,
            tokens,
            i,
            place,
            rows,
            half,
            alpha,
            LIMIT,
        )
        x = tl.where((j < half)[None, :], of_gate, of_up)
    return x


@triton.jit
def count_experts_kernel(
    # the values before the cast, as expert_cast_triton.Matrices or `Activated`, whose rows of padding `source` tells
    data,
    source,
    factor,
    tokens,
    places,
    dy,
    alpha,
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
    # what is cast: "rows", "activation" or "gradient", and the limit of the activation
    VALUES: tl.constexpr,
    LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Count expert program_id(0)'s matrix; its programs share its tiles."""
    e = tl.program_id(0).to(tl.int64)
    begin = tl.load(first + e)
    rows = tl.load(first + e + 1) - begin
    # An expert without rows casts nothing, and its fields keep what they have.
    if rows > 0:
        program_fields = fields + (e * apart * spread + tl.program_id(1) % spread) * _WIDTH
        inverse = tl.load(scales_inverse + e)
        wide = tl.cdiv(columns, COLUMNS)
        sums = new_sums()
        units = tl.cdiv(rows, ROWS) * wide
        for unit in range(tl.program_id(1), units, tl.num_programs(1)):
            i = (unit // wide).to(tl.int64) * ROWS + tl.arange(0, ROWS)
            j = (unit % wide).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
            inside = (i < rows)[:, None] & (j < columns)[None, :]
            code = tl.load(cast_codes + (begin + i)[:, None] * columns + j[None, :], inside, 0)
            x = _values(
                data,
                source,
                factor,
                tokens,
                places,
                dy,
                alpha,
                e,
                begin,
                i,
                j,
                rows,
                columns,
                VALUES,
                LIMIT,
            )
            weights = code_weights(i, j)
            sums = count_tile(sums, x, code, inverse, inside, weights, E5M2, True)
        add_sums(program_fields, codes + e * apart, sums, True)
        if tl.program_id(1) == 0:
            elements = tl.full((), 1.0, tl.float64) * rows * columns
            _note_tensor(program_fields, elements, tl.load(scales + e), E5M2, True, False)


@triton.jit
def count_expert_blocks_kernel(
    # the values before the cast, as in count_experts_kernel
    data,
    source,
    factor,
    tokens,
    places,
    dy,
    alpha,
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
    # what is cast: "rows", "activation" or "gradient", and the limit of the activation
    VALUES: tl.constexpr,
    LIMIT: tl.constexpr,
    # rows and columns that share a scale, and the unit that a program reads at a time
    BLOCK_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEIGHT: tl.constexpr,
):
    """Count expert program_id(0)'s matrix of E4M3 with a scale per block of BLOCK_ROWS rows and COLUMNS columns.

    Its programs share its units of HEIGHT rows: BLOCK_ROWS is 1, or HEIGHT.
    """
    e = tl.program_id(0).to(tl.int64)
    begin = tl.load(first + e)
    rows = tl.load(first + e + 1) - begin
    # An expert without rows casts nothing, and its fields keep what they have.
    if rows > 0:
        program_fields = fields + (e * apart * spread + tl.program_id(1) % spread) * _WIDTH
        inverse = scales_inverse + e * inverse_expert
        if BLOCK_ROWS == 1:
            inverse += begin * inverse_row
        wide = tl.cdiv(columns, COLUMNS)
        sums = new_sums()
        scale_sums = new_scale_sums()
        units = tl.cdiv(rows, HEIGHT) * wide
        for unit in range(tl.program_id(1), units, tl.num_programs(1)):
            across = (unit % wide).to(tl.int64)
            j = across * COLUMNS + tl.arange(0, COLUMNS)
            in_block = tl.zeros((), tl.float32)  # the largest code of a square block
            for start in range(0, HEIGHT, ROWS):
                i = (unit // wide).to(tl.int64) * HEIGHT + start + tl.arange(0, ROWS)
                inside = (i < rows)[:, None] & (j < columns)[None, :]
                code = tl.load(cast_codes + (begin + i)[:, None] * columns + j[None, :], inside, 0)
                x = _values(
                    data,
                    source,
                    factor,
                    tokens,
                    places,
                    dy,
                    alpha,
                    e,
                    begin,
                    i,
                    j,
                    rows,
                    columns,
                    VALUES,
                    LIMIT,
                )
                scales = inverse + (i // BLOCK_ROWS) * inverse_row + across * inverse_column
                by = tl.load(scales, i < rows, 0.0)
                weights = code_weights(i, j)
                sums = count_tile(sums, x, code, by[:, None], inside, weights, False, True)
                # Codes without their sign are ordered as magnitudes are; only 0 matters here.
                size = tl.where(inside, (code & 0x7F).to(tl.float32), 0.0)
                if BLOCK_ROWS > 1:
                    in_block = tl.maximum(in_block, tl.max(tl.max(size, 1), 0))
                else:
                    sizes = tl.reshape(size, (ROWS, 1, COLUMNS))
                    scale_sums = count_row_scales(scale_sums, scales[:, None], sizes)
            # A square block is as high as the unit, so its scale is counted once its rows have been read.
            if BLOCK_ROWS > 1:
                square = tl.load(inverse + unit // wide * inverse_row + across * inverse_column)
                scale_sums = count_square_scale(scale_sums, square, in_block)
        add_sums(program_fields, codes + e * apart, sums, True)
        add_scale_sums(program_fields, scale_sums)
        if tl.program_id(1) == 0:
            elements = tl.full((), 1.0, tl.float64) * rows * columns
            _note_tensor(program_fields, elements, 1.0, False, True, True)


def count_experts(
    values: Matrices | Activated,
    groups: Groups,
    quantized: FP8Matrices,
    form: torch.dtype,
    counts: ExpertCounts,
) -> None:
    """Add the counts of a cast of every expert's matrix to a table.

    Args:
        values: the matrices before the cast, or what they are computed from.
        groups: the rows of each.
        quantized: the result.
        form: torch.float8_e4m3fn or float8_e5m2.
        counts: where they go.
    """
    columns = quantized.data.shape[1]
    with torch.cuda.device_of(quantized.data):
        count_experts_kernel[_grid(groups, columns, ROWS)](
            **_of_values(values),
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
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            num_warps=4,
        )


def count_expert_blocks(
    values: Matrices | Activated,
    groups: Groups,
    quantized: Blocks | WeightBlocks,
    counts: ExpertCounts,
) -> None:
    """Add the counts of a cast of every expert's matrix to E4M3 with a scale per block to a table.

    Args:
        values: the matrices before the cast, or what they are computed from.
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
            **_of_values(values),
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
            BLOCK_ROWS=block_rows,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            HEIGHT=height,
            num_warps=4,
        )


def _of_values(values: Matrices | Activated) -> dict[str, Any]:
    """Return the arguments of a kernel for the values before a cast."""
    if isinstance(values, Activated):
        activation = values.activation
        return dict(
            data=values.gate_up,
            source=activation.token,
            factor=None,
            tokens=activation.tokens,
            places=None,
            dy=values.dy,
            alpha=activation.alpha,
            VALUES="activation" if values.dy is None else "gradient",
            LIMIT=activation.limit,
        )
    return dict(
        data=values.data,
        source=values.source,
        factor=values.factor,
        tokens=len(values.data),
        places=values.places,
        dy=None,
        alpha=1.0,
        VALUES="rows",
        LIMIT=None,
    )


def _grid(groups: Groups, columns: int, height: int) -> tuple[int, int]:
    """Return the experts, and the programs of each, which go through units of `height` rows."""
    units = triton.cdiv(max(groups.most, 1), height) * triton.cdiv(columns, COLUMNS)
    return groups.experts, max(1, min(units, PROGRAMS) // groups.experts)
