"""The size of an optimizer's state."""

from typing import Any

from torch import Tensor


def state_bytes(state: Any) -> int:
    """Return the size in bytes of all tensors in a nested state."""
    if isinstance(state, Tensor):
        return state.numel() * state.element_size()
    members = (
        state.values()
        if isinstance(state, dict)
        else state
        if isinstance(state, (list, tuple))
        else ()
    )
    return sum(map(state_bytes, members))
