"""Elementwise operations of a block, each in the dtype of its input."""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from te_models.device.measured import once
from te_models.device.operations import count_flops


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the channel pairs (i, i + H/2) of each head by its position's angle (Su et al. 2021, arXiv 2104.09864).

    x [B, S, heads, H]; cos, sin [S, H] (or [B, S, H]), whose halves repeat; returns the shape and dtype of x.
    """
    first, second = x.chunk(2, dim=-1)
    # [B, S, heads, H]: each pair turned by 90 degrees.
    rotated = torch.cat((-second, first), dim=-1)
    return x * cos.unsqueeze(-2) + rotated * sin.unsqueeze(-2)


def gate(x: Tensor, logits: Tensor) -> Tensor:
    """Return x * sigmoid(logits): attention's output gate (Qiu et al. 2025, arXiv 2505.06708). Shapes broadcast."""
    return x * torch.sigmoid(logits)


def softplus_gate(x: Tensor, logits: Tensor) -> Tensor:
    """Return x * log(1 + exp(logits)), an unbounded gate of attention (Laguna). Shapes broadcast."""
    return x * F.softplus(logits)


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up [..., F] of gate_up [..., 2F] = [gate | up] (Shazeer 2020, arXiv 2002.05202)."""
    return mlp_activation(gate_up, "silu", True)


def swiglu_backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    """Return the gradient of swiglu's input [..., 2F] from the gradient `dy` [..., F] of its output."""
    return mlp_activation_backward(dy, gate_up, "silu", True)


# Activation -> itself, and (gradient of its output, x) -> gradient of x.
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "silu": (F.silu, torch.ops.aten.silu_backward),
    "gelu": (F.gelu, torch.ops.aten.gelu_backward),
    "gelu_pytorch_tanh": (
        functools.partial(F.gelu, approximate="tanh"),
        functools.partial(torch.ops.aten.gelu_backward, approximate="tanh"),
    ),
    "relu2": (lambda x: F.relu(x).square(), lambda dy, x: 2 * F.relu(x) * dy),
}


def mlp_activation(gate_up: Tensor, activation: str, gated: bool, factor: float = 1.0) -> Tensor:
    """Return act(factor * gate) * up [..., F] of gate_up [..., 2F] = [gate | up].

    Without a gate it is act(up) of up [..., F].
    """
    forward, _ = ACTIVATIONS[activation]
    if not gated:
        return forward(gate_up)
    gate_half, up = gate_up.chunk(2, dim=-1)  # [..., F] each
    if factor != 1:
        gate_half = gate_half * factor
    return forward(gate_half) * up


def mlp_activation_backward(
    dy: Tensor, gate_up: Tensor, activation: str, gated: bool, factor: float = 1.0
) -> Tensor:
    """Return the gradient of mlp_activation's input from the gradient `dy` [..., F] of its output."""
    forward, backward = ACTIVATIONS[activation]
    if not gated:
        return backward(dy, gate_up)
    gate_half, up = gate_up.chunk(2, dim=-1)
    if factor != 1:
        gate_half = gate_half * factor
    # [..., F]
    dgate = backward(dy * up, gate_half)
    if factor != 1:
        dgate = dgate * factor
    return torch.cat((dgate, dy * forward(gate_half)), dim=-1)


def clamped_swiglu(gate_up: Tensor, limit: float, alpha: float) -> Tensor:
    """Return (up + 1) * gate * sigmoid(alpha * gate) [..., F] of gate_up [..., 2F] = [gate | up], gate at most `limit`.

    And up between -limit and limit: the MLP of gpt-oss (arXiv 2508.10925, section 2.3). Computed in FP32.
    """
    gate_half, up = gate_up.float().chunk(2, dim=-1)
    gate_half = gate_half.clamp(max=limit)
    up = up.clamp(-limit, limit)
    return ((up + 1) * gate_half * torch.sigmoid(alpha * gate_half)).to(gate_up.dtype)


def clamped_swiglu_backward(dy: Tensor, gate_up: Tensor, limit: float, alpha: float) -> Tensor:
    """Return the gradient of clamped_swiglu's input [..., 2F] from the gradient `dy` [..., F] of its output."""
    gate_half, up = gate_up.float().chunk(2, dim=-1)
    # A clamp passes no gradient where it cut.
    inside = gate_half <= limit, up.abs() <= limit
    gate_half = gate_half.clamp(max=limit)
    up = up.clamp(-limit, limit)
    dy = dy.float()
    sigma = torch.sigmoid(alpha * gate_half)
    # The derivative of x sigmoid(alpha x) is sigmoid + alpha x sigmoid (1 - sigmoid).
    dgate = dy * (up + 1) * sigma * (1 + alpha * gate_half * (1 - sigma)) * inside[0]
    return torch.cat((dgate, dy * gate_half * sigma * inside[1]), dim=-1).to(gate_up.dtype)


