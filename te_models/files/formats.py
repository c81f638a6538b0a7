"""Strict, bounded readers and exact writers of the formats of saved state: JSON, safetensors, nested state.

Reading runs no code whatever a file holds, opens only regular files, bounds size and structure before parsing, and
either returns the value that was written or raises `CheckpointError` with one line. JSON keeps integers of any size and
floats by their shortest form.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import mmap
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from te_models.errors import CheckpointError, TeModelsError, UsageError
from te_models.files.atomic import CHUNK_BYTES, first_line

MIB = 2**20
TEXT_BYTES = 4 * MIB  # a configuration file or a chat template; published ones have up to 1.2 MB
# Files of published tokenizers have up to 34 MB; training.json has about 300 bytes per parameter tensor.
_VOCABULARIES = ("tokenizer.json", "tekken.json", "vocab.json")
JSON_BYTES = {"training.json": 16 * MIB, **dict.fromkeys(_VOCABULARIES, 64 * MIB)}
_VOCABULARY_SUFFIXES = (".model", ".tiktoken", ".txt")  # of a tokenizer's files that are not JSON
# Bounds the time and memory of parsing. Published tokenizers have 1.5 million values, other files up to 50,000.
JSON_VALUES = dict.fromkeys(_VOCABULARIES, 4_000_000)
MAX_JSON_VALUES = 200_000
MAX_HEADER_BYTES = 16 * MIB  # of a safetensors file; about 100 bytes per tensor
METADATA = "__metadata__"
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
}  # fmt: skip
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# Bits below the sign: bytes with this value or more are not finite numbers. E4M3 has NaN but no infinity.
_FP8_LIMITS = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7C}


def list_some(items: Iterable[str], limit: int = 5) -> str:
    """Return the first few of `items` and the number of others, in one line of bounded length."""
    items = list(items)
    shown = ", ".join(item if len(item) <= 120 else item[:117] + "..." for item in items[:limit])
    return shown + (f" and {len(items) - limit} more" if len(items) > limit else "")


def open_regular(
    path: Path, limit: int | None = None, error: type[TeModelsError] = CheckpointError, links: bool = True
) -> tuple[int, os.stat_result]:
    """Open a regular file for reading; never waits for a pipe or a device. `links=False` refuses a symbolic link.

    Returns:
        The file descriptor, which the caller closes, and the status of the open file.

    Raises:
        error: it is not a regular file, has more than `limit` bytes, or cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW))
    except (OSError, ValueError) as problem:  # ValueError: a null character in the name
        reason = problem.strerror if isinstance(problem, OSError) else first_line(problem)
        raise error(f"{path} cannot be read: {reason}") from None
    status = os.fstat(descriptor)
    problem = None
    if not stat.S_ISREG(status.st_mode):
        problem = f"{path} is not a regular file"
    elif limit is not None and status.st_size > limit:
        problem = f"{path} has {status.st_size} bytes, more than the limit of {limit}"
    if problem is not None:
        os.close(descriptor)
        raise error(problem)
    return descriptor, status


def read_bytes(path: Path, limit: int, error: type[TeModelsError] = CheckpointError, *, links: bool = True) -> bytes:
    """Return the content of a regular file of at most `limit` bytes; raise `error` for anything else."""
    descriptor, _ = open_regular(path, limit, error, links)
    try:
        with open(descriptor, "rb") as file:
            data = file.read(limit + 1) or b""  # None: a file of /proc that has nothing yet
    except OSError as problem:
        raise error(f"{path} cannot be read: {problem.strerror}") from None
    if len(data) > limit:
        raise error(f"{path} has more than the limit of {limit} bytes")
    return data


def read_json(path: Path) -> Any:
    """Parse a JSON file of bounded size, without duplicate keys, NaN or infinities; any other is a CheckpointError."""
    return parse_json(read_bytes(path, json_limit(path.name)), path)


def json_limit(file: str) -> int:
    """Return the largest size in bytes of a JSON file, or of another file of a tokenizer, of this name."""
    return 64 * MIB if file.endswith(_VOCABULARY_SUFFIXES) else JSON_BYTES.get(file, TEXT_BYTES)


