"""Mixtures of experts as data: the group of fields `moe` of ModelConfig, and the description of such an MLP. No torch.

The weights of expert e of width F = moe_intermediate_size, with D = hidden_size (or latent_size, if given):

    gate_up_proj.weight<e>  [gate: F | up: F, D]
    down_proj.weight<e>     [D, F]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from te_models.config.layer import (
    FeedforwardSpec,
    LayerSpec,
    LinearSpec,
    Section,
)
from te_models.config.settings import Settings, count, positive, setting
from te_models.errors import ConfigError, refuse

MISSING = dataclasses.MISSING
# te.RMSNorms with `separate_norms`: of the chosen experts' input, of their sum, and of the shared expert's output.
SEPARATE_NORMS = ("expert_input_norm", "expert_output_norm", "shared_output_norm")
MANY_RANKS = 8  # beyond this number, a message lists the first two ranks and the last


@dataclass(frozen=True, kw_only=True)
class MoEConfig(Settings):
    """The experts of a model, of which a router chooses `num_experts_per_tok` for each token.

    The router's scores are the softmax, or the sigmoid, of its logits. The experts with the highest scores are chosen;
    among equal scores, the expert with the lowest index. With `n_group` > 1 the experts form groups, a group is ranked
    by the sum of its `group_scores` highest scores, and only the `topk_group` best groups take part (DeepSeek-V3,
    arXiv 2412.19437). With `expert_bias` (the same paper) a number per expert is added to its score for the choice, but
    not to the weight of its output.

    Raises:
        ConfigError: an unknown keyword, or values that do not fit each other.
    """

    prefix = "moe."
    num_experts: int = count(MISSING, "Experts per layer.")
    num_experts_per_tok: int = count(MISSING, "Experts that each token goes through.")
    moe_intermediate_size: int = count(MISSING, "Width of an expert.")
    shared_expert_intermediate_size: int = setting(
        0, "Width of the expert that all tokens go through; 0: none."
    )
    shared_expert_gate: bool = setting(
        False, "Multiply the shared expert by a sigmoid gate (Qwen2-MoE)."
    )
    router_scores: str = setting(
        "softmax",
        "Function of the router's logits: softmax or sigmoid.",
        choices=("softmax", "sigmoid"),
    )
    router_fp32: bool = setting(
        False, "Compute the router's logits in FP32 (GLM-4.5, DeepSeek-V3)."
    )
    norm_topk_prob: bool = setting(True, "Divide the weights of a token's experts by their sum.")
    norm_topk_eps: float | None = positive(
        None, "Added to that sum; default: 1e-20 for sigmoid scores, nothing for softmax."
    )
    routed_scaling_factor: float = positive(1.0, "Factor on these weights.")
    n_group: int = count(1, "Groups of experts.")
    topk_group: int = count(1, "Groups of which a token's experts may come.")
    group_scores: int = count(2, "Scores of a group whose sum ranks it; 1 in DeepSeek-V2.")
    latent_size: int | None = count(
        None,
        "Width to which tokens are projected for the chosen experts; default: none (Nemotron 3).",
    )
    scale_inputs: bool = setting(
        False,
        "The weights of a token's experts multiply what those read, instead of what they return (Llama 4).",
    )
    bias: bool = setting(
        False, "Biases on the router and on the chosen experts' projections (gpt-oss)."
    )
    swiglu_limit: float | None = positive(
        None,
        "Clamped SwiGLU (up + 1) * gate * sigmoid(alpha * gate): the bound of gate and of |up| (gpt-oss).",
    )
    swiglu_alpha: float = positive(1.702, "The alpha of clamped SwiGLU.")
    separate_norms: bool = setting(
        False,
        "Experts and the shared one have norms of their own, and a normed router a scale per expert (Gemma 4).",
    )
    output_norm: bool = setting(False, "RMSNorm on the sum of all experts (A.X K1).")
    expert_bias: bool = setting(
        False, "A number per expert, added to its score for the choice (DeepSeek-V3)."
    )
    router_aux_loss_coef: float = setting(0.001, "Factor of the load-balancing loss in training.")
    router_z_loss_coef: float = setting(
        0.0, "Factor of the mean squared logsumexp of the logits in training."
    )
    router_jitter_noise: float = setting(
        0.0, "Training multiplies the MLP's input by up to 1 +- this."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse(self._mistakes(), ConfigError)

    def _mistakes(self) -> Iterator[str]:
        if self.num_experts % self.n_group or self.topk_group > self.n_group:
            yield f"moe.n_group={self.n_group} must divide num_experts and be at least topk_group"
        if self.n_group > 1 and self.num_experts < self.group_scores * self.n_group:
            yield f"moe.group_scores={self.group_scores} is more than the experts of one of {self.n_group} groups"
        choice = self.num_experts // self.n_group * self.topk_group
        if self.num_experts_per_tok > choice:
            yield f"moe.num_experts_per_tok={self.num_experts_per_tok} is more than the {choice} experts to choose from"
        if self.shared_expert_gate and not self.shared_expert_intermediate_size:
            yield "moe.shared_expert_gate needs a shared expert: give shared_expert_intermediate_size"
        if self.scale_inputs and self.bias:
            yield "moe.scale_inputs has experts without biases: leave out moe.bias"
        if self.separate_norms and not self.shared_expert_intermediate_size:
            yield "moe.separate_norms needs a shared expert: give shared_expert_intermediate_size"


@dataclass(frozen=True)
class MoESpec(FeedforwardSpec):
    """An MLP of experts: the weighted sum of a token's chosen experts, plus the shared expert if there is one."""

    experts: MoEConfig
    activation: str = "silu"
    gate: bool = True
    limit: float | None = None  # the bound of silu(gate) and |up| in the chosen experts
    shared_limit: float | None = None  # the same bound in the shared expert
    # Expert-parallel ranks, between which the experts are divided; each has the whole router and shared expert.
    ranks: int = 1

    name: ClassVar[str] = "mlp"
    title: ClassVar[str] = "experts"

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """The router, the experts' projections, and the shared expert's."""
        experts = self.experts
        hidden = self.hidden_size
        logits = (Section("experts", experts.num_experts, experts.num_experts, "gate"),)
        linears = [LinearSpec("router", hidden, logits, bias=experts.bias, fp8=False)]
        # Experts may work in a narrower space, which two more linears lead into and out of (Nemotron 3).
        width = experts.latent_size or hidden
        local_experts = experts.num_experts // self.ranks
        linears += self._projections(
            prefix="",
            hidden=width,
            size=experts.moe_intermediate_size,
            experts=local_experts,
            bias=experts.bias,
        )
        if experts.shared_expert_intermediate_size:
            linears += self._projections(
                prefix="shared_",
                hidden=hidden,
                size=experts.shared_expert_intermediate_size,
                experts=0,
                bias=False,
            )
        if experts.latent_size is not None:
            linears += [
                LinearSpec("latent_in_proj", hidden, (Section("latent", width, width),)),
                LinearSpec(
                    "latent_out_proj", width, (Section("out", hidden, hidden),), residual=True
                ),
            ]
        if experts.shared_expert_gate:
            linears.append(
                LinearSpec("shared_gate", hidden, (Section("gate", 1, 1, "gate"),), fp8=False)
            )
        return tuple(linears)

    @property
    def vectors(self) -> Mapping[str, int]:
        """Sizes of the parameters beside the te.Linears: biases and scales of the router, and weights of norms."""
        experts = self.experts
        width = self.hidden_size
        vectors = {"expert_bias": experts.num_experts} if experts.expert_bias else {}
        if experts.separate_norms:
            vectors |= {"router_scale": width, "expert_scale": experts.num_experts}
            vectors |= dict.fromkeys(SEPARATE_NORMS, width)
        if experts.output_norm:
            vectors["output_norm"] = width
        return vectors

    @property
    def obstacles(self) -> tuple[str, ...]:
        """The fields that rule out the fused SwiGLU kernels, which compute silu(gate) * up and keep padding at zero."""
        experts = self.experts
        obstacles = {
            "hidden_act": self.activation != "silu",
            "mlp_gate": not self.gate,
            "moe.swiglu_limit": experts.swiglu_limit,
            "moe.bias": experts.bias,
            "moe.scale_inputs": experts.scale_inputs,
            "expert_limits": self.limit is not None,
            "mlp_limits": self.shared_limit is not None,
        }
        return tuple(name for name, is_set in obstacles.items() if is_set)

    @property
    def graph_obstacle(self) -> str:
        """Return why a CUDA graph cannot contain the MLP where the rows per expert are counted on the host.

        te_models.model.graph_obstacle knows where kernels count them on the device instead.
        """
        return "how many rows each expert gets depends on the tokens, and the host has to know it"

    @property
    def features(self) -> Mapping[str, int]:
        shared_size = self.experts.shared_expert_intermediate_size
        features = {
            "hidden_size": self.hidden_size,
            "moe_intermediate_size": self.experts.moe_intermediate_size,
        }
        if self.experts.latent_size is not None:
            features["latent_size"] = self.experts.latent_size
        if shared_size:
            features["shared_expert_intermediate_size"] = shared_size
        return features

    def parallel_obstacle(self, sequence: bool) -> str:
        return "tensor parallelism does not divide experts: use FSDP2 (--parallel fsdp), which shards them"

    @property
    def num_active_parameters(self) -> int:
        idle = self.experts.num_experts - self.experts.num_experts_per_tok
        active = self.num_parameters
        for linear in self.linears:
            if linear.experts:
                # A grouped linear has one GEMM per expert; the token skips the GEMMs of idle experts.
                active -= linear.num_parameters // linear.gemms * idle
        return active

    def rows_of(self, linear: LinearSpec, tokens: int) -> int:
        """Return the number of rows that a te.Linear multiplies: a token has one row per chosen expert."""
        if linear.experts:
            return tokens * self.experts.num_experts_per_tok
        return tokens

    def _projections(
        self, prefix: str, *, hidden: int, size: int, experts: int, bias: bool
    ) -> list[LinearSpec]:
        """Return the projections from `hidden` to `size` channels and back, per expert; `experts` 0: of a plain MLP."""
        names = ("gate", "up") if self.gate else ("up",)
        gate_up = tuple(Section(name, size, size) for name in names)
        down = (Section("down", hidden, hidden),)
        return [
            LinearSpec(f"{prefix}gate_up_proj", hidden, gate_up, bias=bias, experts=experts),
            LinearSpec(f"{prefix}down_proj", size, down, bias=bias, residual=True, experts=experts),
        ]


