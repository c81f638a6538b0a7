"""The linears of all experts under block scaling, alone and as a whole MLP: as grouped_linear_triton.py and
joint_experts_triton.py, with a scale per block in place of one per expert.

No magnitude has to be known before a cast, so that each is one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from te_models.device.autograd import Context
from te_models.kernels.count_experts_triton import count_expert_blocks
from te_models.kernels.expert_block_gradients_triton import BlockGradients, gradient_blocks
from te_models.kernels.expert_block_products_triton import block_rows_times, block_weights_from
from te_models.kernels.expert_blocks_triton import (
    Blocks,
    WeightBlocks,
    cast_blocks,
    cast_weight_blocks,
    hidden_blocks,
)
from te_models.kernels.expert_cast_triton import Matrices
from te_models.kernels.expert_hidden_triton import Activation
from te_models.kernels.expert_rows import Route
from te_models.kernels.expert_rows_triton import total
from te_models.kernels.expert_values_triton import Activated
from te_models.kernels.grouped_linear_triton import CastObserver, Locations, matrices_of
from te_models.kernels.groups import Groups
from te_models.kernels.joint_experts_triton import Passed, rows_of_tokens


class BlockProjection(NamedTuple):
    """One of the linears of all experts: its weights in FP8, which get gradients in the dtype of `tensors`.

    The last two count the casts of a recorded run, as in grouped_linear_triton.Casts.
    """

    fp8_weights: WeightBlocks
    at: Locations
    tensors: Sequence[Tensor]
    bias: Tensor | None = None  # [E, O]
    observer_x: CastObserver | None = None
    observer_dy: CastObserver | None = None


class BlockExperts(NamedTuple):
    """The MLP of all experts. With `route` None the rows of the experts are given, and returned."""

    groups: Groups
    route: Route | None
    activation: Activation
    up: BlockProjection
    down: BlockProjection


def cast_weights(
    weights: Sequence[Tensor], at: Locations, transpose: bool, observer: CastObserver | None
) -> WeightBlocks:
    """Return the experts' weights in FP8, with `transpose` a transposed copy too; `observer` counts the cast."""
    quantized = cast_weight_blocks(weights[0], at.places, transpose=transpose)
    if observer is not None:
        matrices = matrices_of(weights, at.places)
        count_blocks_if_observed(observer, matrices, matrices.groups, quantized)
    return quantized


def count_blocks_if_observed(
    observer: CastObserver | None,
    values: Matrices | Activated,
    groups: Groups,
    quantized: Blocks | WeightBlocks,
) -> None:
    """Count a cast of all experts if an observer wants it; arguments are as in `count_expert_blocks`."""
    counts = None if observer is None else observer.counts
    if counts is not None:
        count_expert_blocks(values, groups, quantized, counts)


def _transposed_weights(
    transposed: Tensor | None, scale_inv: Tensor, at: Locations, weights: Sequence[Tensor]
) -> WeightBlocks:
    """Return transposed weights in backward, cast again where the forward made none."""
    if transposed is not None:
        return WeightBlocks(None, transposed, scale_inv)
    return cast_weight_blocks(weights[0], at.in_backward(weights).places, straight=False)


def _transposed_rows(
    x: Tensor, x_inverse: Tensor | None, groups: Groups, token: Tensor | None
) -> Blocks:
    """Return the transposed rows of experts in backward.

    Args:
        x: what the forward saved: with `token` the tokens [T, I], which are cast now; else transposed FP8 rows [I, P].
        x_inverse: the inverse scales of these rows; None with `token`.
    """
    if token is None:
        return Blocks(data=None, scale_inv=None, transposed=x, transposed_inv=x_inverse)
    return cast_blocks(Matrices(x, groups, source=token), straight=False)[0]


