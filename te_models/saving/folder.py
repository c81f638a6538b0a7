"""Folders of safetensors and JSON files: complete, exact and checked, or refused.

A folder contains named groups of tensors (`model.safetensors`, or shards with an index in Hugging Face's layout), named
JSON documents (`config.json`) and `manifest.json`, which lists the size and SHA-256 of every file and carries a digest
of itself. Saving writes a hidden folder beside the target, makes it durable and renames it into place; loading checks
everything before it returns anything. Nothing here is a pickle, and nothing read can run code.

One process saves to a path at a time. If two do, one of them fails with `SaveError`; their files never mix.
"""

import difflib
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import stat
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

import te_models
from te_models.errors import CheckpointError, UsageError
from te_models.files.atomic import first_line, readable, replacing_folder, reraising, write_file
from te_models.files.formats import (
    MAX_FILE_BYTES,
    Document,
    Fields,
    Value,
    list_some,
    parse_index,
    parse_json,
    read_bytes,
    render_index,
    render_json,
)
from te_models.files.tensors import (
    check_finite,
    check_savable,
    read_safetensors,
    split_by_size,
    write_safetensors,
)

FORMAT_VERSION = 1
# File name without its suffix -> tensor name -> tensor.
TensorGroups = Mapping[str, Mapping[str, Tensor]]
MAX_SHARD_BYTES = 5 * 2**30
# Groups that are never split: peft reads adapters from one file.
UNDIVIDED = ("adapter_model",)
MANIFEST = "manifest.json"
INDEX = ".safetensors.index.json"
_NAME = re.compile(r"[a-z0-9][a-z0-9_]{0,63}")
_FILE = re.compile(r"(additional_chat_templates/)?[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


@dataclass(frozen=True)
class Folder:
    """A checked folder."""

    path: Path
    # group -> tensor name -> CPU tensor, which may be written to
    tensors: dict[str, dict[str, Tensor]]
    documents: Fields  # document name -> parsed JSON


@dataclass(frozen=True)
class _File:
    """A file's entry in a manifest; both are None for one that none lists."""

    size: int | None = None
    sha256: str | None = None


@dataclass(frozen=True)
class _Source:
    """A folder and the entries of its files, before they are read."""

    folder: Path
    files: dict[str, _File]
    links: bool
    aliases: dict[str, dict[str, str]] = field(default_factory=dict)

    def names(self) -> tuple[set[str], set[str]]:
        """Return the names of the tensor groups and of the documents."""
        groups = set()
        documents = set()
        for file in self.files:
            for names, suffix in ((groups, ".safetensors"), (groups, INDEX), (documents, ".json")):
                name = file.removesuffix(suffix)
                if name != file and _NAME.fullmatch(name):
                    names.add(name)
        return groups, documents - {"manifest"}

    def locate(self, file: str) -> Path:
        """Return the path of a listed file, which is inside the folder, regular and of the right size."""
        path = self.folder / file
        # An index could name "../../etc/passwd": only plain names that the manifest lists are read.
        if not _FILE.fullmatch(file) or file not in self.files:
            raise CheckpointError(f"{self.folder} holds no file {file[:80]!r}")
        try:
            # Our own folders have no links; a snapshot in the Hugging Face cache consists of them.
            status = path.stat() if self.links else path.lstat()
            size = self.files[file].size
        except FileNotFoundError:
            raise CheckpointError(
                f"{self.folder} is incomplete: it lacks {file}, which was saved"
            ) from None
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path} is not a regular file")
        if size is not None and size != status.st_size:
            raise CheckpointError(
                f"{path} is damaged: {status.st_size} bytes where {size} were saved"
            )
        return path

    def read(self, file: str, parsed: bool = True) -> Value:
        """Return the content of a small listed file, which is what was saved: JSON, or bytes that are not `parsed`."""
        path = self.locate(file)
        sha256 = self.files[file].sha256
        data = read_bytes(path, MAX_FILE_BYTES, links=self.links)
        if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
            raise CheckpointError(f"{path} is damaged: its SHA-256 is not the one that was saved")
        return parse_json(data, path) if parsed else data


@dataclass(frozen=True)
class Content:
    """The content of one save: tensors without their ties, the ties, and documents rendered as JSON."""

    tensors: dict[str, dict[str, Tensor]]
    aliases: dict[str, dict[str, str]]
    documents: dict[str, bytes]


