"""The operations round the GEMMs: plain PyTorch functions, and their fast twins for a GPU.

Launching each elementwise operation by itself makes FP8 slower than compiled BF16 (241 against 229 ms a step at 1B on
an H200), so a GPU gets the compiled twins by default; on a CPU there is nothing to win and compilation takes longer
than a small run. `fused` goes further: attention with all that lies round it is one operation
(kernels/gated_attention.py), te modules hand each other FP8 (kernels/handover.py), and the head's loss writes its gradient
over the logits (kernels/lm_head_triton.py).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from te_models.kernels import elementwise, gated_attention, handover, lm_head


class Kernels(NamedTuple):
    """One implementation of every operation that is not a GEMM.

    Signatures: kernels/elementwise.py for rope, gate and cross_entropy, kernels/lm_head.py for loss_and_gradient and multiply, and
    kernels/handover.py for norm, swiglu, linear and targets. `attention` None: attention is put together from the others.
    """

    rope: Callable[..., Tensor]
    gate: Callable[..., Tensor]
    cross_entropy: Callable[..., Tensor]
    loss_and_gradient: Callable[..., Any]
    multiply: lm_head.Multiply | None = None
    norm: Callable[..., tuple[Tensor, Tensor]] = handover.norm
    swiglu: Callable[..., Tensor] = handover.swiglu
    linear: Callable[..., Tensor] = handover.linear
    targets: Callable[..., tuple[Any, Any]] = handover.targets
    attention: gated_attention.Operations | None = None
    embedding: Callable[..., Tensor] = elementwise.embedding


PLAIN = Kernels(elementwise.rope, elementwise.gate, elementwise.cross_entropy, lm_head.loss_and_gradient)


@functools.cache
def compiled_kernels() -> Kernels:
    """The same operations, each one fused kernel forward and one backward (torch.compile)."""
    both = dict(forward=torch.compile(elementwise.swiglu), backward=torch.compile(elementwise.swiglu_backward))
    rope, gate, cross_entropy, loss_and_gradient = (torch.compile(fn) for fn in PLAIN[:4])
    return Kernels(rope, gate, cross_entropy, loss_and_gradient, swiglu=functools.partial(handover.swiglu, **both))


def get_kernels(te: ModuleType, device: torch.device, *, compile: bool, fused: bool) -> Kernels:
    """What a model runs with: compiled on a CUDA device if asked for; `fused` adds what the engine `te` has beyond that."""
    kernels = compiled_kernels() if compile and device.type == "cuda" else PLAIN
    if not fused:
        return kernels
    return kernels._replace(**fused_operations(device), **te.handover)


def fused_operations(device: torch.device) -> dict[str, Any]:
    """Fields of Kernels: attention_core's elementwise parts, the head's loss and the embedding, in Triton on a CUDA device.

    On a CPU attention_core's plain parts; nothing on GPUs before Ampere, for which neither cuDNN's attention nor Triton is.
    """
    if device.type != "cuda":
        return {"attention": gated_attention.PLAIN}
    if torch.cuda.get_device_capability(device) < (8, 0):
        return {}
    core, loss, embedding = (
        importlib.import_module(f"te_models.kernels.{name}_triton")
        for name in ("gated_attention", "lm_head", "embedding")
    )  # Triton comes with CUDA builds
    found = dict(loss_and_gradient=loss.loss_and_gradient, multiply=loss.multiply)
    return dict(attention=core.TRITON, embedding=embedding.embedding, **found)
