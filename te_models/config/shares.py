"""Shares of a whole as they are written: 0.07 of 100 is 7, where the product of floating-point numbers is above 7."""

from __future__ import annotations

from fractions import Fraction


def share_of(share: float, whole: int) -> Fraction:
    """Return `share` times `whole`, where `share` is the shortest decimal number that gives this float."""
    return Fraction(str(float(share))) * whole
