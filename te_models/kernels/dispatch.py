"""The operations between the GEMMs of a model, and the choice of their implementation.

Each operation has a plain version in PyTorch and faster twins. Launching every elementwise operation by itself makes
FP8 slower than compiled BF16 (241 against 229 ms per step at 1B on an H200), so `compile` fuses them with
torch.compile; on a CPU compilation takes longer than a small run. `fused` goes further: attention with RoPE and gate is
one operation (gated_attention.py), te modules hand FP8 to each other (handover.py), and the loss writes its gradient
over the logits (lm_head_triton.py).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from te_models.config.recipe import EngineRecipe
from te_models.device.choice import runs_triton
from te_models.errors import check_known
from te_models.kernels import (
    attention_parts,
    elementwise,
    handover,
    lm_head,
    planned,
)
from te_models.kernels.decode import DecodeKernels
from te_models.kernels.expert_rows import PLAIN as PLAIN_ROWS
from te_models.kernels.expert_rows import RowKernels
from te_models.kernels.from_inputs import from_inputs
from te_models.kernels.gradient_room import without_slot


@dataclass(frozen=True)
class Kernels:
    """One implementation of every operation that is not a GEMM; the defaults are the plain ones.

    Shapes: elementwise.py for rope, gate, cross_entropy and embedding, lm_head.py for loss_and_gradient and multiply,
    handover.py for norm, output_norm, activate, gated_heads, linear, grouped and experts.
    """

    rope: Callable[[Tensor, Tensor, Tensor], Tensor] = elementwise.rope
    gate: Callable[[Tensor, Tensor], Tensor] = elementwise.gate
    softplus_gate: Callable[[Tensor, Tensor], Tensor] = elementwise.softplus_gate
    cross_entropy: Callable[[Tensor, Tensor], Tensor] = elementwise.cross_entropy
    embedding: Callable[[nn.Module, Tensor], Tensor] = elementwise.embedding
    loss_and_gradient: lm_head.LossKernel = lm_head.loss_and_gradient
    multiply: lm_head.Multiply | None = None
    norm: Callable[[nn.Module, Tensor, Tensor | None, nn.Module | None], tuple[Tensor, Tensor]] = (
        handover.norm
    )
    output_norm: Callable[[nn.Module, Tensor], Tensor] = handover.output_norm
    activate: Callable[..., Tensor] = handover.activate
    mlp_activation: Callable[..., Tensor] = elementwise.mlp_activation
    mlp_activation_backward: Callable[..., Tensor] = elementwise.mlp_activation_backward
    clamped_swiglu: Callable[..., Tensor] = elementwise.clamped_swiglu
    clamped_swiglu_backward: Callable[..., Tensor] = elementwise.clamped_swiglu_backward
    limited_swiglu: Callable[..., Tensor] = elementwise.limited_swiglu
    limited_swiglu_backward: Callable[..., Tensor] = elementwise.limited_swiglu_backward
    mixed_parts: Callable[..., tuple[Tensor, ...]] = without_slot(
        from_inputs(elementwise.mixed_parts)
    )
    gated_conv: Callable[..., Tensor] = from_inputs(elementwise.gated_conv)
    channel_gates: Callable[..., tuple[Tensor, Tensor]] = from_inputs(elementwise.channel_gates)
    time_steps: Callable[..., Tensor] = from_inputs(elementwise.time_steps)
    gated_norm: Callable[..., Tensor] = from_inputs(elementwise.gated_norm)
    delta_gates: Callable[..., tuple[Tensor, Tensor]] = from_inputs(elementwise.delta_gates)
    silu_gate: Callable[..., Tensor] = from_inputs(elementwise.silu_gate)
    gated_heads: Callable[..., Tensor] = functools.partial(
        handover.gated_heads, gate=from_inputs(elementwise.silu_gate)
    )
    gated_input: Callable[..., Tensor] = from_inputs(elementwise.gated_input)
    expert_rows: RowKernels = PLAIN_ROWS
    linear: Callable[..., Tensor] = handover.linear
    grouped: Callable[..., Tensor] = handover.grouped
    counts_on_device: Callable[[nn.Module, EngineRecipe | None], bool] = handover.counts_on_device
    # Both projections of all experts, the activation between them, and the factors by which tokens add them up.
    experts: Callable[..., Tensor] | None = None
    experts_join: Callable[..., bool] = handover.experts_join
    targets: Callable[[nn.Module | None, nn.Module | None], handover.CastTargets] = handover.targets
    # None: attention is composed of the operations above.
    attention: attention_parts.Operations | None = None
    # None: a step of decoding runs the modules.
    decode: DecodeKernels | None = None


PLAIN = Kernels()


# The modes of torch.compile by the name that a user gives. max-autotune runs without its own CUDA graphs, which
# cannot be captured in the graph of a whole step (te_models.training.cuda_graph).
COMPILE_MODES = {"default": "default", "max-autotune": "max-autotune-no-cudagraphs"}


def compile_mode(compile: bool | str) -> str | None:
    """Return the name of the mode that `compile` asks for, a bool or one of COMPILE_MODES; None: not compiled."""
    if isinstance(compile, str):
        check_known("compile", compile, COMPILE_MODES)
    if isinstance(compile, str):
        return compile
    if compile:
        return "default"
    return None


def compile_status(mode: str | None, place: str) -> str:
    """Return whether operations are compiled in this mode on this type of device, or why not, in a few words."""
    if mode is None:
        return "off, because compile=False"
    if place != "cuda":
        return f"off, because the model is on {place}"
    return "elementwise operations" + (f", {mode}" if mode != "default" else "")


@functools.cache
def compiled_kernels(mode: str) -> Kernels:
    """Return the plain operations, each compiled to one kernel forward and one backward (torch.compile)."""
    return with_compiler(functools.partial(torch.compile, mode=COMPILE_MODES[mode]))


def with_compiler(fused: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Kernels:
    """Return the plain operations, each as the compiler `fused` makes it."""
    forward = fused(elementwise.mlp_activation)
    backward = fused(elementwise.mlp_activation_backward)
    silu_gate = fused(elementwise.silu_gate)
    return Kernels(
        rope=fused(elementwise.rope),
        gate=fused(elementwise.gate),
        softplus_gate=fused(elementwise.softplus_gate),
        cross_entropy=fused(elementwise.cross_entropy),
        loss_and_gradient=fused(lm_head.loss_and_gradient),
        activate=functools.partial(handover.activate, forward=forward, backward=backward),
        mlp_activation=forward,
        mlp_activation_backward=backward,
        clamped_swiglu=fused(elementwise.clamped_swiglu),
        clamped_swiglu_backward=fused(elementwise.clamped_swiglu_backward),
        limited_swiglu=fused(elementwise.limited_swiglu),
        limited_swiglu_backward=fused(elementwise.limited_swiglu_backward),
        mixed_parts=without_slot(from_inputs(elementwise.mixed_parts, fused)),
        gated_conv=from_inputs(elementwise.gated_conv, fused),
        channel_gates=from_inputs(elementwise.channel_gates, fused),
        time_steps=from_inputs(elementwise.time_steps, fused),
        gated_norm=from_inputs(elementwise.gated_norm, fused),
        delta_gates=fused(elementwise.delta_gates),
        silu_gate=silu_gate,
        gated_heads=functools.partial(handover.gated_heads, gate=silu_gate),
        gated_input=fused(elementwise.gated_input),
    )


def get_kernels(
    te: ModuleType, device: torch.device, *, compile: str | None, fused: bool
) -> Kernels:
    """Return the kernels of a model: compiled in the mode `compile` on a CUDA device, and with `fused` the engine's."""
    # On a CPU compilation takes longer than a small run.
    kernels = compiled_kernels(compile) if compile and device.type == "cuda" else PLAIN
    if not fused:
        return kernels
    operations = fused_operations(device)
    if "mixed_parts" in operations:
        # What these kernels do not compute stays with the compiled or plain operation.
        operations["mixed_parts"] = functools.partial(
            operations["mixed_parts"], kernels.mixed_parts
        )
    return replace(kernels, **operations, **te.handover)


