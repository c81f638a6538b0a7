"""Saved state: folders of safetensors and JSON files that are whole, exact and checked, or refused.

A folder holds named groups of tensors (`model.safetensors`, or shards with an index in Hugging Face's layout), named
JSON documents (`config.json`) and `manifest.json`, which lists the size and SHA-256 of every file and carries a digest
of itself. Saving writes a hidden sibling folder, makes it durable and renames it into place; loading checks everything
before it gives anything. Nothing here is a pickle, and nothing read can run code.

One process saves to a path at a time. A second one makes one of the two fail with `SaveError`; it never mixes them.
"""

import difflib
import fnmatch
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import stat
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import safetensors
import torch
from torch import Tensor

from te_models.errors import CheckpointError, SaveError, UsageError
from te_models.files.atomic import first_line, hash_file, readable, replacing_folder, write_file
from te_models.files.formats import (
    check_savable,
    list_some,
    open_safetensors,
    read_json,
    render_json,
    render_safetensors,
)

__all__ = [
    "CheckpointError",
    "Folder",
    "SaveError",
    "load_folder",
    "match",
    "save_folder",
]

FORMAT_VERSION = 1
MAX_SHARD_BYTES = 5 * 2**30
MANIFEST = "manifest.json"
INDEX = ".safetensors.index.json"
_NAME = re.compile(r"[a-z0-9][a-z0-9_]{0,63}")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


class TensorLike(Protocol):
    """What `match` needs to know of an expected tensor."""

    @property
    def shape(self) -> torch.Size: ...
    @property
    def dtype(self) -> torch.dtype: ...


@dataclass(frozen=True)
class Folder:
    """A checked folder.

    Attributes:
        path: where it was read from.
        tensors: group -> tensor name -> CPU tensor, memory-mapped copy-on-write: a page is read when it is touched.
        documents: document name -> parsed JSON.
        versions: the versions of python, torch, safetensors and te_models that wrote it; empty without a manifest.
    """

    path: Path
    tensors: dict[str, dict[str, Tensor]]
    documents: dict[str, Any]
    versions: dict[str, str]


@dataclass(frozen=True)
class _File:
    """What a manifest says of a file; a folder without one knows neither."""

    size: int | None = None
    sha256: str | None = None


