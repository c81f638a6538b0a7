"""Rotary embeddings: the angle of every position, and the ways of stretching them to longer contexts.

Each way is a function in SCALINGS. From the unscaled frequencies (FP32 [R/2], radians per position, R = rope.size) and
`last`, the position of the last token, it returns the frequencies and a factor on cos and sin. Two of them depend on
`last`; they read it on the device, so that nothing synchronizes and a captured graph stays correct as the text grows.
Each packed document has a last token of its own. As in transformers, the rows of a batch have the length of the
longest, and keys in a cache keep the angles with which they were written.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from te_models.config.rope import Rope, Scaling


def rotary_tables(
    rope: Rope, positions: Tensor, dtype: torch.dtype, documents: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (cos, sin) [..., R] of the integer positions [...]; angles in FP32, the tables in `dtype`.

    With `documents` [B, S], the document of each token, positions are [B, S].
    """
    frequency = _exponentials(rope, rope.theta, positions.device)
    factor = 1.0
    scaling = rope.scaling
    if scaling is not None:
        last = positions.max() if documents is None else _last_positions(positions, documents)
        frequency, factor = SCALINGS[scaling["rope_type"]](rope, scaling, frequency, last)
    # FP32: BF16 has 8 bits, too few to tell positions beyond 256 apart.
    angle = positions.float().unsqueeze(-1) * frequency  # [..., R/2]
    # [..., R]: channels i and i + R/2 are a pair, which turns by one angle.
    angle = torch.cat((angle, angle), dim=-1)
    return (angle.cos() * factor).to(dtype), (angle.sin() * factor).to(dtype)


def _last_positions(positions: Tensor, documents: Tensor) -> Tensor:
    """Return the position of the last token of each token's document, [B, S, 1]; each document is in one piece."""
    seq = documents.shape[1]
    index = torch.arange(seq, device=documents.device)
    # bool [B, S], True at the last token of each document.
    ends = F.pad(documents[:, 1:] != documents[:, :-1], (0, 1), value=True)
    # Each token's nearest end at or after it: a running minimum from the right.
    end = torch.where(ends, index, seq).flip(1).cummin(1).values.flip(1)
    return positions.expand_as(documents).gather(1, end)[..., None]


def context_before_long_angles(rope: Rope) -> int | None:
    """Return the length beyond which LongRoPE changes the angles of all positions; None under any other RoPE."""
    if rope.scaling is not None and rope.scaling["rope_type"] == "longrope":
        return rope.original_context
    return None


def _exponentials(rope: Rope, base: float | Tensor, device: torch.device) -> Tensor:
    """Return base^(-2i/R) for the R/2 pairs of channels i, FP32 (Su et al. 2021, arXiv 2104.09864)."""
    channel = torch.arange(0, rope.size, 2, device=device, dtype=torch.float32)
    return 1.0 / base ** (channel / rope.size)


def _linear(rope: Rope, scaling: Scaling, frequency: Tensor, last: Tensor) -> tuple[Tensor, float]:
    """Divide all frequencies by `factor`: position interpolation (Chen et al. 2023, arXiv 2306.15595)."""
    return frequency / scaling["factor"], 1.0


def _proportional(
    rope: Rope, scaling: Scaling, frequency: Tensor, last: Tensor
) -> tuple[Tensor, float]:
    """Rotate the first pairs of channels only, by the frequencies that they have among all (Gemma 4)."""
    rotated = int(scaling.get("partial_rotary_factor", 1.0) * rope.size // 2)
    pair = torch.arange(rope.size // 2, device=frequency.device)
    return torch.where(pair < rotated, frequency / scaling.get("factor", 1.0), 0.0), 1.0


def _dynamic(rope: Rope, scaling: Scaling, frequency: Tensor, last: Tensor) -> tuple[Tensor, float]:
    """Let the base grow with the text once it is longer than max_position_embeddings (Emozilla 2023, "dynamic NTK")."""
    factor = scaling["factor"]
    size = rope.size
    original = rope.context
    # Up to the original context the base stays as it is: growth 1.
    growth = factor * (last + 1).clamp(min=original).float() / original - (factor - 1)
    return _exponentials(rope, rope.theta * growth ** (size / (size - 2)), frequency.device), 1.0


def _llama3(rope: Rope, scaling: Scaling, frequency: Tensor, last: Tensor) -> tuple[Tensor, float]:
    """Keep wavelengths below original / high_freq_factor, divide those above original / low_freq_factor by `factor`,
    and interpolate between the two (Llama 3.1)."""
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low = scaling["low_freq_factor"]
    high = scaling["high_freq_factor"]
    # The share of each frequency that is kept, by how often it turns in the original context.
    kept_share = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept_share) * frequency / scaling["factor"] + kept_share * frequency, 1.0


def _yarn(rope: Rope, scaling: Scaling, frequency: Tensor, last: Tensor) -> tuple[Tensor, float]:
    """Keep channels that turn more than beta_fast times in the original context, divide those that turn less than
    beta_slow times by `factor`, with a ramp between: YaRN (Peng et al. 2023, arXiv 2309.00071)."""
    factor = scaling["factor"]
    size = rope.size
    original = rope.original_context

    def channel(turns: float) -> float:  # the (fractional) pair of channels with this many turns
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = channel(scaling.get("beta_fast", 32))
    high = channel(scaling.get("beta_slow", 1))
    if scaling.get("truncate", True):
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, size - 1)
    # As the reference implementation, which avoids a division by zero so.
    width = high - low if high != low else 0.001
    pair = torch.arange(size // 2, device=frequency.device, dtype=torch.float32)
    # The share of each pair's frequency that is divided: 0 for fast pairs, 1 for slow ones.
    slowed = ((pair - low) / width).clamp(0, 1)
    return frequency / factor * slowed + frequency * (1 - slowed), _yarn_factor(scaling)


def _yarn_factor(scaling: Scaling) -> float:
    """Return the factor of cos and sin under YaRN, so that attention over more keys stays as sharp."""
    if "attention_factor" in scaling:
        return scaling["attention_factor"]
    log = math.log(scaling["factor"]) if scaling["factor"] > 1 else 0.0
    if "mscale" in scaling and "mscale_all_dim" in scaling:
        return (0.1 * scaling["mscale"] * log + 1) / (0.1 * scaling["mscale_all_dim"] * log + 1)
    return 0.1 * log + 1


def _longrope(
    rope: Rope, scaling: Scaling, frequency: Tensor, last: Tensor
) -> tuple[Tensor, float]:
    """Divide the frequency of each pair by one factor, or another beyond the original context (arXiv 2402.13753)."""
    original = rope.original_context
    # [R/2] each.
    short = _constant(tuple(scaling["short_factor"]), frequency.device)
    long = _constant(tuple(scaling["long_factor"]), frequency.device)
    factor = scaling.get("factor", rope.context / original)
    # Over more keys, as under YaRN, attention would be less sharp.
    sharpness = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    scaled = frequency / torch.where(last >= original, long, short)
    return scaled, scaling.get("attention_factor", sharpness)


def _constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return FP32 values on the device, copied there once: a CUDA graph cannot read the host's memory."""
    # A tensor that is made while a graph is traced belongs to that graph, and must not be kept for others.
    if torch.compiler.is_compiling():
        return torch.tensor(values, dtype=torch.float32, device=device)
    return _cached_constant(values, device)


@functools.lru_cache(maxsize=64)
def _cached_constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


# By `rope_type`.
SCALINGS: dict[str, Callable[[Rope, Scaling, Tensor, Tensor], tuple[Tensor, float]]] = {
    "linear": _linear,
    "proportional": _proportional,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
