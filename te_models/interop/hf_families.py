"""Hugging Face's decoder families as tables that map their config keys and tensor names to ours. No torch.

A family is one entry of FAMILIES: the keys of config.json that are copied, the values of other keys that te-models can
compute, and the rows of our fused weights that hold each of their tensors. Every key that transformers reads is in the
entry; writing uses the same entry in reverse. Facts: the configuration and modeling files of
transformers 5.23, and modeling_qwen3.py of qiuzh20/gated_attention.
"""

import functools
from collections.abc import Iterable

from te_models.config.model import ModelConfig
from te_models.errors import ConfigError, unknown
from te_models.interop import hf_experts as experts
from te_models.interop import hf_parts as parts
from te_models.interop import hf_places as places
from te_models.interop import hf_rope_parts as ropes
from te_models.interop import hf_window_parts as windows
from te_models.interop.hf_expert_families import EXPERT_FAMILIES
from te_models.interop.hf_family import (
    LENGTHS,
    NO_DROPOUT,
    TEXT_ALONE,
    UNGATED,
    Family,
    prefixes_of,
    whole_heads,
)
from te_models.interop.hf_gemma_families import GEMMA_FAMILIES, VAULT_GEMMA
from te_models.interop.hf_hybrid_parts import (
    LATENT_HALVES,
)
from te_models.interop.hf_obstacles import obstacle, text_type
from te_models.interop.hf_parts import Fields, Values
from te_models.interop.hf_qwen_families import GATED_QWEN_FAMILIES, QWEN_FAMILIES
from te_models.interop.hf_recurrent_families import RECURRENT_FAMILIES


def _served_afmoe(config: ModelConfig) -> Fields:
    """Return keys of the published releases without which vLLM does not start; transformers has them as constants."""
    return {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1}


def _internlm(config: ModelConfig) -> bool:
    return whole_heads(config) and config.attention_bias == config.mlp_bias


def _phi(config: ModelConfig) -> bool:
    """Return whether RoPE is one of Phi-3's, whose rotated channels are counted as if the heads filled the width."""
    scaling = config.rope_scaling or {}
    filled = config.hidden_size // config.num_attention_heads
    return not scaling or (scaling["rope_type"] == "longrope" and config.head_dim == filled)


# Keys of EXAONE 3's files -> keys of transformers' config.
_EXAONE_ALIASES = {
    "num_layers": "num_hidden_layers",
    "layer_norm_epsilon": "rms_norm_eps",
    "activation_function": "hidden_act",
}


def _state_exaone(config: Values) -> Values:
    """Return a config.json with the keys of EXAONE 3's files under transformers' names."""
    return {_EXAONE_ALIASES.get(key, key): value for key, value in config.items()}