@dataclass(frozen=True)
class _Source:
    """A folder and what is known of its files before they are read."""

    folder: Path
    files: dict[str, _File]
    links: bool
    aliases: dict[str, dict[str, str]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def names(self) -> tuple[set[str], set[str]]:
        """The names of the tensor groups and of the documents."""
        groups, documents = set(), set()
        for file in self.files:
            for names, suffix in ((groups, ".safetensors"), (groups, INDEX), (documents, ".json")):
                name = file.removesuffix(suffix)
                if name != file and _NAME.fullmatch(name):
                    names.add(name)
        return groups, documents - {"manifest"}

    def locate(self, file: str) -> Path:
        """The path of a listed file: inside the folder, regular and of the right size."""
        path = self.folder / file
        if not _FILE.fullmatch(file) or file not in self.files:
            raise CheckpointError(f"{self.folder} holds no file {file[:80]!r}")
        found, size = path.stat() if self.links else path.lstat(), self.files[file].size
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(f"{path} is not a regular file")
        if size is not None and found.st_size != size:
            raise CheckpointError(f"{path} is damaged: {found.st_size} bytes where {size} were saved")
        return path

    def checked(self, file: str) -> Path:
        """The path of a listed file whose content is what was saved."""
        path, sha256 = self.locate(file), self.files[file].sha256
        if sha256 is not None and hash_file(path) != sha256:
            raise CheckpointError(f"{path} is damaged: its SHA-256 is not the one that was saved")
        return path


@dataclass(frozen=True)
class Content:
    """What one save writes: tensors without their ties, the ties, and documents already in JSON."""

    tensors: dict[str, dict[str, Tensor]]
    aliases: dict[str, dict[str, str]]
    documents: dict[str, bytes]


def save_folder(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Mapping[str, Tensor]],
    documents: Mapping[str, Any],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes groups of tensors and JSON documents as one folder, atomically and durably.

    A tensor that is the same view of the same storage as an earlier one of its group (tied weights) is written once,
    under the earlier name, as Hugging Face does; the manifest records the tie and loading restores both names. An
    existing folder is replaced only if all its files were saved by this function.

    Args:
        path: the folder; its parents are made.
        tensors: group name -> tensor name -> tensor of any stride and device.
        documents: document name -> plain JSON value (use `flatten_state` for anything richer), or `render_json` of it.
        max_shard_bytes: a group larger than this is split into shards.

    Raises:
        ValueError: something given cannot be saved exactly; nothing was written.
        SaveError: writing failed; what was at `path` is intact and nothing is left behind.
    """
    write_content(Path(path), prepare(tensors, documents), max_shard_bytes)


def load_folder(
    path: str | os.PathLike[str],
    names: Iterable[str] | None = None,
    *,
    optional: Iterable[str] = (),
    require_manifest: bool = True,
) -> Folder:
    """Reads and checks a folder that `save_folder` wrote, or one of Hugging Face.

    Every file's size is checked, and the hash of every file that is read, before anything is given.

    Args:
        path: the folder.
        names: the groups and documents to read (a name may be both); None means everything the manifest lists, or
            "config" and "model" where there is no manifest.
        optional: further names, read where they exist.
        require_manifest: False accepts a folder without a manifest, such as a Hugging Face snapshot. Its files may then
            be symbolic links, as in Hugging Face's cache, and their content is checked for form only.

    Raises:
        CheckpointError: the folder is missing, damaged or incomplete; one line that says how.
    """
    folder = readable(Path(path))
    if not folder.is_dir():
        raise CheckpointError(f"{path} is not a folder of saved state")
    try:
        return _load(_source(folder, require_manifest), names, optional)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {first_line(error)}") from None


def match(
    expected: Mapping[str, TensorLike],
    loaded: Mapping[str, Tensor],
    *,
    allow_missing: Iterable[str] = (),
    allow_extra: Iterable[str] = (),
    check_dtype: bool = True,
) -> None:
    """Compares names, shapes and dtypes, so that a live model is touched only once everything is known to fit.

    Args:
        expected: name -> anything with `.shape` and `.dtype`.
        loaded: name -> tensor.
        allow_missing: names or glob patterns (`"*._extra_state"`) that may be absent from `loaded`.
        allow_extra: names or glob patterns that `loaded` may have beyond `expected`.
        check_dtype: False leaves dtypes to the caller, for a model that is loaded in another precision.

    Raises:
        CheckpointError: one line that lists what is missing, unexpected and different.
    """
    missing = _unmatched(expected.keys() - loaded.keys(), allow_missing)
    extra = _unmatched(loaded.keys() - expected.keys(), allow_extra)
    different = []
    for name in sorted(expected.keys() & loaded.keys()):
        want, have = expected[name], loaded[name]
        if want.shape != have.shape:
            different.append(f"{name} has shape {list(have.shape)}, not {list(want.shape)}")
        elif check_dtype and want.dtype != have.dtype:
            different.append(f"{name} is {have.dtype}, not {want.dtype}")
    problems = [
        f"{label}: {list_some(items)}"
        for label, items in (("missing", missing), ("unexpected", extra), ("different", different))
        if items
    ]
    if problems:
        raise CheckpointError("the saved tensors do not fit; " + "; ".join(problems))


def prepare(tensors: Mapping[str, Mapping[str, Tensor]], documents: Mapping[str, Any]) -> Content:
    """Checks what is to be saved, finds tied tensors and renders the documents; see `save_folder` for the arguments."""
    kept: dict[str, dict[str, Tensor]] = {}
    aliases: dict[str, dict[str, str]] = {}
    for name in (*tensors, *documents):
        if not _NAME.fullmatch(name) or name == "manifest":
            raise UsageError(f"{name!r} cannot name a file of saved state; use a-z, 0-9 and _, and not 'manifest'")
    for group, members in tensors.items():
        kept[group], aliases[group], first = {}, {}, {}
        for name, tensor in members.items():
            check_savable(name, tensor)
            view = (
                tensor.untyped_storage().data_ptr(),
                tensor.storage_offset(),
                tensor.shape,
                tensor.stride(),
                tensor.dtype,
            )
            twin = first.setdefault(view, name) if tensor.numel() else name
            if twin == name:
                kept[group][name] = tensor.detach()
            else:
                aliases[group][name] = twin
    aliases = {group: ties for group, ties in aliases.items() if ties}
    return Content(
        kept,
        aliases,
        {
            name: document if isinstance(document, bytes) else render_json(document, f"document {name!r}")
            for name, document in documents.items()
        },
    )


def _load(source: _Source, names: Iterable[str] | None, optional: Iterable[str]) -> Folder:
    groups, documents = source.names()
    known = groups | documents
    if names is None:
        names = sorted(known) if source.versions else ("config", "model")
    wanted = dict.fromkeys((*names, *known.intersection(optional)))
    for name in wanted:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise CheckpointError(f"{source.folder} holds no {name!r}{hint}")
    for file, entry in source.files.items():
        if entry.size is not None:
            source.locate(file)
    return Folder(
        path=source.folder,
        tensors={name: _read_group(source, name) for name in wanted if name in groups},
        documents={name: read_json(source.checked(f"{name}.json")) for name in wanted if name in documents},
        versions=source.versions,
    )


def write_content(path: Path, content: Content, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Writes prepared content as the folder `path`; see `save_folder`."""
    path = Path(os.path.realpath(path))
    refuse_strangers(path)
    with replacing_folder(path) as folder:
        _write_files(folder, content, max_shard_bytes)


def _unmatched(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    patterns = tuple(patterns)
    return sorted(name for name in names if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns))


def refuse_strangers(path: Path) -> None:
    """Raises ValueError if there are files at `path` that no save put there, which replacing it would lose."""
    strangers = [path.name] if path.exists() else []
    if path.is_dir():
        try:
            saved = {MANIFEST, *_read_manifest(path).files}
        except (CheckpointError, OSError):
            saved = set()
        strangers = sorted(set(os.listdir(path)) - saved)
    if strangers:
        raise UsageError(f"{path} holds what te-models did not save ({list_some(strangers)}); choose another folder")


def _write_files(folder: Path, content: Content, max_shard_bytes: int) -> None:
    files: dict[str, dict[str, Any]] = {}
    for group, tensors in content.tensors.items():
        shards = _shard(group, tensors, max_shard_bytes)
        for file, members in shards.items():
            files[file] = record(folder / file, render_safetensors(members))
        if len(shards) > 1:
            total = sum(tensor.nbytes for tensor in tensors.values())
            weight_map = {name: file for file, members in shards.items() for name in members}
            files[group + INDEX] = write_index(folder, group, weight_map, total)
    finish_folder(folder, files, content)


def write_index(folder: Path, group: str, weight_map: Mapping[str, str], total_size: int) -> dict[str, Any]:
    """Writes the index of a group in several files (name -> file); returns its entry for the manifest."""
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(weight_map)}
    return record(folder / (group + INDEX), [render_json(index, group + INDEX)])


