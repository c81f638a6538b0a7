"""Products and norms of the engine's own tests are those of a GPU, as by default."""

from collections.abc import Iterator

import plain_numbers
import pytest


@pytest.fixture(autouse=True, scope="package")
def exact_sums() -> Iterator[None]:
    with plain_numbers.exact():
        yield
