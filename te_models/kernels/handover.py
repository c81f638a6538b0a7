"""From one te module to the next: the plain functions, which pass BF16 on.

A te.Linear casts its input to FP8 by itself: a pass over a BF16 tensor that the operation before it has just written. An
engine's `handover` holds twins under these names that write the FP8 of the next te.Linear directly, with its own scale and
into its own amax; Transformer Engine's are in engine/native.py. They differ from the functions here by one rounding to
BF16 that they do not make.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from te_models.kernels.elementwise import swiglu as silu_times_up


def norm(module: nn.Module, x: Tensor, consumer: nn.Module) -> tuple[Tensor, Tensor]:
    """The input of the te.Linear `consumer`: x [N, D] through a te.RMSNorm; and x again, for the residual stream.

    Use the returned x: a twin adds both gradients of x in one kernel.
    """
    return module(x), x


def swiglu(gate_up: Tensor, consumer: nn.Module) -> Tensor:
    """The input of the te.Linear `consumer`: silu(gate) * up of gate_up [N, 2F] = [gate | up]."""
    return silu_times_up(gate_up)


def linear(module: nn.Module, x: Tensor, **options: Any) -> Tensor:
    """module(x) for x from `norm` or `swiglu`, of which a twin then keeps only what backward needs."""
    return module(x, **options)