def finish_folder(folder: Path, files: Mapping[str, Mapping[str, Any]], content: Content) -> None:
    """Writes the documents, and the manifest that makes the folder whole; `files` are the entries of those written."""
    files = dict(files)
    for name, text in content.documents.items():
        files[f"{name}.json"] = record(folder / f"{name}.json", [text])
    manifest = {"format": FORMAT_VERSION, "versions": _versions(), "files": files, "aliases": content.aliases}
    write_file(folder / MANIFEST, [render_json(manifest | {"digest": _digest(manifest)}, MANIFEST)])


def record(path: Path, chunks: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Writes a file and returns its entry for the manifest."""
    return asdict(_File(*write_file(path, chunks)))


def _shard(group: str, tensors: Mapping[str, Tensor], limit: int) -> dict[str, dict[str, Tensor]]:
    """Splits a group into files of at most `limit` bytes, in the order given; a larger tensor gets its own file."""
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


def _versions() -> dict[str, str]:
    try:
        own = importlib.metadata.version("te-models")
    except importlib.metadata.PackageNotFoundError:
        own = "not installed"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "safetensors": safetensors.__version__,
        "te_models": own,
    }


def _digest(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest's content, whatever its layout."""
    text = json.dumps({key: manifest[key] for key in manifest if key != "digest"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _source(folder: Path, require_manifest: bool) -> _Source:
    """What a folder holds, from its manifest where it has one."""
    if os.path.lexists(folder / MANIFEST):
        return _read_manifest(folder, links=not require_manifest)
    if require_manifest:
        raise CheckpointError(f"{folder} has no {MANIFEST}: it is incomplete, or was not saved by te-models")
    return _Source(folder, {file: _File() for file in os.listdir(folder)}, links=True)


def _read_manifest(folder: Path, links: bool = False) -> _Source:
    found = read_json(_Source(folder, {MANIFEST: _File()}, links).locate(MANIFEST))
    try:
        if found["format"] != FORMAT_VERSION:
            raise ValueError(f"format {found['format']!r} is not the format {FORMAT_VERSION} that this version reads")
        if found["digest"] != _digest(found):
            raise ValueError("its digest does not fit its content")
        files = {name: _File(int(entry["size"]), str(entry["sha256"])) for name, entry in found["files"].items()}
        aliases = {
            group: {alias: str(name) for alias, name in ties.items()} for group, ties in found["aliases"].items()
        }
        return _Source(folder, files, links, aliases, dict(found["versions"]))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{folder / MANIFEST} is damaged: {first_line(error)}") from None


def _read_group(source: _Source, group: str) -> dict[str, Tensor]:
    """All tensors of a group, memory-mapped, ties included."""
    weight_map = None if f"{group}.safetensors" in source.files else _read_index(source, group + INDEX)
    shards = sorted(set(weight_map.values())) if weight_map is not None else [f"{group}.safetensors"]
    with ThreadPoolExecutor() as pool:
        paths = list(pool.map(source.checked, shards))
    tensors: dict[str, Tensor] = {}
    places: dict[str, str] = {}
    for path in paths:
        for name, tensor in open_safetensors(path).items():
            tensors[name], places[name] = tensor, path.name
    if weight_map is not None and places != weight_map:
        wrong = sorted(name for name in places.keys() | weight_map if places.get(name) != weight_map.get(name))
        raise CheckpointError(f"{source.folder / (group + INDEX)} and its files disagree about {list_some(wrong)}")
    for alias, name in source.aliases.get(group, {}).items():
        if alias in tensors or name not in places:
            raise CheckpointError(f"{source.folder / MANIFEST} is damaged: {alias} cannot be another name of {name}")
        tensors[alias] = tensors[name]
    return tensors


def _read_index(source: _Source, file: str) -> dict[str, str]:
    """Tensor name -> file, from an index in Hugging Face's layout."""
    index = read_json(source.checked(file))
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{source.folder / file} is damaged: it has no map of tensor names to files")
    return weight_map
