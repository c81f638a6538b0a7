"""Shares of a whole as they are written, and whole tensors shared out among ranks."""

from collections.abc import Sequence
from fractions import Fraction


def is_count_or_share(number: float) -> bool:
    """Return whether a number is a share below 1, or whole."""
    return number < 1 or float(number).is_integer()


def share_of(share: float, whole: int) -> Fraction:
    """Return `share` times `whole`, where `share` is the shortest decimal number that gives this float.

    0.07 of 100 is 7, where the product of floating-point numbers is above 7.
    """
    return Fraction(str(float(share))) * whole


def share_out(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return the owner of each tensor of these sizes, a number below `ranks`: the largest first, to whom has least."""
    owners = [0] * len(sizes)
    owned = [0] * ranks
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        owners[place] = owned.index(min(owned))
        owned[owners[place]] += sizes[place]
    return owners