def parse_json(data: bytes, path: Path | str, error: type[TeModelsError] = CheckpointError, finite: bool = True) -> Any:
    """Parse strict JSON; `path` names it in errors. `finite=False` allows NaN and infinities, as Python writes them.

    Raises:
        error: it is malformed, nested too deeply, or has more values than a file of this project or of Hugging Face.
    """
    limit = JSON_VALUES.get(os.path.basename(path), MAX_JSON_VALUES)
    if data.count(b",") + data.count(b"[") + data.count(b"{") > limit:
        raise error(f"{path} has more than {limit} values")
    collects = gc.isenabled()
    gc.disable()  # which would search all objects of the process for cycles again and again
    try:
        number = _finite if finite else None
        return json.loads(data, object_pairs_hook=_unique, parse_float=number, parse_constant=number)
    except RecursionError:
        raise error(f"{path}: JSON that is nested too deeply") from None
    except ValueError as problem:
        raise error(f"{path} is not strict JSON: {first_line(problem)}") from None
    finally:
        if collects:
            gc.enable()


def render_json(value: Any, name: str) -> bytes:
    """Return the JSON of `value`, provided that reading it returns the same value.

    Raises:
        UsageError: it has NaN, infinities, tuples, keys that are not strings or other types, or is too large.
    """
    try:
        text = json.dumps(value, indent=2, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{name} is not plain JSON: {first_line(error)}; flatten_state makes it so") from None
    limit = json_limit(name if name.endswith(".json") else f"{name}.json")
    if len(text) > limit:
        raise UsageError(f"{name} has {len(text)} bytes of JSON, more than the limit of {limit}")
    if json.loads(text) != value:
        raise UsageError(f"{name} has tuples or keys that are not strings; flatten_state makes plain JSON of it")
    return text


def all_finite(tensor: Tensor) -> bool:
    """Return whether no value is NaN or infinite; reads at 20 GiB/s per core (FP8 twice) and copies nothing."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if (limit := _FP8_LIMITS.get(tensor.dtype)) is not None:
        signed, unsigned = tensor.view(torch.int8).aminmax(), tensor.view(torch.uint8).aminmax()
        return int(signed.max) < limit and int(unsigned.max) < limit + 128
    low, high = tensor.aminmax()  # NaN comes out as both
    return bool(low.isfinite() & high.isfinite())


def check_finite(tensors: Mapping[str, Tensor], source: Path | str) -> None:
    """Raise CheckpointError if a tensor read from `source` has NaN or an infinity: a model computes nothing else."""
    for name, tensor in tensors.items():
        if not all_finite(tensor):
            raise CheckpointError(
                f"{source}: {list_some([name])} has a NaN or an infinity, so the model is broken: load an earlier "
                "checkpoint or another copy"
            )


def check_savable(name: str, tensor: Tensor) -> None:
    """Raise UsageError unless a safetensors file can hold the tensor under this name exactly."""
    name.encode()
    if name == METADATA:
        raise UsageError(f"a tensor cannot be named {METADATA}: safetensors reserves it")
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        raise UsageError(
            f"{name} is a {type(tensor).__name__}; save its dequantized value or the tensors that it consists of"
        )
    if tensor.dtype not in _DTYPE_NAMES or tensor.layout != torch.strided or tensor.is_meta:
        raise UsageError(f"{name} is {tensor.dtype}, {tensor.layout} on {tensor.device}, which cannot be saved")


def render_safetensors(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield a safetensors file in pieces, with one tensor at a time in host memory.

    The widest items come first, so that every tensor is aligned.
    """
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])))
    header: dict[str, Any] = {METADATA: {"format": "pt"}}
    end = 0
    for name, tensor in ordered.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in ordered.values():
        yield tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def parse_size(size: int | str) -> int:
    """Return the bytes in `size`: a number, or text such as "5GB" (10**9 each) or "200MiB" (2**20 each).

    Raises:
        UsageError: it is neither.
    """
    found = re.fullmatch(r"\s*(\d+)\s*([KMGT]?)(I?)B\s*", size.upper()) if isinstance(size, str) else None
    if found is not None:
        count, unit, binary = found.groups()
        size = int(count) * (1024 if binary else 1000) ** " KMGT".index(unit or " ")
    if not isinstance(size, int) or size < 1:
        raise UsageError(f"max_shard_size={size!r} is no size: give a number of bytes, or text such as '5GB'")
    return size


def split_by_size(group: str, tensors: Mapping[str, Tensor], limit: int) -> dict[str, dict[str, Tensor]]:
    """Return file name -> tensors: files of at most `limit` bytes, in the order given, named as Hugging Face does.

    A tensor larger than `limit` has a file of its own.
    """
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        return {f"{group}.safetensors": shards[0]}
    return {f"{group}-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, 1)}


def render_index(weight_map: Mapping[str, str], total_size: int) -> bytes:
    """Return the index of tensors in several files (name -> file), in Hugging Face's layout."""
    return render_json({"metadata": {"total_size": total_size}, "weight_map": dict(weight_map)}, "the index")


def parse_index(document: Any, path: Path) -> dict[str, str]:
    """Return tensor name -> file from an index in Hugging Face's layout; raise CheckpointError for anything else."""
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) and file == os.path.basename(file) and file.endswith(".safetensors")
        for file in weight_map.values()
    ):
        raise CheckpointError(f"{path} is damaged: it has no map of tensor names to files")
    return weight_map


