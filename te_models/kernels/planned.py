"""Twins of the compiled and fused operations for the meta device, which allocate and save as much and compute nothing.

The memory plan runs a model with them. A compiled operation saves the inputs that its backward needs, and allocates its
results (`opaque`). The twins of Triton kernels allocate what the functions that launch those kernels do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from te_models.device.allocations import counted_as, results_of
from te_models.device.autograd import Context
from te_models.device.operations import count_flops
from te_models.kernels import lm_head
from te_models.kernels.attention_parts import (
    FP8Operations,
    Norm,
    Operations,
    Rotation,
    adjacent_channels,
)
from te_models.kernels.expert_rows import RowKernels
from te_models.kernels.gradient_room import Slot, empty
from te_models.kernels.groups import Groups
from te_models.kernels.sdpa import attention_flops


class FP8Memory(NamedTuple):
    """A matrix in FP8 as a Triton kernel writes it (te_models.kernels.fp8_tiles_triton.FP8Data)."""

    data: Tensor | None
    transposed: Tensor
    scale_inv: Tensor


def new_fp8(rows: int, columns: int, device: torch.device) -> Any:
    """Return room for a matrix in FP8 and its transposed copy."""
    data = torch.empty(rows, columns, dtype=torch.uint8, device=device)
    transposed = torch.empty(columns, rows, dtype=torch.uint8, device=device)
    scale_inv = torch.empty(1, dtype=torch.float32, device=device)
    return FP8Memory(data, transposed, scale_inv)


class _Opaque(torch.autograd.Function):
    """An operation that keeps only inputs, and whose temporaries are registers."""

    @staticmethod
    def forward(
        ctx: Context, function: Callable[..., Any], saved: tuple[bool, ...], *inputs: Any
    ) -> Any:
        tensors = [x for x, is_saved in zip(inputs, saved, strict=True) if is_saved]
        ctx.save_for_backward(*tensors)
        ctx.sizes = []  # (shape, dtype) of each input; None for one that is no tensor
        for x in inputs:
            ctx.sizes.append((x.shape, x.dtype) if isinstance(x, Tensor) else None)
        return results_of(function)(*inputs)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradients = []
        for size, needs_gradient in zip(ctx.sizes, ctx.needs_input_grad[2:], strict=True):
            gradient = None
            if needs_gradient and size is not None:
                shape, dtype = size
                gradient = torch.empty(shape, dtype=dtype, device="meta")
            gradients.append(gradient)
        return None, None, *gradients


def opaque(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as torch.compile makes it: one kernel forward and one backward."""

    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        tracked = any(isinstance(x, Tensor) and x.requires_grad for x in leaves)
        if not (tracked and torch.is_grad_enabled()):
            return results_of(function)(*args, **kwargs)

        # Autograd sees only tensors that are arguments themselves, not those in dicts and tuples.
        def function_of_leaves(*leaves: Any) -> Any:
            args, kwargs = tree_unflatten(list(leaves), structure)
            return function(*args, **kwargs)

        saved = _read_in_backward(function_of_leaves, leaves)
        return _Opaque.apply(function_of_leaves, saved, *leaves)

    return call


def _read_in_backward(function: Callable[..., Any], leaves: list[Any]) -> tuple[bool, ...]:
    """Return for each leaf whether backward reads it: whether autograd saves it, or could need it for an intermediate.

    Where autograd saves an intermediate result, the compiler computes it again in backward, from the inputs that have
    gradients.
    """
    with counted_as(None), torch.enable_grad():
        inputs: list[Any] = []
        numbers = {}  # the address of an input's storage -> its number
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                # Detached, so that the graph below begins here.
                leaf = leaf.detach().requires_grad_(leaf.requires_grad)
                numbers[leaf.untyped_storage()._cdata] = number
            inputs.append(leaf)
        saved: set[int] = set()
        # Storages that are freed could have their addresses used again.
        alive = []
        saves_intermediate = False

        def pack(tensor: Tensor) -> None:
            nonlocal saves_intermediate
            alive.append(tensor)
            number = numbers.get(tensor.untyped_storage()._cdata)
            if number is None:
                saves_intermediate = True
            else:
                saved.add(number)

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda nothing: nothing):
            alive += tree_leaves(function(*inputs))
        alive.clear()  # the graph of the results holds `pack`, and that the list
    if saves_intermediate:
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                saved.add(number)
    return tuple(number in saved for number in range(len(leaves)))


