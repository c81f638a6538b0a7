"""Python's searches for cycles of objects, put off where they would only take time."""

import contextlib
import gc
from collections.abc import Iterator

# Objects that are made between two searches of each kind, instead of Python's 700. A command imports half a million,
# which live until it ends, and Python's own setting goes through all of them again and again: a quarter of the time
# that importing torch and te_models takes.
THRESHOLDS = (10_000, 10, 10)


@contextlib.contextmanager
def collecting_later() -> Iterator[None]:
    """Make many objects inside that will live: no search for cycles goes through them meanwhile."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def collect_rarely() -> None:
    """Let the process search for cycles rarely from now on."""
    gc.set_threshold(*THRESHOLDS)
