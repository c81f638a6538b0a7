"""A mixture of experts, built from te.GroupedLinear and te.Linear. Shapes: te_models/model/router.py and block.py.

Tokens go to their experts and nowhere else: none is dropped, and padding reaches no expert. Each expert's rows are
padded with zeros to the alignment of the recipe, which changes no amax.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_models.config.moe import SEPARATE_NORMS, MoESpec
from te_models.kernels import handover
from te_models.kernels.dispatch import Kernels
from te_models.kernels.expert_rows import Route, combine, dispatch
from te_models.kernels.unit_norm import unit_norm
from te_models.model.expert_parallel import Exchange
from te_models.model.forward_context import ForwardContext
from te_models.model.gathered_tokens import GatheredTokens
from te_models.model.part import Feedforward
from te_models.model.router import Places, choose, describe, places, weights_of
from te_models.model.te_modules import Factory, first_rows, pad_rows


class ExpertChoice(NamedTuple):
    """The choice of a layer's router, and the way of tokens to the experts."""

    chosen: Tensor  # int64 [T, k]: the experts of each token of this rank
    places: Places  # of the tokens whose rows this rank makes, which are all ranks' where `gathered` is not None
    counts: Tensor  # int64 [E]: this rank's tokens of each expert
    exchange: Exchange | None  # of rows with the ranks of other experts
    gathered: GatheredTokens | None  # the way of the tokens of all ranks to each


class Routed(NamedTuple):
    """The result of `Experts.hidden`: the input of down_proj, and the weights and places for the sum after it.

    With `joint` it is the input of gate_up_proj instead, of which both projections are one operation.
    """

    hidden: Tensor  # [R, F]; with `joint` tokens [T, D], or the rows [R, D] of this rank's experts
    joint: bool
    weights: Tensor  # FP32 [T, k], of the tokens of all ranks where they are gathered
    choice: ExpertChoice
    count: int  # N
    shared: Tensor | None  # [N, Fs], the input of shared_down_proj
    gate: Tensor | None  # [N, 1], the factor of the shared expert


