"""Hugging Face's families with convolutions and state spaces, rows of hf_families.FAMILIES. No torch."""

from te_models.config.model import ModelConfig
from te_models.interop import hf_experts as experts
from te_models.interop import hf_mamba_parts as mamba
from te_models.interop import hf_parts as parts
from te_models.interop import hf_places as places
from te_models.interop import hf_recurrent_parts as recurrent
from te_models.interop import hf_rope_parts as ropes
from te_models.interop.hf_family import NO_DROPOUT, UNGATED, Family
from te_models.interop.hf_hybrid_parts import LATENT, LATENT_PAIRS, ROTATED_HEAD_DIM
from te_models.interop.hf_parts import Fields

ACT = parts.activation()
_LFM2: Fields = dict(
    constants={**UNGATED, "qk_norm": True},
    copied={"rms_norm_eps": "norm_eps"},
    norm="embedding_norm",
)
_LFM2_SIZES: Fields = {
    "max_position_embeddings": 128000,
    "num_key_value_heads": 8,
    "norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "conv_L_cache": 3,
    "conv_bias": False,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _granite4(config: ModelConfig) -> bool:
    """Return whether a model with experts has one for all tokens, which this family always has."""
    return config.moe is None or config.moe.shared_expert_intermediate_size > 0


def _kimi(config: ModelConfig) -> bool:
    """Return whether decays and output gates of Kimi Delta Attention have the rank of a head, and no bound."""
    sizes = config.kda
    if sizes is None:
        return config.latent_attention is not None
    return sizes.gate_rank == sizes.head_dim and sizes.decay_bound is None


def _ling(config: ModelConfig) -> bool:
    """Return whether decays and output gates are whole, and Kimi Delta Attention has a head per head of the others."""
    sizes = config.kda
    if sizes is None:
        return config.latent_attention is not None
    return sizes.gate_rank is None and sizes.num_heads == config.num_attention_heads


def _nemotron(config: ModelConfig) -> bool:
    """Return whether each layer has one part, and experts have one for all tokens beside them."""
    alone = all(len(layer.parts) == 1 for layer in config.layers)
    has_shared_expert = config.moe is None or config.moe.shared_expert_intermediate_size > 0
    return alone and has_shared_expert


NEMOTRON_UNUSED = frozenset(
    ("attention_bias", "hidden_dropout", "mamba_proj_bias", "sliding_window", "mtp_layers_block_type",
     "mtp_hybrid_override_pattern", "time_step_max", "time_step_floor", "time_step_limit", "expand", "chunk_size",
     "rescale_prenorm_residual", "use_mamba_kernels", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap",
     "num_logits_to_keep", "mamba_expand", "mamba_dt_max", "mamba_dt_limit", "mamba_dt_init_floor", "mamba_chunk_size")
)  # fmt: skip


RECURRENT_FAMILIES = (
    Family(
        model_type="lfm2", architecture="Lfm2ForCausalLM", models="LFM2", layer=places.LFM2_LAYER, **_LFM2,
        parts=(ropes.ROPE, recurrent.LFM2_LAYERS, recurrent.LFM2_TIED, recurrent.LFM2_WIDTH),
        defaults={**_LFM2_SIZES, "intermediate_size": 12288, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
                  "block_auto_adjust_ff_dim": True},
        note="gated short convolutions in most layers",
    ),
    Family(
        model_type="lfm2_moe", architecture="Lfm2MoeForCausalLM", models="LFM2 with experts, such as 8B-A1B",
        layer={**places.LFM2_LAYER, **places.LFM2_EXPERTS}, **_LFM2,
        parts=(ropes.ROPE, recurrent.LFM2_LAYERS, recurrent.LFM2_TIED, experts.LFM2_EXPERTS),
        defaults={**_LFM2_SIZES, "intermediate_size": 7168, "moe_intermediate_size": 1792, "num_dense_layers": 2,
                  "num_experts_per_tok": 4, "num_experts": 32, "use_expert_bias": True, "routed_scaling_factor": 1.0,
                  "norm_topk_prob": True},
        ignored=experts.IGNORED, mlp="feed_forward",
        note="as LFM2, with experts: sigmoid scores with a bias for the choice; the first layers are dense",
    ),
    Family(
        model_type="granitemoehybrid", architecture="GraniteMoeHybridForCausalLM", models="Granite 4, hybrid or not",
        layer=places.GRANITE_HYBRID_LAYER, stacked="outputs first", constants=UNGATED, mlp="block_sparse_moe",
        accepts=_granite4,
        stacks={"block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
                "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj"},
        renamed={".router.layer.": ".router."},
        parts=(ropes.ROPE, mamba.GRANITE_LAYERS, ACT, parts.biases(), parts.ATTENTION_MULTIPLIER,
               parts.same("embedding_multiplier", "residual_multiplier", "logits_scaling"),
               experts.GRANITE_HYBRID_EXPERTS),
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "bos_token_id": 1, "eos_token_id": 2,
                  "hidden_act": "silu", "attention_multiplier": 1.0, "num_local_experts": 8, "num_experts_per_tok": 2,
                  "router_aux_loss_coef": 0.001, "shared_intermediate_size": 1024, "intermediate_size": 11008,
                  "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_head": "auto",
                  "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False},
        ignored=experts.IGNORED | {"attention_dropout"},
        note="Mamba 2 in most layers, attention without RoPE in the others; experts beside one for all tokens",
    ),
    Family(
        model_type="bamba", architecture="BambaForCausalLM", models="Bamba 9B", layer=places.BAMBA_LAYER,
        constants=UNGATED, norm="final_layernorm",
        parts=(mamba.BAMBA_LAYERS, ACT, parts.biases(mlp="mlp_bias")),
        defaults={"max_position_embeddings": 262144, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
                  "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
                  "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_head": "auto",
                  "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False},
        only={**NO_DROPOUT, "z_loss_coefficient": (0.0,)},
        ignored=frozenset(("num_logits_to_keep", "layers_block_type")),
        note="Mamba 2 in most layers, attention with RoPE on half of each head in the others",
    ),
    Family(
        model_type="falcon_h1", architecture="FalconH1ForCausalLM", models="Falcon-H1",
        layer=places.FALCON_LAYER, constants=UNGATED, norm="final_layernorm",
        parts=(ropes.ROPE, mamba.FALCON_LAYERS, ACT, parts.biases(mlp="mlp_bias"),
               parts.same("embedding_multiplier"), parts.query_factor("key_multiplier"),
               parts.logit_factor("lm_head_multiplier")),
        defaults={"max_position_embeddings": 8192, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "hidden_act": "silu",
                  "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "mamba_d_ssm": 1024, "mamba_n_heads": 128,
                  "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_head": "auto", "mamba_d_conv": 4,
                  "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False, "mamba_rms_norm": False,
                  "mamba_norm_before_gate": True, "projectors_bias": False, "key_multiplier": 1.0,
                  "mlp_multipliers": (1.0, 1.0), "ssm_multipliers": (1.0,) * 5, "attention_in_multiplier": 1.0,
                  "attention_out_multiplier": 1.0, "ssm_in_multiplier": 1.0, "ssm_out_multiplier": 1.0},
        only=NO_DROPOUT, ignored=frozenset(("num_logits_to_keep", "layers_block_type")),
        note="Mamba 2 beside attention in every layer, and factors on all projections",
    ),
    Family(
        model_type="kimi_linear", architecture="KimiLinearForCausalLM", models="Kimi Linear 48B-A3B",
        layer={**places.KIMI_LAYER, **places.KIMI_EXPERTS}, constants=UNGATED,
        copied={"max_position_embeddings": "model_max_length"},
        spellings={f"mlp.{name}_proj": f"block_sparse_moe.{name}_proj" for name in ("gate", "up", "down")},
        parts=(recurrent.KIMI_LAYERS, recurrent.KIMI_LENGTH, LATENT, ROTATED_HEAD_DIM, ACT, parts.biases(),
               experts.KIMI_EXPERTS),
        renamed={".block_sparse_moe.gate.": ".mlp.gate.", ".block_sparse_moe.experts.": ".mlp.experts.",
                 ".block_sparse_moe.shared_experts.": ".mlp.shared_experts.",
                 ".self_attn.f_a_proj.": ".self_attn.forget_gate.f_a_proj.",
                 ".self_attn.f_b_proj.": ".self_attn.forget_gate.f_b_proj."},
        defaults={"intermediate_size": 9216, "moe_intermediate_size": 1024, "num_attention_heads": 32,
                  "num_shared_experts": 1, "routed_scaling_factor": 2.446, "kv_lora_rank": 512, "q_lora_rank": None,
                  "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "num_expert_group": 1,
                  "topk_group": 1, "num_experts_per_token": 8, "moe_renormalize": True, "num_experts": 256,
                  "model_max_length": 1048576, "rms_norm_eps": 1e-5, "pad_token_id": 163839, "bos_token_id": 163584,
                  "eos_token_id": 163586, "rope_interleave": False, "linear_head_dim": 128, "linear_num_heads": 32,
                  "linear_conv_kernel_dim": 4},
        accepts=_kimi, only=NO_DROPOUT, ignored=experts.IGNORED | {"qk_head_dim"},
        note="Kimi Delta Attention in most layers, latent attention without RoPE in the others; experts as DeepSeek-V3",
    ),
    Family(
        model_type="bailing_hybrid", architecture="BailingHybridForCausalLM", models="Ling 3.0 Flash, Tiny",
        layer=places.LING_LAYER, embedding="word_embeddings",
        modules=dict(layer=places.LING_MODULES, embedding="embed_tokens"),
        renamed={"model.word_embeddings.": "model.embed_tokens.", ".attention.dense.": ".self_attn.o_proj.",
                 ".attention.": ".self_attn.", ".self_attn.f_proj.": ".self_attn.forget_gate.f_proj."},
        constants={"attention_gate": "headwise"}, copied={"max_position_embeddings": "model_max_length"},
        parts=(ropes.ROPE, recurrent.LING_LAYERS, recurrent.KIMI_LENGTH, LATENT_PAIRS, ACT, experts.KIMI_EXPERTS),
        defaults={"intermediate_size": 6144, "moe_intermediate_size": 768, "num_attention_heads": 32,
                  "num_shared_experts": 1, "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": None,
                  "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "num_expert_group": 8,
                  "topk_group": 4, "num_experts_per_token": 8, "moe_renormalize": True, "num_experts": 512,
                  "model_max_length": 262144, "rms_norm_eps": 1e-6, "pad_token_id": 156892, "eos_token_id": 156895,
                  "rope_theta": 6000000.0, "head_dim": 128, "short_conv_kernel_size": 4, "layer_group_size": 6,
                  "kda_safe_gate": True, "kda_lower_bound": -5.0, "first_k_dense_replace": 2},
        accepts=_ling, only={**NO_DROPOUT, "attention_bias": (False,), "tie_word_embeddings": (False,)},
        ignored=experts.IGNORED | {"qk_head_dim", "mtp_loss_scaling_factor"},
        note="Kimi Delta Attention in most layers, latent attention with a gate per head in the others; experts as "
             "DeepSeek-V3",
    ),
    Family(
        model_type="nemotron_h", architecture="NemotronHForCausalLM", models="Nemotron-H, Nemotron Nano 2, Nemotron 3",
        layer=places.NEMOTRON_LAYER, constants={**UNGATED, "mlp_gate": False}, root="backbone.", norm="norm_f",
        embedding="embeddings", copied={"rms_norm_eps": "layer_norm_epsilon"}, mlp="mixer",
        stated=mamba.state_nemotron_layers,
        parts=(mamba.NEMOTRON_LAYERS, parts.activation("mlp_hidden_act"), parts.renamed(mlp_bias="mlp_bias"),
               experts.NEMOTRON_EXPERTS),
        defaults={"intermediate_size": 21504, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
                  "max_position_embeddings": 4096, "layer_norm_epsilon": 1e-5, "pad_token_id": 0, "bos_token_id": 1,
                  "eos_token_id": 2, "mlp_hidden_act": "relu2", "ssm_state_size": 128, "mamba_num_heads": 128,
                  "mamba_head_dim": 64, "mamba_hidden_act": "silu", "n_groups": 8, "conv_kernel": 4,
                  "use_conv_bias": True, "use_bias": False, "time_step_min": 0.001, "n_routed_experts": 8,
                  "n_shared_experts": 1, "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688,
                  "moe_latent_size": None, "num_experts_per_tok": 2, "routed_scaling_factor": 1.0, "n_group": 1,
                  "topk_group": 1, "norm_topk_prob": True},
        accepts=_nemotron, only={**NO_DROPOUT, "residual_in_fp32": (False,)},
        ignored=experts.IGNORED | NEMOTRON_UNUSED, later=("mtp.",),
        note="one part per layer: Mamba 2, attention without RoPE, an MLP without a gate, or experts of such; "
             "experts on a projection of the tokens (Nemotron 3 Super)",
    ),
    Family(
        model_type="lfm3", architecture="Lfm3ForCausalLM", models="LFM3", layer=places.LFM3_LAYER,
        constants={"qk_norm": True}, copied={"rms_norm_eps": "norm_eps"}, norm="embedding_norm",
        parts=(recurrent.LFM3_LAYERS, recurrent.LFM3_OPTIONS, recurrent.LFM3_EPSILON),
        spellings={"self_attn.g_proj": "self_attn.gate_proj"},
        defaults={"max_position_embeddings": 128000, "num_key_value_heads": 4, "norm_eps": 1e-5, "head_dim": 128,
                  "sliding_window": 256, "conv_L_cache": 7, "conv_bias": False, "tie_word_embeddings": True,
                  "pad_token_id": 124893, "bos_token_id": 124894, "eos_token_id": 124900,
                  "use_sandwich_norm": True, "use_attention_gate": True, "rope_theta": 1000000.0,
                  "rope_local_base_freq": 10000.0,
                  "rope_parameters": {
                      "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5,
                                         "rope_theta": 1000000.0},
                      "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
        only={**NO_DROPOUT, "attention_bias": (False,)},
        note="as LFM2, with a gate per head, four norms per layer, and a RoPE per kind of attention",
    ),
)  # fmt: skip
