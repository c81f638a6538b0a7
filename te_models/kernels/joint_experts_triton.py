"""The MLP of all experts in FP8, from tokens to tokens, as two autograd functions, one per projection.

One kernel computes and casts where separate operations would store BF16 first and read it again for the cast: the
activation, its backward, and the copy of the output's gradient to the rows of the experts write FP8. The amax of that
copy follows from the tokens, so no pass over the rows is needed to find it. The numbers equal the results of
separate operations (grouped_linear_triton.py): values are rounded to BF16 where they would be stored in between.
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
    tiles_of,
    total_sums,
)
from te_models.kernels.expert_hidden_triton import Activation, HiddenGradients, gradients, hidden
from te_models.kernels.expert_rows import Route
from te_models.kernels.expert_rows_triton import dots, total
from te_models.kernels.expert_values_triton import Activated
from te_models.kernels.expert_weights_triton import EqualMatrices, cast_equal_transposed, transposed
from te_models.kernels.grouped_gemm_triton import ExpertMatrices, rows_times, weights_from
from te_models.kernels.grouped_linear_triton import (
    E4M3,
    Casts,
    Locations,
    Stored,
    count_if_observed,
)
from te_models.kernels.groups import Groups

T = TypeVar("T")


class Projection(NamedTuple):
    """One of the two linears of all experts."""

    casts: Casts
    # The weights in FP8, cast for this pass or as a release stores them.
    fp8_weights: FP8Matrices | Stored
    at: Locations  # the addresses of the weights, for kernels that read all of them
    inputs: int
    outputs: int
    weights: Sequence[Tensor] = ()  # in BF16, which get gradients; none: those in FP8 are frozen
    bias: Tensor | None = None  # [E, outputs]


class JointExperts(NamedTuple):
    """The MLP of all experts. With `route` None it takes and returns the rows of the experts in place of tokens."""

    groups: Groups
    route: Route | None
    activation: Activation
    up: Projection
    down: Projection


class _Half(NamedTuple):
    """The part of a projection, one half of the MLP, that backward needs beside the saved tensors (`_saved_of`)."""

    casts: Casts
    at: Locations
    stored: Sequence[Tensor]
    inputs: int
    outputs: int
    count: int  # weights that get gradients
    trained: bool


def _half(projection: Projection, trained: bool) -> _Half:
    fp8_weights = projection.fp8_weights
    return _Half(
        casts=projection.casts,
        at=projection.at,
        stored=fp8_weights.data if isinstance(fp8_weights, Stored) else (),
        inputs=projection.inputs,
        outputs=projection.outputs,
        count=len(projection.weights),
        trained=trained,
    )


def _saved_of(projection: Projection) -> list[Tensor | None]:
    """Return the tensors of a projection to save: inverse scale, transposed weights, scale, weights in BF16.

    Backward needs transposed weights. They are None where it makes them anew, from stored weights or those in BF16.
    """
    fp8_weights = projection.fp8_weights
    if isinstance(fp8_weights, Stored):
        return [fp8_weights.scale_inv, None, None]
    if fp8_weights.transposed is not None:
        return [fp8_weights.scale_inv, fp8_weights.transposed, None]
    return [fp8_weights.scale_inv, None, fp8_weights.scale, *projection.weights]


def _forward_operand(projection: Projection) -> ExpertMatrices:
    fp8_weights = projection.fp8_weights
    if isinstance(fp8_weights, Stored):
        return ExpertMatrices(
            fp8_weights.data[0].view(E4M3), fp8_weights.scale_inv, projection.at.places
        )
    return ExpertMatrices(fp8_weights.data.view(E4M3), fp8_weights.scale_inv)


def _backward_operand(half: _Half, saved: Sequence[Tensor]) -> ExpertMatrices:
    """Return the transposed weights, made anew where none are there: all layers' would take half of BF16 weights."""
    scale_inv, w_transposed, scale, *weights = saved
    if half.stored:
        w_transposed = transposed(half.stored[0], half.at.in_backward(half.stored).places)
    elif w_transposed is None:
        w_matrices = EqualMatrices(weights[0], half.at.in_backward(weights).places)
        w_transposed = cast_equal_transposed(w_matrices, scale)
    return ExpertMatrices(w_transposed.view(E4M3), scale_inv)


