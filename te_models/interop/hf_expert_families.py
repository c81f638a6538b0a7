"""Hugging Face's families of mixtures of experts, rows of te_models.interop.hf_families.FAMILIES. No torch."""

from collections.abc import Iterable

from te_models.config.model import ModelConfig
from te_models.interop import hf_expert_layouts as layouts
from te_models.interop import hf_experts as experts
from te_models.interop import hf_parts as parts
from te_models.interop import hf_places as places
from te_models.interop import hf_rope_parts as ropes
from te_models.interop import hf_window_parts as windows
from te_models.interop.hf_family import (
    LENGTHS,
    NO_DROPOUT,
    TEXT_ALONE,
    UNGATED,
    Family,
    whole_heads,
)
from te_models.interop.hf_hybrid_parts import LATENT, ROTATED_HEAD_DIM, WHOLE_HEAD_DIM
from te_models.interop.hf_parts import Fields
from te_models.interop.hf_step_parts import STEP_LAYERS

ACT = parts.activation()
_SIZES = {
    "rope_interleave": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}
_DEEPSEEK_KEYS = experts.IGNORED | {
    "qk_head_dim",
    "auto_map",
    "ep_size",
    "seq_aux",
    "aux_loss_alpha",
}
_DEEPSEEK_V3: Fields = dict(
    architecture="DeepseekV3ForCausalLM", layer={**places.LATENT_LAYER, **places.GLM_EXPERTS},
    parts=(ropes.ROPE, LATENT, ACT, parts.biases(), experts.DEEPSEEK_EXPERTS), constants=UNGATED,
    defaults={**_SIZES, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "n_routed_experts": 256,
              "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "first_k_dense_replace": 3,
              "q_lora_rank": 1536, "qk_nope_head_dim": 128, "v_head_dim": 128, "n_group": 8, "topk_group": 4,
              "routed_scaling_factor": 2.5},
    only={**NO_DROPOUT, "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)},
    ignored=_DEEPSEEK_KEYS,
)  # fmt: skip


_GRANITE_MOE: Fields = dict(
    layer=places.GRANITE_MOE_LAYER,
    stacked="outputs first",
    constants=UNGATED,
    mlp="block_sparse_moe",
    stacks={
        "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
        "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
    },
    renamed={".router.layer.": ".router."},
    defaults={
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attention_multiplier": 1.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
        "shared_intermediate_size": 0,
    },
    ignored=experts.IGNORED | {"attention_dropout"},
)
_GRANITE_PARTS = (ropes.ROPE, ACT, parts.biases(), parts.ATTENTION_MULTIPLIER, parts.MULTIPLIERS)


_LLAMA4: Fields = dict(
    layer=places.LLAMA4_LAYER, copied={"intermediate_size": "intermediate_size_mlp"}, stacked="inputs first",
    inputs_first=True, swapped_by_peft=True, mlp="feed_forward",
    parts=(ropes.ROPE, windows.LLAMA4_LAYERS, ropes.LLAMA4_TEMPERATURE, ACT, parts.biases(),
           parts.UNIT_NORM, experts.LLAMA4_EXPERTS),
    constants={**UNGATED, "rope_interleaved": True},
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
              "intermediate_size": 8192, "intermediate_size_mlp": 16384, "rope_theta": 500000.0, "bos_token_id": 1,
              "eos_token_id": 2, "num_experts_per_tok": 1, "num_local_experts": 16, "interleave_moe_layer_step": 1,
              "use_qk_norm": True, "no_rope_layer_interval": 4, "attention_chunk_size": 8192,
              "attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1},
    only=NO_DROPOUT, ignored=experts.IGNORED | {"router_aux_loss_coef", "router_jitter_noise", "for_llm_compressor"},
)  # fmt: skip


def _sparse(config: ModelConfig) -> bool:
    """Return whether the model has experts: one that began here without them is written as a dense family."""
    return config.moe is not None


def _without_rope_or_windowed(config: ModelConfig) -> bool:
    """Return whether a window is written, which transformers' config of EXAONE with experts wants."""
    return config.sliding_window is not None or config.no_rope_layers is not None


def _axk1(config: ModelConfig) -> bool:
    """Return whether queries have a latent, and some layer has experts."""
    latent = config.latent_attention
    return latent is not None and latent.q_lora_rank is not None and config.moe is not None


def _served_by_bias(config: ModelConfig) -> Fields:
    """Return the keys without which vLLM takes softmax scores, and has no place for the bias of the choice."""
    dense = (config.mlp_layer_types or ()).count("dense")
    if config.moe is None:
        dense = config.num_hidden_layers
    chosen = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    return {**chosen, "first_k_dense_replace": dense, "moe_layer_freq": 1}


_SARVAM_MLA: Fields = {
    **_DEEPSEEK_V3,
    "parts": (ropes.DEEPSEEK_YARN_ROPE, LATENT, ROTATED_HEAD_DIM, ACT, parts.biases(), experts.DEEPSEEK_EXPERTS),
    "defaults": {**_DEEPSEEK_V3["defaults"], "n_routed_experts": 128, "q_lora_rank": None, "n_group": 1,
                 "topk_group": 1, "first_k_dense_replace": 1},
    "ignored": _DEEPSEEK_KEYS | {"q_head_dim"},
}  # fmt: skip


def _served_v2(config: ModelConfig) -> Fields:
    """Return one group of experts, where transformers has None: vLLM counts groups in any case."""
    return {"n_group": 1, "topk_group": 1}


EXPERT_FAMILIES = (
    Family(
        model_type="qwen3_moe", architecture="Qwen3MoeForCausalLM", models="Qwen3 with experts, such as 30B-A3B",
        layer={**places.NORMED_LAYER, **places.EXPERTS},
        parts=(ropes.ROPE, experts.ALL_SLIDE_BY_FLAG, ACT, parts.biases(), experts.QWEN3_EXPERTS),
        constants={**UNGATED, "qk_norm": True},
        defaults={**LENGTHS, "num_key_value_heads": 4, "head_dim": None, "num_experts": 128, "num_experts_per_tok": 8,
                  "moe_intermediate_size": 768, "norm_topk_prob": False, "router_aux_loss_coef": 0.001},
        accepts=_sparse, only=NO_DROPOUT, ignored=experts.IGNORED, note="experts",
    ),
    Family(
        model_type="qwen2_moe", architecture="Qwen2MoeForCausalLM", models="Qwen1.5-MoE, Qwen2-57B-A14B",
        layer={**places.LAYER, **places.QWEN2_EXPERTS}, constants=UNGATED,
        parts=(ropes.ROPE, windows.EVEN_SLIDE_BY_FLAG, ACT, experts.QKV_BIAS, experts.QWEN2_EXPERTS),
        defaults={**LENGTHS, "num_key_value_heads": 16, "max_window_layers": 28, "num_experts": 60,
                  "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
                  "norm_topk_prob": False, "router_aux_loss_coef": 0.001, "qkv_bias": True},
        accepts=lambda config: _sparse(config) and whole_heads(config), only=NO_DROPOUT, ignored=experts.IGNORED,
        note="experts, and one for all tokens with a gate",
    ),
    Family(
        model_type="mixtral", architecture="MixtralForCausalLM", models="Mixtral 8x7B, 8x22B",
        layer={**{name: rows for name, rows in places.LAYER.items() if "mlp" not in name}, **places.MIXTRAL_EXPERTS},
        parts=(ropes.ROPE, windows.WINDOW, ACT, experts.MIXTRAL_EXPERTS), constants=UNGATED,
        renamed={".block_sparse_moe.gate.": ".mlp.gate."},
        defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "bos_token_id": 1,
                  "eos_token_id": 2, "num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001,
                  "router_jitter_noise": 0.0, "rope_theta": 1000000.0},
        only=NO_DROPOUT, ignored=experts.IGNORED, note="experts",
    ),
    Family(
        model_type="olmoe", architecture="OlmoeForCausalLM", models="OLMoE",
        layer={**places.NORMED_LAYER, **places.EXPERTS}, parts=(ropes.ROPE, ACT, parts.biases(), experts.OLMOE_EXPERTS),
        constants={**UNGATED, "qk_norm": True, "qk_norm_scope": "all_heads"},
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "pad_token_id": 1, "eos_token_id": 50279,
                  "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False, "router_aux_loss_coef": 0.01},
        accepts=whole_heads, only={**NO_DROPOUT, "clip_qkv": (None,)}, ignored=experts.IGNORED, note="experts",
    ),
    Family(
        model_type="glm4_moe", architecture="Glm4MoeForCausalLM", models="GLM-4.5, GLM-4.6, GLM-4.7",
        layer={**places.NORMED_LAYER, **places.GLM_EXPERTS},
        parts=(ropes.PARTIAL_ROPE, ACT, parts.biases(out=None), experts.QK_NORM, experts.DEEPSEEK_EXPERTS),
        constants=UNGATED, accepts=_sparse,
        defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": None, "rms_norm_eps": 1e-5,
                  "partial_rotary_factor": 0.5, "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 1,
                  "n_routed_experts": 128, "moe_intermediate_size": 1408, "norm_topk_prob": True, "topk_group": 1,
                  "routed_scaling_factor": 1.0, "first_k_dense_replace": 1, "use_qk_norm": False},
        only=NO_DROPOUT, ignored=experts.IGNORED,
        note="experts and one for all tokens; sigmoid scores with a bias for the choice; the first layers are dense",
    ),
    Family(
        model_type="deepseek_v3", models="DeepSeek-V3, V3.1, R1, Moonlight", **_DEEPSEEK_V3, served=_served_by_bias,
        note="multi-head latent attention; experts as in GLM-4.5, chosen by groups",
    ),
    Family(
        model_type="mellum", architecture="MellumForCausalLM", models="Mellum 2 12B-A2.5B",
        layer={**places.NORMED_LAYER, **places.EXPERTS},
        parts=(windows.MELLUM_ROPE, ACT, parts.biases(), experts.MELLUM_EXPERTS),
        constants={**UNGATED, "qk_norm": True}, later=("mtp.",),
        defaults={"max_position_embeddings": 131072, "num_key_value_heads": 4, "head_dim": 128, "rms_norm_eps": 1e-6,
                  "sliding_window": 1024, "rope_theta": 500000.0, "rope_local_base_freq": 10000.0, "num_experts": 64,
                  "num_experts_per_tok": 8, "moe_intermediate_size": 896, "norm_topk_prob": True,
                  "router_aux_loss_coef": 0.001},
        accepts=_sparse, only=NO_DROPOUT,
        ignored=experts.IGNORED | {"mtp_layer_types", "mtp_mlp_layer_types"},
        note="as Qwen3 with experts; layers with a sliding window have a RoPE of their own",
    ),
    Family(
        model_type="minimax_m2", architecture="MiniMaxM2ForCausalLM", models="MiniMax-M2, M2.1, M2.5, M2.7",
        layer={**{name: rows for name, rows in places.NORMED_LAYER.items() if "mlp" not in name},
               **places.MINIMAX_EXPERTS},
        parts=(ropes.MINIMAX_ROPE, ACT, experts.MINIMAX_EXPERTS),
        constants={**UNGATED, "qk_norm": True, "qk_norm_scope": "all_heads"},
        renamed={".block_sparse_moe.": ".mlp."},
        defaults={"max_position_embeddings": 196608, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6,
                  "bos_token_id": 200034, "eos_token_id": 200020, "rope_theta": 5000000.0, "num_local_experts": 256,
                  "num_experts_per_tok": 8, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0},
        only=NO_DROPOUT, ignored=experts.IGNORED,
        note="one norm over all heads of q and of k, RoPE on a part of each head; sigmoid scores with a bias for the "
             "choice",
    ),
    Family(
        model_type="flex_olmo", architecture="FlexOlmoForCausalLM", models="FlexOlmo 7x7B",
        layer={**places.POST_NORMED_LAYER, **places.EXPERTS},
        parts=(ropes.ROPE, ACT, parts.biases(), experts.OLMOE_EXPERTS),
        constants={**UNGATED, "qk_norm": True, "qk_norm_scope": "all_heads", "norm_position": "post"},
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "pad_token_id": 100277,
                  "eos_token_id": 100257, "rope_theta": 500000.0, "num_experts": 7, "num_experts_per_tok": 5,
                  "norm_topk_prob": False, "router_aux_loss_coef": 0.01},
        only=NO_DROPOUT, ignored=experts.IGNORED, note="OLMo 2 with experts",
    ),
    Family(
        model_type="dots1", architecture="Dots1ForCausalLM", models="dots.llm1",
        layer={**places.NORMED_LAYER, **places.GLM_EXPERTS},
        parts=(ropes.ROPE, windows.DOTS_WINDOW, ACT, parts.biases(), experts.DEEPSEEK_EXPERTS),
        constants={**UNGATED, "qk_norm": True}, accepts=_sparse,
        defaults={"max_position_embeddings": 2048, "num_key_value_heads": 32, "rms_norm_eps": 1e-6,
                  "sliding_window": 4096, "max_window_layers": 62, "first_k_dense_replace": 0,
                  "norm_topk_prob": False, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0},
        only=NO_DROPOUT, ignored=experts.IGNORED, note="Qwen3's attention, DeepSeek-V3's experts",
    ),
    Family(
        model_type="exaone_moe", architecture="ExaoneMoeForCausalLM", models="K-EXAONE 236B-A23B",
        layer={**places.NORMED_LAYER, **places.EXAONE_EXPERTS},
        parts=(ropes.ROPE, windows.EXAONE_WINDOW, ACT, experts.EXAONE_EXPERTS),
        constants={**UNGATED, "qk_norm": True}, later=("mtp.",),
        accepts=_without_rope_or_windowed,
        renamed={".mlp.e_score_correction_bias": ".mlp.gate.e_score_correction_bias"},
        defaults={"max_position_embeddings": 2048, "num_key_value_heads": 32, "rms_norm_eps": 1e-5, "bos_token_id": 1,
                  "eos_token_id": 53, "pad_token_id": 0, "sliding_window": 4096, "sliding_window_pattern": 4,
                  "first_k_dense_replace": 1, "moe_intermediate_size": 1024, "num_experts": 64,
                  "num_experts_per_tok": 8, "num_shared_experts": 1, "norm_topk_prob": True,
                  "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1},
        only=NO_DROPOUT, ignored=experts.IGNORED,
        note="RoPE in layers with a sliding window only; DeepSeek-V3's experts",
    ),
    Family(
        model_type="solar_open", architecture="SolarOpenForCausalLM", models="Solar Open 100B",
        layer={**places.LAYER, **places.GLM_EXPERTS},
        parts=(ropes.WHOLE_HEADS_ROPE, ACT, parts.biases(out=None), experts.SOLAR_EXPERTS, experts.NO_WIDTH),
        constants=UNGATED,
        defaults={"intermediate_size": 0, "max_position_embeddings": 131072, "num_key_value_heads": 8,
                  "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "moe_intermediate_size": 1280,
                  "n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 1,
                  "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0},
        only=NO_DROPOUT, ignored=experts.IGNORED, note="Llama's attention, GLM-4.5's experts in all layers",
    ),
    Family(
        model_type="hunyuan_v1_moe", architecture="HunYuanMoEV1ForCausalLM", models="Hunyuan-A13B",
        layer={**places.HUNYUAN_LAYER, **places.HUNYUAN_EXPERTS},
        parts=(ropes.HUNYUAN_ROPE, ACT, parts.biases(), experts.HUNYUAN_EXPERTS),
        constants={**UNGATED, "qk_norm": True, "qk_norm_after_rope": True}, accepts=_sparse,
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "pad_token_id": 0, "bos_token_id": 1,
                  "eos_token_id": 2, "num_experts": 1, "moe_topk": 1},
        only=NO_DROPOUT, ignored=experts.IGNORED | {"eod_token_id"},
        note="norms of q and k after RoPE; experts and one for all tokens of the same width",
    ),
    Family(
        model_type="granitemoe_swa", architecture="GraniteMoeSWAForCausalLM", models="Granite Swash 3B-A600M",
        layer={**{name: rows for name, rows in places.SINKS_LAYER.items() if "mlp" not in name},
               **places.GRANITE_SWA_MOE},
        parts=(windows.LAYER_THETAS, ACT, parts.biases(), parts.ATTENTION_MULTIPLIER, parts.MULTIPLIERS,
               experts.GRANITE_SWA_EXPERTS),
        constants={**UNGATED, "attention_sinks": True}, stacked="outputs first", mlp="block_sparse_moe",
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "bos_token_id": 1, "eos_token_id": 2,
                  "attention_multiplier": 1.0, "sliding_window": 128, "num_local_experts": 8,
                  "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001, "shared_intermediate_size": 0},
        only=NO_DROPOUT, ignored=experts.IGNORED, note="Granite Swash with experts, and perhaps one for all tokens",
    ),
    Family(
        model_type="granitemoe", architecture="GraniteMoeForCausalLM", models="Granite 3 with experts, PowerMoE",
        parts=(*_GRANITE_PARTS, experts.GRANITE_MOE_EXPERTS), **_GRANITE_MOE,
        note="Granite's multipliers, experts in all layers",
    ),
    Family(
        model_type="granitemoeshared", architecture="GraniteMoeSharedForCausalLM",
        models="Granite with experts and one for all tokens", **_GRANITE_MOE,
        parts=(*_GRANITE_PARTS, experts.GRANITE_SWA_EXPERTS), note="as `granitemoe`, with one for all tokens",
    ),
    Family(
        model_type="sarvam_moe", architecture="Glm4MoeForCausalLM", models="Sarvam 30B", layer=places.SARVAM_LAYER,
        embedding="word_embeddings",
        modules=dict(layer={**places.NORMED_LAYER, **places.GLM_EXPERTS}, embedding="embed_tokens"),
        renamed={"model.word_embeddings.": "model.embed_tokens.", ".attention.dense.": ".self_attn.o_proj.",
                 ".attention.": ".self_attn.", ".query_layernorm.": ".q_norm.", ".key_layernorm.": ".k_norm."},
        parts=(ropes.PARTIAL_ROPE, ACT, parts.SARVAM_BIAS, experts.QK_NORM, experts.SARVAM_EXPERTS),
        constants=UNGATED, accepts=_sparse,
        defaults={"max_position_embeddings": 131072, "num_key_value_heads": 4, "head_dim": 64, "rms_norm_eps": 1e-6,
                  "rope_theta": 8000000.0, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 6,
                  "moe_intermediate_size": 1024, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5,
                  "first_k_dense_replace": 1, "norm_topk_prob": True, "use_qk_norm": True, "pad_token_id": 0,
                  "eos_token_id": 1, "initializer_range": 0.006},
        only=NO_DROPOUT, ignored=experts.IGNORED,
        note="as GLM-4.5, with RoPE on whole heads; q, k and v are one tensor",
    ),
    Family(
        model_type="hy_v3", architecture="HYV3ForCausalLM", models="Hunyuan 3",
        layer={**places.NORMED_LAYER, **places.HY3_EXPERTS},
        parts=(ropes.ROPE, ACT, parts.biases(), experts.HY3_EXPERTS),
        renamed={".mlp.router.gate.": ".mlp.gate.", ".mlp.expert_bias": ".mlp.e_score_correction_bias",
                 ".mlp.shared_mlp.": ".mlp.shared_experts."},
        constants={**UNGATED, "qk_norm": True}, accepts=_sparse,
        defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
                  "rope_theta": 11158840.0, "num_experts": 192, "num_experts_per_tok": 8, "num_shared_experts": 1,
                  "moe_intermediate_size": 1536, "router_scaling_factor": 2.826, "initializer_range": 0.006},
        only={**NO_DROPOUT, "mlp_bias": (False,)}, ignored=experts.IGNORED | {"enable_moe_fp32_combine"},
        note="Qwen3's attention, DeepSeek-V3's experts without groups",
    ),
    Family(
        model_type="flint", architecture="FlintForCausalLM", models="Flint", layer=places.FLINT_LAYER,
        parts=(ropes.ROPE, windows.FLINT_WINDOW, ACT, parts.biases(), experts.FLINT_EXPERTS),
        renamed={".self_attn.softmax_offset": ".self_attn.sinks"}, accepts=_sparse,
        constants={**UNGATED, "qk_norm": True, "attention_sinks": True},
        defaults={"max_position_embeddings": 262144, "num_key_value_heads": 4, "head_dim": 128, "rms_norm_eps": 1e-6,
                  "sliding_window": 513, "num_experts": 256, "num_experts_per_tok": 6, "moe_intermediate_size": 512,
                  "shared_expert_intermediate_size": 1024, "norm_topk_prob": True, "router_aux_loss_coef": 0.0005},
        only=NO_DROPOUT, ignored=experts.IGNORED,
        note="Qwen3's attention with sinks, RoPE in layers with a sliding window only; experts with sigmoid scores",
    ),
    Family(
        model_type="step3p7", architecture="Step3p7ForConditionalGeneration", models="Step-3.7-Flash",
        layer=places.STEP_LAYER, inner="text_config", other_models=("vision_model.", "vit_large_projector."),
        stacked="outputs first", accepts=lambda config: False,
        stacks={f"moe.{name}_proj.weight": f"moe.experts.{name}_proj" for name in ("gate", "up", "down")},
        renamed={".moe.gate.": ".mlp.gate.", ".moe.router_bias": ".mlp.gate.e_score_correction_bias",
                 ".share_expert.": ".mlp.shared_experts."},
        parts=(STEP_LAYERS, ACT, parts.QUERY_SCALAR, experts.STEP_EXPERTS),
        constants={"attention_gate": "headwise", "qk_norm": True, "zero_centered_norm": True},
        defaults={"max_position_embeddings": 128000, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
                  "pad_token_id": 1, "num_experts_per_tok": 8, "n_routed_experts": 288, "share_expert_dim": 1280,
                  "moe_intermediate_size": 1280, "moe_router_scaling_factor": 1.0},
        only={**NO_DROPOUT, "attention_bias": (False,), "mlp_bias": (False,), "gating": (True, "per-head"),
              "hidden_act": ("silu", "swigluoai"), "use_bidirectional_attention": (False,),
              "sparse_attention_config": (None, {})},
        ignored=experts.IGNORED | {"mtp_layer_types", "mtp_mlp_layer_types", "moe_layer_freq"},
        note="the text model: a gate per head, heads and bounds of SwiGLU by kind of layer; the other tensors are kept "
             "aside and written back",
    ),
    Family(
        model_type="ernie4_5_moe", architecture="Ernie4_5_MoeForCausalLM", models="ERNIE 4.5 21B-A3B, 300B-A47B",
        layer={**places.LAYER, **places.ERNIE_EXPERTS},
        parts=(ropes.ROPE, ACT, experts.ERNIE_EXPERTS), constants={**UNGATED, "rope_interleaved": True},
        accepts=_sparse, later=("model.mtp",),
        renamed={".mlp.moe_statics.": ".mlp.gate.moe_statics."},
        defaults={"max_position_embeddings": 131072, "num_key_value_heads": 4, "rms_norm_eps": 1e-5,
                  "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "rope_theta": 500000.0,
                  "tie_word_embeddings": True, "moe_intermediate_size": 1536, "moe_k": 6, "moe_num_experts": 64,
                  "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": -1,
                  "moe_layer_interval": 1, "router_aux_loss_coef": 0.001},
        only={"use_bias": (False,), "moe_norm_min": (1e-12,)}, ignored=experts.IGNORED,
        note="RoPE on neighboring channels; softmax scores with a bias for the choice",
    ),
    Family(
        model_type="kimi_k2", models="Kimi K2", **_DEEPSEEK_V3, served=_served_by_bias, written=False,
        note="as DeepSeek-V3",
    ),
    Family(
        model_type="sarvam_mla", models="Sarvam 105B", **_SARVAM_MLA, served=_served_by_bias, note="as DeepSeek-V3",
    ),
    Family(
        model_type="axk1", architecture="AXK1ForCausalLM", models="A.X K1",
        layer={**places.LATENT_LAYER, **places.AXK1_EXPERTS}, constants=UNGATED,
        parts=(ropes.ROPE, LATENT, ROTATED_HEAD_DIM, ACT, parts.biases(), experts.AXK1_EXPERTS),
        renamed={".post_mlp_layernorm.": ".mlp.post_mlp_layernorm."}, unused=layouts.axk1_unused,
        absent=(".mlp.gate.e_score_correction_bias",),
        defaults={**_SIZES, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "n_routed_experts": 192,
                  "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "q_lora_rank": 1536,
                  "qk_nope_head_dim": 128, "v_head_dim": 128, "n_group": 8, "topk_group": 4,
                  "routed_scaling_factor": 2.5, "bos_token_id": 163691, "eos_token_id": 163691},
        accepts=_axk1, only=NO_DROPOUT, ignored=_DEEPSEEK_KEYS | {"scoring_func", "topk_method"},
        note="as DeepSeek-V3, with a norm on the sum of the experts",
    ),
    Family(
        model_type="mistral4", architecture="Mistral4ForCausalLM", models="Mistral Small 4 (text)",
        layer={**places.LATENT_LAYER, **places.MISTRAL4_EXPERTS}, constants=UNGATED, stacked="outputs first",
        parts=(ropes.MISTRAL4_ROPE, LATENT, WHOLE_HEAD_DIM, ACT, parts.biases(), experts.MISTRAL4_EXPERTS),
        defaults={**_SIZES, "max_position_embeddings": 1048576, "rms_norm_eps": 1e-6, "n_routed_experts": 128,
                  "num_experts_per_tok": 4, "moe_intermediate_size": 2048, "first_k_dense_replace": 0,
                  "q_lora_rank": 1024, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "v_head_dim": 128, "n_group": 1,
                  "topk_group": 1, "routed_scaling_factor": 1.0, "bos_token_id": 1, "eos_token_id": 2,
                  "pad_token_id": 11},
        accepts=lambda config: config.rope_scaling is not None,  # transformers rotates too much without
        only=NO_DROPOUT, ignored=_DEEPSEEK_KEYS,
        note="multi-head latent attention with queries scaled by their position; softmax scores",
    ),
    Family(
        model_type="youtu", architecture="YoutuForCausalLM", models="Youtu-LLM 2B", layer=places.LATENT_LAYER,
        parts=(ropes.ROPE, LATENT, ACT, parts.biases(), parts.INITIAL_RANGE), constants=UNGATED,
        accepts=lambda config: config.latent_attention is not None,
        defaults={"rope_interleave": True, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
                  "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
                  "v_head_dim": 128, "bos_token_id": 128000, "eos_token_id": 128001, "tie_word_embeddings": True},
        only=NO_DROPOUT, ignored=frozenset(("auto_map", "qk_head_dim", "embedding_initializer_range", "mlp_bias")),
        note="multi-head latent attention, without experts",
    ),
    Family(
        model_type="deepseek_v2", architecture="DeepseekV2ForCausalLM", models="DeepSeek-V2, V2-Lite, V2.5",
        layer={**places.LATENT_LAYER, **places.DEEPSEEK_V2_EXPERTS}, constants=UNGATED,
        parts=(ropes.ROPE, LATENT, ACT, parts.biases(), experts.DEEPSEEK_V2_EXPERTS),
        defaults={**_SIZES, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "n_routed_experts": 64,
                  "num_experts_per_tok": None, "moe_intermediate_size": 1407, "first_k_dense_replace": 0,
                  "q_lora_rank": 1536, "qk_nope_head_dim": 128, "v_head_dim": 128, "n_shared_experts": 2,
                  "routed_scaling_factor": 1.0, "topk_method": "greedy", "bos_token_id": 1, "eos_token_id": 2},
        only={**NO_DROPOUT, "rope_interleave": (True,), "norm_topk_prob": (False,), "mlp_bias": (False,),
              "scoring_func": ("softmax",), "topk_method": ("greedy", "group_limited_greedy"), "moe_layer_freq": (1,)},
        ignored=_DEEPSEEK_KEYS, served=_served_v2,
        note="multi-head latent attention; softmax scores, the best expert of each group",
    ),
    Family(
        model_type="glm4_moe_lite", architecture="Glm4MoeLiteForCausalLM", models="GLM-4.7-Flash",
        layer={**places.LATENT_LAYER, **places.GLM_EXPERTS}, constants=UNGATED,
        parts=(ropes.WHOLE_HEADS_ROPE, LATENT, ACT, parts.biases(), experts.GLM_LITE_EXPERTS),
        defaults={**_SIZES, "max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "n_routed_experts": 64,
                  "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "q_lora_rank": 768,
                  "qk_nope_head_dim": 192, "v_head_dim": 256, "n_group": 1, "topk_group": 1,
                  "routed_scaling_factor": 1.8},
        only=NO_DROPOUT, ignored=experts.IGNORED | {"qk_head_dim"}, served=_served_by_bias, note="as DeepSeek-V3",
    ),
    Family(
        model_type="llama4_text", architecture="Llama4ForCausalLM", models="Llama 4 (text)", **_LLAMA4,
        note="attention in chunks in layers with RoPE, queries scaled by their position in the others; experts whose "
             "input the router scales, in one tensor per projection",
    ),
    Family(
        model_type="llama4", architecture="Llama4ForConditionalGeneration", models="Llama 4 Scout, Maverick", **_LLAMA4,
        **TEXT_ALONE, inside="language_model.model.", root="language_model.model.",
        head="language_model.lm_head", other_models=("vision_model.", "multi_modal_projector."),
    ),
    Family(
        model_type="gpt_oss", architecture="GptOssForCausalLM", models="gpt-oss-20b, gpt-oss-120b",
        layer=places.GPT_OSS_LAYER, stacked="inputs first", inputs_first=True,
        constants={**UNGATED, "attention_sinks": True},
        parts=(ropes.GPT_OSS_ROPE, windows.SECOND_IS_FULL, parts.biases(), experts.GPT_OSS_EXPERTS),
        defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5,
                  "rope_theta": 150000.0, "attention_bias": True, "sliding_window": 128, "num_local_experts": 128,
                  "num_experts_per_tok": 4, "router_aux_loss_coef": 0.001, "swiglu_limit": 7.0, "swiglu_alpha": 1.702},
        only={**NO_DROPOUT, "hidden_act": ("silu",)},
        ignored=experts.IGNORED | {"experts_per_token", "initial_context_length"},
        note="attention sinks; experts with biases and a clamped SwiGLU, in one tensor per projection, also of MXFP4",
    ),
)  # fmt: skip