class _Blocks(torch.autograd.Function):
    """Saves x in high precision, as Transformer Engine's transposed copy has scales of its own."""

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        bias: Tensor | None,
        groups: Groups,
        route: Route | None,
        projection: BlockProjection,
        *weights: Tensor,
    ) -> Tensor:
        x = x.contiguous()
        token = None
        row = None
        if route is not None:
            token = route.token
            row = route.row
            ctx.kernels = route.kernels
        fp8_weights = projection.fp8_weights
        ctx.groups = groups
        ctx.at = projection.at
        ctx.observer_dy = projection.observer_dy
        trained = any(ctx.needs_input_grad[5:])
        # With a route x are tokens [T, I], fewer than their rows [R, I]: they are kept, and backward casts them again.
        transpose = trained and route is None
        rows = Matrices(x, groups, source=token)
        fp8_x, _ = cast_blocks(rows, transpose=transpose)
        count_blocks_if_observed(projection.observer_x, rows, groups, fp8_x)
        saved_x = None
        if trained:
            saved_x = fp8_x.transposed if route is None else x
        to_cast_again = weights if fp8_weights.transposed is None else ()
        ctx.save_for_backward(
            saved_x,
            fp8_x.transposed_inv,
            token,
            row,
            fp8_weights.transposed,
            fp8_weights.scale_inv,
            *to_cast_again,
        )
        ctx.count = len(weights)
        return block_rows_times(fp8_x, fp8_weights, groups, bias, backward=False, dtype=x.dtype)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy = grads[0].contiguous()
        groups = ctx.groups
        x, x_inverse, token, row, w_transposed, scale_inv, *weights = ctx.saved_tensors
        # One pass over dy: both copies, and the sum of its rows for the bias.
        rows = Matrices(dy, groups)
        fp8_dy, db = cast_blocks(rows, transpose=x is not None, summed=ctx.needs_input_grad[1])
        count_blocks_if_observed(ctx.observer_dy, rows, groups, fp8_dy)
        dx = None
        if ctx.needs_input_grad[0]:
            b = _transposed_weights(w_transposed, scale_inv, ctx.at, weights)
            dx = block_rows_times(fp8_dy, b, groups, backward=True, dtype=dy.dtype)
            if row is not None:
                dx = ctx.kernels.total(dx, row, None)
            del b
        dweights: Sequence[Tensor | None] = [None] * ctx.count
        if x is not None:
            fp8_x = _transposed_rows(x, x_inverse, groups, token)
            dweights = block_weights_from(fp8_dy, fp8_x, groups, dy.dtype).unbind()
        return dx, db, None, None, None, *dweights


class _Up(torch.autograd.Function):
    """From tokens to the output of the first projection of an MLP."""

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        bias: Tensor | None,
        experts: BlockExperts,
        passed: Passed[BlockGradients],
        *weights: Tensor,
    ) -> Tensor:
        groups = experts.groups
        route = experts.route
        up = experts.up
        trained = any(ctx.needs_input_grad[4:])
        x = x.contiguous()
        token = None
        row = None
        if route is not None:
            token = route.token
            row = route.row
        rows = Matrices(x, groups, source=token)
        fp8_x, _ = cast_blocks(rows, transpose=trained and route is None)
        count_blocks_if_observed(up.observer_x, rows, groups, fp8_x)
        saved_x = None
        if trained:
            saved_x = fp8_x.transposed if route is None else x
        ctx.groups = groups
        ctx.passed = passed
        ctx.at = up.at
        ctx.count = len(weights)
        to_cast_again = weights if up.fp8_weights.transposed is None else ()
        ctx.save_for_backward(
            saved_x,
            fp8_x.transposed_inv,
            token,
            row,
            up.fp8_weights.transposed,
            up.fp8_weights.scale_inv,
            *to_cast_again,
        )
        return block_rows_times(fp8_x, up.fp8_weights, groups, bias, backward=False, dtype=x.dtype)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dtype = grads[0].dtype
        groups = ctx.groups
        x, x_inverse, token, row, w_transposed, scale_inv, *weights = ctx.saved_tensors
        # _Down's backward has written the gradient of gate_up in FP8; what autograd passes on has no data.
        passed = ctx.passed.take()
        fp8_dy = passed.of_gate_up
        dx = None
        if ctx.needs_input_grad[0]:
            b = _transposed_weights(w_transposed, scale_inv, ctx.at, weights)
            dx = block_rows_times(fp8_dy, b, groups, backward=True, dtype=dtype)
            if row is not None:
                dx = total(dx, row, None)
            del b
        dbias = passed.sums
        fp8_dy = fp8_dy._replace(data=None)  # before the larger gradients of weights
        del passed
        dweights: Sequence[Tensor | None] = [None] * ctx.count
        if x is not None:
            fp8_x = _transposed_rows(x, x_inverse, groups, token)
            dweights = block_weights_from(fp8_dy, fp8_x, groups, dtype).unbind()
        return dx, dbias, None, None, *dweights


