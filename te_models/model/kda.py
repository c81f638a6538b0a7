"""Kimi Delta Attention, built from te.Linear and te.RMSNorm. Shapes: te_models/model/block.py, te_models/config/kda.py.

C channels of all heads, n heads, R the rank of the gates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from te_models.config.kda import KDASpec
from te_models.kernels.gradient_room import GradientRoom, Slot, split
from te_models.kernels.kda import kda_kernel, kimi_delta_rule
from te_models.model.convolution import Taps, initialize_decays, newest
from te_models.model.forward_context import ForwardContext
from te_models.model.kv_cache import RecurrentState
from te_models.model.part import Mixer
from te_models.model.te_modules import Factory, first_rows, pad_rows
from te_models.model.whole_rows import WholeRows


class KimiDeltaAttention(Mixer[KDASpec]):
    """o_proj(RMSNorm(o) * sigmoid(g)), o the output of the delta rule with a decay per channel (arXiv 2510.26692).

    A causal convolution mixes q, k and v, and a token writes with the strength sigmoid(b) into a state that decays by
    exp(-exp(A_log) softplus(f + dt_bias)), or with a bound on decays exp(-bound sigmoid(exp(A_log) (f + dt_bias))).
    Decays, strengths and state are FP32.
    """

    entry = None  # qkvg_proj, which may be FP8, and fb_proj, which is not

    def __init__(self, spec: KDASpec, layer: int, factory: Factory) -> None:
        super().__init__(spec, layer, factory)
        sizes = spec.sizes
        for linear in spec.linears:
            self.add_module(linear.name, factory.linear(linear))
        self.conv1d = Taps(factory.vector(3 * sizes.inner_size, 1, sizes.conv_kernel_dim))
        self.A_log = factory.vector(sizes.num_heads)
        self.dt_bias = factory.vector(sizes.inner_size)
        self.o_norm = factory.norm(sizes.head_dim, zero_centered=False)

    def initialize(self, name: str, values: Tensor, std: float, residual_std: float) -> None:
        """As in the base class; decays cover a range of lengths, as in flash-linear-attention."""
        owner, _, kind = name.partition(".")
        if owner == "conv1d":
            self.conv1d.initialize(kind, values)
        elif name in ("A_log", "dt_bias"):
            initialize_decays(name, values)
        elif owner == "o_norm":
            values.fill_(1.0)
        else:
            super().initialize(name, values, std, residual_std)

    def remark(self, device: torch.device, dtype: torch.dtype) -> str:
        return kda_kernel(device, dtype)

    def new_state(
        self, batch: int, slots: int, device: torch.device, dtype: torch.dtype
    ) -> RecurrentState:
        """Return the state of `batch` rows without tokens; `slots` changes nothing.

        `tail` has the inputs of the convolution at the newest tokens, oldest first, [B, taps - 1, 3C], and `matrix` the
        state of the rule after the newest token, FP32 [B, n, d, d].
        """
        s = self.spec.sizes
        shape = (batch, s.conv_kernel_dim - 1, 3 * s.inner_size)
        tail = torch.zeros(shape, device=device, dtype=dtype)
        shape = (batch, s.num_heads, s.head_dim, s.head_dim)
        matrix = torch.zeros(shape, device=device, dtype=torch.float32)
        return RecurrentState(tail=tail, matrix=matrix)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return Kimi Delta Attention of x [N, D]: [N, D]."""
        sizes = self.spec.sizes
        count = context.batch * context.seq
        rank = sizes.gate_rank or sizes.inner_size
        qkvg = context.linear(self.get_submodule("qkvg_proj"), x)  # [N, 3C + R]
        fb = context.linear(self.get_submodule("fb_proj"), x)  # [N, R + n, and padding]
        # The decay and the strength come from a projection outside FP8: they multiply the state at every token, and
        # errors add up.
        # The convolution writes its gradient into the memory of the projection's gradient.
        room = GradientRoom((3 * sizes.inner_size, rank))
        mixed, g = split(qkvg, room)
        f, b = fb[:, : rank + sizes.num_heads].split([rank, sizes.num_heads], dim=-1)
        if sizes.gate_rank is not None:
            # Gates of low rank: down in the projection above, up here.
            f = context.linear(self.get_submodule("f_up_proj"), f.contiguous())  # [N, C]
            g = context.linear(self.get_submodule("g_up_proj"), g.contiguous())  # [N, C]
        # [B, S, 3C, C or n]
        mixed, f, b = (
            first_rows(t, count).unflatten(0, (context.batch, context.seq)) for t in (mixed, f, b)
        )

        rows = WholeRows.of(context)

        def mix(mixed: Tensor, f: Tensor, b: Tensor, counts: Tensor | None) -> Tensor:
            return self._mix(mixed, f, b, counts, rows, Slot(room, 0))

        inner = sizes.inner_size
        sections = ((inner,) * 3, (inner,), (sizes.num_heads,))
        out = rows.mix(mix, (mixed, f, b), sections)  # [B, S, n, d], zeros at padding
        out = self.o_norm(out.flatten(0, 2)).view(count, -1)  # [B*S, C]
        out = context.kernels.gate(out, first_rows(g, count))
        return context.linear(self.get_submodule("o_proj"), pad_rows(out, x.shape[0]))

    def _mix(
        self,
        mixed: Tensor,
        f: Tensor,
        b: Tensor,
        counts: Tensor | None,
        rows: WholeRows,
        slot: Slot,
    ) -> Tensor:
        """Return the outputs of the rule [B, S, n, d] from mixed [B, S, 3C], f [B, S, C] and b [B, S, n] of own heads.

        `counts` [B] is the number of tokens of each row, the first; None: all are tokens. `slot` is where the gradient
        of mixed belongs.
        """
        context = rows.context
        sizes = rows.local(self.spec).sizes
        inner = self.spec.sizes.inner_size
        kernels = context.kernels
        state, stored = self.stored_state(context, like=mixed)
        tail = stored.get("tail")
        before = stored.get("matrix")
        q, k, v = kernels.mixed_parts(
            mixed,
            tail,
            rows.local_rows(self.conv1d.weight, (inner,) * 3),
            context.documents,
            sizes=(sizes.inner_size,) * 3,
            activation=self.spec.activation,
            slot=slot,
        )
        real = None
        if counts is not None:
            # As in Gated DeltaNet: padding neither decays the state nor writes to it.
            real = torch.arange(context.seq, device=counts.device) < counts[:, None]
        # [B, S, n, d] and [B, S, n]
        decays = rows.local_rows(self.A_log, (self.spec.sizes.num_heads,))
        biases = rows.local_rows(self.dt_bias, (inner,))
        g, beta = kernels.channel_gates(f, b, decays, biases, real, bound=sizes.decay_bound)
        q, k, v = (t.unflatten(-1, (-1, sizes.head_dim)) for t in (q, k, v))
        out, matrix = kimi_delta_rule(q, k, v, g, beta, before, context.documents)
        if state is not None and tail is not None and matrix is not None:
            state.write(tail=newest(tail, mixed, counts), matrix=matrix)
        return out
