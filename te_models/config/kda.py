"""Kimi Delta Attention as data: the delta rule with a decay per channel (Kimi Team 2025, arXiv 2510.26692). No torch.

    qkvg_proj.weight  [q: C | k: C | v: C | g: R]
    fb_proj.weight    [f: R | b: heads, and rows of padding]
    f_up_proj.weight  [C, R]
    g_up_proj.weight  [C, R]
    conv1d.weight     [3 C, 1, taps], of q, k and v
    o_proj.weight     [D, C]

C is the channels of all heads. Decays (f) and output gates (g) come from R channels each; without `gate_rank` R is C,
and there are no projections up.
"""

from __future__ import annotations

import dataclasses
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
from te_models.config.settings import Settings, count, positive

CHUNK = 16  # tokens that te_models.kernels.kda computes at once; their decays are a tensor [C, C, channels]


@dataclass(frozen=True)
class KDAConfig(Settings):
    """The sizes of layers of Kimi Delta Attention.

    Raises:
        ConfigError: a size is no positive whole number.
    """

    prefix = "kda."
    num_heads: int = count(32, "Heads.")
    head_dim: int = count(128, "Channels per head of queries, keys and values.")
    conv_kernel_dim: int = count(4, "Tokens that the causal convolution sees.")
    gate_rank: int | None = count(
        None, "Rank of the projections of decays and output gates; default: they are whole."
    )
    decay_bound: float | None = positive(
        None,
        "Largest decay of a token as a logarithm, of which it is then a share; default: none (Ling 3: 5).",
    )

    @property
    def inner_size(self) -> int:
        """Channels of all heads."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True)
class KDASpec(MixerSpec):
    """o_proj(RMSNorm(o) * sigmoid(g)), o the output of the delta rule with a decay per channel on act(conv(q, k, v)).

    Attributes:
        sizes: of the heads.
        activation: of the convolution's output, as ModelConfig.hidden_act.
    """

    sizes: KDAConfig
    activation: str = "silu"

    name: ClassVar[str] = "kda"
    title: ClassVar[str] = "Kimi Delta Attention"

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        inner = self.sizes.inner_size
        heads = self.sizes.num_heads
        rank = self.sizes.gate_rank or inner
        into = (*self._mixed, Section("g", rank, rank))
        # Decays and writing strengths are kept in high precision: their error grows with the length.
        padding = -(rank + heads) % FEATURE_ALIGNMENT
        gates = (Section("f", rank, rank), Section("b", heads, heads + padding, "gate"))
        linears = [
            LinearSpec("qkvg_proj", self.hidden_size, into),
            LinearSpec("fb_proj", self.hidden_size, gates, fp8=False),
        ]
        if self.sizes.gate_rank is not None:
            up = (Section("up", inner, inner),)
            # The first makes decays, which stay in high precision as above, and the second output gates.
            linears.append(LinearSpec("f_up_proj", rank, up, fp8=False))
            linears.append(LinearSpec("g_up_proj", rank, up))
        out = (Section("o", self.hidden_size, self.hidden_size),)
        linears.append(LinearSpec("o_proj", inner, out, residual=True))
        return tuple(linears)

    @property
    def _mixed(self) -> tuple[Section, ...]:
        """The rows of q, k and v, which the convolution mixes with earlier tokens."""
        inner = self.sizes.inner_size
        return tuple(Section(name, inner, inner) for name in ("q", "k", "v"))

    @property
    def vectors(self) -> Mapping[str, int]:
        """The convolution's taps, the two parameters of the decay, and the norm of each head."""
        sizes = self.sizes
        taps = 3 * sizes.inner_size * sizes.conv_kernel_dim
        return MappingProxyType(
            {
                "conv1d": taps,
                "A_log": sizes.num_heads,
                # Decays are per channel, and so is their bias; A_log is one number per head.
                "dt_bias": sizes.inner_size,
                "o_norm": sizes.head_dim,
            }
        )

    @property
    def vector_rows(self) -> Mapping[str, tuple[Section, ...]]:
        return MappingProxyType({"conv1d": self._mixed})

    @property
    def features(self) -> Mapping[str, int]:
        features = {"hidden_size": self.hidden_size, "num_heads * head_dim": self.sizes.inner_size}
        rank = self.sizes.gate_rank
        return features if rank is None else {**features, "gate_rank": rank}

    def parallel_obstacle(self, sequence: bool) -> str:
        return (
            "tensor parallelism does not divide Kimi Delta Attention: use FSDP2 (--parallel fsdp)"
        )

    def local(self, ranks: int) -> KDASpec:
        sizes = dataclasses.replace(self.sizes, num_heads=self.sizes.num_heads // ranks)
        return dataclasses.replace(self, sizes=sizes)

    def rows_obstacle(self, ranks: int) -> str:
        return undivided_heads(self.title, "kda.num_heads", self.sizes.num_heads, ranks)

    def state_bytes(self, batch: int, slots: int, element: int) -> int:
        """Return the bytes of the convolution's last inputs, and of the FP32 state; the length changes nothing."""
        sizes = self.sizes
        tail = (sizes.conv_kernel_dim - 1) * 3 * sizes.inner_size * element
        # [heads, head_dim, head_dim], in FP32 whatever the dtype of the model
        return batch * (tail + sizes.inner_size * sizes.head_dim * FP32)