def planned_kernels(te: ModuleType, *, compile: bool, fused: bool) -> Kernels:
    """Return the kernels of a model without data, on meta (te_models.planning.measured)."""
    kernels = with_compiler(planned.opaque) if compile else PLAIN
    if not fused:
        return replace(kernels, **te.unfused)
    return replace(
        kernels,
        attention=planned.ATTENTION,
        expert_rows=planned.ROWS,
        loss_and_gradient=planned.LOSS,
        multiply=planned.MULTIPLY,
        mixed_parts=functools.partial(planned.mixed_parts, kernels.mixed_parts),
        **te.handover,
    )


def fused_operations(device: torch.device) -> dict[str, Any]:
    """Return fields of Kernels, such as attention and the loss, in Triton on a CUDA device and plain on a CPU.

    Empty on GPUs before Ampere, which neither cuDNN's attention nor Triton supports.
    """
    if device.type != "cuda":
        return {"attention": attention_parts.PLAIN}
    if not runs_triton(device):
        return {}
    # Imported here: only CUDA builds of PyTorch come with Triton.
    attention = importlib.import_module("te_models.kernels.gated_attention_triton")
    loss = importlib.import_module("te_models.kernels.lm_head_triton")
    embedding = importlib.import_module("te_models.kernels.embedding_triton")
    rows = importlib.import_module("te_models.kernels.expert_rows_triton")
    convolution = importlib.import_module("te_models.kernels.conv_triton")
    return {
        "attention": attention.TRITON,
        "embedding": embedding.embedding,
        "loss_and_gradient": loss.loss_and_gradient,
        "multiply": loss.multiply,
        "expert_rows": rows.TRITON,
        "mixed_parts": convolution.mixed_parts,
    }
