"""Shapes of Gemma: the fields that its presets share (te_models.config.presets). No torch."""

from typing import Any

from te_models.config.preset_shapes import PresetFields, shape_of, windowed

GEMMA_1: PresetFields = dict(
    vocab_size=256000, head_dim=256, max_position_embeddings=8192, rms_norm_eps=1e-6, zero_centered_norm=True,
    hidden_act="gelu_pytorch_tanh", attention_gate="none", tie_word_embeddings=True, bos_token_id=2, eos_token_id=1,
    pad_token_id=0,
)  # fmt: skip

GEMMA: PresetFields = dict(
    rms_norm_eps=1e-6,
    attention_gate="none",
    norm_position="both",
    zero_centered_norm=True,
    hidden_act="gelu_pytorch_tanh",
    tie_word_embeddings=True,
    bos_token_id=2,
    eos_token_id=1,
    pad_token_id=0,
)


def gemma2(hidden: int, intermediate: int, layers: int, *heads: int, **fields: Any) -> PresetFields:
    """Return the shape of a Gemma 2: every second layer sees all keys, and logits are capped."""
    caps = dict(attn_logit_softcapping=50.0, final_logit_softcapping=30.0, sliding_window=4096)
    shape = dict(
        vocab_size=256000,
        head_dim=256,
        embedding_multiplier=hidden**0.5,
        max_position_embeddings=8192,
    )
    return shape_of(
        hidden,
        intermediate,
        layers,
        *heads,
        **{**GEMMA, **windowed(layers, 2, 1), **caps, **shape, **fields},
    )


def gemma3(
    hidden: int, intermediate: int, layers: int, *heads: int, stretch: float = 8.0, **fields: Any
) -> PresetFields:
    """Return the shape of a Gemma 3's text model: every sixth layer sees all keys, with its own RoPE."""
    stretched = None if stretch == 1 else dict(rope_type="linear", factor=stretch)
    rope = dict(rope_theta=1000000.0, rope_scaling=stretched, sliding_rope=dict(rope_theta=10000.0))
    shape = dict(
        vocab_size=262208,
        head_dim=256,
        qk_norm=True,
        sliding_window=1024,
        max_position_embeddings=131072,
        embedding_multiplier=hidden**0.5,
    )
    return shape_of(
        hidden,
        intermediate,
        layers,
        *heads,
        **{**GEMMA, **windowed(layers, 6, 5), **rope, **shape, **fields},
    )


def gemma4(
    hidden: int, intermediate: int, layers: int, heads: tuple[int, int, int], **fields: Any
) -> PresetFields:
    """Return a Gemma 4; `heads` counts queries, keys under a window, and keys without one."""
    query, windowed, full = heads
    # Five layers with a window, and one that sees everything, with fewer heads of keys, twice as wide.
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    sliding = dict(num_attention_heads=query, num_key_value_heads=windowed, head_dim=256)
    return dict(
        vocab_size=262144,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=query,
        num_key_value_heads=full,
        head_dim=512,
        sliding_heads=sliding,
        layer_types=tuple(kinds[layer % 6] for layer in range(layers)),
        sliding_window=1024,
        keys_as_values=True,
        rope_theta=1e6,
        rope_scaling=dict(rope_type="proportional", partial_rotary_factor=0.25),
        sliding_rope=dict(rope_theta=1e4),
        max_position_embeddings=262144,
        rms_norm_eps=1e-6,
        attention_gate="none",
        attention_multiplier=1.0,
        qk_norm=True,
        value_norm=True,
        norm_position="both",
        layer_scale=True,
        hidden_act="gelu_pytorch_tanh",
        embedding_multiplier=hidden**0.5,
        final_logit_softcapping=30.0,
        tie_word_embeddings=True,
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
        **fields,
    )


def gemma4_small(
    hidden: int,
    intermediate: int,
    layers: int,
    kv_heads: int,
    *,
    period: int,
    reusing_layers: int,
    wide: bool = False,
) -> PresetFields:
    """Return a Gemma 4 with inputs per layer, whose last `reusing_layers` layers reuse keys.

    With `wide` those have MLPs of twice the width.
    """
    reuses_keys = [int(layer >= layers - reusing_layers) for layer in range(layers)]
    widths = tuple(intermediate * (1 + flag) for flag in reuses_keys)
    # The large shape, with the differences below.
    large = gemma4(hidden, intermediate, layers, heads=(8, kv_heads, kv_heads))
    return {
        **large,
        **windowed(layers, period, period - 1),
        "keys_as_values": False,
        "sliding_window": 512,
        "max_position_embeddings": 131072,
        "shared_key_layers": tuple(reuses_keys),
        **(dict(intermediate_sizes=widths) if wide else {}),
        "layer_inputs": dict(width=256, vocab_size=262144),
    }
