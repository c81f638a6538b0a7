"""The floating-point operations of a training step, and the share of a GPU's peak that they reach."""

from __future__ import annotations

from collections import Counter

from te_models.config.gpus import peak_bf16
from te_models.config.model import ModelConfig


def training_flops(config: ModelConfig, tokens: int, length: int) -> float:
    """Return the FLOPs of one forward and backward over `tokens` tokens in sequences of `length`.

    Six per weight and token, of experts those that a token is sent to, and 6 B S^2 A H for causal attention. Recomputed
    operations do not count.
    """
    blocks = 0.0
    for layer, count in Counter(config.layers).items():
        blocks += count * layer.flops(tokens, length)
    return 3 * (blocks + 2.0 * tokens * config.hidden_size * config.vocab_size)


def utilization(
    config: ModelConfig, length: int, tokens_per_second: float, gpu: str
) -> float | None:
    """Return the share of a GPU's peak that training reaches (MFU); None where the peak is not known.

    The peak is that of dense BF16 products, also for FP8, so that runs under different recipes compare.

    Args:
        config: the shape.
        length: tokens per sequence.
        tokens_per_second: of one GPU.
        gpu: its name as CUDA gives it.
    """
    peak = peak_bf16(gpu)
    if peak is None:
        return None
    return training_flops(config, length, length) / length * tokens_per_second / peak
