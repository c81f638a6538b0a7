"""The hand-over of activations from one te module to the next: the plain functions, which pass on BF16.

A te.Linear casts its input to FP8 by itself, in a pass over a BF16 tensor that the operation before it has just
written; its backward does the same with the gradient of its output. An engine's `handover` contains twins under these
names that write FP8 directly, with the te.Linear's own scale and amax (engine/native_handover.py). The only difference
is one rounding to BF16, which the twins leave out.

`producer` is the te.Linear whose output is read, `consumer` the one whose input is made; None stands for one that
takes plain tensors, since it runs in another precision than its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from te_models.config.recipe import EngineRecipe
from te_models.device.autograd import Context
from te_models.kernels.early_save import save_early, save_input, saved_input
from te_models.kernels.elementwise import (
    mlp_activation,
    mlp_activation_backward,
    silu_gate,
    swiglu_backward,
)
from te_models.kernels.elementwise import swiglu as silu_times_up
from te_models.kernels.expert_rows import Route, dispatch
from te_models.kernels.gradient_room import Slot
from te_models.kernels.groups import Groups

if TYPE_CHECKING:
    from te_models.kernels.count_cast_triton import Counts
    from te_models.kernels.fp8_tiles_triton import FP8Data


def norm(
    module: nn.Module, x: Tensor, delta: Tensor | None, consumer: nn.Module | None
) -> tuple[Tensor, Tensor]:
    """Return a te.RMSNorm of x + delta [N, D] (None: of x), and x + delta, the residual stream.

    With `consumer` None other modules read the norm too. Use the returned sum: a twin adds both of its gradients in
    one kernel.
    """
    total = x if delta is None else x + delta
    return module(total), total


Operation = Callable[..., Tensor]


def _itself(function: Operation) -> Operation:
    return function


class _SwiGLU(torch.autograd.Function):
    """SwiGLU from two functions, whose input is saved early (te_models/kernels/early_save.py)."""

    @staticmethod
    def forward(ctx: Context, gate_up: Tensor, forward: Operation, backward: Operation) -> Tensor:
        save_input(ctx, gate_up, recompute=partial(_itself, forward))
        ctx.make_gradient = backward
        return forward(gate_up)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        return ctx.make_gradient(dy, saved_input(ctx)), None, None


def swiglu(
    gate_up: Tensor,
    producer: nn.Module | None,
    consumer: nn.Module | None,
    forward: Operation = silu_times_up,
    backward: Operation = swiglu_backward,
) -> Tensor:
    """Return silu(gate) * up of gate_up [N, 2F] = [gate | up], which is saved for backward first.

    In a graph that torch.compile or torch.export traces, the compiler chooses what is saved.
    """
    # Without a backward there is nothing to save early.
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return forward(gate_up)
    return _SwiGLU.apply(save_early(gate_up), forward, backward)


def activate(
    gate_up: Tensor,
    producer: nn.Module | None,
    consumer: nn.Module | None,
    activation: str = "silu",
    gated: bool = True,
    forward: Callable[[Tensor, str, bool], Tensor] = mlp_activation,
    backward: Callable[[Tensor, Tensor, str, bool], Tensor] = mlp_activation_backward,
) -> Tensor:
    """Return act(gate) * up of gate_up [N, 2F] = [gate | up], or act of [N, F] if not `gated`: [N, F].

    `activation` is one of elementwise.ACTIVATIONS; a twin knows the ones in te_models.config.mlp.HANDED_OVER.
    """
    return swiglu(
        gate_up,
        producer,
        consumer,
        lambda x: forward(x, activation, gated),
        lambda dy, x: backward(dy, x, activation, gated),
    )


def gated_heads(
    module: nn.Module,
    x: Tensor,
    z: Tensor,
    consumer: nn.Module | None,
    slot: Slot | None = None,
    gate: Callable[[Tensor, Tensor], Tensor] = silu_gate,
) -> Tensor:
    """Return a te.RMSNorm of each head of x [T, heads, d], times silu(z), z [T, heads * d]: [T, heads * d].

    `slot` is where a twin writes the gradient of z.
    """
    return gate(module(x.flatten(0, 1)).view(x.shape[0], -1), z)


def linear(module: nn.Module, x: Tensor, **options: bool | None) -> Tensor:
    """Return module(x) [N, O], for an x [N, I] that nothing else uses: a twin may free what backward does not need.

    The option `is_first_microbatch` is Transformer Engine's.
    """
    return module(x, **options)


def grouped(
    module: nn.Module,
    x: Tensor,
    rows: list[int] | Groups,
    is_first_microbatch: bool | None = None,
    route: Route | None = None,
) -> Tensor:
    """Return a te.GroupedLinear of x [R, I], whose experts have these numbers of rows: [R, O].

    With `route`, x [T, I] are tokens, and those rows are made from them; a twin need not store them.
    """
    if route is not None:
        x = dispatch(x, *route)
    return module(x, rows, is_first_microbatch=is_first_microbatch)


def counts_on_device(module: nn.Module, te_recipe: EngineRecipe | None) -> bool:
    """Return whether `grouped` takes the numbers of rows as `Groups` under a recipe, None for BF16."""
    return False


def experts_join(*modules: nn.Module) -> bool:
    """Return whether `Kernels.experts` takes the two te.GroupedLinears of experts together, where the pass is now.

    te_models.model.forward_context.ForwardContext.experts describes its arguments.
    """
    return False


class CastScale(NamedTuple):
    """The scale of a cast, and the amax of its values: FP32 [1] each, on the device."""

    scale: Tensor
    amax: Tensor  # raised to the largest magnitude of the tensor
    e5m2: bool  # the format: E5M2, else E4M3


class CastTarget(Protocol):
    """Where a kernel may write FP8 for a te.Linear (te_models.engine.native_handover.QuantizerTarget)."""

    @property
    def cast_scale(self) -> CastScale:
        """The scale to cast with."""
        ...

    @property
    def counts(self) -> Counts | None:
        """Where the kernel counts what it casts; None where nothing is recorded."""
        ...

    def tensor(self, fp8: FP8Data, dtype: torch.dtype) -> Tensor:
        """Return FP8 data [N, K] as a tensor that the te.Linear takes, with the nominal `dtype`."""
        ...


CastTargets = tuple[CastTarget | None, CastTarget | None]


def targets(producer: nn.Module | None, consumer: nn.Module | None) -> CastTargets:
    """Return where attention may write FP8: the gradient for `producer` and the input for `consumer`, or None."""
    return None, None
