"""Safetensors files, through the library of that name: read without mapping them, and written durably.

Of our own are a bound on the header, the hash of the bytes that were read, and the notice that a file changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file
from torch import Tensor

from te_models.errors import CheckpointError, UsageError
from te_models.files.atomic import first_line, make_durable
from te_models.files.formats import METADATA, MIB, list_some, lookalike, open_regular, parse_json

MAX_HEADER_BYTES = 16 * MIB  # about 100 bytes per tensor
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "BOOL": torch.bool,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
}
# Bits below the sign: bytes with this value or more are not finite numbers. E4M3 has NaN but no infinity.
_FP8_LIMITS = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7C}


_LONGEST_SIGN = 32  # bytes by which `lookalike` knows a file


class SafetensorsFile:
    """An open safetensors file with a checked header, as a context manager; tensors are read into new memory.

    Args:
        path: the file.
        links: whether it may be a symbolic link.
        mapped: map the file into memory, copy-on-write, instead of reading it, for files that several processes share
            and that do not fit into memory several times. Only then does truncating the file kill the process.

    Attributes:
        tensors: name -> tensor on the meta device, of the shape and dtype in the file, in the order of the file.

    Raises:
        CheckpointError: the file is malformed, or, on leaving the block, it changed since it was opened.
    """

    def __init__(self, path: Path, links: bool = True, mapped: bool = False) -> None:
        self.path = path
        descriptor, self._status = open_regular(path, links=links)
        with open(descriptor, "rb") as file, self._reraising():
            self._prefix = file.read(8)
            if not self._prefix:
                raise CheckpointError(f"{path} is empty: copy or download it again")
            length = int.from_bytes(self._prefix, "little")
            # Before it is read: a damaged file may claim any length.
            if length > MAX_HEADER_BYTES:
                kind = lookalike(self._prefix + file.read(_LONGEST_SIGN))
                if kind:
                    raise CheckpointError(f"{path} is {kind}")
                raise ValueError(f"it claims a header of {length} bytes")
            self._prefix += file.read(length)
            if len(self._prefix) < 8 + length:
                raise ValueError(
                    f"it ends after {len(self._prefix)} bytes of {8 + length} of its header"
                )
            header = parse_json(self._prefix[8:], path)
            self._file = safe_open(path, "pt", backend="mmap" if mapped else "pread")
            self.tensors = {
                name: torch.empty(
                    header[name]["shape"], dtype=_DTYPES[header[name]["dtype"]], device="meta"
                )
                for name in self._file.offset_keys()
            }

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *others: object) -> None:
        self._file.__exit__(None, None, None)
        if kind is None:
            with self._reraising():
                status = os.stat(self.path)
            if _version(status) != _version(self._status):
                raise CheckpointError(f"{self.path} changed while it was read")

    def read(self, name: str) -> Tensor:
        """Return the tensor of this name."""
        with self._reraising():
            tensor = self._file.get_tensor(name)
            if (
                tensor.dtype == torch.bool
                and tensor.numel()
                and int(tensor.view(torch.uint8).max()) > 1
            ):
                raise ValueError("a boolean is neither 0 nor 1")
        return tensor

    def read_all(self, sha256: str | None = None) -> dict[str, Tensor]:
        """Return all tensors; raise a CheckpointError if the bytes read do not have the hash `sha256`."""
        tensors = {name: self.read(name) for name in self.tensors}
        if sha256 is not None:
            # Length and header, then the tensors in the order of the file: together the bytes of the file.
            digest = hashlib.sha256(self._prefix)
            for tensor in tensors.values():
                digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
            if digest.hexdigest() != sha256:
                raise CheckpointError(
                    f"{self.path} is damaged: its SHA-256 is not the one that was saved"
                )
        return tensors

    @contextlib.contextmanager
    def _reraising(self) -> Iterator[None]:
        """Turn every error of the library, of PyTorch and of the file system into one line."""
        try:
            yield
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(
                f"{self.path} cannot be read: {error.strerror or first_line(error)}"
            ) from None
        except (
            SafetensorError,
            KeyError,
            ArithmeticError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            raise CheckpointError(
                f"{self.path} is damaged or has changed: {first_line(error)}"
            ) from None


def _version(status: os.stat_result) -> tuple[int, ...]:
    """Return what a change of a file's content changes, or a file in its place."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def read_safetensors(
    path: Path, sha256: str | None = None, *, links: bool = True, mapped: bool = False
) -> dict[str, Tensor]:
    """Return all tensors of a safetensors file; see SafetensorsFile."""
    with SafetensorsFile(path, links, mapped) as file:
        return file.read_all(sha256)


def all_finite(tensor: Tensor) -> bool:
    """Return whether no value is NaN or infinite; reads at 20 GiB/s per core (FP8 twice) and copies nothing."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if (limit := _FP8_LIMITS.get(tensor.dtype)) is not None:
        signed = tensor.view(torch.int8).aminmax()
        unsigned = tensor.view(torch.uint8).aminmax()
        # As int8 the largest byte is the largest positive value; as uint8 it is the largest negative one,
        # whose sign bit adds 128.
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
    # Of a subclass, such as an FP8 tensor, the file would lose the scales.
    kind = type(tensor)
    if kind not in (Tensor, torch.nn.Parameter):
        raise UsageError(
            f"{name} is a {kind.__name__}; save its dequantized value or the tensors that it consists of"
        )
    if tensor.dtype not in _DTYPES.values() or tensor.layout != torch.strided or tensor.is_meta:
        raise UsageError(
            f"{name} is {tensor.dtype}, {tensor.layout} on {tensor.device}, which cannot be saved"
        )


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> tuple[int, str]:
    """Write a new file durably and return its size and SHA-256; writing and hashing release the GIL.

    Of the tensors of this file only those that are not contiguous in host memory already are copied there.
    """
    host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    specs = {
        name: TensorSpec(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tensor.shape,
            data_ptr=tensor.data_ptr() or 1,  # an empty one has no address
            data_len=tensor.nbytes,
        )
        for name, tensor in host.items()
    }
    # safetensors replaces the file by one that only its owner may read. The other files of a folder are as readable as
    # the user's umask lets new files be, and a server or a colleague may run as another user.
    path.touch(exist_ok=False)
    mode = path.stat().st_mode
    try:
        serialize_file(specs, path, metadata={"format": "pt"})
    except SafetensorError as error:  # of the file system: the tensors are known to be savable
        raise OSError(first_line(error)) from None
    if path.stat().st_mode != mode:
        path.chmod(mode)
    return make_durable(path)


def split_by_size(
    group: str, tensors: Mapping[str, Tensor], limit: int
) -> dict[str, dict[str, Tensor]]:
    """Return file name -> tensors: files of at most `limit` bytes, in the order given, named as Hugging Face does.

    A tensor larger than `limit` has a file of its own.
    """
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        # Not in an empty file: a tensor above the limit would leave it empty for ever.
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        return {f"{group}.safetensors": shards[0]}
    return {
        f"{group}-{i:05d}-of-{len(shards):05d}.safetensors": shard
        for i, shard in enumerate(shards, 1)
    }
