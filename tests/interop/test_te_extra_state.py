"""Transformer Engine's pickled extra state: every form of it is read, and no pickle gets to run anything."""

import dataclasses
import enum
import os
import pickle
import pickletools
import random
import re
import struct
import sys
import time
import tracemalloc
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from bits import assert_same_bits

from te_models.errors import CheckpointError
from te_models.interop.te_extra_state import MAX_BYTES, read_extra_state

RECIPES = "transformer_engine.common.recipe"


class _FormatHelper(typing.NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(enum.Enum):
    E4M3 = _FormatHelper(448, 448)
    HYBRID = _FormatHelper(448, 57344)


@dataclasses.dataclass(frozen=True)
class MMParams:
    use_split_accumulator: bool = True


@dataclasses.dataclass
class DelayedScaling:
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: Any = "max"
    scaling_factor_compute_algo: Any = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    _cached_repr: str | None = None


@dataclasses.dataclass
class Float8CurrentScaling:
    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: MMParams = dataclasses.field(default_factory=MMParams)


@pytest.fixture(autouse=True)
def te(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Gives the stand-ins the names under which Transformer Engine's classes are pickled."""
    module = types.ModuleType(RECIPES)
    for cls in (_FormatHelper, Format, MMParams, DelayedScaling, Float8CurrentScaling):
        monkeypatch.setattr(cls, "__module__", RECIPES)
        setattr(module, cls.__name__, cls)
    for name in ("transformer_engine", "transformer_engine.common"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, RECIPES, module)
    yield


def tensors(length: int = 4, gemms: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "scale_fwd": torch.rand(3 * gemms, generator=generator),
        "amax_history_fwd": torch.rand(length, 3 * gemms, generator=generator),
        "scale_bwd": torch.rand(2 * gemms, generator=generator),
        "amax_history_bwd": torch.rand(length, 2 * gemms, generator=generator),
    }


def payload(state: Any, protocol: int | None = None) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(state, protocol)), dtype=torch.uint8)


