"""A cache of transformers in place of te_models.model.kv_cache.DecodingCache, for one forward pass.

Any cache of transformers will do (dynamic, static, with sliding windows, quantized, offloaded): it stores keys and
values and says which slots it returns; the masks are made here. The state of a recurrent layer is a layer of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import configuration_utils
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    STATIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    StaticLayer,
)

from te_models.config.attention import SeenKeys, SoftmaxAttentionSpec
from te_models.config.model import ModelConfig
from te_models.errors import UsageError
from te_models.kernels.sdpa import attention_mask as causal_mask
from te_models.kernels.sdpa import chunk_numbers, masks_nothing, within_chunk, within_window
from te_models.model.kv_cache import RecurrentState


class RecurrentLayer(CacheLayerMixin):
    """A layer of a cache of transformers that holds the state of a recurrent layer, whatever tensors it has.

    transformers' own layer for linear attention has two tensors of fixed roles, and does not count tokens.
    """

    # Only the model knows the shapes of the state; transformers skips such a layer when it makes a cache early.
    supports_early_init = False

    def __init__(self, **sizes: object) -> None:
        """Make an empty layer; transformers gives `sizes` of keys and values, which change nothing."""
        super().__init__()
        self.state: RecurrentState | None = None
        self.length = 0  # tokens so far, padding included

    def get_seq_length(self) -> int:
        """Return the number of tokens so far."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the sizes of a mask over all tokens, of which the layer itself needs none."""
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: there is no limit."""
        return -1

    def reset(self) -> None:
        """Forget all tokens."""
        self.length = 0
        if self.state is not None:
            self.state.clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace the rows by the rows that a beam search keeps."""
        if self.state is not None:
            self.state.take_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows of these numbers."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        if self.state is not None:
            first = next(iter(self.state.tensors.values()))
            # [B] -> [B * repeats]: the number of each row, `repeats` times in succession
            rows = torch.arange(len(first), device=first.device)
            self.state.take_rows(rows.repeat_interleave(repeats))

    def crop(self, *lengths: int) -> None:
        """Raise a UsageError: a recurrent state cannot forget its newest tokens alone."""
        raise UsageError(
            "a cache of a recurrent layer cannot be cropped: compute the shorter text with a new cache"
        )

    def offload(self) -> None:
        """Leave the state on its device: it is small."""

    def prefetch(self) -> None:
        """Leave the state on its device, where `offload` has left it."""

    def lazy_initialization(self, *tensors: Tensor) -> None:  # type: ignore[override]
        """Do nothing: the model makes the state."""

    def update(self, *tensors: Tensor, **options: object) -> tuple[Tensor, Tensor]:
        """Raise a UsageError: a recurrent layer has no keys and values."""
        raise UsageError("a recurrent layer has no keys and values to put into a cache")


