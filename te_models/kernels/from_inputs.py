"""Operations that store only their inputs for backward, which computes them a second time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from te_models.device.autograd import Context

Result = Tensor | tuple[Tensor, ...]


class _FromInputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        forward: Callable[..., Result],
        backward: Callable[..., Result],
        *inputs: Tensor | None,
    ) -> Result:
        ctx.backward = backward
        ctx.save_for_backward(*inputs)
        return forward(*inputs)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        computed = iter(ctx.backward(ctx.saved_tensors, needed, grads))
        # Autograd wants a gradient, or None, for each argument of `forward`, in its order.
        gradients = []
        for need in needed:
            gradients.append(next(computed) if need else None)
        return None, None, *gradients


def gradients(
    function: Callable[..., Result],
    inputs: Sequence[Tensor | None],
    needed: Sequence[bool],
    grads: tuple[Tensor, ...],
    **options: object,
) -> tuple[Tensor, ...]:
    """Return the gradients of the `inputs` of the function that are `needed`, from the gradients of its outputs."""

    def of_needed(*leaves: Tensor) -> Result:
        needed_leaves = iter(leaves)
        arguments: list[Tensor | None] = []
        for x, need in zip(inputs, needed, strict=True):
            arguments.append(next(needed_leaves) if need else x)
        return function(*arguments, **options)

    # vjp differentiates by all of its arguments, so the others are bound outside of it.
    leaves = [x for x, need in zip(inputs, needed, strict=True) if need]
    outputs, pull, *_ = torch.func.vjp(of_needed, *leaves)
    return pull(grads if isinstance(outputs, tuple) else grads[0], retain_graph=False)


def from_inputs(
    function: Callable[..., Result],
    compiler: Callable[[Callable[..., Result]], Callable[..., Result]] = lambda f: f,
) -> Callable[..., Any]:
    """Return the function, whose backward then needs nothing but its inputs; those are tensors or None.

    Options are given by name, and are not differentiated. `compiler` compiles the forward and the backward, each by
    itself: torch.compile chooses which tensors to store between them where it sees both.

    In a graph that torch.compile or torch.export traces, the compiler chooses which tensors to store.
    """
    backward = functools.partial(compiler(gradients), function)
    # A partial, so that a model with these kernels can be pickled.
    return functools.partial(_call, compiler(function), backward)


def _call(
    forward: Callable[..., Result],
    backward: Callable[..., Result],
    *inputs: Tensor | None,
    **options: Any,
) -> Result:
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return forward(*inputs, **options)
    passes = functools.partial(forward, **options), functools.partial(backward, **options)
    return _FromInputs.apply(*passes, *inputs)
