"""The other way of tokens to experts on several ranks: every rank gets the tokens of all, and returns parts of sums.

Exchange (te_models/model/expert_parallel.py) sends a row per token and expert, whose number the host has to know.
Here all sizes are known before the pass, so the host waits for nothing and a step can be one CUDA graph. A rank
receives (n - 1) T tokens from the n - 1 others and sends them as many sums, where the exchange moves k T (n - 1) / n
rows each way: less as long as there are fewer ranks than experts per token.

A sum over the k experts of a token is computed in parts: each rank adds up its own experts' rows in FP32 and rounds the
result to the dtype of the activations, and the parts are added in FP32. Shapes: T tokens per rank, n ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from te_models.distributed.collectives import all_gather, all_to_all
from te_models.distributed.planned_ranks import world_size
from te_models.model.tensor_parallel import Mapped

E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max
# Buffers have room for n times the rows of one rank, since all tokens may choose one rank's experts.
MOST_RANKS = 4


class GatheredTokens(NamedTuple):
    """The way of one layer's tokens [T, D] to all ranks that share its experts, and of their sums back."""

    group: dist.ProcessGroup | None
    fp8: bool  # whether tokens travel in FP8; sums and gradients never do

    def to_all(self, tokens: Tensor) -> Tensor:
        """Return the tokens of all ranks [n T, D], in the order of ranks."""
        return Mapped.apply(tokens, self._gathered, self._summed)

    def weights_to_all(self, weights: Tensor) -> Tensor:
        """Return the weights of all ranks' tokens, FP32 [n T, k], from this rank's [T, k]."""
        return Mapped.apply(weights, self._in_full, self._summed)

    def from_all(self, parts: Tensor) -> Tensor:
        """Return the sums of this rank's tokens [T, D] from the parts of all tokens' sums [n T, D] on each rank."""
        return Mapped.apply(parts, self._summed, self._in_full)

    def local_choice(self, chosen: Tensor, experts: int, rank: int) -> Tensor:
        """Return the experts of all ranks' tokens [n T, k] by their numbers among the `experts` of `rank`.

        `chosen` [T, k] are the experts of this rank's tokens, numbered over all ranks. An expert of another rank, and
        padding, is number `experts`.
        """
        everyone = self._in_full(chosen.int()).long() - rank * experts
        return everyone.masked_fill((everyone < 0) | (everyone >= experts), experts)

    def _gathered(self, tokens: Tensor) -> Tensor:
        if not self.fp8:
            return self._in_full(tokens)
        return unpacked(self._in_full(packed(tokens)), tokens.dtype)

    def _in_full(self, x: Tensor) -> Tensor:
        """Return the tensors [T, D] of all ranks [n T, D]."""
        return all_gather(x, self.group)

    def _summed(self, parts: Tensor) -> Tensor:
        """Return the sum over ranks of each rank's part of this rank's rows, from its parts of all ranks' [n T, D]."""
        received = all_to_all(parts, self.group)
        # Not a reduce-scatter, which would round to BF16 after each addition, in an order that NCCL chooses.
        apart = received.unflatten(0, (world_size(self.group), -1))  # [n, T, D]
        return apart.sum(0, dtype=torch.float32).to(parts.dtype)


def packed(rows: Tensor) -> Tensor:
    """Return rows [n, D] in E4M3, each with its own FP32 scale behind it: uint8 [n, D + 4]."""
    scale = rows.abs().amax(1, keepdim=True).float() / E4M3_MAX
    # A row of zeros stays zeros instead of becoming 0 / 0.
    scale = scale.masked_fill(scale == 0, 1.0)
    codes = (rows.float() / scale).to(torch.float8_e4m3fn)
    # In one tensor, so that one collective carries both.
    return torch.cat((codes.view(torch.uint8), scale.view(torch.uint8)), 1)


def unpacked(sent: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rows [n, D] of `packed`, rounded to `dtype`."""
    codes = sent[:, :-4].view(torch.float8_e4m3fn)
    scale = sent[:, -4:].contiguous().view(torch.float32)
    return (codes.float() * scale).to(dtype)
