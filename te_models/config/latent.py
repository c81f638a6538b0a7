"""Multi-head latent attention as data: keys and values of all heads come from one latent per token. No torch.

    qkv_a_proj.weight  [q_a: Rq | kv_a: R | k_rope: P, and padding]     [q: A*(M+P) | kv_a | k_rope] without Rq
    q_b_proj.weight    [q: A*(M+P)]    the M channels of a head without RoPE, then the P that rotate
                       With a gate per head A rows g follow, and the padding comes after them.
    kv_b_proj.weight   [kv: A*(M+V)]   of each head its key's M channels, then its value's V

A attention heads, Rq q_lora_rank, R kv_lora_rank, M qk_nope_head_dim, P qk_rope_head_dim, V v_head_dim. The P rotated
channels of a key are the same in all heads. DeepSeek-AI 2024, arXiv 2405.04434.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from te_models.config.attention import SoftmaxAttentionSpec
from te_models.config.layer import FEATURE_ALIGNMENT, LinearSpec, Section
from te_models.config.settings import Settings, count, positive


@dataclass(frozen=True)
class LatentConfig(Settings):
    """The sizes of latent attention, under Hugging Face's names.

    Raises:
        ConfigError: a size is no positive whole number.
    """

    prefix = "latent_attention."
    q_lora_rank: int | None = count(
        None, "Channels of the latent of queries; None: they have none."
    )
    kv_lora_rank: int = count(512, "Channels of the latent of keys and values.")
    qk_nope_head_dim: int = count(128, "Channels per head of queries and keys without RoPE.")
    qk_rope_head_dim: int = count(64, "Channels per head of queries and keys with RoPE.")
    v_head_dim: int = count(128, "Channels per head of values.")
    norm_eps: float = positive(1e-6, "Epsilon of the norms of the latents.")

    @property
    def qk_head_dim(self) -> int:
        """Channels per head of queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def width(self) -> int:
        """Channels per head on which attention runs: its kernels want queries, keys and values of the same width."""
        return max(self.qk_head_dim, self.v_head_dim)


@dataclass(frozen=True, kw_only=True)
class LatentAttentionSpec(SoftmaxAttentionSpec):
    """o_proj(attention(q, k, v)), q from a latent of queries or the input, k and v from a latent that decoding keeps.

    Attributes:
        sizes: of the latents and of the heads.
        multiplier: factor on the products of queries and keys.
    """

    sizes: LatentConfig

    title: ClassVar[str] = "latent attention"

    @property
    def pair_channels(self) -> int:
        return self.sizes.qk_head_dim + self.sizes.v_head_dim

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        s = self.sizes
        heads = self.heads.query
        q = _section("q", heads * s.qk_head_dim)
        # With q_lora_rank queries are compressed too, and have a second projection.
        first = q if s.q_lora_rank is None else _section("q_a", s.q_lora_rank)
        into = [first, _section("kv_a", s.kv_lora_rank), _section("k_rope", s.qk_rope_head_dim)]
        if self.heads.gate == "headwise":
            into.append(Section("g", heads, heads, "gate"))
        # Rows of padding at the end, so that this one projection runs under every recipe.
        padding = -sum(section.used for section in into) % FEATURE_ALIGNMENT
        into[-1] = into[-1]._replace(stored=into[-1].used + padding)
        out = (_section("o", self.hidden_size),)
        kv = (_section("kv", heads * (s.qk_nope_head_dim + s.v_head_dim)),)
        return (
            LinearSpec("qkv_a_proj", self.hidden_size, tuple(into), bias=self.bias),
            *(() if s.q_lora_rank is None else (LinearSpec("q_b_proj", s.q_lora_rank, (q,)),)),
            LinearSpec("kv_b_proj", s.kv_lora_rank, kv),
            LinearSpec("o_proj", heads * s.v_head_dim, out, bias=self.output_bias, residual=True),
        )

    @property
    def vectors(self) -> Mapping[str, int]:
        """The norms of the latents."""
        latents = {
            "q_a_layernorm": self.sizes.q_lora_rank,
            "kv_a_layernorm": self.sizes.kv_lora_rank,
        }
        return MappingProxyType({name: size for name, size in latents.items() if size is not None})

    @property
    def features(self) -> Mapping[str, int]:
        s = self.sizes
        heads = self.heads.query
        features = {
            "hidden_size": self.hidden_size,
            "q_lora_rank": s.q_lora_rank,
            "kv_lora_rank": s.kv_lora_rank,
            # A product is named as one: a user who has to change the size must change one of its factors.
            "num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim)": heads * s.qk_head_dim,
            "num_attention_heads * (qk_nope_head_dim + v_head_dim)": heads
            * (s.qk_nope_head_dim + s.v_head_dim),
            "num_attention_heads * v_head_dim": heads * s.v_head_dim,
        }
        return {name: size for name, size in features.items() if size is not None}

    def parallel_obstacle(self, sequence: bool) -> str:
        return "tensor parallelism does not divide latent attention: use FSDP2 (--parallel fsdp)"

    def state_bytes(self, batch: int, slots: int, element: int) -> int:
        """Return the bytes of the latent and of the rotated part of the key, which all heads share."""
        return batch * slots * (self.sizes.kv_lora_rank + self.sizes.qk_rope_head_dim) * element


def _section(name: str, rows: int) -> Section:
    return Section(name, rows, rows)
