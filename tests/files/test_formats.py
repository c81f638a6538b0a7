"""Nested state survives tensors plus JSON exactly, and tensors that do not fit a model are named before it is
touched."""

import contextlib
import gc
import gzip
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from te_models.data.documents import load_documents
from te_models.errors import CheckpointError, DataError
from te_models.files.formats import flatten_state, read_bytes, read_json, unflatten_state
from te_models.files.tensors import SafetensorsFile, all_finite, read_safetensors
from te_models.saving.folder import load_folder, match, save_folder

WANTED = {
    "a": torch.empty(2, 3, device="meta"),
    "b": torch.empty(4, dtype=torch.bfloat16, device="meta"),
}


@pytest.mark.parametrize(
    ("loaded", "options", "message"),
    [
        ({"a": torch.ones(2, 3), "b": torch.ones(4).bfloat16()}, {}, None),
        ({"a": torch.ones(2, 3)}, {}, "missing: b"),
        ({"a": torch.ones(2, 3), "b": torch.ones(4)}, {}, "b is torch.float32, not torch.bfloat16"),
        ({"a": torch.ones(2, 3), "b": torch.ones(4)}, {"check_dtype": False}, None),
        (
            {"a": torch.ones(3, 2), "b": torch.ones(4)},
            {"check_dtype": False},
            r"a has shape \[3, 2\], not \[2, 3\]",
        ),
        ({**WANTED, "x._extra_state": torch.ones(1)}, {}, "unexpected: x._extra_state"),
        ({}, {}, "missing: a, b"),
    ],
)
def test_match(loaded: dict[str, Tensor], options: dict[str, Any], message: str | None) -> None:
    if message is None:
        match(WANTED, loaded, **options)
    else:
        with pytest.raises(CheckpointError, match=message):
            match(WANTED, loaded, **options)


def test_match_says_no_more_than_a_line_can_hold() -> None:
    expected = {f"{'x' * 500}{i}": torch.ones(1) for i in range(1000)}
    with pytest.raises(CheckpointError, match="and 995 more") as caught:
        match(expected, {})
    assert len(str(caught.value)) < 1000


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**200), 2**200)
    | st.floats()
    | st.just(math.nan)
    | st.text(max_size=5)
    | st.sampled_from([torch.arange(3), torch.tensor(2.5), torch.empty(0)])
)
KEYS = (
    st.text(max_size=3)
    | st.integers()
    | st.sampled_from(["$tensor", "a.b", "a", "__metadata__"])
    | st.booleans()
)
STATES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS | st.tuples(st.integers(), st.text(max_size=2)), inner, max_size=4)
    ),
    max_leaves=12,
)


