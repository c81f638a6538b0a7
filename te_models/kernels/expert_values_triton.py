"""The values that the experts' FP8 tensors are cast from, read or computed again by the kernels that count casts."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from te_models.kernels.expert_cast_triton import Matrices, load_rows
from te_models.kernels.expert_hidden_triton import Activation, gradient_values, hidden_values


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
def values_of_experts(
    # of `values_arguments`
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


def values_arguments(values: Matrices | Activated) -> dict[str, Any]:
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
