"""Gated DeltaNet as data: linear attention whose state is a matrix (Yang et al. 2024, arXiv 2412.06464). No torch.

    qkvz_proj.weight  [q: Kd | k: Kd | v: Vd | z: Vd]
    ba_proj.weight    [b: value heads | a: value heads]
    conv1d.weight     [2 Kd + Vd, 1, taps]

Kd is the channels of all key heads, Vd the channels of all value heads. Each key head serves
the same number of consecutive value heads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from te_models.config.chunk_sizes import FP32
from te_models.config.layer import LinearSpec, MixerSpec, Section, undivided_heads
from te_models.config.settings import Settings, count
from te_models.errors import ConfigError

CHUNK = 64  # tokens that te_models.kernels.delta_rule computes at once


@dataclass(frozen=True)
class DeltaNetConfig(Settings):
    """The sizes of Gated DeltaNet layers, under Hugging Face's names without their prefix `linear_`.

    Raises:
        ConfigError: a size is no positive whole number, or the value heads are no multiple of the key heads.
    """

    prefix = "linear_attention."
    num_key_heads: int = count(16, "Heads of queries and keys.")
    num_value_heads: int = count(32, "Heads of values, a multiple of the key heads.")
    key_head_dim: int = count(128, "Channels per head of queries and keys.")
    value_head_dim: int = count(128, "Channels per head of values.")
    conv_kernel_dim: int = count(4, "Tokens that the causal convolution sees.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_value_heads % self.num_key_heads:
            raise ConfigError(
                f"linear_attention.num_value_heads={self.num_value_heads} is not a multiple of "
                f"num_key_heads={self.num_key_heads}"
            )

    @property
    def key_size(self) -> int:
        """Channels of all key heads."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        """Channels of all value heads."""
        return self.num_value_heads * self.value_head_dim

    @property
    def mixed_size(self) -> int:
        """Channels that the convolution mixes with earlier tokens: q, k and v."""
        return 2 * self.key_size + self.value_size


@dataclass(frozen=True)
class DeltaNetSpec(MixerSpec):
    """out_proj(RMSNorm(o) * silu(z)), o the output of the gated delta rule on act(conv(q, k, v)).

    Attributes:
        sizes: of this rank's heads.
        activation: of the convolution's output, as ModelConfig.hidden_act.
    """

    sizes: DeltaNetConfig
    activation: str = "silu"

    name: ClassVar[str] = "linear_attn"
    title: ClassVar[str] = "linear attention"

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        keys = self.sizes.key_size
        values = self.sizes.value_size
        heads = self.sizes.num_value_heads
        mixed = Section("q", keys, keys), Section("k", keys, keys), Section("v", values, values)
        # Logits of gates, one per head, which are kept in high precision: their error grows with the length.
        logits = Section("b", heads, heads, "gate"), Section("a", heads, heads, "gate")
        out = (Section("out", self.hidden_size, self.hidden_size),)
        return (
            LinearSpec(
                "qkvz_proj", self.hidden_size, (*mixed, Section("z", values, values)), "column"
            ),
            LinearSpec("ba_proj", self.hidden_size, logits, "column", fp8=False),
            LinearSpec("out_proj", values, out, "row", residual=True),
        )

    @property
    def vectors(self) -> Mapping[str, int]:
        """The convolution's taps, the two parameters of the decay, and the norm of each value head."""
        sizes = self.sizes
        heads = self.sizes.num_value_heads
        taps = sizes.mixed_size * sizes.conv_kernel_dim
        return MappingProxyType(
            {"conv1d": taps, "A_log": heads, "dt_bias": heads, "norm": sizes.value_head_dim}
        )

    @property
    def features(self) -> Mapping[str, int]:
        heads = {
            "num_value_heads * value_head_dim": self.sizes.value_size,
            "q, k, v and z": self.linears[0].outputs,
        }
        return {"hidden_size": self.hidden_size, **heads}

    @property
    def divided(self) -> Mapping[str, int]:
        return {"linear_attention.num_key_heads": self.sizes.num_key_heads}

    def local(self, ranks: int) -> DeltaNetSpec:
        keys = self.sizes.num_key_heads // ranks
        values = self.sizes.num_value_heads // ranks
        return dataclasses.replace(
            self, sizes=dataclasses.replace(self.sizes, num_key_heads=keys, num_value_heads=values)
        )

    @property
    def divided_vectors(self) -> Mapping[str, tuple[Section, ...]]:
        """The taps of the channels and the decays of the heads that a rank has."""
        heads = (Section("heads", self.sizes.num_value_heads, self.sizes.num_value_heads),)
        # q, k and v: z does not go through the convolution. The norm, which all heads share, is not divided.
        mixed = self.linears[0].sections[:3]
        return MappingProxyType({"conv1d.weight": mixed, "A_log": heads, "dt_bias": heads})

    def rows_obstacle(self, ranks: int) -> str:
        return undivided_heads(
            self.title, "linear_attention.num_key_heads", self.sizes.num_key_heads, ranks
        )

    def state_bytes(self, batch: int, slots: int, element: int) -> int:
        """Return the bytes of the convolution's last inputs, and of the FP32 state; the length changes nothing."""
        sizes = self.sizes
        # The convolution sees the new token and so many before it; only those are kept.
        tail = (sizes.conv_kernel_dim - 1) * sizes.mixed_size * element
        # [value heads, key_head_dim, value_head_dim], in FP32 whatever the dtype of the model
        return batch * (
            tail + sizes.num_value_heads * sizes.key_head_dim * sizes.value_head_dim * FP32
        )
