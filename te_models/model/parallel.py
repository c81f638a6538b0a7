"""Mixers beside each other. Shapes: te_models/model/block.py, te_models/config/parallel.py."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from te_models.config.parallel import ParallelSpec
from te_models.model.forward_context import ForwardContext
from te_models.model.kv_cache import JointState
from te_models.model.part import MIXERS, Mixer
from te_models.model.te_modules import Factory


class ParallelMixer(Mixer[ParallelSpec]):
    """The sum of mixers of any kinds, each of one input times a factor; a factor is also on each output.

    Each mixer is the module that a layer of its kind alone has, and sees the cache as if it were alone there.
    """

    entry = None  # several te.Linears read the input
    holds_parts = True

    def __init__(self, spec: ParallelSpec, layer: int, factory: Factory) -> None:
        super().__init__(spec, layer, factory)
        for name, mixer in spec.named.items():
            self.add_module(
                name, MIXERS[type(mixer)](mixer, layer, factory.inside(f"{factory.prefix}{name}."))
            )

    @property
    def mixers(self) -> list[Mixer]:
        """The modules of the mixers, in the order of the description."""
        return [cast(Mixer, self._modules[name]) for name in self.spec.named]

    def initialize(self, name: str, values: Tensor, std: float, residual_std: float) -> None:
        """Set initial values as the mixer does that has the parameter."""
        owner, _, rest = name.partition(".")
        cast(Mixer, self._modules[owner]).initialize(rest, values, std, residual_std)

    def new_state(
        self, batch: int, slots: int, device: torch.device, dtype: torch.dtype
    ) -> JointState:
        """Return the states of all mixers."""
        return JointState([mixer.new_state(batch, slots, device, dtype) for mixer in self.mixers])

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return the sum of the mixers of x [N, D]: [N, D]."""
        before = self.spec.input_multipliers
        after = self.spec.output_multipliers
        total = None
        for number, mixer in enumerate(self.mixers):
            h = x if before[number] == 1 else x * before[number]
            # Recomputed and fused as anywhere: a mixer does not know that it has neighbours.
            out = mixer(h, context.of_member(number))
            if after[number] != 1:
                out = out * after[number]
            total = out if total is None else total + out
        assert total is not None  # there are two mixers at least
        return total
