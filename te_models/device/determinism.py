"""Deterministic algorithms for the duration of a run."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def deterministic(enabled: bool = True) -> Iterator[None]:
    """Give the same bits for the same inputs on the same GPU, without cuDNN's attention, which is not deterministic.

    Changes nothing if that is not `enabled`.
    """
    if not enabled:
        yield
        return
    fills: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), fills.fill_uninitialized_memory
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it PyTorch refuses cuBLAS
    torch.use_deterministic_algorithms(True)
    fills.fill_uninitialized_memory = False  # a debugging aid that costs time
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        fills.fill_uninitialized_memory = before[1]
