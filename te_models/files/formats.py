"""The two file formats of saved state, read strictly: JSON and safetensors.

Whatever a file holds, reading it runs no code, is bounded in memory, and either gives the value that was written or
raises `CheckpointError` with one line. Arithmetic is exact: JSON integers of any size, floats by their shortest form.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from te_models.errors import CheckpointError, UsageError
from te_models.files.atomic import first_line

MAX_JSON_BYTES = 64 * 2**20  # tokenizers of published models have up to 20 MB
METADATA = "__metadata__"
_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def list_some(items: Iterable[str], limit: int = 5) -> str:
    """A few of `items` and how many more there are, in one line of bounded length."""
    items = list(items)
    shown = ", ".join(item if len(item) <= 120 else item[:117] + "..." for item in items[:limit])
    return shown + (f" and {len(items) - limit} more" if len(items) > limit else "")


def render_json(value: Any, name: str) -> bytes:
    """The JSON of `value`, provided that reading it gives the same value again.

    Raises:
        ValueError: it would not: NaN, infinities, tuples, keys that are not strings, other types, or too large.
    """
    try:
        text = json.dumps(value, indent=2, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{name} is not plain JSON: {first_line(error)}; flatten_state makes it so") from None
    if len(text) > MAX_JSON_BYTES:
        raise UsageError(f"{name} has {len(text)} bytes of JSON, more than the limit of {MAX_JSON_BYTES}")
    if json.loads(text) != value:
        raise UsageError(f"{name} has tuples or keys that are not strings; flatten_state makes plain JSON of it")
    return text


def read_json(path: Path) -> Any:
    """Parses a JSON file: at most 64 MiB, no duplicate keys, no NaN or infinity.

    Raises:
        CheckpointError: it is anything else.
    """
    size = path.stat().st_size
    if size > MAX_JSON_BYTES:
        raise CheckpointError(f"{path} has {size} bytes, more than the limit of {MAX_JSON_BYTES}")
    try:
        return json.loads(path.read_bytes(), object_pairs_hook=_unique, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not strict JSON: {first_line(error)}") from None


def check_savable(name: str, tensor: Tensor) -> None:
    """Raises ValueError unless a safetensors file can hold the tensor under this name exactly."""
    name.encode()
    if name == METADATA:
        raise UsageError(f"a tensor cannot be named {METADATA}: safetensors reserves it")
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        raise UsageError(
            f"{name} is a {type(tensor).__name__}; save its dequantized value or the tensors it is made of"
        )
    if tensor.dtype not in _DTYPE_NAMES or tensor.layout != torch.strided or tensor.is_meta:
        raise UsageError(f"{name} is {tensor.dtype}, {tensor.layout} on {tensor.device}, which cannot be saved")


def render_safetensors(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """A safetensors file in pieces, one tensor at a time in host memory.

    The widest items come first, so that every tensor is aligned when the file is mapped into memory.
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


def open_safetensors(path: Path) -> dict[str, Tensor]:
    """Maps a safetensors file into memory, copy-on-write; a page is read when it is touched.

    Raises:
        CheckpointError: the file is malformed.
    """
    with open(path, "rb") as file:
        header = int.from_bytes(file.read(8), "little")
    if header > min(MAX_JSON_BYTES, path.stat().st_size - 8):
        raise CheckpointError(f"{path} is damaged: it claims a header of {header} bytes")
    try:
        with safetensors.safe_open(path, "pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not iterable
    except (safetensors.SafetensorError, OSError, RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{path} is damaged: {first_line(error)}") from None


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
