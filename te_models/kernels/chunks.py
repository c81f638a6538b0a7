"""Chunks of a recurrence whose state decays: how much is left of what and where, and the walk from chunk to chunk.

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


def through_chunks(
    q: Tensor,
    k: Tensor,
    written: Tensor,
    read: Tensor,
    scores: Tensor,
    passed: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the outputs [B, H, n C, d_v] and the last state of a delta rule, from chunk to chunk.

    Args:
        q: queries times the decay from the start of the chunk [B, H, n, C, d_k].
        k: keys times the decay to the end of the chunk [B, H, n, C, d_k].
        written: what the tokens write from their own values [B, H, n, C, d_v].
        read: what their values lose per state before the chunk [B, H, n, C, d_k].
        scores: the products of queries and keys within a chunk, decayed [B, H, n, C, C].
        passed: the decay of the state over a chunk [B, H, n, d_k or 1, 1].
        state: before the first token [B, H, d_k, d_v].
    """
    outputs = []
    # unbind, since backward of an index would write all chunks once per chunk.
    for query, key, from_values, seen_before, score, decay in zip(
        q.unbind(2),
        k.unbind(2),
        written.unbind(2),
        read.unbind(2),
        scores.unbind(2),
        passed.unbind(2),
        strict=True,
    ):
        # What the tokens write, now that the state before them is known.
        new = from_values - seen_before @ state  # [B, H, C, d_v]
        outputs.append(query @ state + score @ new)
        state = state * decay + key.mT @ new  # [B, H, d_k, d_v]
    return torch.cat(outputs, dim=2), state
