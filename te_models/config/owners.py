"""Which rank owns what, where whole tensors are shared out among ranks."""

from __future__ import annotations

from collections.abc import Sequence


def share_out(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return the owner of each tensor of these sizes, a number below `ranks`: the largest first, to whom has least."""
    owners, owned = [0] * len(sizes), [0] * ranks
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        owners[place] = owned.index(min(owned))
        owned[owners[place]] += sizes[place]
    return owners
