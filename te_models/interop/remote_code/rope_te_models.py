"""RoPE and its scalings, beside modeling_te_models.py. Needs only PyTorch.

Shapes: B batch, S sequence, H head_dim; `size` is the number of rotated channels of a head.
"""

import math
from typing import Any

import torch
from torch import Tensor

from .configuration_te_models import TEModelsDecoderConfig, choose


class RoPE:
    """The RoPE (Su et al. 2021, arXiv 2104.09864) of the layers with a window, or of the others.

    Two kinds of scaling depend on the longest position, which is read on the device. Tables have no buffers, so that
    loading on the meta device loses nothing.
    """

    def __init__(self, config: TEModelsDecoderConfig, sliding: bool) -> None:
        options = config.options
        fields = dict(options["sliding_rope"] or {}) if sliding else {}
        if fields:
            self.theta = fields.pop("rope_theta")
            share = 1.0
            if fields.get("rope_type") != "proportional":  # whose share belongs to the scaling
                share = fields.pop("partial_rotary_factor", 1.0)
        else:
            self.theta = options["rope_theta"]
            share = options["partial_rotary_factor"]
            fields = options["rope_scaling"]
        self.scaling: dict[str, Any] = fields or {}
        self.size = int(config.head_dim * share)
        self.trained = config.max_position_embeddings
        scalings = {
            "linear": self.linear,
            "proportional": self.proportional,
            "dynamic": self.dynamic,
            "llama3": self.llama3,
            "yarn": self.yarn,
            "longrope": self.longrope,
        }
        self.kind = self.scaling.get("rope_type")
        self.scaled = None if self.kind is None else choose(scalings, "rope_type", self.kind)
        self.original = self.scaling.get("original_max_position_embeddings", self.trained)

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions [B, S] -> cos, sin [B, 1, S, size]; angles in FP32."""
        frequency = self.frequencies(self.theta, positions.device)
        factor = 1.0
        if self.scaled is not None:
            frequency, factor = self.scaled(frequency, positions)
        angle = positions.float()[:, None, :, None] * frequency
        angle = torch.cat((angle, angle), dim=-1)
        return (angle.cos() * factor).to(dtype), (angle.sin() * factor).to(dtype)

    def frequencies(self, base: Any, device: torch.device) -> Tensor:
        """base ** (-2i / size) of each pair of channels."""
        return 1.0 / base ** (
            torch.arange(0, self.size, 2, device=device, dtype=torch.float32) / self.size
        )

    def linear(self, frequency: Tensor, positions: Tensor) -> tuple[Tensor, float]:
        """Position interpolation (Chen et al. 2023, arXiv 2306.15595)."""
        return frequency / self.scaling["factor"], 1.0

    def proportional(self, frequency: Tensor, positions: Tensor) -> tuple[Tensor, float]:
        """Only the first pairs of channels rotate, by the frequencies that they have among all."""
        rotated = int(self.scaling.get("partial_rotary_factor", 1.0) * self.size // 2)
        pair = torch.arange(self.size // 2, device=frequency.device)
        return torch.where(pair < rotated, frequency / self.scaling.get("factor", 1.0), 0.0), 1.0

    def dynamic(self, frequency: Tensor, positions: Tensor) -> tuple[Tensor, float]:
        """A base that grows with a text longer than the trained context ("dynamic NTK")."""
        factor = self.scaling["factor"]
        growth = factor * (positions.max() + 1).clamp(min=self.trained).float() / self.trained - (
            factor - 1
        )
        return self.frequencies(
            self.theta * growth ** (self.size / (self.size - 2)), frequency.device
        ), 1.0

    def llama3(self, frequency: Tensor, positions: Tensor) -> tuple[Tensor, float]:
        """Llama 3.1: long wavelengths divided by the factor, short ones as they are, and a ramp between."""
        turns = self.scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
        low, high = self.scaling["low_freq_factor"], self.scaling["high_freq_factor"]
        same = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - same) * frequency / self.scaling["factor"] + same * frequency, 1.0

    def yarn(self, frequency: Tensor, positions: Tensor) -> tuple[Tensor, float]:
        """YaRN (Peng et al. 2023, arXiv 2309.00071)."""
        scaling, size = self.scaling, self.size
        bounds = [
            size * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(self.theta))
            for turns in (scaling.get("beta_fast", 32), scaling.get("beta_slow", 1))
        ]
        if scaling.get("truncate", True):
            bounds = [math.floor(bounds[0]), math.ceil(bounds[1])]
        low, high = max(bounds[0], 0), min(bounds[1], size - 1)
        pair = torch.arange(size // 2, device=frequency.device, dtype=torch.float32)
        slowed = ((pair - low) / (high - low if high != low else 0.001)).clamp(0, 1)
        mixed = frequency / scaling["factor"] * slowed + frequency * (1 - slowed)
        return mixed, self.yarn_sharpness()

    def yarn_sharpness(self) -> float:
        """The factor on cos and sin that goes with YaRN."""
        scaling = self.scaling
        if "attention_factor" in scaling:
            return scaling["attention_factor"]
        log = math.log(scaling["factor"]) if scaling["factor"] > 1 else 0.0
        if "mscale" in scaling and "mscale_all_dim" in scaling:
            return (0.1 * scaling["mscale"] * log + 1) / (0.1 * scaling["mscale_all_dim"] * log + 1)
        return 0.1 * log + 1

    def longrope(self, frequency: Tensor, positions: Tensor) -> tuple[Tensor, float]:
        """LongRoPE (Ding et al. 2024, arXiv 2402.13753)."""
        scaling, original = self.scaling, self.original
        factors = (scaling["short_factor"], scaling["long_factor"])
        short, long = (
            torch.tensor(one, dtype=torch.float32, device=frequency.device) for one in factors
        )
        factor = scaling.get("factor", self.trained / original)
        sharpness = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        divisor = torch.where(positions.max() >= original, long, short)
        return frequency / divisor, scaling.get("attention_factor", sharpness)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [B, heads, S, H] with the first channels of each head rotated; interleaved pairs become halves.

    The products of queries and keys do not depend on the order of channels.
    """
    size = cos.shape[-1]
    turned, rest = x[..., :size], x[..., size:]
    if interleaved:
        turned = turned.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned
