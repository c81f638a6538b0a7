"""Operations that store only their inputs for backward, which computes them a second time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from te_models.device.autograd import Context

Result = Tensor | tuple[Tensor, ...]


class _FromInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, function: Callable[..., Result], *inputs: Tensor | None) -> Result:
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        inputs = [x if x is None else x.detach() for x in ctx.saved_tensors]
        leaves = [x.requires_grad_() for x, need in zip(inputs, needed, strict=True) if x is not None and need]
        with torch.enable_grad():
            outputs = ctx.function(*inputs)
        found = iter(torch.autograd.grad(outputs, leaves, grads))
        return None, *(next(found) if need else None for need in needed)


def from_inputs(function: Callable[..., Result]) -> Callable[..., Any]:
    """Return the function, whose backward then needs nothing but its inputs; those are tensors or None.

    Options are given by name, and are not differentiated.

    In a graph that torch.compile or torch.export traces, the compiler chooses what is stored.
    """
    return functools.partial(_call, function)  # which a model with these kernels can be pickled with


def _call(function: Callable[..., Result], *inputs: Tensor | None, **options: Any) -> Result:
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return function(*inputs, **options)
    return _FromInputs.apply(functools.partial(function, **options), *inputs)
