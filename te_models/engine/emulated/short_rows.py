"""Steps of generation on a CPU, which leave out the zeros that pad their few rows."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

# Products of fewer rows may take another way through a CPU's library, in which sums differ in the last bit; and
# RMSNorm's kernels depend on whether the rows are a multiple of 4.
FEWEST_ROWS = 4
_MULTIPLE: ContextVar[int] = ContextVar("short_rows", default=1)


@contextlib.contextmanager
def short_rows(multiple: int) -> Iterator[None]:
    """Inside, te modules take rows as if zeros followed them up to `multiple`, with the same results.

    The rows are a multiple of `FEWEST_ROWS`, no pass has a backward, and none records an amax.
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
