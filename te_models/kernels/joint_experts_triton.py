"""A whole MLP of experts in FP8 as two autograd functions that know each other, from tokens to tokens.

Nothing is stored in high precision that is cast afterwards: the activation and its backward write FP8, and so does the
way of the output's gradient to its rows, whose magnitudes are known from the tokens'. The numbers equal the
operations' one by one (grouped_linear_triton.py): values are rounded to BF16 where they would be stored in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

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
from te_models.kernels.expert_hidden_triton import Activation, HiddenGradients, gradients, hidden
from te_models.kernels.expert_rows import Route
from te_models.kernels.expert_rows_triton import dots, total
from te_models.kernels.grouped_gemm_triton import ExpertMatrices, rows_times, weights_from
from te_models.kernels.grouped_linear_triton import (
    E4M3,
    Casts,
    Locations,
    Stored,
    count_if_seen,
    matrices_of,
)
from te_models.kernels.groups import Groups

T = TypeVar("T")


class Projection(NamedTuple):
    """One of the two linears of all experts: its casts, its weights in FP8, and where those in BF16 are."""

    casts: Casts
    own: FP8Matrices | Stored
    at: Locations
    inputs: int
    outputs: int
    weights: Sequence[Tensor] = ()  # in BF16, which get gradients; none: those in FP8 are frozen
    bias: Tensor | None = None  # [E, outputs]


class JointExperts(NamedTuple):
    """The MLP of all experts. With `route` None the rows of the experts are given, and returned."""

    groups: Groups
    route: Route | None
    activation: Activation
    up: Projection
    down: Projection


class _Half(NamedTuple):
    """The part of a projection that backward needs, beside tensors that autograd keeps (`_kept`)."""

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
        casts=projection.casts,
        at=projection.at,
        stored=own.data if isinstance(own, Stored) else (),
        inputs=projection.inputs,
        outputs=projection.outputs,
        count=len(projection.weights),
        trained=trained,
    )


def _kept(projection: Projection) -> list[Tensor | None]:
    """Return the factors of the weights, and what their transposed copy is or is made of in backward."""
    own = projection.own
    if isinstance(own, Stored):
        return [own.scale_inv, None, None]
    if own.transposed is not None:
        return [own.scale_inv, own.transposed, None]
    return [own.scale_inv, None, own.scale, *projection.weights]


def _forward_operand(projection: Projection) -> ExpertMatrices:
    own = projection.own
    if isinstance(own, Stored):
        return ExpertMatrices(own.data[0].view(E4M3), own.scale_inv, projection.at.places)
    return ExpertMatrices(own.data.view(E4M3), own.scale_inv)


def _backward_operand(half: _Half, kept: Sequence[Tensor]) -> ExpertMatrices:
    """Return the transposed weights, made anew where none are there: all layers' would take half of BF16 weights."""
    scale_inv, turned, scale, *weights = kept
    if half.stored:
        turned = transposed(half.stored[0], half.at.again(half.stored))
    elif turned is None:
        turned = cast_transposed(matrices_of(weights, half.at.again(weights)), E4M3, scale)
    return ExpertMatrices(turned.view(E4M3), scale_inv)


class Passed(Generic[T]):
    """Results that the second function's backward passes to the first's, beside a gradient without memory.

    Two functions, since autograd frees what a function saved when its backward ends.
    """

    def __init__(self) -> None:
        self._value: T | None = None

    def put(self, value: T, like: Tensor) -> Tensor:
        """Keep the value for `take`; return a gradient of the shape of `like` that stands for it."""
        self._value = value
        return like.new_zeros(1).expand_as(like)

    def take(self) -> T:
        """Return the value, and keep it no longer."""
        value = self._value
        assert value is not None
        self._value = None
        return value