@dataclass(frozen=True)
class _Entry:
    """The place of a tensor in the data of a safetensors file, in bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """An open safetensors file with a checked header, as a context manager; tensors are read into new memory.

    Nothing is memory-mapped, so truncating the file meanwhile causes an error rather than killing the process.

    Attributes:
        tensors: name -> tensor on the meta device, of the shape and dtype in the file.

    Raises:
        CheckpointError: the file is malformed, or, on leaving the block, it changed since it was opened.
    """

    def __init__(self, path: Path, links: bool = True) -> None:
        self.path = path
        self._descriptor, self._status = open_regular(path, links=links)
        try:
            self._prefix = self._read_exactly(0, 8)
            length = int.from_bytes(self._prefix, "little")
            if length > min(MAX_HEADER_BYTES, self._status.st_size - 8):
                raise CheckpointError(f"{path} is damaged: it claims a header of {length} bytes")
            self._prefix += self._read_exactly(8, length)
            self._entries = _parse_header(self._prefix[8:], self._status.st_size - 8 - length, path)
            self.tensors = {n: torch.empty(e.shape, dtype=e.dtype, device="meta") for n, e in self._entries.items()}
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *others: object) -> None:
        status = os.fstat(self._descriptor)
        os.close(self._descriptor)
        if kind is None and _version(status) != _version(self._status):
            raise CheckpointError(f"{self.path} changed while it was read")

    def read(self, name: str) -> Tensor:
        """Return the tensor of this name."""
        entry = self._entries[name]
        size = entry.end - entry.start
        return self._typed(self._fill(torch.empty(size, dtype=torch.uint8), len(self._prefix) + entry.start), entry)

    def read_all(self, sha256: str | None = None, mapped: bool = False) -> dict[str, Tensor]:
        """Return all tensors.

        `mapped` maps the file into memory, copy-on-write, instead of reading it: for files that several processes share
        and that do not fit into memory several times.

        Raises:
            CheckpointError: the bytes read do not have the hash `sha256`.
        """
        digest, found = hashlib.sha256(self._prefix), {}
        content = None
        if mapped:
            content = torch.frombuffer(mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
        for name, entry in sorted(self._entries.items(), key=lambda item: (item[1].start, item[1].end)):
            start, size = len(self._prefix) + entry.start, entry.end - entry.start
            if content is not None:
                data = content[start : start + size]
                digest.update(data.numpy().data)
            else:
                data = self._fill(torch.empty(size, dtype=torch.uint8), start, digest)
            found[name] = self._typed(data, entry)
        if sha256 is not None and digest.hexdigest() != sha256:
            raise CheckpointError(f"{self.path} is damaged: its SHA-256 is not the one that was saved")
        return found

    def _typed(self, data: Tensor, entry: _Entry) -> Tensor:
        if data.storage_offset() % entry.dtype.itemsize:
            data = data.clone()
        if entry.dtype == torch.bool and data.numel() and data.max() > 1:
            raise CheckpointError(f"{self.path} is damaged: a boolean is neither 0 nor 1")
        return data.view(entry.dtype).reshape(entry.shape)

    def _fill(self, data: Tensor, offset: int, digest: Any = None) -> Tensor:
        """Read from `offset` on into `data`, uint8 [bytes], and return it."""
        view = data.numpy().data
        for start in range(0, len(view), CHUNK_BYTES):
            chunk = view[start : start + CHUNK_BYTES]
            try:
                count = os.preadv(self._descriptor, [chunk], offset + start)
            except OSError as problem:
                raise CheckpointError(f"{self.path} cannot be read: {problem.strerror}") from None
            if count != len(chunk):
                raise CheckpointError(f"{self.path} is damaged or has changed: it has {self._status.st_size} bytes")
            if digest is not None:
                digest.update(chunk)
        return data

    def _read_exactly(self, offset: int, count: int) -> bytes:
        return self._fill(torch.empty(count, dtype=torch.uint8), offset).numpy().tobytes()


def read_safetensors(
    path: Path, sha256: str | None = None, *, links: bool = True, mapped: bool = False
) -> dict[str, Tensor]:
    """Return all tensors of a safetensors file; see SafetensorsFile.read_all."""
    with SafetensorsFile(path, links) as file:
        return file.read_all(sha256, mapped)


def _parse_header(text: bytes, size: int, path: Path) -> dict[str, _Entry]:
    """Return the tensors that a header describes, if they fill the file's `size` bytes of data exactly."""
    header = parse_json(text, path)
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is damaged: its header is not an object")
    header.pop(METADATA, None)
    try:
        entries = {str(name): _parse_entry(entry) for name, entry in header.items()}
        end = 0
        for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.end)):
            if entry.start != end:
                raise ValueError("its tensors do not lie one after the other")
            end = entry.end
        if end != size:
            raise ValueError(f"it has {size} bytes of data where its tensors take {end}")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {first_line(error)}") from None
    return entries


