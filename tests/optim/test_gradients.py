"""Lists of parameters are divided in one pass, however many there are."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from te_models.optim.gradients import GradientSums, chunks


@contextmanager
def counting() -> Iterator[list[int]]:
    """Count the lines of Python that run inside, which unlike seconds do not depend on the machine."""
    found = [0]

    def count(frame: Any, event: str, argument: Any) -> Any:
        found[0] += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        yield found
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("most", [1, 7, 12, 10**9])
def test_chunks_hold_at_most_so_many_elements_or_one_parameter(most: int) -> None:
    sizes = [3, 4, 9, 1, 1, 12, 30, 2]
    found = [
        [p.numel() for p in chunk] for chunk in chunks([torch.empty(size) for size in sizes], most)
    ]
    assert [size for chunk in found for size in chunk] == sizes
    for chunk, following in zip(found, [*found[1:], [10**9]], strict=True):
        assert len(chunk) == 1 or sum(chunk) <= most
        assert sum(chunk) + following[0] > most, "the next parameter would have had room"


def test_a_parameter_that_a_step_does_not_use_has_no_gradient() -> None:
    """Not even zeros, with which weight decay and moments would change it."""
    first, second = parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    sums = GradientSums(parameters)
    for used in (first, second):
        with sums.collecting():
            for _ in range(2):
                used.sum().backward()
        assert [None if (found := sums.of(p)) is None else found.tolist() for p in parameters] == [
            [2.0, 2.0] if p is used else None for p in parameters
        ]


def test_the_work_of_chunks_grows_with_the_number_of_parameters() -> None:
    work = []
    for number in (100, 400):
        parameters = [torch.empty(1) for _ in range(number)]
        with counting() as lines:
            assert len(list(chunks(parameters, 10**9))) == 1
        work.append(lines[0])
    assert work[1] < 5 * work[0]


def test_the_work_of_a_last_micro_batch_grows_with_the_number_of_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each parameter has a bucket of its own, and backward fills the last one first."""
    monkeypatch.setattr("te_models.optim.gradients.BUCKET", 1)
    work = []
    for number in (50, 200):
        parameters = [nn.Parameter(torch.ones(1)) for _ in range(number)]
        sums = GradientSums(parameters)
        with sums.collecting():
            sums.last_micro_batch()
            for parameter in parameters:
                parameter.grad = torch.ones(1)
            with counting() as lines:
                for parameter in reversed(parameters):
                    sums._add(parameter)
        work.append(lines[0])
        assert all(sum.item() == 1 for sum in map(sums.of, parameters) if sum is not None)
    assert work[1] < 6 * work[0]
