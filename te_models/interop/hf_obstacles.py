"""Reasons why a decoder of Hugging Face cannot be loaded, found in its config.json, for the error message. No torch."""

import difflib
from collections.abc import Collection, Mapping
from typing import Any

_NORM = "LayerNorm with a bias, or without a weight"
# model_type -> (what te-models does not compute, the nearest family that it reads), where no key below tells.
MODELS = {
    "apertus": ("xIELU, an activation with trained parameters", "arcee"),
    "falcon": (_NORM, "cohere"),
    "gemma3n": (
        "embeddings of their own per layer, and several residual streams (AltUp)",
        "gemma3_text",
    ),
    "gemma3n_text": (
        "embeddings of their own per layer, and several residual streams (AltUp)",
        "gemma3_text",
    ),
    "minimax": ("experts behind lightning attention, a recurrence", "qwen3_next"),
    "olmo": (_NORM, "olmo2"),
    "phi": (_NORM, "phi3"),
}
# Keys that tell the same of any other model_type, the strongest first.
KEYS = (
    ("an encoder", ("is_encoder_decoder", "encoder_layers"), "llama"),
    (
        "a recurrence (state space or convolution)",
        (
            "mamba_d_state",
            "ssm_state_size",
            "state_size",
            "conv_kernel",
            "conv_L_cache",
            "linear_conv_kernel_dim",
            "lru_width",
            "attention_hidden_size",
        ),
        "qwen3_next",
    ),
    ("keys and values from a latent (MLA) of another kind", ("kv_lora_rank",), "deepseek_v3"),
    (
        "experts of another kind",
        (
            "num_experts",
            "num_local_experts",
            "n_routed_experts",
            "moe_num_experts",
            "moe_intermediate_size",
        ),
        "qwen3_moe",
    ),
    (_NORM, ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"), "llama"),
)


def text_type(config: Mapping[str, Any]) -> str:
    """Return the model_type of the text model in a folder with images or sound; "" if there is none inside."""
    inner = config.get("text_config")
    return str(inner.get("model_type", "")) if isinstance(inner, Mapping) else ""


def obstacle(config: Mapping[str, Any], types: Collection[str]) -> str:
    """Return the part of a model that te-models lacks, and the nearest of `types` that it reads; "" if unknown."""
    if config.get("model_type") is None:
        return "the file lacks it"
    kind = str(config["model_type"])
    inside = text_type(config)
    if inside:
        # "qwen3_vl_text" begins with "qwen3": the longest such name is the nearest.
        begins = sorted(filter(inside.startswith, types), key=len, reverse=True)
        nearest = begins or difflib.get_close_matches(inside, types, n=1, cutoff=0.5) or ["llama"]
        return f"it is multimodal, with {inside!r} for text; the nearest that te-models reads is {nearest[0]!r}"
    lacking = MODELS.get(kind) or next(
        (
            (feature, nearest)
            for feature, keys, nearest in KEYS
            if any(config.get(key) for key in keys)
        ),
        None,
    )
    if lacking is None:
        return ""
    return f"it has {lacking[0]}, which te-models does not compute; the nearest that it reads is {lacking[1]!r}"
