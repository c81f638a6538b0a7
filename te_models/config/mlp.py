"""The MLP as data. No torch.

gate_up_proj.weight  [gate: F | up: F]    [up: F] without a gate; F intermediate_size
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from te_models.config.layer import FeedforwardSpec, LinearSpec, Section

# The activations that the kernels of an engine compute together with the FP8 input of down_proj, gated or not.
HANDED_OVER = ("silu", "gelu_pytorch_tanh", "relu2")


@dataclass(frozen=True)
class MLPSpec(FeedforwardSpec):
    """down_proj(act(gate) * up), or down_proj(act(up)). ModelConfig documents the fields."""

    intermediate_size: int
    activation: str = "silu"
    gate: bool = True
    bias: bool = False
    limit: float | None = None  # of silu(gate) and |up|
    # Two factors: on the gate before its activation, and on the output.
    multipliers: tuple[float, ...] | None = None

    name: ClassVar[str] = "mlp"
    title: ClassVar[str] = "MLP"

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """The te.Linears: gate_up_proj and down_proj."""
        size = self.intermediate_size
        gate_up = [Section("up", size, size)]
        if self.gate:
            gate_up.insert(0, Section("gate", size, size))
        down = (Section("down", self.hidden_size, self.hidden_size),)
        return (
            LinearSpec("gate_up_proj", self.hidden_size, tuple(gate_up), "column", self.bias),
            LinearSpec("down_proj", size, down, "row", self.bias, residual=True),
        )

    @property
    def obstacles(self) -> tuple[str, ...]:
        """The names of the settings for which no kernel computes the activation with down_proj's FP8 input."""
        obstacles = {
            "hidden_act": self.activation not in HANDED_OVER,
            "mlp_bias": self.bias,  # it would be added to rows of padding too, which must stay 0
            "mlp_limits": self.limit is not None,
            "mlp_multipliers": self.multipliers is not None,
        }
        return tuple(name for name, is_set in obstacles.items() if is_set)

    @property
    def features(self) -> Mapping[str, int]:
        return {"hidden_size": self.hidden_size, "intermediate_size": self.intermediate_size}

    @property
    def divided(self) -> Mapping[str, int]:
        return {"intermediate_size": self.intermediate_size}

    def local(self, ranks: int) -> MLPSpec:
        return dataclasses.replace(self, intermediate_size=self.intermediate_size // ranks)

    def parallel_obstacle(self, sequence: bool) -> str:
        if sequence and self.bias:
            return "sequence_parallel=True supports no mlp_bias: use sequence_parallel=False"
        return ""
