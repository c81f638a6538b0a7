"""The state of decoding: one state per layer, allocated once, at fixed addresses, with its fill level on the device.

A forward writes keys and values of its tokens into their slots and attends over all slots under a mask, so that every
step of one token has the same shapes, reads the same addresses and needs nothing from the host: it can be captured in a
CUDA graph. The first forward, the prompt, attends only to itself, with the fast causal kernels.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from te_models.config.attention import SeenKeys
from te_models.errors import UsageError
from te_models.kernels.decode import StepKeys
from te_models.kernels.sdpa import within_chunk, within_window

# The number of slots is a multiple of this, as kernels with a mask require of its rows.
SLOTS = 16


class Cache(Protocol):
    """The part of a cache that a forward pass uses: DecodingCache, or a view of one of transformers."""

    length: int
    # int [B, S], the document of each token, where a pass without past tokens has several
    documents: Tensor | None

    def extend(self, seq: int, real: Tensor | None) -> Tensor | None: ...
    def visible(self, keys: SeenKeys) -> Tensor | None: ...

    @property
    def slots(self) -> Tensor | None:
        """The slots of the newest tokens, int64 [S]; None: the first S."""
        ...

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v [B, K, S, H] of the newest tokens in an attention layer; return those that they attend to."""
        ...

    def recurrent(self, layer: int, make: Callable[[], RecurrentState]) -> RecurrentState | None:
        """Return the state of a recurrent layer, of any kind; `make` makes one without tokens.

        None in a pass that stores nothing.
        """
        ...

    def of_member(self, number: int) -> Cache:
        """Return a view for mixer `number` of layers that run several in parallel: it shows that mixer's states."""
        ...


class State(Protocol):
    """The state of one layer: its tokens so far. A mixer makes it (te_models.model.part.Mixer.new_state)."""

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        ...

    def clear(self) -> None:
        """Forget all tokens."""
        ...


