"""Gated attention, built only from te.Linear and te.RMSNorm. Shapes: te_models/model/block.py."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from te_models.config.layout import qkvg_sections, stored_rows
from te_models.config.model import ModelConfig
from te_models.kernels.gated_attention import Heads, attention_core, can_fuse
from te_models.kernels.sdpa import causal_attention
from te_models.kernels.softcap_attention import softcap_attention
from te_models.model.forward_context import ForwardContext, Visible
from te_models.model.te_modules import linear, norm_options, pad_rows
from te_models.model.tensor_parallel import TensorParallel


class GatedAttention(nn.Module):
    """o_proj(sigmoid(g) * attention(rope(q), rope(k), v)) with q, k, v and the gate g from one GEMM.

    Qiu et al. 2025, arXiv 2505.06708 (their best position, after attention and before the output projection). The rows
    of `qkvg_proj.weight` are those of te_models.config.layout, for this rank's heads under tensor parallelism.
    """

    def __init__(self, config: ModelConfig, layer: int, te: ModuleType, tp: TensorParallel, **factory: Any) -> None:
        super().__init__()
        self.config, self.layer, self.tp = config, layer, tp
        self.heads = Heads(
            config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.attention_gate
        )
        self.rows = stored_rows(qkvg_sections(config))
        d, column, row = config.hidden_size, tp.linear("column"), tp.linear("row")
        self.qkvg_proj = linear(te, d, tp.size * config.qkvg_size, bias=config.attention_bias, split=column, **factory)
        self.o_proj = linear(te, tp.size * config.q_size, d, bias=config.attention_output_bias, split=row, **factory)
        if config.qk_norm:
            one = config.qk_norm_scope == "head"
            self.q_norm = te.RMSNorm(config.head_dim if one else config.q_size, **norm_options(config), **factory)
            self.k_norm = te.RMSNorm(config.head_dim if one else config.kv_size, **norm_options(config), **factory)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return attention of x [N, D]: [N, D]."""
        qkvg = context.linear(self.qkvg_proj, x)
        out = self._fused(qkvg, context) if self._can_fuse(qkvg, context) else self._composed(qkvg, context)
        # Under sequence parallelism qkvg has the rows of all ranks, x only this rank's.
        out = context.linear(self.o_proj, pad_rows(out, qkvg.shape[0]))
        return context.without_padding(out) if self.config.attention_output_bias else out

    @property
    def _slides(self) -> bool:
        return self.config.window(self.layer) is not None

    def _can_fuse(self, qkvg: Tensor, context: ForwardContext) -> bool:
        """Return whether attention may run as one operation: the model asks for it and these tokens need no mask."""
        mask = context.masks.get(self.config.window(self.layer))
        masked = context.real is not None or isinstance(mask, Tensor)
        asked = context.kernels.attention is not None and context.cache is None and not masked
        return asked and can_fuse(self.config, context.seq, qkvg.device, qkvg.dtype, mask is not None)

    def _fused(self, qkvg: Tensor, context: ForwardContext) -> Tensor:
        """Compute the same as `_composed` in one operation."""
        operations = context.kernels.attention
        assert operations is not None
        cos, sin = context.rotary[self._slides] if self.config.has_rope(self.layer) else (None, None)
        targets = context.kernels.targets(self.qkvg_proj, self.o_proj)
        spans = context.masks[self.config.window(self.layer)]
        return attention_core(qkvg, cos, sin, context.batch, context.seq, self.heads, operations, targets, spans)

    def _composed(self, qkvg: Tensor, context: ForwardContext) -> Tensor:
        """Return the input of o_proj [B*S, A*H] from qkvg [N, Q]."""
        config = self.config
        qkvg = qkvg[: context.batch * context.seq].unflatten(0, (context.batch, context.seq))
        q, k, v, g = qkvg.split(self.rows, dim=-1)
        if config.qk_norm_scope == "all_heads":
            q, k = self.q_norm(q.contiguous()), self.k_norm(k.contiguous())  # not saving all of qkvg
        q, k, v = (t.unflatten(-1, (-1, config.head_dim)) for t in (q, k, v))
        if config.qk_norm and config.qk_norm_scope == "head":
            q, k = (self.tp.norm(norm, t, partial=True) for norm, t in ((self.q_norm, q), (self.k_norm, k)))
        if config.has_rope(self.layer):
            q, k = (self._rotated(t, context) for t in (q, k))
        if context.query_scale is not None:
            q = q * context.query_scale[..., None, None]
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [B, heads, S, H]
        if context.cache is not None:
            k, v = context.cache.append(self.layer, k, v)
        mask = context.masks[config.window(self.layer)]
        out = self._attention(q, k, v, mask).transpose(1, 2).flatten(0, 1)
        out = self._gated(out, g.flatten(0, 1), context)
        return out if context.real is None else out * context.real

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Visible) -> Tensor:
        """Return attention; shapes as in te_models.kernels.sdpa.causal_attention."""
        scale, cap = self.config.attention_multiplier, self.config.attn_logit_softcapping
        if not (mask is None or isinstance(mask, Tensor)):
            return mask(q, k, v, scale)
        if cap is None:
            return causal_attention(q, k, v, mask, scale=scale)
        return softcap_attention(q, k, v, mask, self.config.head_dim**-0.5 if scale is None else scale, cap)

    def _rotated(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return x [B, S, heads, H] with RoPE on the first rotary_size channels of each head.

        Interleaved pairs of channels become halves and stay so: products of queries and keys ignore the order.
        """
        cos, sin = context.rotary[self._slides]
        size = cos.shape[-1]
        turned = x if size == self.config.head_dim else x[..., :size]
        if self.config.rope_interleaved:
            turned = rearrange(turned, "b s a (r two) -> b s a (two r)", two=2)
        turned = context.kernels.rope(turned, cos, sin)
        return turned if size == self.config.head_dim else torch.cat((turned, x[..., size:]), dim=-1)

    def _gated(self, out: Tensor, g: Tensor, context: ForwardContext) -> Tensor:
        """Apply the gate g [B*S, gate_size] to out [B*S, A, H]: [B*S, A*H]."""
        sigmoid = self.config.attention_gate_activation == "sigmoid"
        gate = context.kernels.gate if sigmoid else context.kernels.softplus_gate
        if self.config.attention_gate == "elementwise":
            return gate(out.flatten(-2), g)
        if self.config.attention_gate == "headwise":
            return gate(out, g[:, : self.config.num_attention_heads, None]).flatten(-2)
        return out.flatten(-2)
