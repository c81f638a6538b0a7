"""Named model shapes: a preset is a row of ModelConfig fields. No torch.

To add a model, add a row to `PRESETS`; what several models of a family share is in te_models.config.preset_shapes
and te_models.config.preset_gemma.
"""

from typing import Any

from te_models.config.fields import PER_LAYER
from te_models.config.model import ModelConfig
from te_models.config.preset_gemma import GEMMA, GEMMA_1, gemma2, gemma3, gemma4, gemma4_small
from te_models.config.preset_shapes import (
    EXAONE4,
    EXAONE35,
    GRANITE,
    HUNYUAN,
    LFM2_ATTENTION,
    LLAMA3,
    MINISTRAL3,
    MISTRAL,
    OLMO2,
    OLMO3,
    QWEN3,
    QWEN_GATED,
    PresetFields,
    command_r,
    falcon_h1,
    gpt_oss,
    granite3_moe,
    granite4,
    hybrid_layers,
    lfm2,
    llama3_scaling,
    nemotron,
    qwen_hybrid,
    shape_of,
    trinity,
    windowed,
)
from te_models.config.preset_towers import TEXT_TOWERS
from te_models.errors import check_known

# One row per model. The numbers of `shape_of` are: width, channels of the MLP, layers, query heads, key/value heads.
# Fields left out have ModelConfig's defaults (elementwise gate, one KV head per query head).
PRESETS: dict[str, PresetFields] = {
    # Bytes as tokens (256 and three special ones, padded to the FP8 alignment): trains on two CPU cores in minutes.
    "gated-nano": shape_of(192, 512, 6, 6, 2, vocab_size=288, max_position_embeddings=1024, tie_word_embeddings=True),
    "gated-hybrid-nano": shape_of(
        192, 512, 8, 6, 2, **hybrid_layers(8), vocab_size=288, max_position_embeddings=1024, tie_word_embeddings=True,
        linear_attention=dict(num_key_heads=3, num_value_heads=6, key_head_dim=32, value_head_dim=32),
    ),
    # gated-nano with experts, of the architecture of Qwen3-Next: as many parameters per token, and two and a half times
    # as many in all.
    "gated-moe-nano": shape_of(
        192, 512, 6, 6, 2, vocab_size=288, max_position_embeddings=1024, tie_word_embeddings=True, qk_norm=True,
        zero_centered_norm=True,
        moe=dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=192, router_aux_loss_coef=0.01,
                 shared_expert_intermediate_size=128, shared_expert_gate=True),
    ),
    "gated-124m": shape_of(768, 2304, 12, 12, vocab_size=32000, tie_word_embeddings=True),
    "gated-350m": shape_of(1024, 2816, 24, 8, vocab_size=32000, tie_word_embeddings=True),
    "gated-896": shape_of(896, 3584, 24, 14, vocab_size=32000, tie_word_embeddings=True),
    # The shapes of the runs of these names in recipes/runs/.
    "test-8bit": shape_of(256, 512, 4, 8, attention_gate="none", vocab_size=50257),
    "d20-e3-full": shape_of(768, 2688, 24, 12, attention_gate="none", vocab_size=50257),
    "medium-3b": shape_of(
        2048, 7168, 28, 32, 8, attention_gate="none", vocab_size=50257, tie_word_embeddings=True
    ),
    "gated-1b": shape_of(2048, 5632, 20, 16, vocab_size=32000),
    "gated-3b": shape_of(3072, 8192, 26, 24, 8, vocab_size=32000, max_position_embeddings=8192, rope_theta=500000.0),
    "gated-8b": shape_of(4096, 14336, 32, 32, 8, vocab_size=32000, max_position_embeddings=8192, rope_theta=500000.0),
    # The shapes of published models, from their config.json.
    "llama-3.2-1b": shape_of(2048, 8192, 16, 32, **LLAMA3, rope_scaling=llama3_scaling(32.0), tie_word_embeddings=True),
    "llama-3.1-8b": shape_of(4096, 14336, 32, 32, **LLAMA3, rope_scaling=llama3_scaling(8.0)),
    "qwen2.5-0.5b": shape_of(
        896, 4864, 24, 14, 2, vocab_size=151936, max_position_embeddings=32768, rope_theta=1000000.0, rms_norm_eps=1e-6,
        attention_gate="none", attention_bias=True, tie_word_embeddings=True, bos_token_id=151643, eos_token_id=151643,
    ),
    "qwen3-0.6b": shape_of(1024, 3072, 28, 16, **QWEN3, tie_word_embeddings=True),
    "qwen3-1.7b": shape_of(2048, 6144, 28, 16, **QWEN3, tie_word_embeddings=True),
    "qwen3-4b": shape_of(2560, 9728, 36, 32, **QWEN3, tie_word_embeddings=True),
    "qwen3-8b": shape_of(4096, 12288, 36, 32, **QWEN3),
    "mistral-7b-v0.3": shape_of(
        4096, 14336, 32, 32, 8, vocab_size=32768, max_position_embeddings=32768, rope_theta=1000000.0,
        attention_gate="none", bos_token_id=1, eos_token_id=2,
    ),
    "smollm3-3b": shape_of(
        2048, 11008, 36, 16, 4, vocab_size=128256, max_position_embeddings=65536, rope_theta=5000000.0,
        rms_norm_eps=1e-6, no_rope_layers=(1, 1, 1, 0) * 9, attention_gate="none", tie_word_embeddings=True,
        bos_token_id=128000, eos_token_id=128012, pad_token_id=128004,
    ),
    "ministral-8b-2410": dict(
        **MISTRAL, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, max_position_embeddings=32768,
        rope_theta=100000000.0, sliding_window=32768,
    ),
    "ministral3-3b": dict(
        **MINISTRAL3, hidden_size=3072, intermediate_size=9216, num_hidden_layers=26, tie_word_embeddings=True,
    ),
    "ministral3-8b": dict(**MINISTRAL3, hidden_size=4096, intermediate_size=14336, num_hidden_layers=34),
    "cwm-32b": shape_of(
        6144, 21504, 64, 48, 8, **windowed(64, 4), vocab_size=128256, head_dim=128, max_position_embeddings=131072,
        rope_theta=1000000.0, rope_scaling=llama3_scaling(16.0), sliding_window=8192, attention_gate="none",
        bos_token_id=128000, eos_token_id=(128001, 128008, 128009),
    ),
    "internlm3-8b": shape_of(
        4096, 10240, 48, 32, 2, vocab_size=128512, head_dim=128, max_position_embeddings=32768, rope_theta=50000000.0,
        rope_scaling=dict(rope_type="dynamic", factor=6.0), attention_gate="none", bos_token_id=1, eos_token_id=2,
        pad_token_id=2,
    ),
    "iquest-coder-v1-40b": shape_of(
        5120, 27648, 80, 40, 8, vocab_size=76800, head_dim=128, max_position_embeddings=131072, rope_theta=500000.0,
        attention_gate="none", bos_token_id=1, eos_token_id=(2, 75864, 75869),
    ),
    "seed-oss-36b": shape_of(
        5120, 27648, 64, 80, 8, vocab_size=155136, head_dim=128, max_position_embeddings=524288, rope_theta=10000000.0,
        rms_norm_eps=1e-6, attention_gate="none", attention_bias=True, bos_token_id=0, eos_token_id=2, pad_token_id=1,
    ),
    "phi-3-mini-4k": shape_of(
        3072, 8192, 32, 32, vocab_size=32064, sliding_window=2047, attention_gate="none", bos_token_id=1,
        eos_token_id=32000, pad_token_id=32000,
    ),
    "phi-4": shape_of(
        5120, 17920, 40, 40, 10, vocab_size=100352, max_position_embeddings=16384, rope_theta=250000.0,
        attention_gate="none", bos_token_id=100257, eos_token_id=100257, pad_token_id=100257,
    ),
    "granite-3.1-2b": dict(
        **GRANITE, hidden_size=2048, intermediate_size=8192, rope_theta=5000000.0, attention_multiplier=0.015625,
        logits_scaling=8.0,
    ),
    "granite-3.1-8b": dict(
        **GRANITE, hidden_size=4096, intermediate_size=12800, rope_theta=10000000.0, attention_multiplier=0.0078125,
        logits_scaling=16.0,
    ),
    "afm-4.5b": shape_of(
        2560, 18432, 36, 20, 4, vocab_size=128004, head_dim=128, max_position_embeddings=65536, hidden_act="relu2",
        mlp_gate=False,
        rope_scaling=dict(rope_type="yarn", factor=20.0, original_max_position_embeddings=4096, beta_fast=32.0,
                          beta_slow=1.0, mscale=1.0),
        attention_gate="none", bos_token_id=128000, eos_token_id=128003,
    ),
    "olmo2-7b": shape_of(4096, 11008, 32, 32, **OLMO2),
    "olmo2-13b": shape_of(5120, 13824, 40, 40, **OLMO2),
    "olmo2-32b": shape_of(5120, 27648, 64, 40, 8, **OLMO2),
    "olmo3-7b": shape_of(4096, 11008, 32, 32, **OLMO3, **windowed(32, 4, 3)),
    "olmo3-32b": shape_of(5120, 27648, 64, 40, 8, **OLMO3, **windowed(64, 4, 3)),
    "exaone4-1.2b": shape_of(
        2048, 4096, 30, 32, **EXAONE4, head_dim=64, max_position_embeddings=65536, tie_word_embeddings=True,
    ),
    "exaone4-32b": dict(
        **EXAONE4, hidden_size=5120, intermediate_size=27392, **windowed(64, 4, 3), num_attention_heads=40,
        head_dim=128, max_position_embeddings=131072, sliding_window=4096, no_rope_layers=(1, 1, 1, 0) * 16,
    ),
    "exaone-3.5-2.4b": dict(
        **EXAONE35, hidden_size=2560, intermediate_size=7168, num_hidden_layers=30, tie_word_embeddings=True,
    ),
    "exaone-3.5-7.8b": dict(**EXAONE35, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32),
    # The defaults of transformers 5.24 for kyutai/helium-1-preview.
    "helium-1-preview-2b": shape_of(
        2560, 7040, 24, 20, vocab_size=48000, max_position_embeddings=4096, rope_theta=100000.0, rms_norm_eps=1e-8,
        rope_interleaved=True, attention_gate="none", bos_token_id=1, eos_token_id=2, pad_token_id=3,
    ),
    "command-r-08-2024": command_r(
        8192, 24576, 40, 64, rope_theta=4000000.0, max_position_embeddings=131072, logits_scaling=16.0,
    ),
    "command-r7b": command_r(
        4096, 14336, 32, 32, **windowed(32, 4, 3), no_rope_layers=(1, 1, 1, 0) * 8, sliding_window=4096,
        rope_theta=50000.0, max_position_embeddings=132096, logits_scaling=4.0,
    ),
    "aya-23-8b": command_r(4096, 14336, 32, 32, max_position_embeddings=8192, logits_scaling=16.0),
    # Without its LongRoPE, which is for texts beyond 32,768 tokens.
    "minicpm3-4b": shape_of(
        2560, 6400, 62, 40, vocab_size=73448, max_position_embeddings=32768, attention_gate="none",
        embedding_multiplier=12.0, residual_multiplier=1.4 / 62**0.5, logits_scaling=10.0, tie_word_embeddings=True,
        latent_attention=dict(q_lora_rank=768, kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=32,
                              v_head_dim=64),
        initializer_range=0.1, bos_token_id=1, eos_token_id=2,
    ),
    "granite-3.1-1b-a400m": granite3_moe(1024, 24, 16, experts=32),
    "granite-3.1-3b-a800m": granite3_moe(1536, 32, 24, experts=40),
    "sarvam-30b": shape_of(
        4096, 8192, 19, 64, 4, vocab_size=262144, head_dim=64, max_position_embeddings=131072, rope_theta=8000000.0,
        rms_norm_eps=1e-6, attention_gate="none", qk_norm=True, initializer_range=0.006, eos_token_id=1,
        pad_token_id=0, mlp_layer_types=("dense", *["sparse"] * 18),
        moe=dict(num_experts=128, num_experts_per_tok=6, moe_intermediate_size=1024, routed_scaling_factor=2.5,
                 shared_expert_intermediate_size=1024, router_scores="sigmoid", expert_bias=True, router_fp32=True,
                 router_aux_loss_coef=0.0),
    ),
    "bamba-9b": shape_of(
        4096, 14336, 32, 32, 8, vocab_size=128256, max_position_embeddings=262144, partial_rotary_factor=0.5,
        layer_types=tuple("full_attention" if layer in (9, 18, 27) else "mamba2" for layer in range(32)),
        mamba2=dict(num_heads=128, head_dim=64, state_dim=128, num_groups=1), attention_gate="none",
        bos_token_id=128000, eos_token_id=128001, pad_token_id=0,
    ),
    # The releases scale every projection; of those above 0.5B these are the shapes, without the factors.
    "falcon-h1-0.5b": falcon_h1(
        1024, 2048, 36, 8, vocab_size=32784, head_dim=64, max_position_embeddings=16384,
        mamba2=dict(num_heads=24, head_dim=64, state_dim=128, num_groups=1, norm="none",
                    multipliers=(0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738)),
        parallel_mixers=dict(input_multipliers=(1.0, 1.25), output_multipliers=(0.9375, 0.23570226039551587)),
        mlp_multipliers=(0.8838834764831844, 0.5859375), attention_multiplier=0.39062499999999994 * 64**-0.5,
        embedding_multiplier=5.656854249492381, logits_scaling=1 / 0.0390625,
    ),
    "falcon-h1-1.5b": falcon_h1(2048, 4608, 24, 8, mamba2=dict(num_heads=48, head_dim=64)),
    "falcon-h1-1.5b-deep": falcon_h1(1280, 3072, 66, 6, mamba2=dict(num_heads=24, head_dim=64)),
    "falcon-h1-3b": falcon_h1(2560, 6144, 32, 10, mamba2=dict(num_heads=32, head_dim=128)),
    "falcon-h1-7b": falcon_h1(
        3072, 12288, 44, 12, mamba2=dict(num_heads=24, head_dim=128), vocab_size=130049,
        max_position_embeddings=262144,
    ),
    "falcon-h1-34b": falcon_h1(
        5120, 21504, 72, 20, mamba2=dict(num_heads=32, head_dim=128, num_groups=2), vocab_size=261120,
        num_key_value_heads=4, max_position_embeddings=262144,
    ),
    "vaultgemma-1b": shape_of(
        1152, 6912, 26, 4, 4, **{**GEMMA, "norm_position": "pre"}, **windowed(26, 2, 1)
        | dict(attn_logit_softcapping=50.0, final_logit_softcapping=30.0, sliding_window=512), vocab_size=256000,
        head_dim=256, embedding_multiplier=1152**0.5, max_position_embeddings=1024,
    ),
    "glm4-9b": shape_of(
        4096, 13696, 40, 32, 2, vocab_size=151552, head_dim=128, max_position_embeddings=32768,
        partial_rotary_factor=0.5, rope_interleaved=True, norm_position="both", attention_gate="none",
        attention_bias=True, eos_token_id=(151329, 151336, 151338), pad_token_id=151329,
    ),
    "gemma2-2b": gemma2(2304, 9216, 26, 8, 4),
    "gemma2-9b": gemma2(3584, 14336, 42, 16, 8),
    "gemma2-27b": gemma2(4608, 36864, 46, 32, 16, head_dim=128, attention_multiplier=144**-0.5),
    "gemma3-270m": gemma3(
        640, 2048, 18, 4, 1, stretch=1, sliding_window=512, vocab_size=262144, max_position_embeddings=32768,
    ),
    "gemma3-1b": gemma3(
        1152, 6912, 26, 4, 1, stretch=1, sliding_window=512, vocab_size=262144, max_position_embeddings=32768,
    ),
    "gemma3-4b": gemma3(2560, 10240, 34, 8, 4),
    "gemma3-12b": gemma3(3840, 15360, 48, 16, 8),
    "gemma3-27b": gemma3(5376, 21504, 62, 32, 16, head_dim=128, attention_multiplier=168**-0.5),
    "gemma4-e2b": gemma4_small(1536, 6144, 35, 1, period=5, reusing_layers=20, wide=True),
    "gemma4-e4b": gemma4_small(2560, 10240, 42, 2, period=6, reusing_layers=18),
    "gemma4-31b": gemma4(5376, 21504, 60, heads=(32, 16, 4)),
    "gemma4-26b-a4b": gemma4(
        2816, 2112, 30, heads=(16, 8, 2),
        moe=dict(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=704, separate_norms=True,
                 shared_expert_intermediate_size=2112, router_aux_loss_coef=0.0),
    ),
    "muse-glimmer-30b": dict(
        vocab_size=202048, hidden_size=6656, intermediate_size=19968, **windowed(52, 4, 3), num_attention_heads=32,
        num_key_value_heads=2, head_dim=128, max_position_embeddings=131072, rope_theta=500000.0, sliding_window=2048,
        no_rope_layers=(1, 1, 1, 0) * 13, attention_gate="elementwise", attention_multiplier=3.87 * 128**-0.5,
        qk_norm=True, qk_norm_weights=False, embedding_norm=True, norm_position="both", post_norm_eps=1e-8,
        zero_centered_norm=True, plain_final_norm=True, logits_scaling=1 / 0.19611613513818404,
        final_logit_softcapping=20.0, bos_token_id=200000, eos_token_id=200001,
    ),
    "ernie-4.5-21b-a3b": dict(
        vocab_size=103424, hidden_size=2560, intermediate_size=12288, num_hidden_layers=28, num_attention_heads=20,
        num_key_value_heads=4, max_position_embeddings=131072, rope_theta=500000.0, rope_interleaved=True,
        attention_gate="none", tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        mlp_layer_types=("dense", *["sparse"] * 27),
        moe=dict(num_experts=64, num_experts_per_tok=6, moe_intermediate_size=1536, router_fp32=True,
                 shared_expert_intermediate_size=3072, expert_bias=True),
    ),
    "mistral-small-3.1-24b": shape_of(
        5120, 32768, 40, 32, 8, vocab_size=131072, head_dim=128, max_position_embeddings=131072,
        rope_theta=1000000000.0, attention_gate="none", bos_token_id=1, eos_token_id=2,
    ),
    "qwen3-30b-a3b": shape_of(
        2048, 6144, 48, 32, 4, vocab_size=151936, head_dim=128, max_position_embeddings=40960, rope_theta=1000000.0,
        rms_norm_eps=1e-6, attention_gate="none", qk_norm=True, bos_token_id=151643, eos_token_id=151645,
        moe=dict(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, router_aux_loss_coef=0.001),
    ),
    "qwen1.5-moe-a2.7b": shape_of(
        2048, 5632, 24, 16, 16, vocab_size=151936, max_position_embeddings=8192, rope_theta=1000000.0,
        rms_norm_eps=1e-6, attention_gate="none", attention_bias=True, bos_token_id=151643, eos_token_id=151643,
        moe=dict(num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408, norm_topk_prob=False,
                 shared_expert_intermediate_size=5632, shared_expert_gate=True, router_aux_loss_coef=0.001),
    ),
    "olmoe-1b-7b": shape_of(
        2048, 1024, 16, 16, 16, vocab_size=50304, max_position_embeddings=4096, attention_gate="none", qk_norm=True,
        qk_norm_scope="all_heads", eos_token_id=50279, pad_token_id=1,
        moe=dict(num_experts=64, num_experts_per_tok=8, moe_intermediate_size=1024, norm_topk_prob=False,
                 router_aux_loss_coef=0.01),
    ),
    "deepseek-v2-lite": shape_of(
        2048, 10944, 27, 16, 16, vocab_size=102400, head_dim=64, max_position_embeddings=163840, rms_norm_eps=1e-6,
        rope_interleaved=True, attention_gate="none", bos_token_id=100000, eos_token_id=100001,
        rope_scaling=dict(rope_type="yarn", factor=40.0, original_max_position_embeddings=4096, beta_fast=32.0,
                          beta_slow=1.0, mscale=0.707, mscale_all_dim=0.707),
        latent_attention=dict(q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
                              v_head_dim=128),
        mlp_layer_types=("dense", *["sparse"] * 26),
        moe=dict(num_experts=64, num_experts_per_tok=6, moe_intermediate_size=1408, norm_topk_prob=False,
                 shared_expert_intermediate_size=2816, router_fp32=True, group_scores=1, router_aux_loss_coef=0.0),
    ),
    # The defaults of transformers 5.24.
    "glm-4.7-flash": shape_of(
        2048, 10240, 47, 20, 20, vocab_size=154880, head_dim=64, max_position_embeddings=202752,
        rope_interleaved=True, attention_gate="none", bos_token_id=0, eos_token_id=1,
        latent_attention=dict(q_lora_rank=768, kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64,
                              v_head_dim=256),
        mlp_layer_types=("dense", *["sparse"] * 46),
        moe=dict(num_experts=64, num_experts_per_tok=4, moe_intermediate_size=1536, router_scores="sigmoid",
                 shared_expert_intermediate_size=1536, expert_bias=True, router_fp32=True, routed_scaling_factor=1.8,
                 router_aux_loss_coef=0.0),
    ),
    "mellum2-12b-a2.5b": shape_of(
        2304, 7168, 28, 32, 4, vocab_size=98304, head_dim=128, max_position_embeddings=131072, rope_theta=500000.0,
        rms_norm_eps=1e-6, attention_gate="none", qk_norm=True,
        moe=dict(num_experts=64, num_experts_per_tok=8, moe_intermediate_size=896, router_aux_loss_coef=0.001),
    ),
    "granite-swash-2b": shape_of(
        2560, 8192, 24, 20, 4, vocab_size=100352, max_position_embeddings=8192, sliding_window=128,
        layer_types=("full_attention", "sliding_attention", "sliding_attention", "sliding_attention") * 6,
        attention_gate="none", attention_multiplier=1.0, attention_sinks=True, tie_word_embeddings=True,
        bos_token_id=100257, eos_token_id=100257,
    ),
    "youtu-llm-2b": shape_of(
        2048, 6144, 32, 16, 16, vocab_size=128256, head_dim=64, max_position_embeddings=131072, rms_norm_eps=1e-6,
        rope_interleaved=True, attention_gate="none", tie_word_embeddings=True, bos_token_id=128000,
        eos_token_id=128001, initializer_range=0.01976423537605237,
        latent_attention=dict(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
                              v_head_dim=128),
    ),
    "ernie-4.5-0.3b": shape_of(
        1024, 3072, 18, 16, 2, vocab_size=103424, head_dim=128, max_position_embeddings=131072, rope_theta=500000.0,
        rope_interleaved=True, attention_gate="none", tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
        pad_token_id=0,
    ),
    "gemma-2b": shape_of(2048, 16384, 18, 8, 1, embedding_multiplier=2048**0.5, **GEMMA_1),
    "gemma-7b": shape_of(3072, 24576, 28, 16, 16, embedding_multiplier=3072**0.5, **GEMMA_1),
    "glm-4-9b-2024": shape_of(
        4096, 13696, 40, 32, 2, vocab_size=151552, max_position_embeddings=131072, rms_norm_eps=1.5625e-7,
        rope_interleaved=True, partial_rotary_factor=0.5, attention_gate="none", attention_bias=True,
        eos_token_id=(151329, 151336, 151338), pad_token_id=151329,
    ),
    "flexolmo-7x7b": dict(
        vocab_size=100352, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
        max_position_embeddings=4096, rope_theta=500000.0, rms_norm_eps=1e-6, attention_gate="none", qk_norm=True,
        qk_norm_scope="all_heads", norm_position="post", eos_token_id=100257, pad_token_id=100277,
        moe=dict(num_experts=7, num_experts_per_tok=5, moe_intermediate_size=11008, norm_topk_prob=False,
                 router_aux_loss_coef=0.01),
    ),
    "qwen3.5-0.8b": qwen_hybrid(1024, 3584, 24, 8, 2, tie_word_embeddings=True),
    "qwen3.5-2b": qwen_hybrid(2048, 6144, 24, 8, 2, tie_word_embeddings=True),
    "qwen3.5-4b": qwen_hybrid(2560, 9216, 32, 16, 4, 32, tie_word_embeddings=True),
    "qwen3.5-9b": qwen_hybrid(4096, 12288, 32, 16, 4, 32),
    "qwen3.5-27b": qwen_hybrid(5120, 17408, 64, 24, 4, 48),
    # Qwen3.5-35B-A3B has the same.
    "qwen3.6-35b-a3b": qwen_hybrid(
        2048, 512, 40, 16, 2, 32,
        moe=dict(num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512,
                 shared_expert_intermediate_size=512, shared_expert_gate=True),
    ),
    "gpt-oss-20b": gpt_oss(24, 32),
    "gpt-oss-120b": gpt_oss(36, 128),
    "lfm2-350m": lfm2(1024, 4608, 16, LFM2_ATTENTION),
    "lfm2-700m": lfm2(1536, 6912, 16, LFM2_ATTENTION),
    "lfm2-1.2b": lfm2(2048, 8192, 16, LFM2_ATTENTION),
    "lfm2-8b-a1b": lfm2(
        2048, 7168, 24, (2, 6, 10, 14, 18, 21), mlp_layer_types=("dense",) * 2 + ("sparse",) * 22,
        moe=dict(num_experts=32, num_experts_per_tok=4, moe_intermediate_size=1792, router_scores="sigmoid",
                 expert_bias=True, norm_topk_eps=1e-6, router_aux_loss_coef=0.0),
    ),
    # The defaults of transformers 5.24 for LiquidAI/LFM3-1.7B.
    "lfm3-1.7b": shape_of(
        2048, 7680, 24, 16, 4, vocab_size=128000, head_dim=128, max_position_embeddings=128000, rope_theta=1000000.0,
        rope_scaling=dict(rope_type="proportional", partial_rotary_factor=0.5),
        sliding_rope=dict(rope_theta=10000.0), sliding_window=256, short_conv=dict(kernel_dim=7),
        layer_types=("conv", "conv", "full_attention", "conv")
        + ("sliding_attention", "conv", "full_attention", "conv") * 5,
        attention_gate="headwise", qk_norm=True, norm_position="both", tie_word_embeddings=True, bos_token_id=124894,
        eos_token_id=124900, pad_token_id=124893,
    ),
    "granite-4.0-h-micro": granite4(2048, 8192, 32, 8, logits_scaling=8.0),
    "granite-4.0-h-tiny": granite4(
        1536, 512, 12, 4, logits_scaling=6.0,
        moe=dict(num_experts=64, num_experts_per_tok=6, moe_intermediate_size=512,
                 shared_expert_intermediate_size=1024, router_aux_loss_coef=0.0),
    ),
    "granite-4.0-h-small": granite4(
        4096, 768, 32, 8, logits_scaling=16.0,
        moe=dict(num_experts=72, num_experts_per_tok=10, moe_intermediate_size=768,
                 shared_expert_intermediate_size=1536, router_aux_loss_coef=0.0),
    ),
    # NVIDIA-Nemotron-3-Nano-30B-A3B.
    "nemotron-3-nano-30b-a3b": nemotron(
        "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", hidden_size=2688, intermediate_size=1856,
        num_attention_heads=32, num_key_value_heads=2, max_position_embeddings=262144,
        mamba2=dict(num_heads=64, head_dim=64, state_dim=128, num_groups=8, time_step_min=0.001),
        moe=dict(num_experts=128, num_experts_per_tok=6, moe_intermediate_size=1856, router_scores="sigmoid",
                 shared_expert_intermediate_size=3712, expert_bias=True, router_fp32=True, routed_scaling_factor=2.5,
                 router_aux_loss_coef=0.0),
    ),
    "hunyuan-0.5b": shape_of(
        1024, 3584, 24, 16, 8, vocab_size=120818, bos_token_id=120000, eos_token_id=120020, **HUNYUAN
    ),
    "hunyuan-1.8b": shape_of(
        2048, 6144, 32, 16, 4, vocab_size=120818, bos_token_id=120000, eos_token_id=120020, **HUNYUAN
    ),
    "hunyuan-7b": shape_of(
        4096, 14336, 32, 32, 8, vocab_size=128167, bos_token_id=127958, eos_token_id=127960, pad_token_id=127961,
        **HUNYUAN,
    ),
    "trinity-nano-6b-a1b": trinity(1024, 3072, 56, 8, 2, 256),
    "trinity-mini-26b-a3b": trinity(2048, 6144, 32, 32, 4, 1024),
    "laguna-xs-2.1": dict(
        vocab_size=100352, hidden_size=2048, intermediate_size=8192, **windowed(40, 4), num_attention_heads=48,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=262144, rms_norm_eps=1e-6,
        sliding_heads=dict(num_attention_heads=64, num_key_value_heads=8, head_dim=128), sliding_window=512,
        sliding_rope=dict(rope_theta=10000.0), rope_theta=500000.0, partial_rotary_factor=0.5,
        rope_scaling=dict(rope_type="yarn", factor=32.0, original_max_position_embeddings=8192,
                          attention_factor=1.3465735902799727, beta_fast=64.0, beta_slow=1.0),
        attention_gate="headwise", attention_gate_activation="softplus", qk_norm=True, bos_token_id=2,
        eos_token_id=(2, 24), mlp_layer_types=("dense", *["sparse"] * 39),
        moe=dict(num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512, router_scores="sigmoid",
                 shared_expert_intermediate_size=512, routed_scaling_factor=2.5, expert_bias=True,
                 router_aux_loss_coef=0.001),
    ),
    "moonlight-16b-a3b": shape_of(
        2048, 11264, 27, 16, 16, vocab_size=163840, head_dim=64, max_position_embeddings=8192, rope_theta=50000.0,
        rope_interleaved=True, attention_gate="none",
        latent_attention=dict(q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
                              v_head_dim=128),
        mlp_layer_types=("dense", *["sparse"] * 26),
        moe=dict(num_experts=64, num_experts_per_tok=6, moe_intermediate_size=1408, router_scores="sigmoid",
                 shared_expert_intermediate_size=2816, router_fp32=True, routed_scaling_factor=2.446, expert_bias=True,
                 router_aux_loss_coef=0.0),
    ),
    "granite-swash-3b-a600m": shape_of(
        1280, 512, 28, 20, 4, vocab_size=100352, max_position_embeddings=8192, sliding_window=128,
        layer_types=("full_attention", "sliding_attention", "sliding_attention")
        + ("full_attention", "sliding_attention", "sliding_attention", "sliding_attention") * 6 + ("full_attention",),
        attention_gate="none", attention_multiplier=0.015625, attention_sinks=True, embedding_multiplier=12.0,
        residual_multiplier=0.26, logits_scaling=5.0, tie_word_embeddings=True, bos_token_id=100257,
        eos_token_id=100257,
        moe=dict(num_experts=48, num_experts_per_tok=4, moe_intermediate_size=512,
                 shared_expert_intermediate_size=1280, router_aux_loss_coef=0.001),
    ),
    "ling-3.0-tiny": dict(
        vocab_size=157184, hidden_size=1536, intermediate_size=4608, num_hidden_layers=24, num_attention_heads=16,
        num_key_value_heads=16, head_dim=64, max_position_embeddings=131072, rms_norm_eps=1e-6, rope_theta=6000000.0,
        rope_interleaved=True, layer_types=(("kda",) * 3 + ("latent_attention",)) * 6, attention_gate="headwise",
        kda=dict(num_heads=16, head_dim=128, gate_rank=None, decay_bound=5.0),
        latent_attention=dict(q_lora_rank=256, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
                              v_head_dim=128),
        mlp_layer_types=("dense", *["sparse"] * 23),
        moe=dict(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=512, router_scores="sigmoid",
                 shared_expert_intermediate_size=512, router_fp32=True, routed_scaling_factor=2.5, n_group=8,
                 topk_group=4, expert_bias=True, router_aux_loss_coef=0.0),
        eos_token_id=156895, pad_token_id=156892,
    ),
    **TEXT_TOWERS,
    "qwen-gated-1b-elementwise": dict(**QWEN_GATED, intermediate_size=5504, attention_gate="elementwise"),
    "qwen-gated-1b-headwise": dict(**QWEN_GATED, intermediate_size=6144, attention_gate="headwise"),
    "qwen-gated-1b-baseline": dict(**QWEN_GATED, intermediate_size=6144, attention_gate="none"),
}  # fmt: skip


def list_presets() -> list[str]:
    """Return the names of all presets."""
    return list(PRESETS)


def get_preset(name: str, **overrides: Any) -> ModelConfig:
    """Return the ModelConfig of a preset, with any field overridden.

    Fields that the preset does not set and that follow from others (head_dim, num_key_value_heads) are derived after
    the overrides. With fewer layers the first ones remain, each of its kind.

    Raises:
        UsageError: an unknown preset or field; the message names the nearest.
    """
    check_known("preset", name, PRESETS, "`te-models list`")
    layers = overrides.get("num_hidden_layers")
    # Fields with an entry per layer, such as layer_types, are cut to the layers that remain.
    kinds = {}
    for field in PER_LAYER:
        if isinstance(layers, int) and field in PRESETS[name]:
            kinds[field] = PRESETS[name][field]
    return ModelConfig(
        **{
            **PRESETS[name],
            **{field: types[:layers] for field, types in kinds.items()},
            **overrides,
        }
    )
