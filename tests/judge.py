"""transformers, the reference of many tests, without its warnings at import and its progress bars.

A file that imports this module is skipped where transformers is not installed.
"""

import dataclasses
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers", minversion="5.14")
    from transformers import AutoModelForCausalLM

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

# What the installed version calls a cache in arguments and outputs: "past_key_values" before 5.24.
CACHE = dataclasses.fields(transformers.modeling_outputs.CausalLMOutputWithPast)[2].name

__all__ = ["CACHE", "AutoModelForCausalLM", "takes_a_cache_by_either_name", "transformers"]


def takes_a_cache_by_either_name(model: Any, ids: Tensor) -> None:
    """Check it of a model for transformers: in every version, and without its warning, which is an error here."""
    options: dict[str, Any] = dict(max_new_tokens=3, eos_token_id=None, do_sample=False)
    whole, text = model(ids).logits, model.generate(ids, **options)
    for name in ("cache", "past_key_values"):
        past, other = (transformers.DynamicCache(config=model.config) for _ in range(2))
        output = model(ids[:, :4], **{name: past})
        assert output[CACHE] is past
        torch.testing.assert_close(
            model(ids[:, 4:], **{name: past}).logits, whole[:, 4:], rtol=1e-4, atol=1e-5
        )
        assert torch.equal(model.generate(ids, **{name: other}, **options), text)
        assert past.get_seq_length() == ids.shape[1] == other.get_seq_length() - 2
        assert model.prepare_inputs_for_generation(ids, **{name: past})[CACHE] is past
    with pytest.raises(TypeError, match="multiple values"):
        model(ids, cache=past, past_key_values=past)
