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
from te_models.kernels.expert_blocks_triton import (
    Blocks,
    WeightBlocks,
    block_rows_times,
    block_weights_from,
    cast_blocks,
    cast_weight_blocks,
    gradient_blocks,
    hidden_blocks,
)
from te_models.kernels.expert_cast_triton import Matrices
from te_models.kernels.expert_hidden_triton import Activation
from te_models.kernels.expert_rows import Route
from te_models.kernels.expert_rows_triton import dots, total
from te_models.kernels.grouped_linear_triton import Locations
from te_models.kernels.groups import Groups


class BlockProjection(NamedTuple):
    """One of the linears of all experts: its weights in FP8, which get gradients in the dtype of `tensors`."""

    own: WeightBlocks
    at: Locations
    tensors: Sequence[Tensor]
    bias: Tensor | None = None  # [E, O]


class BlockExperts(NamedTuple):
    """The MLP of all experts. With `route` None the rows of the experts are given, and returned."""

    groups: Groups
    route: Route | None
    activation: Activation
    up: BlockProjection
    down: BlockProjection


def _turned(
    own: Tensor | None, scale_inv: Tensor, at: Locations, weights: Sequence[Tensor]
) -> WeightBlocks:
    """Return transposed weights in backward, cast again where the forward made none."""
    if own is not None:
        return WeightBlocks(None, own, scale_inv)
    return cast_weight_blocks(weights[0], at.again(weights), straight=False)


def _again(x: Tensor, groups: Groups, token: Tensor | None) -> Blocks:
    """Return transposed rows of x in backward."""
    return cast_blocks(Matrices(x, groups, source=token), straight=False)[0]


class _Blocks(torch.autograd.Function):
    """Saves x in high precision, as Transformer Engine's transposed copy has scales of its own."""

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, bias: Tensor | None, groups: Groups, route: Route | None, own: WeightBlocks,
        at: Locations, *weights: Tensor,
    ) -> Tensor:  # fmt: skip
        x = x.contiguous()
        token, row, ctx.kernels = (None, None, None) if route is None else route
        ctx.groups = groups
        ctx.at = at
        trained = any(ctx.needs_input_grad[6:])
        turn = trained and route is None
        given, _ = cast_blocks(Matrices(x, groups, source=token), turn=turn)
        kept = (x if route is not None else given.transposed) if trained else None
        again = weights if own.transposed is None else ()
        ctx.save_for_backward(
            kept, given.turned_inv, token, row, own.transposed, own.scale_inv, *again
        )
        ctx.count = len(weights)
        return block_rows_times(given, own, groups, bias, backward=False, dtype=x.dtype)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy = grads[0].contiguous()
        groups = ctx.groups
        x, x_inverse, token, row, turned, scale_inv, *weights = ctx.saved_tensors
        slopes, db = cast_blocks(
            Matrices(dy, groups), turn=x is not None, summed=ctx.needs_input_grad[1]
        )
        dx = None
        if ctx.needs_input_grad[0]:
            b = _turned(turned, scale_inv, ctx.at, weights)
            dx = block_rows_times(slopes, b, groups, backward=True, dtype=dy.dtype)
            dx = dx if row is None else ctx.kernels.total(dx, row, None)
            del b
        of_weights: Sequence[Tensor | None] = [None] * ctx.count
        if x is not None:
            given = Blocks(None, None, x, x_inverse) if token is None else _again(x, groups, token)
            of_weights = block_weights_from(slopes, given, groups, dy.dtype).unbind()
        return dx, db, None, None, None, None, *of_weights


