"""The linears of all experts as one autograd function, with one launch per product, cast and sum of magnitudes.

The numbers are those of te.GroupedLinear, which takes a launch per expert for each of them, and needs to know each
expert's rows on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from te_models.device.autograd import Context
from te_models.kernels.expert_cast_triton import FP8Matrices, Matrices, cast, transposed
from te_models.kernels.grouped_gemm_triton import Operand, rows_times, weights_from
from te_models.kernels.groups import Groups

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Casts(NamedTuple):
    """How current scaling casts and multiplies: the format of gradients, and which of the sums are precise."""

    gradient: torch.dtype
    output: bool
    input_gradient: bool
    weight_gradient: bool


class Weights(NamedTuple):
    """The experts' weights [O, I], contiguous and of one dtype, and where they are (`Matrices.places`)."""

    tensors: Sequence[Tensor]
    places: Tensor

    def cast(self) -> FP8Matrices:
        """Return them in FP8."""
        first = self.tensors[0]
        groups = Groups.equal(len(self.tensors), len(first), first.device)
        return cast(Matrices(first, groups, self.places), E4M3)


class Stored(NamedTuple):
    """The experts' frozen weights [O, I] in E4M3: the bytes of the first, where all are, and FP32 factors [E]."""

    data: Tensor
    places: Tensor
    scale_inv: Tensor


class _BF16(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, groups: Groups, places: Tensor, *weights: Tensor) -> Tensor:
        ctx.groups, x = groups, x.contiguous()
        ctx.save_for_backward(x if ctx.needs_input_grad[3] else None, places, *weights)
        b = Operand(weights[0], places=places)
        return rows_times(Operand(x), b, groups, len(weights[0]), down=False, precise=False, dtype=x.dtype)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy, (x, places, *weights) = grads[0].contiguous(), ctx.saved_tensors
        (height, width), how = weights[0].shape, dict(precise=False, dtype=dy.dtype)
        a, b = Operand(dy), Operand(weights[0], places=places)
        dx = rows_times(a, b, ctx.groups, width, down=True, **how) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[3]:
            return dx, None, None, *[None] * len(weights)
        return dx, None, None, *weights_from(a, Operand(x), ctx.groups, height, width, **how).unbind()


class _FP8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, groups: Groups, casts: Casts, own: FP8Matrices, *weights: Tensor) -> Tensor:
        ctx.groups, ctx.casts, ctx.shape, ctx.count = groups, casts, weights[0].shape, len(weights)
        given = cast(Matrices(x.contiguous(), groups), E4M3)
        ctx.save_for_backward(
            given.transposed if ctx.needs_input_grad[4] else None, given.scale_inv, own.transposed, own.scale_inv
        )
        a, b = (Operand(one.data.view(E4M3), one.scale_inv) for one in (given, own))
        return rows_times(a, b, groups, len(weights[0]), down=False, precise=casts.output, dtype=x.dtype)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy, groups, casts = grads[0].contiguous(), ctx.groups, ctx.casts
        x, x_scale, weights, weights_scale = ctx.saved_tensors
        given, (height, width), dx = cast(Matrices(dy, groups), casts.gradient), ctx.shape, None
        if ctx.needs_input_grad[0]:
            a = Operand(given.data.view(casts.gradient), given.scale_inv)
            b = Operand(weights.view(E4M3), weights_scale)
            dx = rows_times(a, b, groups, width, down=False, precise=casts.input_gradient, dtype=dy.dtype)
        if not ctx.needs_input_grad[4]:
            return dx, None, None, None, *[None] * ctx.count
        a, b = Operand(given.transposed.view(casts.gradient), given.scale_inv), Operand(x.view(E4M3), x_scale)
        how = dict(precise=casts.weight_gradient, dtype=dy.dtype)
        return dx, None, None, None, *weights_from(a, b, groups, height, width, **how).unbind()


class _Stored(torch.autograd.Function):
    """Backward makes the transposed copies of the weights again, which would take as much memory as they do."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, groups: Groups, casts: Casts, stored: Stored) -> Tensor:
        ctx.groups, ctx.casts = groups, casts
        ctx.save_for_backward(stored.data, stored.places, stored.scale_inv)
        given = cast(Matrices(x.contiguous(), groups), E4M3)
        a, b = (
            Operand(given.data.view(E4M3), given.scale_inv),
            Operand(stored.data.view(E4M3), stored.scale_inv, stored.places),
        )
        return rows_times(a, b, groups, len(stored.data), down=False, precise=casts.output, dtype=x.dtype)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy, groups, casts = grads[0].contiguous(), ctx.groups, ctx.casts
        data, places, scale_inv = ctx.saved_tensors
        given = cast(Matrices(dy, groups), casts.gradient)
        a = Operand(given.data.view(casts.gradient), given.scale_inv)
        b = Operand(transposed(data, places).view(E4M3), scale_inv)
        how = dict(precise=casts.input_gradient, dtype=dy.dtype)
        return rows_times(a, b, groups, data.shape[1], down=False, **how), None, None, None


def in_bf16(x: Tensor, groups: Groups, weights: Weights) -> Tensor:
    """Return the experts' rows of x [R, I] times their weights: [R, O]."""
    return _BF16.apply(x, groups, weights.places, *weights.tensors)


def in_fp8(x: Tensor, groups: Groups, weights: Weights, casts: Casts, own: FP8Matrices) -> Tensor:
    """Return the same under current scaling, with the weights in FP8 too, `own`."""
    return _FP8.apply(x, groups, casts, own, *weights.tensors)


def in_stored_fp8(x: Tensor, groups: Groups, stored: Stored, casts: Casts) -> Tensor:
    """Return the same under current scaling with frozen weights that are in FP8 already."""
    return _Stored.apply(x, groups, casts, stored)
