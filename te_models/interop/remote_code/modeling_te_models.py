"""Decoders of te-models in plain PyTorch: gated attention, and the other options of TEModelsDecoderConfig.

This file and its neighbours need only PyTorch and transformers. te-models puts them into a folder whose model no
architecture of transformers computes; AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
loads it.

Shapes: B batch, S sequence, D hidden_size, A attention heads, K key/value heads, H head_dim, M keys, F
intermediate_size.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .cache_name_te_models import CACHE, cache_by_either_name
from .configuration_te_models import TEModelsDecoderConfig, choose
from .masks_te_models import Masks
from .rope_te_models import RoPE, rotate

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}
GATES: dict[str, Callable[[Tensor], Tensor]] = {"sigmoid": torch.sigmoid, "softplus": F.softplus}


class TEModelsRMSNorm(nn.Module):
    """RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467), computed in FP32; the weight may be gamma - 1."""

    def __init__(
        self, config: TEModelsDecoderConfig, size: int, eps: float | None = None, last: bool = False
    ) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps if eps is None else eps
        plain = last and config.options["plain_final_norm"]
        self.zero_centered = config.options["zero_centered_norm"] and not plain
        self.weight = nn.Parameter(torch.zeros(size) if self.zero_centered else torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape and dtype."""
        wide = x.float()
        gamma = self.weight.float() + 1.0 if self.zero_centered else self.weight.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * gamma).to(
            x.dtype
        )


class TEModelsLayerNorm(TEModelsRMSNorm):
    """LayerNorm (Ba et al. 2016, arXiv 1607.06450) without a bias, computed in FP32; the weight may be gamma - 1."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape and dtype."""
        wide = x.float()
        centered = wide - wide.mean(-1, keepdim=True)
        gamma = self.weight.float() + 1.0 if self.zero_centered else self.weight.float()
        inverse = torch.rsqrt(centered.square().mean(-1, keepdim=True) + self.eps)
        return (centered * inverse * gamma).to(x.dtype)


# Norms of the residual stream by `norm_type`.
NORMS = {"rms": TEModelsRMSNorm, "layer": TEModelsLayerNorm}


