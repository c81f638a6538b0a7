"""Gated attention, built only from te.Linear and te.RMSNorm. Shapes: te_models/model/block.py."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from te_models.config.attention import WIDEST_FLASH, AttentionSpec
from te_models.kernels.attention_parts import Rotation, can_fuse
from te_models.kernels.composed_attention import composed_attention
from te_models.kernels.decode import HeadNorms, Rotary, StepAttention, StepNorm
from te_models.kernels.gated_attention import AttentionSetting, attention_core, rotated_heads
from te_models.kernels.sdpa import causal_attention
from te_models.kernels.unit_norm import unit_norm
from te_models.model.context_parallel import SharedRows
from te_models.model.forward_context import ForwardContext, Visible
from te_models.model.kv_cache import DecodingCache, KVState, RecurrentState, State
from te_models.model.part import Mixer
from te_models.model.te_modules import Factory, first_rows, pad_rows


class GatedAttention(Mixer[AttentionSpec]):
    """o_proj(sigmoid(g) * attention(rope(q), rope(k), v)) with q, k, v and the gate g from one GEMM.

    Qiu et al. 2025, arXiv 2505.06708 (their best position, after attention and before the output projection). The rows
    of `qkvg_proj.weight` are described in te_models.config.attention, for this rank's heads under tensor parallelism.
    """

    entry = "qkvg_proj"

    def __init__(self, spec: AttentionSpec, layer: int, factory: Factory) -> None:
        super().__init__(spec, layer, factory)
        into, out = spec.linears
        self.rows = into.rows
        self.qkvg_proj = factory.linear(into)
        self.o_proj = factory.linear(out)
        self.eps = factory.eps
        if spec.qk_norm != "none" and spec.norm_weights:
            self.q_norm = factory.norm(spec.vectors["q_norm"])
            # Layers that attend to another layer's keys have no norm for them.
            if not spec.heads.reuses_keys:
                self.k_norm = factory.norm(spec.vectors["k_norm"])
        self.sinks = factory.vector(spec.heads.query) if spec.sinks else None

    def initialize(self, name: str, values: Tensor, std: float, residual_std: float) -> None:
        """Set initial values as the base class does; sinks are logits of the size of a new model's."""
        if name == "sinks":
            values.normal_(0.0, std)
        else:
            super().initialize(name, values, std, residual_std)

    def new_state(self, batch: int, slots: int, device: torch.device, dtype: torch.dtype) -> State:
        """Return room for keys and values of `batch` rows of `slots` tokens; none where they are another layer's."""
        if self.spec.heads.reuses_keys:
            return RecurrentState()
        return KVState(batch, self.spec.heads.key, slots, (self.spec.heads.dim,) * 2, device, dtype)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return attention of x [N, D]: [N, D]."""
        qkvg = context.linear(self.qkvg_proj, x)  # [N, Q]
        if self._can_fuse(qkvg, context):
            out = self._fused(qkvg, context)
        elif self._reads_cache(context):
            out = self._cached(qkvg, context)
        else:
            out = self._composed(qkvg, context)
        # Under sequence parallelism qkvg has the rows of all ranks, x only this rank's.
        # Attention has real tokens only; the linears want all N rows, which a multiple of the alignment has to be.
        out = context.linear(self.o_proj, pad_rows(out, qkvg.shape[0]))
        return context.without_padding(out) if self.spec.output_bias else out

    def step(
        self, norm: StepNorm, x: Tensor, context: ForwardContext, factor: float
    ) -> Tensor | None:
        """Return x + factor * part(norm(x)) [N, D]; see te_models.model.part.BlockPart.step."""
        setting = self._setting_of_step(context)
        into = context.linear_of_step(self.qkvg_proj)
        out = context.linear_of_step(self.o_proj)
        kernels = context.step
        if setting is None or into is None or out is None or kernels is None:
            return None
        mask = context.masks[self.spec.seen]
        assert isinstance(context.cache, DecodingCache) and isinstance(mask, Tensor)
        keys = context.cache.keys(self.layer, mask)
        qkvg = kernels.product(x, into, context.batch, norm=norm)
        heads = kernels.attention(qkvg, keys, setting, context.batch)
        return kernels.product(heads, out, context.batch, residual=x, factor=factor)

    def _setting_of_step(self, context: ForwardContext) -> StepAttention | None:
        """Return the setting of attention for one new token per row; None where no kernel has it."""
        spec = self.spec
        if spec.heads.keys_as_values or spec.value_norm or spec.query_scale is not None:
            return None
        if spec.heads.dim > WIDEST_FLASH or spec.lends_keys or spec.heads.reuses_keys:
            return None
        norms = None
        if spec.qk_norm != "none":
            if spec.qk_norm == "all_heads" or spec.norm_after_rope or not spec.norm_weights:
                return None
            query = context.norm_of_step(self.q_norm)
            key = context.norm_of_step(self.k_norm)
            if query is None or key is None:
                return None
            norms = HeadNorms(query.weight, key.weight, query.eps, query.zero_centered)
        rotary = None
        if spec.rope is not None:
            cos, sin = context.rotary[spec.rope]
            rotary = Rotary(cos, sin, spec.rope.interleaved)
        return StepAttention(
            heads=spec.heads,
            scale=spec.heads.dim**-0.5 if spec.multiplier is None else spec.multiplier,
            softcap=spec.softcap,
            softplus=spec.gate_activation == "softplus",
            sinks=self.sinks,
            rotary=rotary,
            norms=norms,
        )

    def _can_fuse(self, qkvg: Tensor, context: ForwardContext) -> bool:
        """Return whether attention may run as one operation: the model asks for it and these tokens need no mask."""
        mask = context.masks.get(self.spec.seen)
        masked = context.real is not None or isinstance(mask, Tensor) or context.share is not None
        may_fuse = context.kernels.attention is not None and context.cache is None and not masked
        return may_fuse and can_fuse(
            self.spec, context.seq, qkvg.device, qkvg.dtype, mask is not None
        )

    def _fused(self, qkvg: Tensor, context: ForwardContext) -> Tensor:
        """Compute the same as `_composed` in one operation."""
        spans = context.masks[self.spec.seen]
        assert not isinstance(spans, Tensor | SharedRows)
        setting, q_weight, k_weight = self._setting(qkvg, context)
        targets = context.kernels.targets(
            context.neighbour(self.qkvg_proj), context.neighbour(self.o_proj)
        )
        # Where the kernels may write FP8: o_proj's input in forward, the gradient of qkvg_proj's output in backward.
        setting = replace(setting, spans=spans, targets=targets)
        return attention_core(qkvg, setting, q_weight=q_weight, k_weight=k_weight, sinks=self.sinks)

    def _reads_cache(self, context: ForwardContext) -> bool:
        """Return whether `_cached` may run: in generation, with the elementwise operations of the fused path."""
        spec = self.spec
        if context.kernels.attention is None or context.cache is None or torch.is_grad_enabled():
            return False
        # A cache has the halves of interleaved pairs one after the other, which `rotated` makes of them.
        return not spec.obstacles and not (spec.rope is not None and spec.rope.interleaved)

    def _cached(self, qkvg: Tensor, context: ForwardContext) -> Tensor:
        """Compute the same as `_composed` where there is a cache, in a few operations for each head's norm and RoPE."""
        tokens = first_rows(qkvg, context.batch * context.seq)
        setting, q_weight, k_weight = self._setting(qkvg, context)
        q, k, v, logits = rotated_heads(tokens, q_weight, k_weight, setting)
        assert context.cache is not None
        keys, values = context.cache.append(self.layer, k.transpose(1, 2), v.transpose(1, 2))
        # Views [B, heads, S, H]: SDPA takes any strides, and copies of q and k would cost as much as attention for
        # short texts.
        out = self._attention(q.transpose(1, 2), keys, values, context.masks[self.spec.seen])
        mixed = out.transpose(1, 2)  # [B, S, A, H]
        if logits is not None:
            mixed = setting.ops.gate(mixed, logits, setting.softplus)
        mixed = mixed.reshape(len(tokens), -1)
        return mixed if context.real is None else mixed * context.real

    def _setting(
        self, qkvg: Tensor, context: ForwardContext
    ) -> tuple[AttentionSetting, Tensor | None, Tensor | None]:
        """Return the setting of the fused operations, and the weights of the norms of q and k."""
        spec = self.spec
        operations = context.kernels.attention
        assert operations is not None
        rotation = None
        if spec.rope is not None:
            cos, sin = context.rotary[spec.rope]
            rotation = Rotation(cos, sin, spec.rope.interleaved)
        q_weight = k_weight = None
        eps = 0.0
        zero_centered = False
        # Norms without weights run in the same kernels as those with: their weights are ones, which get no gradient.
        if spec.qk_norm != "none" and not spec.norm_weights:
            q_weight = k_weight = qkvg.new_ones(spec.heads.dim)
            eps = self.eps
        elif spec.qk_norm != "none":
            q_weight = self.tp.partial_weight(self.q_norm)
            k_weight = self.tp.partial_weight(self.k_norm)
            norm: Any = self.q_norm
            eps = norm.eps
            zero_centered = norm.zero_centered_gamma
        setting = AttentionSetting(
            batch=context.batch,
            rows=context.batch * context.seq,
            heads=spec.heads,
            query_rotation=self._query_rotation(rotation, context),
            key_rotation=rotation,
            eps=eps,
            zero_centered=zero_centered,
            scale=spec.multiplier,
            cap=spec.softcap,
            softplus=spec.gate_activation == "softplus",
            ops=operations,
        )
        return setting, q_weight, k_weight

    def _query_rotation(
        self, rotation: Rotation | None, context: ForwardContext
    ) -> Rotation | None:
        """Return the rotary table of the queries, with their scale as a factor of cos and sin."""
        if self.spec.query_scale is None:
            return rotation
        scale = context.query_scales[self.spec.query_scale][..., None]  # [S, 1] or [B, S, 1]
        if rotation is not None:
            return rotation._replace(cos=rotation.cos * scale, sin=rotation.sin * scale)
        # A rotation by no angle: cos is the scale and sin 0, so that the kernels need no further argument.
        cos = scale.expand(*scale.shape[:-1], self.spec.heads.dim)
        return Rotation(cos, torch.zeros_like(cos))

    def _composed(self, qkvg: Tensor, context: ForwardContext) -> Tensor:
        """Return the input of o_proj [B*S, A*H] from qkvg [N, Q]."""
        qkvg = first_rows(qkvg, context.batch * context.seq)
        qkvg = qkvg.view(context.batch, context.seq, -1)
        q, k, v, g = qkvg.split(self.rows, dim=-1)  # each [B, S, its rows]
        if self.spec.heads.reuses_keys:
            q = self._queries(q, context)
            k, v = context.shared_keys[self.spec.window]
        else:
            q, k, v, g = self._own_heads(q, k, v, g, context)
        out = self._attention(q, k, v, context.masks[self.spec.seen])
        out = out.transpose(1, 2).flatten(0, 1)
        out = self._gated(out, g.flatten(0, 1), context)  # [B*S, A*H]
        return out if context.real is None else out * context.real

    def _queries(self, q: Tensor, context: ForwardContext) -> Tensor:
        """Return the queries [B, A, S, H] of a layer without keys of its own, from q [B, S, A*H]."""
        spec = self.spec
        q = q.unflatten(-1, (-1, spec.heads.dim))
        q = q if spec.norm_after_rope else self._normed_queries(q)
        q = q if spec.rope is None else context.rotated(q, spec.rope, spec.norm_after_rope)
        q = self._normed_queries(q) if spec.norm_after_rope else q
        if spec.query_scale is not None:
            q = q * context.query_scales[spec.query_scale][..., None, None]
        return q.transpose(1, 2)

    def _own_heads(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, context: ForwardContext
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q [B, A, S, H], the k and v [B, K, slots, H] to attend to, and g, from rows of qkvg [B, S, ...]."""
        spec = self.spec
        # The projection has no rows for values then (Gemma 4): they are the keys before norm and RoPE.
        if spec.heads.keys_as_values:
            v = k
        if spec.copies_queries and torch.is_grad_enabled():
            v = v.contiguous()
            g = g.contiguous()  # so that backward keeps none of the memory of q and k
        if spec.qk_norm == "all_heads":
            q = self.q_norm(q.contiguous())
            k = self.k_norm(k.contiguous())  # not saving all of qkvg
        q, k, v = (t.view(*t.shape[:2], -1, spec.heads.dim) for t in (q, k, v))
        if spec.value_norm:
            v = unit_norm(v, self.eps)
        if not spec.norm_after_rope:
            q, k = self._normed_heads(q, k)
        # The scale copies q, and k alone, which may be lent, would keep the memory of both.
        if spec.rope is not None and (spec.query_scale is not None or spec.lends_keys):
            q = context.rotated(q, spec.rope, spec.norm_after_rope)
            k = context.rotated(k, spec.rope, spec.norm_after_rope)
        elif spec.rope is not None:
            # One RoPE for queries and keys together launches half as many kernels.
            q, k = context.rotated(torch.cat((q, k), dim=2), spec.rope, spec.norm_after_rope).split(
                (q.shape[2], k.shape[2]), dim=2
            )
        if spec.norm_after_rope:
            q, k = self._normed_heads(q, k)
        if spec.query_scale is not None:
            q = q * context.query_scales[spec.query_scale][..., None, None]
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [B, heads, S, H]
        if context.cache is not None:
            k, v = context.cache.append(self.layer, k, v)  # [B, K, slots, H]
        # Later layers keep the tensors that the first pass gave them.
        if spec.lends_keys and not context.recompute.recomputing:
            context.lent_keys[spec.window] = (k, v)
        return q, k, v, g

    def _normed_queries(self, q: Tensor) -> Tensor:
        """Return q [B, S, A, H] with the norm of each head, if there is one."""
        if self.spec.qk_norm != "head":
            return q
        if not self.spec.norm_weights:
            return unit_norm(q, self.eps)
        return self.tp.norm(self.q_norm, q, partial=True)

    def _normed_heads(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return q [B, S, A, H] and k [B, S, K, H] with the norms of each head, if there are such."""
        q = self._normed_queries(q)
        if self.spec.qk_norm != "head":
            return q, k
        if not self.spec.norm_weights:
            return q, unit_norm(k, self.eps)
        return q, self.tp.norm(self.k_norm, k, partial=True)

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Visible) -> Tensor:
        """Return attention; shapes as in te_models.kernels.sdpa.causal_attention."""
        scale = self.spec.multiplier
        cap = self.spec.softcap
        if not (mask is None or isinstance(mask, Tensor)):
            return mask(q, k, v, scale, self.sinks, cap)
        if cap is None and self.sinks is None:
            return causal_attention(q, k, v, mask, scale=scale)
        return composed_attention(
            q, k, v, mask, self.spec.heads.dim**-0.5 if scale is None else scale, cap, self.sinks
        )

    def _gated(self, out: Tensor, g: Tensor, context: ForwardContext) -> Tensor:
        """Apply the gate g [B*S, gate_size] to out [B*S, A, H]: [B*S, A*H]."""
        heads = self.spec.heads
        if self.spec.gate_activation == "sigmoid":
            gate = context.kernels.gate
        else:
            gate = context.kernels.softplus_gate
        if heads.gate == "elementwise":
            return gate(out.flatten(-2), g)
        # The projection has rows of padding behind the A logits: it is as wide as the alignment asks.
        if heads.gate == "headwise":
            return gate(out, g[:, : heads.query, None]).flatten(-2)
        return out.flatten(-2)
