"""Tiny models of every kind of layer, and of the options by which families differ: what test_kinds.py runs over."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from places import PLACE
from short_conv import registered
from torch import Tensor

from te_models import CausalLM
from te_models.config.model import ModelConfig

# Multiples of 32, so that every recipe runs each linear, also one half of it.
SHAPE: dict[str, Any] = dict(
    vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=64, initializer_range=0.1,
)  # fmt: skip


class Kind(NamedTuple):
    """The fields of a tiny model with this kind of layer, and what makes the kind known while it is used."""

    fields: dict[str, Any]
    known: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    family: bool = True  # whether an architecture of Hugging Face has it
    chooses: bool = False  # whether a rounding may send a token elsewhere, as routers do
    # How many times more than others BF16 rounds: gradients of linear attention are 10 to 30 % from those in FP32.
    rounds: float = 1.0

    def at(self, where: Where) -> Where:
        """Return the place, and the bound of this kind there: where a rounding of BF16 could choose, FP32."""
        place, bound = where
        fp32 = self.chooses or place.get("dtype") == torch.float32
        return (place | dict(dtype=torch.float32) if fp32 else place), bound * (
            1.0 if fp32 else self.rounds
        )

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(**SHAPE | self.fields)


# Without the loss of their routers, which is not a mean over tokens.
EXPERTS: dict[str, Any] = dict(
    num_experts=5, num_experts_per_tok=2, moe_intermediate_size=64, router_aux_loss_coef=0.0
)
SHARED: dict[str, Any] = dict(
    shared_expert_intermediate_size=96, shared_expert_gate=True, norm_topk_prob=False
)
LATENT: dict[str, Any] = dict(attention_gate="none", num_key_value_heads=4, head_dim=16)
BY_TURNS = ("sliding_attention", "full_attention", "sliding_attention")
GEMMA4: dict[str, Any] = dict(
    attention_gate="none", layer_types=("sliding_attention", "full_attention", "full_attention"), sliding_window=4,
    sliding_heads=dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16), keys_as_values=True, qk_norm=True,
    value_norm=True, layer_scale=True, norm_position="both", attention_multiplier=1.0, embedding_multiplier=8.0,
    hidden_act="gelu_pytorch_tanh", rope_scaling=dict(rope_type="proportional", partial_rotary_factor=0.5),
    sliding_rope=dict(rope_theta=100.0),
)  # fmt: skip
BIASED = dict(attention_bias=True, attention_output_bias=True)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
# Of latent attention: its values are narrower than its keys, wider, or as wide.
NARROW = dict(
    q_lora_rank=32, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32
)
ALIKE = dict(
    q_lora_rank=64, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=32
)
KINDS = {
    "attention": Kind(dict(qk_norm=True)),
    "headwise gate": Kind(
        dict(attention_gate="headwise", partial_rotary_factor=0.5, no_rope_layers=(1, 0, 1), tie_word_embeddings=True)
    ),
    "no gate": Kind(
        dict(attention_gate="none", **BIASED, mlp_bias=True, norm_position="both", attn_logit_softcapping=5.0)
    ),
    "sliding": Kind(dict(sliding_window=4, layer_types=BY_TURNS)),
    "experts": Kind(dict(attention_gate="none", qk_norm=True, moe=EXPERTS), chooses=True),
    "shared expert": Kind(
        dict(attention_gate="none", moe=EXPERTS | SHARED, mlp_layer_types=("dense", "sparse", "sparse")), chooses=True
    ),
    "experts with a norm after them": Kind(
        dict(**LATENT, latent_attention=ALIKE, mlp_layer_types=("dense", "sparse", "sparse"), rope_interleaved=True,
             moe=EXPERTS | dict(output_norm=True, shared_expert_intermediate_size=64, router_scores="sigmoid",
                                expert_bias=True, router_fp32=True)),
        chooses=True,
    ),
    "sinks, biased experts": Kind(
        dict(
            attention_gate="none", attention_sinks=True, **BIASED, sliding_window=4, layer_types=BY_TURNS,
            moe=EXPERTS | dict(num_experts=3, bias=True, swiglu_limit=1.5), intermediate_size=64,
            rope_scaling=YARN | dict(truncate=False),
        ),
        chooses=True,
    ),
    "heads by kind of layer, keys as values": Kind(GEMMA4),
    "inputs per layer, shared keys": Kind(  # Gemma 4 E2B
        GEMMA4
        | dict(
            num_hidden_layers=4, keys_as_values=False, shared_key_layers=(0, 0, 1, 1),
            layer_types=("sliding_attention", "full_attention", "sliding_attention", "full_attention"),
            intermediate_sizes=(128, 128, 256, 256), layer_inputs=dict(width=32, vocab_size=128),
        ),
        rounds=2.0,
    ),
    "experts with norms of their own": Kind(  # Gemma 4 26B-A4B, whose dense MLP is the shared expert
        GEMMA4
        | dict(
            intermediate_size=96, moe=EXPERTS | dict(shared_expert_intermediate_size=96, separate_norms=True)
        ),
        chooses=True,
    ),
    "norms without weights": Kind(  # as Muse-Glimmer
        dict(
            qk_norm=True, qk_norm_weights=False, embedding_norm=True, norm_position="both", post_norm_eps=1e-3,
            zero_centered_norm=True, plain_final_norm=True,
        )
    ),
    "LayerNorm, side by side": Kind(  # as Cohere
        dict(attention_gate="none", norm_type="layer", parallel_residual=True, rope_interleaved=True,
             sliding_window=4, layer_types=BY_TURNS, no_rope_layers=(1, 0, 1), tie_word_embeddings=True)
    ),
    "experts side by side": Kind(
        dict(attention_gate="headwise", parallel_residual=True, residual_multiplier=0.5, moe=EXPERTS | SHARED),
        chooses=True, family=False,
    ),
    "attention in chunks, experts with scaled inputs": Kind(  # as Llama 4
        dict(
            attention_gate="none", attention_chunk_size=5, no_rope_layers=(1, 0, 1), rope_interleaved=True,
            layer_types=("chunked_attention", "full_attention", "chunked_attention"), qk_norm=True,
            qk_norm_weights=False, qk_norm_after_rope=True, qk_norm_layers="rope",
            mlp_layer_types=("dense", "sparse", "sparse"),
            moe=EXPERTS | dict(router_scores="sigmoid", norm_topk_prob=False, scale_inputs=True,
                               shared_expert_intermediate_size=64),
        ),
        chooses=True,
    ),
    "chunks, gated": Kind(
        dict(attention_chunk_size=6, layer_types=("chunked_attention", "full_attention", "chunked_attention"))
    ),
    "norms after RoPE": Kind(dict(attention_gate="none", qk_norm=True, qk_norm_after_rope=True)),
    "linear attention": Kind(
        dict(
            layer_types=("linear_attention", "full_attention", "linear_attention"),
            linear_attention=dict(num_key_heads=2, num_value_heads=4, key_head_dim=16, value_head_dim=16),
            attention_gate="elementwise", qk_norm=True, zero_centered_norm=True,
        ),
        rounds=2.0,
    ),
    "latent attention": Kind(  # rows of the first projection are padded
        dict(**LATENT, **BIASED, rope_interleaved=True, latent_attention=NARROW)
    ),
    "latent attention, wide values": Kind(
        dict(
            **LATENT, rope_scaling=YARN | dict(mscale_all_dim=1.0),
            latent_attention=dict(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=64),
        )
    ),
    "latent attention, a gate per head": Kind(
        dict(**LATENT | dict(attention_gate="headwise"), latent_attention=NARROW, rope_interleaved=True)
    ),
    "latent attention, one width": Kind(dict(**LATENT, latent_attention=ALIKE)),
    "gated convolution": Kind(
        dict(layer_types=("conv", "full_attention", "conv"), short_conv=dict(kernel_dim=3), qk_norm=True,
             attention_gate="none")
    ),
    "gated convolution, biases": Kind(
        dict(layer_types=("conv", "full_attention", "conv"), short_conv=dict(kernel_dim=5, bias=True), qk_norm=True,
             attention_gate="none")
    ),
    "Mamba 2": Kind(
        dict(
            layer_types=("mamba2", "full_attention", "mamba2"), attention_gate="none",
            mamba2=dict(num_heads=8, head_dim=16, state_dim=32, num_groups=4),
        ),
        rounds=2.0,
    ),
    "Mamba 2, biases": Kind(
        dict(
            layer_types=("mamba2", "mamba2", "full_attention"), attention_gate="none",
            mamba2=dict(num_heads=8, head_dim=16, state_dim=24, num_groups=1, bias=True,
                        time_step_min=0.01, time_step_max=0.5),
        ),
        rounds=2.0,
    ),
    "Kimi Delta Attention": Kind(
        dict(
            **LATENT, latent_attention=ALIKE, layer_types=("kda", "latent_attention", "kda"),
            no_rope_layers=(0, 0, 0), kda=dict(num_heads=3, head_dim=32, gate_rank=32),
        ),
        rounds=2.0,
    ),
    "one part per layer": Kind(
        dict(
            layer_types=("mamba2", "mlp", "full_attention"), mlp_layer_types=("none", "sparse", "none"),
            attention_gate="none", no_rope_layers=(0, 0, 0), hidden_act="relu2", mlp_gate=False,
            mamba2=dict(num_heads=8, head_dim=16, state_dim=32, num_groups=4, time_step_min=0.001),
            moe=EXPERTS | dict(latent_size=32, shared_expert_intermediate_size=96, router_scores="sigmoid",
                               expert_bias=True, router_fp32=True),
        ),
        chooses=True, rounds=2.0,
    ),
    "short convolution": Kind(
        dict(layer_types=("short_conv", "full_attention", "short_conv")), registered, family=False
    ),
    "no attention": Kind(dict(layer_types=("short_conv",) * 3), registered, family=False),
    "Mamba 2 beside attention": Kind(  # Falcon-H1
        dict(
            layer_types=("parallel",) * 3, attention_gate="none", mlp_multipliers=(0.7, 1.3),
            parallel_mixers=dict(input_multipliers=(1.1, 0.8), output_multipliers=(0.9, 0.6)),
            mamba2=dict(num_heads=6, head_dim=16, state_dim=32, num_groups=2, norm="none",
                        multipliers=(0.9, 0.8, 1.2, 0.7, 1.1)),
        ),
        rounds=2.0,
    ),
    "two states, two windows": Kind(  # of one kind each
        dict(
            layer_types=("parallel", "full_attention", "parallel"), sliding_window=4, attention_gate="headwise",
            parallel_mixers=dict(mixers=("conv", "sliding_attention", "full_attention", "mamba2")), qk_norm=True,
            short_conv=dict(kernel_dim=3, bias=True),
            mamba2=dict(num_heads=4, head_dim=16, state_dim=16, num_groups=2, norm="before_gate", bias=True,
                        out_bias=False, multipliers=(0.9, 0.8, 1.2, 0.7, 1.1)),
        ),
        rounds=2.0, family=False,
    ),
}  # fmt: skip
WINDOW: dict[str, Any] = dict(sliding_window=5, layer_types=BY_TURNS)
OPTIONS: dict[str, dict[str, Any]] = {
    "Granite": dict(
        attention_gate="none", embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=2.0,
        attention_multiplier=0.2,
    ),
    "OLMo 3": dict(
        attention_gate="none", norm_position="post", qk_norm=True, qk_norm_scope="all_heads", **WINDOW,
        sliding_rope=dict(rope_theta=100.0),
    ),
    "GLM-4": dict(
        attention_gate="none", norm_position="both", rope_interleaved=True, partial_rotary_factor=0.5,
        attention_bias=True,
    ),
    "Gemma 2": dict(
        attention_gate="none", norm_position="both", zero_centered_norm=True, hidden_act="gelu_pytorch_tanh",
        attn_logit_softcapping=3.0, final_logit_softcapping=4.0, embedding_multiplier=8.0, tie_word_embeddings=True,
        **WINDOW,
    ),
    "LayerNorms": dict(norm_type="layer", norm_position="both", zero_centered_norm=True, qk_norm=True),
    "AFM": dict(attention_gate="none", hidden_act="relu2", mlp_gate=False),
    "Laguna": dict(attention_gate="headwise", attention_gate_activation="softplus", qk_norm=True),
    "sinks": dict(attention_sinks=True, qk_norm=True, **WINDOW),
    "Ministral 3": dict(query_scale_beta=0.3, query_scale_length=4),
    "biases": dict(attention_bias=True, attention_output_bias=True, mlp_bias=True, hidden_act="gelu"),
    "gated, capped, post": dict(
        norm_position="post", attn_logit_softcapping=2.0, mlp_bias=True, mlp_gate=False, attention_output_bias=True,
        logits_scaling=3.0,
    ),
}  # fmt: skip
KINDS |= {name: Kind(fields) for name, fields in OPTIONS.items()}
# In slow tests; random pairs and the tests of families draw such options too.
RARER = ("headwise gate", "no gate", "no attention", "shared expert", *OPTIONS)
RARER += ("gated convolution, biases", "Mamba 2, biases")
RARER += ("two states, two windows", "chunks, gated", "experts side by side")
RARER += ("experts with a norm after them", "experts with norms of their own")
RARER += ("latent attention, wide values", "latent attention, one width")
EMULATED: dict[str, Any] = dict(engine="emulated", device="cpu")
NO_EDGES = dict(num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0)
# The first is FP32, and the second BF16 by whatever kernels run by default. Relative differences of whole tensors: a
# BF16 number is rounded by up to 2^-9, and about 20 roundings between an embedding and a logit add up as their root.
WHERE = [
    pytest.param((EMULATED | dict(dtype=torch.float32), 1e-5), id="emulated"),
    pytest.param((PLACE, 2.0**-6), id="default", marks=pytest.mark.gpu),
]
Where = tuple[dict[str, Any], float]


def build(kind: Kind, recipe: str = "bf16", **options: Any) -> CausalLM:
    """Return a model of the kind; its biases and sinks are those of any division, and not zero."""
    torch.manual_seed(0)
    edges = NO_EDGES if recipe != "bf16" else {}
    model = CausalLM(kind.config, recipe=recipe, **{**EMULATED, **edges, **options})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.fill_(0.2)
            elif "bias" in name:  # small beside what tokens contribute
                parameter.fill_(0.05)
            elif name.endswith("q_norm.weight") and kind.config.attention_multiplier == 1.0:
                # As Gemma 4 learns them. With ones its scores are so large that BF16 alone moves logits by 1.7 times
                # the bound of WHERE, and by 17 times where a router follows.
                parameter.fill_(0.3)
    return model


def tokens(model: CausalLM, rows: int = 2, length: int = 24, seed: int = 0) -> Tensor:
    ids = torch.randint(
        0, SHAPE["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(seed)
    )
    return ids.to(model.device)


def gradients(model: CausalLM) -> dict[str, Tensor]:
    """Take the gradients of all parameters."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    assert found
    return found


def assert_close(found: Tensor, expected: Tensor, bound: float, name: str = "") -> None:
    error, size = (found.double() - expected.double()).norm(), expected.double().norm()
    if found.numel() < 16:  # sums over all tokens of both signs: the ratio of so few scatters
        bound *= 2
    assert error <= bound * size, f"{name}: difference {error:.2g}, size {size:.2g}"