def save_folder(
    path: str | os.PathLike[str],
    tensors: TensorGroups,
    documents: Document,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write groups of tensors and JSON documents as one folder, atomically and durably.

    A tensor that is the same view of the same storage as an earlier one of its group (tied weights) is written once,
    under the earlier name, as Hugging Face does; the manifest records the tie and loading restores both names. An
    existing folder is replaced only if all its files were saved by this function.

    Args:
        path: the folder to write; its parents are created.
        tensors: group name -> tensor name -> tensor of any stride and device.
        documents: document name -> plain JSON value (use `flatten_state` for anything richer), or `render_json` of it;
            a file's name, such as "tokenizer.model" -> its bytes.
        max_shard_bytes: the group "model" is split into shards of this size, others into shards of 5 GiB or this size.

    Raises:
        UsageError: an argument cannot be saved exactly; nothing was written.
        SaveError: writing failed; the previous content of `path` is intact and nothing is left behind.
    """
    write_content(Path(path), prepare(tensors, documents), max_shard_bytes)


def load_folder(
    path: str | os.PathLike[str],
    names: Iterable[str] | None = None,
    *,
    optional: Iterable[str] = (),
) -> Folder:
    """Read and check a folder that `save_folder` wrote.

    The size of every file that is there is checked, and the hash of the bytes that are returned. Tensors are read into
    memory; where they would fill a quarter of the memory that this process may use, files are mapped instead,
    copy-on-write, and must not be truncated during the load.

    Args:
        path: the folder.
        names: the groups and documents to read (a name may be both); None means everything.
        optional: further names, read where they exist.

    Raises:
        CheckpointError: the folder is missing, damaged or incomplete; the message says how.
    """
    folder = readable(Path(path))
    if not folder.is_dir():
        raise CheckpointError(f"{path} is not a folder of saved state")
    if not os.path.lexists(folder / MANIFEST):
        raise CheckpointError(
            f"{folder} has no {MANIFEST}: it is incomplete; copy or save the whole folder again"
        )
    with reraising(f"{folder} cannot be read", OSError):
        return _load(_read_manifest(folder), names, optional)


def read_listed(path: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Return the content of the small files `names` that a folder has: file name -> bytes.

    Where the folder has a manifest, a file that it lists must have the size and the hash that were saved.

    Raises:
        CheckpointError: a file or the manifest is damaged, too large or not a regular file.
    """
    with reraising(f"{path} cannot be read", OSError):
        listed = _read_manifest(path, links=True).files if os.path.lexists(path / MANIFEST) else {}
        present = [name for name in names if os.path.lexists(path / name)]
        source = _Source(path, {name: listed.get(name, _File()) for name in present}, links=True)
        return {name: source.read(name, parsed=False) for name in present}


def match(
    expected: Mapping[str, Tensor], loaded: Mapping[str, Tensor], *, check_dtype: bool = True
) -> None:
    """Compare names, shapes and dtypes, so that a live model is changed only after everything is known to fit.

    `check_dtype=False` leaves dtypes to the caller, for a model that is loaded in another precision.

    Raises:
        CheckpointError: the message lists missing, unexpected and different tensors.
    """
    # All differences at once: fixing one at a time would take as many attempts.
    missing = sorted(expected.keys() - loaded.keys())
    extra = sorted(loaded.keys() - expected.keys())
    different = []
    for name in sorted(expected.keys() & loaded.keys()):
        target = expected[name]
        tensor = loaded[name]
        if target.shape != tensor.shape:
            different.append(f"{name} has shape {list(tensor.shape)}, not {list(target.shape)}")
        elif check_dtype and target.dtype != tensor.dtype:
            different.append(f"{name} is {tensor.dtype}, not {target.dtype}")
    problems = []
    for label, items in (("missing", missing), ("unexpected", extra), ("different", different)):
        if items:
            problems.append(f"{label}: {list_some(items)}")
    if problems:
        raise CheckpointError("the saved tensors do not fit; " + "; ".join(problems))


def prepare(tensors: TensorGroups, documents: Document) -> Content:
    """Check the content to save, find tied tensors and render the documents; see `save_folder` for the arguments."""
    json_names = [name for name, document in documents.items() if not _is_file(name, document)]
    # Names become names of files: nothing in them may lead out of the folder.
    for name in (*tensors, *json_names):
        if not _NAME.fullmatch(name) or name == "manifest":
            raise UsageError(
                f"{name!r} cannot name a file of saved state; use a-z, 0-9 and _, and not 'manifest'"
            )
    untied: dict[str, dict[str, Tensor]] = {}
    aliases: dict[str, dict[str, str]] = {}
    for group, members in tensors.items():
        untied[group], ties = _without_ties(members)
        # safetensors refuses two tensors with one memory: the second name is noted in the manifest.
        if ties:
            aliases[group] = ties
    rendered = {}
    for name, document in documents.items():
        rendered[name] = document if isinstance(document, bytes) else render_json(document, name)
    return Content(untied, aliases, rendered)


def _without_ties(members: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return each tensor once, under its first name, and further name -> first name of the same view of a storage."""
    untied: dict[str, Tensor] = {}
    ties: dict[str, str] = {}
    first_names: dict[object, str] = {}
    for name, tensor in members.items():
        check_savable(name, tensor)
        first = name
        if tensor.numel():  # empty tensors have no address
            view = (
                tensor.untyped_storage().data_ptr(),
                tensor.storage_offset(),
                tensor.shape,
                tensor.stride(),
                tensor.dtype,
            )
            first = first_names.setdefault(view, name)
        if first == name:
            untied[name] = tensor.detach()
        else:
            ties[name] = first
    return untied, ties


def write_content(path: Path, content: Content, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Write prepared content as the folder `path`; see `save_folder`."""
    # A link to a folder is followed: renaming over the link would leave its target as it was.
    path = Path(os.path.realpath(path))
    refuse_foreign_files(path)
    with replacing_folder(path) as folder:
        files: dict[str, Fields] = {}
        for group, tensors in content.tensors.items():
            limit = max_shard_bytes if group == "model" else max(max_shard_bytes, MAX_SHARD_BYTES)
            if group in UNDIVIDED:
                limit = max(limit, sum(tensor.nbytes for tensor in tensors.values()))
            shards = split_by_size(group, tensors, limit)
            for file, members in shards.items():
                files[file] = entry(*write_safetensors(folder / file, members))
            places = {name: file for file, members in shards.items() for name in members}
            total = sum(tensor.nbytes for tensor in tensors.values())
            files |= write_index(folder, group, places, total)
        finish_folder(folder, files, content)


def write_index(folder: Path, group: str, places: Mapping[str, str], total: int) -> Fields:
    """Write the index of a group of `total` bytes, tensor name -> file, if it has several files; return its entry."""
    if len(set(places.values())) < 2:
        return {}
    file = group + INDEX
    size, sha256 = write_file(folder / file, render_index(places, total))
    return {file: entry(size, sha256)}


def finish_folder(folder: Path, files: Mapping[str, Document], content: Content) -> None:
    """Write the documents and then the manifest, in which `files` are the entries of files written before."""
    files = dict(files)
    for name, text in content.documents.items():
        file = name if _is_file(name, text) else f"{name}.json"
        if "/" in file:
            (folder / file).parent.mkdir(exist_ok=True)
        files[file] = entry(*write_file(folder / file, text))
    manifest = {
        "format": FORMAT_VERSION,
        "versions": _versions(),
        "files": files,
        "aliases": content.aliases,
    }
    # Last: a folder with a manifest is complete.
    write_file(folder / MANIFEST, render_json(manifest | {"digest": _digest(manifest)}, MANIFEST))


def entry(size: int, sha256: str) -> dict[str, int | str]:
    """Return the entry of a file in the manifest."""
    return {"size": size, "sha256": sha256}


def refuse_foreign_files(path: Path) -> None:
    """Raise UsageError if replacing `path` would delete files that no save wrote."""
    foreign = []
    if path.is_dir():
        foreign = _foreign_files(path)
    elif path.exists():
        foreign = [path.name]
    if foreign:
        raise UsageError(
            f"{path} holds what te-models did not save ({list_some(foreign)}); choose another folder"
        )


def _foreign_files(path: Path) -> list[str]:
    """Return the files in a folder that its manifest does not list; without a readable manifest all of them."""
    try:
        saved = {MANIFEST, *_read_manifest(path).files}
    except (CheckpointError, OSError):
        saved = set()
    folders = set()  # inside, that hold listed files
    for name in saved:
        if "/" in name and (path / name).parent.is_dir():
            folders.add(name.partition("/")[0])
    present = set(os.listdir(path))
    for folder in folders:
        present |= {f"{folder}/{name}" for name in os.listdir(path / folder)}
    return sorted(present - saved - folders)


def _is_file(name: str, document: object) -> bool:
    """Return whether a document is the content of the file of this name, rather than JSON, whose name gets a suffix."""
    return isinstance(document, bytes) and "." in name and _FILE.fullmatch(name) is not None


def _load(source: _Source, names: Iterable[str] | None, optional: Iterable[str]) -> Folder:
    groups, documents = source.names()
    known = groups | documents
    requested = sorted(known) if names is None else list(names)
    to_read = dict.fromkeys([*requested, *known.intersection(optional)])
    for name in to_read:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise CheckpointError(f"{source.folder} holds no {name!r}{hint}")
    for file in source.files:
        if os.path.lexists(source.folder / file):  # a file that was not asked for may be gone
            source.locate(file)
    return Folder(
        path=source.folder,
        documents={name: source.read(f"{name}.json") for name in to_read if name in documents},
        tensors=_read_groups(source, [name for name in to_read if name in groups]),
    )


def _read_groups(source: _Source, groups: Iterable[str]) -> dict[str, dict[str, Tensor]]:
    """Return all tensors of the groups, ties included."""
    maps: dict[str, dict[str, str] | None] = {}
    shards: dict[str, list[str]] = {}
    for group in groups:
        index = group + INDEX
        single = f"{group}.safetensors"
        if single in source.files:
            maps[group] = None
            shards[group] = [single]
        else:
            weight_map = parse_index(source.read(index), source.folder / index)
            maps[group] = weight_map
            shards[group] = sorted(set(weight_map.values()))
    paths = {file: source.locate(file) for files in shards.values() for file in files}
    # Mapped files need no memory of their own, but fail with SIGBUS if somebody truncates them: only where needed.
    mapped = sum(path.stat().st_size for path in paths.values()) > _memory_share()

    def read(file: str) -> dict[str, Tensor]:
        sha256 = source.files[file].sha256
        tensors = read_safetensors(paths[file], sha256, links=False, mapped=mapped)
        if file in shards.get("model", ()):
            check_finite(tensors, source.folder)
        return tensors

    # Hashing releases the GIL: files are read and checked side by side.
    with ThreadPoolExecutor() as pool:
        contents = dict(zip(paths, pool.map(read, paths), strict=True))
    return {
        group: _joined(source, group, {file: contents[file] for file in files}, maps[group])
        for group, files in shards.items()
    }


def _joined(
    source: _Source, group: str, shards: TensorGroups, weight_map: Mapping[str, str] | None
) -> dict[str, Tensor]:
    """Return the tensors of a group from its files, which must agree with its index; ties included."""
    tensors = {name: tensor for members in shards.values() for name, tensor in members.items()}
    places = {name: file for file, members in shards.items() for name in members}
    # An index of another save beside the files would give a mixture of two models.
    if weight_map is not None and places != weight_map:
        wrong = sorted(
            name for name in places.keys() | weight_map if places.get(name) != weight_map.get(name)
        )
        raise CheckpointError(
            f"{source.folder / (group + INDEX)} and its files disagree about {list_some(wrong)}"
        )
    for alias, name in source.aliases.get(group, {}).items():
        if alias in tensors or name not in places:
            raise CheckpointError(
                f"{source.folder / MANIFEST} is damaged: {alias} cannot be another name of {name}"
            )
        tensors[alias] = tensors[name]
    return tensors


def _memory_share() -> int:
    """Return a quarter of the host memory, in bytes, of this process, which is one of several on this host."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdecimal():
        memory = min(memory, int(text))
    processes = os.environ.get("LOCAL_WORLD_SIZE", "")  # set by torchrun
    return memory // 4 // (max(1, int(processes)) if processes.isdecimal() else 1)


def _read_manifest(folder: Path, links: bool = False) -> _Source:
    manifest = _Source(folder, {MANIFEST: _File()}, links).read(MANIFEST)
    try:
        # The digest covers the rest of the manifest, so that damage to it can be distinguished from damage to files.
        problem = ""
        if manifest["digest"] != _digest(manifest):
            problem = "its digest does not fit its content"
        if manifest["format"] != FORMAT_VERSION:
            problem = f"format {manifest['format']!r} is not the format {FORMAT_VERSION} that this version reads"
        if problem:
            raise ValueError(problem)
        files = {
            name: _File(int(entry["size"]), str(entry["sha256"]))
            for name, entry in manifest["files"].items()
        }
        aliases = {
            group: {alias: str(name) for alias, name in ties.items()}
            for group, ties in manifest["aliases"].items()
        }
        return _Source(folder, files, links, aliases)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{folder / MANIFEST} is damaged: {first_line(error)}") from None


def _digest(manifest: Document) -> str:
    """Return the SHA-256 of a manifest's content, whatever its layout."""
    # Of the parsed content: reformatting a manifest does not make it damaged.
    text = json.dumps({key: manifest[key] for key in manifest if key != "digest"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _versions() -> dict[str, str]:
    """Return the versions of what wrote a folder, for its manifest."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "te_models": te_models.__version__,
        "safetensors": importlib.metadata.version("safetensors"),
    }
