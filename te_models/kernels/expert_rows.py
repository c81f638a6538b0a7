"""Rows of tokens to the experts and back, as autograd functions over two plain operations.

Shapes: T tokens, k experts per token, R rows of all experts together, padding included, D hidden_size. `token`, int64
[R], is the token of each row, T for a row of padding, T + 1 behind the last expert's rows; `row`, int64 [T, k], are the
rows of each token, R for a token of padding. Sums run over j = 0 to k - 1 in FP32, without fused multiply-add, and are
rounded once.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from te_models.device.autograd import Context
from te_models.kernels.groups import Groups


class RowKernels(NamedTuple):
    """The operations: `gather` and `total`, see the plain functions below.

    `choose` and `places` are twins of parts of te_models.model.router, or None (te_models.kernels.router_triton).
    """

    gather: Callable[[Tensor, Tensor, Tensor | None, Tensor | None], tuple[Tensor, Tensor | None]]
    total: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    choose: Callable[[Tensor, int, Tensor | None], Tensor] | None = None
    places: Callable[[Tensor, int, int, int], tuple[Tensor, Tensor, Groups, Tensor]] | None = None


def gather(
    x: Tensor, token: Tensor, factor: Tensor | None = None, other: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the row of x [T, D] of each `token`, by FP32 `factor` [R] if there is one: [R, D], zeros for padding.

    Behind the last expert's rows a twin may leave anything.

    With `other` [R, D] also the product of each of its rows with the row of x, FP32 [R].
    """
    rows = _with_zeros(x).index_select(0, token.clamp(max=len(x)))
    dots = None if other is None else (other.float() * rows.float()).sum(1)
    if factor is not None:
        rows = (rows.float() * factor[:, None]).to(x.dtype)
    return rows, dots


def total(rows: Tensor, row: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the sum of each token's rows of `rows` [R, D], by FP32 `weights` [T, k] if there are any: [T, D]."""
    padded = _with_zeros(rows)
    # Summed in FP32 and rounded once, as the kernel does.
    sums = torch.zeros(len(row), rows.shape[1], device=rows.device)
    # One of the k rows of each token at a time: [T, k, D] in FP32 would be k times the tokens.
    for j in range(row.shape[1]):
        part = padded.index_select(0, row[:, j]).float()  # [T, D]
        sums += part if weights is None else part * weights[:, j, None]
    return sums.to(rows.dtype)


def _with_zeros(x: Tensor) -> Tensor:
    """Return x [n, D] with a row of zeros, to which the places of padding point."""
    return torch.cat((x, x.new_zeros(1, x.shape[1])))


PLAIN = RowKernels(gather=gather, total=total)


class Route(NamedTuple):
    """Where the rows of all experts come from and go, and what moves them."""

    token: Tensor
    row: Tensor
    kernels: RowKernels = PLAIN


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, token: Tensor, row: Tensor, kernels: RowKernels) -> Tensor:
        ctx.kernels = kernels
        ctx.save_for_backward(row)
        return kernels.gather(x.contiguous(), token, None, None)[0]

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        (row,) = ctx.saved_tensors
        # A token has been copied to k rows, so its gradient is the sum of theirs.
        return ctx.kernels.total(dy.contiguous(), row, None), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, rows: Tensor, weights: Tensor, token: Tensor, row: Tensor, kernels: RowKernels
    ) -> Tensor:
        ctx.kernels = kernels
        ctx.save_for_backward(rows, weights, token, row)
        return kernels.total(rows.contiguous(), row, weights)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        rows, weights, token, row = ctx.saved_tensors
        # [R]: the weight of each row. Padding points to one row more, which is cut off.
        factor = weights.new_zeros(len(rows) + 1).scatter(0, row.flatten(), weights.flatten())[:-1]
        drows, dots = ctx.kernels.gather(dy.contiguous(), token, factor, rows.contiguous())
        assert dots is not None
        # [T, k]: the weight of a row has the product of the row with dy for its gradient; padding has 0.
        dweights = torch.cat((dots, dots.new_zeros(1)))[row]
        return drows, dweights, None, None, None


def dispatch(x: Tensor, token: Tensor, row: Tensor, kernels: RowKernels = PLAIN) -> Tensor:
    """Return the rows of all experts [R, D] of tokens x [T, D]; rows of padding are zeros."""
    return _Dispatch.apply(x, token, row, kernels)


def combine(
    rows: Tensor, weights: Tensor, token: Tensor, row: Tensor, kernels: RowKernels = PLAIN
) -> Tensor:
    """Return the sum of each token's rows [R, D] by its FP32 weights [T, k]: [T, D], zeros for padding."""
    return _Combine.apply(rows, weights, token, row, kernels)
