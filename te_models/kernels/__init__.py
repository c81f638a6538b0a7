"""The operations between the GEMMs: plain PyTorch functions, and the same compiled for a GPU.

Launching each elementwise operation by itself makes FP8 slower than compiled BF16 (241 against 229 ms a step at 1B on
an H200), so a GPU gets the compiled twins by default; on a CPU there is nothing to win and compilation takes longer
than a small run.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from te_models.kernels import attention_core, elementwise, head


class Kernels(NamedTuple):
    """One implementation of every operation between the GEMMs; signatures as in kernels/elementwise.py and kernels/head.py."""

    rope: Callable[..., torch.Tensor]
    gate: Callable[..., torch.Tensor]
    swiglu: Callable[..., torch.Tensor]
    cross_entropy: Callable[..., torch.Tensor]
    loss_and_gradient: Callable[..., Any]


PLAIN = Kernels(
    elementwise.rope, elementwise.gate, elementwise.swiglu, elementwise.cross_entropy, head.loss_and_gradient
)


@functools.cache
def compiled_kernels() -> Kernels:
    """The same operations, each one fused kernel forward and one backward (torch.compile)."""
    return Kernels(*(torch.compile(fn) for fn in PLAIN))


def get_kernels(compile: bool, device: torch.device) -> Kernels:
    """The compiled operations on a CUDA device if asked for, else the plain ones."""
    return compiled_kernels() if compile and device.type == "cuda" else PLAIN


def attention_operations(device: torch.device) -> attention_core.Operations:
    """The elementwise parts of attention_core: in Triton on a CUDA device, else plain PyTorch."""
    if device.type != "cuda":
        return attention_core.PLAIN
    return importlib.import_module("te_models.kernels.attention_core_triton").TRITON  # Triton comes with CUDA builds
