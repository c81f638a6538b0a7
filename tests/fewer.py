"""Products of cases of which `make test` runs a part, and `make test-slow` the rest or a part of that."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def every(step: int, *axes: Iterable[Any], rest: int = 1) -> list[Any]:
    """Return combinations of the axes; only those on each `step`-th diagonal are not slow.

    With a step of at most the length of the longest axis every value of every other axis is among them. Of the
    others, those on each `rest`-th diagonal are there.
    """
    found = []
    for case in itertools.product(*(enumerate(axis) for axis in axes)):
        diagonal = sum(n for n, _ in case)
        values = [value for _, value in case]
        if diagonal % step == 0:
            found.append(pytest.param(*values))
        elif diagonal % rest == 0:
            found.append(pytest.param(*values, marks=pytest.mark.slow))
    return found


def some(step: int, table: Iterable[Sequence[Any]]) -> list[Any]:
    """Return the rows of a table, of which only each `step`-th is not slow."""
    return [
        pytest.param(*row, marks=[pytest.mark.slow] if n % step else [])
        for n, row in enumerate(table)
    ]


def slow(cases: Iterable[Any]) -> list[Any]:
    """Return the cases, all slow."""
    return [pytest.param(*case.values, marks=pytest.mark.slow) for case in cases]


def chosen(quick: Iterable[Sequence[Any]], table: Iterable[Any]) -> list[Any]:
    """Return the quick cases, and those of the table that are not among them, all slow."""
    rows = [tuple(row) for row in quick]
    return [*rows, *(case for case in slow(table) if case.values not in rows)]


def asked_for(request: pytest.FixtureRequest, *parameters: str) -> set[Any]:
    """Return what the tests of the fixture's file that are to run have for a parameter, or tuples for several."""
    found = set()
    for item in request.session.items:
        values = item.callspec.params if hasattr(item, "callspec") else {}
        if item.path == request.path and values.keys() >= set(parameters):
            own = tuple(values[name] for name in parameters)
            found.add(own if len(own) > 1 else own[0])
    return found