def limited_swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """Return silu(gate) * up [..., F] of gate_up [..., 2F] = [gate | up], silu(gate) at most `limit` and |up| too.

    As Step-3.7 has it, where clamped_swiglu bounds the gate before its activation. Computed in FP32.
    """
    gate_half, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate_half).clamp(max=limit) * up.clamp(-limit, limit)).to(gate_up.dtype)


def limited_swiglu_backward(dy: Tensor, gate_up: Tensor, limit: float) -> Tensor:
    """Return the gradient of limited_swiglu's input [..., 2F] from the gradient `dy` [..., F] of its output."""
    gate_half, up = gate_up.float().chunk(2, dim=-1)
    sigma = torch.sigmoid(gate_half)
    silu = gate_half * sigma
    dy = dy.float()
    # The derivative of silu, where the limit did not cut it.
    slope = sigma * (1 + gate_half * (1 - sigma)) * (silu <= limit)
    dgate = dy * up.clamp(-limit, limit) * slope
    dup = dy * silu.clamp(max=limit) * (up.abs() <= limit)
    return torch.cat((dgate, dup), dim=-1).to(gate_up.dtype)


def causal_conv(
    x: Tensor,
    tail: Tensor | None,
    taps: Tensor,
    documents: Tensor | None,
    activation: str = "silu",
    bias: Tensor | None = None,
) -> Tensor:
    """Return act of `convolved`, to which a bias [C] may be added, in the shape and dtype of x."""
    forward, _ = ACTIVATIONS[activation]
    total = convolved(x, tail, taps, documents)
    if bias is not None:
        total = total + bias.float()
    return forward(total).to(x.dtype)


def convolved(x: Tensor, tail: Tensor | None, taps: Tensor, documents: Tensor | None) -> Tensor:
    """Return a causal depthwise convolution of x [B, S, C], FP32 [B, S, C].

    tail [B, K - 1, C] holds the tokens before the first, None: zeros; taps [C, 1, K], the last for the token itself.
    With `documents` int [B, S] a token sees only its own.
    """
    size = taps.shape[-1]
    seq = x.shape[1]
    count_flops(x, 2.0 * x.numel() * size)
    # [B, K - 1 + S, C]
    whole = F.pad(x, (0, 0, size - 1, 0)) if tail is None else torch.cat((tail, x), dim=1)
    # A sum over a few taps instead of F.conv1d: it fuses with the operations around it, and can stop at documents.
    # FP32, to which every tap broadcasts: [B, S, C] from the first on.
    total = torch.zeros((), device=x.device)
    for back in range(size):
        # The token `back` places before, [B, S, C].
        earlier = whole[:, size - 1 - back :][:, :seq].float()
        if documents is not None and back:
            # bool [B, S]: whether the token `back` places before is of the same document.
            same = F.pad(
                documents[:, back:] == documents[:, :-back], (min(back, seq), 0), value=False
            )
            earlier = earlier.masked_fill(~same[..., None], 0.0)
        total = total + earlier * taps[:, 0, size - 1 - back].float()
    return total


def gated_conv(
    parts: Tensor,
    tail: Tensor | None,
    taps: Tensor,
    bias: Tensor | None,
    documents: Tensor | None,
) -> Tensor:
    """Return c * conv(b * x) [B, S, C] of parts [B, S, 3C] = [b | c | x]: the short convolution of LFM2.

    The arguments after it, and the numbers, are as in `convolved`; `bias` is [C]. What the convolution reads is
    rounded to the dtype of parts, as `tail` is.
    """
    b, c, x = parts.chunk(3, dim=-1)
    total = convolved(b * x, tail, taps, documents)
    if bias is not None:
        total = total + bias.float()
    return (c.float() * total).to(parts.dtype)


def mixed_parts(
    x: Tensor,
    tail: Tensor | None,
    taps: Tensor,
    documents: Tensor | None,
    bias: Tensor | None = None,
    *,
    sizes: tuple[int, ...],
    activation: str,
) -> tuple[Tensor, ...]:
    """Return `causal_conv` in contiguous parts of these many channels, such as q, k and v."""
    out = causal_conv(x, tail, taps, documents, activation, bias)
    return tuple(part.contiguous() for part in out.split(sizes, dim=-1))


