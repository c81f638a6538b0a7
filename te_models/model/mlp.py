"""The MLP, built only from te.Linear. Shapes: te_models/model/block.py."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import Tensor, nn

from te_models.config.layout import gate_up_sections
from te_models.config.model import ModelConfig
from te_models.kernels import handover
from te_models.model.forward_context import ForwardContext
from te_models.model.te_modules import linear
from te_models.model.tensor_parallel import TensorParallel


class MLP(nn.Module):
    """down_proj(act(gate) * up) with gate and up from one GEMM (Shazeer 2020, arXiv 2002.05202), or down_proj(act(up)).

    The rows of `gate_up_proj.weight` are those of te_models.config.layout.
    """

    def __init__(self, config: ModelConfig, te: ModuleType, tp: TensorParallel, **factory: Any) -> None:
        super().__init__()
        self.config = config
        d, f, bias = config.hidden_size, tp.size * config.intermediate_size, config.mlp_bias
        rows = len(gate_up_sections(config)) * f
        self.gate_up_proj = linear(te, d, rows, bias=bias, split=tp.linear("column"), **factory)
        self.down_proj = linear(te, f, d, bias=bias, split=tp.linear("row"), **factory)

    def hidden(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return the input of down_proj [N, F] from x [N, D]."""
        gate_up = context.linear(self.gate_up_proj, x)
        if not self.config.mlp_obstacles:
            return context.kernels.swiglu(gate_up, self.gate_up_proj, self.down_proj)
        kernels, how = context.kernels, (self.config.hidden_act, self.config.mlp_gate)

        def forward(gate_up: Tensor) -> Tensor:
            hidden = kernels.mlp_activation(gate_up, *how)
            return context.without_padding(hidden) if self.config.mlp_bias else hidden

        def backward(dy: Tensor, gate_up: Tensor) -> Tensor:
            dy = context.without_padding(dy) if self.config.mlp_bias else dy
            return kernels.mlp_activation_backward(dy, gate_up, *how)

        return handover.swiglu(gate_up, self.gate_up_proj, self.down_proj, forward, backward)

    def output(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """Return [N, D] from `hidden` [N, F]. Separate, since recompute may discard the tensor between them."""
        with context.recompute.discarding(hidden):
            out = context.linear(self.down_proj, hidden)
        return context.without_padding(out) if self.config.mlp_bias else out

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return the MLP of x [N, D]: [N, D]."""
        return self.output(self.hidden(x, context), context)
