"""A gated short convolution as data (LFM2). No torch.

    y = out_proj(c * conv(b * x)),    b, c, x = in_proj(input)

D is the hidden size; the weights are

    in_proj.weight   [3D, D], rows b, c, x
    conv.weight      [D, 1, kernel_dim]
    out_proj.weight  [D, D]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from te_models.config.layer import LinearSpec, MixerSpec, Section, undivided_heads
from te_models.config.settings import Settings, count, setting


@dataclass(frozen=True)
class ShortConvConfig(Settings):
    """The size of gated short convolutions.

    Raises:
        ConfigError: a size is no positive whole number.
    """

    prefix = "short_conv."
    kernel_dim: int = count(3, "Tokens that the causal convolution sees.")
    bias: bool = setting(False, "Biases on both projections and on the convolution.")


@dataclass(frozen=True)
class ShortConvSpec(MixerSpec):
    """One layer's short convolution, or a rank's share of it.

    Attributes:
        channels: the channels of the convolution that this rank has: all D, or D over the tensor-parallel ranks.
        sizes: the length of the convolution, and whether there are biases.
    """

    channels: int
    sizes: ShortConvConfig

    name: ClassVar[str] = "conv"
    title: ClassVar[str] = "short convolution"

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        width = self.channels
        bias = self.sizes.bias
        into = tuple(Section(name, width, width) for name in ("b", "c", "x"))
        out = (Section("out", self.hidden_size, self.hidden_size),)
        return (
            LinearSpec("in_proj", self.hidden_size, into, "column", bias),
            LinearSpec("out_proj", width, out, "row", bias, residual=True),
        )

    @property
    def vectors(self) -> Mapping[str, int]:
        """The convolution's taps and their bias."""
        each = self.sizes.kernel_dim + self.sizes.bias  # per channel
        return MappingProxyType({"conv": self.channels * each})

    @property
    def features(self) -> Mapping[str, int]:
        return {"hidden_size": self.hidden_size}

    @property
    def divided(self) -> Mapping[str, int]:
        # Each channel is convolved by itself, so ranks share the channels.
        return {"hidden_size": self.channels}

    def local(self, ranks: int) -> ShortConvSpec:
        return dataclasses.replace(self, channels=self.channels // ranks)

    @property
    def divided_vectors(self) -> Mapping[str, tuple[Section, ...]]:
        """The taps, and their bias, of the channels that a rank has."""
        channels = (Section("channels", self.channels, self.channels),)
        names = ("conv.weight", "conv.bias") if self.sizes.bias else ("conv.weight",)
        return MappingProxyType(dict.fromkeys(names, channels))

    def parallel_obstacle(self, sequence: bool) -> str:
        if sequence and self.sizes.bias:
            return "sequence_parallel=True supports no short_conv.bias: use sequence_parallel=False"
        return ""

    def rows_obstacle(self, ranks: int) -> str:
        return undivided_heads(self.title, "hidden_size", self.channels, ranks)

    def state_bytes(self, batch: int, slots: int, element: int) -> int:
        """Return the bytes of the convolution's last inputs; the length changes nothing."""
        return batch * (self.sizes.kernel_dim - 1) * self.channels * element
