"""Chunks of a recurrence whose state decays by one number per head and token: how much is left of what, and where.

Shapes: B batch, S sequence, H heads, n chunks of C tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Decays(NamedTuple):
    """Factors between 0 and 1, FP32."""

    between: Tensor  # [B, H, n, C, C]: left at a token (row) of what an earlier one (column) of its chunk wrote
    since: Tensor  # [B, H, n, C]: left at a token of the state before its chunk
    until: Tensor  # [B, H, n, C]: left after the chunk of what a token wrote
    passed: Tensor  # [B, H, n]: left after a chunk of the state before it


def chunked_decays(g: Tensor, documents: Tensor | None, padding: int) -> Decays:
    """Return the decays between the tokens of a chunk, given the logarithms of decay g [B, H, n, C].

    With `documents` int [B, S] nothing passes from one to another; the last `padding` tokens belong to the last.
    """
    size = g.shape[-1]
    total = g.cumsum(-1)  # log of the decay since before the chunk
    seen = torch.ones(size, size, dtype=torch.bool, device=g.device).tril()
    of_before = 1.0
    of_last = 1.0
    passes = 1.0
    if documents is not None:
        padded = F.pad(documents.double(), (0, padding), mode="replicate").unflatten(
            1, (1, -1, size)
        )
        seen = seen & (padded[..., :, None] == padded[..., None, :])  # [B, 1, n, C, C]
        of_before, of_last, passes = of_documents(padded)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~seen, float("-inf")).exp()
    return Decays(
        between=between,
        since=total.exp() * of_before,
        until=(total[..., -1:] - total).exp() * of_last,
        passed=total[..., -1].exp() * passes,
    )


def of_documents(document: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return which tokens see the state before their chunk and which write to the one after it, as factors 0 and 1.

    And through which chunks a state passes, [B, 1, n]. own [B, 1, n, C] is the document of each token.
    """
    last = document[..., -1]
    before = torch.cat((document[..., :1, 0], last[..., :-1]), dim=-1)
    return (
        (document == before[..., None]).float(),
        (document == last[..., None]).float(),
        (last == before).float(),
    )
