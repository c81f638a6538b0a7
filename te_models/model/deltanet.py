"""Gated DeltaNet, built from te.Linear and te.RMSNorm. Shapes: te_models/model/block.py, te_models/config/deltanet.py.

C = 2 Kd + Vd channels of q, k and v; n value heads.
"""

import torch
from torch import Tensor

from te_models.config.deltanet import DeltaNetSpec
from te_models.kernels.delta_rule import delta_rule, delta_rule_kernel
from te_models.kernels.gradient_room import GradientRoom, Slot, split
from te_models.model.convolution import Taps, initialize_decays, newest
from te_models.model.forward_context import ForwardContext
from te_models.model.kv_cache import RecurrentState
from te_models.model.part import Mixer
from te_models.model.te_modules import Factory, first_rows, pad_rows
from te_models.model.whole_rows import WholeRows


class GatedDeltaNet(Mixer[DeltaNetSpec]):
    """out_proj(RMSNorm(o) * silu(z)), o the output of the gated delta rule (Yang et al. 2024, arXiv 2412.06464).

    A causal convolution mixes q, k and v, and a token writes with the strength sigmoid(b) into a state that decays by
    exp(-exp(A_log) softplus(a + dt_bias)). Gates and state are FP32.
    """

    entry = None  # qkvz_proj, which may be FP8, and ba_proj, which is not

    def __init__(self, spec: DeltaNetSpec, layer: int, factory: Factory) -> None:
        super().__init__(spec, layer, factory)
        sizes = spec.sizes
        qkvz, ba, out = spec.linears
        self.qkvz_proj = factory.linear(qkvz)
        self.ba_proj = factory.linear(ba)
        self.conv1d = Taps(factory.vector(sizes.mixed_size, 1, sizes.conv_kernel_dim))
        self.A_log = factory.vector(sizes.num_value_heads)
        self.dt_bias = factory.vector(sizes.num_value_heads)
        self.norm = factory.norm(sizes.value_head_dim, zero_centered=False)
        self.out_proj = factory.linear(out)

    def initialize(self, name: str, values: Tensor, std: float, residual_std: float) -> None:
        """Set initial values as the base class does; decays cover a range of lengths, as in the paper's code."""
        if name == "conv1d.weight":
            self.conv1d.initialize("weight", values)
        elif name in ("A_log", "dt_bias"):
            initialize_decays(name, values)
        elif name == "norm.weight":
            values.fill_(1.0)
        else:
            super().initialize(name, values, std, residual_std)

    def remark(self, device: torch.device, dtype: torch.dtype) -> str:
        return delta_rule_kernel(device, dtype, self.spec.sizes)

    def new_state(
        self, batch: int, slots: int, device: torch.device, dtype: torch.dtype
    ) -> RecurrentState:
        """Return the state of `batch` rows without tokens; `slots` changes nothing.

        `tail` has the inputs of the convolution at the newest tokens, oldest first, [B, taps - 1, C], and `matrix` the
        state of the delta rule after the newest token, FP32 [B, n, d_k, d_v].
        """
        s = self.spec.sizes
        tail = torch.zeros(batch, s.conv_kernel_dim - 1, s.mixed_size, device=device, dtype=dtype)
        shape = (batch, s.num_value_heads, s.key_head_dim, s.value_head_dim)
        matrix = torch.zeros(shape, device=device, dtype=torch.float32)
        return RecurrentState(tail=tail, matrix=matrix)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return linear attention of x [N, D]: [N, D]."""
        count = context.batch * context.seq
        sizes = self.spec.sizes
        projected = context.linear(self.qkvz_proj, x)  # [N, C + Vd]
        qkvz = first_rows(projected, count)  # [B*S, C + Vd]
        # [B*S, 2n], in BF16 under any recipe
        ba = first_rows(context.linear(self.ba_proj, x), count)
        # The convolution and the gate write their gradients beside each other.
        room = GradientRoom((sizes.mixed_size, sizes.value_size))
        mixed, z = split(qkvz, room)
        # [B, S, C or 2n]
        mixed, ba = (t.unflatten(0, (context.batch, context.seq)) for t in (mixed, ba))

        rows = WholeRows.of(context)

        def mix(mixed: Tensor, ba: Tensor, counts: Tensor | None) -> Tensor:
            return self._mix(mixed, ba, counts, rows, Slot(room, 0))

        heads = sizes.num_value_heads
        out = rows.mix(mix, (mixed, ba), (self._mixed_sections, (heads, heads)))  # [B, S, n, d_v]
        # Under sequence parallelism `projected` has the rows of all ranks, x only this rank's.
        padded = projected.shape[0]
        out = self._gated(out.flatten(0, 1), z, padded, context, Slot(room, 1))
        return context.linear(self.out_proj, pad_rows(out, padded))

    def _gated(
        self, out: Tensor, z: Tensor, rows: int, context: ForwardContext, slot: Slot
    ) -> Tensor:
        """Return the norm of each head of out [B*S, n, d_v] times silu(z): [B*S, Vd]; 0 at padding, where z is 0."""
        if self.tp.size > 1:
            # One weight [d_v] for all heads, of which a rank has some: hence the sum of its gradient over ranks.
            normed = self.tp.norm(self.norm, out.flatten(0, 1), partial=True)
            return context.kernels.silu_gate(normed.view(out.shape[0], -1), z)
        # FP8 cannot be padded afterwards.
        consumer = context.neighbour(self.out_proj) if out.shape[0] == rows else None
        return context.kernels.gated_heads(self.norm, out, z, consumer, slot=slot)

    @property
    def _mixed_sections(self) -> tuple[int, int, int]:
        """The channels of q, k and v."""
        sizes = self.spec.sizes
        return sizes.key_size, sizes.key_size, sizes.value_size

    def _mix(
        self, mixed: Tensor, ba: Tensor, counts: Tensor | None, rows: WholeRows, slot: Slot
    ) -> Tensor:
        """Return the outputs of the delta rule [B, S, n, d_v] from mixed [B, S, C] and ba [B, S, 2n] of own heads.

        `counts` [B] is the number of tokens of each row, the first; None: all are tokens. `slot` is where the gradient
        of mixed belongs.
        """
        context = rows.context
        sizes = rows.local(self.spec).sizes
        heads = (self.spec.sizes.num_value_heads,)
        kernels = context.kernels
        seq = context.seq
        state, stored = self.stored_state(context, like=mixed)
        tail = stored.get("tail")
        before = stored.get("matrix")
        # [B, S, Kd], [B, S, Kd], [B, S, Vd]
        q, k, v = kernels.mixed_parts(
            mixed,
            tail,
            rows.local_rows(self.conv1d.weight, self._mixed_sections),
            context.documents,
            sizes=(sizes.key_size, sizes.key_size, sizes.value_size),
            activation=self.spec.activation,
            slot=slot,
        )
        # Padding stands behind the tokens here; with no decay and no strength there, the state after it is the one
        # before.
        real = None if counts is None else torch.arange(seq, device=counts.device) < counts[:, None]
        decays = rows.local_rows(self.A_log, heads)
        g, beta = kernels.delta_gates(ba, decays, rows.local_rows(self.dt_bias, heads), real)
        q, k = (t.unflatten(-1, (-1, sizes.key_head_dim)) for t in (q, k))
        v = v.unflatten(-1, (-1, sizes.value_head_dim))
        out, matrix = delta_rule(q, k, v, g, beta, before, context.documents)
        if state is not None and tail is not None and matrix is not None:
            state.write(tail=newest(tail, mixed, counts), matrix=matrix)
        return out