def _outputs(
    projection: Projection,
    fp8_x: FP8Matrices,
    groups: Groups,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return a projection of rows x [R, inputs]: [R, outputs]."""
    return rows_times(
        ExpertMatrices(fp8_x.data.view(E4M3), fp8_x.scale_inv),
        _forward_operand(projection),
        groups,
        projection.outputs,
        bias,
        down=False,
        precise=projection.casts.precise_output,
        dtype=dtype,
    )


def _cast_gradient(
    half: _Half, dy: Matrices, groups: Groups, amax: Tensor | None, with_bias: bool
) -> tuple[FP8Matrices, Tensor | None]:
    """Return dy in FP8, and the gradient of the biases, whose sums the cast makes from the same reads."""
    casts = half.casts
    width = dy.data.shape[1]
    sums = room_for_sums(groups, width, dy.data.device) if with_bias else None
    fp8_dy = cast(
        dy, casts.gradient, casts.delayed_dy, transpose=half.trained, amax=amax, sums=sums
    )
    count_if_observed(casts.observer_dy, dy, groups, fp8_dy, casts.gradient)
    if sums is None:
        return fp8_dy, None
    tiles, _ = tiles_of(groups, transpose=half.trained)
    return fp8_dy, total_sums(sums, tiles, dy.data.dtype)


def _input_gradients(
    half: _Half, dy: ExpertMatrices, saved: Sequence[Tensor], groups: Groups, dtype: torch.dtype
) -> Tensor:
    """Return the gradients [R, inputs] of a projection's input from dy [R, outputs]; `saved` is from `_saved_of`."""
    return rows_times(
        dy,
        _backward_operand(half, saved),
        groups,
        half.inputs,
        down=False,
        precise=half.casts.precise_input_gradient,
        dtype=dtype,
    )


def _weight_gradients(
    half: _Half, dy: ExpertMatrices, x: ExpertMatrices, groups: Groups, dtype: torch.dtype
) -> Sequence[Tensor]:
    """Return each expert's gradient [outputs, inputs] from transposed dy [outputs, P] and x [inputs, P]."""
    gradients = weights_from(
        dy,
        x,
        groups,
        half.outputs,
        half.inputs,
        precise=half.casts.precise_weight_gradient,
        dtype=dtype,
    )
    return gradients.unbind()


class Passed(Generic[T]):
    """The gradient between the two functions, which is in FP8 and which autograd could therefore not pass.

    Autograd passes a tensor in BF16: here one without memory of its own, while the second function's backward puts the
    FP8 gradient into this object and the first's takes it out. One function for both would keep what the second
    projection saved until the backward of the first has ended.
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
        experts: JointExperts,
        passed: Passed[HiddenGradients],
        *weights: Tensor,
    ) -> Tensor:
        groups = experts.groups
        route = experts.route
        up = experts.up
        # An argument for autograd's sake: the kernels read the weights through `up`.
        del weights
        trained = any(ctx.needs_input_grad[4:])
        x = x.contiguous()
        token = None
        row = None
        if route is not None:
            token = route.token
            row = route.row
        rows = Matrices(x, groups, source=token)
        known_amax = None
        # Rows are copies of tokens: their amax follows from the tokens, of which there are k times fewer.
        if token is not None and up.casts.delayed_x is None:
            known_amax = amax_of_copies(rows, row_amax(x))
        # With a route backward casts the rows again from the tokens, instead of keeping k transposed copies of each.
        transpose = trained and route is None
        fp8_x = cast(rows, E4M3, up.casts.delayed_x, transpose=transpose, amax=known_amax)
        count_if_observed(up.casts.observer_x, rows, groups, fp8_x, E4M3)
        saved_x = None
        if trained:
            # Tokens in high precision are smaller than the rows of all experts in FP8.
            saved_x = fp8_x.transposed if route is None else x
        ctx.groups = groups
        ctx.passed = passed
        ctx.half = _half(up, trained)
        ctx.save_for_backward(saved_x, fp8_x.scale_inv, fp8_x.scale, token, row, *_saved_of(up))
        return _outputs(up, fp8_x, groups, bias, x.dtype)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dtype = grads[0].dtype
        groups = ctx.groups
        half = ctx.half
        casts = half.casts
        x, x_inverse, x_scale, token, row, *saved_weights = ctx.saved_tensors
        # From backward of the second function, beside the gradient that autograd passes, which holds nothing.
        passed = ctx.passed.take()
        fp8_dy = passed.of_gate_up
        dx = None
        if ctx.needs_input_grad[0]:
            a = ExpertMatrices(fp8_dy.data.view(casts.gradient), fp8_dy.scale_inv)
            dx = _input_gradients(half, a, saved_weights, groups, dtype)
            # Back from rows [R, D] to tokens [T, D]: the gradients of the k rows of a token add up.
            if row is not None:
                dx = total(dx, row, None)
            del a  # before the larger gradients of weights
        dbias = passed.sums
        dy_transposed = fp8_dy.transposed
        dy_inverse = fp8_dy.scale_inv
        del passed, fp8_dy
        dweights: Sequence[Tensor | None] = [None] * half.count
        if half.trained:
            x_transposed = x
            if token is not None:
                x_transposed = cast_transposed(Matrices(x, groups, source=token), E4M3, x_scale)
            assert dy_transposed is not None
            a = ExpertMatrices(dy_transposed.view(casts.gradient), dy_inverse)
            b = ExpertMatrices(x_transposed.view(E4M3), x_inverse)
            dweights = _weight_gradients(half, a, b, groups, dtype)
        if casts.after_backward is not None:
            casts.after_backward()
        return dx, dbias, None, None, *dweights


class _Down(torch.autograd.Function):
    """From the output of the first projection to tokens."""

    @staticmethod
    def forward(
        ctx: Context,
        gate_up: Tensor,
        gates: Tensor | None,
        bias: Tensor | None,
        experts: JointExperts,
        passed: Passed[HiddenGradients],
        trained_up: bool,
        summed_up: bool,
        *weights: Tensor,
    ) -> Tensor:
        groups = experts.groups
        route = experts.route
        activation = experts.activation
        up = experts.up
        down = experts.down
        del weights  # see _Up
        fp8_hidden = hidden(gate_up, groups, activation, down.casts.delayed_x)
        count_if_observed(
            down.casts.observer_x, Activated(gate_up, activation), groups, fp8_hidden, E4M3
        )
        out = _outputs(down, fp8_hidden, groups, bias, gate_up.dtype)
        ctx.groups = groups
        ctx.activation = activation
        ctx.passed = passed
        ctx.half = _half(down, any(ctx.needs_input_grad[7:]))
        ctx.up = _half(up, trained_up)
        ctx.summed_up = summed_up
        token = None
        row = None
        routed_out = None  # backward of `gates` reads the experts' outputs
        if route is not None:
            token = route.token
            row = route.row
            routed_out = out
        ctx.save_for_backward(
            token,
            row,
            gates,
            gate_up,
            fp8_hidden.scale_inv,
            fp8_hidden.scale,
            routed_out,
            *_saved_of(down),
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
        token, row, gates, gate_up, h_inverse, h_scale, out, *saved_weights = ctx.saved_tensors
        dtype = dy.dtype
        dgates = None
        known_amax = None
        if token is None:
            gradient_rows = Matrices(dy, groups)
        else:
            gradient_rows, dgates, amax_of_tokens = rows_of_tokens(
                dy, groups, token=token, row=row, gates=gates, out=out
            )
            if casts.delayed_dy is None:
                known_amax = amax_of_copies(gradient_rows, amax_of_tokens)
        fp8_dy, dbias = _cast_gradient(
            half, gradient_rows, groups, amax=known_amax, with_bias=ctx.needs_input_grad[2]
        )
        a = ExpertMatrices(fp8_dy.data.view(casts.gradient), fp8_dy.scale_inv)
        # Kept apart from `fp8_dy`, whose straight copy is freed after the first product.
        dy_transposed = fp8_dy.transposed
        dy_inverse = fp8_dy.scale_inv
        del fp8_dy
        dh = _input_gradients(half, a, saved_weights, groups, dtype)
        del a
        up = ctx.up.casts
        activation_gradients = gradients(
            dh,
            gate_up,
            groups,
            ctx.activation,
            up.gradient,
            up.delayed_dy,
            h_scale if half.trained else None,
            transpose=ctx.up.trained,
            summed=ctx.summed_up,
        )
        count_if_observed(
            up.observer_dy,
            Activated(gate_up, ctx.activation, dh),
            groups,
            activation_gradients.of_gate_up,
            up.gradient,
        )
        del dh
        dweights: Sequence[Tensor | None] = [None] * half.count
        if half.trained:
            assert dy_transposed is not None and activation_gradients.hidden is not None
            a = ExpertMatrices(dy_transposed.view(casts.gradient), dy_inverse)
            b = ExpertMatrices(activation_gradients.hidden.view(E4M3), h_inverse)
            dweights = _weight_gradients(half, a, b, groups, dtype)
        passed = ctx.passed.put(activation_gradients._replace(hidden=None), gate_up)
        if casts.after_backward is not None:
            casts.after_backward()
        return passed, dgates, dbias, None, None, None, None, *dweights


def rows_of_tokens(
    dy: Tensor, groups: Groups, *, token: Tensor, row: Tensor, gates: Tensor, out: Tensor
) -> tuple[Matrices, Tensor, Tensor]:
    """Return the gradient of the experts' outputs `out` [R, D], of the gates [T, k], and dy's amax of each token [T].

    dy [T, D] is the gradient of the sum of each token's rows; a row's is dy of its token times its gate, which the cast
    multiplies.
    """
    # The gradient of a gate is dy times the output of the row; the same pass finds the amax of each token of dy.
    dgates, amax_of_tokens = dots(dy, out, row)
    # The gate of each row; padding of tokens points to the row behind the last.
    factor = gates.new_zeros(len(out) + 1).scatter(0, row.flatten(), gates.flatten())[:-1]
    return Matrices(dy, groups, source=token, factor=factor), dgates, amax_of_tokens


def experts_in_fp8(x: Tensor, gates: Tensor | None, experts: JointExperts) -> Tensor:
    """Return the sum of the experts' outputs for tokens x [T, D], each times its gate: [T, D].

    Args:
        x: the tokens; without a route the rows of the experts [R, D], and so is the result.
        gates: FP32 [T, k], of the k experts of each token; None without a route.
        experts: the MLP.
    """
    up = experts.up
    down = experts.down
    passed: Passed[HiddenGradients] = Passed()
    gate_up = _Up.apply(x, up.bias, experts, passed, *up.weights)  # [R, 2F]
    # Backward of the second function casts the gradient that the first one needs, in the copies that it needs.
    trained = any(weight.requires_grad for weight in up.weights)
    summed = up.bias is not None and up.bias.requires_grad
    return _Down.apply(gate_up, gates, down.bias, experts, passed, trained, summed, *down.weights)
