"""Multi-head latent attention as data: keys and values of all heads come from one latent per token. No torch.

    qkv_a_proj.weight  [q_a: Rq | kv_a: R | k_rope: P, and padding]     [q: A*(M+P) | kv_a | k_rope] without Rq
    q_b_proj.weight    [q: A*(M+P)]    the M channels of a head without RoPE, then the P that rotate
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
from te_models.config.chunk_sizes import FP32
from te_models.config.layer import FEATURE_ALIGNMENT, LinearSpec, Section, Step, Tape
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
    def linears(self) -> tuple[LinearSpec, ...]:
        s = self.sizes
        heads = self.heads.query
        q = _section("q", heads * s.qk_head_dim)
        first = q if s.q_lora_rank is None else _section("q_a", s.q_lora_rank)
        used = first.used + s.kv_lora_rank
        rotated = s.qk_rope_head_dim
        padding = -(used + rotated) % FEATURE_ALIGNMENT
        into = (
            first,
            _section("kv_a", s.kv_lora_rank),
            Section("k_rope", rotated, rotated + padding),
        )
        out = (_section("o", self.hidden_size),)
        kv = (_section("kv", heads * (s.qk_nope_head_dim + s.v_head_dim)),)
        return (
            LinearSpec("qkv_a_proj", self.hidden_size, into, bias=self.bias),
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
        found = {
            "hidden_size": self.hidden_size,
            "q_lora_rank": s.q_lora_rank,
            "kv_lora_rank": s.kv_lora_rank,
            "num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim)": heads * s.qk_head_dim,
            "num_attention_heads * (qk_nope_head_dim + v_head_dim)": heads
            * (s.qk_nope_head_dim + s.v_head_dim),
            "num_attention_heads * v_head_dim": heads * s.v_head_dim,
        }
        return {name: size for name, size in found.items() if size is not None}

    def parallel_obstacle(self, sequence: bool) -> str:
        return "tensor parallelism does not divide latent attention: use FSDP2 (--parallel fsdp)"

    def flops(self, tokens: int, length: int) -> float:
        """Return the FLOPs of the te.Linears and of attention, in which a query sees half of the keys on average."""
        channels = self.heads.query * (self.sizes.qk_head_dim + self.sizes.v_head_dim)
        return super().flops(tokens, length) + 1.0 * tokens * length * channels

    def state_bytes(self, batch: int, slots: int, element: int) -> int:
        """Return the bytes of the latent and of the rotated part of the key, which all heads share."""
        return batch * slots * (self.sizes.kv_lora_rank + self.sizes.qk_rope_head_dim) * element

    # The memory of a training step. T tokens, N rows.

    def steps(self, tape: Tape) -> list[Step]:
        """Return qkv_a_proj, the norms and projections of the latents, attention and o_proj."""
        into, *_, kv_b, out = self.linears
        rank = self.sizes.q_lora_rank
        whole = tape.rows * into.outputs * tape.element
        first = rank if rank is not None else into.sections[0].used
        latents = tape.rows * first + tape.tokens * self.sizes.kv_lora_rank
        rotated = tape.tokens * self.sizes.qk_rope_head_dim
        queries = (
            []
            if rank is None
            else [self._norm(tape, "q_a", tape.rows, rank), tape.linear(self.linears[1])]
        )
        unpadded = tape.rows == tape.tokens and self.sizes.width == self.sizes.v_head_dim
        return [
            tape.linear(into),
            Step("split of latents", consumes=(latents + rotated) * tape.element, produces=whole),
            *queries,
            self._norm(tape, "kv_a", tape.tokens, self.sizes.kv_lora_rank),
            tape.linear(kv_b),
            *self._attention(tape),
            tape.linear(out, shared=unpadded and not self._copies(tape)),
        ]

    @staticmethod
    def _norm(tape: Tape, name: str, rows: int, size: int) -> Step:
        """Return the te.RMSNorm of a latent, which saves a contiguous copy of it and one FP32 per row."""
        own = rows * size * tape.element
        weights = size * tape.element
        return Step(
            f"{name}_layernorm", own + rows * FP32, consumes=own, produces=own, weights=weights
        )

    def _attention(self, tape: Tape) -> list[Step]:
        """Return how heads are made of the projections, and attention on them.

        It saves queries, keys, values and its output, all of one width, and one FP32 per query and head. Values that
        need no wider heads are a view of the output of kv_b_proj, which then lives as long as they.
        """
        s = self.sizes
        heads = self.heads.query
        per_head = tape.tokens * heads
        wide = per_head * s.width
        kv = per_head * (s.qk_nope_head_dim + s.v_head_dim) * tape.element
        made = per_head * s.qk_head_dim * tape.element + kv
        element = FP32 if self._copies(tape) else tape.element
        values = wide * element
        if s.width == s.v_head_dim and not self._copies(tape):
            values = kv * tape.rows // tape.tokens
        grads = 3 * wide * tape.element
        return [
            Step("heads", consumes=grads, produces=made),
            Step(
                "attention",
                3 * wide * element + values + per_head * FP32,
                consumes=per_head * s.v_head_dim * element,
                produces=grads,
                scratch=wide * FP32,
            ),
        ]


def _section(name: str, rows: int) -> Section:
    return Section(name, rows, rows)
