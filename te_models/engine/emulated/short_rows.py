"""Steps of generation on a CPU, which leave out the zeros that pad their few rows."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch

from te_models.device.measured import once

_SHAPES = ((256, 128), (512, 192), (192, 512), (2048, 40), (96, 16), (64, 256))  # of weights, outputs last
_MULTIPLE: ContextVar[int] = ContextVar("short_rows", default=1)


@once
def fewest_rows() -> int:
    """Return the rows from which on a product in FP32 has the bits of one of any more rows.

    Fewer rows may take another way through a CPU's library, in which sums differ in the last bit: below 16 rows where
    it has AMX. And RMSNorm's kernels depend on whether the rows are a multiple of 4.
    """
    generator, fewest = torch.Generator().manual_seed(0), 4
    for inputs, outputs in _SHAPES:
        x, weight = (torch.randn(rows, inputs, generator=generator) for rows in (128, outputs))
        many = x @ weight.t()
        while fewest < len(x) and not torch.equal(x[:fewest] @ weight.t(), many[:fewest]):
            fewest *= 2
    return fewest


@contextlib.contextmanager
def short_rows(multiple: int) -> Iterator[None]:
    """Inside, te modules take rows as if zeros followed them up to `multiple`, with the same results.

    The rows are a multiple of `fewest_rows()`, no pass has a backward, and none records an amax.
    """
    token = _MULTIPLE.set(multiple)
    try:
        yield
    finally:
        _MULTIPLE.reset(token)


def are_short() -> bool:
    """Return whether `short_rows` is around the caller."""
    return _MULTIPLE.get() > 1


def full_rows(rows: int) -> int:
    """Return the rows that `rows` stand for."""
    multiple = _MULTIPLE.get()
    return -(-rows // multiple) * multiple
