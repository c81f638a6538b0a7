"""The MLP of a block: SwiGLU between two te.Linear. Shapes: te_models/model/block.py."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import Tensor, nn

from te_models.config.model import ModelConfig
from te_models.model.forward_context import ForwardContext
from te_models.model.te_modules import linear
from te_models.model.tensor_parallel import TensorParallel


class SwiGLU(nn.Module):
    """down_proj(silu(gate) * up) with gate and up from one GEMM (Shazeer 2020, arXiv 2002.05202).

    The rows of `gate_up_proj.weight` are those of te_models.config.layout.
    """

    def __init__(self, config: ModelConfig, te: ModuleType, tp: TensorParallel, **factory: Any) -> None:
        super().__init__()
        self.config = config
        d, f = config.hidden_size, tp.size * config.intermediate_size
        self.gate_up_proj = linear(te, d, 2 * f, split=tp.linear("column"), **factory)
        self.down_proj = linear(te, f, d, split=tp.linear("row"), **factory)

    def hidden(self, x: Tensor, context: ForwardContext) -> Tensor:
        """x [N, D] -> the input of down_proj [N, F]."""
        gate_up = context.linear(self.gate_up_proj, x)
        return context.kernels.swiglu(gate_up, self.gate_up_proj, self.down_proj)

    def output(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """hidden [N, F] -> [N, D]. Apart from `hidden`, since recompute may discard what lies between."""
        with context.recompute.discarding(hidden):
            return context.linear(self.down_proj, hidden)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """x [N, D] -> [N, D]."""
        return self.output(self.hidden(x, context), context)
