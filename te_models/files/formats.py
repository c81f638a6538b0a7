"""Strict, bounded readers and exact writers of JSON and of nested state.

Reading runs no code whatever a file holds, opens only regular files, bounds the size before parsing, and
either returns the value that was written or raises `CheckpointError` with one line. JSON keeps integers of any size and
floats by their shortest form.
"""

import json
import math
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from te_models.errors import CheckpointError, TeModelsError, UsageError
from te_models.files.atomic import first_line, reraising
from te_models.garbage import collecting_later

Value = Any  # of JSON, or of nested state
Document = Mapping[str, Value]  # a JSON object
Fields = dict[str, Value]  # one that is being made or changed
MIB = 2**20
# A JSON file or a tokenizer's. Published tokenizers have up to 34 MB, and the index of a model with 50,000 tensors of
# experts and their scales 9 MB.
MAX_FILE_BYTES = 64 * MIB
# Flags to open a file for reading. Windows lacks all but the last, without which it translates ends of lines.
READ = os.O_RDONLY
for _flag in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY"):
    READ |= getattr(os, _flag, 0)
NO_LINK = getattr(os, "O_NOFOLLOW", 0)
METADATA = "__metadata__"  # a name that no tensor in a safetensors file can have


def list_some(items: Iterable[str], limit: int = 5) -> str:
    """Return the first few of `items` and the number of others, in one line of bounded length."""
    items = list(items)
    shown = ", ".join(item if len(item) <= 120 else item[:117] + "..." for item in items[:limit])
    return shown + (f" and {len(items) - limit} more" if len(items) > limit else "")


def open_regular(
    path: Path,
    limit: int | None = None,
    error: type[TeModelsError] = CheckpointError,
    links: bool = True,
) -> tuple[int, os.stat_result]:
    """Open a regular file for reading; never waits for a pipe or a device. `links=False` refuses a symbolic link.

    Returns:
        The file descriptor, which the caller closes, and the status of the open file.

    Raises:
        error: it is not a regular file, has more than `limit` bytes, or cannot be opened.
    """
    try:
        descriptor = os.open(path, READ if links else READ | NO_LINK)
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


def read_bytes(path: Path, limit: int, links: bool = True) -> bytes:
    """Return the content of a regular file of at most `limit` bytes; raise a CheckpointError for anything else."""
    descriptor, _ = open_regular(path, limit, links=links)
    try:
        with open(descriptor, "rb") as file:
            data = file.read(limit + 1) or b""  # None: a file of /proc that has nothing yet
    except OSError as problem:
        raise CheckpointError(f"{path} cannot be read: {problem.strerror}") from None
    if len(data) > limit:
        raise CheckpointError(f"{path} has more than the limit of {limit} bytes")
    return data


def read_json(path: Path) -> Value:
    """Parse a JSON file of bounded size, without duplicate keys, NaN or infinities; any other is a CheckpointError."""
    return parse_json(read_bytes(path, MAX_FILE_BYTES), path)


# What a clone without Git LFS has in place of a large file.
LFS_POINTER = b"version https://git-lfs"
# First bytes, in small letters -> what a file is that begins so, and what to do, where its name says something else.
_LOOKALIKES = {
    LFS_POINTER: "a pointer of Git LFS, not the file itself: fetch it with `git lfs pull`",
    b"<!doctype html": "a web page: download the file itself (on the Hugging Face hub, its link has /resolve/)",
    b"<html": "a web page: download the file itself (on the Hugging Face hub, its link has /resolve/)",
    b"\x1f\x8b": "compressed by gzip: decompress it, or if it is data end its name in .gz",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: decompress it, or if it is data end its name in .zst",
    b"pk\x03\x04": "a zip archive: unpack it",
}


def lookalike(head: bytes) -> str:
    """Return what a file that cannot be read is and what to do, as its first bytes say; "" if they do not."""
    for beginning, kind in _LOOKALIKES.items():
        if head[: len(beginning)].lower() == beginning:
            return kind
    return ""


def parse_json(
    data: bytes, path: Path | str, error: type[TeModelsError] = CheckpointError, finite: bool = True
) -> Value:
    """Parse strict JSON; `path` names it in errors. `finite=False` allows NaN and infinities, as Python writes them.

    Raises:
        error: it is malformed or nested too deeply.
    """
    number = _finite if finite else None
    try:
        with collecting_later():
            return json.loads(
                data, object_pairs_hook=_unique, parse_float=number, parse_constant=number
            )
    except (RecursionError, ValueError) as problem:
        kind = lookalike(data)
        if isinstance(problem, RecursionError):
            reason = ": JSON that is nested too deeply"
        elif kind:
            reason = f" is {kind}"
        else:
            reason = f" is not strict JSON: {first_line(problem)}"
        raise error(f"{path}{reason}") from None


