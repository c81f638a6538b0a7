"""Operations that write Transformer Engine's FP8, on inputs and gradients of any strides."""

from collections.abc import Callable

import pytest
import torch
from places import DEVICE, PLACE
from torch import Tensor

from te_models import CausalLM

pytestmark = pytest.mark.gpu
RECIPES = ["bf16", "delayed", "current"]


def build(recipe: str) -> CausalLM:
    torch.manual_seed(0)
    edges = (
        {} if recipe == "bf16" else dict(num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0)
    )
    shape = dict(
        hidden_size=256,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=128,
        intermediate_size=512,
    )
    model = CausalLM.from_preset(
        "gated-nano", num_hidden_layers=2, recipe=recipe, **shape, **edges, **PLACE
    ).train()
    model.te.FP8GlobalStateManager.reset()
    return model


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "part of wider vectors": lambda x: torch.cat((x, x + 1), -1)[..., : x.shape[-1]],
    "every second token": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "transposed": lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_vectors_of_any_strides_are_those_of_a_copy(recipe: str, view: str) -> None:
    torch.manual_seed(1)
    vectors = torch.randn(2, 128, 256, device=DEVICE, dtype=torch.bfloat16)
    assert not VIEWS[view](vectors).is_contiguous() and torch.equal(VIEWS[view](vectors), vectors)
    found = []
    for given in (vectors, VIEWS[view](vectors)):
        model, labels = build(recipe), torch.arange(256, device=DEVICE).view(2, 128)
        loss = model(None, inputs_embeds=given, labels=labels, return_logits=False).loss
        assert loss is not None
        loss.backward()
        found.append((loss, *(p.grad.float() for p in model.parameters() if p.grad is not None)))
    for one, other in zip(*found, strict=True):  # cuDNN's backward adds in an order of its own
        assert (one - other).norm() <= 0.02 * one.norm()


@pytest.mark.parametrize("tokens", [64, 128])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_gradient_of_a_sum_is_that_of_ones(recipe: str, tokens: int) -> None:
    """Of the logits, and of each block's output, whose strides are 0; at 128 tokens attention is one operation."""
    ids = torch.arange(2 * tokens, device=DEVICE).view(2, tokens) % 256
    found = []
    for spread in (True, False):
        model = build(recipe)
        logits = model(ids).logits
        assert logits is not None
        ones = torch.ones((), device=DEVICE, dtype=logits.dtype).expand(logits.shape)
        logits.backward(ones if spread else ones.contiguous())
        found.append([p.grad.float() for p in model.parameters() if p.grad is not None])
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 0.02 * one.norm()
