"""The elementwise parts of gated attention in plain PyTorch, and the table of their faster twins."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from te_models.config.attention import AttentionSpec, Heads
from te_models.kernels.sdpa import suits_cudnn

if TYPE_CHECKING:
    from te_models.kernels.fp8_tiles_triton import FP8Data
    from te_models.kernels.span_attention_triton import Spans


def can_fuse(
    spec: AttentionSpec, tokens: int, device: torch.device, dtype: torch.dtype, spans: bool = False
) -> bool:
    """Return whether attention_core supports this attention of `tokens` tokens per row, in `spans` or causal.

    It does not with one of AttentionSpec.obstacles, and with sinks and capped logits only in spans. On CUDA devices, it
    supports causal attention only where cuDNN's kernel would run.
    """
    if spec.obstacles:
        return False
    if spans:
        return True
    if spec.sinks or spec.softcap is not None:
        return False
    return device.type == "cpu" or suits_cudnn(tokens, spec.heads.dim, dtype)


def adjacent_channels(x: Tensor) -> Tensor:
    """Return x with the channels of each head beside each other in memory, as kernels read them; else a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def split_heads(
    heads: Heads, qkvg: Tensor, batch: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return views of qkvg [B*S, Q]: q [B, S, A, H], k and v [B, S, K, H], the gate [B, S, A, H or 1] or None."""
    rows = [section.stored for section in heads.sections]
    q, k, v, rest = qkvg.unflatten(0, (batch, -1)).split(rows, dim=-1)
    q, k, v = (t.unflatten(-1, (-1, heads.dim)) for t in (q, k, v))
    if heads.gate == "none":
        return q, k, v, None
    if heads.gate == "elementwise":
        return q, k, v, rest.unflatten(-1, (heads.query, heads.dim))
    # A headwise gate has one column per head; the rest fills up to 32 rows, so that FP8 GEMMs take the weight.
    return q, k, v, rest[..., : heads.query, None]  # one column per head, and padding


class Rotation(NamedTuple):
    """RoPE of some positions: cos, sin [S, R] or [B, S, R], whose halves repeat, for the first R channels of a head.

    `interleaved` pairs are neighboring channels, others lie R/2 apart.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False


class Norm(NamedTuple):
    """RMSNorm with `weight` [H] of each head by itself, or [heads*H] of all heads of a token together."""

    weight: Tensor
    eps: float
    zero_centered: bool  # the factor is 1 + weight


class Operations(NamedTuple):
    """The elementwise parts; tensors are [B, S, heads, H] with contiguous channels and any other strides.

    With `fp8` None they write no FP8. `spans` makes the Spans of documents and windows; None: those are masks.
    """

    rotate: Callable[[Tensor, Tensor, Rotation, bool], None]
    norm: Callable[[Tensor, Norm, Rotation | None], Tensor]
    norm_backward: Callable[[Tensor, Tensor, Norm, Rotation | None, Tensor], Tensor]
    copy: Callable[[Tensor, Tensor], None]
    gate: Callable[[Tensor, Tensor, bool], Tensor]
    gate_backward: Callable[[Tensor, Tensor, Tensor, Tensor, bool], Tensor]
    fp8: FP8Operations | None = None
    spans: Callable[[int, int | None, Tensor | None, torch.device], Spans] | None = None


class FP8Operations(NamedTuple):
    """The last operations of forward and backward, which write FP8 [N, K] and transposed [K, N] from column `first` on.

    Tensors as above; `new` makes the FP8Data to write to. The others take `counts` too, where a recorder counts what
    the cast does to the values, or None.
    """

    new: Callable[[int, int, torch.device], FP8Data]
    gate: Callable[..., None]  # (out, cast_scale, first, x, logits or None, softplus)
    rotate: Callable[..., None]  # (out, cast_scale, first, x, rotation, inverse)
    # (out, cast_scale, first, dy, x, norm, rotation): for the weight
    norm_backward: Callable[..., Tensor]
    gate_backward: Callable[..., Tensor]  # (out, cast_scale, first, dy, x, logits, softplus): for x


def rotate(x: Tensor, out: Tensor, rotation: Rotation, inverse: bool) -> None:
    """Write RoPE of x, or its inverse (which is its gradient), into `out`, which may be x."""
    out.copy_(_rotated(x.float(), rotation, inverse))


def _rotated(x: Tensor, rotation: Rotation, inverse: bool) -> Tensor:
    """Return RoPE of x [B, S, heads, H] in FP32, or its inverse."""
    size = rotation.cos.shape[-1]
    half = size // 2
    cos = rotation.cos[..., None, :half].float()  # [S, 1, R/2] or [B, S, 1, R/2]
    sin = rotation.sin[..., None, :half].float()
    # A rotation is orthogonal: its inverse turns by the opposite angle.
    if inverse:
        sin = -sin
    first = slice(0, size, 2)
    second = slice(1, size, 2)
    if not rotation.interleaved:
        first = slice(0, half)
        second = slice(half, size)
    out = x.clone()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


def _unit(x: Tensor, norm: Norm) -> tuple[Tensor, Tensor, Tensor]:
    """Return x / rms(x) [B, S, heads, H], the norm's factors, and 1 / rms(x), in FP32.

    A norm of each head has factors [H] and takes rms over H. A norm of all heads together has factors [heads, H] and
    takes rms over both dimensions.
    """
    together = norm.weight.shape[-1] != x.shape[-1]
    dims = (-2, -1) if together else (-1,)
    inverse = (x.float().square().mean(dims, keepdim=True) + norm.eps).rsqrt()
    factor = norm.weight.float() + norm.zero_centered
    return x.float() * inverse, factor.view(x.shape[-2:]) if together else factor, inverse


def norm(x: Tensor, norm: Norm, rotation: Rotation | None) -> Tensor:
    """Return RMSNorm of x [B, S, heads, H] and then RoPE, contiguous, computed in FP32 and rounded once."""
    unit, factor, _ = _unit(x, norm)
    y = unit * factor
    return (y if rotation is None else _rotated(y, rotation, False)).to(x.dtype).contiguous()


def norm_backward(
    dy: Tensor, x: Tensor, norm: Norm, rotation: Rotation | None, dx: Tensor
) -> Tensor:
    """Write the gradient of `norm` for x into `dx`; return the gradient of the weight, FP32."""
    unit, factor, inverse = _unit(x, norm)
    slope = dy.float() if rotation is None else _rotated(dy.float(), rotation, True)
    together = factor.dim() == 2
    dims = (-2, -1) if together else (-1,)
    # d(x / rms)/dx: the part of the gradient along the normed vector is taken out.
    change = slope * factor
    dx.copy_(inverse * (change - unit * (change * unit).mean(dims, keepdim=True)))
    return (slope * unit).sum((0, 1) if together else (0, 1, 2)).flatten()


def copy(x: Tensor, out: Tensor) -> None:
    """Write x into `out`."""
    out.copy_(x)


def _gate_factor(logits: Tensor, softplus: bool) -> Tensor:
    """Return the factor of a gate in FP32, in the shape of its logits."""
    return F.softplus(logits.float()) if softplus else torch.sigmoid(logits.float())


def gate(x: Tensor, logits: Tensor, softplus: bool) -> Tensor:
    """Return x [B, S, A, H] * sigmoid or softplus(logits [B, S, A, H or 1]), contiguous, computed in FP32."""
    return (x.float() * _gate_factor(logits, softplus)).to(x.dtype).contiguous()


def gate_backward(dy: Tensor, x: Tensor, logits: Tensor, dlogits: Tensor, softplus: bool) -> Tensor:
    """Return the gradient of `gate` for x, contiguous; that for the logits is written into `dlogits`."""
    # Both factors need it: d sigmoid = s (1 - s), and d softplus = s.
    sigmoid = torch.sigmoid(logits.float())
    slope = dy.float() * x.float() * sigmoid  # the slope of softplus is the sigmoid
    if not softplus:
        slope = slope * (1 - sigmoid)
    dlogits.copy_(slope if logits.shape[-1] == x.shape[-1] else slope.sum(-1, keepdim=True))
    return (dy.float() * _gate_factor(logits, softplus)).to(dy.dtype).contiguous()


PLAIN = Operations(
    rotate=rotate,
    norm=norm,
    norm_backward=norm_backward,
    copy=copy,
    gate=gate,
    gate_backward=gate_backward,
)
