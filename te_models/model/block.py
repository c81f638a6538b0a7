"""The decoder block, built from te.Linear and te.RMSNorm alone.

`te` is an engine (te_models.engine): Transformer Engine or its emulation; all layers read the same with either.

Shapes: B batch, S sequence, N = B*S tokens padded up to the recipe's alignment, D hidden_size, A attention heads,
K key/value heads, H head_dim, F intermediate_size.

Activations are [N, D], tokens padded with rows of zeros. A row of zeros remains one through every layer here (there is
no bias but the one on q, k, v, which attention cuts off), and so do its gradients, hence padding changes no amax, no
scale and no weight gradient. The padding inside a batch of unequal prompts is kept at zero in the same way.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import Tensor, nn

from te_models.config.model import ModelConfig
from te_models.model.attention import GatedAttention
from te_models.model.forward_context import ForwardContext
from te_models.model.mlp import SwiGLU
from te_models.model.te_modules import norm_options
from te_models.model.tensor_parallel import TensorParallel


class Block(nn.Module):
    """A pre-norm decoder block::

        x -+- RMSNorm - GatedAttention -+-> + -+- RMSNorm - SwiGLU -+-> +
           +----------------------------+      +--------------------+

    `config` is that of this rank's heads and channels (TensorParallel.local).
    """

    def __init__(self, config: ModelConfig, layer: int, te: ModuleType, tp: TensorParallel, **factory: Any) -> None:
        super().__init__()
        self.tp, self.layer = tp, layer
        self.fp8_enabled = te.FP8GlobalStateManager.is_fp8_enabled
        self.input_layernorm = te.RMSNorm(config.hidden_size, **norm_options(config), **factory)
        self.self_attn = GatedAttention(config, layer, te, tp, **factory)
        self.post_attention_layernorm = te.RMSNorm(config.hidden_size, **norm_options(config), **factory)
        self.mlp = SwiGLU(config, te, tp, **factory)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """x [N, D] -> [N, D]."""
        if self.layer in context.fp8_layers and not self.fp8_enabled():
            with context.recompute.by_a_third_party():
                return self._forward(x, context)
        return self._forward(x, context)

    def _forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        h, x = self._normed(self.input_layernorm, x, None, self.self_attn.qkvg_proj, context)
        delta = self.self_attn(h, context)
        hidden, x = context.recompute.run_mlp(self.mlp, self._mlp_hidden, x, delta, context)
        return x + self.mlp.output(hidden, context)

    def _mlp_hidden(self, x: Tensor, delta: Tensor | None, context: ForwardContext) -> tuple[Tensor, Tensor]:
        """The input of down_proj [N, F], and x + delta [N, D]."""
        h, x = self._normed(self.post_attention_layernorm, x, delta, self.mlp.gate_up_proj, context)
        return self.mlp.hidden(h, context), x

    def _normed(
        self, norm: nn.Module, x: Tensor, delta: Tensor | None, consumer: nn.Module, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """The input of the te.Linear `consumer`, and x + delta."""
        if self.tp.size > 1:
            x = x if delta is None else x + delta
            return self.tp.norm(norm, x, self.tp.scatters), x
        return context.kernels.norm(norm, x, delta, consumer)
