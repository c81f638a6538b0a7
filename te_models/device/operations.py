"""The floating-point operations of a computation that runs without data, on the meta device.

PyTorch's FlopCounterMode counts products, convolutions and its own attention. A kernel that it does not know, or whose
plain version computes more than the kernel, says what it computes where it is (`count_flops`, `one_operation`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode


class OperationCount:
    """Counts the operations of what runs on meta inside, in this thread.

    A multiplication and its addition are two operations.
    """

    def __init__(self) -> None:
        self._counter = FlopCounterMode(display=False)
        self._declared = 0.0  # less what PyTorch counted inside `one_operation`

    def __enter__(self) -> OperationCount:
        assert _active() is None, "one at a time"
        _THREAD.active = self
        self._counter.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._counter.__exit__(*error)
        _THREAD.active = None

    @property
    def total(self) -> float:
        """The operations so far."""
        return self._declared + self._counter.get_total_flops()

    def declare(self, flops: float) -> None:
        """Count operations that PyTorch does not see."""
        self._declared += flops


_THREAD = threading.local()


def _active() -> OperationCount | None:
    return getattr(_THREAD, "active", None)


def count_flops(like: Tensor, flops: float) -> None:
    """Count the operations of a kernel whose results are empty; `like` is one of its tensors."""
    if not like.is_meta:
        return
    counter = _active()
    if counter is not None:
        counter.declare(flops)


def one_operation(like: Tensor, flops: float) -> AbstractContextManager[None]:
    """Count what runs inside as a kernel with so many operations; `like` is one of its tensors."""
    if not like.is_meta:
        return contextlib.nullcontext()
    return _counted_as(flops)


@contextlib.contextmanager
def _counted_as(flops: float) -> Iterator[None]:
    counter = _active()
    before = 0.0 if counter is None else counter.total
    yield
    if counter is not None:
        # PyTorch has counted the operations of the plain version inside: replace them by the kernel's.
        counter.declare(flops - (counter.total - before))
