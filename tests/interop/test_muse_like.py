"""Muse-like decoders: a separate projection for an elementwise gate, windows three to one, no RoPE where there is none.

transformers has the text model of Muse-Glimmer, without a head for text alone. It norms embeddings, queries and keys
without weights, which ours does not: a table normed beforehand and norms with weights of one are the same model.
"""

from typing import Any

import torch
from judge import transformers

from te_models import ModelConfig, get_preset


def ours_of(config: Any) -> ModelConfig:
    """The shape of a Muse in our fields."""
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "sliding_window",
            "final_logit_softcapping", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id")  # fmt: skip
    return ModelConfig(
        **{name: getattr(config, name) for name in same},
        layer_types=tuple(config.layer_types),
        no_rope_layers=tuple(int(bool(theta)) for theta in config.layer_rope_theta),
        rope_theta=config.rope_parameters["rope_theta"],
        hidden_act=config.hidden_activation,
        attention_gate="elementwise",
        attention_multiplier=config.qk_scale_factor * config.head_dim**-0.5,
        qk_norm=True,
        norm_position="both",
        zero_centered_norm=True,
        logits_scaling=1 / config.output_multiplier,
    )


def test_the_preset_has_the_published_sizes() -> None:
    published = transformers.AutoConfig.for_model(
        "muse_glimmer_text", rope_parameters=dict(rope_theta=500000.0)
    )
    preset = get_preset("muse-like-30b")
    assert preset == ours_of(published)
    with torch.device("meta"):
        body = transformers.AutoModel.from_config(published)
    theirs = (
        sum(p.numel() for p in body.parameters()) + published.vocab_size * published.hidden_size
    )
    assert (
        preset.num_parameters == theirs + 2 * published.head_dim * published.num_hidden_layers
    )  # norms of q and k
