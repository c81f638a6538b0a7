"""Small models whose activations the memory plan is compared with."""

from __future__ import annotations

from typing import Any

import torch
from kinds import KINDS, OPTIONS

# Multiples of 128, so that no scale is padded for the emulated engine alone.
SHAPE = dict(vocab_size=288, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64)  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = OPTIONS | {
    "gated": {},
    "headwise": dict(attention_gate="headwise"),
    "Llama": dict(attention_gate="none"),
    "Qwen3": dict(attention_gate="none", qk_norm=True, tie_word_embeddings=True),
    "SmolLM3": dict(no_rope_layers=(1, 0, 1)),
    "post-norm": dict(norm_position="post", residual_multiplier=0.5),
    "side by side": dict(norm_type="layer", parallel_residual=True),
    "RMSNorm side by side": dict(parallel_residual=True),
    "hybrid": KINDS["linear attention"].fields,
    "FP32": dict(dtype=torch.float32),
    "FP32 Llama": dict(dtype=torch.float32, attention_gate="none"),
}
ROWS = [(2, 64), (1, 23)]  # the second is padded
