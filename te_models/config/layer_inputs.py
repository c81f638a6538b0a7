"""Inputs per layer as data (Gemma 4 E2B): a second table gives each token a vector for every layer. No torch.

layer_inputs.table.weight         [V', L*P]
layer_inputs.context_proj.weight  [L*P, D]
layers.<n>.layer_input.input_gate_proj.weight  [P, D]
layers.<n>.layer_input.input_out_proj.weight   [D, P]

L layers, P channels per layer, V' rows of the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from te_models.config.layer import LinearSpec, PartSpec, Section
from te_models.config.settings import Settings, count


@dataclass(frozen=True)
class LayerInputsConfig(Settings):
    """The sizes of the inputs per layer.

    Raises:
        ConfigError: a size is no positive whole number.
    """

    prefix = "layer_inputs."
    width: int = count(256, "Channels of the input of a layer.")
    vocab_size: int = count(262144, "Rows of the table: at least as many as the vocabulary has.")


@dataclass(frozen=True)
class LayerInputSpec(PartSpec):
    """norm(input_out_proj(act(input_gate_proj(x)) * input)), which a block adds after its MLP.

    Attributes:
        width: channels of the input.
        activation: as ModelConfig.hidden_act.
    """

    width: int
    activation: str = "gelu_pytorch_tanh"

    name: ClassVar[str] = "layer_input"
    title: ClassVar[str] = "inputs per layer"

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        size = self.hidden_size
        gate = (Section("gate", self.width, self.width),)
        out = (Section("out", size, size),)
        return (
            LinearSpec("input_gate_proj", size, gate),
            LinearSpec("input_out_proj", self.width, out, residual=True),
        )

    @property
    def vectors(self) -> Mapping[str, int]:
        """The norm of its output."""
        return MappingProxyType({"norm": self.hidden_size})

    @property
    def features(self) -> Mapping[str, int]:
        return {"hidden_size": self.hidden_size, "layer_inputs.width": self.width}

    def parallel_obstacle(self, sequence: bool) -> str:
        return "tensor parallelism does not divide inputs per layer: use FSDP2 (--parallel fsdp)"
