"""The cache while decoding: any parts of a text give the logits of the whole, and padding stays padding."""

from typing import Any

import pytest
import torch
from decoding import PROMPTS, build

from te_models.errors import OutOfMemory


def test_the_cache_says_its_size(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build()
    with caplog.at_level("INFO", logger="te_models.generation.decode_loop"):
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
