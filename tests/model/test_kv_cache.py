"""The cache while decoding: any parts of a text give the logits of the whole, and padding stays padding."""

from typing import Any

import pytest
import torch
from decoding import FEATURES, PROMPTS, build

from te_models.errors import OutOfMemory


@torch.no_grad()
@pytest.mark.parametrize("feature", FEATURES)
def test_cached_steps_and_chunks_give_the_logits_of_the_whole(feature: str) -> None:
    if feature == "dynamic" or feature == "longrope":
        pytest.skip("its angles depend on the length so far: model/test_rope.py compares with transformers")
    model = build(**FEATURES[feature]).eval()
    ids, mask = torch.randint(0, 256, (3, 24)), torch.ones(3, 24, dtype=torch.long)
    mask[1, :6] = mask[2, :9] = 0
    whole = model(ids, attention_mask=mask).logits
    cache = model.new_cache(3, 24)
    parts, at = [], 0
    for size in (10, 1, 1, 4, 1, 7):
        part = slice(at, at + size)
        parts.append(model(ids[:, part], cache=cache, attention_mask=mask[:, part]).logits)
        at += size
    torch.testing.assert_close(torch.cat(parts, dim=1)[mask.bool()], whole[mask.bool()], atol=1e-4, rtol=0)
    assert cache.length == int(cache.filled) == 24 and cache.counts.tolist() == [24, 18, 15]
    with pytest.raises(ValueError, match="room for 24 positions, not 25"):
        model(ids[:, :1], cache=cache)


def test_the_cache_says_its_size(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    with caplog.at_level("INFO", logger="te_models.generation.decode_loop"):
        model.generate(PROMPTS, max_new_tokens=10)
    assert "DecodingCache(3 rows x 29 positions x 4 layers: 0.1 MiB)" in caplog.text
    cache = model.new_cache(3, 29)
    assert cache.nbytes == 2 * 4 * 3 * 2 * 32 * 16 * 4

    def full(*args: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("no\nroom")

    monkeypatch.setattr("te_models.model.kv_cache.torch.zeros", full)
    with pytest.raises(OutOfMemory, match=r"a KV cache for 3 rows of 29 positions takes 0.00 GiB, which cpu does not"):
        model.new_cache(3, 29)