def assert_tensors(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    assert {name for name in found if isinstance(found[name], torch.Tensor)} == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == torch.float32
        assert_same_bits("found[name]", found[name], tensor)


EXTRA = {"fp8_checkpoint": True, "num_gemms": 1, "fp8_max_fwd": 448.0, "shape": (3, 2), "note": "x"}


@pytest.mark.parametrize("protocol", [3, 4, 5])
@pytest.mark.parametrize("length", [1, 16, 1024])
@pytest.mark.parametrize("fp8_format", list(Format))
def test_reads_the_state_of_a_module(protocol: int, length: int, fp8_format: Format) -> None:
    recipe = DelayedScaling(
        margin=1, amax_history_len=length, fp8_format=fp8_format, _cached_repr="text"
    )
    found = read_extra_state(
        payload({"recipe": recipe, **tensors(length), "extra_fp8_variables": EXTRA}, protocol)
    )
    assert_tensors(found, tensors(length))
    assert found["recipe"] == {
        "recipe_type": "DelayedScaling",
        "margin": 1,
        "fp8_format": fp8_format.name,
        "amax_history_len": length,
        "amax_compute_algo": "max",
        "scaling_factor_compute_algo": None,
        "reduce_amax": True,
        "fp8_dpa": False,
    }
    assert found["extra_fp8_variables"] == EXTRA | {"shape": [3, 2]}


def test_reads_the_nested_state_of_te_ops() -> None:
    all_tensors = tensors()
    parts = {
        mode: {
            "recipe": DelayedScaling(amax_history_len=4),
            **{
                name: tensor
                for name, tensor in all_tensors.items()
                if name.endswith(mode[:1] + "wd")
            },
            "extra_fp8_variables": {f"num_{mode}": 1},
        }
        for mode in ("forward", "backward")
    }
    found = read_extra_state(payload(parts))
    assert_tensors(found, all_tensors)
    assert found["recipe"]["amax_history_len"] == 4
    assert found["extra_fp8_variables"] == {"num_forward": 1, "num_backward": 1}


def test_reads_transformer_engine_1() -> None:
    state = {
        **tensors(),
        "scale_inv_fwd": torch.ones(3),
        "scale_inv_bwd": torch.ones(2),
        "extra_fp8_variables": {},
    }
    found = read_extra_state(payload(state))
    assert_tensors(found, tensors())
    assert found["recipe"] == {"recipe_type": "DelayedScaling"}


def test_reads_views_of_a_larger_storage() -> None:
    whole = torch.arange(20.0)
    state = {**tensors(), "scale_fwd": whole[5:8], "amax_history_fwd": whole[8:20].view(4, 3)}
    found = read_extra_state(payload(state))
    assert_same_bits("found['scale_fwd']", found["scale_fwd"], whole[5:8])
    assert_same_bits("found['amax_history_fwd']", found["amax_history_fwd"], whole[8:20].view(4, 3))


def test_reads_a_format_that_python_pickled_by_name() -> None:
    """Some releases of Python 3.11 pickle an enum member as getattr(Format, "HYBRID")."""

    class ByName:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            return getattr, (Format, "HYBRID")

    found = read_extra_state(payload({"recipe": DelayedScaling(fp8_format=ByName())}))  # pyright: ignore
    assert found["recipe"]["fp8_format"] == "HYBRID"


def test_reads_a_stateless_recipe() -> None:
    found = read_extra_state(payload({"recipe": Float8CurrentScaling(), "extra_fp8_variables": {}}))
    assert found["recipe"] == {
        "recipe_type": "Float8CurrentScaling",
        "fp8_format": "HYBRID",
        "fp8_gemm_fprop": {"use_split_accumulator": True},
    }


@pytest.mark.parametrize(
    "empty", [b"", torch.empty(0, dtype=torch.uint8), pickle.dumps(None), pickle.dumps({})]
)
def test_empty_state(empty: bytes | torch.Tensor) -> None:
    assert read_extra_state(empty) == {}


class Calls:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def billion_laughs() -> bytes:
    text = b"\x80\x04}(X\x13\x00\x00\x00extra_fp8_variables}(X\x01\x00\x00\x00a]q\x00"
    for level in range(1, 100):
        text += (
            b"]"
            + (b"(" + b"h" + bytes([level - 1]) + b"h" + bytes([level - 1]) + b"e")
            + b"q"
            + bytes([level])
        )
    return text + b"s" + b"us."


def legacy_storage(count: int, data: bytes) -> bytes:
    """A storage in PyTorch's format that claims `count` elements."""
    dumped = pickle.dumps(torch.ones(1), 4)
    nested = next(
        arg for _, arg, _ in pickletools.genops(dumped) if isinstance(arg, bytes) and len(arg) > 100
    )
    old = b"K\x01Ntq\x04Q"
    assert old in nested
    nested = nested.replace(old, b"\x8a\x08" + struct.pack("<q", count) + b"Ntq\x04Q")[:-12]
    return nested + struct.pack("<q", count) + data


def with_tensor(
    storage: bytes, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> bytes:
    fake = Calls(
        torch._utils._rebuild_tensor_v2,
        Calls(torch.storage._load_from_bytes, storage),
        offset,
        shape,
        stride,
    )
    return pickle.dumps({"scale_fwd": fake, "amax_history_fwd": torch.ones(4, 3)})


FOUR = struct.pack("<ffff", 1, 2, 3, 4)
HOSTILE: dict[str, Callable[[], bytes]] = {
    "os.system": lambda: pickle.dumps({"recipe": Calls(os.system, "echo run > ran")}),
    "os.system, protocol 0": lambda: b"cos\nsystem\n(S'echo run > ran'\ntR.",
    "os.system, protocol 2": lambda: pickle.dumps(Calls(os.system, "echo run > ran"), 2),
    "eval": lambda: pickle.dumps({"recipe": Calls(eval, "open('ran', 'w')")}),
    "getattr on a module": lambda: b"\x80\x04cbuiltins\ngetattr\ncos\nsystem\n\x86R.",
    "getattr of another attribute": lambda: pickle.dumps(Calls(getattr, Format, "__class__")),
    "torch.load": lambda: pickle.dumps(Calls(torch.load, "x")),
    "dotted name": lambda: b"\x80\x04\x8c\x0bcollections\x8c\x14OrderedDict.__init__\x93.",
    "instance by module and name": lambda: b"(ios\nsystem\n.",
    "extension registry": lambda: b"\x80\x02\x82\x01.",
    "persistent object as a tensor": lambda: b"\x80\x04}(X\x09\x00\x00\x00scale_fwdK\x01Qu.",
    "memo bomb": lambda: b"\x80\x04K\x01r" + struct.pack("<I", 2**32 - 1) + b".",
    "memo index that was never set": lambda: b"\x80\x04h\x07.",
    "billion laughs": billion_laughs,
    "claims 2^60 bytes": lambda: b"\x80\x04\x8e" + struct.pack("<Q", 2**60) + b"x.",
    "claims 2^31 characters": lambda: b"\x80\x04X" + struct.pack("<I", 2**31) + b"x.",
    "stack underflow": lambda: b"\x80\x04\x85.",
    "no end": lambda: b"\x80\x04}",
    "many opcodes": lambda: b"\x80\x04" + b"N" * 1_000_000 + b".",
    "huge": lambda: b"\x80\x04" + b"N" * MAX_BYTES + b".",
    "not a dictionary": lambda: pickle.dumps([1]),
    "keys that are not strings": lambda: pickle.dumps({(1, 2): 3}),
    "a list as recipe": lambda: pickle.dumps({"recipe": ["DelayedScaling"]}),
    "a number as tensor": lambda: pickle.dumps({**tensors(), "scale_fwd": 1.0}),
    "a double tensor": lambda: pickle.dumps(
        {**tensors(), "scale_fwd": torch.ones(3, dtype=torch.float64)}
    ),
    "scale without history": lambda: pickle.dumps({"scale_fwd": torch.ones(3)}),
    "other width": lambda: pickle.dumps({**tensors(), "scale_fwd": torch.ones(5)}),
    "other rank": lambda: pickle.dumps({**tensors(), "scale_fwd": torch.ones(1, 3)}),
    "a function as algorithm": lambda: pickle.dumps(
        {"recipe": DelayedScaling(amax_compute_algo=os.getcwd)}
    ),
    "storage that claims 2^40 elements": lambda: with_tensor(
        legacy_storage(2**40, FOUR), 0, (3,), (1,)
    ),
    "storage that claims -1 elements": lambda: with_tensor(legacy_storage(-1, FOUR), 0, (3,), (1,)),
    "tensor beyond its storage": lambda: with_tensor(legacy_storage(4, FOUR), 2, (3,), (1,)),
    "tensor before its storage": lambda: with_tensor(legacy_storage(4, FOUR), -1, (3,), (1,)),
    "tensor blown up by a zero stride": lambda: with_tensor(
        legacy_storage(4, FOUR), 0, (2**40,), (0,)
    ),
    "tensor repeated by a zero stride": lambda: with_tensor(legacy_storage(4, FOUR), 0, (3,), (0,)),
    "nested lists as a variable": lambda: pickle.dumps({"extra_fp8_variables": {"a": [[1]]}}),
    "tensor of boolean size": lambda: with_tensor(legacy_storage(4, FOUR), 0, (True,), (1,)),  # pyright: ignore
    "os.system in the storage": lambda: with_tensor(
        b"cos\nsystem\n(S'echo run > ran'\ntR.", 0, (3,), (1,)
    ),
    "zip file": lambda: b"PK\x03\x04" + bytes(100),
}


def test_the_storage_builder_makes_valid_storages() -> None:
    found = read_extra_state(with_tensor(legacy_storage(4, FOUR), 1, (3,), (1,)))
    assert found["scale_fwd"].tolist() == [2, 3, 4]


@pytest.mark.parametrize("name", HOSTILE)
def test_refuses_in_one_line_without_running(
    name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = HOSTILE[name]()
    monkeypatch.chdir(tmp_path)
    tracemalloc.start()
    start = time.process_time()
    try:
        with pytest.raises(CheckpointError) as caught:
            read_extra_state(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value)
    if name.startswith("os.system"):  # before it is called
        assert re.search(r"it refers to (os|posix)\.system", str(caught.value))
    assert time.process_time() - start < 1
    assert peak < 8 * 2**20
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [torch.zeros(3), torch.zeros(2, 2, dtype=torch.uint8)])
def test_refuses_other_tensors(wrong: torch.Tensor) -> None:
    with pytest.raises(CheckpointError, match="uint8"):
        read_extra_state(wrong)


def test_mutated_states_are_read_or_refused() -> None:
    rng = random.Random(0)
    original = pickle.dumps({"recipe": DelayedScaling(), **tensors(), "extra_fp8_variables": EXTRA})
    for _ in range(1500):
        data = bytearray(original)
        for _ in range(rng.choice([1, 1, 2, 8])):
            data[rng.randrange(len(data))] = rng.randrange(256)
        if rng.random() < 0.2:
            del data[rng.randrange(len(data)) :]
        try:
            found = read_extra_state(bytes(data))
        except CheckpointError as error:
            assert "\n" not in str(error)
        else:
            assert all(type(value) in (dict, torch.Tensor) for value in found.values())
