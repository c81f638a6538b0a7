"""The state that a step changes before it updates the weights. A run that fails within a step saves the one before it.

A forward pass takes batches and random numbers, and under `delayed` records amaxes and changes scales: where the loss
is NaN, these are NaN or far too large, and a checkpoint with them would be of no use.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from te_models.causal_lm import CausalLM
from te_models.config.recipe import Recipe
from te_models.data.dataset import TokenDataset
from te_models.data.own_batches import OwnBatches
from te_models.data.streaming import StreamingDataset
from te_models.files.formats import Fields
from te_models.fp8.scaling_state import Copies, Fp8StateCopies

Data = TokenDataset | StreamingDataset | OwnBatches


@dataclass(frozen=True)
class RandomState:
    """The state of this process's random numbers.

    Attributes:
        cpu: uint8 [length].
        cuda: of the model's device, uint8 [length]; None: the model is on the CPU.
    """

    cpu: Tensor
    cuda: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        """Return the present state of the random numbers on the CPU and on `device`."""
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(cpu=torch.get_rng_state(), cuda=cuda)

    def restore(self, device: torch.device) -> None:
        """Let random numbers go on from this state, on the CPU and on `device`."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, device)


@dataclass(frozen=True)
class StepStart:
    """The state of this process at the start of a step, without weights and optimizer, which change only at its end.

    Attributes:
        recipe: the model's recipe.
        data: the position in the data.
        random: the random numbers.
        fp8: copies of scales and amax histories, which are valid until two more are taken (StepStarts).
    """

    recipe: Recipe
    data: Fields
    random: RandomState
    fp8: Copies


class StepStarts:
    """Copies of the state at the start of the last two steps, which can be restored."""

    def __init__(self, model: CausalLM, data: Data) -> None:
        self.model = model
        self.data = data
        self.copies = Fp8StateCopies(model)
        # Two: with results read a step late, the next step has begun when one is found to have failed.
        self._memory: list[Copies] = [{}, {}]

    def take(self) -> StepStart:
        """Return a copy of the present state, which is valid until two more are taken."""
        data = self.data
        position: Fields = (
            data.own_state() if isinstance(data, StreamingDataset) else data.state_dict()
        )
        # Two sets of buffers, used in turn: the step before may still be put back.
        memory = self._memory.pop(0)
        fp8 = self.copies.take(into=memory) if self.model.recipe.stateful else {}
        self._memory.append(fp8)
        return StepStart(
            recipe=self.model.recipe,
            data=position,
            random=RandomState.now(self.model.device),
            fp8=fp8,
        )

    def put_back(self, start: StepStart) -> None:
        """Give the model the recipe, the scales and the amax histories that it had then."""
        if self.model.recipe is not start.recipe:
            # Another recipe may have dropped the state of this one.
            self.model.set_recipe(start.recipe)
            self.model.take_fp8_state(self.copies.named(start.fp8), start.recipe)
        elif start.recipe.stateful:
            self.copies.put_back(start.fp8)

    def whole_data(self, start: StepStart) -> Fields:
        """Return the position in the data then, of all processes, which call this together."""
        if isinstance(self.data, StreamingDataset):
            return self.data.whole_state(start.data)
        return start.data
