"""Counts about the FP8 of all experts at once, each expert's added to rows of its own in the table on the device.

A program counts a share of one expert's rows, four codes at a time, with the functions of
te_models.kernels.count_words_triton and count_blocks_triton. Values before the cast are read as the cast read them:
through the places of weights, or the tokens whose copies the rows are. Those that a kernel computed and cast at once,
an activation and its gradient, are computed once more by its own functions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_models.kernels.count_blocks_triton import (
    count_scales,
    filled_runs,
    for_words,
    inverses_of,
    new_scales,
    place_of_turn,
    sums_of_scales,
)
from te_models.kernels.count_cast_triton import _WIDTH, SQUARE, add_scale_sums
from te_models.kernels.count_four_triton import (
    MOST_TILES,
    add_care,
    add_saturated,
    add_state,
    count_four,
    count_with_care,
    mark_of,
    marked,
    needs_care,
    new_care,
    new_state,
    saturated_of,
)
from te_models.kernels.count_four_triton import WORDS as WORDS_OF_RUN
from te_models.kernels.count_words_triton import (
    COUNTING,
    ROWS,
    WORDS,
    hashes_of_words,
    places_outside,
    words_of_codes,
)
from te_models.kernels.expert_blocks_triton import Blocks, WeightBlocks
from te_models.kernels.expert_cast_triton import FP8Matrices, Matrices
from te_models.kernels.expert_values_triton import Activated, values_arguments, values_of_experts
from te_models.kernels.groups import Groups

PROGRAMS = 528  # of all experts together: four per multiprocessor of an H100


class ExpertCounts(NamedTuple):
    """Where the counts of one operand of every expert go.

    Attributes:
        fields: float64 [>= (E - 1) * stride + 1, spread, fields]: expert e's row is e * stride.
        codes: int64 [>= (E - 1) * stride + 1], the hashes.
        stride: rows from one expert to the next.
    """

    fields: Tensor
    codes: Tensor
    stride: int


@triton.jit
def _tile(
    # as in count_experts_kernel
    data,
    source,
    factor,
    tokens,
    places,
    dy,
    alpha,
    cast_codes,
    # the expert, its first row, and how many rows it has
    e,
    begin,
    rows,
    # the first row and word of the tile
    top,
    left,
    columns,
    VALUES: tl.constexpr,
    LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Return a tile's values before the cast as four FP32 tiles, its words of codes, and the places outside."""
    words = columns // 4
    i = top.to(tl.int64) + tl.arange(0, ROWS)
    j = left.to(tl.int64) + tl.arange(0, WORDS)
    values = ()
    for place in tl.static_range(4):
        x = values_of_experts(
            data=data,
            source=source,
            factor=factor,
            tokens=tokens,
            places=places,
            dy=dy,
            alpha=alpha,
            e=e,
            begin=begin,
            i=i,
            j=4 * j + place,
            rows=rows,
            columns=columns,
            VALUES=VALUES,
            LIMIT=LIMIT,
        )
        values = values + (x,)
    word = words_of_codes(cast_codes + begin * columns, i, j, rows, words, columns)
    return values, word, places_outside(top, left, rows, words, ROWS, WORDS)


