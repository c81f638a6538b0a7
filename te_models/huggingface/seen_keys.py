"""The keys that each token sees, from transformers' arguments of forward: a mask, positions and a cache."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from te_models.config.model import ModelConfig
from te_models.errors import UsageError
from te_models.files.formats import Fields
from te_models.huggingface.cache import CacheView
from te_models.model.inputs import positions_in_documents


def seen_keys(
    config: ModelConfig,
    tokens: Tensor,
    mask: Tensor | None,
    positions: Tensor | None,
    past: Cache | None,
) -> Fields:
    """Return the Decoder's arguments that say what each token sees, and from which position.

    Args:
        config: of the model.
        tokens: ids [B, S], or vectors [B, S, D].
        mask: [B, past + S], 0 at padding; or of four dimensions, who sees whom.
        positions: int64 [B or 1, S].
        past: the cache that is extended.

    Raises:
        UsageError: one of them has another shape, dtype or type.
    """
    batch, seq = tokens.shape[:2]
    _check(tokens, mask, positions, past)
    mask = None if mask is None else mask.to(tokens.device)
    positions = None if positions is None else positions.to(tokens.device).expand(batch, seq)
    if past is None and (mask is None or mask.dim() == 2):
        # Positions that only say what the Decoder would assume anyway are left out: with them it could not use its
        # fast attention, and nearly every caller gives them. A traced graph has no values to compare.
        traced = torch.compiler.is_compiling()
        if positions is None:
            return dict(attention_mask=mask)
        if mask is None:
            documents = _documents(positions)  # [B, S]
            usual = positions_in_documents(documents)  # [B, S]
            if not traced and torch.equal(positions, usual):
                # Bins of one document each need no ids.
                return dict(document_ids=documents) if bool(documents[:, -1].any()) else {}
            return dict(cache=CacheView(config, None, None, positions, tokens.device, documents))
        if not traced and _count_tokens(positions, mask):
            return dict(attention_mask=mask)
    view = CacheView(config, past, mask, positions, tokens.device)
    real = mask[:, -seq:] if mask is not None and mask.dim() == 2 and seq > 1 else None
    return dict(cache=view, attention_mask=real)


def _check(tokens: Tensor, mask: object, positions: object, past: object) -> None:
    """Raise a UsageError for arguments of `seen_keys` that do not fit `tokens` [B, S, ...]."""
    batch, seq = tokens.shape[:2]
    if past is not None and not isinstance(past, Cache):
        raise UsageError(
            f"past_key_values is a {type(past).__name__}: give a cache of transformers, such as "
            "DynamicCache(config=model.config)"
        )
    if mask is not None:
        if not isinstance(mask, Tensor):
            raise UsageError(f"attention_mask is a {type(mask).__name__}: give a tensor [B, S]")
        if mask.dim() not in (2, 4):
            raise UsageError(
                f"attention_mask has shape {list(mask.shape)}: give [B, S], 0 at padding, or [B, 1, S, S]"
            )
        if mask.dim() == 2 and (mask.shape[0] != batch or mask.shape[1] < seq):
            raise UsageError(
                f"attention_mask has shape {list(mask.shape)}, input_ids {[batch, seq]}: give one entry per token"
            )
        if mask.dim() == 4 and mask.dtype != torch.bool and not mask.is_floating_point():
            raise UsageError(
                f"attention_mask of four dimensions is of {mask.dtype}: give bool, or floats to add to the logits"
            )
    if positions is not None:
        if not isinstance(positions, Tensor):
            raise UsageError(
                f"position_ids is a {type(positions).__name__}: give an int64 tensor [B, S]"
            )
        if positions.is_floating_point() or positions.dtype == torch.bool:
            raise UsageError(f"position_ids is of {positions.dtype}: give an int64 tensor [B, S]")
        rows = positions.shape[:-1].numel()
        if positions.dim() > 2 or positions.shape[-1:] != (seq,) or rows not in (1, batch):
            raise UsageError(
                f"position_ids has shape {list(positions.shape)}, input_ids {[batch, seq]}: give one entry per token"
            )


def _documents(positions: Tensor) -> Tensor:
    """Return the number of each token's document, int64 [B, S]: one begins where positions [B, S] do not go on."""
    # With the position before the first one in front, so that documents count from 0.
    return (positions.diff(prepend=positions[:, :1] - 1) != 1).cumsum(-1)


def _count_tokens(positions: Tensor, mask: Tensor) -> bool:
    """Return whether positions [B, S] number the tokens of each row as `mask` [B, S] has them, from 0."""
    real = mask.bool()
    usual = mask.cumsum(-1) - 1
    # Positions at padding mean nothing, and callers fill them differently.
    return torch.equal(positions.where(real, 0), usual.where(real, 0))
