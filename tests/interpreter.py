"""Triton's interpreter in a process that does nothing else: what it would do at each call is done once."""

import dataclasses
import functools
import importlib
import inspect
import math
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
    modules: set[str] = set()

    def patched(kernel: Any) -> Kept:
        if kernel.__module__ not in modules:
            modules.add(kernel.__module__)
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


def share_shapes(monkeypatch: pytest.MonkeyPatch, core: Any, semantic: Any) -> None:
    """Make the shapes of types and tensors once.

    Each operation makes the type of its result and wraps every size twice, which took half of all time.
    """

    initialize = core.block_type.__init__

    @functools.cache
    def of_type(sizes: tuple[Any, ...]) -> tuple[Any, int, str]:
        """Return a type's shape, its number of elements and the shape's text, or raise what Triton raises."""
        first = core.block_type.__new__(core.block_type)
        initialize(first, core.int32, list(sizes))
        return first.shape, first.numel, str(first.shape)

    @functools.cache
    def of_tensor(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return (
            core.tuple([core.constexpr(size) for size in sizes]),
            core.constexpr(math.prod(sizes)),
        )

    def initialize_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = shape.values if isinstance(shape, core.tuple) else shape
        plain = tuple(size.value if isinstance(size, core.constexpr) else size for size in sizes)
        self.element_ty = element_ty
        self.shape, self.numel, text = of_type(plain)
        self.name = f"<{text}, {element_ty}>"

    def initialize_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle = handle
        self.type = type
        self.dtype = type.scalar
        self.shape, self.numel = of_tensor(tuple(type.shape.values) if type.is_block() else ())

    broadcast = semantic.broadcast_impl_value

    def broadcast_others(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    monkeypatch.setattr(core.block_type, "__init__", initialize_type)
    monkeypatch.setattr(core.tensor, "__init__", initialize_tensor)
    monkeypatch.setattr(semantic, "broadcast_impl_value", broadcast_others)


def faster() -> Iterator[None]:
    """Keep the interpreter's replacements, its NumPy types and its shapes for the length of a session."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    semantic: Any = importlib.import_module("triton.language.semantic").TritonSemantic
    with pytest.MonkeyPatch.context() as monkeypatch:
        language = [interpreter.tl, interpreter.tl.core]
        monkeypatch.setattr(
            interpreter, "_patch_lang", patch_once(interpreter._patch_lang, language)
        )
        monkeypatch.setattr(interpreter, "_get_np_dtype", numpy_types(interpreter._get_np_dtype))
        share_shapes(monkeypatch, interpreter.tl.core, semantic)
        builder = interpreter.interpreter_builder
        # An overflow is looked for in every sum of integers, and reported with `debug` alone.
        if not builder.options.debug:
            options = dataclasses.replace(builder.options, sanitize_overflow=False)
            monkeypatch.setattr(builder, "options", options)
        yield