ACT = parts.activation()
GELU = parts.activation("hidden_activation")
ALL_BIASES = parts.biases(mlp="mlp_bias")
POST_NORM = {**UNGATED, "qk_norm": True, "norm_position": "post"}
_LLAMA = {
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_NO_BIAS = {"attention_bias": (False,)}
_GLM: Fields = dict(
    parts=(ropes.PARTIAL_ROPE, ACT, parts.biases(out=None)),
    only=NO_DROPOUT,
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-07,
        "partial_rotary_factor": 0.5,
        "pad_token_id": 151329,
        "eos_token_id": [151329, 151336, 151338],
        "attention_bias": True,
    },
)
_MISTRAL: Fields = dict(
    layer=places.LAYER,
    parts=(ropes.ROPE, windows.WINDOW, ACT),
    constants=UNGATED,
    only=NO_DROPOUT,
    defaults={
        **LENGTHS,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "sliding_window": 4096,
    },
)
_MINISTRAL3: Fields = dict(
    layer=places.LAYER,
    parts=(ropes.QUERY_SCALE_ROPE, windows.WINDOW, ACT),
    constants=UNGATED,
    only=NO_DROPOUT,
    defaults={
        "max_position_embeddings": 262144,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "pad_token_id": 11,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
)
# The text model of Mistral 3, of one of two types, in a folder with images.
_MISTRAL3: Fields = dict(
    model_type="mistral3",
    architecture="Mistral3ForConditionalGeneration",
    **TEXT_ALONE,
    root="language_model.model.",
    head="language_model.lm_head",
    other_models=("vision_tower.", "multi_modal_projector."),
)
_COHERE: Fields = dict(
    layer=places.PARALLEL_LAYER,
    copied={"rms_norm_eps": "layer_norm_eps"},
    constants={
        **UNGATED,
        "rope_interleaved": True,
        "norm_type": "layer",
        "parallel_residual": True,
    },
    defaults={
        "max_position_embeddings": 8192,
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": 5,
        "eos_token_id": 255001,
        "logit_scale": 0.0625,
    },
)
_COHERE2: Fields = {
    **_COHERE,
    "defaults": {**_COHERE["defaults"], "sliding_window": 4096, "sliding_window_pattern": 4},
}

# The last one expresses what the others do not; te_models.extensions adds others before it. The fields of a row are
# explained in te_models.interop.hf_family. To add one: docs/internals/design.md, "Add a model family".
FAMILIES = [
    Family(
        model_type="llama", architecture="LlamaForCausalLM", models="Llama 2, 3, 3.1, 3.2", layer=places.LAYER,
        parts=(ropes.ROPE, ACT, ALL_BIASES), constants=UNGATED, defaults=_LLAMA, accepts=whole_heads, only=NO_DROPOUT,
    ),
    Family(
        model_type="mistral", architecture="MistralForCausalLM", models="Mistral, Ministral 8B of 2024", **_MISTRAL,
        note="sliding window in all layers",
    ),
    *QWEN_FAMILIES,
    Family(
        model_type="smollm3", architecture="SmolLM3ForCausalLM", models="SmolLM3", layer=places.LAYER,
        parts=(ropes.ROPE, windows.NO_ROPE, windows.WINDOW_WITHOUT_ROPE, ACT, ALL_BIASES), constants=UNGATED,
        defaults={**LENGTHS, "num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2000000.0,
                  "no_rope_layer_interval": 4, "bos_token_id": 128000, "eos_token_id": 128001, "pad_token_id": 128004},
        only=NO_DROPOUT, note="layers without RoPE",
    ),
    *GATED_QWEN_FAMILIES,
    Family(
        model_type="ministral", architecture="MinistralForCausalLM", models="Ministral", layer=places.LAYER,
        parts=(ropes.ROPE, windows.ALL_SLIDE, ACT), constants=UNGATED,
        defaults={**LENGTHS, "max_position_embeddings": 131072, "num_key_value_heads": 8, "bos_token_id": 1,
                  "eos_token_id": 2, "sliding_window": 4096},
        only=NO_DROPOUT, note="sliding window per layer",
    ),
    Family(
        model_type="ministral3", architecture="Ministral3ForCausalLM", models="Ministral 3, Devstral 2 (text)",
        **_MINISTRAL3, note="queries scaled by their position",
    ),
    Family(models="Mistral Small 3.1 and 3.2", text_type="mistral", **_MISTRAL, **_MISTRAL3),
    Family(models="Ministral 3 and Devstral 2, with images", text_type="ministral3", **_MINISTRAL3, **_MISTRAL3),
    Family(
        model_type="cwm", architecture="CwmForCausalLM", models="CWM", layer=places.LAYER,
        parts=(ropes.ROPE, windows.FIRST_OF_FOUR_IS_FULL, ACT), constants=UNGATED,
        defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
                  "bos_token_id": 128000, "sliding_window": 8192, "eos_token_id": [128001, 128008, 128009],
                  "rope_theta": 1000000.0},
        accepts=whole_heads, only={**NO_DROPOUT, "mlp_bias": (False,)}, note="sliding window per layer",
    ),
    Family(
        model_type="internlm3", architecture="InternLM3ForCausalLM", models="InternLM3", layer=places.LAYER,
        parts=(ropes.ROPE, ACT, parts.INTERNLM_BIASES), constants=UNGATED,
        defaults={"max_position_embeddings": 32768, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5,
                  "pad_token_id": 2, "bos_token_id": 1, "eos_token_id": 2},
        accepts=_internlm, only=NO_DROPOUT, ignored=frozenset(("auto_map",)),
    ),
    Family(
        model_type="iquestcoder", architecture="IQuestCoderForCausalLM", models="IQuest-Coder V1", layer=places.LAYER,
        parts=(ropes.ROPE, ACT, ALL_BIASES), constants=UNGATED,
        defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
                  "bos_token_id": 1, "eos_token_id": 2},
        accepts=whole_heads, only={**NO_DROPOUT, "use_sliding_window": (False,), "clip_qkv": (None,)},
        ignored=frozenset(("auto_map", "max_window_layers", "sliding_window")),
    ),
    Family(
        model_type="seed_oss", architecture="SeedOssForCausalLM", models="Seed-OSS", layer=places.LAYER,
        parts=(ropes.ROPE, ACT, parts.biases(out="attention_out_bias", mlp="mlp_bias")), constants=UNGATED,
        defaults={"max_position_embeddings": 524288, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6,
                  "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "attention_bias": True},
        ignored=frozenset(("attention_dropout", "residual_dropout")),
        note="bias on q, k, v; its dropout is not applied in training",
    ),
    Family(
        model_type="phi3", architecture="Phi3ForCausalLM", models="Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
        layer=places.PHI_LAYER, parts=(ropes.SU_ROPE, windows.WINDOW, ACT), constants=UNGATED,
        defaults={"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
                  "bos_token_id": 1, "eos_token_id": 32000, "pad_token_id": 32000},
        accepts=_phi, only={**NO_DROPOUT, "resid_pdrop": (0.0,), "embd_pdrop": (0.0,), "attention_bias": (False,),
              "mlp_bias": (False,), "full_attn_mod": (1,), "interpolate_factor": (1,)},
        ignored=frozenset(("auto_map",)),
        note="fused projections, RoPE on a part of each head",
    ),
    Family(
        model_type="granite", architecture="GraniteForCausalLM", models="Granite 3", layer=places.LAYER,
        parts=(ropes.ROPE, ACT, ALL_BIASES, parts.ATTENTION_MULTIPLIER, parts.MULTIPLIERS),
        constants=UNGATED, defaults={**_LLAMA, "attention_multiplier": 1.0}, ignored=frozenset(("attention_dropout",)),
        note="four multipliers; its dropout is not applied in training",
    ),
    Family(
        model_type="granite_swa", architecture="GraniteSWAForCausalLM", models="Granite Swash 2B",
        layer=places.SINKS_LAYER, parts=(windows.LAYER_THETAS, ACT, ALL_BIASES, parts.ATTENTION_MULTIPLIER,
                                         parts.MULTIPLIERS),
        constants={**UNGATED, "attention_sinks": True},
        defaults={"max_position_embeddings": 8192, "num_key_value_heads": 4, "rms_norm_eps": 1e-5,
                  "bos_token_id": 100257, "eos_token_id": 100257, "tie_word_embeddings": True,
                  "attention_multiplier": 1.0, "sliding_window": 128},
        only=NO_DROPOUT, note="Granite's multipliers, sliding windows, attention sinks",
    ),
    Family(
        model_type="hyperclovax", architecture="HyperCLOVAXForCausalLM", models="HyperCLOVA X SEED Think 14B",
        layer=places.CLOVA_LAYER,
        parts=(ropes.ROPE, ACT, ALL_BIASES, parts.ATTENTION_MULTIPLIER,
               parts.same("embedding_multiplier", "residual_multiplier"), parts.LOGIT_FACTOR,
               parts.POST_NORMS_BY_FLAG),
        constants=UNGATED, defaults={**_LLAMA, "use_post_norm": True}, accepts=whole_heads, only=NO_DROPOUT,
        note="Granite's multipliers, four norms per layer",
    ),
    Family(
        model_type="arcee", architecture="ArceeForCausalLM", models="AFM-4.5B", layer=places.UNGATED_MLP_LAYER,
        parts=(ropes.ROPE, ACT, ALL_BIASES), constants={**UNGATED, "mlp_gate": False},
        defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "bos_token_id": 128000,
                  "eos_token_id": 128001, "hidden_act": "relu2"},
        accepts=whole_heads, only=NO_DROPOUT, note="MLP without a gate, ReLU squared",
    ),
    Family(
        model_type="helium", architecture="HeliumForCausalLM", models="Helium 1 2B", layer=places.LAYER,
        parts=(ropes.ROPE, ACT, parts.biases(out=None, mlp="mlp_bias")),
        constants={**UNGATED, "rope_interleaved": True},
        defaults={"max_position_embeddings": 4096, "num_key_value_heads": 20, "head_dim": 128, "rms_norm_eps": 1e-8,
                  "rope_theta": 100000.0, "pad_token_id": 3, "bos_token_id": 1, "eos_token_id": 2},
        accepts=lambda config: config.num_attention_heads * config.head_dim == config.hidden_size,
        only=NO_DROPOUT, note="RoPE on neighboring channels",
    ),
    Family(
        model_type="cohere", architecture="CohereForCausalLM", models="Command R, Aya 23 and Expanse",
        parts=(ropes.ROPE, ACT, parts.biases(), parts.LOGIT_SCALE), **_COHERE,
        only={**NO_DROPOUT, "use_qk_norm": (False,)},
        note="LayerNorm without a bias; attention and MLP read one norm; RoPE on neighboring channels",
    ),
    Family(
        model_type="cohere2", architecture="Cohere2ForCausalLM", models="Command R7B, Command A",
        parts=(ropes.ROPE, windows.COHERE2_WINDOW, ACT, parts.biases(), parts.LOGIT_SCALE), **_COHERE2, only=NO_DROPOUT,
        ignored=frozenset(("layer_switch", "order_of_interleaved_layers", "position_embedding_type", "rotary_pct",
                           "use_embedding_sharing", "use_gated_activation", "use_parallel_block",
                           "use_parallel_embedding", "use_qk_norm")),
        note="as `cohere`; RoPE in layers with a sliding window only",
    ),
    Family(
        model_type="exaone", architecture="ExaoneForCausalLM", models="EXAONE 3.0, 3.5, Deep",
        layer=places.EXAONE3_LAYER, root="transformer.", blocks="h", embedding="wte", norm="ln_f",
        modules=dict(layer=places.LAYER, embedding="embed_tokens", norm="norm", blocks="layers"),
        renamed={"transformer.h.": "model.layers.", ".attn.attention.out_proj.": ".self_attn.o_proj.",
                 ".attn.attention.": ".self_attn.", ".mlp.c_fc_0.": ".mlp.gate_proj.",
                 ".mlp.c_fc_1.": ".mlp.up_proj.", ".mlp.c_proj.": ".mlp.down_proj."},
        parts=(ropes.ROPE, ACT, ALL_BIASES), constants=UNGATED, stated=_state_exaone,
        defaults={"max_position_embeddings": 4096, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
                  "rope_theta": 500000.0, "bos_token_id": 1, "eos_token_id": 361, "pad_token_id": 0},
        accepts=whole_heads, only=NO_DROPOUT, ignored=frozenset(("auto_map",)),
        note="Llama under other names",
    ),
    Family(
        model_type="minicpm3", architecture="MiniCPM3ForCausalLM", models="MiniCPM3 4B", layer=places.LATENT_LAYER,
        parts=(ropes.ROPE, LATENT_HALVES, ACT, parts.biases(), parts.MINICPM3_SCALES),
        constants=UNGATED, accepts=lambda config: config.latent_attention is not None,
        defaults={"max_position_embeddings": 32768, "num_key_value_heads": 40, "rms_norm_eps": 1e-5,
                  "kv_lora_rank": 256, "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
                  "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.1},
        only={**NO_DROPOUT, "mlp_bias": (False,)}, ignored=frozenset(("auto_map", "qk_head_dim", "logits_scaling")),
        note="multi-head latent attention and Granite's multipliers",
    ),
    Family(
        model_type="olmo2", architecture="Olmo2ForCausalLM", models="OLMo 2", layer=places.POST_NORMED_LAYER,
        parts=(ropes.ROPE, ACT, parts.biases()), constants={**POST_NORM, "qk_norm_scope": "all_heads"},
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "pad_token_id": 1, "eos_token_id": 50279},
        only={**NO_DROPOUT, "clip_qkv": (None,)},
        note="norms after attention and MLP, one norm over all heads of q and of k",
    ),
    Family(
        model_type="olmo3", architecture="Olmo3ForCausalLM", models="OLMo 3", layer=places.POST_NORMED_LAYER,
        parts=(windows.OLMO3_ROPE, ACT, parts.biases()), constants={**POST_NORM, "qk_norm_scope": "all_heads"},
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "pad_token_id": 1, "eos_token_id": 50279,
                  "rope_theta": 500000.0, "rope_local_base_freq": 500000.0, "sliding_window": 4096},
        only={**NO_DROPOUT, "clip_qkv": (None,)}, note="as OLMo 2; sliding window per layer, with a RoPE of its own",
    ),
    Family(
        model_type="exaone4", architecture="Exaone4ForCausalLM", models="EXAONE 4.0", layer=places.POST_NORMED_LAYER,
        parts=(ropes.ROPE, windows.EXAONE_WINDOW, ACT), constants=POST_NORM,
        defaults={"max_position_embeddings": 2048, "num_key_value_heads": 32, "rms_norm_eps": 1e-5, "bos_token_id": 0,
                  "eos_token_id": 2, "sliding_window": 4096, "sliding_window_pattern": 4},
        only=NO_DROPOUT, note="norms after attention and MLP; RoPE in layers with a sliding window only",
    ),
    Family(
        model_type="glm", architecture="GlmForCausalLM", models="GLM-4 9B of 2024, GLM-Edge",
        layer=places.FUSED_MLP_LAYER, constants={**UNGATED, "rope_interleaved": True}, **_GLM,
        note="RoPE on neighboring channels of half of each head",
    ),
    Family(
        model_type="glm4", architecture="Glm4ForCausalLM", models="GLM-4-0414", layer=places.GLM_LAYER,
        constants={**UNGATED, "norm_position": "both", "rope_interleaved": True}, **_GLM,
        note="four norms per layer, RoPE on neighboring channels of half of each head",
    ),
    Family(
        model_type="ernie4_5", architecture="Ernie4_5ForCausalLM", models="ERNIE 4.5, dense", layer=places.LAYER,
        parts=(ropes.ROPE, ACT, parts.biases("use_bias", mlp="use_bias", qkv="use_bias")),
        constants={**UNGATED, "rope_interleaved": True},
        defaults={"max_position_embeddings": 131072, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5,
                  "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "rope_theta": 500000.0,
                  "tie_word_embeddings": True},
        note="RoPE on neighboring channels",
    ),
    Family(
        model_type="hunyuan_v1_dense", architecture="HunYuanDenseV1ForCausalLM",
        models="Hunyuan 0.5B, 1.8B, 4B, 7B", layer=places.HUNYUAN_LAYER,
        parts=(ropes.HUNYUAN_ROPE, ACT, parts.biases()),
        constants={**UNGATED, "qk_norm": True, "qk_norm_after_rope": True},
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "pad_token_id": 0, "bos_token_id": 1,
                  "eos_token_id": 2},
        only=NO_DROPOUT, ignored=frozenset(("eod_token_id",)), note="norms of q and k after RoPE",
    ),
    *GEMMA_FAMILIES,
    VAULT_GEMMA,
    Family(
        model_type="afmoe", architecture="AfmoeForCausalLM", models="Trinity (AFMoE)",
        layer={**places.AFMOE_LAYER, **places.AFMOE_EXPERTS},
        parts=(ropes.ROPE, windows.AFMOE_WINDOW, ACT, experts.AFMOE_EXPERTS, parts.MUP),
        constants={"attention_gate": "elementwise", "qk_norm": True, "norm_position": "both"},
        defaults={"max_position_embeddings": 16384, "head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": 1024,
                  "num_dense_layers": 1, "num_experts": 64, "global_attn_every_n_layers": 4, "mup_enabled": False,
                  "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "num_shared_experts": 2, "route_scale": 1.0},
        only={**NO_DROPOUT, **_NO_BIAS}, ignored=experts.IGNORED | {"router_aux_loss_coef"}, served=_served_afmoe,
        note="a projection for the gate, four norms per layer, RoPE in layers with a sliding window only",
    ),
    Family(
        model_type="muse_glimmer", architecture="MuseGlimmerForConditionalGeneration", models="Muse-Glimmer 30B",
        layer=places.MUSE_LAYER,
        parts=(windows.MUSE_LAYERS, GELU, parts.query_factor("qk_scale_factor"),
               parts.logit_factor("output_multiplier"),
               parts.same("final_logit_softcapping", "post_norm_eps")),
        constants={"attention_gate": "elementwise", "qk_norm": True, "qk_norm_weights": False, "embedding_norm": True,
                   "norm_position": "both", "zero_centered_norm": True, "plain_final_norm": True},
        defaults={"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
                  "bos_token_id": 200000, "eos_token_id": 200001, "hidden_activation": "silu", "sliding_window": 2048,
                  "final_logit_softcapping": 20.0, "qk_scale_factor": 3.87,
                  "output_multiplier": 0.19611613513818404, "post_norm_eps": 1e-8},
        only={**NO_DROPOUT, **_NO_BIAS}, ignored=frozenset(("hidden_act",)), inner="text_config",
        root="model.language_model.",
        other_models=("model.vision_tower.", "model.vision_adapter.", "model.vision_projection."),
        accepts=lambda config: False,
        note="the text model, with a projection for the gate, and norms without weights on embeddings, q and k; the "
             "other tensors are kept aside and written back",
    ),
    Family(
        model_type="laguna", architecture="LagunaForCausalLM", models="Laguna XS 2.1, S 2.1",
        layer={**places.LAGUNA_LAYER, **places.LAGUNA_EXPERTS},
        parts=(windows.LAGUNA_ROPE, ACT, parts.LAGUNA, experts.LAGUNA_EXPERTS),
        renamed={".mlp.shared_expert.": ".mlp.shared_experts."},
        constants={"attention_gate_activation": "softplus", "qk_norm": True},
        defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6,
                  "sliding_window": 512, "gating": True, "rope_theta": 500000.0, "rope_local_base_freq": 10000.0,
                  "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
                  "shared_expert_intermediate_size": 512, "router_aux_loss_coef": 0.001,
                  "moe_routed_scaling_factor": 1.0},
        only={**NO_DROPOUT, **_NO_BIAS, "moe_apply_router_weight_on_input": (False,),
              "moe_router_logit_softcapping": (0.0,)},
        ignored=experts.IGNORED,
        note="a projection for the gate, which is a softplus; heads and RoPE by kind of layer",
    ),
    *RECURRENT_FAMILIES,
    *EXPERT_FAMILIES,
    Family(
        model_type="te_models_decoder", architecture="TEModelsDecoderForCausalLM", models="te-models' own",
        layer=places.OWN_LAYER, parts=(parts.OWN,), code=True,
        note="all that the others do not express; transformers needs the code in the folder (`trust_remote_code=True`)",
    ),
]  # fmt: skip


