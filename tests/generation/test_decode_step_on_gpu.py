"""Steps of decoding at real shapes: by the kernels of a step, which are no default yet, and by the modules."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from te_models import CausalLM
from te_models.kernels.dispatch import Kernels
from te_models.model.decoder import Decoder

pytestmark = pytest.mark.gpu

LAYERS: dict[str, Any] = dict(num_hidden_layers=4, max_position_embeddings=4096)
EDGES: dict[str, Any] = dict(num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=1)


def with_kernels(model: CausalLM) -> Kernels:
    """Return the model's kernels with those of a step; Triton is only where a GPU is."""
    from te_models.kernels.decode_triton import TRITON  # noqa: PLC0415

    return replace(model.kernels, decode=TRITON)


@torch.no_grad()
def steps(model: Decoder, ids: torch.Tensor, prompt: int) -> torch.Tensor:
    """Return the logits of each token after the first `prompt` of ids [B, S], in FP64."""
    cache = model.new_cache(len(ids), ids.shape[1])
    model(ids[:, :prompt], cache=cache, is_first_microbatch=True)
    made = []
    for token in ids[:, prompt:].split(1, dim=1):
        made.append(model(token, cache=cache, is_first_microbatch=False).logits.double())
    return torch.cat(made, dim=1)


@pytest.mark.parametrize("batch", [1, 3, 8, 16])
@pytest.mark.parametrize("recipe", ["bf16", "delayed", "current"])
@pytest.mark.parametrize("preset", ["qwen3-1.7b", "llama-3.1-8b", "gated-1b", "phi-3-mini-4k"])
def test_the_logits_of_the_modules(preset: str, recipe: str, batch: int) -> None:
    torch.manual_seed(0)
    options = LAYERS if recipe == "bf16" else LAYERS | EDGES
    model = CausalLM.from_preset(preset, recipe=recipe, device="cuda", **options).eval()
    if recipe == "delayed":
        batch_of_training = torch.randint(0, model.config.vocab_size, (2, 512), device="cuda")
        model.calibrate(dict(input_ids=batch_of_training, labels=batch_of_training))
    ids = torch.randint(0, model.config.vocab_size, (batch, 310), device="cuda")
    wanted = steps(model, ids, 300)
    model.kernels = with_kernels(model)
    found = steps(model, ids, 300)
    # Two ways that round to BF16 at the same places, with sums in another order; under FP8 a value may also be cast to
    # the other neighbor, 2^-4 away.
    bound = 2**-6 if recipe == "bf16" else 2**-4
    assert float((found - wanted).norm() / wanted.norm()) < bound


def test_generation_in_a_graph_takes_them() -> None:
    """A text of 200 tokens, replayed from the graph, is the text of eager steps."""
    torch.manual_seed(0)
    model = CausalLM.from_preset("qwen3-0.6b", recipe="bf16", device="cuda", **LAYERS).eval()
    model.kernels = with_kernels(model)
    ids = torch.randint(0, model.config.vocab_size, (4, 64))
    options = dict(max_new_tokens=200, eos_token_id=None)
    graphed = model.generate(ids, cuda_graph=True, **options)
    assert torch.equal(graphed, model.generate(ids, cuda_graph=False, **options))