# Attention as one operation: the wrappers of gated_attention_triton.py, gate_triton.py, rotate_fp8_triton.py,
# gate_fp8_triton.py and head_norm_backward_fp8_triton.py. Each returns empty tensors of the kernel's shapes and dtypes.


def _rotate(x: Tensor, out: Tensor, rotation: Rotation, inverse: bool) -> None:
    """Write into memory that is there."""


def _norm(x: Tensor, norm: Norm, rotation: Rotation | None) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _norm_backward(
    dy: Tensor, x: Tensor, norm: Norm, rotation: Rotation | None, dx: Tensor
) -> Tensor:
    return torch.empty(norm.weight.shape, dtype=torch.float32, device=x.device)


def _copy(x: Tensor, out: Tensor) -> None:
    """Write into memory that is there."""


def _gate(x: Tensor, logits: Tensor, softplus: bool) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _gate_backward(
    dy: Tensor, x: Tensor, logits: Tensor, dlogits: Tensor, softplus: bool
) -> Tensor:
    return torch.empty(dy.shape, dtype=dy.dtype, device=dy.device)


def _write_fp8(*_: Any, counts: None = None) -> None:
    """Write into memory that is there."""


def _norm_backward_fp8(
    out: FP8Memory,
    place: Any,
    first: int,
    dy: Tensor,
    x: Tensor,
    norm: Norm,
    rotation: Any,
    counts: None = None,
) -> Tensor:
    return torch.empty(norm.weight.shape, dtype=torch.float32, device=x.device)


def _gate_backward_fp8(
    out: FP8Memory,
    place: Any,
    first: int,
    dy: Tensor,
    x: Tensor,
    logits: Tensor,
    softplus: bool,
    counts: None = None,
) -> Tensor:
    return torch.empty(dy.shape, dtype=dy.dtype, device=dy.device)


