"""Transformer Engine's own saved FP8 state, read without unpickling it.

Under DelayedScaling, Transformer Engine (2.20, section 7.10 of docs/internals/transformer_engine.md) puts a pickle into
`state_dict()` as the uint8 tensor `_extra_state` of every module, and refuses to load it unless the user declares it
safe to run. This file interprets the pickle instead: it defines the meaning of the few opcodes and globals that such a
state consists of, imports no name, and refuses everything else. PyTorch's tensors-only loader could not: it reads
protocol 2, and Transformer Engine writes the newest.
"""

import io
import math
import pickletools
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from te_models.errors import CheckpointError, require
from te_models.files.atomic import reraising
from te_models.files.formats import Fields

MAX_BYTES = 64 * 2**20
MAX_OPCODES = 4096  # a real state has about 200
TENSOR_DIMS = {"scale_fwd": 1, "amax_history_fwd": 2, "scale_bwd": 1, "amax_history_bwd": 2}

_RECIPES = "transformer_engine.common.recipe"
_RECIPE_CLASSES = (
    "DelayedScaling",
    "Float8CurrentScaling",
    "Float8BlockScaling",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "MMParams",
    "QParams",
    "_FormatHelper",
)
_FORMAT = f"{_RECIPES}.Format"
_FORMATS = {(6, 6): "E2M1", (448, 448): "E4M3", (57344, 57344): "E5M2", (448, 57344): "HYBRID"}
_REBUILD_TENSOR = "torch._utils._rebuild_tensor_v2"
_LOAD_STORAGE = "torch.storage._load_from_bytes"
_ORDERED_DICT = "collections.OrderedDict"
_GETATTR = "builtins.getattr"
_STATE_GLOBALS = frozenset(
    {_FORMAT, _REBUILD_TENSOR, _LOAD_STORAGE, _ORDERED_DICT, _GETATTR}
    | {f"{_RECIPES}.{name}" for name in _RECIPE_CLASSES}
)
_OPCODES = {opcode.code: opcode for opcode in pickletools.opcodes}
# The opcodes that push a value: a constant, an empty container, or what stands in the stream behind the opcode.
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_CARRY_A_VALUE = frozenset(
    (
        "BININT",
        "BININT1",
        "BININT2",
        "LONG1",
        "BINFLOAT",
        "BINUNICODE",
        "SHORT_BINUNICODE",
        "BINBYTES",
        "SHORT_BINBYTES",
        "BINBYTES8",
    )
)
_FLOAT_STORAGE = "torch.FloatStorage"
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_VERSION = 1001
Expected = TypeVar("Expected")
Loaded = Any  # a value that the pickle made, of a type that is not known yet
_SCALARS = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class _Global:
    """The name of a global, which is never imported."""

    name: str


@dataclass
class _Inert:
    """A stand-in for an instance of a recipe class."""

    kind: str
    arguments: tuple[Loaded, ...]
    fields: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class _Lazy:
    """A contiguous FP32 tensor whose values are copied only when they are needed."""

    data: memoryview
    shape: tuple[int, ...]


def read_extra_state(payload: Tensor | bytes) -> Fields:
    """Read the `_extra_state` of one Transformer Engine module.

    Args:
        payload: uint8 [bytes], or the bytes. The form of `te.Linear`, the nested one of `te.ops`, and the one of
            Transformer Engine 1.x, which has no recipe, are read.

    Returns:
        An empty dict if the module has no state. Otherwise "recipe" (its fields by name, including "recipe_type",
        with formats as "HYBRID"), "extra_fp8_variables", and those present of "scale_fwd" [3 g],
        "amax_history_fwd" [length, 3 g], "scale_bwd" [2 g] and "amax_history_bwd" [length, 2 g]: FP32, own memory,
        for g GEMMs.

    Raises:
        CheckpointError: the payload is damaged, or contains anything else.
    """
    if isinstance(payload, Tensor):
        if payload.dtype != torch.uint8 or payload.ndim != 1:
            raise CheckpointError(
                f"an extra state is uint8 [bytes], not {payload.dtype} {list(payload.shape)}"
            )
        # As bytes on the host: the pickle in it is interpreted, and never loaded.
        payload = payload.detach().cpu().numpy().tobytes()
    # The state of a module under a recipe without scales of its own.
    if not payload:
        return {}
    if len(payload) > MAX_BYTES:
        raise CheckpointError(
            f"the extra state has {len(payload)} bytes, more than the limit of {MAX_BYTES}"
        )
    wrong = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, struct.error)
    with reraising("the extra state is refused", *wrong):
        state = _interpret(io.BytesIO(payload), _STATE_GLOBALS)
        return _checked(state) if state is not None else {}


