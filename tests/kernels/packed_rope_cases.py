"""Models whose angles depend on a text's length, with fused attention in Triton; test_triton_kernels.py runs this."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from fewer import every

from te_models import CausalLM
from te_models.config.model import ModelConfig
from te_models.kernels.gated_attention_triton import TRITON

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="the interpreter is for machines without a GPU"
    ),
    # The interpreter multiplies BF16 wrongly.
    pytest.mark.filterwarnings("ignore:the model is trained in float16:UserWarning"),
]
LONG: dict[str, Any] = dict(
    rope_type="longrope", original_max_position_embeddings=12, factor=4.0,
    short_factor=[1.0 + 0.05 * i for i in range(8)], long_factor=[1.0 + 0.9 * i for i in range(8)],
)  # fmt: skip
SCALINGS = {"longrope": (64, LONG), "dynamic": (12, dict(rope_type="dynamic", factor=6.0))}
LENGTHS = (7, 22, 12)


@pytest.mark.parametrize(("name", "window"), every(3, SCALINGS, [None, 5]))
def test_fused_attention_gives_each_document_its_own_angles(name: str, window: int | None) -> None:
    """Forward and backward, in FP16, which the interpreter multiplies, as it does not BF16."""
    context, scaling = SCALINGS[name]
    config = ModelConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=context, rope_scaling=scaling,
        sliding_window=window, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = CausalLM(config, recipe="bf16", dtype=torch.float16, device="cpu", fused=True)
    model.kernels = replace(model.kernels, attention=TRITON)
    ids = torch.randint(0, 64, (1, sum(LENGTHS)))
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS))[None]
    together = model(ids, labels=ids, document_ids=documents)
    together.loss.backward()
    gradients = {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    logits = []
    for own in ids.split(LENGTHS, dim=1):
        alone = model(own, labels=own)
        (alone.loss * (own.shape[1] - 1) / (sum(LENGTHS) - 3)).backward()
        logits.append(alone.logits)
    expected = torch.cat(logits, dim=1).float()
    error = (together.logits.float() - expected).norm() / expected.norm()
    assert error < 2.0**-8
    for n, parameter in model.named_parameters():
        error = (gradients[n] - parameter.grad.float()).norm() / parameter.grad.float().norm()
        assert error < 2.0**-6, n
