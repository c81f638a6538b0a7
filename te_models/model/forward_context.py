"""One forward pass, as the layers see it: positions and masks of its tokens, and how its operations run."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_models.config.model import ModelConfig
from te_models.kernels.dispatch import Kernels
from te_models.kernels.sdpa import attention_mask
from te_models.model.kv_cache import Cache
from te_models.model.recompute import Recompute
from te_models.model.rope import rotary_tables
from te_models.model.te_modules import pad_rows


class ForwardContext(NamedTuple):
    """The tokens of one forward pass, described once for all layers, and the way in which it runs."""

    batch: int
    seq: int
    rotary: dict[bool, tuple[Tensor, Tensor]]  # whether a layer has a window -> cos and sin [S, R] or [B, S, R] for it,
    # R channels rotated, in the dtype of the activations
    query_scale: Tensor | None  # [S] or [B, S], of ModelConfig.query_scale_beta
    cache: Cache | None
    masks: dict[int | None, Tensor | None]  # sliding window -> which keys are seen (kernels.attention.attention_mask)
    real: Tensor | None  # bool [B*S, 1], False at padding inside the batch; None where there is none
    recompute: Recompute  # which activations backward recomputes
    kernels: Kernels
    fp8_layers: range  # the blocks that belong inside the model's autocast

    def without_padding(self, x: Tensor) -> Tensor:
        """x [N, D], which a bias has made nonzero at padding, with zeros there again."""
        count = self.batch * self.seq
        if len(x) != count:
            x = pad_rows(x[:count], len(x))
        return x if self.real is None else x * pad_rows(self.real.to(x.dtype), len(x))

    def linear(self, module: nn.Module, x: Tensor) -> Tensor:
        """A te.Linear of x [N, I] -> [N, O], which reuses its quantized weight where this pass may."""
        return self.kernels.linear(module, x, is_first_microbatch=self.recompute.first_microbatch)


def forward_context(
    config: ModelConfig,
    ids: Tensor,
    cache: Cache | None,
    real: Tensor | None,
    documents: Tensor | None,
    recompute: Recompute,
    kernels: Kernels,
    fp8_layers: range,
    dtype: torch.dtype,
) -> ForwardContext:
    """Compute positions and masks of the newest tokens `ids` [B, S] (or [B, S, D]) of each row, on their device.

    `real` and `documents` [B, S] are Decoder.forward's attention_mask and document_ids.

    Raises:
        ValueError: more tokens than the model has positions, wrong shapes, arguments that exclude each other.
    """
    batch, seq = ids.shape[:2]
    _check(config, ids, cache, real, documents)
    padded = None if real is None or bool(real.all()) else real.to(ids.device, torch.bool)
    documents = None if documents is None else documents.to(ids.device)
    windows = {config.window(layer) for layer in range(config.num_hidden_layers)}
    masks: dict[int | None, Tensor | None]
    positions = cache.extend(seq, padded) if cache else None
    if cache and positions is not None:
        masks = {window: cache.visible(window) for window in windows}
    else:
        masks = {window: attention_mask(seq, window, padded, documents, ids.device) for window in windows}
        positions = _positions(seq, padded, documents, ids.device)
    full = rotary_tables(config, positions, dtype)
    sliding = full if config.sliding is config else rotary_tables(config.sliding, positions, dtype)
    scale = None if config.query_scale_beta is None else _query_scale(config, positions, dtype)
    real = None if padded is None else padded.reshape(-1, 1)
    tables = {False: full, True: sliding}
    return ForwardContext(batch, seq, tables, scale, cache, masks, real, recompute, kernels, fp8_layers)


def _query_scale(config: ModelConfig, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """1 + beta * log(1 + position // length) of each position, in `dtype` (Llama 4, Ministral 3)."""
    assert config.query_scale_beta is not None and config.query_scale_length is not None
    return (1 + config.query_scale_beta * torch.log(1.0 + positions // config.query_scale_length)).to(dtype)


def _positions(seq: int, padded: Tensor | None, documents: Tensor | None, device: torch.device) -> Tensor:
    """int64 [S] or [B, S]: how many tokens of its row, or of its document, lie before each token."""
    place = torch.arange(seq, device=device)
    if documents is not None:
        first = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=False)
        return place - torch.where(first, place, 0).cummax(dim=1).values
    return place if padded is None else (padded.cumsum(-1) - 1).clamp(min=0)


def _check(
    config: ModelConfig, ids: Tensor, cache: Cache | None, real: Tensor | None, documents: Tensor | None
) -> None:
    length, limit = ids.shape[1] + (cache.length if cache else 0), config.longest_sequence
    if length > limit:
        name = "max_position_embeddings" if limit == config.max_position_embeddings else "the stretched limit of RoPE"
        raise ValueError(f"a sequence of {length} tokens is longer than {name}={limit}: shorten it or raise that field")
    for name, given in (("attention_mask", real), ("document_ids", documents)):
        if given is not None and given.shape != ids.shape[:2]:
            raise ValueError(
                f"{name} has shape {list(given.shape)}, input_ids {list(ids.shape[:2])}: give one entry per token"
            )
    if documents is not None and not (cache is None and real is None):
        raise ValueError(
            "document_ids goes with neither a cache nor an attention_mask: give padding a document of its own"
        )
