"""Products and norms of the engine's own tests are those of a GPU, as by default."""

from collections.abc import Iterator

import plain_numbers
import pytest

from te_models.engine.emulated.delayed_scaling import ScaleRegistry


@pytest.fixture(
    autouse=True, scope="module"
)  # without __init__.py the scope of a package is the session
def exact_sums() -> Iterator[None]:
    with plain_numbers.exact():
        yield


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The direction of each update of delayed scales, as they come."""
    found: list[str] = []
    original = ScaleRegistry.update

    def update(self: ScaleRegistry, forward: bool) -> None:
        found.append("forward" if forward else "backward")
        original(self, forward)

    monkeypatch.setattr(ScaleRegistry, "update", update)
    return found
