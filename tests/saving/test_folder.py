"""Saved folders: what is saved comes back exactly, and what is damaged or hostile is refused in one line."""

import hashlib
import json
import os
import random
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from bits import assert_same_bits, assert_same_tensors
from torch import Tensor

from te_models.errors import CheckpointError
from te_models.files.formats import MAX_FILE_BYTES, read_json
from te_models.files.tensors import MAX_HEADER_BYTES, read_safetensors
from te_models.saving.folder import _digest as manifest_digest
from te_models.saving.folder import load_folder, save_folder

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool,
]  # fmt: skip
SHAPES = [(), (0,), (1,), (3, 0, 2), (7,), (3, 5), (2, 3, 4)]


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Every byte pattern that fits, NaN payloads and negative zeros included."""
    generator = torch.Generator().manual_seed(len(shape))
    if dtype == torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    width = torch.empty((), dtype=dtype).itemsize
    flat = torch.randint(
        256, (torch.Size(shape).numel() * width,), generator=generator, dtype=torch.uint8
    )
    return flat.view(dtype).reshape(shape)


def small() -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """A checkpoint of a few hundred bytes with everything in it: shards, a tie, documents."""
    weight = filled((3, 5), torch.bfloat16)
    tensors = {
        "model": {
            "embed.weight": weight,
            "norm.weight": filled((4,), torch.float32),
            "lm_head.weight": weight,
        },
        "fp8_state": {"layers.0.scale": torch.ones(3)},
    }
    return tensors, {"config": {"hidden_size": 4, "name": "x"}, "trainer": {"step": 7}}


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape_round_trips_exactly(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {f"t{i}": filled(shape, dtype) for i, shape in enumerate(SHAPES)}
    tensors["other width"] = torch.ones(3, dtype=torch.uint8)
    tensors["transposed"] = filled((3, 5), dtype).t()
    tensors["strided"] = filled((12,), dtype)[1::3]
    tensors["expanded"] = filled((1, 4), dtype).expand(3, 4)
    save_folder(tmp_path / "out", {"training": tensors}, {})
    found = load_folder(tmp_path / "out").tensors["training"]
    assert_same_tensors(found, tensors)
    if dtype not in (torch.uint64, torch.uint32, torch.uint16):
        other = safetensors.torch.load_file(tmp_path / "out" / "training.safetensors")
        assert other.keys() == tensors.keys()
        assert_same_bits("strided", other["strided"], tensors["strided"])


def test_tensors_are_aligned_and_may_be_written_to(tmp_path: Path) -> None:
    save_folder(
        tmp_path / "out", {"model": {"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(5)}}, {}
    )
    found = load_folder(tmp_path / "out").tensors["model"]
    assert all(tensor.data_ptr() % tensor.itemsize == 0 for tensor in found.values())
    found["b"].add_(1)
    assert_same_bits("result", load_folder(tmp_path / "out").tensors["model"]["b"], torch.ones(5))


@pytest.mark.skipif(os.name == "nt", reason="of permissions that Windows lacks")
@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_files_of_tensors_are_as_readable_as_the_others(umask: int, tmp_path: Path) -> None:
    """A server that runs as another user reads a model, if the umask lets it."""
    before = os.umask(umask)
    try:
        save_folder(tmp_path / "out", *small())
    finally:
        os.umask(before)
    files = list((tmp_path / "out").iterdir())
    assert {file.stat().st_mode & 0o777 for file in files} == {0o666 & ~umask}
    assert any(file.suffix == ".safetensors" for file in files)


def test_tied_tensors_are_written_once_and_come_back_tied(tmp_path: Path) -> None:
    weight = torch.rand(8, 8)
    tensors = {
        "embed": weight,
        "head": weight,
        "top": weight[:4],
        "low": weight[4:],
        "transposed": weight.t(),
        "none": torch.empty(0),
    }
    save_folder(tmp_path / "out", {"model": tensors}, {})
    assert "head" not in safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    found = load_folder(tmp_path / "out").tensors["model"]
    assert found["head"].data_ptr() == found["embed"].data_ptr()
    assert_same_tensors(found, tensors)


@pytest.mark.parametrize(("limit", "files"), [(10**6, 1), (200, 2), (100, 4), (1, 4)])
def test_shards_have_hugging_faces_layout(limit: int, files: int, tmp_path: Path) -> None:
    tensors = {f"layers.{i}": torch.full((25,), float(i)) for i in range(4)}
    save_folder(tmp_path / "out", {"model": tensors}, {"config": {}}, max_shard_bytes=limit)
    shards = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    if files == 1:
        assert shards == ["model.safetensors"]
    else:
        assert shards == [f"model-{i:05d}-of-{files:05d}.safetensors" for i in range(1, files + 1)]
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_bytes())
        assert index["metadata"] == {"total_size": 400}
        assert {
            name
            for shard in shards
            for name in safetensors.torch.load_file(tmp_path / "out" / shard)
        } == set(tensors)
        assert set(index["weight_map"]) == set(tensors)
    found = load_folder(tmp_path / "out", ["model"])
    assert found.documents == {}
    assert_same_tensors(found.tensors["model"], tensors)


def test_reads_only_what_is_asked_for(tmp_path: Path) -> None:
    save_folder(tmp_path / "out", *small())
    found = load_folder(tmp_path / "out", ["config"], optional=["fp8_state", "optimizer"])
    assert (set(found.tensors), set(found.documents)) == ({"fp8_state"}, {"config"})
    everything = load_folder(tmp_path / "out")
    assert (set(everything.tensors), set(everything.documents)) == (
        {"model", "fp8_state"},
        {"config", "trainer"},
    )
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_bytes())
    assert set(manifest["versions"]) == {"python", "torch", "safetensors", "te_models"}
    with pytest.raises(CheckpointError, match="holds no 'trainr'; did you mean 'trainer'"):
        load_folder(tmp_path / "out", ["trainr"])


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("tensors", "documents", "message"),
    [
        ({"Model": {}}, {}, "cannot name a file"),
        ({"../model": {}}, {}, "cannot name a file"),
        ({}, {"manifest": {}}, "cannot name a file"),
        ({"model": {"w": torch.ones(2, dtype=torch.complex64)}}, {}, "complex64"),
        ({"model": {"w": torch.ones(2, device="meta")}}, {}, "on meta"),
        ({"model": {"w": torch.eye(2).to_sparse()}}, {}, "sparse"),
        ({"model": {"w": torch.ones(2).as_subclass(Subclass)}}, {}, "Subclass"),
        ({"model": {"__metadata__": torch.ones(2)}}, {}, "reserves"),
        ({}, {"config": {"x": float("nan")}}, "flatten_state"),
        ({}, {"config": {"x": (1, 2)}}, "flatten_state"),
        ({}, {"config": {1: 2}}, "flatten_state"),
        ({}, {"config": {"x": torch.float32}}, "flatten_state"),
        ({}, {"config": "x" * MAX_FILE_BYTES}, "more than the limit"),
    ],
)
def test_values_that_would_not_round_trip_are_refused(
    tensors: Any, documents: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        save_folder(tmp_path / "out", tensors, documents)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stranger", ["tokenizer.json", "notes.txt", "sub/x"])
def test_never_replaces_what_it_did_not_save(stranger: str, tmp_path: Path) -> None:
    save_folder(tmp_path / "out", *small())
    save_folder(tmp_path / "out", *small())
    (tmp_path / "out" / stranger).parent.mkdir(exist_ok=True)
    (tmp_path / "out" / stranger).write_text("mine")
    before = snapshot(tmp_path)
    with pytest.raises(ValueError, match=stranger.split("/")[0]):
        save_folder(tmp_path / "out", *small())
    assert snapshot(tmp_path) == before


def test_saves_into_an_empty_folder_and_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    save_folder(tmp_path / "link", *small())
    assert (tmp_path / "link").is_symlink()
    assert (
        load_folder(tmp_path / "real").documents
        == load_folder(tmp_path / "link").documents
        == small()[1]
    )


def assert_unharmed(folder: Path) -> None:
    """Load the folder and compare it with what was saved."""
    found, (tensors, documents) = load_folder(folder), small()
    assert found.documents == documents
    assert found.tensors.keys() == tensors.keys()
    for group, members in tensors.items():
        assert_same_tensors(found.tensors[group], members)


def mutate(data: bytes, rng: random.Random) -> bytes:
    kind, place = (
        rng.choice(["bit", "byte", "cut", "insert", "swap", "zero"]),
        rng.randrange(len(data)),
    )
    changed = bytearray(data)
    if kind == "bit":
        changed[place] ^= 1 << rng.randrange(8)
    elif kind == "byte":
        changed[place] = rng.randrange(256)
    elif kind == "cut":
        del changed[place:]
    elif kind == "insert":
        changed[place:place] = rng.randbytes(rng.randrange(1, 9))
    elif kind == "swap":
        changed[place : place + 4], changed[:4] = changed[:4], changed[place : place + 4]
    else:
        changed[place : place + 16] = bytes(len(changed[place : place + 16]))
    return bytes(changed)


@pytest.mark.parametrize("manifest", [True, False], ids=["manifest", "no manifest"])
@pytest.mark.parametrize("seed", range(2))
def test_mutated_folders_are_refused_or_unharmed(seed: int, manifest: bool, tmp_path: Path) -> None:
    """In files that no manifest lists changed data goes unnoticed, but nothing may crash; fuzz.py runs thousands."""
    rng = random.Random(seed)
    folder = tmp_path / "out"
    save_folder(folder, *small(), max_shard_bytes=40)
    files = {path: path.read_bytes() for path in sorted(folder.iterdir())}
    refused = 0
    for _ in range(400 if manifest else 200):
        path = rng.choice(list(files))
        path.write_bytes(mutate(files[path], rng))
        try:
            if manifest:
                assert_unharmed(folder)
            else:
                (read_json if path.suffix == ".json" else read_safetensors)(path)
        except CheckpointError as error:
            refused += 1
            assert "\n" not in str(error)
            assert len(str(error)) < 1000
        path.write_bytes(files[path])
    assert refused > (340 if manifest else 50)


def rewrite_manifest(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the manifest and make its digest fit again, as someone who knows the format can."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    change(manifest)
    manifest["digest"] = manifest_digest(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def replace_file(folder: Path, name: str, data: bytes) -> None:
    """Replaces a file and makes the manifest fit."""
    (folder / name).write_bytes(data)
    entry = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    rewrite_manifest(folder, lambda manifest: manifest["files"].update({name: entry}))


def tensor_file(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: str = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


SAFETENSORS: dict[str, bytes] = {
    "empty": b"",
    "short": b"\x01\x00",
    "header beyond the file": struct.pack("<Q", 2**40) + b"{}",
    "header of 2^64 - 1": struct.pack("<Q", 2**64 - 1) + b"{}",
    "header over the limit": tensor_file(
        b'{"w":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' + b" " * MAX_HEADER_BYTES
    ),
    "header is a list": tensor_file([]),
    "header is deep": tensor_file(b"[" * 100_000),
    "header is not UTF-8": tensor_file(b'{"\xff": 1}'),
    "unknown dtype": tensor_file({"w": entry("F128")}, bytes(4)),
    "shape too large": tensor_file({"w": entry(shape=(2,))}, bytes(4)),
    "shape overflows": tensor_file({"w": entry(shape=(2**62, 4))}, bytes(4)),
    "negative shape": tensor_file({"w": entry(shape=(-1,))}, bytes(4)),
    "absurd empty shape": tensor_file({"w": entry(shape=(0, 2**63), offsets=(0, 0))}),
    "offsets beyond the data": tensor_file({"w": entry(offsets=(4, 8))}, bytes(4)),
    "offsets backwards": tensor_file({"w": entry(offsets=(4, 0))}, bytes(4)),
    "overlap": tensor_file({"v": entry(), "w": entry()}, bytes(4)),
    "hole": tensor_file({"v": entry(), "w": entry(offsets=(8, 12))}, bytes(12)),
    "trailing data": tensor_file({"w": entry()}, bytes(8)),
    "pickle": b"\x80\x04cos\nsystem\n(X\x04\x00\x00\x00exittR.",
}
JSON: dict[str, bytes] = {
    "empty": b"",
    "deep list": b"[" * 1_000_000,
    "deep object": b'{"a":' * 1_000_000,
    "over the limit": b" " * MAX_FILE_BYTES + b"{}",
    "NaN": b'{"x": NaN}',
    "infinity": b'{"x": -Infinity}',
    "overflowing float": b'{"x": 1e999}',
    "million digits": b'{"x": ' + b"9" * 1_000_000 + b"}",
    "duplicate keys": b'{"x": 1, "x": 2}',
    "duplicate keys deep down": b'{"y": [{"x": 1, "x": 1}]}',
    "not UTF-8": b'{"x": "\xff\xfe"}',
    "two values": b"{}{}",
    "cut": b'{"x": [1, 2',
}


def quickly_refused(folder: Path) -> str:
    start = time.process_time()
    with pytest.raises(CheckpointError) as caught:
        load_folder(folder)
    assert time.process_time() - start < 1
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", SAFETENSORS)
def test_hostile_tensor_files(name: str, tmp_path: Path) -> None:
    save_folder(tmp_path / "out", {"model": {"w": torch.ones(1)}}, {"config": {}})
    replace_file(tmp_path / "out", "model.safetensors", SAFETENSORS[name])
    quickly_refused(tmp_path / "out")


def test_a_file_that_ends_in_its_header_says_so(tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    path.write_bytes(tensor_file({"w": entry()}, bytes(4))[:30])
    with pytest.raises(
        CheckpointError, match="is damaged or has changed: it ends after 30 bytes of"
    ):
        read_safetensors(path)


@pytest.mark.parametrize("file", ["config.json", "manifest.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("name", JSON)
def test_hostile_json(name: str, file: str, tmp_path: Path) -> None:
    save_folder(tmp_path / "out", *small(), max_shard_bytes=1)
    if file == "manifest.json":
        (tmp_path / "out" / file).write_bytes(JSON[name])
    else:
        replace_file(tmp_path / "out", file, JSON[name])
    quickly_refused(tmp_path / "out")


def link_out(folder: Path, name: str) -> None:
    shutil.move(folder / name, folder.parent / "elsewhere")
    (folder / name).symlink_to(folder.parent / "elsewhere")


def as_fifo(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)


def move_shard(folder: Path, target: str) -> None:
    """Makes the index and the manifest name a shard elsewhere."""
    shard = "model-00001-of-00002.safetensors"
    (folder / target).parent.mkdir(exist_ok=True)
    shutil.move(folder / shard, folder / target)
    index = json.loads((folder / "model.safetensors.index.json").read_bytes())
    index["weight_map"] = {
        name: target if file == shard else file for name, file in index["weight_map"].items()
    }
    rewrite_manifest(
        folder, lambda manifest: manifest["files"].update({target: manifest["files"].pop(shard)})
    )
    replace_file(folder, "model.safetensors.index.json", json.dumps(index).encode())


def set_map(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_bytes())
    change(index["weight_map"])
    replace_file(folder, "model.safetensors.index.json", json.dumps(index).encode())


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
FOLDERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing file": (lambda f: (f / SECOND).unlink(), "is incomplete: it lacks"),
    "missing document": (lambda f: (f / "config.json").unlink(), "is incomplete: it lacks"),
    "missing manifest": (lambda f: (f / "manifest.json").unlink(), "no manifest"),
    "cut file": (lambda f: os.truncate(f / FIRST, 20), "bytes where"),
    "linked shard": (lambda f: link_out(f, FIRST), "not a regular file"),
    "linked document": (lambda f: link_out(f, "config.json"), "not a regular file"),
    "linked manifest": (lambda f: link_out(f, "manifest.json"), "not a regular file"),
    "pipe": (lambda f: as_fifo(f, "config.json"), "not a regular file"),
    "shard above the folder": (lambda f: move_shard(f, "../stolen.safetensors"), "holds no file"),
    "shard below the folder": (lambda f: move_shard(f, "sub/stolen.safetensors"), "holds no file"),
    "absolute shard": (
        lambda f: move_shard(f, str(f.parent / "stolen.safetensors")),
        "holds no file",
    ),
    "unlisted shard": (
        lambda f: set_map(f, lambda m: m.update({"norm.weight": "x.safetensors"})),
        "holds no file",
    ),
    "shard name is a number": (
        lambda f: set_map(f, lambda m: m.update({"norm.weight": 1})),
        "no map",
    ),
    "index names too much": (
        lambda f: set_map(f, lambda m: m.update({"more": SECOND})),
        "disagree about more",
    ),
    "shard holds too much": (
        lambda f: replace_file(
            f, SECOND, tensor_file({"norm.weight": entry(), "v": entry(offsets=(4, 8))}, bytes(8))
        ),
        "disagree about v",
    ),
    "index swaps shards": (
        lambda f: set_map(f, lambda m: m.update({"norm.weight": FIRST})),
        "disagree about norm",
    ),
    "index without map": (
        lambda f: replace_file(f, "model.safetensors.index.json", b"[]"),
        "no map",
    ),
    "newer format": (lambda f: rewrite_manifest(f, lambda m: m.update(format=2)), "format 2"),
    "no files": (lambda f: rewrite_manifest(f, lambda m: m.pop("files")), "damaged: 'files'"),
    "files is a list": (lambda f: rewrite_manifest(f, lambda m: m.update(files=[])), "damaged"),
    "entry is a number": (
        lambda f: rewrite_manifest(f, lambda m: m["files"].update({FIRST: 1})),
        "damaged",
    ),
    "tie to nothing": (
        lambda f: rewrite_manifest(f, lambda m: m["aliases"].update(model={"x": "y"})),
        "another name",
    ),
    "tie over a tensor": (
        lambda f: rewrite_manifest(
            f, lambda m: m["aliases"].update(model={"norm.weight": "embed.weight"})
        ),
        "another name",
    ),
    "tie to a list": (
        lambda f: rewrite_manifest(f, lambda m: m["aliases"].update(model={"x": []})),
        "another name",
    ),
    "ties are a list": (
        lambda f: rewrite_manifest(f, lambda m: m["aliases"].update(model=[1])),
        "damaged",
    ),
    "digest of another": (
        lambda f: (f / "manifest.json").write_bytes(
            (f / "manifest.json").read_bytes().replace(b'"python"', b'"pythno"')
        ),
        "digest",
    ),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_hostile_folders(name: str, tmp_path: Path) -> None:
    damage, message = FOLDERS[name]
    save_folder(tmp_path / "out", *small(), max_shard_bytes=40)
    assert_unharmed(tmp_path / "out")
    damage(tmp_path / "out")
    assert message in quickly_refused(tmp_path / "out")


@pytest.mark.parametrize("path", ["nothing", "file"])
def test_a_missing_folder_is_named(path: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "not a folder" in quickly_refused(tmp_path / path)
