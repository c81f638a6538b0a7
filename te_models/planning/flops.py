"""The floating-point operations of a training step, and the share of a GPU's peak that they reach."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from te_models.config.gpus import peak_bf16
from te_models.config.model import ModelConfig
from te_models.config.recipe import get_recipe
from te_models.device.allocations import Allocations
from te_models.device.operations import OperationCount
from te_models.planning.measured import PARTS, count_pass
from te_models.planning.training import Training


class ForwardFlops(NamedTuple):
    """The operations of a forward of one sequence: of each layer, and of everything outside layers."""

    layers: tuple[float, ...]
    rest: float

    @property
    def total(self) -> float:
        """All of them."""
        return sum(self.layers) + self.rest


def forward_flops(config: ModelConfig, length: int) -> ForwardFlops:
    """Count the operations of a forward of a sequence of `length` tokens, in one layer of each kind, on meta.

    Two per weight and token, of experts those that a token is sent to, and in causal attention half of the pairs of
    queries and keys, also under a window.
    """
    # In a thread of its own, where no autocast, scale or grad mode of the caller is.
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(_forward_flops, config, length).result()


@functools.lru_cache(64)
def _forward_flops(config: ModelConfig, length: int) -> ForwardFlops:
    first: dict[object, int] = {}
    same = [first.setdefault(layer, depth) for depth, layer in enumerate(config.layers)]
    setting = Training(seq_len=length, compile=False, fused=False).setting
    with Allocations(PARTS), OperationCount() as operations, torch.no_grad():
        flops = count_pass(config, get_recipe("bf16"), setting, tuple(first.values()), operations)
    layers = tuple(flops[layer] for layer in same)
    return ForwardFlops(layers, operations.total - sum(flops.values()))


def training_flops(config: ModelConfig, tokens: int, length: int) -> float:
    """Return the FLOPs of one forward and backward over `tokens` tokens in sequences of `length`.

    Three times the forward's: backward has two products for each of its products. Recomputed operations do not count.
    """
    return 3 * forward_flops(config, length).total * tokens / length


def utilization(
    config: ModelConfig, length: int, tokens_per_second: float, gpu: str
) -> float | None:
    """Return the share of a GPU's peak that training reaches (MFU); None where the peak is not known.

    The peak is the GPU's for dense BF16 products, also under FP8, so that runs under different recipes compare.

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