def beside_text() -> tuple[str, ...]:
    """Return prefixes of the names of other models beside the text model, in folders and in adapters."""
    prefixes = (
        prefix
        for family in FAMILIES
        for stated in family.other_models
        for prefix in prefixes_of(stated)
    )
    return tuple(dict.fromkeys(prefixes))


# Families in whose folders AutoTokenizer splits text as Qwen does, whatever tokenizer.json says: not for a model
# of another family, which has its own tokenizer.
SPLIT_AS_QWEN = ("qwen2", "qwen3_5", "qwen3_5_moe_text", "qwen3_5_moe")


def without_others(names: Iterable[str]) -> str:
    """Return what to say of tensors of adapters that belong to other models than the text model."""
    notes = []
    for name in names:
        for prefix in beside_text():
            if name.startswith(prefix):
                notes.append(prefix)
    parts = ", ".join(f"{prefix}*" for prefix in dict.fromkeys(notes))
    return f"{len(notes)} tensors of the adapter are of other models than the text model ({parts}) and left out"


def family_of(config: Values) -> Family:
    """Return the family that a config.json belongs to; raise UsageError for an unsupported architecture."""
    kind = config.get("model_type")
    # Some releases have the model_type of another family, and a key of their own that marks them.
    marked = []
    for f in FAMILIES:
        if f.marks and kind in ("qwen2", "qwen3") and any(mark in config for mark in f.marks):
            marked.append(f)
    plain = []
    for f in FAMILIES:
        if (
            not f.marks
            and f.model_type == kind
            and (not f.text_type or text_type(config) in ("", f.text_type))
            and f.suits(config)
        ):
            plain.append(f)
    if marked or plain:
        return [*marked, *plain][0]
    types = {f.model_type for f in FAMILIES}
    raise unknown("architecture (model_type)", kind, types, advice=obstacle(config, types))


