"""The linears of all experts as one autograd function, with one launch per product, cast and sum of magnitudes.

The numbers equal te.GroupedLinear's, which takes a launch per expert for each of them, and needs to know each
expert's rows on the host.

Shapes: E experts with weights [O, I] each; T tokens; R rows of all experts below each other, one per token and expert
that it goes through; P rows with each expert's begun at a multiple of 128, as in transposed copies (Groups.aligned).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from te_models.device.autograd import Context
from te_models.kernels.count_experts_triton import count_experts
from te_models.kernels.expert_cast_triton import (
    FP8Matrices,
    Matrices,
    cast,
    cast_transposed,
)
from te_models.kernels.expert_rows import Route
from te_models.kernels.expert_scales_triton import Delayed
from te_models.kernels.expert_values_triton import Activated
from te_models.kernels.expert_weights_triton import (
    EqualMatrices,
    cast_equal,
    cast_equal_transposed,
    transposed,
)
from te_models.kernels.grouped_gemm_triton import ExpertMatrices, rows_times, weights_from
from te_models.kernels.groups import Groups
from te_models.kernels.row_sums_triton import sums_of_rows

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2


class CastObserver(Protocol):
    """An observer of a cast of all experts: `counts` is where its counts go, None where it is not counted."""

    @property
    def counts(self) -> Any: ...


def count_if_observed(
    observer: CastObserver | None,
    values: Matrices | Activated,
    groups: Groups,
    quantized: FP8Matrices,
    form: torch.dtype,
) -> None:
    """Count a cast of all experts if an observer wants it; arguments are as in `count_experts`."""
    counts = None if observer is None else observer.counts
    if counts is not None:
        count_experts(values, groups, quantized, form, counts)


class Casts(NamedTuple):
    """How a recipe casts the operands x, weights and dy of the three products, and how precisely those add.

    Attributes:
        gradient: the format of dy; the other operands are E4M3.
        precise_output, precise_input_gradient, precise_weight_gradient: whether the sums of a product are precise
            (`rows_times`).
        delayed_x, delayed_weights, delayed_dy: the scales of each operand under delayed scaling; None under current
            scaling.
        after_backward: called at the end of a backward pass; None: nothing is.
        observer_x, observer_weights, observer_dy: observers that count the casts of a recorded run
            (te_models.recorder.table.ExpertObserver).
    """

    gradient: torch.dtype
    precise_output: bool
    precise_input_gradient: bool
    precise_weight_gradient: bool
    delayed_x: Delayed | None = None
    delayed_weights: Delayed | None = None
    delayed_dy: Delayed | None = None
    after_backward: Callable[[], None] | None = None
    observer_x: CastObserver | None = None
    observer_weights: CastObserver | None = None
    observer_dy: CastObserver | None = None


def on_device(numbers: list[int], device: torch.device) -> Tensor:
    """Return numbers as int64 [len(numbers)] on a device, written by kernels that have them as arguments.

    A copy from the host's memory would wait for the device; in a CUDA graph it would read that memory at each replay.
    """
    out = torch.zeros(len(numbers), dtype=torch.int64, device=device)
    # One launch takes some hundred numbers as its arguments.
    torch._foreach_add_(list(out.unbind()), numbers)
    return out


class Locations(NamedTuple):
    """Where the matrices of experts are in memory.

    Attributes:
        addresses: the address of each.
        places: int64 [E] on the device, the elements between the first matrix and each one (`Matrices.places`).
        together: each begins where the one before it ends.
    """

    addresses: list[int]
    places: Tensor
    together: bool = False

    @classmethod
    def of(cls, tensors: Sequence[Tensor], before: Locations | None = None) -> Locations | None:
        """Return where `tensors` are, which is `before` unless they were moved; None if kernels cannot read them there.

        FSDP2 frees gathered weights after the forward pass, and gathers them elsewhere for the backward pass.
        """
        addresses = [tensor.data_ptr() for tensor in tensors]
        if before is not None and before.addresses == addresses:
            return before
        # Kernels add these to the first address, since Triton passes one pointer.
        distances = [address - addresses[0] for address in addresses]
        # Kernels read 16 bytes at a time.
        if any(distance % 16 for distance in distances):
            return None
        size = tensors[0].element_size()
        places = on_device([distance // size for distance in distances], tensors[0].device)
        bytes_each = tensors[0].numel() * size
        together = distances == [bytes_each * number for number in range(len(distances))]
        return cls(addresses, places, together)

    @property
    def places_if_apart(self) -> Tensor | None:
        """`places`, or None where the matrices are together, for kernels that are faster without it."""
        return None if self.together else self.places

    def in_backward(self, tensors: Sequence[Tensor]) -> Locations:
        """Return where the same tensors are in a backward pass, to which they may have been moved."""
        current = self.of(tensors, self)
        assert current is not None  # memory that PyTorch allocates begins at multiples of 16 bytes
        return current


class Weights(NamedTuple):
    """The experts' weights [O, I], contiguous and of one dtype, and where they are."""

    tensors: Sequence[Tensor]
    at: Locations

    def cast(
        self,
        delayed: Delayed | None = None,
        transpose: bool = True,
        observer: CastObserver | None = None,
    ) -> FP8Matrices:
        """Return the weights in FP8, with `transpose` a transposed copy too; `observer` counts the cast."""
        places = self.at.places
        equal = EqualMatrices(self.tensors[0], places)
        quantized = cast_equal(equal, delayed, transpose=transpose)
        if observer is not None and observer.counts is not None:
            matrices = matrices_of(self.tensors, places)
            count_if_observed(observer, matrices, matrices.groups, quantized, E4M3)
        return quantized


