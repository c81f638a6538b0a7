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

import numpy as np
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


def share_shapes(monkeypatch: pytest.MonkeyPatch, core: Any) -> None:
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

    of_tensors: dict[int, tuple[Any, Any]] = {}  # by the identity of the type's shape

    def of_tensor(shape: Any) -> tuple[Any, Any]:
        """Return the shape and the number of elements of a tensor, of a type with this shape."""
        sizes = tuple(shape)
        found = core.tuple([core.constexpr(size) for size in sizes])
        of_tensors[id(shape)] = found, core.constexpr(math.prod(sizes))
        return of_tensors[id(shape)]

    texts: dict[int, tuple[Any, int, str]] = {}  # by the same, what `of_type` returns
    scalar = core.tuple([]), core.constexpr(1)

    def initialize_type(self: Any, element_ty: Any, shape: Any) -> None:
        self.element_ty = element_ty
        if id(shape) in texts:
            self.shape, self.numel, text = texts[id(shape)]
        else:
            sizes = shape.values if isinstance(shape, core.tuple) else shape
            plain = tuple(
                size.value if isinstance(size, core.constexpr) else size for size in sizes
            )
            known = of_type(plain)
            texts[id(known[0])] = known
            self.shape, self.numel, text = known
        self.name = f"<{text}, {element_ty.name}>"

    def initialize_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle = handle
        self.type = type
        if type.is_block():
            self.dtype = type.element_ty
            shape = type.shape
            self.shape, self.numel = of_tensors.get(id(shape)) or of_tensor(shape)
        else:
            self.dtype = type.scalar
            self.shape, self.numel = scalar

    monkeypatch.setattr(core.block_type, "__init__", initialize_type)
    monkeypatch.setattr(core.tensor, "__init__", initialize_tensor)


