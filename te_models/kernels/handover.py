"""The hand-over of activations from one te module to the next: the plain functions, which pass on BF16.

A te.Linear casts its input to FP8 by itself, in a separate pass over the BF16 tensor that the previous operation has
just written; its backward does the same with the gradient of its output. An engine's `handover` has a twin of each
function below, under the same name, that writes FP8 directly, with the te.Linear's own scale and amax
(engine/native_handover.py). The only difference is one rounding to BF16, which the twins leave out.

In all functions `producer` is the te.Linear whose output is read, and `consumer` the te.Linear whose input is written.
None in its place means that this te.Linear takes plain tensors, since it runs in another precision than its neighbours.
The plain functions ignore both. Shapes: N tokens, D hidden size, F width of the MLP.
"""

from __future__ import annotations

from collections.abc import Callable
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
    """Add `delta` to the residual stream x, both [N, D], and return (module(x + delta), x + delta).

    Without `delta` the sum is x. The caller goes on with the returned sum, not with its own: the twin's backward adds
    the gradients of the norm and of the residual stream in one kernel.

    With `consumer` None the output stays in BF16, as where several modules read it.
    """
    total = x if delta is None else x + delta
    return module(total), total


def output_norm(module: nn.Module, x: Tensor) -> Tensor:
    """Return module(x), the norm of a part's output x [N, D] before it is added to the residual stream."""
    return module(x)


Operation = Callable[..., Tensor]


class _SwiGLU(torch.autograd.Function):
    """SwiGLU by a forward and a backward function; its input is saved early (te_models/kernels/early_save.py)."""

    @staticmethod
    def forward(ctx: Context, gate_up: Tensor, forward: Operation, backward: Operation) -> Tensor:
        save_input(ctx, gate_up, recompute=lambda: forward)
        ctx.make_gradient = backward
        return forward(gate_up)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        dgate_up = ctx.make_gradient(dy, saved_input(ctx))
        return dgate_up, None, None


def swiglu(
    gate_up: Tensor,
    producer: nn.Module | None,
    consumer: nn.Module | None,
    forward: Operation = silu_times_up,
    backward: Operation = swiglu_backward,
) -> Tensor:
    """Return silu(gate) * up, [N, F], of gate_up = [gate | up], [N, 2F].

    gate_up is saved for backward before the product is computed. In a graph that torch.compile or torch.export traces,
    the compiler chooses the tensors to save.

    Args:
        gate_up: the input.
        producer, consumer: as in all functions here.
        forward: computes the result from gate_up.
        backward: computes the gradient of gate_up from the gradient of the result and gate_up.
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
    """Return act(gate) * up, [N, F], of gate_up = [gate | up], [N, 2F]; if not `gated`, act(gate_up) of [N, F].

    `activation` is one of elementwise.ACTIVATIONS; twins support only those in te_models.config.mlp.HANDED_OVER.
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
    """Return norm(x) * silu(z), [T, heads * d], of x [T, heads, d] and z [T, heads * d]; the te.RMSNorm is per head.

    `slot` is where a twin's backward writes the gradient of z.
    """
    return gate(module(x.flatten(0, 1)).view(x.shape[0], -1), z)


def linear(module: nn.Module, x: Tensor, **options: bool | None) -> Tensor:
    """Return module(x), [N, out], of x [N, in] that nothing else uses: a twin frees x if backward does not need it.

    The option `is_first_microbatch` is Transformer Engine's: True quantizes the weight and keeps the copy, False reuses
    that copy.
    """
    return module(x, **options)


def grouped(
    module: nn.Module,
    x: Tensor,
    rows: list[int] | Groups,
    is_first_microbatch: bool | None = None,
    route: Route | None = None,
) -> Tensor:
    """Return a te.GroupedLinear of x [R, in], whose rows are sorted by expert: [R, out].

    Args:
        module: the te.GroupedLinear.
        x: the rows of all experts; with `route` the tokens [T, in], of which the rows are copies. A twin need not
            store those copies.
        rows: the number of rows per expert.
        is_first_microbatch: as in `linear`.
        route: how tokens become rows.
    """
    if route is not None:
        x = dispatch(x, route.token, route.row, route.kernels)
    return module(x, rows, is_first_microbatch=is_first_microbatch)


def counts_on_device(module: nn.Module, te_recipe: EngineRecipe | None) -> bool:
    """Return whether `grouped` takes the rows per expert as `Groups`, on the device; the recipe None means BF16."""
    return False


def experts_join(*modules: nn.Module) -> bool:
    """Return whether `Kernels.experts` may run both te.GroupedLinears of an MLP as one operation in this pass.

    `modules` are those two; te_models.model.forward_context.ForwardContext.experts describes the operation.
    """
    return False


class CastScale(NamedTuple):
    """The scale of a cast to FP8, and where its amax goes.

    Attributes:
        scale: FP32 [1] on the device; the kernel multiplies by it.
        amax: FP32 [1] on the device; the kernel raises it to the largest magnitude that it casts.
        e5m2: whether the format is E5M2; else it is E4M3.
    """

    scale: Tensor
    amax: Tensor
    e5m2: bool


class CastTarget(Protocol):
    """Where a kernel may write FP8 for a te.Linear (te_models.engine.native_targets.QuantizerTarget)."""

    @property
    def cast_scale(self) -> CastScale:
        """The scale to cast with."""
        ...

    @property
    def counts(self) -> Counts | None:
        """Where the kernel counts what it casts; None where nothing is recorded."""
        ...

    def tensor(self, fp8: FP8Data, dtype: torch.dtype) -> Tensor:
        """Wrap FP8 data [N, K] in the quantized tensor that the te.Linear takes, with the nominal `dtype`."""
        ...


CastTargets = tuple[CastTarget | None, CastTarget | None]


def targets(producer: nn.Module | None, consumer: nn.Module | None) -> CastTargets:
    """Return where attention may write FP8: its gradient for `producer`, and its output for `consumer`.

    Each is None where attention writes BF16.
    """
    return None, None
