"""A kind of mixer that exists only for tests: a gated causal depthwise convolution of te.Linear and te.RMSNorm.

It shows what a new kind takes: one description, one module, and a row in each list (`registered`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from te_models.config import kinds
from te_models.config.fields import ModelFields
from te_models.config.layer import LinearSpec, MixerSpec, Section
from te_models.model import parts
from te_models.model.forward_context import ForwardContext
from te_models.model.kv_cache import RecurrentState
from te_models.model.part import Mixer
from te_models.model.te_modules import Factory, pad_rows

TAPS = 4


@dataclass(frozen=True)
class ShortConvSpec(MixerSpec):
    """out_proj(norm(sigmoid(g) * conv(x))), x and g of D channels each from one projection."""

    taps: int = TAPS

    name: ClassVar[str] = "short_conv"
    title: ClassVar[str] = "convolution"

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        d = self.hidden_size
        return (
            LinearSpec("in_proj", d, (Section("x", d, d), Section("g", d, d))),
            LinearSpec("out_proj", d, (Section("out", d, d),), residual=True),
        )

    @property
    def vectors(self) -> Mapping[str, int]:
        return {"norm": self.hidden_size, "taps": self.hidden_size * self.taps}

    @property
    def features(self) -> Mapping[str, int]:
        return {"hidden_size": self.hidden_size}

    @property
    def divided(self) -> Mapping[str, int]:
        return {}

    def local(self, ranks: int) -> ShortConvSpec:
        return self

    def parallel_obstacle(self, sequence: bool) -> str:
        return "a short convolution is not divided between ranks: build the model without tp_mesh"

    def state_bytes(self, batch: int, slots: int, element: int) -> int:
        return batch * (self.taps - 1) * self.hidden_size * element


class ShortConv(Mixer[ShortConvSpec]):
    """The module of ShortConvSpec."""

    entry = "in_proj"

    def __init__(self, spec: ShortConvSpec, layer: int, factory: Factory) -> None:
        super().__init__(spec, layer, factory)
        into, out = spec.linears
        self.in_proj = factory.linear(into)
        taps = torch.empty(spec.hidden_size, spec.taps, device=factory.device, dtype=factory.dtype)
        self.taps = nn.Parameter(taps)
        self.norm = factory.norm(spec.hidden_size)
        self.out_proj = factory.linear(out)

    def initialize(self, name: str, values: Tensor, std: float, residual_std: float) -> None:
        if name == "taps":
            values.normal_(0.0, self.spec.taps**-0.5)
        else:
            super().initialize(name, values, std, residual_std)

    def new_state(
        self, batch: int, slots: int, device: torch.device, dtype: torch.dtype
    ) -> RecurrentState:
        """The inputs of the last TAPS - 1 tokens of each row, oldest first, [B, TAPS - 1, D]."""
        size = (batch, TAPS - 1, self.spec.hidden_size)
        return RecurrentState(tail=torch.zeros(size, device=device, dtype=dtype))

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        batch, seq = context.batch, context.seq
        rows = x.shape[0]
        xg = context.linear(self.in_proj, x)[: batch * seq].unflatten(0, (batch, seq))  # [B, S, 2D]
        x, g = xg.chunk(2, dim=-1)
        positions = context.positions.expand(batch, seq)
        real = None if context.real is None else context.real.view(batch, seq)
        state, stored = self.stored_state(context, like=x)
        before = stored.get("tail", x.new_zeros(batch, TAPS - 1, x.shape[2]))
        whole = torch.cat((before, x), dim=1)  # [B, TAPS - 1 + S, D]
        if state is not None:
            state.write(tail=newest(whole, real))
        y = torch.zeros_like(x)
        for back in range(TAPS):
            # The token `back` places earlier, where it is of the same row and document.
            earlier = (
                whole[:, TAPS - 1 - back : TAPS - 1 - back + seq] * (positions >= back)[..., None]
            )
            y = y + earlier * self.taps[:, back]
        y = self.norm((y * torch.sigmoid(g)).flatten(0, 1))  # [B*S, D]
        if context.real is not None:
            y = y * context.real
        return context.linear(self.out_proj, pad_rows(y, rows))


def newest(whole: Tensor, real: Tensor | None) -> Tensor:
    """Return the last TAPS - 1 tokens of whole [B, TAPS - 1 + S, D], of whose newest S those `real` are tokens."""
    if real is None:
        return whole[:, 1 - TAPS :]
    start = real.int().argmax(1)  # the tokens of a row are in one piece
    place = (start + real.sum(1))[:, None] + torch.arange(TAPS - 1, device=whole.device)
    return whole.gather(1, place[..., None].expand(-1, -1, whole.shape[2]))


def describe(config: ModelFields, layer: int) -> ShortConvSpec:
    return ShortConvSpec(hidden_size=config.hidden_size)


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """Inside, `layer_types` may name "short_conv"."""
    kinds.MIXERS["short_conv"] = describe
    parts.MIXERS[ShortConvSpec] = ShortConv
    try:
        yield
    finally:
        del kinds.MIXERS["short_conv"], parts.MIXERS[ShortConvSpec]
