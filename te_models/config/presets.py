"""Named model shapes: a preset is a row of ModelConfig fields. No torch."""

from __future__ import annotations

from typing import Any

from te_models.config.model import ModelConfig, config_fields
from te_models.errors import unknown


def _llama3_scaling(factor: float) -> dict[str, Any]:
    """Return the RoPE scaling of Llama 3.1 and 3.2, which differ in the factor."""
    original = dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    return dict(rope_type="llama3", factor=factor, **original)


_LLAMA3: dict[str, Any] = dict(
    vocab_size=128256, num_key_value_heads=8, max_position_embeddings=131072, rope_theta=500000.0,
    attention_gate="none", bos_token_id=128000, eos_token_id=128001,
)  # fmt: skip
_QWEN3: dict[str, Any] = dict(
    vocab_size=151936, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, rope_theta=1000000.0,
    rms_norm_eps=1e-6, attention_gate="none", qk_norm=True, bos_token_id=151643, eos_token_id=151645,
)  # fmt: skip
# QwQZh/gated_attention; the elementwise model pays for its gate with a narrower MLP.
_QWEN_GATED: dict[str, Any] = dict(
    vocab_size=152064, hidden_size=2048, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
    head_dim=128, rms_norm_eps=1e-6, qk_norm=True, tie_word_embeddings=True, bos_token_id=151643, eos_token_id=151645,
)  # fmt: skip

# One row per model; fields left out have ModelConfig's defaults (elementwise gate, one KV head per query head).
PRESETS: dict[str, dict[str, Any]] = {
    # Bytes as tokens (256 and three special ones, padded to the FP8 alignment): trains on two CPU cores in minutes.
    "gated-nano": dict(
        vocab_size=288, hidden_size=192, intermediate_size=512, num_hidden_layers=6, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=True,
    ),
    "gated-124m": dict(
        vocab_size=32000, hidden_size=768, intermediate_size=2304, num_hidden_layers=12, num_attention_heads=12,
        tie_word_embeddings=True,
    ),
    "gated-350m": dict(
        vocab_size=32000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=24, num_attention_heads=8,
        tie_word_embeddings=True,
    ),
    "gated-896": dict(
        vocab_size=32000, hidden_size=896, intermediate_size=3584, num_hidden_layers=24, num_attention_heads=14,
        tie_word_embeddings=True,
    ),
    "gated-1b": dict(
        vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=20, num_attention_heads=16,
    ),
    "gated-3b": dict(
        vocab_size=32000, hidden_size=3072, intermediate_size=8192, num_hidden_layers=26, num_attention_heads=24,
        num_key_value_heads=8, max_position_embeddings=8192, rope_theta=500000.0,
    ),
    "gated-8b": dict(
        vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=8192, rope_theta=500000.0,
    ),
    # The shapes of published models, from their config.json.
    "llama-3.2-1b": dict(
        **_LLAMA3, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        rope_scaling=_llama3_scaling(32.0), tie_word_embeddings=True,
    ),
    "llama-3.1-8b": dict(
        **_LLAMA3, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        rope_scaling=_llama3_scaling(8.0),
    ),
    "qwen2.5-0.5b": dict(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, max_position_embeddings=32768, rope_theta=1000000.0, rms_norm_eps=1e-6,
        attention_gate="none", attention_bias=True, tie_word_embeddings=True, bos_token_id=151643, eos_token_id=151643,
    ),
    "qwen3-0.6b": dict(
        **_QWEN3, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        tie_word_embeddings=True,
    ),
    "qwen3-1.7b": dict(
        **_QWEN3, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16,
        tie_word_embeddings=True,
    ),
    "qwen3-4b": dict(
        **_QWEN3, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
        tie_word_embeddings=True,
    ),
    "qwen3-8b": dict(
        **_QWEN3, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
    ),
    "mistral-7b-v0.3": dict(
        vocab_size=32768, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=32768, rope_theta=1000000.0, attention_gate="none",
        bos_token_id=1, eos_token_id=2,
    ),
    "smollm3-3b": dict(
        vocab_size=128256, hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16,
        num_key_value_heads=4, max_position_embeddings=65536, rope_theta=5000000.0, rms_norm_eps=1e-6,
        no_rope_layers=(1, 1, 1, 0) * 9, attention_gate="none", tie_word_embeddings=True, bos_token_id=128000,
        eos_token_id=128012, pad_token_id=128004,
    ),
    "qwen-gated-1b-elementwise": dict(**_QWEN_GATED, intermediate_size=5504, attention_gate="elementwise"),
    "qwen-gated-1b-headwise": dict(**_QWEN_GATED, intermediate_size=6144, attention_gate="headwise"),
    "qwen-gated-1b-baseline": dict(**_QWEN_GATED, intermediate_size=6144, attention_gate="none"),
}  # fmt: skip


def list_presets() -> list[str]:
    """Return the names of all presets."""
    return list(PRESETS)


def get_preset(name: str, **overrides: Any) -> ModelConfig:
    """Return the ModelConfig of a preset, with any field overridden.

    Fields that the preset does not set and that follow from others (head_dim, num_key_value_heads) are derived after
    the overrides.

    Raises:
        UsageError: an unknown preset or field; the message names the nearest.
    """
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    known = config_fields()
    for field in overrides:
        if field not in known:
            raise unknown("config field", field, known)
    return ModelConfig(**{**PRESETS[name], **overrides})
