"""Parts of mixers whose state has one size for any number of tokens: taps, padding, newest inputs, initial decays.

Shapes: B batch, S sequence, C channels of the convolution, K taps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from te_models.model.forward_context import ForwardContext

# The range of softplus(dt_bias) in a new model (Gu and Dao 2023, arXiv 2312.00752).
SLOWEST = 1e-3
FASTEST = 0.1


class Taps(nn.Module):
    """The taps of a depthwise convolution, [C, 1, K], and a bias [C], under the names that nn.Conv1d gives them."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias

    def initialize(self, name: str, values: Tensor) -> None:
        """Set the initial values of "weight" or "bias", as nn.Conv1d does."""
        if name == "bias":
            values.zero_()
            return
        bound = self.weight.shape[2] ** -0.5
        values.uniform_(-bound, bound)


def initialize_decays(name: str, values: Tensor) -> None:
    """Set the initial values of "A_log" or "dt_bias", so that decays cover a range of lengths.

    A token decays the state by exp(-exp(A_log) * softplus(... + dt_bias)).
    """
    if name == "A_log":
        values.uniform_(1.0, 16.0).log_()
        return
    rate = values.uniform_(math.log(SLOWEST), math.log(FASTEST)).exp_()
    values.copy_(rate + torch.log(-torch.expm1(-rate)))  # softplus of which is the rate


def without_padding(mix: Callable[..., Tensor], context: ForwardContext, *inputs: Tensor) -> Tensor:
    """Return `mix` of the tokens of each row, moved to its beginning; zeros at padding.

    `mix` takes `inputs`, each [B, S, ...], and the number of tokens of each row [B], or None where all are tokens. It
    returns [B, S, ...].
    """
    moved = context.tokens_first()
    if moved is None:
        return mix(*inputs, None)
    order, counts = moved
    out = mix(*(x.gather(1, _like(order, x)) for x in inputs), counts)
    real = torch.arange(out.shape[1], device=out.device) < counts[:, None]  # [B, S]
    # Not only scattered: a convolution's bias makes padding nonzero, and linears behind it expect zeros.
    out = out * _like(real, out)
    # The inverse of the gather above: `order` says where each token came from.
    return torch.zeros_like(out).scatter(1, _like(order, out), out)


def _like(order: Tensor, x: Tensor) -> Tensor:
    """Return one value per token [B, S] in the shape of x [B, S, ...]."""
    return order.view(*order.shape, *[1] * (x.dim() - 2)).expand_as(x)


def newest(tail: Tensor, x: Tensor, counts: Tensor | None) -> Tensor:
    """Return the last K - 1 tokens of tail [B, K - 1, C] and x [B, S, C] together.

    Of x the first `counts` [B] are tokens; None: all.
    """
    whole = torch.cat((tail, x), dim=1)
    seq: Any = x.shape[1]
    if counts is None:
        # Slicing from the front also serves texts shorter than the tail, whose older inputs then stay.
        return whole[:, seq:]
    place = counts[:, None] + torch.arange(tail.shape[1], device=whole.device)
    return whole.gather(1, place[..., None].expand(-1, -1, whole.shape[2]))