class _Up(torch.autograd.Function):
    """From tokens to the output of the first projection."""

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        bias: Tensor | None,
        how: JointExperts,
        passed: Passed[HiddenGradients],
        *weights: Tensor,
    ) -> Tensor:
        groups = how.groups
        route = how.route
        up = how.up
        trained = any(ctx.needs_input_grad[4:])
        x = x.contiguous()
        token, row = (None, None) if route is None else (route.token, route.row)
        given = Matrices(x, groups, source=token)
        known = None
        # Rows are copies of tokens: their amax follows from the tokens, of which there are k times fewer.
        if token is not None and up.casts.of_x is None:
            known = amax_of_copies(given, row_amax(x))
        # With a route backward casts the rows again from the tokens, instead of keeping k transposed copies of each.
        turn = trained and route is None
        of_x = cast(given, E4M3, up.casts.of_x, turn=turn, amax=known)
        count_if_seen(up.casts.seen_x, given, groups, of_x, E4M3)
        # Tokens in high precision are smaller than the rows of all experts in FP8.
        kept = (x if route is not None else of_x.transposed) if trained else None
        ctx.groups = groups
        ctx.passed = passed
        ctx.half = _half(up, trained)
        ctx.save_for_backward(kept, of_x.scale_inv, of_x.scale, token, row, *_kept(up))
        a = ExpertMatrices(of_x.data.view(E4M3), of_x.scale_inv)
        return rows_times(
            a,
            _forward_operand(up),
            groups,
            up.outputs,
            bias,
            down=False,
            precise=up.casts.output,
            dtype=x.dtype,
        )

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dtype = grads[0].dtype
        groups = ctx.groups
        half = ctx.half
        casts = half.casts
        x, x_inverse, x_scale, token, row, *kept = ctx.saved_tensors
        # From backward of the second function, beside the gradient that autograd passes, which holds nothing.
        found = ctx.passed.take()
        slopes = found.of_gate_up
        dx = None
        if ctx.needs_input_grad[0]:
            a = ExpertMatrices(slopes.data.view(casts.gradient), slopes.scale_inv)
            b = _backward_operand(half, kept)
            dx = rows_times(
                a,
                b,
                groups,
                half.inputs,
                down=False,
                precise=casts.input_gradient,
                dtype=dtype,
            )
            # Back from rows to tokens: the gradients of the k rows of a token add up.
            dx = dx if row is None else total(dx, row, None)
            del a, b  # before the larger gradients of weights
        bias = found.sums
        of_rows, inverse = slopes.transposed, slopes.scale_inv
        del found, slopes
        of_weights: Sequence[Tensor | None] = [None] * half.count
        if half.trained:
            turned = x
            if token is not None:
                turned = cast_transposed(Matrices(x, groups, source=token), E4M3, x_scale)
            assert of_rows is not None
            a = ExpertMatrices(of_rows.view(casts.gradient), inverse)
            b = ExpertMatrices(turned.view(E4M3), x_inverse)
            of_weights = weights_from(
                a,
                b,
                groups,
                half.outputs,
                half.inputs,
                precise=casts.weight_gradient,
                dtype=dtype,
            ).unbind()
        if casts.after is not None:
            casts.after()
        return dx, bias, None, None, *of_weights


