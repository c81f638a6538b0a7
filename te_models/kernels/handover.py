"""From one te module to the next: the plain functions, which pass BF16 on.

A te.Linear casts its input to FP8 by itself: a pass over a BF16 tensor that the operation before it has just written; and
so does its backward with the gradient of its output. An engine's `handover` holds twins under these names that write FP8
directly, with the te.Linear's own scale and into its own amax; Transformer Engine's are in engine/native.py. They differ
from the functions here by one rounding to BF16 that they do not make.

`producer` is the te.Linear whose output is read, `consumer` the one whose input is made.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from te_models.kernels.elementwise import swiglu as silu_times_up


def norm(module: nn.Module, x: Tensor, delta: Tensor | None, consumer: nn.Module) -> tuple[Tensor, Tensor]:
    """x + delta [N, D] (None: x) through a te.RMSNorm; and x + delta, the residual stream.

    Use the returned sum: a twin adds both of its gradients in one kernel.
    """
    total = x if delta is None else x + delta
    return module(total), total


def swiglu(gate_up: Tensor, producer: nn.Module, consumer: nn.Module) -> Tensor:
    """silu(gate) * up of gate_up [N, 2F] = [gate | up]."""
    return silu_times_up(gate_up)


def linear(module: nn.Module, x: Tensor, **options: Any) -> Tensor:
    """module(x) for an x made for it, of which a twin then keeps only what backward needs."""
    return module(x, **options)


def targets(producer: nn.Module, consumer: nn.Module) -> tuple[Any, Any]:
    """Where attention_core may write FP8: the gradient for `producer`, the input for `consumer`; None: it may not."""
    return None, None
