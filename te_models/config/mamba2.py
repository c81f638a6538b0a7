"""Mamba 2 as data: a state space whose decay is one number per head and token (Dao and Gu 2024, arXiv 2405.21060).

No torch.

    zxbcdt_proj.weight   [z: H P | x: H P | b: G N | c: G N | dt: H, and rows of padding]
    conv1d.weight    [H P + 2 G N, 1, taps], of x, b and c
    out_proj.weight  [D, H P]

H heads of P channels, G groups of heads that share b and c, N numbers of state per channel.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from te_models.config.chunk_sizes import FP32
from te_models.config.layer import (
    FEATURE_ALIGNMENT,
    LinearSpec,
    MixerSpec,
    Section,
    undivided_heads,
)
from te_models.config.settings import Settings, count, positive, setting
from te_models.errors import ConfigError

ROWS = ("z", "x", "b", "c", "dt")  # of the first projection
CHUNK = 64  # tokens that te_models.kernels.state_space computes at once


@dataclass(frozen=True)
class Mamba2Config(Settings):
    """The sizes of Mamba 2 layers.

    Raises:
        ConfigError: a size is no positive whole number, or the heads are no multiple of the groups.
    """

    prefix = "mamba2."
    num_heads: int = count(128, "Heads.")
    head_dim: int = count(64, "Channels per head.")
    state_dim: int = count(128, "Numbers of state per channel.")
    num_groups: int = count(8, "Groups of heads, each with its own input and output vectors.")
    conv_kernel_dim: int = count(4, "Tokens that the causal convolution sees.")
    conv_bias: bool = setting(True, "Bias on the convolution.")
    bias: bool = setting(False, "Bias on both projections.")
    out_bias: bool | None = setting(None, "Bias on the second projection; None: as `bias`.")
    activation: str = setting(
        "silu",
        "Activation of the convolution's output: silu, gelu, gelu_pytorch_tanh or relu2.",
        choices=("silu", "gelu", "gelu_pytorch_tanh", "relu2"),
    )
    norm: str = setting(
        "gated",
        "RMSNorm per group of the gated output; of the output before its gate; or none (Falcon-H1).",
        choices=("gated", "before_gate", "none"),
    )
    multipliers: tuple[float, ...] | None = setting(
        None,
        "Five factors on the first projection's z, x, b, c and time steps (Falcon-H1).",
        least=-math.inf,
    )
    time_step_min: float | None = positive(None, "Lower bound of the time step.")
    time_step_max: float | None = positive(None, "Upper bound of the time step.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_heads % self.num_groups:
            raise ConfigError(
                f"mamba2.num_heads={self.num_heads} is not a multiple of num_groups={self.num_groups}"
            )
        # Values that change nothing are left out, so that equal models have equal configs.
        if self.multipliers is not None and set(self.multipliers) == {1.0}:
            object.__setattr__(self, "multipliers", None)
        if self.out_bias == self.bias:
            object.__setattr__(self, "out_bias", None)
        if self.multipliers is not None and len(self.multipliers) != len(ROWS):
            raise ConfigError(
                f"mamba2.multipliers has {len(self.multipliers)} entries: give one for each of {', '.join(ROWS)}"
            )

    @property
    def has_out_bias(self) -> bool:
        """Return True if the second projection has a bias."""
        return self.bias if self.out_bias is None else self.out_bias

    @property
    def factors(self) -> dict[str, float]:
        """Rows of the first projection, such as "z" -> the factor on them."""
        values = (1.0,) * len(ROWS) if self.multipliers is None else self.multipliers
        return dict(zip(ROWS, values, strict=True))

    @property
    def inner_size(self) -> int:
        """Channels of all heads."""
        return self.num_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Numbers in the input vectors, or the output vectors, of all groups."""
        return self.num_groups * self.state_dim

    @property
    def mixed_size(self) -> int:
        """Channels that the convolution mixes with earlier tokens: x, b and c."""
        return self.inner_size + 2 * self.group_size

    @property
    def time_step_limits(self) -> tuple[float, float]:
        """The bounds of the time step."""
        low = self.time_step_min
        high = self.time_step_max
        return 0.0 if low is None else low, math.inf if high is None else high


@dataclass(frozen=True)
class Mamba2Spec(MixerSpec):
    """out_proj(RMSNorm(y * silu(z))), y the output of a state space on act(conv(x, b, c)).

    Attributes:
        sizes: of the heads.
    """

    sizes: Mamba2Config

    name: ClassVar[str] = "mamba"
    title: ClassVar[str] = "Mamba 2"

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        sizes = self.sizes
        inner = sizes.inner_size
        group = sizes.group_size
        used = 2 * inner + 2 * group + sizes.num_heads
        # In the order in which Mamba 2 stores them, so that a release's tensor is copied as it is.
        into = (
            Section("z", inner, inner),
            Section("x", inner, inner),
            Section("b", group, group),
            Section("c", group, group),
            Section("dt", sizes.num_heads, sizes.num_heads + -used % FEATURE_ALIGNMENT, "gate"),
        )
        out = (Section("out", self.hidden_size, self.hidden_size),)
        return (
            LinearSpec("zxbcdt_proj", self.hidden_size, into, bias=sizes.bias),
            LinearSpec("out_proj", inner, out, bias=sizes.has_out_bias, residual=True),
        )

    @property
    def vectors(self) -> Mapping[str, int]:
        """The convolution's taps and bias, the decay and the bias of the time step, the skip, and the norm."""
        sizes = self.sizes
        heads = self.sizes.num_heads
        # A bias is one number more per channel.
        taps = sizes.mixed_size * (sizes.conv_kernel_dim + sizes.conv_bias)
        vectors = {"conv1d": taps, "A_log": heads, "dt_bias": heads, "D": heads}
        if sizes.norm != "none":
            vectors["norm"] = sizes.inner_size
        return MappingProxyType(vectors)

    @property
    def features(self) -> Mapping[str, int]:
        return {"hidden_size": self.hidden_size, "num_heads * head_dim": self.sizes.inner_size}

    def parallel_obstacle(self, sequence: bool) -> str:
        return "tensor parallelism does not divide Mamba 2: use FSDP2 (--parallel fsdp)"

    def local(self, ranks: int) -> Mamba2Spec:
        """Return one rank's heads, and the groups that they belong to: several ranks may have heads of one group."""
        sizes = dataclasses.replace(
            self.sizes,
            num_heads=self.sizes.num_heads // ranks,
            num_groups=max(1, self.sizes.num_groups // ranks),
        )
        return dataclasses.replace(self, sizes=sizes)

    def rows_obstacle(self, ranks: int) -> str:
        groups = self.sizes.num_groups
        if groups % ranks and ranks % groups:
            return (
                f"context_parallel_size={ranks} and mamba2.num_groups={groups}: one has to be a multiple of the other, "
                "since a rank's heads belong to whole groups or to one: change context_parallel_size"
            )
        return undivided_heads(self.title, "mamba2.num_heads", self.sizes.num_heads, ranks)

    def state_bytes(self, batch: int, slots: int, element: int) -> int:
        """Return the bytes of the convolution's last inputs, and of the FP32 state; the length changes nothing."""
        sizes = self.sizes
        tail = (sizes.conv_kernel_dim - 1) * sizes.mixed_size * element
        # [heads, head_dim, state_dim], in FP32 whatever the dtype of the model
        return batch * (tail + sizes.inner_size * sizes.state_dim * FP32)
