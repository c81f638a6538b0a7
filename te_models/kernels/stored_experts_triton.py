"""The linears of experts whose weights stay as a release stores them: some experts' are dequantized at a time.

The numbers equal grouped_linear_triton's of the dequantized weights. Neither their values nor their FP8 outlive a
product: backward makes them again, with the scales of the forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from te_models.config.chunk_sizes import experts_at_a_time
from te_models.device.autograd import Context
from te_models.kernels.expert_cast_triton import (
    Matrices,
    cast,
)
from te_models.kernels.expert_rows import Route
from te_models.kernels.expert_scales_triton import Delayed
from te_models.kernels.expert_weights_triton import EqualMatrices, cast_equal, cast_equal_transposed
from te_models.kernels.grouped_gemm_triton import ExpertMatrices, rows_times
from te_models.kernels.grouped_linear_triton import E4M3, Casts
from te_models.kernels.groups import Groups
from te_models.kernels.row_sums_triton import sums_of_rows
from te_models.numerics.stored import StoredRows, joined


class Chunk(NamedTuple):
    """Some experts, from `start` to `stop`, whose values are there at one time."""

    start: int
    stop: int
    groups: Groups

    @property
    def experts(self) -> slice:
        """Their places among all experts."""
        return slice(self.start, self.stop)


class StoredExperts(NamedTuple):
    """The experts' frozen weights [O, I], and the dtype of their values."""

    weights: Sequence[StoredRows]
    dtype: torch.dtype

    @property
    def sizes(self) -> tuple[int, int]:
        """O and I."""
        outputs, inputs = self.weights[0].shape
        return outputs, inputs

    def chunks(self, groups: Groups) -> Iterator[Chunk]:
        """Yield all experts, some at a time."""
        outputs, inputs = self.sizes
        count = experts_at_a_time(len(self.weights), outputs, inputs, self.dtype.itemsize)
        for start in range(0, len(self.weights), count):
            stop = min(start + count, len(self.weights))
            yield Chunk(start, stop, groups.part(start, stop))

    def values(self, chunk: Chunk) -> Tensor:
        """Return the values of some experts, one below the other: [n * O, I]."""
        return joined(self.weights[chunk.experts]).dequantize(self.dtype)

    def matrices(self, chunk: Chunk) -> EqualMatrices:
        """Return the values of some experts as the operand of a cast."""
        outputs, inputs = self.sizes
        values = self.values(chunk)
        count = chunk.stop - chunk.start
        # Casts read experts through places, as addresses may lie anywhere; here they follow each other.
        places = torch.arange(count, device=values.device) * (outputs * inputs)
        return EqualMatrices(values[:outputs], places)


class _BF16(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, x: Tensor, bias: Tensor | None, groups: Groups, stored: StoredExperts
    ) -> Tensor:
        ctx.groups = groups
        ctx.stored = stored
        x = x.contiguous()
        outputs, _ = stored.sizes
        out = torch.empty(groups.most, outputs, dtype=x.dtype, device=x.device)
        for chunk in stored.chunks(groups):
            rows_times(
                ExpertMatrices(x),
                ExpertMatrices(stored.values(chunk)),
                chunk.groups,
                outputs,
                None if bias is None else bias[chunk.experts],
                down=False,
                precise=False,
                dtype=x.dtype,
                out=out,
            )
        return out

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy = grads[0].contiguous()
        groups: Groups = ctx.groups
        stored: StoredExperts = ctx.stored
        _, inputs = stored.sizes
        dx = torch.empty(groups.most, inputs, dtype=dy.dtype, device=dy.device)
        for chunk in stored.chunks(groups):
            rows_times(
                ExpertMatrices(dy),
                ExpertMatrices(stored.values(chunk)),
                chunk.groups,
                inputs,
                down=True,
                precise=False,
                dtype=dy.dtype,
                out=dx,
            )
        return dx, None, None, None


class _FP8(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        bias: Tensor | None,
        groups: Groups,
        casts: Casts,
        stored: StoredExperts,
        route: Route | None,
    ) -> Tensor:
        ctx.groups = groups
        ctx.casts = casts
        ctx.stored = stored
        x = x.contiguous()
        token, row, ctx.kernels = (None, None, None) if route is None else route
        # Frozen weights need no transposed rows: there is no weight gradient.
        fp8_x = cast(Matrices(x, groups, source=token), E4M3, casts.delayed_x, transpose=False)
        outputs, _ = stored.sizes
        out = torch.empty(groups.most, outputs, dtype=x.dtype, device=x.device)
        scales = []  # of the weights, from values to data
        inverses = []
        for chunk in stored.chunks(groups):
            delayed = casts.delayed_weights
            if delayed is not None:
                # Views, so that the cast raises the amaxes of these experts in place.
                delayed = Delayed(delayed.scale[chunk.experts], delayed.amax[chunk.experts])
            weights = cast_equal(stored.matrices(chunk), delayed, transpose=False)
            rows_times(
                ExpertMatrices(fp8_x.data.view(E4M3), fp8_x.scale_inv[chunk.experts]),
                ExpertMatrices(weights.data.view(E4M3), weights.scale_inv),
                chunk.groups,
                outputs,
                None if bias is None else bias[chunk.experts],
                down=False,
                precise=casts.precise_output,
                dtype=x.dtype,
                out=out,
            )
            # Backward repeats the cast by these: delayed scaling's own ones may have moved on by then.
            scales.append(weights.scale)
            inverses.append(weights.scale_inv)
        ctx.save_for_backward(row, torch.cat(scales), torch.cat(inverses))
        return out

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy = grads[0].contiguous()
        groups: Groups = ctx.groups
        casts: Casts = ctx.casts
        stored: StoredExperts = ctx.stored
        row, scales, inverses = ctx.saved_tensors
        _, inputs = stored.sizes
        db = sums_of_rows(dy, groups) if ctx.needs_input_grad[1] else None
        fp8_dy = cast(Matrices(dy, groups), casts.gradient, casts.delayed_dy, transpose=False)
        dx = torch.empty(groups.most, inputs, dtype=dy.dtype, device=dy.device)
        for chunk in stored.chunks(groups):
            # dx = dy W contracts over O, and FP8 products only over the last dimension of both.
            transposed_weights = cast_equal_transposed(
                stored.matrices(chunk), scales[chunk.experts]
            )
            rows_times(
                ExpertMatrices(fp8_dy.data.view(casts.gradient), fp8_dy.scale_inv[chunk.experts]),
                ExpertMatrices(transposed_weights.view(E4M3), inverses[chunk.experts]),
                chunk.groups,
                inputs,
                down=False,
                precise=casts.precise_input_gradient,
                dtype=dy.dtype,
                out=dx,
            )
        if row is not None:
            # [R, I] -> [T, I]: the gradient of a token is the sum over its experts' rows.
            dx = ctx.kernels.total(dx, row, None)
        if casts.after_backward is not None:
            casts.after_backward()
        return dx, db, None, None, None, None


def stored_in_bf16(
    x: Tensor, groups: Groups, stored: StoredExperts, bias: Tensor | None = None
) -> Tensor:
    """Return the experts' rows of x [R, I] times their weights, plus their biases [E, O]: [R, O]."""
    return _BF16.apply(x, bias, groups, stored)


def stored_in_fp8(
    x: Tensor,
    groups: Groups,
    casts: Casts,
    stored: StoredExperts,
    bias: Tensor | None = None,
    route: Route | None = None,
) -> Tensor:
    """Return the same with the casts of a recipe; with `route`, x [T, I] are tokens, whose rows are never stored."""
    return _FP8.apply(x, bias, groups, casts, stored, route)
