"""Caches of transformers for layers of any name: the tokens are those without a cache."""

import copy
from typing import Any

import kinds
import pytest
import torch
from kinds import KINDS, Kind, tokens
from short_conv import registered
from transformers import DynamicCache, StaticCache

from te_models.errors import UsageError
from te_models.huggingface.cache import RecurrentLayer
from te_models.huggingface.modeling import TEModelsForCausalLM

DELTANET = KINDS["linear attention"].fields["linear_attention"]
LATENT = KINDS["latent attention, one width"].fields
MIXED = {
    "two recurrent kinds": Kind(
        dict(layer_types=("short_conv", "linear_attention", "full_attention"), linear_attention=DELTANET), registered
    ),
    "recurrent kinds alone": Kind(
        dict(layer_types=("linear_attention", "short_conv", "linear_attention"), linear_attention=DELTANET), registered
    ),
    "latent and recurrent": Kind(
        LATENT | dict(layer_types=("short_conv", "latent_attention", "short_conv")), registered
    ),
}  # fmt: skip
# Options of `generate`, and those that only say how it computes.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({}, {}),
    "beams": (dict(num_beams=3), {}),
    "several": (dict(num_beams=4, num_return_sequences=2), {}),
    "static": ({}, dict(cache_implementation="static")),
    "chunks": ({}, dict(prefill_chunk_size=3)),
}


@pytest.fixture(params=MIXED)
def wrapped(request: pytest.FixtureRequest) -> Any:
    kind = MIXED[request.param]
    with kind.known():
        model = kinds.build(kind, dtype=torch.float32).eval()
        yield TEModelsForCausalLM.wrap(model).eval()


@pytest.mark.parametrize("way", WAYS)
def test_generation_with_a_cache_is_that_without(way: str, wrapped: TEModelsForCausalLM) -> None:
    """A batch of unequal prompts; chunks of a prompt are not padded."""
    ids = tokens(wrapped.model, 2, 7)
    mask = torch.ones_like(ids)
    if way != "chunks":
        mask[1, :3] = 0
    options, cached = WAYS[way]
    options = options | dict(attention_mask=mask, max_new_tokens=8, do_sample=False)
    options |= dict(pad_token_id=0, eos_token_id=None)
    expected = wrapped.generate(ids, use_cache=False, **options)
    assert torch.equal(wrapped.generate(ids, **options, **cached), expected)


@pytest.mark.parametrize("cache", ["dynamic", "static", "without a config"])
@torch.no_grad()
def test_a_cache_counts_copies_and_forgets(cache: str, wrapped: TEModelsForCausalLM) -> None:
    ids = tokens(wrapped.model, 2, 9)
    past: Any = {
        "dynamic": lambda: DynamicCache(config=wrapped.config),
        "static": lambda: StaticCache(config=wrapped.config, max_cache_len=16),
        "without a config": DynamicCache,
    }[cache]()
    whole = wrapped(ids, use_cache=False).logits
    wrapped(ids[:, :5], cache=past)
    assert past.get_seq_length() == 5
    other = copy.deepcopy(past)
    steps = [wrapped(part, cache=past).logits for part in ids[:, 5:].split((1, 3), 1)]
    torch.testing.assert_close(torch.cat(steps, 1), whole[:, 5:], atol=1e-5, rtol=0)
    assert past.get_seq_length() == 9 and other.get_seq_length() == 5
    found = wrapped(ids[:, 5:], cache=other).logits
    torch.testing.assert_close(found, whole[:, 5:], atol=1e-5, rtol=0)
    recurrent = [layer for layer in past.layers if isinstance(layer, RecurrentLayer)]
    with pytest.raises(UsageError, match="cannot be cropped"):
        recurrent[0].crop(-1)
    past.reset()
    assert past.get_seq_length() == 0
    found = wrapped(ids, cache=past).logits
    torch.testing.assert_close(found, whole, atol=1e-5, rtol=0)


@torch.no_grad()
def test_rows_of_a_recurrent_layer_are_repeated_and_chosen(wrapped: TEModelsForCausalLM) -> None:
    ids = tokens(wrapped.model, 2, 6)
    whole = wrapped(ids, use_cache=False).logits
    past = DynamicCache(config=wrapped.config)
    wrapped(ids[:, :5], cache=past)
    past.batch_repeat_interleave(2)
    past.batch_select_indices(torch.tensor([3, 0]))
    found = wrapped(ids[[1, 0], 5:], cache=past).logits
    torch.testing.assert_close(found, whole[[1, 0], 5:], atol=1e-5, rtol=0)
