"""Mamba 2, built from te.Linear. Shapes: te_models/model/block.py, te_models/config/mamba2.py.

C = H P + 2 G N channels of x, b and c.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from te_models.config.mamba2 import Mamba2Spec
from te_models.kernels.gradient_room import GradientRoom, Slot, split
from te_models.kernels.state_space import state_space, state_space_kernel
from te_models.model.convolution import Taps, initialize_decays, newest
from te_models.model.forward_context import ForwardContext
from te_models.model.kv_cache import RecurrentState
from te_models.model.part import Mixer
from te_models.model.te_modules import Factory, first_rows, pad_rows
from te_models.model.whole_rows import WholeRows


class GroupNorm(nn.Module):
    """The weight [H P] of an RMSNorm per group of channels, which is one operation with the gate beside it."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


class Mamba2(Mixer[Mamba2Spec]):
    """out_proj(RMSNorm(y * silu(z))), y the output of a state space (Dao and Gu 2024, arXiv 2405.21060).

    A causal convolution mixes x, b and c; a head's state decays by exp(-exp(A_log) dt), where dt is softplus of one
    logit per head and token. Time steps and state are FP32.
    """

    entry = "zxbcdt_proj"

    def __init__(self, spec: Mamba2Spec, layer: int, factory: Factory) -> None:
        super().__init__(spec, layer, factory)
        sizes = spec.sizes
        into, out = spec.linears
        self.zxbcdt_proj = factory.linear(into)
        bias = factory.vector(sizes.mixed_size) if sizes.conv_bias else None
        self.conv1d = Taps(factory.vector(sizes.mixed_size, 1, sizes.conv_kernel_dim), bias)
        self.A_log = factory.vector(sizes.num_heads)
        self.dt_bias = factory.vector(sizes.num_heads)
        self.D = factory.vector(sizes.num_heads)
        self.eps = factory.eps
        self.norm = None if sizes.norm == "none" else GroupNorm(factory.vector(sizes.inner_size))
        self.out_proj = factory.linear(out)

    def initialize(self, name: str, values: Tensor, std: float, residual_std: float) -> None:
        """Set initial values as the base class does; decays cover a range of lengths, as in the paper's code."""
        owner, _, kind = name.partition(".")
        if owner == "conv1d":
            self.conv1d.initialize(kind, values)
        elif name in ("A_log", "dt_bias"):
            initialize_decays(name, values)
        elif name in ("D", "norm.weight"):
            values.fill_(1.0)
        else:
            super().initialize(name, values, std, residual_std)

    def remark(self, device: torch.device, dtype: torch.dtype) -> str:
        return state_space_kernel(device, dtype)

    def new_state(
        self, batch: int, slots: int, device: torch.device, dtype: torch.dtype
    ) -> RecurrentState:
        """Return the state of `batch` rows without tokens; `slots` changes nothing.

        `tail` has the inputs of the convolution at the newest tokens, oldest first, [B, taps - 1, C], and `matrix` the
        state after the newest token, FP32 [B, H, P, N].
        """
        s = self.spec.sizes
        tail = torch.zeros(batch, s.conv_kernel_dim - 1, s.mixed_size, device=device, dtype=dtype)
        shape = (batch, s.num_heads, s.head_dim, s.state_dim)
        matrix = torch.zeros(shape, device=device, dtype=torch.float32)
        return RecurrentState(tail=tail, matrix=matrix)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return Mamba 2 of x [N, D]: [N, D]."""
        sizes = self.spec.sizes
        count = context.batch * context.seq
        # [B*S, H P + C + H, and padding]
        projected = first_rows(context.linear(self.zxbcdt_proj, x), count)
        used = [sizes.inner_size, sizes.mixed_size, sizes.num_heads]
        # The convolution writes its gradient into the memory of the projection's gradient.
        room = GradientRoom([*used, projected.shape[1] - sum(used)])
        # z [B*S, H P], mixed [B*S, C] and steps [B*S, H]; the projection's last channels may be padding.
        z, mixed, steps, _ = split(projected, room)
        mixed, steps = (t.unflatten(0, (context.batch, context.seq)) for t in (mixed, steps))

        rows = WholeRows.of(context)

        def mix(mixed: Tensor, steps: Tensor, counts: Tensor | None) -> Tensor:
            return self._mix(mixed, steps, counts, rows, Slot(room, 1))

        inputs = (self._spread(mixed, rows.ranks), steps)
        # [B, S, H, P], zeros at padding
        out = rows.mix(mix, inputs, (self._mixed_sections(rows.ranks), (sizes.num_heads,)))
        out = self._gated(out.flatten(2).flatten(0, 1), z, context)  # [B*S, H P]
        out = context.linear(self.out_proj, pad_rows(out, x.shape[0]))
        return context.without_padding(out) if sizes.has_out_bias else out

    def _mixed_sections(self, ranks: int) -> tuple[int, int, int]:
        """Return the channels of x, b and c as `_spread` returns them."""
        sizes = self.spec.sizes
        groups = max(sizes.num_groups, ranks) * sizes.state_dim
        return sizes.inner_size, groups, groups

    def _spread(self, mixed: Tensor, ranks: int) -> Tensor:
        """Return mixed [..., C] with b and c of a group once for each rank that has heads of it, if several have."""
        sizes = self.spec.sizes
        if ranks <= sizes.num_groups:
            return mixed
        x, *groups = mixed.split([sizes.inner_size, sizes.group_size, sizes.group_size], dim=-1)
        parts = [x]
        for group in groups:
            each = group.unflatten(-1, (sizes.num_groups, -1))
            parts.append(each.repeat_interleave(ranks // sizes.num_groups, dim=-2).flatten(-2))
        return torch.cat(parts, dim=-1)

    def _own_mixed(self, values: Tensor, rows: WholeRows) -> Tensor:
        """Return the rows of a parameter [C, ...] of the convolution that belong to this rank's heads."""
        if rows.share is None:
            return values
        spread = self._spread(values.movedim(0, -1), rows.ranks).movedim(-1, 0)
        return rows.local_rows(spread, self._mixed_sections(rows.ranks))

    def _taps(self) -> Tensor:
        """Return the taps [C, 1, K] with the factors on x, b and c: a convolution is linear in each channel."""
        sizes = self.spec.sizes
        taps = self.conv1d.weight
        if sizes.multipliers is None:
            return taps
        groups = (sizes.inner_size, sizes.group_size, sizes.group_size)
        scaled = []
        for name, part in zip("xbc", taps.float().split(groups), strict=True):
            # In FP32, since these few numbers act on every token.
            scaled.append(part * sizes.factors[name])
        return torch.cat(scaled)

    def _gated(self, y: Tensor, z: Tensor, context: ForwardContext) -> Tensor:
        """Return the output y [T, H P] with its gate and its norm."""
        sizes = self.spec.sizes
        if self.norm is None:
            # Families without the norm (Falcon H1) have the gate alone.
            return context.kernels.silu_gate(y, z, factor=sizes.factors["z"])
        return context.kernels.gated_norm(
            y,
            z,
            self.norm.weight,
            groups=sizes.num_groups,
            eps=self.eps,
            before_gate=sizes.norm == "before_gate",
            factor=sizes.factors["z"],
        )

    def _mix(
        self, mixed: Tensor, steps: Tensor, counts: Tensor | None, rows: WholeRows, slot: Slot
    ) -> Tensor:
        """Return the outputs of the state space [B, S, H, P] from mixed [B, S, C] and the logits of steps [B, S, H].

        They are of this rank's heads. `counts` [B] is the number of tokens of each row, the first; None: all are
        tokens. `slot` is where the gradient of mixed belongs.
        """
        context = rows.context
        sizes = rows.local(self.spec).sizes
        heads = (self.spec.sizes.num_heads,)
        kernels = context.kernels
        seq = context.seq
        state, stored = self.stored_state(context, like=mixed)
        tail = stored.get("tail")
        before = stored.get("matrix")
        x, b, c = kernels.mixed_parts(
            mixed,
            tail,
            self._own_mixed(self._taps(), rows),
            context.documents,
            None if self.conv1d.bias is None else self._own_mixed(self.conv1d.bias, rows),
            sizes=(sizes.inner_size, sizes.group_size, sizes.group_size),
            activation=sizes.activation,
            slot=slot,
        )
        # bool [B, S], False at padding, which `without_padding` has moved behind the tokens.
        real = None if counts is None else torch.arange(seq, device=counts.device) < counts[:, None]
        low, high = sizes.time_step_limits
        if sizes.factors["dt"] != 1:
            steps = steps.float() * sizes.factors["dt"]
        # [B, S, H]
        dt = kernels.time_steps(
            steps, rows.local_rows(self.dt_bias, heads), real, low=low, high=high
        )
        # Negative whatever training makes of A_log: a state can only decay.
        rates = -rows.local_rows(self.A_log, heads).float().exp()  # [H]
        # [B, S, H, P]
        x = x.unflatten(-1, (-1, sizes.head_dim))
        # [B, S, G, N] each
        b, c = (t.unflatten(-1, (-1, sizes.state_dim)) for t in (b, c))
        skips = rows.local_rows(self.D, heads)
        out, matrix = state_space(
            x, dt, a=rates, b=b, c=c, d=skips, state=before, documents=context.documents
        )
        if state is not None and tail is not None and matrix is not None:
            # In place: a captured step of decoding finds it at the same address.
            state.write(tail=newest(tail, mixed, counts), matrix=matrix)
        return out