# Linears that peft 0.21 takes for experts in any model of an architecture that can have them (convert_peft_config_moe).
_CONVERTED = (
    "qwen3_next",
    "afmoe",
    "glm4_moe",
    "glm4_moe_lite",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "dots1",
    "ernie4_5_moe",
    "exaone_moe",
    "flex_olmo",
    "hunyuan_v1_moe",
    "mellum",
    "sarvam_mla",
    "solar_open",
)
# Families with Mamba 2 whose out_proj peft refuses (`mamba_model_types` in peft.tuners.tuners_utils).
_REFUSED = ("nemotron_h", "falcon_h1")
_TAKEN = ("gate_proj", "up_proj", "down_proj")


def taken_for_experts(model_type: str, linears: Iterable[str]) -> bool:
    """Return whether peft takes one of `linears` for experts in a config's target_modules, with transformers' model.

    It leaves their weights alone where target_parameters names those.
    """
    return model_type in _CONVERTED and any(name.endswith(_TAKEN) for name in linears)


def dropped_by_peft(model_type: str, linears: Iterable[str]) -> str:
    """Return why peft drops or refuses adapters on `linears` of a model in transformers; "" if it does not.

    `linears` are in a config's target_modules.
    """
    linears = list(linears)
    if model_type in _REFUSED and any(name.endswith("out_proj") for name in linears):
        return f"peft has no adapters on out_proj of {model_type} in transformers and refuses the file there"
    if not taken_for_experts(model_type, linears):
        return ""
    return (
        f"peft takes adapters on {', '.join(_TAKEN)} of {model_type} in transformers for its experts': it drops them "
        "there, and refuses a file with DoRA"
    )
