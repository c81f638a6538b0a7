"""Checks of the prompts of transformers' generate, and of the place in a text where LongRoPE's angles change."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import GenerationConfig
from transformers.cache_utils import Cache

from te_models.config.model import ModelConfig
from te_models.errors import UsageError
from te_models.files.formats import Fields
from te_models.huggingface.cache import seen_before
from te_models.model.rope import context_before_long_angles


def check_prompt(args: tuple[Any, ...], options: Fields, config: GenerationConfig) -> None:
    """Raise a UsageError for arguments of `generate` that transformers would end at with an exception of its own."""
    # Under any of the names that transformers accepts.
    prompt = args[0] if args else options.get("inputs", options.get("input_ids"))
    first = options.get("bos_token_id", config.bos_token_id)
    if prompt is None and options.get("inputs_embeds") is None and first is None:
        raise UsageError("the model has no bos token to begin with: give input_ids [B, S]")
    if prompt is not None and (not isinstance(prompt, Tensor) or prompt.dim() != 2):
        shape = f"has shape {list(prompt.shape)}" if isinstance(prompt, Tensor) else "is no tensor"
        raise UsageError(
            f"the prompt {shape}: give an int64 tensor [B, S], such as torch.tensor([[5, 6, 7]])"
        )


def angles_change(
    config: ModelConfig, ids: Tensor, past: Cache, mask: Tensor | None, positions: Tensor | None
) -> bool:
    """Return whether the longest text exceeds LongRoPE's original context with its newest tokens.

    Raises:
        UsageError: it does, and `ids` are not all of its tokens, from which the keys would be computed again.
    """
    original = context_before_long_angles(config.rope)
    earlier = seen_before(past)
    if original is None or not earlier:
        return False
    # The arguments have the whole text, or a chunk of the prompt alone: then all are no longer than what was seen.
    total = max(argument.shape[1] for argument in (ids, mask, positions) if argument is not None)
    if total <= earlier:
        total += earlier
    if positions is not None:
        longest = int(positions.max()) + 1
    else:
        longest = total if mask is None else int(mask.sum(-1).max())
    # Only the pass whose tokens cross the boundary: before them the text was within the original context.
    if not longest - (total - earlier) <= original < longest:
        return False
    if ids.shape[1] < total:
        raise UsageError(
            f"LongRoPE has other angles after {original} tokens, with which all keys are computed again from their "
            "ids: give no inputs_embeds and no prefill_chunk_size"
        )
    return True
