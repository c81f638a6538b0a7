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
    _WIDTH,
    COLUMNS,
    ROWS,
    _add_counts,
    _count,
    _note_tensor,
)
from te_models.kernels.expert_cast_triton import FP8Matrices, Matrices, load_rows
from te_models.kernels.groups import Groups

PROGRAMS = 528  # of all experts together: four per multiprocessor of an H100


class ExpertCounts(NamedTuple):
    """Where the counts of one operand of every expert go.

    Attributes:
        fields: float64 [>= (E - 1) * apart + 1, spread, fields]: expert e's row is e * apart.
        codes: int64 [>= (E - 1) * apart + 1], the hashes.
        flag: int32 [1], other than 0 in a step that is recorded.
        apart: rows from one expert to the next.
    """

    fields: Tensor
    codes: Tensor
    flag: Tensor
    apart: int


@triton.jit
def count_experts_kernel(
    # the values before the cast, as expert_cast_triton.Matrices
    data,
    source,
    factor,
    given,
    places,
    # where each expert begins, int64 [E + 1]
    first,
    # the cast: uint8 [R, columns], and inverse scales and scales, FP32 [E]
    made,
    scales_inverse,
    scales,
    # ExpertCounts
    fields,
    codes,
    flag,
    columns,
    spread,
    apart,
    E5M2: tl.constexpr,
    VALUES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Count expert program_id(0)'s matrix; its programs share its tiles. Without VALUES, the data alone."""
    if tl.load(flag) != 0:
        e = tl.program_id(0).to(tl.int64)
        begin = tl.load(first + e)
        rows = tl.load(first + e + 1) - begin
        # An expert without rows casts nothing, and its fields keep what they have.
        if rows > 0:
            own = fields + (e * apart * spread + tl.program_id(1) % spread) * _WIDTH
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
                code = tl.load(made + (begin + i)[:, None] * columns + j[None, :], inside, 0)
                if VALUES:
                    x = load_rows(address, source, factor, given, i, j, rows, columns)
                else:
                    x = tl.zeros((ROWS, COLUMNS), tl.float32)
                index = i[:, None] * columns + j[None, :]
                packed, exact, change, codes_of, magnitude = _count(
                    x, code, inverse, inside, index, E5M2, VALUES
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
                fields=own,
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
                _note_tensor(own, elements, tl.load(scales + e), E5M2, VALUES, False)


def count_experts(
    given: Matrices | None,
    groups: Groups,
    made: FP8Matrices,
    form: torch.dtype,
    counts: ExpertCounts,
) -> None:
    """Add the counts of a cast of every expert's matrix to a table.

    Args:
        given: the matrices before the cast; None: they are not in memory.
        groups: the rows of each.
        made: the result.
        form: torch.float8_e4m3fn or float8_e5m2.
        counts: where they go.
    """
    columns = made.data.shape[1]
    experts = groups.experts
    values: dict[str, Any] = dict(data=made.data, source=None, factor=None, given=0, places=None)
    if given is not None:
        values = dict(
            data=given.data,
            source=given.source,
            factor=given.factor,
            given=len(given.data),
            places=given.places,
        )
    units = triton.cdiv(max(groups.most, 1), ROWS) * triton.cdiv(columns, COLUMNS)
    each = max(1, min(units, PROGRAMS) // experts)
    with torch.cuda.device_of(made.data):
        count_experts_kernel[(experts, each)](
            **values,
            first=groups.first,
            made=made.data,
            scales_inverse=made.scale_inv,
            scales=made.scale,
            fields=counts.fields,
            codes=counts.codes,
            flag=counts.flag,
            columns=columns,
            spread=counts.fields.shape[1],
            apart=counts.apart,
            E5M2=form == torch.float8_e5m2,
            VALUES=given is not None,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            num_warps=4,
        )
