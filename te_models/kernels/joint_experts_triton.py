"""A whole MLP of experts in FP8 as one autograd function, from tokens to tokens.

Nothing is stored in high precision that is cast afterwards: the activation and its backward write FP8, and so does the
way of the output's gradient to its rows, whose magnitudes are known from those of tokens. The numbers are those of the
operations one by one (grouped_linear_triton.py): values are rounded to BF16 where they would be stored in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_models.device.autograd import Context
from te_models.kernels.expert_cast_triton import (
    FP8Matrices,
    Matrices,
    amax_of_copies,
    cast,
    cast_transposed,
    room_for_sums,
    row_amax,
    total_sums,
    transposed,
)
from te_models.kernels.expert_hidden_triton import Activation, gradients, hidden
from te_models.kernels.expert_rows import Route
from te_models.kernels.expert_rows_triton import dots, total
from te_models.kernels.grouped_gemm_triton import Operand, rows_times, weights_from
from te_models.kernels.grouped_linear_triton import E4M3, Casts, Locations, Stored, matrices_of
from te_models.kernels.groups import Groups


class Projection(NamedTuple):
    """One of the two linears of all experts: its casts, its weights in FP8, and where those in BF16 are."""

    casts: Casts
    own: FP8Matrices | Stored
    at: Locations
    inputs: int
    outputs: int
    weights: Sequence[Tensor] = ()  # in BF16, which get gradients; none: those in FP8 are frozen
    bias: Tensor | None = None  # [E, outputs]


class Experts(NamedTuple):
    """The MLP of all experts. With `route` None the rows of the experts are given, and returned."""

    groups: Groups
    route: Route | None
    activation: Activation
    up: Projection
    down: Projection


class _Half(NamedTuple):
    """What backward needs of a projection, beside tensors that autograd keeps (`_kept`)."""

    casts: Casts
    at: Locations
    stored: Sequence[Tensor]
    inputs: int
    outputs: int
    count: int  # weights that get gradients
    trained: bool


def _half(projection: Projection, trained: bool) -> _Half:
    own = projection.own
    return _Half(
        projection.casts, projection.at, own.data if isinstance(own, Stored) else (), projection.inputs,
        projection.outputs, len(projection.weights), trained,
    )  # fmt: skip


def _kept(projection: Projection) -> list[Tensor | None]:
    """Return the factors of the weights, and what their transposed copy is or is made of in backward."""
    own = projection.own
    if isinstance(own, Stored):
        return [own.scale_inv, None, None]
    if own.transposed is not None:
        return [own.scale_inv, own.transposed, None]
    return [own.scale_inv, None, own.scale, *projection.weights]


def _forward_operand(projection: Projection) -> Operand:
    own = projection.own
    if isinstance(own, Stored):
        return Operand(own.data[0].view(E4M3), own.scale_inv, projection.at.places)
    return Operand(own.data.view(E4M3), own.scale_inv)


def _backward_operand(half: _Half, kept: Sequence[Tensor]) -> Operand:
    """Return the transposed weights, made anew where none are there: all layers' would take half of BF16 weights."""
    scale_inv, turned, scale, *weights = kept
    if half.stored:
        turned = transposed(half.stored[0], half.at.again(half.stored))
    elif turned is None:
        turned = cast_transposed(matrices_of(weights, half.at.again(weights)), E4M3, scale)
    return Operand(turned.view(E4M3), scale_inv)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, x: Tensor, gates: Tensor | None, bias_up: Tensor | None, bias_down: Tensor | None,
        how: Experts, *weights: Tensor,
    ) -> Tensor:  # fmt: skip
        groups, route, activation, up, down = how
        first = 5
        between = first + len(up.weights)
        trained = [
            any(ctx.needs_input_grad[first:between]),
            any(ctx.needs_input_grad[between:]),
        ]
        x = x.contiguous()
        token, row = (None, None) if route is None else (route.token, route.row)
        given = Matrices(x, groups, source=token)
        known = None
        if token is not None and up.casts.of_x is None:
            known = amax_of_copies(given, row_amax(x))
        turn = trained[0] and route is None
        of_x = cast(given, E4M3, up.casts.of_x, turn=turn, amax=known)
        a = Operand(of_x.data.view(E4M3), of_x.scale_inv)
        how_up = dict(down=False, precise=up.casts.output, dtype=x.dtype)
        gate_up = rows_times(a, _forward_operand(up), groups, up.outputs, bias_up, **how_up)
        of_hidden = hidden(gate_up, groups, activation, down.casts.of_x)
        a = Operand(of_hidden.data.view(E4M3), of_hidden.scale_inv)
        how_down = dict(down=False, precise=down.casts.output, dtype=x.dtype)
        out = rows_times(a, _forward_operand(down), groups, down.outputs, bias_down, **how_down)
        kept_x = (x if route is not None else of_x.transposed) if trained[0] else None
        kept = [_kept(up), _kept(down)]
        ctx.groups = groups
        ctx.activation = activation
        ctx.halves = [_half(half, own) for half, own in zip((up, down), trained, strict=True)]
        ctx.middle = len(kept[0])
        ctx.save_for_backward(
            kept_x, of_x.scale_inv, of_x.scale, token, row, gates, gate_up, of_hidden.scale_inv,
            of_hidden.scale, None if route is None else out, *kept[0], *kept[1],
        )  # fmt: skip
        if route is None:
            return out
        assert gates is not None
        return total(out, row, gates)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy = grads[0].contiguous()
        groups = ctx.groups
        up, down = ctx.halves
        x, x_inverse, x_scale, token, row, gates, gate_up, h_inverse, h_scale, out, *kept = (
            ctx.saved_tensors
        )
        dtype = dy.dtype
        device = dy.device
        dgates = None
        known = None
        given = Matrices(dy, groups)
        if token is not None:
            dgates, of_tokens = dots(dy, out, row)
            factor = gates.new_zeros(len(out) + 1).scatter(0, row.flatten(), gates.flatten())[:-1]
            given = Matrices(dy, groups, source=token, factor=factor)
            if down.casts.of_dy is None:
                known = amax_of_copies(given, of_tokens)
        del out
        summed = [ctx.needs_input_grad[2], ctx.needs_input_grad[3]]
        sums = room_for_sums(groups, dy.shape[1], device) if summed[1] else None
        slopes = cast(
            given, down.casts.gradient, down.casts.of_dy, turn=down.trained, amax=known, sums=sums
        )
        of_bias_down = None if sums is None else total_sums(sums, groups, dtype)
        a = Operand(slopes.data.view(down.casts.gradient), slopes.scale_inv)
        how: dict[str, Any] = dict(down=False, precise=down.casts.input_gradient, dtype=dtype)
        b = _backward_operand(down, kept[ctx.middle :])
        dh = rows_times(a, b, groups, down.inputs, **how)
        del a, b
        found = gradients(
            dh, gate_up, groups, ctx.activation, up.casts.gradient, up.casts.of_dy,
            h_scale if down.trained else None, turn=up.trained, summed=summed[0],
        )  # fmt: skip
        del dh
        of_down: Sequence[Tensor | None] = [None] * down.count
        if down.trained:
            assert slopes.transposed is not None and found.hidden is not None
            a = Operand(slopes.transposed.view(down.casts.gradient), slopes.scale_inv)
            b = Operand(found.hidden.view(E4M3), h_inverse)
            how = dict(precise=down.casts.weight_gradient, dtype=dtype)
            of_down = weights_from(a, b, groups, down.outputs, down.inputs, **how).unbind()
            del a, b
        of_gate_up = found.of_gate_up
        of_bias_up = found.sums
        del slopes, found
        dx = None
        if ctx.needs_input_grad[0]:
            a = Operand(of_gate_up.data.view(up.casts.gradient), of_gate_up.scale_inv)
            b = _backward_operand(up, kept[: ctx.middle])
            how = dict(down=False, precise=up.casts.input_gradient, dtype=dtype)
            dx = rows_times(a, b, groups, up.inputs, **how)
            dx = dx if row is None else total(dx, row, None)
            del a, b
        of_up: Sequence[Tensor | None] = [None] * up.count
        if up.trained:
            turned = x
            if token is not None:
                turned = cast_transposed(Matrices(x, groups, source=token), E4M3, x_scale)
            assert of_gate_up.transposed is not None
            a = Operand(of_gate_up.transposed.view(up.casts.gradient), of_gate_up.scale_inv)
            b = Operand(turned.view(E4M3), x_inverse)
            how = dict(precise=up.casts.weight_gradient, dtype=dtype)
            of_up = weights_from(a, b, groups, up.outputs, up.inputs, **how).unbind()
        for half in (up, down):
            if half.casts.after is not None:
                half.casts.after()
        return dx, dgates, of_bias_up, of_bias_down, None, *of_up, *of_down


def experts_in_fp8(x: Tensor, gates: Tensor | None, how: Experts) -> Tensor:
    """Return the sum of the experts' outputs by `gates` FP32 [T, k], of tokens x [T, D]: [T, D].

    Without a route x are the experts' rows [R, D], `gates` is None, and so the result is [R, D].
    """
    weights = (*how.up.weights, *how.down.weights)
    return _Experts.apply(x, gates, how.up.bias, how.down.bias, how, *weights)