def share_operands(monkeypatch: pytest.MonkeyPatch, interpreter: Any, semantic: Any) -> None:
    """Find the type and the shape of two operands together once, and make numbers tensors once.

    That took a third of the time. Shapes are compared by identity, since `share_shapes` makes each of them once.
    """
    core = interpreter.tl.core
    broadcast = semantic.broadcast_impl_value
    check = semantic.binary_op_type_checking_impl
    stretched: dict[tuple[int, int], tuple[Any, tuple[int, ...]]] = {}
    constants: dict[tuple[Any, ...], Any] = {}

    def stretch(x: Any, shape: Any, sizes: tuple[int, ...]) -> Any:
        if x.shape is shape:
            return x
        data = x.handle.data
        data = np.broadcast_to(data, sizes) if x.type.is_block() else np.full(sizes, data)
        handle = interpreter.TensorHandle(data, x.handle.dtype.scalar)
        return core.tensor(handle, core.block_type(x.dtype, sizes))

    def broadcast_once(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        key = id(lhs.shape), id(rhs.shape)
        if key not in stretched:
            lhs, rhs = broadcast(self, lhs, rhs)
            stretched[key] = lhs.shape, tuple(lhs.type.shape)
            return lhs, rhs
        return stretch(lhs, *stretched[key]), stretch(rhs, *stretched[key])

    def operands(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        """Return both with the type of the result, but their own data, which NumPy stretches as it computes."""
        if lhs.shape is rhs.shape:
            return lhs, rhs
        key = id(lhs.shape), id(rhs.shape)
        if key not in stretched:
            return broadcast_once(self, lhs, rhs)
        shape, sizes = stretched[key]
        if lhs.shape is not shape:
            lhs = core.tensor(lhs.handle, core.block_type(lhs.dtype, sizes))
        if rhs.shape is not shape:
            rhs = core.tensor(rhs.handle, core.block_type(rhs.dtype, sizes))
        return lhs, rhs

    def check_once(self: Any, lhs: Any, rhs: Any, *pointers: bool, **options: bool) -> Any:
        if isinstance(lhs, core.tensor) and isinstance(rhs, core.tensor):
            # A quotient may have another type, and two pointers are an error.
            plain = len(pointers) < 4 and not options
            of_pointer = lhs.dtype.is_ptr()
            if plain and not of_pointer and lhs.dtype.name == rhs.dtype.name:
                return operands(self, lhs, rhs)
            if plain and of_pointer and pointers[:1] == (True,) and rhs.dtype.is_int():
                return operands(self, lhs, rhs)
            return check(self, lhs, rhs, *pointers, **options)
        tensor, number = (lhs, rhs) if isinstance(lhs, core.tensor) else (rhs, lhs)
        if not isinstance(tensor, core.tensor) or tensor.dtype.is_ptr() or options:
            return check(self, lhs, rhs, *pointers, **options)
        if type(number) not in (bool, int, float):
            return check(self, lhs, rhs, *pointers)
        key = tensor is lhs, tensor.dtype.name, id(tensor.shape), type(number), number, pointers
        if key in constants:
            return (lhs, constants[key]) if tensor is lhs else (constants[key], rhs)
        found = check(self, lhs, rhs, *pointers)
        same, constant = found if tensor is lhs else found[::-1]
        if same is tensor:  # it needed no other type
            constant.handle.data.flags.writeable = False
            constants[key] = constant
        return found

    monkeypatch.setattr(semantic, "broadcast_impl_value", broadcast_once)
    monkeypatch.setattr(semantic, "binary_op_type_checking_impl", check_once)


def unwrap_quickly(monkeypatch: pytest.MonkeyPatch, modules: list[Any], core: Any) -> None:
    """Look at a value's own class before the classes that hold several values: most are no such thing."""
    unwrap = core._unwrap_if_constexpr
    plain = {core.tensor, core.dtype, core.block_type, core.pointer_type, int, float, bool, str}

    def unwrapped(value: Any) -> Any:
        kind = type(value)
        if kind is core.constexpr:
            return value.value
        return value if kind in plain else unwrap(value)

    for module in modules:
        if getattr(module, "_unwrap_if_constexpr", None) is unwrap:
            monkeypatch.setattr(module, "_unwrap_if_constexpr", unwrapped)


def handle_quickly(monkeypatch: pytest.MonkeyPatch, interpreter: Any) -> None:
    """Make the handle of a tensor with one comparison of sizes; what is wrong goes Triton's way."""
    handle = interpreter.TensorHandle
    initialize = handle.__init__
    pointer = interpreter.tl.pointer_type
    largest: dict[
        int, int
    ] = {}  # bytes of an element, by the identity of a type that lives as long
    lives: list[Any] = []

    def bytes_of(dtype: Any) -> int:
        lives.append(dtype)
        bits = 64 if isinstance(dtype, pointer) else max(8, dtype.primitive_bitwidth)
        largest[id(dtype)] = bits // 8
        return bits // 8

    def initialize_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        if data.itemsize > (largest.get(id(dtype)) or bytes_of(dtype)):
            initialize(self, data, dtype)
        self.data = data
        self.dtype = dtype
        self.attr = {} if attr is None else attr

    monkeypatch.setattr(handle, "__init__", initialize_handle)


def reduce_slices(self: Any, input: Any) -> list[Any]:
    """Reduce by a kernel's own function, a slice of the axis at a time, where Triton goes element by element."""
    whole = self.axis is None
    input, axis = self.unravel(input, self.axis)
    data = [np.moveaxis(one.handle.data, axis, 0) for one in input]

    def at(place: int) -> list[Any]:
        return [self.to_tensor(x[place], one.dtype) for x, one in zip(data, input, strict=True)]

    total = at(0)
    for place in range(1, len(data[0])):
        found = self.combine_fn.fn(*total, *at(place))
        total = list(found) if isinstance(found, tuple) else [found]
    results = []
    for one, x in zip(total, data, strict=True):
        reduced = one.handle.data.astype(x.dtype).reshape(x.shape[1:])
        if self.keep_dims:
            rank = len(input[0].shape)
            reduced = reduced.reshape([1] * rank) if whole else np.expand_dims(reduced, axis)
        results.append(self.to_tensor(reduced if reduced.shape else reduced.item(), one.dtype))
    return results


def patch_attribute(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Replace a function of the language by itself with the interpreter's semantic, without a check at each call."""
    semantic = importlib.import_module("triton.runtime.interpreter").interpreter_semantic
    function = getattr(member, "__wrapped__", member)

    def interpreted(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    scope.set_attr(obj, name, interpreted)


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
        share_shapes(monkeypatch, interpreter.tl.core)
        share_operands(monkeypatch, interpreter, semantic)
        handle_quickly(monkeypatch, interpreter)
        languages = [interpreter.tl.core, importlib.import_module("triton.language.semantic")]
        unwrap_quickly(monkeypatch, [*languages, interpreter], interpreter.tl.core)
        monkeypatch.setattr(interpreter, "_patch_attr", patch_attribute)
        monkeypatch.setattr(interpreter.ReduceOps, "generic_reduce", reduce_slices)
        builder = interpreter.interpreter_builder
        # An overflow is looked for in every sum of integers, and reported with `debug` alone.
        if not builder.options.debug:
            options = dataclasses.replace(builder.options, sanitize_overflow=False)
            monkeypatch.setattr(builder, "options", options)
        yield