class KVState:
    """Keys [B, K, slots, channels] and values [B, K, slots, other channels] of one attention layer.

    A slot without a token holds zeros. The mask hides it, but its value is still multiplied by a probability of 0, and
    0 times NaN is NaN. In latent attention the slots are also the input of an FP8 projection, whose scale would
    otherwise depend on an earlier text.

    Args:
        batch: rows, B.
        heads: heads of keys and values, K.
        slots: positions.
        channels: of a head's key and of its value.
        device: of the tensors.
        dtype: of the tensors.
    """

    def __init__(
        self,
        batch: int,
        heads: int,
        slots: int,
        channels: tuple[int, int],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        key_channels, value_channels = channels
        self.keys = torch.zeros(batch, heads, slots, key_channels, device=device, dtype=dtype)
        self.values = torch.zeros(batch, heads, slots, value_channels, device=device, dtype=dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.keys.nbytes + self.values.nbytes

    def clear(self) -> None:
        """Forget all tokens."""
        self.keys.zero_()
        self.values.zero_()

    def append(self, k: Tensor, v: Tensor, slots: Tensor | None) -> tuple[Tensor, Tensor]:
        """Store k, v [B, K, S, its channels] in `slots` (None: the first S); return the keys and values to attend to.

        In the first forward those are k and v, afterwards the contents of all slots.
        """
        if slots is None:
            # The prompt fills slots from 0 on. Its own k and v are contiguous, as the fast causal kernels want them.
            self.keys[:, :, : k.shape[2]] = k
            self.values[:, :, : v.shape[2]] = v
            return k, v
        # Slots as a tensor on the device: a slice would be fixed in a captured graph.
        # Under torch.autocast, products of an FP32 model are of another dtype.
        self.keys.index_copy_(2, slots, k.to(self.keys.dtype))
        self.values.index_copy_(2, slots, v.to(self.values.dtype))
        return self.keys, self.values


class RecurrentState:
    """The state of a layer whose size does not grow with the text: linear attention, a convolution, a state space.

    Args:
        tensors: by names of the mixer's choice, as many as it needs, each [B, ...]: such as the newest inputs of a
            convolution, or a matrix per head. Zeros are the state before the first token.
    """

    def __init__(self, **tensors: Tensor) -> None:
        self.tensors = tensors

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def clear(self) -> None:
        """Forget all tokens."""
        for tensor in self.tensors.values():
            tensor.zero_()

    def read(self) -> dict[str, Tensor]:
        """Return the tensors before the new tokens; copies where autograd may save them, since `write` follows."""
        if torch.is_grad_enabled():
            return {name: tensor.clone() for name, tensor in self.tensors.items()}
        return dict(self.tensors)

    @torch.no_grad()
    def write(self, **tensors: Tensor) -> None:
        """Overwrite tensors in place, since a captured step reads them at their addresses."""
        for name, tensor in tensors.items():
            self.tensors[name].copy_(tensor)

    def take_rows(self, rows: Tensor) -> None:
        """Replace the rows of the batch by the rows with these numbers, int64 [B']; the tensors are new ones then."""
        for name, tensor in self.tensors.items():
            self.tensors[name] = tensor.index_select(0, rows.to(tensor.device))


class JointState:
    """The states of one layer that runs several mixers in parallel, in the order of the mixers."""

    def __init__(self, members: list[State]) -> None:
        self.members = members

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(state.nbytes for state in self.members)

    def clear(self) -> None:
        """Forget all tokens."""
        for state in self.members:
            state.clear()


def slots_for(length: int) -> int:
    """Return the slots of a cache for `length` positions."""
    return -(-length // SLOTS) * SLOTS


class DecodingCache:
    """The states of all layers, and the positions seen so far in rows of unequal length.

    Args:
        states: of the layers, from the first to the last.
        batch: rows.
        max_length: positions per row, padding included.
        device: of the states.
        dtype: of masks, as of the activations.

    Attributes:
        length: positions seen, padding included, counted by the host; a captured step does not count.
        filled: `length` on the device, int64 [1]; a captured step counts there.
        counts: int64 [B], the tokens of each row without padding, hence the position of its next one.
        real: bool [B, slots], False at padding; meaningless beyond `filled`.
        positions: int64 [B, slots], the number of tokens of the same row before each slot, without padding; meaningless
            beyond `filled`.
    """

    documents: Tensor | None = None
    # The number of the mixer whose states a view shows, in layers with several; None: every layer has one state.
    member: int | None = None

    def __init__(
        self,
        states: Sequence[State],
        batch: int,
        max_length: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        slots = slots_for(max_length)
        self.states = states
        self.dtype = dtype
        self.max_length = max_length
        self.length = 0
        self.filled = torch.zeros(1, dtype=torch.long, device=device)
        self.counts = torch.zeros(batch, dtype=torch.long, device=device)
        self.real = torch.ones(batch, slots, dtype=torch.bool, device=device)
        self.positions = torch.zeros(batch, slots, dtype=torch.long, device=device)
        self._index = torch.arange(slots, device=device)
        # int64 [S], the slots of the forward under way; None while it is the first one.
        self._slots: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(state.nbytes for state in self.states)

    def __repr__(self) -> str:
        size = f"{self.nbytes / 2**20:,.1f} MiB"
        layers = len(self.states)
        return f"DecodingCache({len(self.counts)} rows x {self.max_length} positions x {layers} layers: {size})"

    def clear(self) -> None:
        """Forget all positions; the next forward is a first one."""
        self.length = 0
        self.filled.zero_()
        self.counts.zero_()
        for state in self.states:
            state.clear()

    def extend(self, seq: int, real: Tensor | None) -> Tensor | None:
        """Make room for the `seq` newest tokens of each row; return their positions [B, S], None in the first forward.

        `real` bool [B, S] is False at padding; None: there is none. Call it once per forward, before `append`.
        """
        if self.length + seq > self.max_length:
            raise UsageError(
                f"the KV cache has room for {self.max_length} positions, not {self.length + seq}: make it longer"
            )
        new = self.real.new_ones(len(self.counts), seq) if real is None else real
        slots = self.filled + self._index[:seq]
        # A token comes after the real tokens of its row: padding takes a slot but no position. Padding in front would
        # be at -1.
        positions = (self.counts[:, None] + new.cumsum(-1) - 1).clamp(min=0)
        self.real.index_copy_(1, slots, new)
        self.positions.index_copy_(1, slots, positions)
        # In place, so that the next replay of a captured step reads what this one left.
        self.counts += new.sum(-1)
        self.filled += seq
        # Counted by the host: whether there is a past decides which kernels run, which no graph can decide.
        first = self.length == 0
        self.length += seq
        self._slots = None if first else slots
        return None if first else positions

    @property
    def slots(self) -> Tensor | None:
        """The slots of the newest tokens, int64 [S]; None: the first S."""
        return self._slots

    def visible(self, keys: SeenKeys) -> Tensor:
        """Return the mask of the newest tokens, added to the scores of slots [B, 1, S, slots]: 0 where seen, else -inf.

        As in kernels.sdpa.attention_mask: windows and chunks count tokens, between which there may be slots of padding,
        and a padding token sees itself, so that no row is empty.
        """
        window, chunk = keys
        assert self._slots is not None
        distance = self._slots[:, None] - self._index  # [S, slots]
        seen = (distance >= 0) & self.real[:, None, None, :]
        if window is not None:
            queries = self.positions.index_select(1, self._slots)
            seen = seen & within_window(queries, self.positions, window)
        if chunk is not None:
            queries = self.positions.index_select(1, self._slots)
            seen = seen & within_chunk(queries, self.positions, chunk)
        # A row of the mask without any key would make the softmax NaN.
        seen = seen | (distance == 0)
        return torch.zeros_like(seen, dtype=self.dtype).masked_fill_(~seen, float("-inf"))

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v [B, K, S, H] of the newest tokens in an attention layer; return those that they attend to."""
        state = self._state(layer)
        assert isinstance(state, KVState)
        return state.append(k, v, self._slots)

    @property
    def is_first(self) -> bool:
        """True if the forward under way is the first one, which attends to its own tokens alone."""
        return self._slots is None

    def keys(self, layer: int, mask: Tensor) -> StepKeys:
        """Return keys and values of an attention layer for a kernel that also writes the newest token's.

        `mask` is the one that `visible` returned for the layer.
        """
        state = self._state(layer)
        assert isinstance(state, KVState)
        return StepKeys(keys=state.keys, values=state.values, filled=self.filled, mask=mask)

    def recurrent(self, layer: int, make: Callable[[], RecurrentState]) -> RecurrentState | None:
        """Return the state of a recurrent layer."""
        state = self._state(layer)
        assert isinstance(state, RecurrentState)
        return state

    def of_member(self, number: int) -> DecodingCache:
        """Return a view of this cache that shows the states of mixer `number` in layers with several."""
        view = copy.copy(self)
        view.member = number
        return view

    def _state(self, layer: int) -> State:
        """Return the state of a layer; in a view for one of its mixers, that mixer's state."""
        state = self.states[layer]
        if self.member is None:
            return state
        assert isinstance(state, JointState)
        return state.members[self.member]
