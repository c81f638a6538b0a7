"""config.json as published, in the forms of the versions of transformers that wrote them, against our presets."""

from typing import Any

import pytest

from te_models import ModelConfig, get_preset
from te_models.errors import ConfigError
from te_models.interop.hf_families import family_of

SLIDING, FULL = "sliding_attention", "full_attention"
SILU = dict(
    hidden_act="silu",
    attention_dropout=0.0,
    initializer_range=0.02,
    use_cache=True,
    torch_dtype="bfloat16",
)
LLAMA3 = dict(rope_type="llama3", factor=16.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(original_max_position_embeddings=8192)


def sizes(
    hidden: int, mlp: int, layers: int, heads: int, kv: int, vocabulary: int, positions: int
) -> dict[str, Any]:
    return dict(
        hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv, vocab_size=vocabulary, max_position_embeddings=positions,
    )  # fmt: skip


def tokens(bos: Any, eos: Any, pad: Any) -> dict[str, Any]:
    return dict(bos_token_id=bos, eos_token_id=eos, pad_token_id=pad)


GEMMA3 = dict(
    model_type="gemma3_text", architectures=["Gemma3ForCausalLM"], attention_bias=False, attention_dropout=0.0,
    attn_logit_softcapping=None, cache_implementation="hybrid", final_logit_softcapping=None, head_dim=256,
    hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=256, rms_norm_eps=1e-6,
)  # fmt: skip
HUNYUAN = dict(
    model_type="hunyuan_v1_dense", architectures=["HunYuanDenseV1ForCausalLM"], **SILU, attention_bias=False,
    head_dim=128, rms_norm_eps=1e-5, rope_theta=10000.0, use_qk_norm=True, use_cla=False, tie_word_embeddings=True,
    rope_scaling=dict(type="dynamic", alpha=1000.0, factor=1.0, mscale=1.0),
)  # fmt: skip
TRINITY = dict(
    model_type="afmoe", architectures=["AfmoeForCausalLM"], **SILU, **tokens(None, None, None), head_dim=128,
    global_attn_every_n_layers=4, mup_enabled=True, n_group=1, num_dense_layers=2, num_expert_groups=1,
    num_experts=128, num_experts_per_tok=8, num_limited_groups=1, num_shared_experts=1, rms_norm_eps=1e-5,
    rope_scaling=None, rope_theta=10000, route_norm=True, route_scale=2.826, score_func="sigmoid",
    sliding_window=2048, tie_word_embeddings=False, topk_group=1, use_grouped_mm=True,
)  # fmt: skip
QWEN3_VL = dict(
    **SILU, **tokens(151643, 151645, None), attention_bias=False, head_dim=128, rms_norm_eps=1e-6, rope_theta=5000000,
    rope_scaling=dict(mrope_interleaved=True, mrope_section=[24, 20, 20], rope_type="default"),
)  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "command-r7b": dict(
        model_type="cohere2", architectures=["Cohere2ForCausalLM"], **SILU, attention_bias=False, head_dim=128,
        **sizes(4096, 14336, 32, 32, 8, 256000, 132096), **tokens(5, 255001, 0), layer_norm_eps=1e-5, logit_scale=0.25,
        cache_implementation="hybrid", layer_switch=4, order_of_interleaved_layers="local_attn_first",
        position_embedding_type="rope_gptj", rope_scaling=None, rope_theta=50000, rotary_pct=1.0, sliding_window=4096,
        sliding_window_pattern=4, use_embedding_sharing=True, use_gated_activation=True, use_parallel_block=True,
        use_parallel_embedding=False, use_qk_norm=False,
    ),
    "gemma3-1b": dict(
        **GEMMA3, **sizes(1152, 6912, 26, 4, 1, 262144, 32768), **tokens(2, 1, 0), rope_local_base_freq=10000,
        rope_scaling=None, rope_theta=1000000, sliding_window=512, _sliding_window_pattern=6,
        layer_types=[FULL if layer % 6 == 5 else SLIDING for layer in range(26)],
    ),
    "gemma3-270m": dict(
        **GEMMA3, **sizes(640, 2048, 18, 4, 1, 262144, 32768), **tokens(2, 1, 0), sliding_window=512,
        use_bidirectional_attention=False, tie_word_embeddings=True,
        layer_types=[FULL if layer % 6 == 5 else SLIDING for layer in range(18)],
        rope_parameters={FULL: dict(rope_theta=1000000.0, rope_type="default"),
                         SLIDING: dict(rope_theta=10000.0, rope_type="default")},
    ),
    "gemma3-12b": dict(
        **GEMMA3, **sizes(3840, 15360, 48, 16, 8, 262208, 131072), **tokens(2, 1, 0), rope_local_base_freq=10000.0,
        rope_scaling=dict(factor=8.0, rope_type="linear"), rope_theta=1000000.0, sliding_window=1024,
        sliding_window_pattern=6,
    ),
    "gemma2-9b": dict(
        model_type="gemma2", architectures=["Gemma2ForCausalLM"], attention_bias=False, attention_dropout=0.0,
        attn_logit_softcapping=50.0, cache_implementation="hybrid", final_logit_softcapping=30.0, head_dim=256,
        hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=256,
        **sizes(3584, 14336, 42, 16, 8, 256000, 8192), **tokens(2, 1, 0), rms_norm_eps=1e-6, rope_theta=10000.0,
        sliding_window=4096, sliding_window_size=4096,
    ),
    "olmo2-32b": dict(
        model_type="olmo2", architectures=["Olmo2ForCausalLM"], **SILU, attention_bias=False,
        **sizes(5120, 27648, 64, 40, 8, 100352, 4096), **tokens(None, 100257, 100277), rms_norm_eps=1e-6,
        rope_scaling=None, rope_theta=500000, tie_word_embeddings=False,
    ),
    "olmo3-7b": dict(
        model_type="olmo3", architectures=["Olmo3ForCausalLM"], **SILU, attention_bias=False,
        **sizes(4096, 11008, 32, 32, 32, 100278, 65536), **tokens(None, 100257, 100277), rms_norm_eps=1e-6,
        rope_theta=500000, sliding_window=4096, layer_types=[FULL if n % 4 == 3 else SLIDING for n in range(32)],
        rope_scaling=dict(rope_type="yarn", factor=8.0, attention_factor=1.2079441541679836, beta_fast=32, beta_slow=1,
                          original_max_position_embeddings=8192),
    ),
    "exaone4-1.2b": dict(
        model_type="exaone4", architectures=["Exaone4ForCausalLM"], **SILU, head_dim=64,
        **sizes(2048, 4096, 30, 32, 8, 102400, 65536), **tokens(1, 361, 0), rms_norm_eps=1e-5, rope_theta=1000000.0,
        rope_scaling=LLAMA3, sliding_window=None, sliding_window_pattern=None, layer_types=[FULL] * 30,
        tie_word_embeddings=True,
    ),
    "exaone4-32b": dict(
        model_type="exaone4", architectures=["Exaone4ForCausalLM"], **SILU, head_dim=128,
        **sizes(5120, 27392, 64, 40, 8, 102400, 131072), **tokens(1, 361, 0), rms_norm_eps=1e-5, rope_theta=1000000.0,
        rope_scaling=LLAMA3, sliding_window=4096, sliding_window_pattern="LLLG", tie_word_embeddings=False,
    ),
    "glm4-9b": dict(
        model_type="glm4", architectures=["Glm4ForCausalLM"], **SILU, attention_bias=True, head_dim=128,
        **sizes(4096, 13696, 40, 32, 2, 151552, 32768), **tokens(None, [151329, 151336, 151338], 151329),
        partial_rotary_factor=0.5, rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=False,
    ),
    "granite-3.1-2b": dict(
        model_type="granite", architectures=["GraniteForCausalLM"], **{**SILU, "attention_dropout": 0.1},
        attention_bias=False, mlp_bias=False, attention_multiplier=0.015625, embedding_multiplier=12.0,
        logits_scaling=8.0, residual_multiplier=0.22, **sizes(2048, 8192, 40, 32, 8, 49155, 131072), **tokens(0, 0, 0),
        rms_norm_eps=1e-5, rope_scaling=None, rope_theta=5000000.0, tie_word_embeddings=True,
    ),
    "phi-4": dict(
        model_type="phi3", architectures=["Phi3ForCausalLM"], **SILU, attention_bias=False, auto_map={}, embd_pdrop=0.0,
        resid_pdrop=0.0, **sizes(5120, 17920, 40, 40, 10, 100352, 16384), **tokens(100257, 100257, 100257),
        original_max_position_embeddings=16384, rms_norm_eps=1e-5, rope_scaling=None, rope_theta=250000,
        sliding_window=None, tie_word_embeddings=False,
    ),
    "phi-3-mini-4k": dict(
        model_type="phi3", architectures=["Phi3ForCausalLM"], **SILU, auto_map={"AutoConfig": "c.Phi3Config"},
        embd_pdrop=0.0, resid_pdrop=0.0, **sizes(3072, 8192, 32, 32, 32, 32064, 4096), **tokens(1, 32000, 32000),
        original_max_position_embeddings=4096, rms_norm_eps=1e-5, rope_scaling=None, rope_theta=10000.0,
        sliding_window=2047, tie_word_embeddings=False,
    ),
    "afm-4.5b": dict(
        model_type="arcee", architectures=["ArceeForCausalLM"], **{**SILU, "hidden_act": "relu2"}, attention_bias=False,
        mlp_bias=False, head_dim=128, **sizes(2560, 18432, 36, 20, 4, 128004, 65536), **tokens(128000, 128003, None),
        rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=False,
        rope_scaling=dict(rope_type="yarn", type="yarn", factor=20.0, beta_fast=32.0, beta_slow=1.0, mscale=1.0,
                          original_max_position_embeddings=4096),
    ),
    "seed-oss-36b": dict(
        model_type="seed_oss", architectures=["SeedOssForCausalLM"], **{**SILU, "attention_dropout": 0.1},
        residual_dropout=0.1, attention_bias=True, attention_out_bias=False, mlp_bias=False, head_dim=128,
        **sizes(5120, 27648, 64, 80, 8, 155136, 524288), **tokens(0, 2, 1), pretraining_tp=1, rms_norm_eps=1e-6,
        rope_scaling=dict(rope_type="default"), rope_theta=10000000.0, tie_word_embeddings=False,
    ),
    "internlm3-8b": dict(
        model_type="internlm3", architectures=["InternLM3ForCausalLM"], **SILU, bias=False, qkv_bias=False,
        auto_map={"AutoConfig": "c.InternLM3Config"}, head_dim=128, **sizes(4096, 10240, 48, 32, 2, 128512, 32768),
        **tokens(1, 2, 2), rms_norm_eps=1e-5, rope_scaling=dict(factor=6.0, rope_type="dynamic"), rope_theta=50000000,
        tie_word_embeddings=False,
    ),
    "iquest-coder-v1-40b": dict(
        model_type="iquestcoder", architectures=["IQuestCoderForCausalLM"], **SILU, attention_bias=False,
        mlp_bias=False, auto_map={"AutoConfig": "c.IQuestCoderConfig"}, clip_qkv=None, use_sliding_window=False,
        sliding_window=None, max_window_layers=0, head_dim=128, **sizes(5120, 27648, 80, 40, 8, 76800, 131072),
        **tokens(1, [2, 75864, 75869], None), pretraining_tp=1, rms_norm_eps=1e-5, rope_scaling=None,
        rope_theta=500000.0, tie_word_embeddings=False,
    ),
    "falcon-h1-0.5b": dict(
        model_type="falcon_h1", architectures=["FalconH1ForCausalLM"], **SILU, head_dim=64, attn_layer_indices=None,
        **sizes(1024, 2048, 36, 8, 2, 32784, 16384), **tokens(None, None, 0), attention_bias=False, mlp_bias=False,
        attention_in_multiplier=1.0, attention_out_multiplier=0.9375, embedding_multiplier=5.656854249492381,
        key_multiplier=0.39062499999999994, lm_head_multiplier=0.0390625, mamba_chunk_size=128, mamba_conv_bias=True,
        mamba_d_conv=4, mamba_d_head=64, mamba_d_ssm=1536, mamba_d_state=128, mamba_expand=2, mamba_n_groups=1,
        mamba_n_heads=24, mamba_norm_before_gate=False, mamba_proj_bias=False, mamba_rms_norm=False,
        mamba_use_mlp=True, mlp_multipliers=[0.8838834764831844, 0.5859375], projectors_bias=False, rms_norm_eps=1e-5,
        rope_scaling=None, rope_theta=100000000000.0, ssm_in_multiplier=1.25, tie_word_embeddings=False,
        ssm_multipliers=[0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
        ssm_out_multiplier=0.23570226039551587,
    ),
    "ministral3-3b": dict(
        model_type="ministral3", architectures=["Ministral3ForCausalLM"], **SILU, head_dim=128,
        **sizes(3072, 9216, 26, 32, 8, 131072, 262144), **tokens(1, 2, 11), rms_norm_eps=1e-5, sliding_window=None,
        tie_word_embeddings=True,
        rope_parameters=dict(rope_type="yarn", type="yarn", rope_theta=1000000.0, factor=16.0, beta_fast=32.0,
                             beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1,
                             original_max_position_embeddings=16384),
    ),
    "hunyuan-1.8b": dict(
        **HUNYUAN, **sizes(2048, 6144, 32, 16, 4, 120818, 262144), **tokens(120000, 120020, None),
    ),
    "hunyuan-7b": dict(
        **HUNYUAN, **sizes(4096, 14336, 32, 32, 8, 128167, 262144), **tokens(127958, 127960, 127961),
    ),
    "trinity-nano-6b-a1b": dict(
        **TRINITY, **sizes(1024, 3072, 56, 8, 2, 200192, 131072), moe_intermediate_size=256,
    ),
    "trinity-mini-26b-a3b": dict(
        **TRINITY, **sizes(2048, 6144, 32, 32, 4, 200192, 131072), moe_intermediate_size=1024,
    ),
    "laguna-xs-2.1": dict(
        model_type="laguna", architectures=["LagunaForCausalLM"], **SILU, head_dim=128, attention_bias=False,
        **sizes(2048, 8192, 40, 48, 8, 100352, 262144), **tokens(2, [2, 24], None), rms_norm_eps=1e-6,
        num_attention_heads_per_layer=[48, 64, 64, 64] * 10, layer_types=[FULL, SLIDING, SLIDING, SLIDING] * 10,
        sliding_window=512, gating="per-head", num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512,
        shared_expert_intermediate_size=512, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[0],
        mlp_layer_types=["dense"] + ["sparse"] * 39, moe_routed_scaling_factor=2.5, moe_router_logit_softcapping=0.0,
        tie_word_embeddings=False,
        rope_parameters={FULL: dict(rope_theta=500000.0, rope_type="yarn", factor=32.0, beta_slow=1.0, beta_fast=64.0,
                                    original_max_position_embeddings=8192, attention_factor=1.3465735902799727,
                                    partial_rotary_factor=0.5),
                         SLIDING: dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=1.0)},
    ),
    "granite-swash-3b-a600m": dict(
        model_type="granitemoe_swa", architectures=["GraniteMoeSWAForCausalLM"], **SILU, attention_bias=False,
        **sizes(1280, 512, 28, 20, 4, 100352, 8192), **tokens(100257, 100257, None), rms_norm_eps=1e-5,
        num_local_experts=48, num_experts_per_tok=4, shared_intermediate_size=1280, sliding_window=128,
        layer_types=[FULL if n == 0 or n % 4 == 3 else SLIDING for n in range(28)], embedding_multiplier=12,
        attention_multiplier=0.015625, residual_multiplier=0.26, logits_scaling=5, rope_theta=10000.0,
        tie_word_embeddings=True,
    ),
    "gemma4-12b": dict(
        model_type="gemma4_unified",
        text_config=dict(
            model_type="gemma4_unified_text", **sizes(3840, 15360, 48, 16, 8, 262144, 262144), head_dim=256,
            global_head_dim=512, num_global_key_value_heads=1, sliding_window=1024, hidden_size_per_layer_input=0,
            attention_k_eq_v=True, num_kv_shared_layers=0, final_logit_softcapping=30.0, tie_word_embeddings=True,
        ),
    ),
    "ling-3.0-tiny": dict(
        model_type="bailing_hybrid", architectures=["BailingMoeV3ForCausalLM"], **SILU, **tokens(None, 156895, 156892),
        **sizes(1536, 4608, 24, 16, 16, 157184, 131072), head_dim=128, rms_norm_eps=1e-6, rope_theta=6000000,
        rope_scaling=None, rope_interleave=True, tie_word_embeddings=False, layer_group_size=4,
        short_conv_kernel_size=4, no_kda_lora=True, kda_safe_gate=True, kda_lower_bound=-5.0,
        gated_attention_proj_granularity_type="head_wise", qk_head_dim=192, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, q_lora_rank=256, kv_lora_rank=512, use_qk_norm=True, first_k_dense_replace=1, num_experts=128,
        num_experts_per_tok=8, num_shared_experts=1, moe_intermediate_size=512,
        moe_shared_expert_intermediate_size=512, n_group=8, topk_group=4, norm_topk_prob=True,
        routed_scaling_factor=2.5, moe_router_enable_expert_bias=True, num_nextn_predict_layers=0,
    ),
    "moonlight-16b-a3b": dict(
        model_type="deepseek_v3", architectures=["DeepseekV3ForCausalLM"], **SILU, q_lora_rank=None, kv_lora_rank=512,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, rope_theta=50000.0, rms_norm_eps=1e-5,
        **sizes(2048, 11264, 27, 16, 16, 163840, 8192), **tokens(None, None, None), n_routed_experts=64,
        num_experts_per_tok=6, n_shared_experts=2, moe_intermediate_size=1408, first_k_dense_replace=1, n_group=1,
        topk_group=1, routed_scaling_factor=2.446, norm_topk_prob=True, scoring_func="sigmoid",
        topk_method="noaux_tc", tie_word_embeddings=False, num_nextn_predict_layers=0,
    ),
    "qwen2.5-vl-7b": dict(
        model_type="qwen2_5_vl", architectures=["Qwen2_5_VLForConditionalGeneration"], **SILU,
        **sizes(3584, 18944, 28, 28, 4, 152064, 128000), **tokens(151643, 151645, None), max_window_layers=28,
        rms_norm_eps=1e-6, rope_scaling=dict(mrope_section=[16, 24, 24], rope_type="default", type="default"),
        rope_theta=1000000.0, sliding_window=32768, use_sliding_window=False, tie_word_embeddings=False,
    ),
    "qwen3-vl-4b": dict(
        model_type="qwen3_vl", tie_word_embeddings=True,
        text_config=dict(
            **QWEN3_VL, model_type="qwen3_vl_text", **sizes(2560, 9728, 36, 32, 8, 151936, 262144),
            tie_word_embeddings=True,
        ),
    ),
    "qwen3-vl-32b": dict(
        model_type="qwen3_vl", tie_word_embeddings=False,
        text_config=dict(**QWEN3_VL, model_type="qwen3_vl_text", **sizes(5120, 25600, 64, 64, 8, 151936, 262144)),
    ),
    "qwen3-vl-30b-a3b": dict(
        model_type="qwen3_vl_moe", tie_word_embeddings=False,
        text_config=dict(
            **QWEN3_VL, model_type="qwen3_vl_moe_text", **sizes(2048, 6144, 48, 32, 4, 151936, 262144),
            decoder_sparse_step=1, mlp_only_layers=[], moe_intermediate_size=768, norm_topk_prob=True,
            num_experts=128, num_experts_per_tok=8,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_the_preset(name: str) -> None:
    document = PUBLISHED[name]
    assert family_of(document).read(document) == get_preset(name)


def test_devstral_turns_scales_off_with_zeros() -> None:
    rope = dict(
        PUBLISHED["ministral3-3b"]["rope_parameters"], mscale_all_dim=0.0, llama_4_scaling_beta=0.0
    )
    config = family_of(PUBLISHED["ministral3-3b"]).read(
        {**PUBLISHED["ministral3-3b"], "rope_parameters": rope}
    )
    assert config.query_scale_beta is None and config.query_scale_length is None
    assert config.rope_scaling is not None and "mscale_all_dim" not in config.rope_scaling


def test_phi_35_wrote_longrope_under_other_names() -> None:
    short, long = [1.0] * 48, [float(n) for n in range(1, 49)]
    written = {
        **PUBLISHED["phi-3-mini-4k"],
        "max_position_embeddings": 131072,
        "sliding_window": None,
    }
    found = [
        family_of(written).read(
            {**written, "rope_scaling": dict(type=kind, short_factor=short, long_factor=long)}
        )
        for kind in ("su", "longrope")
    ]
    assert found[0] == found[1] and found[0].rope_scaling is not None
    assert found[0].rope_scaling["original_max_position_embeddings"] == 4096


@pytest.mark.parametrize(
    ("experts", "step", "parameters", "active"), [(16, 1, 107.77, 17.17), (128, 2, 400.71, 17.18)]
)
def test_llama_4_has_the_parameters_of_its_text_models(
    experts: int, step: int, parameters: float, active: float
) -> None:
    """In billions: Scout and Maverick, published as 109 (with 0.87 for images) and 400, of which 17 are active."""
    text = dict(
        model_type="llama4_text", hidden_act="silu", head_dim=128, **sizes(5120, 8192, 48, 40, 8, 202048, 10485760),
        intermediate_size_mlp=16384, num_local_experts=experts, num_experts_per_tok=1, no_rope_layers=[],
        interleave_moe_layer_step=step, use_qk_norm=step == 1, attention_chunk_size=8192, rope_theta=500000.0,
        rope_scaling=LLAMA3 | dict(high_freq_factor=1.0), tie_word_embeddings=False, rms_norm_eps=1e-5,
        attn_temperature_tuning=4, floor_scale=8192, attn_scale=0.1, attention_bias=False, attention_dropout=0.0,
        for_llm_compressor=False, output_router_logits=False, router_aux_loss_coef=0.001, router_jitter_noise=0.0,
    )  # fmt: skip
    document = dict(model_type="llama4", text_config=text, vision_config={})
    family = family_of(document)
    config = family.read(document)
    assert not family.unread(document)
    assert round(config.num_parameters / 1e9, 2) == parameters
    assert round(config.num_active_parameters / 1e9, 2) == active
    assert config.layer_types == (("chunked_attention",) * 3 + ("full_attention",)) * 12
    assert config.no_rope_layers == (1, 1, 1, 0) * 12
    assert config.layers[3].mixer == config.layers[7].mixer != config.layers[4].mixer


@pytest.mark.parametrize(("layers", "experts", "parameters"), [(24, 32, 20.91), (36, 128, 116.83)])
def test_gpt_oss_has_the_parameters_that_its_paper_counts(
    layers: int, experts: int, parameters: float
) -> None:
    """In billions (arXiv 2508.10925, table 1)."""
    document = dict(
        model_type="gpt_oss", architectures=["GptOssForCausalLM"], hidden_act="silu", attention_dropout=0.0,
        attention_bias=True, **sizes(2880, 2880, layers, 64, 8, 201088, 131072), eos_token_id=200002, head_dim=64,
        pad_token_id=199999, experts_per_token=4, num_experts_per_tok=4, num_local_experts=experts, sliding_window=128,
        initial_context_length=4096, layer_types=[FULL if layer % 2 else SLIDING for layer in range(layers)],
        output_router_logits=False, router_aux_loss_coef=0.9, rms_norm_eps=1e-5, rope_theta=150000, swiglu_limit=7.0,
        rope_scaling=dict(rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
                          original_max_position_embeddings=4096),
    )  # fmt: skip
    family = family_of(document)
    config = family.read(document)
    assert round(config.num_parameters / 1e9, 2) == parameters
    preset = get_preset("gpt-oss-20b" if layers == 24 else "gpt-oss-120b")
    own = preset.to_dict() | {"moe": preset.to_dict()["moe"] | {"router_aux_loss_coef": 0.9}}
    assert config == ModelConfig.from_dict(own)
    for name in (
        "rope_scaling",
        "layer_types",
        "sliding_window",
        "swiglu_limit",
        "attention_bias",
        "rope_theta",
    ):
        del document[name]
    assert family.read(document) == config, "the defaults of transformers"


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("seed-oss-36b", dict(hidden_act="tanh"), "unknown hidden_act 'tanh': choose one of gelu"),
        ("phi-4", dict(resid_pdrop=0.1), "resid_pdrop=0.1"),
        ("phi-4", dict(full_attn_mod=2), "full_attn_mod=2"),
        ("gemma2-9b", dict(use_bidirectional_attention=True), "use_bidirectional_attention=True"),
        ("gemma3-1b", dict(attn_logit_softcapping=50.0), "attn_logit_softcapping=50.0"),
        ("iquest-coder-v1-40b", dict(use_sliding_window=True), "use_sliding_window=True"),
        ("iquest-coder-v1-40b", dict(clip_qkv=8.0), "clip_qkv=8.0"),
        ("olmo2-32b", dict(clip_qkv=8.0), "clip_qkv=8.0"),
        ("phi-4", dict(model_type="olmoe", clip_qkv=8.0), "clip_qkv=8.0"),
        (
            "phi-4",
            dict(model_type="laguna", moe_router_logit_softcapping=3.0),
            "moe_router_logit_softcapping=3.0",
        ),
        (
            "laguna-xs-2.1",
            dict(num_attention_heads_per_layer=[48, 64, 64, 48] * 10),
            "num_attention_heads_per_layer with different numbers in layers of sliding_attention",
        ),
        (
            "laguna-xs-2.1",
            dict(num_attention_heads_per_layer=[48, 64]),
            "num_attention_heads_per_layer has 2 entries for 40 layers",
        ),
        ("phi-4", dict(model_type="gemma3"), "it lacks text_config"),
        ("phi-4", dict(model_type="mistral3"), "it lacks text_config"),
        (
            "phi-4",
            dict(model_type="muse_spark"),
            "unknown architecture (model_type) 'muse_spark'",
        ),
    ],
)
def test_unsupported_fields_are_named(name: str, change: dict[str, Any], message: str) -> None:
    document = {**PUBLISHED[name], **change}
    if "model_type" in change:
        document = {
            key: value
            for key, value in document.items()
            if "pdrop" not in key and key != "auto_map"
        }
        document.pop("original_max_position_embeddings")
    with pytest.raises((ConfigError, ValueError)) as error:
        family_of(document).read(document)
    assert message in str(error.value) and "\n" not in str(error.value)
