"""Steps of decoding by kernels give the logits that the modules give; run with TRITON_INTERPRET=1 and on a GPU.

See tests/kernels/test_triton_kernels.py.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from decoding import FEATURES, build

from te_models import CausalLM
from te_models.kernels.decode_triton import TRITON
from te_models.model.attention import GatedAttention
from te_models.model.decoder import Decoder
from te_models.model.mlp import MLP

SLOW = pytest.mark.slow
CASES = [
    pytest.param("qwen3_next", "bf16"),
    pytest.param("gated", "delayed"),
    *(pytest.param(feature, "bf16", marks=SLOW) for feature in FEATURES if feature != "qwen3_next"),
    pytest.param("headwise", "blockwise", marks=SLOW),
    pytest.param("qwen2", "delayed", marks=SLOW),
    pytest.param("qwen3_next", "current", marks=SLOW),
]


@torch.no_grad()
def logits_of_a_step(model: Decoder, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the logits of the last of ids [B, S], in a step after a prompt with padding."""
    model.eval()
    cache = model.new_cache(len(ids), ids.shape[1])
    model(ids[:, :-1], cache=cache, attention_mask=mask, is_first_microbatch=True)
    return model(ids[:, -1:], cache=cache, is_first_microbatch=False).logits


def counted(monkeypatch: pytest.MonkeyPatch) -> dict[type, int]:
    """Count the parts of which kernels computed a step."""
    counts: dict[type, int] = {GatedAttention: 0, MLP: 0}
    for kind in counts:

        def step(self: Any, *given: Any, own: Any = kind.step, kind: type = kind) -> Any:
            made = own(self, *given)
            counts[kind] += made is not None
            return made

        monkeypatch.setattr(kind, "step", step)
    return counts


def small(feature: str, recipe: str, layers: int = 1) -> CausalLM:
    """A model in FP32, so that only the order of sums differs, with bits of FP8 that are the same."""
    options: dict[str, Any] = {**FEATURES[feature], "num_hidden_layers": layers}
    # Chunked attention is in the first layers, whatever else a feature has in the last.
    kept = slice(layers) if "attention_chunk_size" in options else slice(-layers, None)
    for each_layer in ("layer_types", "no_rope_layers"):
        if each_layer in options:
            options[each_layer] = options[each_layer][kept]
    if recipe != "bf16":
        options |= dict(num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0)
    return build(recipe, dtype=torch.float32, **options)


@pytest.mark.parametrize(("feature", "recipe"), CASES)
def test_the_logits_of_the_modules(
    feature: str, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small(feature, recipe)
    ids = torch.randint(0, 256, (2, 10), device=model.device)
    mask = torch.ones(2, 9, dtype=torch.long, device=model.device)
    mask[1, :3] = 0
    wanted = logits_of_a_step(model, ids, mask)
    counts = counted(monkeypatch)
    model.kernels = replace(model.kernels, decode=TRITON)
    found = logits_of_a_step(model, ids, mask)
    # In FP8 a sum in another order may round a few activations to the other neighbor.
    bound = 1e-5 if recipe == "bf16" else 2e-2
    assert float((found - wanted).norm() / wanted.norm()) < bound
    # The kernels of a step know no LayerNorm and no blockwise scales.
    fast = 0 if recipe == "blockwise" or feature == "cohere2" else 1
    assert counts[MLP] == fast
    assert counts[GatedAttention] == (0 if feature == "deepseek_v3" else fast)


@SLOW
def test_modules_run_where_something_watches_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook sees every call, and an adapter takes part."""
    model = small("gated", "bf16", layers=2)
    model.kernels = replace(model.kernels, decode=TRITON)
    counts = counted(monkeypatch)
    seen = []
    block: Any = model.layers[0]
    block.self_attn.o_proj.register_forward_hook(lambda *given: seen.append(1))
    block.mlp.down_proj.register_forward_pre_hook(lambda *given: seen.append(2))
    ids = torch.randint(0, 256, (1, 6), device=model.device)
    logits_of_a_step(model, ids, torch.ones_like(ids[:, :5]))
    assert counts == {GatedAttention: 1, MLP: 1}  # of the second layer
    assert seen == [1, 2] * 2