def matrices_of(weights: Sequence[Tensor], places: Tensor) -> Matrices:
    """Return weights as the matrices that `count_experts` counts."""
    return Matrices(
        weights[0], Groups.equal(len(weights), len(weights[0]), weights[0].device), places
    )


class Stored(NamedTuple):
    """The experts' frozen weights [O, I] in E4M3: their bytes, where they are, and FP32 factors [E]."""

    data: Sequence[Tensor]
    at: Locations
    scale_inv: Tensor


class _BF16(torch.autograd.Function):
    """The products of all experts in BF16: x [R, I] times weights [O, I] each is [R, O]."""

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        bias: Tensor | None,
        groups: Groups,
        at: Locations,
        *weights: Tensor,
    ) -> Tensor:
        ctx.groups = groups
        ctx.at = at
        x = x.contiguous()
        ctx.save_for_backward(x if ctx.needs_input_grad[4] else None, *weights)
        b = ExpertMatrices(weights[0], places=at.places_if_apart)
        return rows_times(
            ExpertMatrices(x),
            b,
            groups,
            len(weights[0]),
            bias=bias,
            down=False,
            precise=False,
            dtype=x.dtype,
        )

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy = grads[0].contiguous()
        (x, *weights) = ctx.saved_tensors
        height, width = weights[0].shape
        a = ExpertMatrices(dy)  # [R, O]
        b = ExpertMatrices(weights[0], places=ctx.at.in_backward(weights).places_if_apart)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = rows_times(a, b, ctx.groups, width, down=True, precise=False, dtype=dy.dtype)
        # With frozen weights Transformer Engine computes no gradient of biases either.
        if not ctx.needs_input_grad[4]:
            return dx, None, None, None, *[None] * len(weights)
        # [E, O], from BF16: the bias gradient is not an FP8 product.
        db = sums_of_rows(dy, ctx.groups) if ctx.needs_input_grad[1] else None
        dweights = weights_from(
            a,
            ExpertMatrices(x),
            ctx.groups,
            height,
            width,
            precise=False,
            dtype=dy.dtype,
        )
        return dx, db, None, None, *dweights.unbind()


