"""Products and norms of the engine's own tests are those of a GPU, as by default."""

from collections.abc import Iterator

import plain_numbers
import pytest


@pytest.fixture(autouse=True, scope="module")  # without __init__.py the scope of a package is the session
def exact_sums() -> Iterator[None]:
    with plain_numbers.exact():
        yield
