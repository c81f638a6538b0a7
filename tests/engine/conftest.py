"""Products of the engine's own tests are those of tensor cores, as by default."""

from collections.abc import Iterator

import pytest

import te_models.engine.emulated as emulated


@pytest.fixture(autouse=True, scope="package")
def exact_gemms() -> Iterator[None]:
    with emulated.exact_gemm(2**20):
        yield