def delta_gates(
    logits: Tensor, a_log: Tensor, dt_bias: Tensor, real: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the logarithm of the decay and the writing strength of Gated DeltaNet, FP32 [B, S, heads] each.

    logits [B, S, 2 heads] = [b | a]; a_log, dt_bias [heads]. Where `real`, bool [B, S], is False the state stays as it
    is.
    """
    b, a = logits.float().chunk(2, dim=-1)
    # Below 0, so that the decay exp(g) lies between 0 and 1.
    g = -a_log.float().exp() * F.softplus(a + dt_bias.float())
    beta = b.sigmoid()
    return (g, beta) if real is None else (g * real[..., None], beta * real[..., None])


def channel_gates(
    f: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    real: Tensor | None,
    *,
    bound: float | None,
) -> tuple[Tensor, Tensor]:
    """Return the logarithms of decay and the writing strengths of Kimi Delta Attention, FP32.

    They are [B, S, heads, C / heads] and [B, S, heads], from logits f [B, S, C] and b [B, S, heads]; a_log [heads],
    dt_bias [C]. With `bound` a logarithm lies between -bound and 0. Where `real`, bool [B, S], is False the state stays
    as it is.
    """
    rate = a_log.float().exp()[:, None]  # [heads, 1]
    f = (f.float() + dt_bias.float()).unflatten(-1, (a_log.shape[0], -1))
    g = -rate * F.softplus(f) if bound is None else -bound * torch.sigmoid(rate * f)
    beta = b.float().sigmoid()
    if real is None:
        return g, beta
    return g * real[..., None, None], beta * real[..., None]


def time_steps(
    logits: Tensor, dt_bias: Tensor, real: Tensor | None, *, low: float, high: float
) -> Tensor:
    """Return the time steps of Mamba 2, softplus(logits + dt_bias) between `low` and `high`, FP32 [B, S, heads].

    logits [B, S, heads], dt_bias [heads]. Where `real`, bool [B, S], is False they are 0: the state stays as it is.
    """
    steps = F.softplus(logits.float() + dt_bias.float()).clamp(low, high)
    return steps if real is None else steps * real[..., None]


def gated_norm(
    x: Tensor,
    z: Tensor,
    weight: Tensor,
    *,
    groups: int,
    eps: float,
    before_gate: bool,
    factor: float = 1.0,
) -> Tensor:
    """Return RMSNorm per group of channels of x * silu(factor * z) [T, C], or with `before_gate` of x, times the gate.

    x, z [T, C], weight [C]; computed in FP32, in the dtype of x.
    """
    z = z.float()
    gate = F.silu(z if factor == 1 else z * factor)
    values = x.float() if before_gate else x.float() * gate
    parts = values.unflatten(-1, (groups, -1))  # [T, groups, C / groups]
    # Each group by its own RMS, as if it were on a rank of its own.
    parts = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + eps)
    out = parts.flatten(-2) * weight.float()
    return (out * gate if before_gate else out).to(x.dtype)


def silu_gate(x: Tensor, z: Tensor, *, factor: float = 1.0) -> Tensor:
    """Return x * silu(factor * z) in the dtype of x, computed in FP32: the output gate of Gated DeltaNet."""
    z = z.float()
    return (x.float() * F.silu(z if factor == 1 else z * factor)).to(x.dtype)


def gated_input(gate: Tensor, x: Tensor, activation: str) -> Tensor:
    """Return act(gate) * x, each [N, P]."""
    forward, _ = ACTIVATIONS[activation]
    return forward(gate) * x


@once
def rounded(factor: float, dtype: torch.dtype) -> float:
    """Return a factor rounded to `dtype`, as Gemma's training rounds that on embeddings; cached, for captured steps."""
    return torch.tensor(factor, dtype=dtype).item()


def scaled_logits(logits: Tensor, divisor: float, cap: float | None) -> Tensor:
    """Return logits / divisor, capped to cap * tanh(logits / cap) (Gemma 2, arXiv 2408.00118), in their dtype."""
    if divisor != 1:
        logits = logits / divisor
    return logits if cap is None else torch.tanh(logits / cap) * cap


class ScaledEmbedding(nn.Embedding):
    """An embedding that multiplies its rows itself, as Gemma's in transformers does."""

    factor: float

    @classmethod
    def of(cls, embedding: nn.Embedding, factor: float) -> "ScaledEmbedding":
        """Return an embedding that scales the rows of `embedding`, takes its place, and has the same state.

        FSDP2, which has noted `embedding`, then gathers the table for both.
        """
        scaled = cls.__new__(cls)
        object.__setattr__(scaled, "__dict__", embedding.__dict__)
        scaled.factor = factor
        return scaled

    @property
    def embed_scale(self) -> Tensor:
        """The factor, a scalar; peft looks for it and multiplies what an adapter adds."""
        return self.weight.new_tensor(self.factor)

    def scaled(self, rows: Tensor) -> Tensor:
        return rows * rounded(self.factor, rows.dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Return the scaled rows of ids [...]: [..., D]."""
        return self.scaled(super().forward(input))


def embedding(module: nn.Module, ids: Tensor) -> Tensor:
    """Return the rows of an nn.Embedding, or of the module in its place, for ids [...]: [..., D]."""
    return module(ids)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy, FP32, of logits [T, V] and targets int64 [T], of which -100 does not count.

    Zero when no target counts, as in a micro-batch that is all prompt.
    """
    # A sum and a count, since the mean of no targets would be NaN.
    total = F.cross_entropy(logits.float(), targets, ignore_index=-100, reduction="sum")
    return total / (targets != -100).sum().clamp(min=1)
