"""Steps of decoding at real shapes: by the kernels of a step and by the modules."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from te_models import CausalLM
from te_models.model.decoder import Decoder

pytestmark = pytest.mark.gpu

LAYERS: dict[str, Any] = dict(num_hidden_layers=4, max_position_embeddings=4096)
EDGES: dict[str, Any] = dict(num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=1)


@torch.no_grad()
def steps(model: Decoder, ids: torch.Tensor, prompt: int) -> torch.Tensor:
    """Return the logits of each token after the first `prompt` of ids [B, S], in FP64."""
    cache = model.new_cache(len(ids), ids.shape[1])
    model(ids[:, :prompt], cache=cache, is_first_microbatch=True)
    made = []
    for token in ids[:, prompt:].split(1, dim=1):
        made.append(model(token, cache=cache, is_first_microbatch=False).logits.double())
    return torch.cat(made, dim=1)


def in_fp32(model: CausalLM, preset: str) -> CausalLM:
    """Return a model with the same weights, in FP32 and without kernels of ours."""
    exact = CausalLM.from_preset(
        preset, recipe="bf16", device="cuda", dtype=torch.float32, fused=False, **LAYERS
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            exact.get_parameter(name).copy_(weight)
    return exact.eval()


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return how far logits are from exact ones, by norm."""
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("batch", [1, 3, 8, 16])
@pytest.mark.parametrize("recipe", ["bf16", "delayed", "current"])
@pytest.mark.parametrize("preset", ["qwen3-1.7b", "llama-3.1-8b", "gated-1b", "phi-3-mini-4k"])
def test_as_near_to_fp32_as_the_modules(preset: str, recipe: str, batch: int) -> None:
    """Both round at the same places and sum in another order, so one is as far from FP32 as the other."""
    torch.manual_seed(0)
    options = LAYERS if recipe == "bf16" else LAYERS | EDGES
    model = CausalLM.from_preset(preset, recipe=recipe, device="cuda", **options).eval()
    if recipe == "delayed":
        batch_of_training = torch.randint(0, model.config.vocab_size, (2, 512), device="cuda")
        model.calibrate(dict(input_ids=batch_of_training, labels=batch_of_training))
    ids = torch.randint(0, model.config.vocab_size, (batch, 310), device="cuda")
    exact = steps(in_fp32(model, preset), ids, 300)
    assert model.kernels.decode is not None
    found = distance(steps(model, ids, 300), exact)
    model.kernels = replace(model.kernels, decode=None)
    modules = distance(steps(model, ids, 300), exact)
    assert 0 < found < 1.1 * modules


def test_generation_in_a_graph_takes_them() -> None:
    """A text of 200 tokens, replayed from the graph, is the text of eager steps."""
    torch.manual_seed(0)
    model = CausalLM.from_preset("qwen3-0.6b", recipe="bf16", device="cuda", **LAYERS).eval()
    ids = torch.randint(0, model.config.vocab_size, (4, 64))
    options = dict(max_new_tokens=200, eos_token_id=None)
    graphed = model.generate(ids, cuda_graph=True, **options)
    assert torch.equal(graphed, model.generate(ids, cuda_graph=False, **options))
