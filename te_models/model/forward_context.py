"""One forward pass, as the layers see it: positions and masks of its tokens, and how to run its operations."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_models.config.model import ModelConfig
from te_models.kernels.dispatch import Kernels
from te_models.kernels.sdpa import attention_mask, masks_nothing
from te_models.model.kv_cache import Cache
from te_models.model.recompute import Recompute
from te_models.model.rope import rotary_tables
from te_models.model.te_modules import pad_rows


class Spans(Protocol):
    """Attention of q [B, N, S, H] over one span of keys per query (te_models.kernels.span_attention_triton.Spans)."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor: ...


# Which keys are seen: those of kernels.sdpa.attention_mask, of a span, or all before the query.
Visible = Tensor | Spans | None


class ForwardContext(NamedTuple):
    """The tokens of one forward pass, described once for all layers, and how it runs."""

    batch: int
    seq: int
    rotary: dict[bool, tuple[Tensor, Tensor]]  # whether a layer has a window -> cos and sin [S, R] or [B, S, R] for it,
    # R channels rotated, in the dtype of the activations
    query_scale: Tensor | None  # [S] or [B, S], of ModelConfig.query_scale_beta
    cache: Cache | None
    masks: dict[int | None, Visible]  # sliding window -> which keys are seen
    real: Tensor | None  # bool [B*S, 1], False at padding inside the batch; None where there is none
    recompute: Recompute  # which activations backward recomputes
    kernels: Kernels
    fp8_layers: range  # the blocks that belong inside the model's autocast

    def without_padding(self, x: Tensor) -> Tensor:
        """Return x [N, D] with zeros at padding, which a bias has made nonzero."""
        count = self.batch * self.seq
        if x.shape[0] != count:
            x = pad_rows(x[:count], x.shape[0])
        return x if self.real is None else x * pad_rows(self.real.to(x.dtype), x.shape[0])

    def linear(self, module: nn.Module, x: Tensor) -> Tensor:
        """Return a te.Linear of x [N, I], [N, O]; it reuses its quantized weight where this pass allows it."""
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

    `real` and `documents` [B, S] are Decoder.forward's attention_mask and document_ids, checked by
    te_models.model.inputs.
    """
    batch, seq = ids.shape[:2]
    padded = None if real is None or masks_nothing(real) else real.to(ids.device, torch.bool)
    documents = None if documents is None else documents.to(ids.device)
    windows = {config.window(layer) for layer in range(config.num_hidden_layers)}
    masks: dict[int | None, Visible]
    positions = cache.extend(seq, padded) if cache else None
    if cache and positions is not None:
        masks = {window: cache.visible(window) for window in windows}
    else:
        spans = _spans(config, kernels, padded, dtype)
        masks = {}
        for window in windows:
            if spans is not None and (documents is not None or (window is not None and window < seq)):
                masks[window] = spans(seq, window, documents, ids.device)
            else:
                masks[window] = attention_mask(seq, window, padded, documents, ids.device)
        positions = _positions(seq, padded, documents, ids.device)
    full = rotary_tables(config, positions, dtype)
    sliding = full if config.sliding is config else rotary_tables(config.sliding, positions, dtype)
    scale = None if config.query_scale_beta is None else _query_scale(config, positions, dtype)
    real = None if padded is None else padded.reshape(-1, 1)
    tables = {False: full, True: sliding}
    return ForwardContext(batch, seq, tables, scale, cache, masks, real, recompute, kernels, fp8_layers)


def _spans(config: ModelConfig, kernels: Kernels, padded: Tensor | None, dtype: torch.dtype) -> Any:
    """Return a function that makes the Spans of a window, or None where the keys that a query sees need a mask."""
    capped = config.attn_logit_softcapping is not None
    if kernels.attention is None or padded is not None or capped or dtype.itemsize != 2 or config.head_dim > 256:
        return None
    return kernels.attention.spans


def _query_scale(config: ModelConfig, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 1 + beta * log(1 + position // length) of each position, in `dtype` (Llama 4, Ministral 3)."""
    assert config.query_scale_beta is not None and config.query_scale_length is not None
    return (1 + config.query_scale_beta * torch.log(1.0 + positions // config.query_scale_length)).to(dtype)


def _positions(seq: int, padded: Tensor | None, documents: Tensor | None, device: torch.device) -> Tensor:
    """Return how many tokens of its row, or of its document, come before each token: int64 [S] or [B, S]."""
    place = torch.arange(seq, device=device)
    if documents is not None:
        first = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=False)
        return place - torch.where(first, place, 0).cummax(dim=1).values
    return place if padded is None else (padded.cumsum(-1) - 1).clamp(min=0)
