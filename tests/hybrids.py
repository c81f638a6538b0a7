"""The shapes of hybrids of gated attention and Gated DeltaNet, small and odd, as transformers' configs."""

import copy
import random
from typing import Any

from judge import transformers

LINEAR, FULL = "linear_attention", "full_attention"
HYBRIDS = {f"hybrid-{seed}": seed for seed in range(20)}


def hybrid_fields(seed: int) -> tuple[str, dict[str, Any]]:
    """Return a model type and the fields of its config, in which value heads are 1, 2 or 4 times the key heads."""
    draw = random.Random(seed)
    kind, count, heads = (
        ("qwen3_5_text", "qwen3_next")[seed % 2],
        draw.choice([2, 3, 4, 5]),
        draw.choice([2, 3, 4]),
    )
    types = draw.sample(
        [LINEAR, FULL, *(draw.choice([LINEAR, LINEAR, FULL]) for _ in range(count - 2))], count
    )
    keys = draw.choice([1, 2, 3])
    fields: dict[str, Any] = dict(
        vocab_size=131, hidden_size=draw.choice([30, 48, 56]), intermediate_size=draw.choice([17, 40, 72]),
        num_hidden_layers=count, num_attention_heads=heads,
        num_key_value_heads=draw.choice([size for size in (1, 2, 3, 4) if heads % size == 0]),
        head_dim=draw.choice([16, 24, 40]), max_position_embeddings=320, layer_types=types,
        linear_num_key_heads=keys, linear_num_value_heads=keys * (1, 2, 4)[seed % 3],
        linear_key_head_dim=draw.choice([7, 12, 16]), linear_value_head_dim=draw.choice([8, 15, 20]),
        linear_conv_kernel_dim=draw.choice([1, 2, 3, 4, 5]), tie_word_embeddings=draw.choice([True, False]),
        rms_norm_eps=draw.choice([1e-6, 1e-5]), bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    if kind == "qwen3_next":
        fields |= dict(num_experts=0, mlp_only_layers=list(range(count)))
    return kind, fields


def hybrid_config(seed: int) -> Any:
    """Return the transformers config of these fields."""
    kind, fields = hybrid_fields(seed)
    return transformers.AutoConfig.for_model(kind, **copy.deepcopy(fields))
