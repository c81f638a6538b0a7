"""Models with what treats positions, keys or weights in a way of its own, and prompts of unequal length."""

from typing import Any

import torch

from te_models import CausalLM

SHAPE: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4
)
SHAPE |= dict(num_key_value_heads=2, max_position_embeddings=96, tie_word_embeddings=False)
YARN = dict(rope_type="yarn", factor=2.0, original_max_position_embeddings=16)
LONG = dict(
    rope_type="longrope",
    short_factor=[1.0] * 8,
    long_factor=[2.0] * 8,
    original_max_position_embeddings=24,
)
# What treats positions, keys or weights in a way of its own.
FEATURES: dict[str, dict[str, Any]] = {
    "gated": {},
    "llama": dict(attention_gate="none", rope_scaling=dict(rope_type="linear", factor=2.0)),
    "headwise": dict(attention_gate="headwise", tie_word_embeddings=True),
    "qwen2": dict(attention_bias=True, num_key_value_heads=4),
    "qwen3": dict(qk_norm=True, head_dim=32),
    "mistral": dict(sliding_window=5),
    "window by layer": dict(sliding_window=5, layer_types=["full_attention", "sliding_attention"] * 2),
    "smollm3": dict(no_rope_layers=[1, 0, 1, 0]),
    "qwen3_next": dict(partial_rotary_factor=0.5, zero_centered_norm=True, qk_norm=True),
    "cohere2": dict(norm_type="layer", parallel_residual=True, sliding_window=5, no_rope_layers=[1, 0, 1, 0],
                    layer_types=["sliding_attention", "full_attention"] * 2, rope_interleaved=True),
    "llama4": dict(attention_chunk_size=6, no_rope_layers=[1, 0, 1, 0],
                   layer_types=["chunked_attention", "full_attention"] * 2),
    "dynamic": dict(rope_scaling=dict(rope_type="dynamic", factor=3.0), max_position_embeddings=32),
    "yarn": dict(rope_scaling=YARN),
    "longrope": dict(rope_scaling=LONG),
    "deepseek_v3": dict(
        attention_gate="none", num_key_value_heads=4, head_dim=16, rope_interleaved=True, rope_scaling=YARN,
        latent_attention=dict(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16),
    ),
}  # fmt: skip
PROMPTS = [list(b"the quick brown fox"), list(b"jumps"), list(b"over the dog")]


def build(recipe: str = "bf16", **options: Any) -> CausalLM:
    torch.manual_seed(1)
    dtype = torch.float32 if recipe == "bf16" else torch.bfloat16
    place = dict(device="cpu", engine="emulated", dtype=dtype)
    model = CausalLM.from_preset("gated-nano", recipe=recipe, **{**place, **SHAPE, **options})
    with torch.no_grad():  # weights of a trained model's size: a key at a wrong place matters
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
    return model