def unit_norm(x: Tensor, eps: float) -> Tensor:
    """RMSNorm without weights over the last dimension of x, computed in FP32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


class TEModelsAttention(nn.Module):
    """o_proj(gate(g) * attention(q, k, v)): Qiu et al. 2025, arXiv 2505.06708, where there is a gate."""

    def __init__(self, config: TEModelsDecoderConfig, layer: int) -> None:
        super().__init__()
        self.config, self.options, self.layer = config, config.options, layer
        d, size = config.hidden_size, config.head_dim
        q, kv = config.num_attention_heads * size, config.num_key_value_heads * size
        bias = self.options["attention_bias"]
        self.q_proj = nn.Linear(d, q, bias=bias)
        self.k_proj = nn.Linear(d, kv, bias=bias)
        self.v_proj = nn.Linear(d, kv, bias=bias)
        gates = choose(
            {"none": 0, "headwise": config.num_attention_heads, "elementwise": q},
            "attention_gate",
            self.options["attention_gate"],
        )
        self.g_proj = nn.Linear(d, gates, bias=bias) if gates else None
        self.gate = choose(
            GATES, "attention_gate_activation", self.options["attention_gate_activation"]
        )
        self.o_proj = nn.Linear(q, d, bias=self.options["attention_output_bias"])
        layers = choose(
            {"all": True, "rope": config.has_rope(layer)},
            "qk_norm_layers",
            self.options["qk_norm_layers"],
        )
        norms = self.options["qk_norm"] and layers
        scope = choose(
            {"head": False, "all_heads": True}, "qk_norm_scope", self.options["qk_norm_scope"]
        )
        self.norms_all_heads = norms and scope
        self.norms_each_head = norms and not scope
        if norms and self.options["qk_norm_weights"]:
            self.q_norm = TEModelsRMSNorm(config, q if scope else size)
            self.k_norm = TEModelsRMSNorm(config, kv if scope else size)
        scale = self.options["attention_multiplier"]
        self.scale = config.head_dim**-0.5 if scale is None else scale
        self.sinks = (
            nn.Parameter(torch.zeros(config.num_attention_heads))
            if self.options["attention_sinks"]
            else None
        )

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        query_scale: Tensor | None,
        masks: Masks,
        cache: Any,
        steps: Tensor,
    ) -> Tensor:
        """x [B, S, D] -> [B, S, D]."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.norms_all_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2) for t in (q, k, v))
        if self.options["value_norm"]:
            v = unit_norm(v, self.config.rms_norm_eps)
        if not self.options["qk_norm_after_rope"]:
            q, k = self.normed(q, k)
        if self.config.has_rope(self.layer):
            q, k = (rotate(t, *rotary, self.options["rope_interleaved"]) for t in (q, k))
        if self.options["qk_norm_after_rope"]:
            q, k = self.normed(q, k)
        everywhere = self.options["query_scale_rule"] == "position"
        if query_scale is not None and (everywhere or not self.config.has_rope(self.layer)):
            q = q * query_scale
        if cache is not None:
            k, v = cache.update(k, v, self.layer, {"cache_position": steps})
        kind = (self.config.slides(self.layer), self.config.chunks(self.layer))
        mask = masks(*kind, k.shape[-2])
        out = self.attend(q, k, v, mask).transpose(1, 2)  # [B, S, A, H]
        if self.g_proj is not None:
            g = self.gate(self.g_proj(x))
            out = out * (
                g[..., None] if g.shape[-1] == out.shape[-2] else g.unflatten(-1, out.shape[-2:])
            )
        return self.o_proj(out.flatten(-2))

    def normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys with the norms of each head, if there are such."""
        if not self.norms_each_head:
            return q, k
        if not self.options["qk_norm_weights"]:
            return unit_norm(q, self.config.rms_norm_eps), unit_norm(k, self.config.rms_norm_eps)
        return self.q_norm(q), self.k_norm(k)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """q [B, A, S, H], k and v [B, K, M, H] -> [B, A, S, H]; without a mask M = S and attention is causal."""
        groups = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(groups, dim=1) if groups > 1 else t for t in (k, v))
        cap = self.options["attn_logit_softcapping"]
        if cap is None and self.sinks is None:
            return F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=mask is None, scale=self.scale
            )
        logits = q @ k.transpose(-1, -2) * self.scale
        logits = logits if cap is None else torch.tanh(logits / cap) * cap
        if mask is None:
            mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).tril()
        logits = (
            logits.float() + mask
            if mask.is_floating_point()
            else logits.float().masked_fill(~mask, -math.inf)
        )
        if self.sinks is not None:
            logits = torch.cat(
                (logits, self.sinks.float()[:, None, None].expand(*logits.shape[:-1], 1)), dim=-1
            )
        return logits.softmax(-1)[..., : k.shape[-2]].to(v.dtype) @ v


class TEModelsMLP(nn.Module):
    """down_proj(act(gate) * up), or down_proj(act(up)) without a gate."""

    def __init__(self, config: TEModelsDecoderConfig) -> None:
        super().__init__()
        d, f, bias = config.hidden_size, config.intermediate_size, config.options["mlp_bias"]
        self.gate_proj = nn.Linear(d, f, bias=bias) if config.options["mlp_gate"] else None
        self.up_proj = nn.Linear(d, f, bias=bias)
        self.down_proj = nn.Linear(f, d, bias=bias)
        self.act = choose(ACTIVATIONS, "hidden_act", config.options["hidden_act"])

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, D] -> [B, S, D]."""
        up = self.up_proj(x)
        return self.down_proj(
            self.act(up) if self.gate_proj is None else self.act(self.gate_proj(x)) * up
        )


