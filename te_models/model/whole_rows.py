"""Mixers with a state under context parallelism: each rank mixes the tokens of whole rows, by some of the heads.

A state passes from token to token, so a rank cannot begin before the rank with the tokens before its own has ended. But
heads do not depend on each other. So the ranks exchange: each gives away its tokens of the other ranks' heads and gets
all tokens of its own heads, and after the mixer they exchange the outputs back (as attention does in DeepSpeed-Ulysses,
arXiv 2309.14509). Padding, documents and kernels are the same as for whole rows. Every rank has all parameters, of
which it uses its heads' rows; the sum of gradients over ranks, which training computes anyway, has all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from te_models.config.layer import MixerSpec
from te_models.model.context_parallel import TokenShare
from te_models.model.convolution import without_padding
from te_models.model.forward_context import ForwardContext

Spec = TypeVar("Spec", bound=MixerSpec)


@dataclass(frozen=True)
class WholeRows:
    """The tokens and the heads that this rank mixes: without context parallelism all of them.

    Attributes:
        context: the pass over whole rows.
        share: this rank's tokens of each row outside the mixer; None: all of them.
    """

    context: ForwardContext
    share: TokenShare | None

    @classmethod
    def of(cls, context: ForwardContext) -> WholeRows:
        """Return the whole rows of a pass."""
        whole = context if context.whole is None else context.whole
        return cls(whole, context.share)

    @property
    def ranks(self) -> int:
        """The number of ranks that divide the heads."""
        return 1 if self.share is None else self.share.size

    def local(self, spec: Spec) -> Spec:
        """Return the description of this rank's heads."""
        return spec if self.share is None else spec.local(self.ranks)

    def local_rows(self, values: Tensor, sections: Sequence[int]) -> Tensor:
        """Return the rows of a parameter that belong to this rank's heads.

        Args:
            values: [rows, ...], with one section of consecutive rows after the other.
            sections: the number of rows of each section, which the ranks divide among them.
        """
        if self.share is None:
            return values
        parts = []
        for section in values.split(list(sections)):
            parts.append(section.chunk(self.ranks)[self.share.rank])
        return torch.cat(parts)

    def mix(
        self,
        mix: Callable[..., Tensor],
        inputs: Sequence[Tensor],
        sections: Sequence[Sequence[int]],
    ) -> Tensor:
        """Call `mix` on whole rows, and return its output for this rank's tokens and all heads: [B, S, heads, ...].

        Args:
            mix: called as `mix(*inputs, counts)` by te_models.model.convolution.without_padding, with the inputs of
                this rank's heads [B, row, C / ranks]; returns [B, row, heads / ranks, ...], or channels in place of
                heads.
            inputs: tensors [B, S, C] with this rank's tokens and all heads; each has its own number of channels C.
            sections: for each input the sizes of the sections of its channels, each of which the ranks divide.
        """
        share = self.share
        if share is None:
            return without_padding(mix, self.context, *inputs)
        rows = []
        for x, sizes in zip(inputs, sections, strict=True):
            # [B, S, section] -> [B, S, ranks, section / ranks]: a rank gets its part of every section.
            parts = [part.unflatten(-1, (self.ranks, -1)) for part in x.split(list(sizes), dim=-1)]
            by_rank = torch.cat(parts, dim=-1)  # [B, S, ranks, C / ranks]
            rows.append(share.rows_of_heads(by_rank))
        out = without_padding(mix, self.context, *rows)  # [B, row, heads / ranks, ...]
        # [B, S, ranks, heads / ranks, ...] -> [B, S, heads, ...]
        return share.tokens_of_heads(out).flatten(2, 3)