def as_object(
    value: Value, path: Path | str, error: type[TeModelsError] = CheckpointError
) -> Fields:
    """Return the value of the JSON file `path` if it is an object, else raise `error`."""
    if not isinstance(value, Mapping):
        raise error(f"{path} is a JSON {type(value).__name__}, not an object")
    return dict(value)


def render_json(value: Value, name: str) -> bytes:
    """Return the JSON of `value`, provided that reading it returns the same value.

    Raises:
        UsageError: it has NaN, infinities, tuples, keys that are not strings or other types, or is too large.
    """
    wrong = (TypeError, ValueError, RecursionError)
    advice = "; flatten_state makes it so"
    with reraising(f"{name} is not plain JSON", *wrong, error=UsageError, advice=advice):
        text = json.dumps(value, indent=2, allow_nan=False).encode()
    if len(text) > MAX_FILE_BYTES:
        raise UsageError(
            f"{name} has {len(text)} bytes of JSON, more than the limit of {MAX_FILE_BYTES}"
        )
    if json.loads(text) != value:
        raise UsageError(
            f"{name} has tuples or keys that are not strings; flatten_state makes plain JSON of it"
        )
    return text


def parse_size(size: int | str) -> int:
    """Return the bytes in `size`: a number, or text such as "5GB" (10**9 each) or "200MiB" (2**20 each).

    Raises:
        UsageError: it is neither.
    """
    match = None
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+)\s*([KMGT]?)(I?)B\s*", size.upper())
    if match is not None:
        count, unit, binary = match.groups()
        size = int(count) * (1024 if binary else 1000) ** " KMGT".index(unit or " ")
    if not isinstance(size, int) or size < 1:
        raise UsageError(
            f"max_shard_size={size!r} is no size: give a number of bytes, or text such as '5GB'"
        )
    return size


def render_index(weight_map: Mapping[str, str], total_size: int) -> bytes:
    """Return the index of tensors in several files (name -> file), in Hugging Face's layout."""
    return render_json(
        {"metadata": {"total_size": total_size}, "weight_map": dict(weight_map)}, "the index"
    )


def parse_index(document: Value, path: Path) -> dict[str, str]:
    """Return tensor name -> file from an index in Hugging Face's layout; raise CheckpointError for anything else."""
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) and file == os.path.basename(file) and file.endswith(".safetensors")
        for file in weight_map.values()
    ):
        raise CheckpointError(f"{path} is damaged: it has no map of tensor names to files")
    return weight_map


def flatten_state(state: Value) -> tuple[dict[str, Tensor], Value]:
    """Split nested state into named tensors and plain JSON, from which `unflatten_state` rebuilds it exactly.

    Accepts dicts (keys of any type below), lists, tuples, ints of any size, floats with infinities and NaN, strings,
    bools, None and tensors, such as an optimizer's `state_dict()` or random-number states.

    Returns:
        The tensors, named by their place ("state.0.exp_avg"), and a JSON value that refers to them by name.

    Raises:
        UsageError: a value of another type, which would not be restored exactly.
    """
    tensors: dict[str, Tensor] = {}

    def encode(value: Value, place: str) -> Value:
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
            return {
                "$dict": [
                    [encode(key, place), encode(item, _join(place, key))]
                    for key, item in value.items()
                ]
            }
        if kind in (list, tuple):
            items = [encode(item, _join(place, index)) for index, item in enumerate(value)]
            return items if kind is list else {"$tuple": items}
        if kind is float and not math.isfinite(value):
            return {"$float": str(value)}
        if value is None or kind in (bool, int, float, str):
            return value
        raise UsageError(
            f"{place or 'the state'} is a {kind.__module__}.{kind.__qualname__}, which JSON cannot hold"
        )

    return tensors, encode(state, "")


def unflatten_state(tensors: Mapping[str, Tensor], document: Value) -> Value:
    """Rebuild the state that `flatten_state` split.

    Raises:
        CheckpointError: the document is not of that form, or names other tensors than those given.
    """
    unused = set(tensors)

    def decode(node: Value) -> Value:
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

    with reraising("the saved state is damaged", TypeError, ValueError, RecursionError):
        state = decode(document)
    if unused:
        raise CheckpointError(f"the saved state does not refer to {list_some(sorted(unused))}")
    return state


def _join(place: str, key: Value) -> str:
    return f"{place}.{key}" if place else str(key)


def _unique(pairs: list[tuple[str, Value]]) -> Fields:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return values


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is not a finite number")
    return value