class TEModelsDecoderLayer(nn.Module):
    """x + f(norm(x)), x + norm(f(x)) or x + norm(f(norm(x))), for attention and then for the MLP.

    With `parallel_residual` x + attention(norm(x)) + mlp(norm(x)), with one norm.
    """

    def __init__(self, config: TEModelsDecoderConfig, layer: int) -> None:
        super().__init__()
        options = config.options
        places = {"pre": (True, False), "post": (False, True), "both": (True, True)}
        before, after = choose(places, "norm_position", options["norm_position"])
        self.multiplier = options["residual_multiplier"]
        self.parallel = options["parallel_residual"]
        norm = choose(NORMS, "norm_type", options["norm_type"])
        post_eps = options["post_norm_eps"]
        self.input_layernorm = norm(config, config.hidden_size) if before else nn.Identity()
        self.self_attn = TEModelsAttention(config, layer)
        self.attention_output_norm = (
            norm(config, config.hidden_size, post_eps) if after else nn.Identity()
        )
        self.post_attention_layernorm = (
            norm(config, config.hidden_size) if before and not self.parallel else nn.Identity()
        )
        self.mlp = TEModelsMLP(config)
        self.mlp_output_norm = (
            norm(config, config.hidden_size, post_eps) if after else nn.Identity()
        )

    def forward(self, x: Tensor, *attention: Tensor | None) -> Tensor:
        """x [B, S, D] -> [B, S, D]; `attention` are the further arguments of TEModelsAttention."""
        if self.parallel:
            h = self.input_layernorm(x)
            mixed = self.self_attn(h, *attention) * self.multiplier
            return x + mixed + self.mlp(h) * self.multiplier
        mixed = self.self_attn(self.input_layernorm(x), *attention)
        x = x + self.attention_output_norm(mixed) * self.multiplier
        mixed = self.mlp(self.post_attention_layernorm(x))
        return x + self.mlp_output_norm(mixed) * self.multiplier


class TEModelsDecoderPreTrainedModel(PreTrainedModel):
    """Base of the models below."""

    config_class = TEModelsDecoderConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["TEModelsDecoderLayer"]
    _skip_keys_device_placement = ["cache", "past_key_values"]
    _supports_sdpa = True
    _supports_cache_class = True
    _supports_static_cache = True

    def _init_weights(self, module: nn.Module) -> None:
        # With functions of nn.init: transformers 5 calls this for loaded modules too, and has them skip loaded tensors.
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, 0.0, self.config.initializer_range)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, TEModelsRMSNorm):
            nn.init.constant_(module.weight, 0.0 if module.zero_centered else 1.0)


