"""The `_extra_state` of Transformer Engine's modules, which stays empty here."""

import torch
from torch import Tensor, nn


class EmptyExtraState(nn.Module):
    """A module with an empty `_extra_state` in its state_dict: the FP8 state is saved elsewhere, not as a pickle."""

    def get_extra_state(self) -> Tensor:
        """Return an empty tensor: the key has to be there, as in Transformer Engine."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        """Accept an absent or empty state; raise a RuntimeError for Transformer Engine's pickled one."""
        if state is not None and (not isinstance(state, Tensor) or state.numel()):
            raise RuntimeError(
                f"Refusing to load pickled Transformer Engine extra state for {type(self).__name__}. "
                "Replace the _extra_state entry by torch.empty(0, dtype=torch.uint8)"
            )
