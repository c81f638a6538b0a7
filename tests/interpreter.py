"""Triton's interpreter in a process that does nothing else: what it would do at each call is done once."""

import importlib
import inspect
import os
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

INTERPRETED = bool(os.environ.get("TRITON_INTERPRET"))


class Kept:
    """The patches of a launch, which stay."""

    def restore(self) -> None:
        pass


def patch_once(patch: Callable[[Any], object], language: list[ModuleType]) -> Callable[[Any], Kept]:
    """Return `patch`, which replaces the functions of `language` for one kernel, without its repetitions.

    The interpreter replaces hundreds of functions at each launch and at each call of one kernel by another, which took
    a third of its time. The replacements depend only on the modules that the kernel's own module imports.
    """
    seen: set[tuple[bool, ...]] = set()

    def patched(kernel: Any) -> Kept:
        values = [value for value in kernel.__globals__.values() if inspect.ismodule(value)]
        imported = tuple(module in values for module in language)
        if imported not in seen:
            seen.add(imported)
            patch(kernel)
        return Kept()

    return patched


def numpy_types(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return `find`, which makes a table of all types to look one up, with the types that it has found before."""
    known: dict[str, Any] = {}

    def found(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = find(dtype)
        return known[name]

    return found


def faster() -> Iterator[None]:
    """Keep the interpreter's replacements, and its NumPy types, for the length of a session."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    with pytest.MonkeyPatch.context() as monkeypatch:
        language = [interpreter.tl, interpreter.tl.core]
        monkeypatch.setattr(
            interpreter, "_patch_lang", patch_once(interpreter._patch_lang, language)
        )
        monkeypatch.setattr(interpreter, "_get_np_dtype", numpy_types(interpreter._get_np_dtype))
        yield