def _parse_entry(entry: Any) -> _Entry:
    if set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError("a tensor has other fields than dtype, shape and data_offsets")
    dtype, shape, (start, end) = _DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, start, end)):
        raise ValueError("a shape or an offset is not a whole number")
    if len(shape) > 16 or math.prod(filter(None, shape)) >= 2**48:
        raise ValueError("a shape is too large")
    if math.prod(shape) * dtype.itemsize != end - start:
        raise ValueError("a shape does not fit its data")
    return _Entry(dtype, shape, start, end)


def _version(status: os.stat_result) -> tuple[int, ...]:
    """Return size and modification time: what a change of a file's content changes."""
    return status.st_size, status.st_mtime_ns


def flatten_state(state: Any) -> tuple[dict[str, Tensor], Any]:
    """Split nested state into named tensors and plain JSON, from which `unflatten_state` rebuilds it exactly.

    Accepts dicts (keys of any type below), lists, tuples, ints of any size, floats with infinities and NaN, strings,
    bools, None and tensors, such as an optimizer's `state_dict()` or random-number states.

    Returns:
        The tensors, named by their place ("state.0.exp_avg"), and a JSON value that refers to them by name.

    Raises:
        UsageError: a value of another type, which would not be restored exactly.
    """
    tensors: dict[str, Tensor] = {}

    def encode(value: Any, place: str) -> Any:
        if isinstance(value, Tensor):
            name = place or "_"
            while name in tensors or name == METADATA:
                name += "_"
            tensors[name] = value
            return {"$tensor": name}
        kind = type(value)
        if kind is dict:
            if all(type(key) is str and not key.startswith("$") for key in value):
                return {key: encode(item, _join(place, key)) for key, item in value.items()}
            return {"$dict": [[encode(key, place), encode(item, _join(place, key))] for key, item in value.items()]}
        if kind in (list, tuple):
            items = [encode(item, _join(place, index)) for index, item in enumerate(value)]
            return items if kind is list else {"$tuple": items}
        if kind is float and not math.isfinite(value):
            return {"$float": str(value)}
        if value is None or kind in (bool, int, float, str):
            return value
        raise UsageError(f"{place or 'the state'} is a {kind.__module__}.{kind.__qualname__}, which JSON cannot hold")

    return tensors, encode(state, "")


def unflatten_state(tensors: Mapping[str, Tensor], document: Any) -> Any:
    """Rebuild the state that `flatten_state` split.

    Raises:
        CheckpointError: the document is not of that form, or names other tensors than those given.
    """
    unused = set(tensors)

    def decode(node: Any) -> Any:
        if isinstance(node, list):
            return [decode(item) for item in node]
        if not isinstance(node, dict):
            return node
        if not any(key.startswith("$") for key in node):
            return {key: decode(item) for key, item in node.items()}
        ((tag, value),) = node.items()
        if tag == "$tensor" and value in tensors:
            unused.discard(value)
            return tensors[value]
        if tag == "$tuple" and isinstance(value, list):
            return tuple(decode(item) for item in value)
        if tag == "$dict" and isinstance(value, list):
            return {decode(key): decode(item) for key, item in value}
        if tag == "$float" and value in ("inf", "-inf", "nan"):
            return float(value)
        raise CheckpointError(f"there is no {tag} {str(value)[:40]!r}")

    try:
        state = decode(document)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the saved state is damaged: {first_line(error)}") from None
    if unused:
        raise CheckpointError(f"the saved state does not refer to {list_some(sorted(unused))}")
    return state


def _join(place: str, key: Any) -> str:
    return f"{place}.{key}" if place else str(key)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return found


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is not a finite number")
    return value