class _Down(torch.autograd.Function):
    """From the output of the first projection to tokens."""

    @staticmethod
    def forward(
        ctx: Context,
        gate_up: Tensor,
        gates: Tensor | None,
        bias: Tensor | None,
        experts: BlockExperts,
        passed: Passed[BlockGradients],
        trained_up: bool,
        summed_up: bool,
        *weights: Tensor,
    ) -> Tensor:
        groups = experts.groups
        route = experts.route
        activation = experts.activation
        down = experts.down
        # [R, F] in FP8: the activation is never stored in 16 bits.
        fp8_hidden = hidden_blocks(gate_up, groups, activation)
        count_blocks_if_observed(
            down.observer_x, Activated(gate_up, activation), groups, fp8_hidden
        )
        dtype = gate_up.dtype
        out = block_rows_times(
            fp8_hidden, down.fp8_weights, groups, bias, backward=False, dtype=dtype
        )
        ctx.groups = groups
        ctx.activation = activation
        ctx.passed = passed
        ctx.at = down.at
        ctx.up_observer_dy = experts.up.observer_dy
        ctx.down_observer_dy = down.observer_dy
        ctx.count = len(weights)
        ctx.trained = any(ctx.needs_input_grad[7:])
        ctx.trained_up = trained_up
        ctx.summed_up = summed_up
        token = None
        row = None
        routed_out = None  # backward of `gates` reads the experts' outputs
        if route is not None:
            token = route.token
            row = route.row
            routed_out = out
        to_cast_again = weights if down.fp8_weights.transposed is None else ()
        ctx.save_for_backward(
            token,
            row,
            gates,
            gate_up,
            routed_out,
            down.fp8_weights.transposed,
            down.fp8_weights.scale_inv,
            *to_cast_again,
        )
        if route is None:
            return out
        assert gates is not None
        # [R, D] -> [T, D]: each token's sum over its experts, by its gates.
        return total(out, row, gates)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy = grads[0].contiguous()
        groups = ctx.groups
        token, row, gates, gate_up, out, w_transposed, scale_inv, *weights = ctx.saved_tensors
        dtype = dy.dtype
        dgates = None
        if token is None:
            gradient_rows = Matrices(dy, groups)
        else:
            gradient_rows, dgates, _ = rows_of_tokens(
                dy, groups, token=token, row=row, gates=gates, out=out
            )
        fp8_dy, dbias = cast_blocks(
            gradient_rows, transpose=ctx.trained, summed=ctx.needs_input_grad[2]
        )
        count_blocks_if_observed(ctx.down_observer_dy, gradient_rows, groups, fp8_dy)
        b = _transposed_weights(w_transposed, scale_inv, ctx.at, weights)
        dh = block_rows_times(fp8_dy, b, groups, backward=True, dtype=dtype)
        del b
        fp8_dy = fp8_dy._replace(data=None)
        activation_gradients = gradient_blocks(
            dh,
            gate_up,
            groups,
            ctx.activation,
            transpose=ctx.trained_up,
            hidden=ctx.trained,
            summed=ctx.summed_up,
        )
        count_blocks_if_observed(
            ctx.up_observer_dy,
            Activated(gate_up, ctx.activation, dh),
            groups,
            activation_gradients.of_gate_up,
        )
        del dh
        dweights: Sequence[Tensor | None] = [None] * ctx.count
        if ctx.trained:
            dweights = block_weights_from(
                fp8_dy, activation_gradients.hidden, groups, dtype
            ).unbind()
        # The hidden rows have served the weight gradient above, and are freed before _Up runs.
        nothing = Blocks(None, None, None, None)
        passed = ctx.passed.put(activation_gradients._replace(hidden=nothing), gate_up)
        return passed, dgates, dbias, None, None, None, None, *dweights


def in_blocks(
    x: Tensor, groups: Groups, projection: BlockProjection, route: Route | None = None
) -> Tensor:
    """Return the experts' rows of x [R, I] times their weights, plus their biases: [R, O].

    With `route`, x [T, I] are tokens, and their rows are never stored in x's dtype.
    """
    return _Blocks.apply(x, projection.bias, groups, route, projection, *projection.tensors)


def experts_in_blocks(x: Tensor, gates: Tensor | None, experts: BlockExperts) -> Tensor:
    """Return the sum of the experts' outputs by `gates` FP32 [T, k], of tokens x [T, D]: [T, D].

    Without a route x are the experts' rows [R, D], `gates` is None, and so the result is [R, D].
    """
    up = experts.up
    down = experts.down
    passed: Passed[BlockGradients] = Passed()
    gate_up = _Up.apply(x, up.bias, experts, passed, *up.tensors)
    trained = any(weight.requires_grad for weight in up.tensors)
    summed = up.bias is not None and up.bias.requires_grad
    return _Down.apply(gate_up, gates, down.bias, experts, passed, trained, summed, *down.tensors)