class _Down(torch.autograd.Function):
    """From the output of the first projection to tokens."""

    @staticmethod
    def forward(
        ctx: Context,
        gate_up: Tensor,
        gates: Tensor | None,
        bias: Tensor | None,
        how: JointExperts,
        passed: Passed[HiddenGradients],
        trained_up: bool,
        summed_up: bool,
        *weights: Tensor,
    ) -> Tensor:
        groups = how.groups
        route = how.route
        activation = how.activation
        up = how.up
        down = how.down
        of_hidden = hidden(gate_up, groups, activation, down.casts.of_x)
        count_if_seen(down.casts.seen_x, None, groups, of_hidden, E4M3)
        a = ExpertMatrices(of_hidden.data.view(E4M3), of_hidden.scale_inv)
        out = rows_times(
            a,
            _forward_operand(down),
            groups,
            down.outputs,
            bias,
            down=False,
            precise=down.casts.output,
            dtype=gate_up.dtype,
        )
        ctx.groups = groups
        ctx.activation = activation
        ctx.passed = passed
        ctx.half = _half(down, any(ctx.needs_input_grad[7:]))
        ctx.up = _half(up, trained_up)
        ctx.summed_up = summed_up
        token, row = (None, None) if route is None else (route.token, route.row)
        ctx.save_for_backward(
            token,
            row,
            gates,
            gate_up,
            of_hidden.scale_inv,
            of_hidden.scale,
            None if route is None else out,
            *_kept(down),
        )
        if route is None:
            return out
        assert gates is not None
        return total(out, row, gates)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy = grads[0].contiguous()
        groups = ctx.groups
        half = ctx.half
        casts = half.casts
        token, row, gates, gate_up, h_inverse, h_scale, out, *kept = ctx.saved_tensors
        dtype = dy.dtype
        dgates = None
        known = None
        given = Matrices(dy, groups)
        if token is not None:
            # The gradient of a gate is dy times the output of the row; the same pass finds the amax of each token of
            # dy.
            dgates, of_tokens = dots(dy, out, row)
            # The gate of each row; padding of tokens points to the row behind the last.
            factor = gates.new_zeros(len(out) + 1).scatter(0, row.flatten(), gates.flatten())[:-1]
            given = Matrices(dy, groups, source=token, factor=factor)
            if casts.of_dy is None:
                known = amax_of_copies(given, of_tokens)
        sums = None
        if ctx.needs_input_grad[2]:
            sums = room_for_sums(groups, dy.shape[1], dy.device)
        slopes = cast(given, casts.gradient, casts.of_dy, turn=half.trained, amax=known, sums=sums)
        count_if_seen(casts.seen_dy, given, groups, slopes, casts.gradient)
        of_bias = None if sums is None else total_sums(sums, groups, dtype)
        a = ExpertMatrices(slopes.data.view(casts.gradient), slopes.scale_inv)
        of_rows, inverse = slopes.transposed, slopes.scale_inv
        del slopes
        b = _backward_operand(half, kept)
        dh = rows_times(
            a,
            b,
            groups,
            half.inputs,
            down=False,
            precise=casts.input_gradient,
            dtype=dtype,
        )
        del a, b
        found = gradients(
            dh,
            gate_up,
            groups,
            ctx.activation,
            ctx.up.casts.gradient,
            ctx.up.casts.of_dy,
            h_scale if half.trained else None,
            turn=ctx.up.trained,
            summed=ctx.summed_up,
        )
        del dh
        up = ctx.up.casts
        count_if_seen(up.seen_dy, None, groups, found.of_gate_up, up.gradient)
        of_weights: Sequence[Tensor | None] = [None] * half.count
        if half.trained:
            assert of_rows is not None and found.hidden is not None
            a = ExpertMatrices(of_rows.view(casts.gradient), inverse)
            b = ExpertMatrices(found.hidden.view(E4M3), h_inverse)
            of_weights = weights_from(
                a,
                b,
                groups,
                half.outputs,
                half.inputs,
                precise=casts.weight_gradient,
                dtype=dtype,
            ).unbind()
        passed = ctx.passed.put(found._replace(hidden=None), gate_up)
        if casts.after is not None:
            casts.after()
        return passed, dgates, of_bias, None, None, None, None, *of_weights


def experts_in_fp8(x: Tensor, gates: Tensor | None, how: JointExperts) -> Tensor:
    """Return the sum of the experts' outputs by `gates` FP32 [T, k], of tokens x [T, D]: [T, D].

    Without a route x are the experts' rows [R, D], `gates` is None, and so the result is [R, D].
    """
    passed: Passed[HiddenGradients] = Passed()
    gate_up = _Up.apply(x, how.up.bias, how, passed, *how.up.weights)
    trained = any(weight.requires_grad for weight in how.up.weights)
    summed = how.up.bias is not None and how.up.bias.requires_grad
    return _Down.apply(
        gate_up, gates, how.down.bias, how, passed, trained, summed, *how.down.weights
    )