class _FP8(torch.autograd.Function):
    """The products of all experts in FP8.

    Backward makes the transposed copies that the forward did not: of stored weights from their bytes, of weights in
    high precision by the same cast again, which has the same bits. All layers' copies together would take half as much
    memory as weights in BF16. Rows that a route repeats (each token once per expert) are cast again too.
    """

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        bias: Tensor | None,
        groups: Groups,
        casts: Casts,
        fp8_weights: FP8Matrices | Stored,
        route: Route | None,
        at: Locations,
        *weights: Tensor,
    ) -> Tensor:
        ctx.groups = groups
        ctx.casts = casts
        ctx.at = at
        ctx.inputs = x.shape[1]
        ctx.weights = len(weights)
        trained = any(ctx.needs_input_grad[7:])  # of `weights`
        x = x.contiguous()
        token = None
        row = None
        if route is not None:
            token = route.token
            row = route.row
            ctx.kernels = route.kernels
        # With a route the cast gathers the rows itself, so that they are never in memory in 16 bits.
        rows = Matrices(x, groups, source=token)
        fp8_x = cast(rows, E4M3, casts.delayed_x, transpose=trained and route is None)
        count_if_observed(casts.observer_x, rows, groups, fp8_x, E4M3)
        # Tokens [T, I] where rows repeat them, else the transposed FP8 rows [I, P].
        saved_x = x if trained and route is not None else fp8_x.transposed
        transposed_weights = None
        to_cast_again: tuple[Tensor, ...] = ()
        if isinstance(fp8_weights, Stored):
            # Backward transposes the stored bytes [O, I] of all experts, which are where `places` says.
            ctx.stored = fp8_weights.data
            data = fp8_weights.data[0]
            places = at.places
        else:
            ctx.stored = ()
            data = fp8_weights.data
            places = None
            transposed_weights = fp8_weights.transposed
            # Without a transposed copy backward makes one of the weights by the scales of the forward.
            if transposed_weights is None:
                to_cast_again = (fp8_weights.scale, *weights)
        ctx.save_for_backward(
            saved_x,
            fp8_x.scale_inv,
            fp8_x.scale,
            token,
            row,
            transposed_weights,
            fp8_weights.scale_inv,
            *to_cast_again,
        )
        a = ExpertMatrices(fp8_x.data.view(E4M3), fp8_x.scale_inv)
        b = ExpertMatrices(data.view(E4M3), fp8_weights.scale_inv, places)
        width = len(weights[0] if weights else data)
        return rows_times(
            a, b, groups, width, bias=bias, down=False, precise=casts.precise_output, dtype=x.dtype
        )

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy = grads[0].contiguous()
        groups = ctx.groups
        casts = ctx.casts
        dx = None
        x, x_inverse, x_scale, token, row, w_transposed, w_inverse, *to_cast_again = (
            ctx.saved_tensors
        )
        dy_matrices = Matrices(dy, groups)
        fp8_dy = cast(dy_matrices, casts.gradient, casts.delayed_dy, transpose=x is not None)
        count_if_observed(casts.observer_dy, dy_matrices, groups, fp8_dy, casts.gradient)
        db = sums_of_rows(dy, groups) if ctx.needs_input_grad[1] else None
        if ctx.needs_input_grad[0]:
            if to_cast_again:
                scale, *weights = to_cast_again
                w_matrices = EqualMatrices(weights[0], ctx.at.in_backward(weights).places)
                w_transposed = cast_equal_transposed(w_matrices, scale)
            elif ctx.stored:
                w_transposed = transposed(ctx.stored[0], ctx.at.in_backward(ctx.stored).places)
            a = ExpertMatrices(fp8_dy.data.view(casts.gradient), fp8_dy.scale_inv)
            b = ExpertMatrices(w_transposed.view(E4M3), w_inverse)
            dx = rows_times(
                a,
                b,
                groups,
                ctx.inputs,
                down=False,
                precise=casts.precise_input_gradient,
                dtype=dy.dtype,
            )
            # [P, I]; where rows repeat tokens their gradients are summed: [T, I].
            if row is not None:
                dx = ctx.kernels.total(dx, row, None)
            del w_transposed, a, b  # before the larger gradients of weights
        dweights: Sequence[Tensor | None] = [None] * ctx.weights
        # Kept apart from `fp8_dy`, whose straight copy is freed before the gradients of weights.
        dy_transposed = fp8_dy.transposed
        dy_inverse = fp8_dy.scale_inv
        del fp8_dy
        if x is not None and dy_transposed is not None:
            if token is not None:
                x = cast_transposed(Matrices(x, groups, source=token), E4M3, x_scale)
            a = ExpertMatrices(dy_transposed.view(casts.gradient), dy_inverse)
            b = ExpertMatrices(x.view(E4M3), x_inverse)
            dweights = weights_from(
                a,
                b,
                groups,
                dy.shape[1],
                ctx.inputs,
                precise=casts.precise_weight_gradient,
                dtype=dy.dtype,
            ).unbind()
        if casts.after_backward is not None:
            casts.after_backward()
        return dx, db, None, None, None, None, None, *dweights


def in_bf16(x: Tensor, groups: Groups, weights: Weights, bias: Tensor | None = None) -> Tensor:
    """Return the experts' rows of x [R, I] times their weights, plus their biases [E, O]: [R, O]."""
    return _BF16.apply(x, bias, groups, weights.at, *weights.tensors)


def in_fp8(
    x: Tensor,
    groups: Groups,
    casts: Casts,
    fp8_weights: FP8Matrices | Stored,
    weights: Weights | None = None,
    bias: Tensor | None = None,
    route: Route | None = None,
) -> Tensor:
    """Return `in_bf16` with FP8 weights `fp8_weights`: the casts of `weights`, which get gradients, or frozen ones.

    With `route`, x [T, I] are tokens, and their rows are never stored in x's dtype.
    """
    if isinstance(fp8_weights, Stored):
        return _FP8.apply(x, bias, groups, casts, fp8_weights, route, fp8_weights.at)
    assert weights is not None
    return _FP8.apply(x, bias, groups, casts, fp8_weights, route, weights.at, *weights.tensors)
