"""The MLP, built only from te.Linear. Shapes: te_models/model/block.py."""

from __future__ import annotations

from torch import Tensor

from te_models.config.mlp import HANDED_OVER, MLPSpec
from te_models.kernels import handover
from te_models.kernels.decode import StepActivation, StepNorm
from te_models.model.forward_context import ForwardContext
from te_models.model.part import Feedforward
from te_models.model.te_modules import Factory


class MLP(Feedforward[MLPSpec]):
    """down_proj(act(gate) * up) with gate and up from one GEMM (Shazeer 2020, arXiv 2002.05202), or down_proj(act(up)).

    te_models.config.mlp has the rows of `gate_up_proj.weight`.
    """

    entry = "gate_up_proj"

    def __init__(self, spec: MLPSpec, layer: int, factory: Factory) -> None:
        super().__init__(spec, layer, factory)
        into, out = spec.linears
        self.gate_up_proj = factory.linear(into)
        self.down_proj = factory.linear(out)

    def hidden(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return the input of down_proj [N, F] from x [N, D]."""
        spec = self.spec
        gate_up = context.linear(self.gate_up_proj, x)  # [N, 2F], or [N, F] without a gate
        # The linears that FP8 comes from and goes to, where a kernel may hand it over.
        producer = context.neighbour(self.gate_up_proj)
        consumer = context.neighbour(self.down_proj)
        # No field that the kernels for a plain SwiGLU, or another activation alone, do not support.
        if not spec.obstacles:
            return context.kernels.activate(gate_up, producer, consumer, spec.activation, spec.gate)
        kernels = context.kernels
        limit = spec.limit
        if limit is not None:
            return handover.swiglu(
                gate_up,
                producer,
                consumer,
                lambda both: kernels.limited_swiglu(both, limit),
                lambda dy, both: kernels.limited_swiglu_backward(dy, both, limit),
            )

        factor = 1.0 if spec.multipliers is None else spec.multipliers[0]

        def forward(gate_up: Tensor) -> Tensor:
            hidden = kernels.mlp_activation(gate_up, spec.activation, spec.gate, factor)
            # act(bias) need not be zero, and a row of padding that is not would enter the amax of down_proj's input.
            return context.without_padding(hidden) if spec.bias else hidden

        def backward(dy: Tensor, gate_up: Tensor) -> Tensor:
            if spec.bias:
                dy = context.without_padding(dy)
            return kernels.mlp_activation_backward(dy, gate_up, spec.activation, spec.gate, factor)

        return handover.swiglu(gate_up, producer, consumer, forward, backward)

    def step(
        self, norm: StepNorm, x: Tensor, context: ForwardContext, factor: float
    ) -> Tensor | None:
        """Return x + factor * part(norm(x)) [N, D]; see te_models.model.part.BlockPart.step."""
        spec = self.spec
        into = context.linear_of_step(self.gate_up_proj)
        out = context.linear_of_step(self.down_proj)
        kernels = context.step
        has_kernel = (
            spec.activation in HANDED_OVER and spec.limit is None and spec.multipliers is None
        )
        # None: the block runs the modules instead.
        if not has_kernel or into is None or out is None or kernels is None:
            return None
        activation = StepActivation(spec.activation, spec.gate)
        hidden = kernels.product(x, into, context.batch, norm=norm, activation=activation)
        return kernels.product(hidden, out, context.batch, residual=x, factor=factor)

    def output(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """Return [N, D] from `hidden` [N, F]."""
        with context.recompute.discarding(hidden, context.autocasts.in_fp8(self.down_proj)):
            out = context.linear(self.down_proj, hidden)
        if self.spec.multipliers is not None:
            out = out * self.spec.multipliers[1]
        return context.without_padding(out) if self.spec.bias else out