def with_local_experts(layers: tuple[LayerSpec, ...], ranks: int) -> tuple[LayerSpec, ...]:
    """Return the layers of one of `ranks` ranks, between which the experts are divided.

    Raises:
        ConfigError: there are no experts, or their number is not a multiple of `ranks`.
    """
    if not any(isinstance(layer.mlp, MoESpec) for layer in layers):
        raise ConfigError(
            "expert parallelism divides the experts of a model, and this one has none: use fsdp"
        )
    local = []
    for layer in layers:
        if isinstance(layer.mlp, MoESpec):
            number = layer.mlp.experts.num_experts
            if number % ranks:
                raise ConfigError(
                    f"num_experts={number} cannot be divided between {ranks} ranks: give an expert-parallel size that "
                    f"divides {number}"
                )
            # Every rank describes its own experts only; the router still chooses among all of them.
            layer = dataclasses.replace(layer, mlp=dataclasses.replace(layer.mlp, ranks=ranks))
        local.append(layer)
    return tuple(local)


def places_of_experts(layers: tuple[LayerSpec, ...], ranks: int) -> str:
    """Say which experts each rank has, such as "0 to 3 on rank 0, 4 to 7 on rank 1 of every 2".

    Raises:
        ConfigError: as `with_local_experts` does.
    """
    counts = []
    for layer in with_local_experts(layers, ranks):
        if isinstance(layer.mlp, MoESpec):
            counts.append(layer.mlp.experts.num_experts)
    each = counts[0] // ranks  # all layers have equally many
    phrases = [f"{rank * each} to {(rank + 1) * each - 1} on rank {rank}" for rank in range(ranks)]
    if ranks > MANY_RANKS:
        phrases = [*phrases[:2], "...", phrases[-1]]
    return f"{', '.join(phrases)} of every {ranks}"
