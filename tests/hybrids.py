"""transformers' hybrids of gated attention and Gated DeltaNet, small, random and odd: what ours are compared with."""

import copy
import random
from typing import Any

import torch
from judge import AutoModelForCausalLM, transformers

LINEAR, FULL = "linear_attention", "full_attention"
SEEDS = range(20)


def hybrid_fields(seed: int) -> tuple[str, dict[str, Any]]:
    """Return a model type and the fields of its config, in which value heads are 1, 2 or 4 times the key heads."""
    draw = random.Random(seed)
    kind, count, heads = ("qwen3_5_text", "qwen3_next")[seed % 2], draw.choice([2, 3, 4, 5]), draw.choice([2, 3, 4])
    types = draw.sample([LINEAR, FULL, *(draw.choice([LINEAR, LINEAR, FULL]) for _ in range(count - 2))], count)
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


def hybrid_judge(seed: int) -> Any:
    """Return transformers' model of these fields with random values in every parameter."""
    kind, fields = hybrid_fields(seed)
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(kind, **copy.deepcopy(fields))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    randomize_hybrid(model)
    return model


@torch.no_grad()
def randomize_hybrid(model: torch.nn.Module) -> None:
    """Give every parameter a random value of a trained model's size."""
    for name, parameter in model.named_parameters():
        noise = torch.randn_like(parameter)
        if name.endswith("A_log"):
            parameter.copy_(noise)  # half of the heads forget within a few tokens, half within hundreds
        elif name.endswith("dt_bias"):
            parameter.copy_(noise * 2 - 3)
        elif name.endswith("linear_attn.norm.weight"):
            parameter.copy_(1 + 0.3 * noise)
        elif parameter.ndim == 1:
            parameter.copy_(0.3 * noise)
        else:
            parameter.copy_(noise * parameter[0].numel() ** -0.5)