def _checked(state: Loaded) -> Fields:
    """Convert the three forms of a state into one."""
    state = _expect(dict, state)
    # te.ops keeps a state for each direction; te.Linear has the tensors of both in one.
    parts = [state[mode] for mode in ("forward", "backward") if mode in state] or (
        [state] if state else []
    )
    fields: Fields = {}
    for part in parts:
        # Transformer Engine 1.x had no recipe in it, and only delayed scaling had a state.
        recipe = _expect(_Inert, part.get("recipe", _Inert("DelayedScaling", ())))
        fields["recipe"] = {"recipe_type": recipe.kind, **_fields(recipe.fields)}
        fields.setdefault("extra_fp8_variables", {}).update(
            _fields(part.get("extra_fp8_variables", {}))
        )
        fields |= {name: _materialize(name, part[name]) for name in TENSOR_DIMS if name in part}
    for direction in ("fwd", "bwd"):
        names = (f"scale_{direction}", f"amax_history_{direction}")
        # Scale and history of one direction belong to the same GEMMs: both are there, of one width, or neither.
        widths = [fields[name].shape[-1] for name in names if name in fields]
        require(
            len(widths) != 1 and len(set(widths)) <= 1, f"{' and '.join(names)} do not go together"
        )
    return fields


def _fields(values: Mapping[str, object]) -> dict[str, object]:
    """Return public fields as plain values, at most one level deep, so that shared references cannot multiply."""

    def plain(value: Loaded) -> Loaded:
        if type(value) in _SCALARS:
            return value
        inside = value.fields if isinstance(value, _Inert) else value
        items = inside.values() if isinstance(inside, dict) else inside
        known = isinstance(value, (tuple, list, _Inert)) and all(
            type(item) in _SCALARS for item in items
        )
        require(known, "a field of it is not a plain value")
        return public(value.fields) if isinstance(value, _Inert) else list(value)

    def public(fields: Mapping[str, object]) -> dict[str, object]:
        return {name: item for name, item in fields.items() if not name.startswith("_")}

    return {name: plain(value) for name, value in public(values).items()}


def _materialize(name: str, value: object) -> Tensor:
    value = _expect(_Lazy, value)
    require(
        len(value.shape) == TENSOR_DIMS[name],
        f"{name} is not a tensor of {TENSOR_DIMS[name]} dimensions",
    )
    # A copy: frombuffer shares memory, and the payload is read-only.
    return torch.frombuffer(bytearray(value.data), dtype=torch.float32).reshape(value.shape)


def _interpret(stream: io.BytesIO, known: frozenset[str]) -> Loaded:
    """Evaluate one pickle, up to and including its STOP, with `known` as the only globals."""
    # A pickle's machine: a stack of values, the heights at which MARK stood, and values by their number in the memo.
    stack: list[Loaded] = []
    marks: list[int] = []
    memo: dict[int, object] = {}

    def pop(count: int) -> list[Loaded]:
        require(len(stack) >= count, "the stack is empty")
        taken = stack[len(stack) - count :]
        del stack[len(stack) - count :]
        return taken

    for opcode, argument in _operations(stream):
        match opcode:
            # BINPERSID would look up what a persistent id names: here the id, on the stack, is the description itself.
            case "PROTO" | "FRAME" | "BINPERSID":
                pass
            case "STOP":
                return pop(1)[0]
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append(_CONSTANTS[opcode])
            case _ if opcode in _CARRY_A_VALUE:
                stack.append(argument)
            case "EMPTY_DICT" | "EMPTY_LIST" | "EMPTY_TUPLE":
                stack.append(_EMPTY[opcode]())
            case "MARK":
                marks.append(len(stack))
            case "TUPLE":
                stack.append(tuple(pop(len(stack) - marks.pop())))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(pop(int(opcode[-1]))))
            case "APPEND" | "APPENDS":
                items = pop(1 if opcode == "APPEND" else len(stack) - marks.pop())
                _expect(list, stack[-1]).extend(items)
            case "SETITEM" | "SETITEMS":
                items = pop(2 if opcode == "SETITEM" else len(stack) - marks.pop())
                pairs = zip(items[::2], items[1::2], strict=True)
                _expect(dict, stack[-1]).update({_expect(str, key): value for key, value in pairs})
            case "MEMOIZE":
                # Protocol 4 numbers the memo by the order of entries; older opcodes below state the number.
                memo[len(memo)] = stack[-1]
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "GLOBAL" | "STACK_GLOBAL":
                name = argument if opcode == "GLOBAL" else ".".join(pop(2))
                require(name in known, f"it refers to {name[:80]}")
                stack.append(_Global(name))
            # The only opcodes that call: no function of Python runs, `_call` has a result for each known name.
            case "REDUCE" | "NEWOBJ":
                function, arguments = pop(2)
                stack.append(_call(_expect(_Global, function).name, _expect(tuple, arguments)))
            # Sets the state of an instance, here of a stand-in: no __setstate__ of a class runs.
            case "BUILD":
                (fields,) = pop(1)
                _expect(_Inert, stack[-1]).fields.update(_expect(dict, fields))
            case _:
                raise ValueError(f"it uses the opcode {opcode}")


