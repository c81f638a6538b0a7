"""Multi-head latent attention, built only from te.Linear and te.RMSNorm. Shapes: te_models/config/latent.py, block.py.

While decoding, a token is its latent and the rotated part of its key; kv_b_proj makes keys and values of all of them
anew in each step, so that they equal the ones of a pass without a cache under any recipe.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from te_models.config.latent import LatentAttentionSpec
from te_models.device.operations import one_operation
from te_models.kernels.sdpa import causal_attention
from te_models.model.forward_context import ForwardContext
from te_models.model.kv_cache import KVState
from te_models.model.part import Mixer
from te_models.model.te_modules import Factory, first_rows, pad_rows


def _widened(x: Tensor, width: int) -> Tensor:
    """Return x with channels of zeros after its own, `width` in all."""
    missing = width - x.shape[-1]
    return F.pad(x, (0, missing)) if missing else x


class LatentAttention(Mixer[LatentAttentionSpec]):
    """o_proj(attention(q, k, v)), with k and v of all heads from a normed latent of R channels and P rotated ones.

    With a gate per head (Ling 3) attention is multiplied by its sigmoid, as in GatedAttention.
    """

    entry = "qkv_a_proj"

    def __init__(self, spec: LatentAttentionSpec, layer: int, factory: Factory) -> None:
        super().__init__(spec, layer, factory)
        into, *queries, kv_b, out = spec.linears
        # Without the rows that pad the projection to the alignment.
        self.rows = [section.used for section in into.sections]
        self.qkv_a_proj = factory.linear(into)
        for name, size in spec.vectors.items():
            self.add_module(name, factory.norm(size, eps=spec.sizes.norm_eps))
        self.q_b_proj = factory.linear(queries[0]) if queries else None
        self.kv_b_proj = factory.linear(kv_b)
        self.o_proj = factory.linear(out)

    def new_state(
        self, batch: int, slots: int, device: torch.device, dtype: torch.dtype
    ) -> KVState:
        """Return room for the latents and rotated keys, of one head, of `batch` rows of `slots` tokens."""
        sizes = (self.spec.sizes.kv_lora_rank, self.spec.sizes.qk_rope_head_dim)
        return KVState(batch, 1, slots, sizes, device, dtype)

    def remark(self, device: torch.device, dtype: torch.dtype) -> str:
        s = self.spec.sizes
        return (
            f"the cache keeps {s.kv_lora_rank + s.qk_rope_head_dim} numbers per token, of which each step makes keys "
            f"and values again; attention runs on heads of {s.width} channels (keys have {s.qk_head_dim}, values "
            f"{s.v_head_dim})"
        )

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return attention of x [N, D]: [N, D]."""
        latents = context.linear(self.qkv_a_proj, x)  # [N, Rq + R + P, and padding]
        if self.spec.bias:
            latents = context.without_padding(latents)
        q, kv, k_rope, *gate = latents[:, : sum(self.rows)].split(self.rows, dim=-1)
        if self.q_b_proj is not None:
            q = context.linear(self.q_b_proj, self.get_submodule("q_a_layernorm")(q.contiguous()))
        out = self._attention(
            self._queries(q, context), *self._keys_and_values(kv, k_rope, context), context
        )
        # A loop over none or one: most families have no gate.
        for logits in gate:  # [N, A], one per head
            heads = out.unflatten(-1, (self.spec.heads.query, -1))  # [B*S, A, V]
            out = context.kernels.gate(heads, logits[: out.shape[0], :, None]).flatten(1)
        if context.real is not None:
            out = out * context.real
        out = context.linear(self.o_proj, pad_rows(out, x.shape[0]))
        return context.without_padding(out) if self.spec.output_bias else out

    def _queries(self, q: Tensor, context: ForwardContext) -> Tensor:
        """Return queries [B, S, A, M + P], rotated, from q [N, A*(M + P)]."""
        sizes = self.spec.sizes
        rope = self.spec.rope
        q = first_rows(q, context.batch * context.seq).unflatten(0, (context.batch, context.seq))
        q = q.unflatten(-1, (self.spec.heads.query, -1))
        if rope is not None:
            plain, turned = q.split((sizes.qk_nope_head_dim, sizes.qk_rope_head_dim), dim=-1)
            q = torch.cat((plain, context.rotated(turned, rope)), dim=-1)
        if self.spec.query_scale is None:
            return q
        return q * context.query_scales[self.spec.query_scale][..., None, None]

    def _keys_and_values(
        self, kv: Tensor, k_rope: Tensor, context: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """Return keys [B, M', A, M + P] and values [B, M', A, V] of M' tokens, from kv [N, R] and k_rope [N, P]."""
        sizes = self.spec.sizes
        rope = self.spec.rope
        count = context.batch * context.seq
        # A copy, or backward would keep all of qkv_a_proj's output for the sake of these columns.
        kv = self.get_submodule("kv_a_layernorm")(first_rows(kv, count).contiguous())
        kv, k_rope = (
            first_rows(t, count).unflatten(0, (context.batch, context.seq)) for t in (kv, k_rope)
        )
        k_rope = k_rope[:, :, None]  # [B, S, 1, P]
        if rope is not None:
            k_rope = context.rotated(k_rope, rope)
        k_rope = k_rope.transpose(1, 2)  # [B, 1, S, P]
        kv = kv[:, None]  # [B, 1, S, R]
        if context.cache is not None:
            kv, k_rope = context.cache.append(self.layer, kv, k_rope)
        rows = kv.flatten(0, 2)  # [B*M', R]
        count = rows.shape[0]  # `len` would make a constant of it in a traced graph
        # The cache has more rows than the pass has tokens, so this GEMM needs padding of its own.
        padded = -(-count // context.alignment) * context.alignment
        shape = (context.batch, kv.shape[2])
        both = first_rows(context.linear(self.kv_b_proj, pad_rows(rows, padded), shape), count)
        both = both.unflatten(-1, (self.spec.heads.query, -1)).unflatten(0, (context.batch, -1))
        # [B, M', A, M], [B, M', A, V]
        k, v = both.split((sizes.qk_nope_head_dim, sizes.v_head_dim), dim=-1)
        # All heads share the rotated channels of a token.
        return torch.cat((k, k_rope.transpose(1, 2).expand(-1, -1, k.shape[2], -1)), dim=-1), v

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, context: ForwardContext) -> Tensor:
        """Return attention [B*S, A*V]; kernels get heads of one width, filled with channels of zeros.

        PyTorch's FlashAttention takes no others, and math, which does, makes all scores.
        """
        width = self.spec.sizes.width
        widths = q.shape[-1] + v.shape[-1]
        mask = context.masks[self.spec.seen]
        scale = self.spec.multiplier
        # [B, S or slots, A, channels] -> [B, A, S or slots, width]
        q, k, v = (_widened(t, width).transpose(1, 2) for t in (q, k, v))
        attend: Any = mask
        if mask is None or isinstance(mask, Tensor):
            attend = functools.partial(causal_attention, mask=mask)
        # A plan counts no channels of zeros. Where a compiler traces, no context may be entered.
        if q.is_meta:
            with one_operation(q, q.shape[:3].numel() * k.shape[2] * widths):
                out = attend(q, k, v, scale=scale)
        else:
            out = attend(q, k, v, scale=scale)
        return out[..., : self.spec.sizes.v_head_dim].transpose(1, 2).flatten(2).flatten(0, 1)
