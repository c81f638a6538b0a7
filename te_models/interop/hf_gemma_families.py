"""Gemma's families, rows of te_models.interop.hf_families.FAMILIES. No torch."""

from te_models.interop import hf_experts as experts
from te_models.interop import hf_gemma4_parts as gemma4
from te_models.interop import hf_parts as parts
from te_models.interop import hf_places as places
from te_models.interop import hf_rope_parts as ropes
from te_models.interop import hf_window_parts as windows
from te_models.interop.hf_family import (
    NO_DROPOUT,
    TEXT_ALONE,
    UNGATED,
    Family,
    whole_heads,
)
from te_models.interop.hf_parts import Fields

GELU = parts.activation("hidden_activation")
GEMMA = {**UNGATED, "norm_position": "both", "zero_centered_norm": True}
_GEMMA = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_CAUSAL = {"use_bidirectional_attention": (None, False)}
_GEMMA3: Fields = dict(
    scaled_vectors=True,
    layer=places.both_normed(places.NORMED_LAYER, places.GEMMA_NORMS),
    parts=(
        windows.GEMMA3_ROPE,
        GELU,
        parts.biases(),
        parts.QUERY_SCALAR,
        parts.EMBEDDING_ROOT,
        parts.same("final_logit_softcapping"),
    ),
    constants={**GEMMA, "qk_norm": True},
    defaults={
        **_GEMMA,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "sliding_window_pattern": 6,
    },
    only={**NO_DROPOUT, **_CAUSAL, "attn_logit_softcapping": (None,)},
    ignored=frozenset(("hidden_act",)),
)
_GEMMA3_IMAGES: Fields = {
    **_GEMMA3,
    "defaults": {**_GEMMA3["defaults"], "vocab_size": 262208, "num_attention_heads": 8},
    # This model of transformers does not apply the cap.
    "only": {**_GEMMA3["only"], "final_logit_softcapping": (None,)},
}
_GEMMA4: Fields = dict(
    scaled_vectors=True,
    layer=places.GEMMA4_LAYER,
    parts=(
        windows.GEMMA4_ROPE,
        gemma4.GEMMA4_HEADS,
        gemma4.GEMMA4_SMALL,
        GELU,
        parts.biases(),
        parts.EMBEDDING_ROOT,
        parts.same("final_logit_softcapping"),
    ),
    unused=gemma4.gemma4_unused,
    constants={
        **UNGATED,
        "norm_position": "both",
        "qk_norm": True,
        "value_norm": True,
        "layer_scale": True,
        "attention_multiplier": 1.0,
    },
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 512,
        "attention_k_eq_v": False,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    only={**NO_DROPOUT, "use_bidirectional_attention": (None, "vision")},
    when={"enable_moe_block": (False, None)},
    ignored=frozenset(
        (
            "hidden_act",
            "num_experts",
            "num_local_experts",
            "top_k_experts",
            "moe_intermediate_size",
            "enable_moe_block",
        )
    ),
)
_ONLY_LARGE: Fields = {"num_kv_shared_layers": (0, None), "hidden_size_per_layer_input": (0, None)}
# Without inputs per layer, and with keys in each.
_GEMMA4_LARGE: Fields = {
    **_GEMMA4,
    "parts": tuple(part for part in _GEMMA4["parts"] if part is not gemma4.GEMMA4_SMALL),
    "only": {**_GEMMA4["only"], **_ONLY_LARGE},
    "ignored": _GEMMA4["ignored"] | {"vocab_size_per_layer_input", "use_double_wide_mlp"},
}
_GEMMA4_MOE: Fields = {
    **_GEMMA4_LARGE,
    "layer": {
        **{name: rows for name, rows in places.GEMMA4_LAYER.items() if "mlp" not in name},
        **places.GEMMA4_EXPERTS,
    },
    "parts": (*_GEMMA4_LARGE["parts"], experts.GEMMA4_EXPERTS),
    "when": {"enable_moe_block": (True,)},
    "stacked": "outputs first",
    "experts": "experts",
    "ignored": frozenset(("hidden_act", "vocab_size_per_layer_input", "use_double_wide_mlp")),
}
_GEMMA4_IMAGES: Fields = dict(
    **TEXT_ALONE,
    root="model.language_model.",
    other_models=(
        "model.vision_tower.",
        "model.embed_vision.",
        "model.audio_tower.",
        "model.embed_audio.",
    ),
)
_GEMMA4_UNIFIED: Fields = {
    **_GEMMA4_LARGE,
    "defaults": {
        **_GEMMA4["defaults"],
        "max_position_embeddings": 262144,
        "sliding_window": 1024,
        "hidden_size_per_layer_input": 0,
    },
    "when": {},
}
VAULT_GEMMA = Family(
    model_type="vaultgemma",
    architecture="VaultGemmaForCausalLM",
    models="VaultGemma 1B",
    layer=places.VAULT_GEMMA_LAYER,
    parts=(
        ropes.ROPE,
        windows.SECOND_IS_FULL,
        GELU,
        parts.biases(),
        parts.QUERY_SCALAR,
        parts.EMBEDDING_ROOT,
        parts.same("attn_logit_softcapping", "final_logit_softcapping"),
    ),
    constants={**UNGATED, "zero_centered_norm": True},
    scaled_vectors=True,
    defaults={
        **_GEMMA,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    accepts=whole_heads,
    only=NO_DROPOUT,
    ignored=frozenset(("hidden_act", "sliding_window_size")),
    note="Gemma 2 without the norms after attention and MLP",
)
GEMMA_FAMILIES = (
    Family(
        model_type="gemma",
        architecture="GemmaForCausalLM",
        models="Gemma 1",
        layer=places.LAYER,
        parts=(ropes.ROPE, parts.GEMMA_ACT, parts.biases(), parts.EMBEDDING_ROOT),
        constants={**UNGATED, "zero_centered_norm": True},
        scaled_vectors=True,
        defaults={
            "num_key_value_heads": 16,
            "head_dim": 256,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "bos_token_id": 2,
            "eos_token_id": 1,
            "pad_token_id": 0,
            "hidden_act": "gelu_pytorch_tanh",
        },
        accepts=whole_heads,
        only={**NO_DROPOUT, **_CAUSAL},
        ignored=frozenset(("hidden_activation",)),
        note="GELU, norms that store gamma - 1, scaled embeddings",
    ),
    Family(
        model_type="gemma2",
        architecture="Gemma2ForCausalLM",
        models="Gemma 2",
        layer=places.both_normed(places.LAYER, places.GEMMA_NORMS),
        parts=(
            ropes.ROPE,
            windows.SECOND_IS_FULL,
            GELU,
            parts.biases(),
            parts.QUERY_SCALAR,
            parts.EMBEDDING_ROOT,
            parts.same("attn_logit_softcapping", "final_logit_softcapping"),
        ),
        constants=GEMMA,
        scaled_vectors=True,
        defaults={
            **_GEMMA,
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        accepts=whole_heads,
        only={**NO_DROPOUT, **_CAUSAL},
        ignored=frozenset(("hidden_act", "sliding_window_size")),
        note="four norms per layer, GELU, capped logits of attention and head",
    ),
    Family(
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        models="Gemma 3 270M, 1B, and the text of others",
        **_GEMMA3,
        accepts=whole_heads,
        note="as Gemma 2, with norms of q and k instead of caps; layers with a sliding window have a RoPE of their own",
    ),
    Family(
        model_type="gemma3",
        architecture="Gemma3ForConditionalGeneration",
        models="Gemma 3 4B, 12B, 27B",
        **_GEMMA3_IMAGES,
        **TEXT_ALONE,
        root="language_model.model.",
        head="language_model.lm_head",
        other_models=("vision_tower.", "multi_modal_projector."),
    ),
    Family(
        model_type="gemma4_text",
        architecture="Gemma4ForCausalLM",
        models="Gemma 4 (text)",
        **_GEMMA4,
        note="heads of 512 channels in layers without a window, whose keys may be the values too; norms of q, k and v; "
        "a stored factor per layer; inputs per layer, and keys that layers share (E2B, E4B)",
    ),
    Family(
        model_type="gemma4",
        architecture="Gemma4ForConditionalGeneration",
        models="Gemma 4 E2B, E4B, 31B",
        **_GEMMA4,
        **_GEMMA4_IMAGES,
    ),
    Family(
        model_type="gemma4_text",
        architecture="Gemma4ForCausalLM",
        models="Gemma 4 with experts (text)",
        **_GEMMA4_MOE,
        sign="with `enable_moe_block`",
        note="experts beside the MLP, with norms of their own, and a scale per expert",
    ),
    Family(
        model_type="gemma4",
        architecture="Gemma4ForConditionalGeneration",
        models="Gemma 4 26B-A4B",
        **_GEMMA4_MOE,
        **_GEMMA4_IMAGES,
        sign="with `enable_moe_block`",
    ),
    Family(
        model_type="gemma4_unified_text",
        architecture="Gemma4UnifiedForCausalLM",
        models="Gemma 4 12B (text)",
        **_GEMMA4_UNIFIED,
        note="as `gemma4_text`",
    ),
    Family(
        model_type="gemma4_unified",
        architecture="Gemma4UnifiedForConditionalGeneration",
        models="Gemma 4 12B",
        **_GEMMA4_UNIFIED,
        **TEXT_ALONE,
        root="model.language_model.",
        other_models=("model.vision_embedder.", "model.embed_vision.", "model.embed_audio."),
    ),
)
