"""Logits and gradients of latent attention against tests/fp64_model.py, which computes each head and pair alone."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fp64_model import logits_of

from te_models import CausalLM, ModelConfig

SHAPE: dict[str, Any] = dict(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, head_dim=16, max_position_embeddings=64, initializer_range=0.15, attention_gate="none",
)  # fmt: skip


@pytest.mark.parametrize("values", [16, 48, 80], ids=["narrow", "as wide", "wide"])
@pytest.mark.parametrize("rank", [None, 48])
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(rope_interleaved=True, attention_bias=True, attention_output_bias=True),
        dict(attention_multiplier=0.4),
    ],
    ids=["plain", "interleaved, biases", "own factor"],
)
def test_latent_attention_equals_fp64s(
    options: dict[str, Any], rank: int | None, values: int
) -> None:
    """The values of a head are narrower than its keys (48), as wide, and wider."""
    sizes = dict(
        q_lora_rank=rank,
        kv_lora_rank=32,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=values,
    )
    if rank is None and "attention_bias" in options:
        options = options | dict(attention_bias=False)  # refused without the latent of queries
    torch.manual_seed(1)
    config = ModelConfig(**SHAPE, **options, latent_attention=sizes)
    model = CausalLM(config, recipe="bf16", engine="emulated", device="cpu", dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    weights = {n: p.detach().double().requires_grad_() for n, p in model.named_parameters()}
    ids = torch.randint(0, 96, (19,), generator=torch.Generator().manual_seed(2))
    expected = logits_of(config, weights, ids)
    F.cross_entropy(expected[:-1], ids[1:]).backward()
    output = model(ids[None], labels=ids[None])
    output.loss.backward()
    torch.testing.assert_close(output.logits[0].double(), expected, atol=2e-5, rtol=2e-5)
    for name, parameter in model.named_parameters():
        exact = weights[name].grad
        assert exact is not None and parameter.grad is not None
        error = (parameter.grad.double() - exact).norm()
        assert error <= 2e-5 * exact.norm() + 1e-9, name