class JointLayer(RecurrentLayer):
    """A layer of a cache of transformers for several mixers beside each other, with a layer for each inside."""

    def __init__(self, **sizes: Any) -> None:
        """Make an empty layer; `sizes` may have the `max_cache_len` of a static cache."""
        super().__init__(**sizes)
        self.slots: int | None = sizes.get("max_cache_len")
        # The layer of each mixer by its number, made when it is first used.
        self.members: dict[int, Any] = {}

    def member(self, number: int, make: Callable[[], CacheLayerMixin]) -> CacheLayerMixin:
        """Return the layer of one mixer, which `make` makes."""
        if number not in self.members:
            self.members[number] = make()
        return self.members[number]

    def keys_of(self, number: int) -> CacheLayerMixin:
        """Return the layer of a mixer with keys and values, all of which it keeps, whatever its window."""

        def make() -> CacheLayerMixin:
            return DynamicLayer() if self.slots is None else StaticLayer(self.slots)

        return self.member(number, make)

    def get_seq_length(self) -> int:
        """Return the number of tokens so far."""
        return max((int(layer.get_seq_length()) for layer in self.members.values()), default=0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the slots that attention sees, and the first of them."""
        return self.get_seq_length() + query_length if self.slots is None else self.slots, 0

    def get_max_length(self) -> int:
        """Return the slots of a static cache; -1: there is no limit."""
        return -1 if self.slots is None else self.slots

    def reset(self) -> None:
        """Forget all tokens."""
        for layer in self.members.values():
            layer.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace the rows by the rows that a beam search keeps."""
        for layer in self.members.values():
            layer.reorder_cache(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows of these numbers."""
        for layer in self.members.values():
            layer.batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        for layer in self.members.values():
            layer.batch_repeat_interleave(repeats)

    def crop(self, *lengths: int) -> None:
        """Forget the newest tokens; raise a UsageError where one of the mixers cannot."""
        for layer in self.members.values():
            layer.crop(*lengths)


def add_layer_kinds(config: ModelConfig) -> None:
    """Tell transformers of the kinds of layers that it does not know.

    A Trainer that resumes reads config.json as transformers' base class, which refuses unknown kinds. DynamicCache and
    StaticCache need a layer for each; transformers' own kinds add themselves to the same tables (`_layer_type` in
    transformers.cache_utils).
    """
    for name, kinds in KNOWN_KINDS.items():
        known = getattr(configuration_utils, name, None)
        if known is None:  # another version
            continue
        new = []
        for field in kinds:
            for kind in getattr(config, field) or ():
                if kind not in (*known, *new):
                    new.append(kind)
        setattr(configuration_utils, name, (*known, *new))
    dynamic: dict[str, Any] = DYNAMIC_LAYER_TYPE_MAPPING
    static: dict[str, Any] = STATIC_LAYER_TYPE_MAPPING
    for kind, layer in zip(config.layer_types or (), config.layers, strict=False):
        if layer.mixer is None:  # transformers keeps nothing for a layer of the kind "mlp"
            continue
        growing, fixed = CACHE_LAYERS[layer.mixer.keeps]
        # Kinds that transformers has already keep its own layers.
        dynamic.setdefault(kind, growing)
        static.setdefault(kind, fixed)


# transformers' tables of the kinds that a config may have -> the fields that they are for. Newer versions have a table
# for each field.
KNOWN_KINDS = {
    "ALLOWED_LAYER_TYPES": ("layer_types", "mlp_layer_types"),
    "ALLOWED_ATTN_LAYER_TYPES": ("layer_types",),
    "ALLOWED_MLP_LAYER_TYPES": ("mlp_layer_types",),
}
# What a mixer keeps -> its layer of a dynamic cache, and of a static one.
CACHE_LAYERS: dict[str, tuple[type[CacheLayerMixin], type[CacheLayerMixin]]] = {
    "keys and values": (DynamicLayer, StaticLayer),
    "a recurrent state": (RecurrentLayer, RecurrentLayer),
    "states of several mixers": (JointLayer, JointLayer),
}


def seen_before(past: Cache) -> int:
    """Return how many positions a cache has."""
    for layer in past.layers:
        # transformers' layers of linear attention do not count positions.
        if isinstance(layer, CacheLayerMixin):
            return int(layer.get_seq_length())
    return 0


class CacheView:
    """The tokens seen before one forward pass, as the layers ask for them.

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
        self.config = config
        self.past = past
        self.positions = positions
        self.device = device
        self.whole = mask if mask is not None and mask.dim() == 4 else None
        self.mask = None if mask is None or mask.dim() == 4 or masks_nothing(mask) else mask.bool()
        self.length = 0 if past is None else seen_before(past)
        # The number of the mixer whose states it shows; None: there is one per layer.
        self.member: int | None = None
        self._slots = torch.empty(0, dtype=torch.long, device=device)

    def extend(self, seq: int, real: Tensor | None) -> Tensor:
        """Return the positions of the `seq` newest tokens of each row, int64 [B, S] or [S]; `real` is in the mask."""
        self._slots = torch.arange(self.length, self.length + seq, device=self.device)
        return self._slots if self.positions is None else self.positions

    @property
    def slots(self) -> Tensor:
        """The slots of the newest tokens, int64 [S]."""
        return self._slots

    def visible(self, keys: SeenKeys) -> Tensor | None:
        """Return which slots each of the newest tokens sees, [B or 1, 1, S, slots]; None for plain causal attention."""
        window, chunk = keys
        seq = self._slots.shape[0]
        slots, first = self._sizes(keys, seq)
        if self.whole is not None:
            return self.whole[..., :slots]
        if self.length == 0 and slots == seq:
            return causal_mask(seq, window, self.mask, self._pieces(chunk), self.device)
        if (
            self.mask is None
            and seq == 1
            and slots == self.length + 1
            and (window is None or slots <= window)
            and (chunk is None or slots <= chunk)
        ):
            return None
        others = torch.arange(first, first + slots, device=self.device)
        distance = self._slots[:, None] - others
        if self.mask is None:
            seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            if chunk is not None:
                seen = seen & (self._slots[:, None] // chunk == others // chunk)
            return seen[None, None]
        real = F.pad(self.mask, (0, max(first + slots - self.mask.shape[1], 0)), value=True)
        seen = (distance >= 0) & real[:, None, None, first : first + slots]
        tokens = real.cumsum(-1)  # [B, slots so far], of each row up to this slot
        if window is not None:
            if first > 0:
                oldest = tokens[:, self.length - 1, None] + 1 - window
                self._check_kept(real[:, :first], tokens, oldest)
            queries = tokens[:, self._slots]
            seen = seen & within_window(queries, tokens[:, first : first + slots], window)
        if chunk is not None:
            places = (tokens - 1).clamp(min=0)  # of padding before all tokens, too
            if first > 0:
                # The last token before the chunk of the next one.
                oldest = tokens[:, self.length - 1, None] // chunk * chunk
                self._check_kept(real[:, :first], tokens, oldest)
            queries = places[:, self._slots]
            seen = seen & within_chunk(queries, places[:, first : first + slots], chunk)
        return seen | (distance == 0)  # padding sees itself, so that no row is empty

    def _pieces(self, chunk: int | None) -> Tensor | None:
        """Return the numbers of the documents of a pass without past, int [B, S], or of their chunks; None: one."""
        seq = self._slots.shape[0]
        if chunk is None or (seq <= chunk and not torch.compiler.is_compiling()):
            return self.documents
        positions = self._slots
        if self.documents is not None:
            assert self.positions is not None  # which the documents were found in
            positions = self.positions
        elif self.mask is not None:
            positions = (self.mask.cumsum(-1) - 1).clamp(min=0)
        return chunk_numbers(torch.atleast_2d(positions), self.documents, chunk)

    @staticmethod
    def _check_kept(dropped: Tensor, tokens: Tensor, oldest: Tensor) -> None:
        """Raise a UsageError if the next token sees tokens that the cache has `dropped`: those after the `oldest`.

        `dropped` bool [B, D] is False at padding, `tokens` [B, slots] counts the tokens of each row up to a slot, and
        `oldest` [B, 1] is such a count. transformers' caches of windows and chunks keep the newest slots, of which some
        may be padding.
        """
        missed = dropped & (tokens[:, : dropped.shape[1]] > oldest)
        if not torch.compiler.is_compiling() and bool(missed.any()):
            raise UsageError(
                "padding has pushed tokens out of the cache of a sliding window or of chunks: pad the prompts on the "
                "left, or give a DynamicCache() without a config, which keeps all tokens"
            )

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v [B, K, S, H] of the newest tokens; return keys and values of all slots, [B, K, slots, H]."""
        if self.past is None:
            return k, v
        if self.member is None:
            return self.past.update(k, v, layer)
        return self._joint(layer).keys_of(self.member).update(k, v)

    def recurrent(self, layer: int, make: Callable[[], RecurrentState]) -> RecurrentState | None:
        """Return the state of a recurrent layer, which the cache stores; `make` makes one without tokens."""
        if self.past is None:
            return None
        if self.member is None:
            stored = self._own_layer(layer, RecurrentLayer)
        else:
            stored = self._joint(layer).member(self.member, RecurrentLayer)
        assert isinstance(stored, RecurrentLayer)
        if stored.state is None:
            stored.state = make()
        # transformers asks each layer of a cache for its length.
        stored.length = self.length + len(self._slots)
        return stored.state

    def of_member(self, number: int) -> CacheView:
        """Return the same view with the states of one of several mixers beside each other."""
        view = copy.copy(self)
        view.member = number
        return view

    def _joint(self, layer: int) -> JointLayer:
        """Return the layer of several mixers beside each other."""
        joint = self._own_layer(layer, JointLayer)
        assert isinstance(joint, JointLayer)
        return joint

    def _own_layer(self, layer: int, kind: type[RecurrentLayer]) -> RecurrentLayer:
        """Return the layer of the cache with this number, of a kind of ours, which transformers may not have made."""
        assert self.past is not None
        layers = self.past.layers
        # A DynamicCache without a config grows with the layers that store something.
        while len(layers) <= layer:
            layers.append(kind())
        if not isinstance(layers[layer], kind):  # transformers' own layer, without a state so far
            layers[layer] = kind()
        stored = layers[layer]
        assert isinstance(stored, kind)
        return stored

    def _sizes(self, keys: SeenKeys, seq: int) -> tuple[int, int]:
        """Return the number of slots that layers that see these keys attend to, and the position of the first."""
        if self.past is None:
            return seq, 0
        # transformers' cache is asked by layer: the first one that sees these keys stands for all.
        for depth, layer in enumerate(self.config.layers):
            for mixer in layer.mixers:
                if isinstance(mixer, SoftmaxAttentionSpec) and mixer.seen == keys:
                    return self.past.get_mask_sizes(seq, depth)
        raise AssertionError(f"no layer sees {keys}")
