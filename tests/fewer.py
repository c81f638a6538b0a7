"""Products of cases of which `make test` runs a part and `make test-slow` the rest."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def every(step: int, *axes: Iterable[Any]) -> list[Any]:
    """Return all combinations of the axes; only those on each `step`-th diagonal are not slow.

    With a step of at most the length of the longest axis every value of every other axis is among them.
    """
    cases = itertools.product(*(enumerate(axis) for axis in axes))
    return [
        pytest.param(
            *(value for _, value in case),
            marks=[pytest.mark.slow] if sum(n for n, _ in case) % step else [],
        )
        for case in cases
    ]


def some(step: int, table: Iterable[Sequence[Any]]) -> list[Any]:
    """Return the rows of a table, of which only each `step`-th is not slow."""
    return [
        pytest.param(*row, marks=[pytest.mark.slow] if n % step else [])
        for n, row in enumerate(table)
    ]


def slow(cases: Iterable[Any]) -> list[Any]:
    """Return the cases, all slow."""
    return [pytest.param(*case.values, marks=pytest.mark.slow) for case in cases]