def assert_equal_state(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert [(type(key), key) for key in found] == [(type(key), key) for key in expected]
        for key in expected:
            assert_equal_state(found[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for left, right in zip(found, expected, strict=True):
            assert_equal_state(left, right)
    else:
        assert repr(found) == repr(expected)


@settings(max_examples=300, deadline=None)
@given(STATES)
def test_any_state_survives_json(state: Any) -> None:
    tensors, document = flatten_state(state)
    assert "__metadata__" not in tensors
    assert_equal_state(
        unflatten_state(tensors, json.loads(json.dumps(document, allow_nan=False))), state
    )


def test_places_that_read_alike_keep_their_own_tensors() -> None:
    state = {
        "a": {"b": torch.zeros(1), "b_": torch.ones(1)},
        "a.b": torch.ones(2),
        0: torch.zeros(3),
        "0": torch.ones(3),
    }
    assert_equal_state(unflatten_state(*flatten_state(state)), state)


def test_optimizer_and_random_state_survive_a_folder(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {
        "optimizer": optimizer.state_dict(),
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
    }
    tensors, document = flatten_state(state)
    assert "optimizer.state.0.exp_avg" in tensors
    save_folder(tmp_path / "out", {"training": tensors}, {"training": document})
    found = load_folder(tmp_path / "out")
    again = unflatten_state(found.tensors["training"], found.documents["training"])
    assert_equal_state(again, state)
    optimizer.load_state_dict(again["optimizer"])
    random.setstate(again["python"])


@pytest.mark.parametrize("value", [{1, 2}, 1j, b"x", torch.float32, torch.Size([1]), object()])
def test_other_types_are_refused_with_their_place(value: Any) -> None:
    with pytest.raises(ValueError, match=r"state\.0\.x is a "):
        flatten_state({"state": [{"x": value}]})


@pytest.mark.parametrize(
    "document",
    [
        {"$tensor": "absent"},
        {"$tensor": ["a"]},
        {"$tuple": 1},
        {"$dict": [[1]]},
        {"$dict": [[[], 1]]},
        {"$float": "1e3"},
        {"$float": []},
        {"$unknown": 1},
        {"$tensor": "a", "more": 1},
        [],
    ],
)
def test_damaged_states_are_refused(document: Any) -> None:
    with pytest.raises(CheckpointError):
        unflatten_state({"a": torch.ones(1)}, document)


def test_a_deep_state_is_refused() -> None:
    document: Any = []
    for _ in range(20_000):
        document = [document]
    with pytest.raises(CheckpointError, match="recursion"):
        unflatten_state({}, document)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
    ],
    ids=str,
)
def test_a_value_that_is_not_finite_is_found(dtype: torch.dtype) -> None:
    """Every byte of the FP8 formats, and the largest values of the others, against torch's own isfinite in FP32."""
    if dtype.itemsize == 1:
        values = torch.arange(256, dtype=torch.uint8).view(dtype)
    elif not dtype.is_floating_point:
        values = torch.tensor([torch.iinfo(dtype).min, -1, torch.iinfo(dtype).max], dtype=dtype)
    else:
        finite = torch.finfo(dtype)
        values = torch.tensor(
            [finite.max, finite.min, 0, finite.tiny, math.inf, -math.inf, math.nan], dtype=dtype
        )
    for value in values.view(torch.uint8).view(-1, dtype.itemsize):
        for place in (0, 37, 99):
            tensor = torch.ones(100).to(dtype)
            tensor.view(torch.uint8).view(100, -1)[place] = value
            wanted = bool(tensor.double().isfinite().all())
            assert all_finite(tensor) == all_finite(tensor.view(10, 10).T) == wanted
    assert all_finite(torch.empty(0, dtype=dtype)) and all_finite(torch.ones(()).to(dtype))


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs Linux's /proc")
def test_a_failing_read_is_one_line(tmp_path: Path) -> None:
    """/proc/self/mem is a regular file whose first page cannot be read, as on a disk that fails."""
    (tmp_path / "config.json").symlink_to("/proc/self/mem")
    for read in (read_bytes_of, lambda path: read_safetensors(path)):
        with pytest.raises(CheckpointError, match="config.json cannot be read: Input/output error"):
            read(tmp_path / "config.json")


def read_bytes_of(path: Path) -> bytes:
    return read_bytes(path, 100)


def test_a_file_without_anything_to_read_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without waiting, as it is opened, such a file gives None."""
    (tmp_path / "a").write_bytes(b"x")
    monkeypatch.setattr("builtins.open", lambda *_, **__: contextlib.nullcontext(Nothing()))
    assert read_bytes_of(tmp_path / "a") == b""


class Nothing:
    def read(self, size: int) -> None:
        return None


def test_parsing_searches_for_no_cycles(tmp_path: Path) -> None:
    """A million small lists are parsed in a second; with a search for cycles every few hundred it takes ten."""
    searches: list[str] = []
    file = tmp_path / "a.json"
    file.write_text("[" + "[]," * 30_000 + "0]")
    gc.callbacks.append(lambda phase, info: searches.append(phase))
    try:
        assert len(read_json(file)) == 30_001
        with pytest.raises(DataError, match="not an object"):
            load_documents(file)
    finally:
        gc.callbacks.pop()
    assert len(searches) < 10 and gc.isenabled()


def test_the_index_of_a_large_model_is_read(tmp_path: Path) -> None:
    """One of experts with scales of their own has 90,000 tensors and more, in 9 MB and more."""
    names = (
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight{scale}"
        for layer in range(61)
        for expert in range(384)
        for part in ("gate", "up", "down")
        for scale in ("", "_scale_inv")
    )
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-000163.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert (tmp_path / "model.safetensors.index.json").stat().st_size > 9e6
    assert read_json(tmp_path / "model.safetensors.index.json") == index


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n", "a pointer of Git LFS"),
        (b"<!DOCTYPE html>\n<html><head>", "a web page"),
        (b"<html><head><title>404", "a web page"),
        (b"PK\x03\x04\x14\x00\x00\x00\x08\x00", "a zip archive"),
        (gzip.compress(b"{}"), "compressed by gzip"),
    ],
    ids=["pointer", "page", "bare page", "zip", "gzip"],
)
def test_a_file_that_is_something_else_is_named(
    name: str, content: bytes, kind: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    read = read_json if name.endswith(".json") else SafetensorsFile
    with pytest.raises(CheckpointError, match=f"{name} is {kind}"):
        read(path)


def test_an_empty_file_of_weights_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is empty: copy or download"):
        SafetensorsFile(path)
