"""A gated short convolution, built from te.Linear. Shapes: te_models/model/block.py, te_models/config/short_conv.py."""

from __future__ import annotations

import torch
from torch import Tensor

from te_models.config.short_conv import ShortConvSpec
from te_models.model.convolution import Taps, newest
from te_models.model.forward_context import ForwardContext
from te_models.model.kv_cache import RecurrentState
from te_models.model.part import Mixer
from te_models.model.te_modules import Factory, first_rows, pad_rows
from te_models.model.whole_rows import WholeRows


class ShortConv(Mixer[ShortConvSpec]):
    """out_proj(c * conv(b * x)): a causal depthwise convolution of a few tokens between two gates (LFM2)."""

    entry = "in_proj"

    def __init__(self, spec: ShortConvSpec, layer: int, factory: Factory) -> None:
        super().__init__(spec, layer, factory)
        into, out = spec.linears
        self.in_proj = factory.linear(into)
        bias = factory.vector(spec.channels) if spec.sizes.bias else None
        self.conv = Taps(factory.vector(spec.channels, 1, spec.sizes.kernel_dim), bias)
        self.out_proj = factory.linear(out)

    def initialize(self, name: str, values: Tensor, std: float, residual_std: float) -> None:
        owner, _, kind = name.partition(".")
        if owner == "conv":
            self.conv.initialize(kind, values)
        else:
            super().initialize(name, values, std, residual_std)

    def new_state(
        self, batch: int, slots: int, device: torch.device, dtype: torch.dtype
    ) -> RecurrentState:
        """Return the state of `batch` rows without tokens; `slots` changes nothing.

        `tail` has the inputs of the convolution at the newest tokens, oldest first, [B, taps - 1, channels].
        """
        shape = (batch, self.spec.sizes.kernel_dim - 1, self.spec.channels)
        return RecurrentState(tail=torch.zeros(shape, device=device, dtype=dtype))

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return the convolution of x [N, D]: [N, D]."""
        count = context.batch * context.seq
        parts = first_rows(context.linear(self.in_proj, x), count)  # [B*S, 3D]
        parts = parts.unflatten(0, (context.batch, context.seq))

        rows = WholeRows.of(context)

        def mix(parts: Tensor, counts: Tensor | None) -> Tensor:
            return self._mix(parts, counts, rows)

        sections = (self.spec.channels,) * 3
        out = rows.mix(mix, (parts,), (sections,)).flatten(0, 1)  # [B*S, D], zeros at padding
        out = context.linear(self.out_proj, pad_rows(out, x.shape[0]))
        return context.without_padding(out) if self.spec.sizes.bias else out

    def _mix(self, parts: Tensor, counts: Tensor | None, rows: WholeRows) -> Tensor:
        """Return c * conv(b * x) [B, S, D] of parts [B, S, 3D]; the first `counts` [B] of a row are tokens.

        D are the channels that this rank mixes.
        """
        context = rows.context
        channels = (self.spec.channels,)
        state, stored = self.stored_state(context, like=parts)
        tail = stored.get("tail")
        taps = rows.local_rows(self.conv.weight, channels)
        bias = None if self.conv.bias is None else rows.local_rows(self.conv.bias, channels)
        out = context.kernels.gated_conv(parts, tail, taps, bias, context.documents)
        if state is not None and tail is not None:
            b, _, x = parts.chunk(3, dim=-1)
            # The kernel keeps no product b * x, of which the next step needs the newest few.
            state.write(tail=newest(tail, b * x, counts))
        return out