class TEModelsDecoderModel(TEModelsDecoderPreTrainedModel):
    """The decoder without a head."""

    def __init__(self, config: TEModelsDecoderConfig) -> None:
        super().__init__(config)
        self.embed_tokens: nn.Module = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            TEModelsDecoderLayer(config, layer) for layer in range(config.num_hidden_layers)
        )
        norm = choose(NORMS, "norm_type", config.options["norm_type"])
        self.norm = norm(config, config.hidden_size, last=True)
        self.ropes = {sliding: RoPE(config, sliding) for sliding in (False, True)}
        self.gradient_checkpointing = False
        self.post_init()

    @cache_by_either_name
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Take the arguments of transformers' decoders; attentions are not returned."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if kwargs.get("output_attentions"):
            raise ValueError(
                "output_attentions=True is not supported: attention runs as one operation"
            )
        recompute = self.gradient_checkpointing and self.training
        use_cache = (self.config.use_cache if use_cache is None else use_cache) and not recompute
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        x = self._scaled(x)
        options = self.config.options
        if use_cache and cache is None:
            cache = DynamicCache()
        count = x.shape[1]
        past = 0 if cache is None else cache.get_seq_length()
        steps = kwargs.get("cache_position")  # which transformers 4 gives
        steps = torch.arange(count, device=x.device) + past if steps is None else steps
        positions = self._positions(steps, attention_mask, position_ids)
        rotary = {sliding: rope.tables(positions, x.dtype) for sliding, rope in self.ropes.items()}
        rules = {"position": positions, "slot": steps[None] + 1}
        rule = choose(rules, "query_scale_rule", options["query_scale_rule"])
        scale = self.query_scale(rule, x.dtype)
        masks = Masks(
            count,
            steps[0],
            options["sliding_window"],
            options["attention_chunk_size"],
            attention_mask,
            cache is not None,
            x.device,
        )
        states = [x]
        for layer, block in enumerate(self.layers):
            arguments = (rotary[self.config.slides(layer)], scale, masks, cache, steps)
            run = partial(self._gradient_checkpointing_func, block.__call__) if recompute else block
            x = run(x, *arguments)
            states.append(x)
        x = self.norm(x)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        # As in transformers, the last of them is the one after the norm.
        hidden = (*states[:-1], x) if output_hidden_states else None
        output = BaseModelOutputWithPast(x, cache if use_cache else None, hidden)
        if return_dict is None:
            return_dict = self.config.return_dict
        return output if return_dict else output.to_tuple()

    def _scaled(self, x: Tensor) -> Tensor:
        """Return embeddings [B, S, D] after their norm and factor."""
        multiplier = self.config.options["embedding_multiplier"]
        if self.config.options["embedding_norm"]:
            x = unit_norm(x, self.config.rms_norm_eps)
        if multiplier != 1:  # rounded to the dtype of the activations
            x = x * torch.tensor(multiplier, dtype=x.dtype, device=x.device)
        return x

    def _positions(
        self, steps: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> Tensor:
        """Return the positions for RoPE, [B or 1, S]: the given ones, else counted from the first that is no padding.

        `steps` are the places in the cache, [S].
        """
        count = steps.shape[0]
        if position_ids is not None:
            return position_ids.reshape(-1, count)
        if attention_mask is not None and attention_mask.dim() == 2:
            return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -count:]
        return steps[None]

    def query_scale(self, positions: Tensor, dtype: torch.dtype) -> Tensor | None:
        """The factor on queries, [B, 1, S, 1]; None: 1."""
        beta, length = (self.config.options[f"query_scale_{name}"] for name in ("beta", "length"))
        if beta is None:
            return None
        return (1 + beta * torch.log(1.0 + positions // length)).to(dtype)[:, None, :, None]


class TEModelsDecoderForCausalLM(TEModelsDecoderPreTrainedModel, GenerationMixin):
    """The decoder with a head over the vocabulary."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: TEModelsDecoderConfig) -> None:
        super().__init__(config)
        self.model = TEModelsDecoderModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head: nn.Module = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def tie_weights(  # type: ignore[bad-override]  # its arguments differ between versions
        self, missing_keys: set[str] | None = None, **options: Any
    ) -> None:
        """As in the base class; transformers 5.3 believes that a tied head, which no file has, was loaded."""
        if missing_keys is not None:
            options["missing_keys"] = missing_keys
            if self.lm_head.weight.is_meta:
                missing_keys.add("lm_head.weight")
        super().tie_weights(**options)

    @cache_by_either_name
    def prepare_inputs_for_generation(  # type: ignore[bad-override]  # its arguments differ between versions
        self,
        input_ids: Tensor,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Leave out the cache where the longest text gets LongRoPE's other angles, as transformers does for Phi-3."""
        rope = self.model.ropes[False]
        if rope.kind == "longrope" and cache is not None and cache.get_seq_length():
            mask, new = kwargs.get("attention_mask"), input_ids.shape[1] - cache.get_seq_length()
            length = input_ids.shape[1] if mask is None else int(mask.sum(-1).max())
            if length - new <= rope.original < length:
                cache = None  # and all tokens are passed
                kwargs.update(dict.fromkeys(kwargs.keys() & {"next_sequence_length"}))
                if kwargs.get("cache_position") is not None:
                    kwargs["cache_position"] = torch.arange(
                        input_ids.shape[1], device=input_ids.device
                    )
        kwargs.update({CACHE: cache, "inputs_embeds": inputs_embeds})
        prepare = super().prepare_inputs_for_generation
        return prepare(input_ids, **kwargs)  # type: ignore[bad-argument-type]  # its protocol lacks properties

    generate = cache_by_either_name(GenerationMixin.generate)

    @cache_by_either_name
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> Any:
        """Take the arguments of transformers' decoders; attentions are not returned."""
        output = self.model(
            input_ids,
            attention_mask,
            position_ids,
            cache,
            inputs_embeds,
            use_cache,
            output_hidden_states,
            return_dict=True,
            **kwargs,
        )
        kept = (
            slice(-logits_to_keep, None)
            if isinstance(logits_to_keep, int) and logits_to_keep
            else logits_to_keep
        )
        h = output.last_hidden_state
        logits = self.lm_head(h if isinstance(kept, int) else h[:, kept])
        options = self.config.options
        if options["logits_scaling"] != 1:
            logits = logits / options["logits_scaling"]
        if (cap := options["final_logit_softcapping"]) is not None:
            logits = torch.tanh(logits / cap) * cap
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        result = CausalLMOutputWithPast(loss, logits, getattr(output, CACHE), output.hidden_states)
        if return_dict is None:
            return_dict = self.config.return_dict
        return result if return_dict else result.to_tuple()
