"""A lower bound on the time of a training step: GEMMs and attention at measured rates, bytes at copy speed."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch

from te_models.config.layout import linear_sizes
from te_models.config.model import ModelConfig
from te_models.kernels.sdpa import causal_attention


class Roofline(NamedTuple):
    """Milliseconds per forward and backward."""

    gemm: float
    attention: float
    memory: float

    @property
    def total(self) -> float:
        """The lower bound."""
        return self.gemm + self.attention + self.memory


def model_flops(config: ModelConfig, batch: int, seq: int, gated: bool = True) -> float:
    """Return the FLOPs of one forward and backward: 6 per weight and token, and 6 B S^2 A H for causal attention.

    `gated=False` leaves out the gate's rows, for a peer that has none.
    """
    gate = 0 if gated else config.hidden_size * config.gate_size
    weights = config.num_hidden_layers * (sum(i * o for i, o in linear_sizes(config).values()) - gate)
    weights += config.hidden_size * config.vocab_size
    return 6.0 * weights * batch * seq + 6.0 * config.num_hidden_layers * batch * seq * seq * config.q_size


def roofline(config: ModelConfig, batch: int, seq: int, fp8_layers: int, device: torch.device) -> Roofline:
    """Measure the roofline on `device`, a CUDA device with FP8 units, with `fp8_layers` of the layers in FP8."""
    rows, layers = batch * seq, config.num_hidden_layers
    gemm = 3 * _gemm(rows, config.hidden_size, config.vocab_size, False, device)
    for fp8, count in ((True, fp8_layers), (False, layers - fp8_layers)):
        if count:
            # fprop, dgrad and wgrad: the same product with its dimensions exchanged.
            shapes = [s for i, o in linear_sizes(config).values() for s in ((rows, i, o), (rows, o, i), (o, rows, i))]
            gemm += count * sum(_gemm(*shape, fp8, device) for shape in shapes)
    # BF16 input and output of each GEMM: once in the forward, and twice in the backward with their gradients.
    moved = 2 * 3 * rows * layers * sum(i + o for i, o in linear_sizes(config).values())
    return Roofline(gemm, layers * _attention(config, batch, seq, device), moved / _copy_bytes_per_ms(device))


def _gemm(m: int, k: int, n: int, fp8: bool, device: torch.device) -> float:
    a, b = (torch.randn(size, k, device=device, dtype=torch.bfloat16) for size in (m, n))
    if not fp8:
        return _milliseconds(lambda: a @ b.t())
    (a8, b8), one = (t.to(torch.float8_e4m3fn) for t in (a, b)), torch.ones((), device=device)
    return _milliseconds(lambda: torch._scaled_mm(a8, b8.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True))


def _attention(config: ModelConfig, batch: int, seq: int, device: torch.device) -> float:
    heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    q, k, v = (
        torch.randn(batch, seq, count, config.head_dim, device=device, dtype=torch.bfloat16).transpose(1, 2)
        for count in heads
    )
    leaves = [t.requires_grad_() for t in (q, k, v)]
    slope = torch.randn_like(q)
    return _milliseconds(lambda: torch.autograd.grad(causal_attention(*leaves), leaves, slope))


def _copy_bytes_per_ms(device: torch.device) -> float:
    source = torch.empty(2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * len(source) / _milliseconds(lambda: target.copy_(source))


def _milliseconds(run: Callable[[], object]) -> float:
    for _ in range(3):
        run()
    return statistics.median(timed(run) for _ in range(10))


def timed(run: Callable[[], object]) -> float:
    """Return the milliseconds of one call on the current CUDA device, from CUDA events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)