def _operations(stream: io.BytesIO) -> Iterator[tuple[str, Loaded]]:
    """Yield the opcodes of a pickle with their arguments; unused arguments, lines of text, become
    None."""
    # Bounded, since a pickle is a program, and this one may come from anybody.
    for _ in range(MAX_OPCODES):
        code = stream.read(1).decode("latin1")
        require(
            code in _OPCODES, f"it has the byte {code!r} for an opcode" if code else "it has no end"
        )
        opcode = _OPCODES[code]
        if opcode.name == "GLOBAL":
            yield (
                opcode.name,
                f"{stream.readline()[:-1].decode()}.{stream.readline()[:-1].decode()}",
            )
        elif opcode.arg is None or opcode.arg.n == pickletools.UP_TO_NEWLINE:
            yield opcode.name, None
        else:
            yield opcode.name, opcode.arg.reader(stream)
    raise ValueError(f"more than {MAX_OPCODES} opcodes")


def _expect(kind: type[Expected], value: Loaded) -> Expected:
    require(type(value) is kind, f"a {type(value).__name__} where a {kind.__name__} belongs")
    return value


def _call(function: str, arguments: tuple[Loaded, ...]) -> Any:
    """Return the result of calling a known global."""
    if function == _LOAD_STORAGE:
        (data,) = arguments
        return _read_storage(_expect(bytes, data))
    if function == _REBUILD_TENSOR:
        return _rebuild_tensor(*arguments[:4])
    if function == _ORDERED_DICT and not arguments:
        return {}
    if function == _FORMAT:
        (helper,) = arguments
        return _FORMATS[_expect(_Inert, helper).arguments]
    if (
        function == _GETATTR
        and arguments[0] == _Global(_FORMAT)
        and arguments[1] in _FORMATS.values()
    ):
        return arguments[1]
    kind = function.removeprefix(f"{_RECIPES}.")
    if kind in _RECIPE_CLASSES:
        return _Inert(kind, arguments)
    raise ValueError(f"it calls {function}")


def _rebuild_tensor(data: Loaded, offset: Loaded, shape: Loaded, stride: Loaded) -> _Lazy:
    """Return part of an FP32 storage as a contiguous tensor."""
    for number in (offset, *_expect(tuple, shape), *_expect(tuple, stride)):
        require(_expect(int, number) >= 0, "a tensor has a negative size")
    contiguous = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    require(stride == contiguous, "a tensor is not contiguous")
    # A view beyond its storage would read memory outside of it.
    count = math.prod(shape)
    require(
        4 * (offset + count) <= len(_expect(memoryview, data)),
        "a tensor is larger than its storage",
    )
    return _Lazy(data[4 * offset : 4 * (offset + count)], shape)


def _read_storage(data: bytes) -> memoryview:
    """Return the FP32 data of a storage in PyTorch's pre-1.6 file format, which pickling a tensor still uses.

    The format is five pickles (magic number, version, platform, a persistent id that describes the storage, the list
    of its keys), then the number of elements as int64 and the elements.
    """
    stream = io.BytesIO(data)
    # Fewer globals than outside: a storage describes itself by one class alone.
    known = frozenset({_FLOAT_STORAGE})
    magic, version, platform, description, keys = (_interpret(stream, known) for _ in range(5))
    label, kind, key, _, count, view = description
    header = (magic, version, platform["little_endian"], label, kind, keys, view)
    expected = (
        _LEGACY_MAGIC,
        _LEGACY_VERSION,
        True,
        "storage",
        _Global(_FLOAT_STORAGE),
        [key],
        None,
    )
    require(header == expected, "a storage in it is not FP32 in PyTorch's format")
    # After the pickles: the number of elements, int64, which is already in the description, then the elements.
    start = stream.tell() + 8
    whole = data[start - 8 : start] == struct.pack("<q", count) and len(data) == start + 4 * count
    require(whole, "a storage in it is truncated")
    return memoryview(data)[start:]
