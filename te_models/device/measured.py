"""Facts about a device that are measured once per process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def once(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function`, which runs once for each choice of its arguments; torch.compile calls instead of tracing it.

    The arguments are hashable, the result is no tensor.
    """
    cached = functools.cache(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return cached(*args, **kwargs)

    # torch.compiler.assume_constant_result does no more than this, and imports TorchDynamo, which takes a second.
    call._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return call
