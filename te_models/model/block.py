"""The decoder block, built only from te.Linear and te.RMSNorm.

`te` is an engine (te_models.engine): Transformer Engine or its emulation; the code of all layers is the same for both.

Shapes: B batch, S sequence, N = B*S tokens padded up to the recipe's alignment, D hidden_size, A attention heads,
K key/value heads, H head_dim, F intermediate_size.

Activations are [N, D], tokens padded with rows of zeros. A row of zeros remains one through every layer here (attention
discards the bias on q, k, v, and after any other bias the row is set to zero again), and so do its gradients, hence
padding changes no amax, no scale and no weight gradient. The padding inside a batch of unequal prompts is kept at zero
in the same way.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import Tensor, nn

from te_models.config.model import ModelConfig
from te_models.model.attention import GatedAttention
from te_models.model.forward_context import ForwardContext
from te_models.model.mlp import MLP
from te_models.model.te_modules import norm_options
from te_models.model.tensor_parallel import TensorParallel


class Block(nn.Module):
    """A decoder block::

        x -+- RMSNorm - GatedAttention -+-> + -+- RMSNorm - MLP -+-> +
           +----------------------------+      +-----------------+

    With `norm_position` "post" each RMSNorm comes after instead, under other names; with "both" there are all four.
    `config` is that of this rank's heads and channels (TensorParallel.local).
    """

    def __init__(self, config: ModelConfig, layer: int, te: ModuleType, tp: TensorParallel, **factory: Any) -> None:
        super().__init__()
        self.tp, self.layer = tp, layer
        self.residual_multiplier = config.residual_multiplier
        self.fp8_enabled = te.FP8GlobalStateManager.is_fp8_enabled
        before, after = config.norm_position != "post", config.norm_position != "pre"

        def norm(wanted: bool) -> nn.Module | None:
            return te.RMSNorm(config.hidden_size, **norm_options(config), **factory) if wanted else None

        self.input_layernorm = norm(before)
        self.self_attn = GatedAttention(config, layer, te, tp, **factory)
        self.attention_output_norm = norm(after)
        self.post_attention_layernorm = norm(before)
        self.mlp = MLP(config, te, tp, **factory)
        self.mlp_output_norm = norm(after)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return the block applied to x [N, D]: [N, D]."""
        if self.layer in context.fp8_layers and not self.fp8_enabled():
            with context.recompute.by_a_third_party():
                return self._forward(x, context)
        return self._forward(x, context)

    def _forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        h, x = self._normed(self.input_layernorm, x, None, self.self_attn.qkvg_proj, context)
        delta = self._delta(self.attention_output_norm, self.self_attn(h, context))
        hidden, x = context.recompute.run_mlp(self, self.mlp, self._mlp_hidden, x, delta, context)
        return x + self._delta(self.mlp_output_norm, self.mlp.output(hidden, context))

    def _mlp_hidden(self, x: Tensor, delta: Tensor | None, context: ForwardContext) -> tuple[Tensor, Tensor]:
        """Return the input of down_proj [N, F], and x + delta [N, D]."""
        h, x = self._normed(self.post_attention_layernorm, x, delta, self.mlp.gate_up_proj, context)
        return self.mlp.hidden(h, context), x

    def _delta(self, norm: nn.Module | None, out: Tensor) -> Tensor:
        """Return what the output of attention or of the MLP adds to the residual stream."""
        out = out if norm is None else self.tp.norm(norm, out, self.tp.scatters)
        return out if self.residual_multiplier == 1 else out * self.residual_multiplier

    def _normed(
        self, norm: nn.Module | None, x: Tensor, delta: Tensor | None, consumer: nn.Module, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """Return the input of the te.Linear `consumer`, and x + delta."""
        if norm is not None and self.tp.size == 1:
            return context.kernels.norm(norm, x, delta, consumer)
        x = x if delta is None else x + delta
        return x if norm is None else self.tp.norm(norm, x, self.tp.scatters), x
