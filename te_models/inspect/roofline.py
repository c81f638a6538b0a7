"""A lower bound on the time of a step: GEMMs, attention and recurrences at measured rates, bytes at copy speed."""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from te_models.config.attention import Heads, SeenKeys, SoftmaxAttentionSpec
from te_models.config.deltanet import DeltaNetConfig, DeltaNetSpec
from te_models.config.layer import LayerSpec
from te_models.config.model import ModelConfig
from te_models.config.precision import Precision
from te_models.kernels import flash_4
from te_models.kernels.delta_rule import delta_rule
from te_models.kernels.sdpa import causal_attention
from te_models.planning.flops import forward_flops, training_flops


class Roofline(NamedTuple):
    """Milliseconds per forward and backward."""

    gemm: float
    attention: float
    memory: float
    recurrence: float = 0.0  # of linear attention
    other: float = 0.0  # of mixers without a kernel that is measured here

    @property
    def total(self) -> float:
        """The lower bound."""
        return sum(self)


class Product(NamedTuple):
    """The GEMM of a te.Linear over the rows of a step, all experts' together."""

    rows: int
    inputs: int
    outputs: int
    fp8: bool


def model_flops(config: ModelConfig, batch: int, seq: int, gated: bool = True) -> float:
    """Return the FLOPs of one forward and backward: 6 per weight and token, and 6 B S^2 A H for causal attention.

    `gated=False` leaves out the gate's rows, for a peer that has none.
    """
    if not gated:
        config = dataclasses.replace(
            config, attention_gate="none", attention_gate_activation="sigmoid"
        )
    return training_flops(config, batch * seq, seq)


def products(
    layer: LayerSpec, depth: int, tokens: int, precision: Mapping[str, Precision]
) -> list[Product]:
    """Return the forward GEMMs of a layer over `tokens` tokens; `precision` says how each te.Linear runs."""
    gemms = []
    for part in layer.parts:
        for linear in part.linears:
            fp8 = precision[f"layers.{depth}.{part.name}.{linear.name}"].recipe is not None
            rows = part.rows_of(linear, tokens)
            gemms.append(Product(rows, linear.inputs, linear.outputs, fp8))
    return gemms


def roofline(
    config: ModelConfig,
    batch: int,
    seq: int,
    precision: Mapping[str, Precision],
    device: torch.device,
) -> Roofline:
    """Measure the roofline on `device`, a CUDA device with FP8 units; `precision` says how each te.Linear runs.

    What a layer computes beside its te.Linears (te_models.planning.flops) is measured with the kernel that computes it,
    or taken at the rate of the head's GEMM where there is none.
    """
    tokens = batch * seq
    # Most layers have the same GEMMs: each size is measured once.
    measure_gemm = functools.cache(functools.partial(_gemm, device=device))
    measure_attention = functools.cache(
        functools.partial(_attention, batch=batch, seq=seq, device=device)
    )
    measure_recurrence = functools.cache(
        functools.partial(_recurrence, batch=batch, seq=seq, device=device)
    )
    # The head is in BF16, as most recipes run it. Three products: forward and both gradients.
    head_flops = 2.0 * tokens * config.hidden_size * config.vocab_size  # of one of them
    head_ms = 3 * _gemm(tokens, config.hidden_size, config.vocab_size, fp8=False, device=device)
    ms_per_flop = head_ms / (3 * head_flops)
    gemm = head_ms
    attention = 0.0
    recurrence = 0.0
    moved = 0  # bytes
    operations = forward_flops(config, seq)
    # Outside layers there may be more than the head, such as the inputs of all layers.
    other = 3 * (batch * operations.rest - head_flops) * ms_per_flop
    for depth, layer in enumerate(config.layers):
        for product in products(layer, depth, tokens, precision):
            rows = product.rows
            inputs = product.inputs
            outputs = product.outputs
            # fprop, dgrad and wgrad: the same product with its dimensions exchanged.
            gemm += measure_gemm(rows, inputs, outputs, product.fp8)
            gemm += measure_gemm(rows, outputs, inputs, product.fp8)
            gemm += measure_gemm(outputs, rows, inputs, product.fp8)
            # BF16 input and output of each GEMM: once in the forward, and twice in the backward with their gradients.
            moved += 2 * 3 * rows * (inputs + outputs)
        # The operations that the layer has beside its te.Linears, of which attention and recurrences are measured.
        linear_flops = sum(part.linear_flops(tokens) for part in layer.parts)
        rest = batch * operations.layers[depth] - linear_flops
        all_measured = bool(layer.mixers)
        for mixer in layer.mixers:
            if isinstance(mixer, SoftmaxAttentionSpec):
                attention += measure_attention(mixer.heads) * seen_share(mixer.seen, seq)
                rest -= batch * seq**2 * mixer.heads.query * mixer.pair_channels
            elif isinstance(mixer, DeltaNetSpec) and len(layer.mixers) == 1:
                recurrence += measure_recurrence(mixer.sizes)
            else:
                all_measured = False
        if not all_measured:
            other += 3 * rest * ms_per_flop
    return Roofline(
        gemm=gemm,
        attention=attention,
        memory=moved / _copy_rate(device),
        recurrence=recurrence,
        other=other,
    )