class SpanMemory(NamedTuple):
    """Attention in spans of keys: span_attention_triton.Spans."""

    window: int | None

    def kernel_for(self, q: Tensor, sinks: Tensor | None, cap: float | None) -> str:
        """Return ours: the others keep as much."""
        return "ours"

    def forward(self, q: Tensor, *_: Any) -> tuple[Tensor, ...]:
        """Return the output [B, N, S, H], and the FP32 logarithms of the sums [B, N, S]."""
        count_flops(q, attention_flops(q, q, q))
        out = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format)
        log_sum = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        return out.transpose(1, 2), log_sum

    def backward(
        self,
        dy: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        *_: Any,
        sinks: Tensor | None = None,
        **__: Any,
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k, v and sinks; one FP32 number per query and head is a temporary."""
        grads = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v)]
        torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        return *grads, None if sinks is None else torch.empty_like(sinks)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None = None,
        sinks: Tensor | None = None,
        cap: float | None = None,
    ) -> Tensor:
        """Return the output, differentiable."""
        return _Spans.apply(q, k, v, sinks, self)


class _Spans(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, spans: SpanMemory
    ) -> Tensor:
        q, k, v = map(adjacent_channels, (q, k, v))
        out, log_sum = spans.forward(q)
        ctx.spans = spans
        ctx.save_for_backward(q, k, v, out, sinks, log_sum)
        return out

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        q, k, v, out, sinks, _ = ctx.saved_tensors
        return *ctx.spans.backward(dy, q, k, v, out, sinks=sinks), None


def _spans(seq: int, window: int | None, documents: Tensor | None, device: torch.device) -> Any:
    return SpanMemory(window)


ATTENTION = Operations(
    rotate=_rotate,
    norm=_norm,
    norm_backward=_norm_backward,
    copy=_copy,
    gate=_gate,
    gate_backward=_gate_backward,
    fp8=FP8Operations(
        new=new_fp8,
        gate=_write_fp8,
        rotate=_write_fp8,
        norm_backward=_norm_backward_fp8,
        gate_backward=_gate_backward_fp8,
    ),
    spans=_spans,
)


# The loss: lm_head_triton.py writes its gradient over the logits.


def _loss_and_gradient(
    logits: Tensor, targets: Tensor, count: Tensor, gradient: bool
) -> tuple[Tensor, Tensor | None]:
    loss = torch.empty((), dtype=torch.float32, device=logits.device)
    return loss, logits if gradient else None


def _multiply(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply in place."""


# Rows of experts: expert_rows_triton.py and router_triton.py. Experts share the rows evenly.


def _gather(
    x: Tensor, token: Tensor, factor: Tensor | None = None, other: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    rows = torch.empty(len(token), x.shape[1], dtype=x.dtype, device=x.device)
    if other is None:
        return rows, None
    return rows, torch.empty(len(token), dtype=torch.float32, device=x.device)


def _total(rows: Tensor, row: Tensor, weights: Tensor | None = None) -> Tensor:
    return torch.empty(len(row), rows.shape[1], dtype=rows.dtype, device=rows.device)


def _choose(scores: Tensor, k: int, real: Tensor | None) -> Tensor:
    return torch.empty(len(scores), k, dtype=torch.int64, device=scores.device)


def _places(
    chosen: Tensor, experts: int, alignment: int, most: int
) -> tuple[Tensor, Tensor, Groups, Tensor]:
    def numbers(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.int64, device=chosen.device)

    rows = Groups(numbers(experts + 1), most)
    return numbers(most), numbers(*chosen.shape), rows, numbers(experts)


ROWS = RowKernels(gather=_gather, total=_total, choose=_choose, places=_places)
LOSS: lm_head.LossKernel = _loss_and_gradient
MULTIPLY: lm_head.Multiply = _multiply
__all__ = ["ATTENTION", "LOSS", "MULTIPLY", "ROWS", "FP8Memory", "new_fp8", "opaque"]


class _MixedParts(torch.autograd.Function):
    """The twin of te_models.kernels.conv_triton._MixedParts."""

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        taps: Tensor,
        documents: Tensor | None,
        bias: Tensor | None,
        sizes: tuple[int, ...],
        slot: Slot | None,
    ) -> tuple[Tensor, ...]:
        ctx.slot = slot
        ctx.save_for_backward(x, taps, documents, bias)
        return tuple(x.new_empty(*x.shape[:2], size) for size in sizes)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, taps, _, bias = ctx.saved_tensors
        dbias = None if bias is None else torch.empty_like(bias)
        return empty(ctx.slot, x), torch.empty_like(taps), None, dbias, None, None


def mixed_parts(
    plain: Callable[..., tuple[Tensor, ...]],
    x: Tensor,
    tail: Tensor | None,
    taps: Tensor,
    documents: Tensor | None,
    bias: Tensor | None = None,
    *,
    sizes: tuple[int, ...],
    activation: str,
    slot: Slot | None = None,
) -> tuple[Tensor, ...]:
    """Do what te_models.kernels.conv_triton.mixed_parts does, without data."""
    if tail is not None or activation != "silu" or x.dtype.itemsize != 2:
        return plain(x, tail, taps, documents, bias, sizes=sizes, activation=activation)
    count_flops(x, 2.0 * x.numel() * taps.shape[2])
    return _MixedParts.apply(x, taps, documents, bias, tuple(sizes), slot)
