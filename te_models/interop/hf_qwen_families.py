"""Qwen's families, rows of te_models.interop.hf_families.FAMILIES. No torch."""

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
)
from te_models.interop.hf_hybrid_parts import (
    HYBRID,
    MROPE,
    WHOLE_MROPE,
)
from te_models.interop.hf_parts import Fields

ACT = parts.activation()
_NO_BIAS = {"attention_bias": (False,)}
_VISION_KEYS = (
    "vision_config",
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
    "vision_token_id",
)
_QWEN2_VL: Fields = dict(
    layer=places.LAYER,
    parts=(WHOLE_MROPE, windows.WINDOW_BY_FLAG, ACT),
    flat=_VISION_KEYS,
    other_models=("visual.",),
    constants={**UNGATED, "attention_bias": True},
    defaults={
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "rope_theta": 1000000.0,
        "max_window_layers": 80,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
    only=NO_DROPOUT,
    **TEXT_ALONE,
)
_QWEN3_VL: Fields = dict(
    root="model.language_model.",
    other_models=("model.visual.",),
    constants={**UNGATED, "qk_norm": True},
    defaults={
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "rope_theta": 500000.0,
    },
    only=NO_DROPOUT,
    **TEXT_ALONE,
)
_QWEN3_VL_MOE: Fields = {
    **_QWEN3_VL,
    "defaults": {
        **_QWEN3_VL["defaults"],
        "num_key_value_heads": 16,
        "head_dim": None,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "router_aux_loss_coef": 0.001,
    },
    "ignored": experts.IGNORED,
}
_GATED_NEXT = {"attention_gate": "elementwise", "qk_norm": True, "zero_centered_norm": True}
_QWEN3_5: Fields = dict(
    layer=places.QWEN3_5_LAYER,
    parts=(MROPE, HYBRID, ACT),
    constants=_GATED_NEXT,
    defaults={**LENGTHS, "num_key_value_heads": 4, "head_dim": 256, "partial_rotary_factor": 0.25},
    only={**NO_DROPOUT, **_NO_BIAS, "attn_output_gate": (True,)},
    ignored=frozenset(
        (
            "mamba_ssm_dtype",
            "mtp_num_hidden_layers",
            "mtp_use_dedicated_embeddings",
            "mlp_only_layers",
        )
    ),
)
_QWEN3_5_MOE: Fields = {
    **_QWEN3_5,
    "layer": {**places.QWEN3_5_LAYER, **places.QWEN2_EXPERTS},
    "parts": (MROPE, HYBRID, ACT, experts.QWEN3_5_EXPERTS, experts.NO_WIDTH),
    "defaults": {
        **LENGTHS,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "intermediate_size": 0,
        "shared_expert_intermediate_size": 512,
        "router_aux_loss_coef": 0.001,
    },
    "ignored": _QWEN3_5["ignored"] | experts.IGNORED,
}
QWEN_FAMILIES = (
    Family(
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        models="Qwen2, Qwen2.5",
        layer=places.LAYER,
        parts=(ropes.ROPE, windows.WINDOW_BY_FLAG, ACT),
        constants={**UNGATED, "attention_bias": True},
        defaults={**LENGTHS, "num_key_value_heads": 32, "max_window_layers": 28},
        only=NO_DROPOUT,
        note="bias on q, k, v; sliding window per layer",
    ),
    Family(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        models="Qwen3, dense",
        layer=places.NORMED_LAYER,
        parts=(ropes.ROPE, windows.WINDOW_BY_FLAG, ACT, parts.biases()),
        constants={**UNGATED, "qk_norm": True},
        defaults={**LENGTHS, "num_key_value_heads": 32, "head_dim": 128, "max_window_layers": 28},
        only=NO_DROPOUT,
        note="RMSNorm on each head of q and k",
    ),
    Family(
        model_type="qwen2_vl",
        architecture="Qwen2VLForConditionalGeneration",
        models="Qwen2-VL",
        **_QWEN2_VL,
    ),
    Family(
        model_type="qwen2_5_vl",
        architecture="Qwen2_5_VLForConditionalGeneration",
        models="Qwen2.5-VL",
        **_QWEN2_VL,
    ),
    Family(
        model_type="qwen3_vl",
        architecture="Qwen3VLForConditionalGeneration",
        models="Qwen3-VL, dense",
        layer=places.NORMED_LAYER,
        parts=(WHOLE_MROPE, ACT, parts.biases()),
        **_QWEN3_VL,
    ),
    Family(
        model_type="qwen3_vl_moe",
        architecture="Qwen3VLMoeForConditionalGeneration",
        models="Qwen3-VL with experts, such as 30B-A3B",
        layer={**places.NORMED_LAYER, **places.STACKED_EXPERTS},
        parts=(WHOLE_MROPE, ACT, parts.biases(), experts.QWEN3_VL_EXPERTS),
        stacked="inputs first",
        **_QWEN3_VL_MOE,
    ),
)
# With a gate on the output of attention: Qwen3-Next's line, and the models of the gate's paper, whose type is qwen3
# too and which `marks` tell from it.
GATED_QWEN_FAMILIES = (
    Family(  # qiuzh20/gated_attention, whose published files say "qwen2"
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        models="`QwQZh/gated_attention`",
        layer=places.GATED_BY_GROUP,
        parts=(ropes.ROPE, parts.GATE, ACT),
        defaults={**LENGTHS, "num_key_value_heads": 32, "head_dim": 128, "use_qk_norm": True},
        only={**NO_DROPOUT, **_NO_BIAS, "qkv_bias": (False,), "use_sliding_window": (False,)},
        ignored=frozenset(("auto_map", "sliding_window", "max_window_layers")),
        marks=(*parts.GATE.keys, "qkv_bias"),
        written=False,
        sign="or `qwen2`, with `headwise_attn_output_gate` or `elementwise_attn_output_gate`",
        note="the gate's rows are inside q_proj, after the queries of each group of heads that share a key",
    ),
    Family(
        model_type="qwen3_5_text",
        architecture="Qwen3_5ForCausalLM",
        models="Qwen3.5, 3.6 and 3.8, dense (text)",
        **_QWEN3_5,
        accepts=lambda config: config.linear_attention is not None,
        note="three layers of Gated DeltaNet, then one of gated attention as in Qwen3-Next",
    ),
    Family(
        model_type="qwen3_5",
        architecture="Qwen3_5ForConditionalGeneration",
        models="Qwen3.5, 3.6 and 3.8, dense, with images",
        **_QWEN3_5,
        **TEXT_ALONE,
        root="model.language_model.",
        other_models=("model.visual.", "mtp."),
    ),
    Family(
        model_type="qwen3_5_moe_text",
        architecture="Qwen3_5MoeForCausalLM",
        models="Qwen3.5, 3.6 and 3.8 with experts (text), such as 35B-A3B",
        **_QWEN3_5_MOE,
        note="as the dense ones, with experts and one for all tokens with a gate",
    ),
    Family(
        model_type="qwen3_5_moe",
        architecture="Qwen3_5MoeForConditionalGeneration",
        models="Qwen3.5, 3.6 and 3.8 with experts, with images",
        **_QWEN3_5_MOE,
        **TEXT_ALONE,
        root="model.language_model.",
        other_models=("model.visual.", "mtp."),
    ),
    Family(
        model_type="qwen3_next",
        architecture="Qwen3NextForCausalLM",
        models="Qwen3-Next",
        layer={**places.QWEN3_NEXT_LAYER, **places.QWEN2_EXPERTS},
        constants=_GATED_NEXT,
        parts=(ropes.PARTIAL_ROPE, experts.NEXT_EXPERTS, HYBRID, ACT),
        defaults={
            **LENGTHS,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "partial_rotary_factor": 0.25,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "norm_topk_prob": True,
            "shared_expert_intermediate_size": 512,
            "router_aux_loss_coef": 0.001,
        },
        only={**NO_DROPOUT, **_NO_BIAS},
        ignored=experts.IGNORED,
        note="the gate after the queries of each head, RoPE on a part of each head, norms that store gamma - 1, "
        "Gated DeltaNet in some layers; experts",
    ),
)