def family_for(config: ModelConfig, preferred: Family | None = None) -> Family:
    """Return the first family, starting with `preferred`, whose config.json can express all of `config`."""
    family = _expressing(config, preferred, tuple(FAMILIES))
    if isinstance(family, str):
        raise ConfigError(family)
    return family


@functools.lru_cache(256)  # runs with adapters ask for the family of their model at every save
def _expressing(
    config: ModelConfig, preferred: Family | None, families: tuple[Family, ...]
) -> Family | str:
    """Return the family, or the error of a model that none of `families` can express."""
    foreign = preferred is not None and not preferred.model_type.startswith("qwen")
    for family in (*((preferred,) if preferred else ()), *families):
        if family is not preferred and not (family.written and family.accepts(config)):
            continue
        if foreign and family.model_type in SPLIT_AS_QWEN and family is not preferred:
            continue
        if not family.has_places(config):
            continue
        try:
            if family.read(family.write(config)) == config:
                return family
        # Numbers of ours for which theirs would be zero or infinite.
        except (ArithmeticError, ValueError):
            continue
    others = []
    for family in families:
        if family.written and family.accepts(config):
            others.append((family, family.lacks(config)))
    nearest, lacks = min(others, key=lambda other: len(other[1]))
    return (
        "no architecture of Hugging Face has all of this model: save it in te-models' own format (save_pretrained, or "
        f"`te-models convert --format te`); the nearest, {nearest.model_type!r}, lacks {', '.join(lacks)}"
    )