# As in count_blocks_kernel, threads load the inverse scales of the codes that they have.
@triton.jit(do_not_specialize=["inverse_row", "inverse_column"])
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
    # the cast: uint8 [R, columns], inverse scales, and scales or None, FP32
    cast_codes,
    scales_inverse,
    scales,
    # from one expert's inverse scales to the next one's, and between blocks of an expert
    inverse_expert,
    inverse_row,
    inverse_column,
    # ExpertCounts
    fields,
    codes,
    columns,
    spread,
    counts_stride,
    # programs of an expert, unless it has more tiles than they can count
    usual_programs,
    E5M2: tl.constexpr,
    # what is cast: "rows", "activation" or "gradient", and the limit of the activation
    VALUES: tl.constexpr,
    LIMIT: tl.constexpr,
    # rows and words that share a scale, or 0: an expert has one scale; tile, and rows of a unit, which has whole blocks
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    HEIGHT: tl.constexpr,
    MOST_TILES: tl.constexpr,
):
    """Count expert program_id(1)'s matrix; its programs share its units."""
    e = tl.program_id(1).to(tl.int64)
    begin = tl.load(first + e)
    rows = (tl.load(first + e + 1) - begin).to(tl.int32)
    words = columns // 4
    tiles: tl.constexpr = HEIGHT // ROWS
    units = tl.cdiv(rows, HEIGHT) * tl.cdiv(words, WORDS)
    programs = tl.maximum(usual_programs, tl.cdiv(units, MOST_TILES // tiles))
    # An expert without rows casts nothing, and its fields keep what they have.
    if tl.program_id(0) < tl.minimum(programs, units):
        expert_fields = fields + e * counts_stride * spread * _WIDTH
        expert_codes = codes + e * counts_stride
        inverse = scales_inverse + e * inverse_expert
        if BLOCK_ROWS == 1:
            inverse += begin * inverse_row
        runs: tl.constexpr = WORDS // WORDS_OF_RUN
        turns = tl.cdiv(units - tl.program_id(0), programs) * tiles
        state = new_state(ROWS, WORDS)
        if BLOCK_ROWS == 0:
            one_inverse = tl.load(inverse)
        else:
            scale_sums = new_scales(ROWS if BLOCK_ROWS == 1 else 1, WORDS // BLOCK_WORDS)
            seen = tl.full((ROWS, runs), -1, tl.int32)  # `filled_runs` in the tiles of a unit
        for turn in range(turns):
            top, left = place_of_turn(turn, words, programs, HEIGHT, ROWS, WORDS)
            values, word, outside = _tile(
                data=data,
                source=source,
                factor=factor,
                tokens=tokens,
                places=places,
                dy=dy,
                alpha=alpha,
                cast_codes=cast_codes,
                e=e,
                begin=begin,
                rows=rows,
                top=top,
                left=left,
                columns=columns,
                VALUES=VALUES,
                LIMIT=LIMIT,
                ROWS=ROWS,
                WORDS=WORDS,
            )
            hashes = hashes_of_words(word, top, left, ROWS, WORDS)
            if BLOCK_ROWS == 0:
                state = count_four(state, values, word, hashes, one_inverse, outside, E5M2)
            else:
                of_runs = inverses_of(
                    inverse=inverse,
                    top=top,
                    left=left,
                    rows=rows,
                    words=words,
                    inverse_row=inverse_row,
                    inverse_column=inverse_column,
                    BLOCK_ROWS=BLOCK_ROWS,
                    BLOCK_WORDS=BLOCK_WORDS,
                    ROWS=ROWS,
                    WORDS=WORDS,
                    WORDS_OF_INVERSE=WORDS_OF_RUN,
                )
                state = count_four(
                    state, values, word, hashes, for_words(of_runs), outside, E5M2, of_runs
                )
                seen = tl.maximum(seen, filled_runs(word, of_runs))
                if turn % tiles == tiles - 1:
                    scale_sums = count_scales(scale_sums, seen, BLOCK_ROWS)
                    seen = tl.full((ROWS, runs), -1, tl.int32)
        elements = tl.full((), 4.0, tl.float64) * rows * words
        if BLOCK_ROWS == 0:
            care_needed = needs_care(state, one_inverse)
            scale = tl.load(scales + e)
            add_state(
                expert_fields, expert_codes, spread, state, care_needed, scale, elements, E5M2
            )
        else:
            care_needed = needs_care(state, tl.min(scale_sums[1]).to(tl.float32, bitcast=True))
            one = tl.full((), 1.0, tl.float32)
            add_state(
                expert_fields,
                expert_codes,
                spread,
                state,
                care_needed,
                one,
                elements,
                E5M2,
                begins=False,
            )
            program_fields = expert_fields + (tl.program_id(0) % spread) * _WIDTH
            add_scale_sums(program_fields, sums_of_scales(scale_sums))
        marks = marked(state)
        if (care_needed > 0) | (marks != 0):
            care = new_care()
            saturated = tl.zeros((), tl.int64)
            for turn in range(turns):
                if (care_needed > 0) | ((marks & mark_of(turn)) != 0):
                    top, left = place_of_turn(turn, words, programs, HEIGHT, ROWS, WORDS)
                    values, word, outside = _tile(
                        data=data,
                        source=source,
                        factor=factor,
                        tokens=tokens,
                        places=places,
                        dy=dy,
                        alpha=alpha,
                        cast_codes=cast_codes,
                        e=e,
                        begin=begin,
                        rows=rows,
                        top=top,
                        left=left,
                        columns=columns,
                        VALUES=VALUES,
                        LIMIT=LIMIT,
                        ROWS=ROWS,
                        WORDS=WORDS,
                    )
                    if BLOCK_ROWS == 0:
                        by = one_inverse
                    else:
                        by = inverses_of(
                            inverse=inverse,
                            top=top,
                            left=left,
                            rows=rows,
                            words=words,
                            inverse_row=inverse_row,
                            inverse_column=inverse_column,
                            BLOCK_ROWS=BLOCK_ROWS,
                            BLOCK_WORDS=BLOCK_WORDS,
                            ROWS=ROWS,
                            WORDS=WORDS,
                            WORDS_OF_INVERSE=1,
                        )
                    if care_needed > 0:
                        care = count_with_care(care, values, word, by, outside, E5M2)
                    else:
                        saturated += saturated_of(values, by, E5M2)
            if care_needed > 0:
                add_care(expert_fields, expert_codes, spread, care)
            else:
                add_saturated(expert_fields, spread, saturated)


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
        quantized: the result, whose rows are multiples of four codes.
        form: torch.float8_e4m3fn or float8_e5m2.
        counts: where they go.
    """
    _count(
        values,
        groups,
        quantized.data,
        scales_inverse=quantized.scale_inv,
        scales=quantized.scale,
        inverse_expert=1,
        inverse_row=0,
        inverse_column=0,
        e5m2=form == torch.float8_e5m2,
        block=(0, 0),
        counts=counts,
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
    if isinstance(quantized, WeightBlocks):
        block = (SQUARE, SQUARE)
        inverse_expert, inverse_row, inverse_column = inverse.stride()  # [E, O / 128, K / 128]
    else:
        block = (1, SQUARE)
        inverse_column, inverse_row = inverse.stride()  # [K / 128, R]
        inverse_expert = 0  # an expert's scales are where its rows are
    _count(
        values,
        groups,
        data,
        scales_inverse=inverse,
        scales=None,
        inverse_expert=inverse_expert,
        inverse_row=inverse_row,
        inverse_column=inverse_column,
        e5m2=False,
        block=block,
        counts=counts,
    )


def _count(
    values: Matrices | Activated,
    groups: Groups,
    data: Tensor,
    *,
    scales_inverse: Tensor,
    scales: Tensor | None,
    inverse_expert: int,
    inverse_row: int,
    inverse_column: int,
    e5m2: bool,
    block: tuple[int, int],
    counts: ExpertCounts,
) -> None:
    """Launch the kernel.

    Args:
        inverse_expert, inverse_row, inverse_column: strides of the inverse scales over experts, rows of blocks and
            columns of blocks.
        block: rows and columns that share a scale; (0, 0): an expert has one.
    """
    columns = data.shape[1]
    assert columns % 4 == 0
    height = max(ROWS, block[0])
    units = triton.cdiv(max(groups.most, 1), height) * triton.cdiv(columns // 4, WORDS)
    usual_programs = max(1, min(units, PROGRAMS // groups.experts))
    # All rows may be of one expert. Programs without units end at once.
    units_per_program = MOST_TILES // (height // ROWS)
    most_programs = max(usual_programs, triton.cdiv(units, units_per_program))
    with torch.cuda.device_of(data):
        count_experts_kernel[(most_programs, groups.experts)](
            **values_arguments(values),
            first=groups.first,
            cast_codes=data,
            scales_inverse=scales_inverse,
            scales=scales,
            inverse_expert=inverse_expert,
            inverse_row=inverse_row,
            inverse_column=inverse_column,
            fields=counts.fields,
            codes=counts.codes,
            columns=columns,
            spread=counts.fields.shape[1],
            counts_stride=counts.stride,
            usual_programs=usual_programs,
            E5M2=e5m2,
            BLOCK_ROWS=block[0],
            BLOCK_WORDS=block[1] // 4,
            ROWS=ROWS,
            WORDS=WORDS,
            HEIGHT=height,
            MOST_TILES=MOST_TILES,
            **COUNTING,
        )
