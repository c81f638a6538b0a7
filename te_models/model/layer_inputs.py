"""Inputs per layer, built from te.Linear and te.RMSNorm.

Shapes: te_models/model/block.py, te_models/config/layer_inputs.py.

L layers, P channels per layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from te_models.config.layer import LAYER_INPUTS, context_linear
from te_models.config.layer_inputs import LayerInputsConfig, LayerInputSpec
from te_models.kernels.elementwise import rounded
from te_models.model.forward_context import ForwardContext
from te_models.model.part import BlockPart
from te_models.model.te_modules import Factory, pad_rows


class LayerInputs(nn.Module):
    """The inputs of all layers, (norm(context_proj(x) / sqrt(D)) + sqrt(P) table[ids]) / sqrt(2), x the embeddings.

    Args:
        sizes: of an input.
        layers: their number L.
        hidden_size: D.
        factory: makes the te.Linear and the norm.
    """

    def __init__(
        self, sizes: LayerInputsConfig, layers: int, hidden_size: int, factory: Factory
    ) -> None:
        super().__init__()
        self.width = sizes.width
        shape = (sizes.vocab_size, layers * sizes.width)
        table = torch.empty(shape, device=factory.device, dtype=factory.dtype)
        self.table = nn.Embedding.from_pretrained(table, freeze=False)
        inside = factory.inside(f"{LAYER_INPUTS}.")
        self.context_proj = inside.linear(context_linear(hidden_size, layers * sizes.width))
        self.norm = inside.norm(sizes.width)

    def forward(self, ids: Tensor, x: Tensor, context: ForwardContext) -> tuple[Tensor, ...]:
        """Return the input of each layer [N, P], from ids [B, S] and the embedded tokens x [N, D]; 0 at padding."""
        from_table = context.kernels.embedding(self.table, ids).flatten(0, 1)  # [B*S, L*P]
        from_table = from_table * rounded(self.width**0.5, from_table.dtype)
        if context.real is not None:
            from_table = from_table * context.real
        projected = context.linear(self.context_proj, x) * x.shape[1] ** -0.5  # [N, L*P]
        projected = self.norm(projected.unflatten(-1, (-1, self.width)))  # [N, L, P]
        from_table = pad_rows(from_table, x.shape[0]).view_as(projected)
        return ((projected + from_table) * 2.0**-0.5).unbind(1)


class LayerInput(BlockPart[LayerInputSpec]):
    """The part of a block that reads the input of its layer."""

    entry = None

    def __init__(self, spec: LayerInputSpec, layer: int, factory: Factory) -> None:
        super().__init__(spec, layer, factory)
        gate, out = spec.linears
        self.input_gate_proj = factory.linear(gate)
        self.input_out_proj = factory.linear(out)
        self.norm = factory.norm(spec.hidden_size)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return its contribution to the residual stream [N, D], given x [N, D]."""
        gate = context.linear(self.input_gate_proj, x)  # [N, P]
        gated: Callable[..., Any] = context.kernels.gated_input
        hidden = gated(gate, context.layer_inputs[self.layer], activation=self.spec.activation)
        return self.norm(context.linear(self.input_out_proj, hidden))
