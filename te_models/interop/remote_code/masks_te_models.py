"""Masks of attention, beside modeling_te_models.py. Needs only PyTorch.

Shapes: B batch, S sequence (queries), M keys.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class Masks:
    """The keys that the queries of one forward pass see, made once for each kind of layer.

    Args:
        count: S, the queries.
        past: the position of the first.
        window: keys that a query sees in layers with a window, itself included and padding left out.
        chunk: tokens of a chunk, in layers where a query sees the keys of its own; padding left out.
        attention_mask: [B, M or fewer], 0 at keys that no query sees; or [B, 1, S, M], bool or added to the scores;
            None: none.
        cached: whether the keys come from a cache.
        device: of the masks.
    """

    def __init__(
        self,
        count: int,
        past: Any,
        window: int | None,
        chunk: int | None,
        attention_mask: Tensor | None,
        cached: bool,
        device: torch.device,
    ) -> None:
        self.count = count
        self.past = past
        self.window = window
        self.chunk = chunk
        self.attention_mask = attention_mask
        self.cached = cached
        self.device = device
        # All layers of a kind have as many keys.
        self._masks: dict[tuple[bool, bool], Tensor | None] = {}

    def __call__(self, sliding: bool, chunked: bool, keys: int) -> Tensor | None:
        """Return bool [1 or B, 1, S, M] for M keys, or a given mask of that shape; None: plain causal attention."""
        kind = (sliding, chunked)
        if kind not in self._masks:
            window = self.window if sliding else None
            chunk = self.chunk if chunked else None
            self._masks[kind] = self.make(window, chunk, keys)
        return self._masks[kind]

    def make(self, window: int | None, chunk: int | None, keys: int) -> Tensor | None:
        """As __call__."""
        query = torch.arange(self.count, device=self.device)[:, None] + self.past
        key = torch.arange(keys, device=self.device)
        near = None if window is None else key > query - window
        if chunk is not None:
            near = key // chunk == query // chunk
        if self.attention_mask is not None and self.attention_mask.dim() == 4:
            given_mask = self.attention_mask[..., :keys]
            if near is None:
                return given_mask
            if given_mask.dtype == torch.bool:
                return given_mask & near
            # The smallest number and not -inf: a row without any key would become NaN.
            return given_mask.masked_fill(~near, torch.finfo(given_mask.dtype).min)
        # SDPA then takes its own causal mask, and with it its fast kernels.
        if self.attention_mask is None and not self.cached and near is None:
            return None
        if self.attention_mask is None:
            return (key <= query if near is None else (key <= query) & near)[None, None]
        real = self.attention_mask.to(self.device) != 0
        real = F.pad(real, (0, max(keys - real.shape[-1], 0)))[:, :keys]
        seen = (key <= query) & real[:, None, None]  # [B, 1, S, M]
        # Padding on the left moves the tokens of a row: distances count tokens, not slots.
        if window is not None:
            tokens = real.cumsum(-1)  # [B, M], of each row up to this key
            oldest = tokens[:, query.flatten()] - window
            seen = seen & (tokens[:, None, None, :] > oldest[:, None, :, None])
        if chunk is not None:
            chunk_of_token = (real.cumsum(-1) - 1).clamp(min=0) // chunk  # [B, M]
            seen = seen & (
                chunk_of_token[:, None, None, :]
                == chunk_of_token[:, query.flatten()][:, None, :, None]
            )
        # A query at padding, which sees nothing, would become NaN.
        return seen | ~seen.any(-1, keepdim=True)
