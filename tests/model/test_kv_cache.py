"""The cache while decoding: any parts of a text give the logits of the whole, and padding stays padding."""

import copy
from typing import Any

import kinds
import pytest
import torch
from decoding import PROMPTS, build
from fewer import every
from kinds import KINDS, tokens
from torch import Tensor

from te_models.errors import OutOfMemory


def test_the_cache_says_its_size(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build()
    with caplog.at_level("INFO", logger="te_models.generation.decode_state"):
        model.generate(PROMPTS, max_new_tokens=10)
    assert "DecodingCache(3 rows x 29 positions x 4 layers: 0.1 MiB)" in caplog.text
    cache = model.new_cache(3, 29)
    assert cache.nbytes == 2 * 4 * 3 * 2 * 32 * 16 * 4

    def full(*args: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("no\nroom")

    monkeypatch.setattr("te_models.model.kv_cache.torch.zeros", full)
    with pytest.raises(
        OutOfMemory,
        match=r"a KV cache for 3 rows of 29 positions takes 0.00 GiB, which cpu does not",
    ):
        model.new_cache(3, 29)


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_a_recurrent_step_survive_the_steps_after_it(
    dtype: torch.dtype, length: int
) -> None:
    """What autograd has saved of a state is as it was then, though later tokens have overwritten it in place.

    The judge is the same step on a copy of the cache, which nothing overwrites.
    """
    fields = KINDS["linear attention"].fields | dict(layer_types=("linear_attention",) * 3)
    model = kinds.build(kinds.Kind(fields), dtype=dtype).eval()
    ids = tokens(model, 2, 16)
    cache = model.new_cache(2, 16)
    with torch.no_grad():
        model(ids[:, :8], cache=cache)
    own = copy.deepcopy(cache)

    def gradients(of: Any, later: bool) -> list[Tensor]:
        loss = model(ids[:, 8 : 8 + length], cache=of).logits.float().square().sum()
        if later:
            with torch.no_grad():
                model(ids[:, 11:16], cache=of)
        return list(torch.autograd.grad(loss, list(model.parameters())))

    found, expected = gradients(cache, later=True), gradients(own, later=False)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) and other.any()


# Where padding may be in a batch of prompts: 1 is a token.
PLACES_OF_PADDING = {
    "left": [[0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1], [1] * 12],
    "right": [[1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0], [1] * 12],
    "mostly right": [[1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], [1] * 8 + [0] * 4],
    "both": [[0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0], [0] * 6 + [1] * 5 + [0]],
    "per row": [[0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0]],
    "in the middle": [[1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 0, 1], [0, 1, 0, 1, 1, 0, 1, 1, 1, 0, 0, 0]],
}
STATES = ("attention", "sliding", "sinks, biased experts", "linear attention", "latent attention",
          "latent attention, wide values", "OLMo 3", "Ministral 3", "sinks")  # fmt: skip


@pytest.mark.parametrize(("name", "padding"), every(3, STATES, PLACES_OF_PADDING))
@torch.no_grad()
def test_a_prompt_with_padding_anywhere_goes_on_as_each_row_alone(name: str, padding: str) -> None:
    """The steps after it too, of which some are padding for one row: windows, recurrences and positions skip it."""
    kind = KINDS[name]
    model = kinds.build(kind, dtype=torch.float32).eval()
    ids = tokens(model, 2, 24)
    steps = [[1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1], [1, 0, 0, 1, 1, 1, 1, 1, 1, 0, 1, 1]]
    mask = torch.cat((torch.tensor(PLACES_OF_PADDING[padding]), torch.tensor(steps)), dim=1)
    cache = model.new_cache(2, 24)
    parts = (12, 1, 1, 1, 3, 1, 1, 2, 1, 1)
    logits = [
        model(part, cache=cache, attention_mask=seen).logits
        for part, seen in zip(ids.split(parts, 1), mask.split(parts, 1), strict=True)
    ]
    found = torch.cat(logits, dim=1)
    whole = model(ids, attention_mask=mask).logits
    for row in range(2):
        real = mask[row].bool()
        alone = model(ids[row : row + 1, real]).logits[0]
        torch.testing.assert_close(found[row, real], alone, atol=2e-5, rtol=0)
        torch.testing.assert_close(whole[row, real], alone, atol=2e-5, rtol=0)
