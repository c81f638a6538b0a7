"""A step of decoding: one new token in each of a few rows, whose time is the reading of weights and cache.

A layer of te modules takes some forty kernels for it, each too short to reach the memory's bandwidth. These operations
take six: norm with cast, product and bias; RoPE with the write to the cache and attention over parts of the keys; their
combination with the gate; and products that add to the residual stream or apply the MLP's activation. With three rows
or more, or with large weights in FP8, norm and cast are kernels of their own: eight in BF16, ten in FP8. The kernels
are in decode_product_triton.py, decode_split_triton.py and decode_attention_triton.py, and the parts of a block decide
in their method `step` whether they run.

Shapes: N rows, of which the first B are tokens and the others zeros; I and O channels in and out of a te.Linear.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from te_models.config.attention import Heads

# Rows of one step at most: the smallest tile of a tensor core's product.
MOST_ROWS = 16


@dataclass(frozen=True)
class StepLinear:
    """A te.Linear as a step of decoding reads it.

    Attributes:
        weight: [O, I] in the dtype of the model, or uint8: E4M3.
        bias: [O]; None: there is none.
        weight_inverse: FP32 [1], the factor from E4M3 to values; None: the weight is not in FP8.
        input_scale: FP32 [1], the factor that the input is multiplied by before its cast, under delayed scaling; None
            under current scaling, which takes it from the input.
        power_of_2: round that scale down to a power of two.
        epsilon: the smallest amax that a scale is made from.
    """

    weight: Tensor
    bias: Tensor | None = None
    weight_inverse: Tensor | None = None
    input_scale: Tensor | None = None
    power_of_2: bool = False
    epsilon: float = 0.0


class StepNorm(NamedTuple):
    """An RMSNorm before a product."""

    weight: Tensor
    eps: float
    zero_centered: bool


class StepActivation(NamedTuple):
    """The activation of an MLP after its first product, whose rows are [gate | up] if it is `gated`."""

    name: str
    gated: bool


class StepKeys(NamedTuple):
    """The cache of one layer during a step.

    Attributes:
        keys, values: [B, K, slots, H].
        filled: int64 [1] on the device: the slots in use, the new token's included, which is the last of them.
        mask: [B, 1, 1, slots], added to the scores: -inf where a slot is not seen.
    """

    keys: Tensor
    values: Tensor
    filled: Tensor
    mask: Tensor


class Rotary(NamedTuple):
    """cos and sin [1, R] or [B, 1, R] of the new tokens, for the first R channels of each head."""

    cos: Tensor
    sin: Tensor
    interleaved: bool


class HeadNorms(NamedTuple):
    """The RMSNorms of each head of queries and keys, before RoPE: weights [H]."""

    query: Tensor
    key: Tensor
    eps: float
    zero_centered: bool


@dataclass(frozen=True)
class StepAttention:
    """The settings of attention in a step; its fields are named as in te_models.config.attention.AttentionSpec."""

    heads: Heads
    scale: float
    softcap: float | None = None
    softplus: bool = False
    sinks: Tensor | None = None  # [A]
    rotary: Rotary | None = None
    norms: HeadNorms | None = None


class DecodeKernels(NamedTuple):
    """The operations of a step, which decode_triton.py puts together."""

    product: Callable[..., Tensor]
    attention: Callable[[Tensor, StepKeys, StepAttention, int], Tensor]
