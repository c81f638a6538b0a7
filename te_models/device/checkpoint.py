"""torch.utils.checkpoint without reentrance, for functions that may raise."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.utils.checkpoint

T = TypeVar("T")


def checkpoint(function: Callable[..., T], *args: object, **options: Any) -> T:
    """Return function(*args), which backward recomputes.

    Before torch 2.12, torch leaves its hooks for saved tensors in place where `function` raises, for as long as anyone
    keeps the error. All that runs meanwhile saves its tensors through them, and its backward fails: an eager step
    after a capture that failed, for example. So an error of the first pass is kept until torch has taken them off.

    Args:
        function: computes the result, again in backward.
        args: its arguments.
        options: of torch.utils.checkpoint.checkpoint, but `use_reentrant`, and keyword arguments of the function.
    """
    errors: list[BaseException] = []
    started = False

    def passed(*inputs: object, **named: Any) -> T | None:
        nonlocal started
        # Torch ends a recompute by an error of its own.
        if started:
            return function(*inputs, **named)
        started = True
        try:
            return function(*inputs, **named)
        except BaseException as error:
            errors.append(error)
            return None

    result: Any = torch.utils.checkpoint.checkpoint(passed, *args, use_reentrant=False, **options)
    if errors:
        raise errors.pop()
    return result
