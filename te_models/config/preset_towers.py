"""Presets of the text models of releases that read images too, whose folders hold other tensors beside. No torch."""

from te_models.config.preset_gemma import gemma4
from te_models.config.preset_shapes import QWEN3, PresetFields, shape_of

_QWEN3_VL: PresetFields = {**QWEN3, "max_position_embeddings": 262144, "rope_theta": 5000000.0}
_QWEN2_VL: PresetFields = dict(
    rope_theta=1000000.0,
    rms_norm_eps=1e-6,
    attention_gate="none",
    attention_bias=True,
    bos_token_id=151643,
    eos_token_id=151645,
)

# shape_of(hidden size, intermediate size, layers, query heads, key and value heads).
TEXT_TOWERS: dict[str, PresetFields] = {
    "qwen2-vl-7b": shape_of(
        3584, 18944, 28, 28, 4, vocab_size=152064, max_position_embeddings=32768, **_QWEN2_VL
    ),
    "qwen2.5-vl-3b": shape_of(
        2048, 11008, 36, 16, 2, vocab_size=151936, max_position_embeddings=128000, tie_word_embeddings=True, **_QWEN2_VL
    ),
    "qwen2.5-vl-7b": shape_of(
        3584, 18944, 28, 28, 4, vocab_size=152064, max_position_embeddings=128000, **_QWEN2_VL
    ),
    "qwen3-vl-2b": shape_of(2048, 6144, 28, 16, tie_word_embeddings=True, **_QWEN3_VL),
    "qwen3-vl-4b": shape_of(2560, 9728, 36, 32, tie_word_embeddings=True, **_QWEN3_VL),
    "qwen3-vl-8b": shape_of(4096, 12288, 36, 32, **_QWEN3_VL),
    "qwen3-vl-32b": shape_of(5120, 25600, 64, 64, **_QWEN3_VL),
    "qwen3-vl-30b-a3b": shape_of(
        2048, 6144, 48, 32, **{**_QWEN3_VL, "num_key_value_heads": 4},
        moe=dict(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, router_aux_loss_coef=0.001),
    ),
    "gemma4-12b": gemma4(3840, 15360, 48, heads=(16, 8, 1)),
}  # fmt: skip
