"""A user's torch.compile(model, dynamic=True) without gradients: the model's numbers at every length."""

import pytest
import torch

from te_models import CausalLM, TEModelsForCausalLM

KINDS = {
    "gated-nano": dict(num_hidden_layers=2),
    "gated-moe-nano": dict(num_hidden_layers=1),
    "gated-hybrid-nano": dict(
        num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]
    ),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "wrapped"),
    [
        ("gated-nano", True),
        ("gated-nano", False),
        ("gated-moe-nano", False),
        ("gated-hybrid-nano", False),
        ("gated-hybrid-nano", True),
    ],
)
def test_dynamic_shapes_give_the_same_logits(kind: str, wrapped: bool) -> None:
    torch._dynamo.reset()
    shape = KINDS[kind]
    # Inside of the wrapper each layer takes seconds to trace, and one of linear attention 20.
    if wrapped and "layer_types" in shape:
        shape = dict(num_hidden_layers=1, layer_types=["linear_attention"])
    elif wrapped:
        shape = dict(num_hidden_layers=1)
    causal = CausalLM.from_preset(
        kind, recipe="bf16", device="cpu", dtype=torch.float32, **shape
    ).eval()
    model = TEModelsForCausalLM.wrap(causal).eval() if wrapped else causal
    compiled = torch.compile(model, dynamic=True, backend="eager")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for rows, length in ((2, 12), (3, 17)):
            ids = torch.randint(0, 250, (rows, length), generator=generator)
            mask = torch.ones_like(ids)
            mask[0, length // 2 :] = 0
            given = dict(input_ids=ids, attention_mask=mask)
            found, wanted = compiled(**given).logits, model(**given).logits
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