class _BlockExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, x: Tensor, gates: Tensor | None, bias_up: Tensor | None, bias_down: Tensor | None,
        how: BlockExperts, *weights: Tensor,
    ) -> Tensor:  # fmt: skip
        groups, route, activation, up, down = how
        first = 5
        ctx.count = len(up.tensors)
        between = first + ctx.count
        ctx.trained = [
            any(ctx.needs_input_grad[first:between]),
            any(ctx.needs_input_grad[between:]),
        ]
        x = x.contiguous()
        token, row = (None, None) if route is None else (route.token, route.row)
        turn = ctx.trained[0] and route is None
        given, _ = cast_blocks(Matrices(x, groups, source=token), turn=turn)
        gate_up = block_rows_times(given, up.own, groups, bias_up, backward=False, dtype=x.dtype)
        hidden = hidden_blocks(gate_up, groups, activation)
        out = block_rows_times(hidden, down.own, groups, bias_down, backward=False, dtype=x.dtype)
        kept = (x if route is not None else given.transposed) if ctx.trained[0] else None
        ctx.groups = groups
        ctx.activation = activation
        ctx.at = [up.at, down.at]
        again = [side.tensors if side.own.transposed is None else () for side in (up, down)]
        ctx.middle = len(again[0])
        ctx.save_for_backward(
            kept, given.turned_inv, token, row, gates, gate_up, None if route is None else out,
            up.own.transposed, up.own.scale_inv, down.own.transposed, down.own.scale_inv, *again[0], *again[1],
        )  # fmt: skip
        if route is None:
            return out
        assert gates is not None
        return total(out, row, gates)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy = grads[0].contiguous()
        groups = ctx.groups
        x, x_inverse, token, row, gates, gate_up, out, up_turned, up_inverse, down_turned, down_inverse, *weights = (
            ctx.saved_tensors
        )  # fmt: skip
        dtype = dy.dtype
        dgates = None
        given = Matrices(dy, groups)
        if token is not None:
            dgates, _ = dots(dy, out, row)
            factor = gates.new_zeros(len(out) + 1).scatter(0, row.flatten(), gates.flatten())[:-1]
            given = Matrices(dy, groups, source=token, factor=factor)
        del out
        trained_up, trained_down = ctx.trained
        slopes, of_bias_down = cast_blocks(given, turn=trained_down, summed=ctx.needs_input_grad[3])
        b = _turned(down_turned, down_inverse, ctx.at[1], weights[ctx.middle :])
        dh = block_rows_times(slopes, b, groups, backward=True, dtype=dtype)
        del b
        found = gradient_blocks(
            dh, gate_up, groups, ctx.activation, turn=trained_up, hidden=trained_down,
            summed=ctx.needs_input_grad[2],
        )  # fmt: skip
        del dh
        of_down: Sequence[Tensor | None] = [None] * (len(ctx.needs_input_grad) - 5 - ctx.count)
        if trained_down:
            of_down = block_weights_from(slopes, found.hidden, groups, dtype).unbind()
        of_gate_up = found.of_gate_up
        of_bias_up = found.sums
        del slopes, found
        dx = None
        if ctx.needs_input_grad[0]:
            b = _turned(up_turned, up_inverse, ctx.at[0], weights[: ctx.middle])
            dx = block_rows_times(of_gate_up, b, groups, backward=True, dtype=dtype)
            dx = dx if row is None else total(dx, row, None)
            del b
        of_up: Sequence[Tensor | None] = [None] * ctx.count
        if trained_up:
            rows = Blocks(None, None, x, x_inverse) if token is None else _again(x, groups, token)
            of_up = block_weights_from(of_gate_up, rows, groups, dtype).unbind()
        return dx, dgates, of_bias_up, of_bias_down, None, *of_up, *of_down


def in_blocks(
    x: Tensor, groups: Groups, projection: BlockProjection, route: Route | None = None
) -> Tensor:
    """Return the experts' rows of x [R, I] times their weights, plus their biases: [R, O].

    With `route`, x [T, I] are tokens, and their rows are never stored in x's dtype.
    """
    own, at, tensors, bias = projection
    return _Blocks.apply(x, bias, groups, route, own, at, *tensors)


def experts_in_blocks(x: Tensor, gates: Tensor | None, how: BlockExperts) -> Tensor:
    """Return the sum of the experts' outputs by `gates` FP32 [T, k], of tokens x [T, D]: [T, D].

    Without a route x are the experts' rows [R, D], `gates` is None, and so the result is [R, D].
    """
    weights = (*how.up.tensors, *how.down.tensors)
    return _BlockExperts.apply(x, gates, how.up.bias, how.down.bias, how, *weights)