def seen_share(keys: SeenKeys, seq: int) -> float:
    """Return the share of the pairs of causal attention over `seq` tokens that lie inside a window or a chunk."""
    window, chunk = keys
    pairs = seq * (seq + 1) / 2
    inside = pairs
    if window is not None and window < seq:
        # The first `window` queries see all tokens before them, the others `window` each.
        inside = window * (window + 1) / 2 + (seq - window) * window
    if chunk is not None and chunk < seq:
        whole_chunks, rest = divmod(seq, chunk)
        inside = whole_chunks * chunk * (chunk + 1) / 2 + rest * (rest + 1) / 2
    return inside / pairs


def _copy_rate(device: torch.device) -> float:
    """Measure the bytes per millisecond of a copy on the device, read and written."""
    # Far larger than the L2 cache, which would answer a small copy by itself.
    source = torch.empty(2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * len(source) / _milliseconds(lambda: target.copy_(source))


def _gemm(m: int, k: int, n: int, fp8: bool, device: torch.device) -> float:
    """Measure the milliseconds of a product [m, k] x [k, n], in FP8 with one scale per operand, or in BF16."""
    a = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    b = torch.randn(n, k, device=device, dtype=torch.bfloat16)
    if not fp8:
        return _milliseconds(lambda: a @ b.t())
    # Without its casts: they are part of what a step adds to the bound.
    a8 = a.to(torch.float8_e4m3fn)
    b8 = b.to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)
    return _milliseconds(
        lambda: torch._scaled_mm(
            a8, b8.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    )


def _attention(heads: Heads, batch: int, seq: int, device: torch.device) -> float:
    """Measure the milliseconds of forward and backward of causal attention."""
    leaves = []
    for count in (heads.query, heads.key, heads.key):
        rows = torch.randn(batch, seq, count, heads.dim, device=device, dtype=torch.bfloat16)
        leaves.append(rows.transpose(1, 2).requires_grad_())  # [B, H, S, head_dim]
    q, k, v = leaves
    slope = torch.randn_like(q)
    if flash_4.suits(q):
        # It has no autograd of its own.
        q, k, v = (leaf.detach() for leaf in leaves)
        return _milliseconds(lambda: _flash_4(slope, q, k, v))
    return _milliseconds(lambda: torch.autograd.grad(causal_attention(q, k, v), leaves, slope))


def _flash_4(dy: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Run forward and backward of attention as a model does with FlashAttention-4."""
    out, log_sum = flash_4.forward(q, k, v, scale=None)
    flash_4.backward(dy, q, k, v, out, log_sum, scale=None)


def _recurrence(sizes: DeltaNetConfig, batch: int, seq: int, device: torch.device) -> float:
    """Measure the milliseconds of forward and backward of a gated delta rule."""
    keys = (sizes.num_key_heads, sizes.key_head_dim)
    values = (sizes.num_value_heads, sizes.value_head_dim)
    q = _leaf(batch, seq, *keys, device=device)
    k = _leaf(batch, seq, *keys, device=device)
    v = _leaf(batch, seq, *values, device=device)
    # Any decay and any step: the time does not depend on the values.
    rate = torch.rand(batch, seq, sizes.num_value_heads, device=device)
    g = (-rate).requires_grad_()
    beta = rate.clone().requires_grad_()
    leaves = (q, k, v, g, beta)
    slope = torch.randn_like(v)
    return _milliseconds(lambda: torch.autograd.grad(delta_rule(*leaves)[0], leaves, slope))


def _leaf(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16).requires_grad_()


def _milliseconds(run: Callable[[], object]) -> float:
    """Return the median milliseconds of ten calls, after three to warm up."""
    # The first calls load kernels and choose algorithms.
    for _ in range(3):
        run()
    return statistics.median(timed(run) for _ in range(10))


def timed(run: Callable[[], object]) -> float:
    """Return the milliseconds of one call on the current CUDA device, from CUDA events."""
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)
