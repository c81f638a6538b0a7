"""A cache of transformers in place of te_models.model.kv_cache.DecodingCache, for one forward pass.

Any cache of transformers will do (dynamic, static, with sliding windows, quantized, offloaded): it stores keys and
values and says which slots it returns; the masks are made here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache

from te_models.config.attention import SoftmaxAttentionSpec
from te_models.config.layer import MixerSpec
from te_models.config.model import ModelConfig
from te_models.errors import UsageError
from te_models.kernels.sdpa import attention_mask as causal_mask
from te_models.kernels.sdpa import masks_nothing, within_window
from te_models.model.kv_cache import RecurrentState


def refuse_other_states(config: ModelConfig) -> None:
    """Raise a UsageError if a layer keeps something while decoding for which transformers has no kind of layer."""
    for part in config.parts:
        if isinstance(part, MixerSpec) and part.keeps == "another state":
            raise UsageError(
                f"a cache of transformers has no place for what a {part.title} keeps: give use_cache=False, or call "
                "generate of the CausalLM inside (`.model`)"
            )


def seen_before(past: Cache, config: ModelConfig) -> int:
    """Return how many positions a cache has, 0 if no layer needs that number: one of linear attention counts none."""
    counts = any(isinstance(layer.mixer, SoftmaxAttentionSpec) for layer in config.layers)
    return int(past.get_seq_length()) if counts else 0


class CacheView:
    """The tokens seen before those of one forward pass, as the layers ask for them.

    Args:
        config: the model's config.
        past: the cache, which the pass extends; None for a pass that stores nothing.
        mask: [B, past + S], 0 at padding; or [B, 1, S, slots], bool or added to the scores, for all layers; None.
        positions: int64 [B, S], the positions for RoPE; None: the slots in the cache.
        device: the device of the tokens.
        documents: int [B, S], the document that each token belongs to, in a pass without past; None: all to one.

    Attributes:
        length: positions seen before this pass.
    """

    def __init__(
        self,
        config: ModelConfig,
        past: Cache | None,
        mask: Tensor | None,
        positions: Tensor | None,
        device: torch.device,
        documents: Tensor | None = None,
    ) -> None:
        self.documents = documents
        self.config, self.past, self.positions, self.device = config, past, positions, device
        self.whole = mask if mask is not None and mask.dim() == 4 else None
        self.mask = None if mask is None or mask.dim() == 4 or masks_nothing(mask) else mask.bool()
        self.length = 0 if past is None else seen_before(past, config)
        self._slots = torch.empty(0, dtype=torch.long, device=device)

    def extend(self, seq: int, real: Tensor | None) -> Tensor:
        """Return the positions of the `seq` newest tokens of each row, int64 [B, S] or [S]; `real` is in the mask."""
        self._slots = torch.arange(self.length, self.length + seq, device=self.device)
        return self._slots if self.positions is None else self.positions

    def visible(self, window: int | None) -> Tensor | None:
        """Return which slots each of the newest tokens sees, [B or 1, 1, S, slots]; None for plain causal attention."""
        seq = self._slots.shape[0]
        slots, first = self._sizes(window, seq)
        if self.whole is not None:
            return self.whole[..., :slots]
        if self.length == 0 and slots == seq:
            return causal_mask(seq, window, self.mask, self.documents, self.device)
        if (
            self.mask is None
            and seq == 1
            and slots == self.length + 1
            and (window is None or slots <= window)
        ):
            return None
        keys = torch.arange(first, first + slots, device=self.device)
        distance = self._slots[:, None] - keys
        if self.mask is None:
            seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            return seen[None, None]
        real = F.pad(self.mask, (0, max(first + slots - self.mask.shape[1], 0)), value=True)
        seen = (distance >= 0) & real[:, None, None, first : first + slots]
        if window is not None:
            tokens = real.cumsum(-1)  # [B, slots so far], of each row up to this slot
            if first > 0:
                self._check_kept(real[:, :first], tokens[:, : self.length], window)
            queries = tokens[:, self._slots]
            seen = seen & within_window(queries, tokens[:, first : first + slots], window)
        return seen | (distance == 0)  # padding sees itself, so that no row is empty

    @staticmethod
    def _check_kept(dropped: Tensor, tokens: Tensor, window: int) -> None:
        """Raise a UsageError if a window of the next token covers tokens that the cache has `dropped`.

        `dropped` bool [B, D] is False at padding, and `tokens` [B, past] counts those of each row up to a slot.
        transformers' caches of windows keep the newest slots, of which some may be padding.
        """
        oldest = tokens[:, -1:] + 1 - window
        missed = dropped & (tokens[:, : dropped.shape[1]] > oldest)
        if not torch.compiler.is_compiling() and bool(missed.any()):
            raise UsageError(
                "padding has pushed tokens out of the cache of a sliding window: pad the prompts on the left, or give "
                "a DynamicCache() without a config, which keeps all tokens"
            )

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v [B, K, S, H] of the newest tokens; return those of all slots, [B, K, slots, H]."""
        return (k, v) if self.past is None else self.past.update(k, v, layer)

    def recurrent(self, layer: int, make: Callable[[], RecurrentState]) -> RecurrentState | None:
        """Return the state of a recurrent layer, which the cache stores; `make` makes one without tokens."""
        if self.past is None:
            return None
        own: Any = self.past.layers[
            layer
        ]  # a LinearAttentionCacheLayerMixin, which older versions do not have
        if not own.is_conv_states_initialized[0]:
            new = make()
            own.lazy_initialization(conv_states=new.tail, recurrent_states=new.matrix)
            own.has_previous_state[0] = True
        return RecurrentState(own.conv_states[0], own.recurrent_states[0])

    def _sizes(self, window: int | None, seq: int) -> tuple[int, int]:
        """Return the number of slots that layers with this window attend to, and the position of the first."""
        if self.past is None:
            return seq, 0
        depth = next(
            depth
            for depth, layer in enumerate(self.config.layers)
            if isinstance(layer.mixer, SoftmaxAttentionSpec) and layer.mixer.window == window
        )
        return self.past.get_mask_sizes(seq, depth)
