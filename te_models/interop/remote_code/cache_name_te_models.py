"""The name of the argument with the cache, which transformers 5.24 changed. Needs only PyTorch and transformers."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import TypeVar

from transformers.modeling_outputs import BaseModelOutputWithPast

# Names of the argument with the cache: since transformers 5.24, and before.
CACHES = ("cache", "past_key_values")
CACHE = fields(BaseModelOutputWithPast)[1].name  # the name in the installed version
Result = TypeVar("Result")


def cache_by_either_name(method: Callable[..., Result]) -> Callable[..., Result]:
    """Let a method take a cache by either of its names.

    The method gets it as `cache` if it has an argument of that name, and else as the installed transformers calls it,
    which is also what the signature says: `generate` looks there for what it may pass.
    """
    signature = inspect.signature(method)
    parameter = "cache" if "cache" in signature.parameters else CACHE
    (other,) = set(CACHES) - {parameter}

    @wraps(method)
    def call(*args: object, **options: object) -> Result:
        return (
            method(*args, **{parameter: options.pop(other)}, **options)
            if other in options
            else method(*args, **options)
        )

    shown = [
        p.replace(name=CACHE) if p.name == parameter else p for p in signature.parameters.values()
    ]
    call.__signature__ = signature.replace(parameters=shown)  # type: ignore[missing-attribute]
    return call