class Experts(Feedforward[MoESpec]):
    """sum over the chosen experts of weight * down_proj(silu(gate) * up), and a shared expert if there is one.

    A router, a linear outside FP8, chooses the experts of each token (te_models.model.router).
    """

    entry = None  # the router takes BF16, and each expert quantizes its own rows

    def __init__(self, spec: MoESpec, layer: int, factory: Factory) -> None:
        super().__init__(spec, layer, factory)
        for linear in spec.linears:
            self.add_module(linear.name, factory.linear(linear))
        # In FP32, as in transformers: differences between experts are small.
        if spec.experts.expert_bias:
            bias = torch.zeros(spec.experts.num_experts, device=factory.device)
            self.expert_bias = nn.Parameter(bias, requires_grad=False)
        self.eps = factory.eps
        if spec.experts.separate_norms:
            for name in SEPARATE_NORMS:
                self.add_module(name, factory.norm(spec.hidden_size))
            self.router_scale = factory.vector(spec.hidden_size)
            self.expert_scale = factory.vector(spec.experts.num_experts)
        self.output_norm = factory.norm(spec.hidden_size) if spec.experts.output_norm else None
        self.router_logits = nn.Identity()  # where hooks see them
        self.ep = factory.ep
        self.jitters = spec.experts.router_jitter_noise > 0

    def initialize(self, name: str, values: Tensor, std: float, residual_std: float) -> None:
        """Set the initial values; biases of the choice are zeros, and scales are ones."""
        if name == "expert_bias":
            values.zero_()
        elif name in ("router_scale", "expert_scale"):
            values.fill_(1.0)
        else:
            super().initialize(name, values, std, residual_std)

    def hidden(self, x: Tensor, context: ForwardContext) -> Routed:
        """Return the input of down_proj, of the rows of all experts, from x [N, D]."""
        return self.hidden_with_residual(x, x, context)

    def hidden_with_residual(self, x: Tensor, residual: Tensor, context: ForwardContext) -> Routed:
        """Return the input of down_proj; with `separate_norms` x is for the shared expert, `residual` for others."""
        shared_input = x
        x, routed = self._inputs(x, residual)
        return self._hidden(x, routed, shared_input, context)

    def _inputs(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs [N, D] of the chosen experts and of the router."""
        if not self.spec.experts.separate_norms:
            return x, x
        routed = unit_norm(residual, self.eps) * self.router_scale
        return self.get_submodule("expert_input_norm")(residual), routed * x.shape[1] ** -0.5

    def _hidden(
        self, x: Tensor, routed: Tensor, shared_input: Tensor, context: ForwardContext
    ) -> Routed:
        """Return the input of down_proj from the inputs of experts, router and shared expert, each [N, D]."""
        moe = self.spec.experts
        # The rows after them pad x to the alignment of the recipe: no expert gets those.
        count = context.batch * context.seq
        # Before everything else: transformers multiplies the hidden states themselves.
        if self.jitters and self.training:
            # Router, experts and shared expert read the same noise.
            x = routed = shared_input = self._jittered(x)
        tokens = first_rows(self._latent(x, context), count)  # [T, D or L]
        # Padding is cut off before the choice, or experts would get rows of zeros, and the balance would count them.
        logits = first_rows(self._logits(routed, context), count)
        logits = self.router_logits(logits)  # FP32 [T, E]

        kernels = context.kernels.expert_rows
        gate_up = self.get_submodule("gate_up_proj")
        down = self.get_submodule("down_proj")
        on_device = context.counts_on_device(gate_up, down)

        # A recompute repeats the choice instead of making it again: logits that differ in the last bit could send a
        # token elsewhere, and the exchange with other ranks would not match.
        choice, first = context.recompute.decided_once(
            self.layer, lambda: self._choose_experts(logits, on_device, context)
        )
        chosen, where, counts, exchange, gathered = choice
        # A recompute has to save what the first pass did.
        routing = describe(logits, counts, context.routed, moe)
        if first:
            context.routing.layers.append(routing)
        local_places = exchange.places if exchange else where
        route = Route(where.token, where.row, kernels)
        joint = self._joins() and context.experts_join(gate_up, down)
        # The weights are not part of the choice that a recompute repeats: their gradient goes through the logits, so a
        # recompute has to build this graph again.
        weights = self._weights(logits, chosen)
        if gathered is not None:
            tokens = gathered.to_all(tokens)
            weights = gathered.weights_to_all(weights)
        if moe.scale_inputs:
            # Llama 4 multiplies the inputs of experts by their weights, not the outputs: then the sum has weights of 1.
            scaled = _scaled(tokens, weights, route)  # [R, D]
            rows = self._separate(scaled, local_places, exchange, None, context)
            weights = torch.ones_like(weights)
        elif not joint:
            rows = self._separate(tokens, local_places, exchange, route, context)
        elif exchange is None:
            # The joint kernels gather the rows of the experts from the tokens themselves.
            rows = tokens
        else:
            rows = exchange.to_experts(dispatch(tokens, route.token, route.row, route.kernels))
        shared_hidden, shared_gate = self._shared(shared_input, context)
        return Routed(
            hidden=rows,
            joint=joint,
            weights=weights,
            choice=choice,
            count=len(x),
            shared=shared_hidden,
            gate=shared_gate,
        )

    def _latent(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return the input of experts [N, L], which some models make narrower than x [N, D] first."""
        if self.spec.experts.latent_size is None:
            return x
        return context.linear(self.get_submodule("latent_in_proj"), x)

    def _joins(self) -> bool:
        """Return whether the kernels can run these experts as one operation, from tokens to their sums.

        It keeps neither the rows of all experts nor what lies between the projections.
        """
        swiglu = self.spec.activation == "silu" and self.spec.gate and self.spec.limit is None
        return swiglu and not self.spec.experts.scale_inputs

    def _jittered(self, x: Tensor) -> Tensor:
        """Return x [N, D] with multiplicative noise (Switch Transformer), which only training has."""
        noise = self.spec.experts.router_jitter_noise
        return x * torch.empty_like(x).uniform_(1 - noise, 1 + noise)

    def _choose_experts(
        self, logits: Tensor, on_device: bool, context: ForwardContext
    ) -> ExpertChoice:
        """Return the choice of experts by logits [T, E]."""
        moe = self.spec.experts
        kernels = context.kernels.expert_rows
        bias = self.expert_bias if moe.expert_bias else None
        chosen = choose(logits, bias, context.routed, moe, kernels)
        if self.ep.size == 1:
            token_places = places(
                chosen,
                moe.num_experts,
                context.alignment,
                on_device=on_device,
                kernels=kernels,
            )
            return ExpertChoice(
                chosen, token_places, token_places.counts, exchange=None, gathered=None
            )
        # Where the host has to know the numbers of rows anyway, rows are sent, whose sums are rounded once.
        gathered = self.ep.gathered if context.ranks_alike and on_device else None
        if gathered is not None:
            held = self.ep.held
            token_places = places(
                gathered.local_choice(chosen, held, self.ep.rank),
                held,
                context.alignment,
                on_device=on_device,
                kernels=kernels,
            )
            every = torch.arange(moe.num_experts, device=chosen.device)
            counts = (chosen[..., None] == every).sum((0, 1))
            return ExpertChoice(chosen, token_places, counts, exchange=None, gathered=gathered)
        # The rows that go to other ranks need no padding; the ranks pad what arrives.
        sent = places(chosen, moe.num_experts, alignment=1, on_device=True, kernels=kernels)
        where, exchange = self.ep.exchange(sent, context.alignment, kernels)
        return ExpertChoice(chosen, where, where.counts, exchange, gathered=None)

    def _weights(self, logits: Tensor, chosen: Tensor) -> Tensor:
        """Return the weights of the chosen experts, FP32 [T, k]; at padding they mean nothing."""
        weights = weights_of(logits, chosen, self.spec.experts)
        if not self.spec.experts.separate_norms:
            return weights
        return weights * self.expert_scale.float()[chosen.clamp(max=logits.shape[1] - 1)]

    def _separate(
        self,
        x: Tensor,
        local_places: Places,
        exchange: Exchange | None,
        route: Route | None,
        context: ForwardContext,
    ) -> Tensor:
        """Return the input of down_proj [R, F], where gate_up_proj is an operation of its own.

        x are tokens [T, D], or without a `route` the rows of all experts.
        """
        gate_up = self.get_submodule("gate_up_proj")
        if exchange is None:
            both = context.grouped(gate_up, x, local_places.rows, route)  # [R, 2F]
        else:
            rows = x if route is None else dispatch(x, route.token, route.row, route.kernels)
            both = context.grouped(gate_up, exchange.to_experts(rows), local_places.rows)
        real = (
            (local_places.token < len(local_places.row))[:, None] if self._pads(context) else None
        )
        return self._activated(both, "", context, real)

    def _pads(self, context: ForwardContext) -> bool:
        """Return whether a bias makes rows of padding nonzero, which would enter the next amax."""
        return self.spec.experts.bias and context.alignment > 1

    def output(self, hidden: Routed, context: ForwardContext) -> Tensor:
        """Return [N, D]."""
        rows, joint, weights, choice, count, shared_hidden, gate = hidden
        where = choice.places
        exchange = choice.exchange
        local_places = exchange.places if exchange else where
        route = Route(where.token, where.row, context.kernels.expert_rows)
        if joint:
            e = self.spec.experts
            # [T, D], or of all rows [R, D]
            out = context.experts(
                up=self.get_submodule("gate_up_proj"),
                down=self.get_submodule("down_proj"),
                x=rows,
                gates=weights if exchange is None else None,
                rows=local_places.rows,
                route=route if exchange is None else None,
                limit=e.swiglu_limit,
                alpha=1.0 if e.swiglu_limit is None else e.swiglu_alpha,
                padding=(local_places.token, len(local_places.row))
                if self._pads(context)
                else None,
            )
        else:
            out = self._projected(rows, local_places, context)  # [R, D]
        if exchange is not None:
            out = exchange.from_experts(out)
        # The joint kernels sum the rows of a token themselves, unless those come from other ranks.
        if exchange is not None or not joint:
            out = combine(out, weights, route.token, route.row, route.kernels)
        if choice.gathered is not None:
            out = choice.gathered.from_all(out)
        # Back to N rows, for the linears that follow.
        out = pad_rows(out, count)
        if self.spec.experts.latent_size is not None:
            out = context.linear(self.get_submodule("latent_out_proj"), out)
        if shared_hidden is not None:
            shared_out = context.linear(self.get_submodule("shared_down_proj"), shared_hidden)
            if self.spec.experts.separate_norms:
                out = self.get_submodule("expert_output_norm")(out)
                shared_out = self.get_submodule("shared_output_norm")(shared_out)
            # The shared expert sees every token; its gate [N, 1] is a sigmoid.
            out = out + (shared_out if gate is None else shared_out * gate)
        return out if self.output_norm is None else self.output_norm(out)

    def _projected(self, hidden: Tensor, local_places: Places, context: ForwardContext) -> Tensor:
        """Return the rows of the experts [R, D], where down_proj is an operation of its own."""
        down = self.get_submodule("down_proj")
        with context.recompute.discarding(hidden, context.autocasts.in_fp8(down)):
            return context.grouped(down, hidden, local_places.rows)

    def _logits(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return the router's logits of x [N, D], FP32 [N, E]; it never runs in FP8."""
        router = self.get_submodule("router")
        if self.spec.experts.router_fp32:
            # Scores of near-equal experts differ by less than BF16 resolves; the families that say so choose by FP32
            # logits.
            return _in_fp32(router, x.float())
        return context.linear(router, x).float()

    def _activated(
        self, gate_up: Tensor, prefix: str, context: ForwardContext, real: Tensor | None = None
    ) -> Tensor:
        """Return the input [n, F] of the projection down, from the output [n, 2F] of gate and up.

        Zeros where `real`, bool [n, 1], is False.
        """
        producer = context.neighbour(self.get_submodule(f"{prefix}gate_up_proj"))
        consumer = context.neighbour(self.get_submodule(f"{prefix}down_proj"))
        if not self.spec.obstacles:
            return context.kernels.activate(gate_up, producer, consumer)
        forward, backward = self._activation_and_backward(prefix, context.kernels)

        def activation(both: Tensor) -> Tensor:
            out = forward(both)
            return out if real is None else out * real

        return handover.swiglu(gate_up, producer, consumer, activation, backward)

    def _activation_and_backward(
        self, prefix: str, kernels: Kernels
    ) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]:
        """Return the activation of [n, 2F], and its gradient from (dy, input), of the experts or the shared one."""
        e = self.spec.experts
        limit = self.spec.shared_limit if prefix else self.spec.limit
        if limit is not None:
            return (
                lambda both: kernels.limited_swiglu(both, limit),
                lambda dy, both: kernels.limited_swiglu_backward(dy, both, limit),
            )
        cap = e.swiglu_limit
        if cap is not None:
            return (
                lambda both: kernels.clamped_swiglu(both, cap, e.swiglu_alpha),
                lambda dy, both: kernels.clamped_swiglu_backward(dy, both, cap, e.swiglu_alpha),
            )
        kind = self.spec.activation
        gate = self.spec.gate
        return (
            lambda both: kernels.mlp_activation(both, kind, gate),
            lambda dy, both: kernels.mlp_activation_backward(dy, both, kind, gate),
        )

    def _shared(self, x: Tensor, context: ForwardContext) -> tuple[Tensor | None, Tensor | None]:
        """Return the input of the shared expert's projection down [N, Fs] and its gate [N, 1], from x [N, D]."""
        moe = self.spec.experts
        if not moe.shared_expert_intermediate_size:
            return None, None
        hidden = self._activated(
            context.linear(self.get_submodule("shared_gate_up_proj"), x), "shared_", context
        )
        if not moe.shared_expert_gate:
            return hidden, None
        return hidden, torch.sigmoid(context.linear(self.get_submodule("shared_gate"), x))


def _scaled(tokens: Tensor, weights: Tensor, route: Route) -> Tensor:
    """Return the rows of all experts [R, D], each the token [T, D] of a row times its weight, of FP32 [T, k]."""
    rows = dispatch(tokens, route.token, route.row, route.kernels)
    # The places of padding are R, behind all rows.
    factors = weights.new_zeros(len(rows) + 1)
    factors = factors.index_copy(0, route.row.flatten(), weights.flatten())[:-1]  # [R]
    return rows * factors[:, None].to(rows.dtype)


def _in_fp32(linear: nn.Module, x: Tensor) -> Tensor:
    """Return a te.Linear, perhaps with adapters, of x FP32 [N, I], with its weights in FP32: [N, O]."""
    if hasattr(linear, "base_layer"):  # one with adapters
        return linear(x, run=_in_fp32)
    bias = linear.get_parameter("bias").float() if linear.use_bias else None
    return F.linear(x, linear.get_parameter("weight").float(), bias)
