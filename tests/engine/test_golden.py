"""The emulated engine against recordings of Transformer Engine 2.20.2 on an H200 (tests/golden/README.md)."""

import contextlib
import json
import lzma
import runpy
import sys
from pathlib import Path

import pytest
from bits import assert_same_bits, digest
from fewer import every
from safetensors import safe_open
from safetensors.torch import load
from torch import Tensor

import te_models.engine.emulated as te

GOLDEN = Path(__file__).parents[1] / "golden"
PACKED = lzma.decompress((GOLDEN / "te_2.20.2_h200.safetensors.xz").read_bytes())
VECTORS = load(PACKED)
HEADER = json.loads(PACKED[8 : 8 + int.from_bytes(PACKED[:8], "little")])["__metadata__"]
DIGESTS = json.loads(HEADER["digests"])
# Seed -> tensor -> digest, of the same H200.
HELD_OUT = json.loads((GOLDEN / "held_out_digests.json").read_text())
pytestmark = pytest.mark.recorded


def capture(
    path: Path, seed: int, exact: bool = True, mxfp8: bool = True
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata that capture.py writes on the emulated engine."""
    with (
        pytest.MonkeyPatch.context() as patch,
        te.exact_gemm() if exact else contextlib.nullcontext(),
    ):
        patch.setattr(sys, "argv", ["capture.py", str(path), str(seed), "emulated"])
        patch.setattr(te, "is_mxfp8_available", lambda: mxfp8)
        runpy.run_path(str(GOLDEN / "capture.py"), run_name="__main__")
    with safe_open(path, "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    # On Hopper there is no MXFP8; with it the script would draw other random numbers after that case.
    tensors, _ = capture(tmp_path_factory.mktemp("golden") / "out.safetensors", 12, mxfp8=False)
    return tensors


def test_every_case_runs_with_another_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors, metadata = capture(tmp_path / "out.safetensors", 3)
    errors = [key for key in json.loads(metadata["meta"]) if key.endswith(".error")]
    assert not errors
    assert {"q_mxfp8_e4m3._rowwise_data", "q_mxfp8_e5m2._columnwise_scale_inv"} <= tensors.keys()
    assert "checkpointing changes nothing" in capsys.readouterr().out


def unpadded(key: str, tensor: Tensor) -> Tensor:
    """Return a tensor without padding: scales of 128x128 blocks have 3 columns (columnwise 2), padded to 4."""
    case, name = key.split(".", 1)
    if case.startswith("q_block2") and name.endswith("_scale_inv"):
        return tensor[:, : 2 if "columnwise" in name else 3]
    return tensor


def test_the_same_tensors_are_captured(captured: dict[str, Tensor]) -> None:
    assert captured.keys() == VECTORS.keys() | DIGESTS.keys()


@pytest.mark.parametrize("case", sorted({key.split(".")[0] for key in VECTORS}))
def test_case(case: str, captured: dict[str, Tensor]) -> None:
    for key, expected in VECTORS.items():
        if key.split(".")[0] != case:
            continue
        assert_same_bits(key, unpadded(key, captured[key]), unpadded(key, expected))


def differing(tensors: dict[str, Tensor], digests: dict[str, str]) -> list[str]:
    """Return the names of the tensors whose digests differ from the recorded ones."""
    names = []
    for key, expected in digests.items():
        if digest(unpadded(key, tensors[key]))[:32] != expected:
            names.append(key)
    return names


def test_digests(captured: dict[str, Tensor]) -> None:
    assert differing(captured, DIGESTS) == []


@pytest.mark.parametrize("seed", every(len(HELD_OUT), sorted(HELD_OUT)))
def test_held_out_seeds(seed: str, tmp_path: Path) -> None:
    """The engine was written with the recordings of seed 12; nobody looked at those of other seeds."""
    tensors, _ = capture(tmp_path / "out.safetensors", int(seed), mxfp8=False)
    assert tensors.keys() == HELD_OUT[seed].keys()
    assert differing(tensors, HELD_OUT[seed]) == []


def test_small_products_are_exact_without_exact_gemm(tmp_path: Path) -> None:
    """In chained layers, a BF16 rounding step of the first would change FP8 data and amaxes of the second."""
    tensors, _ = capture(tmp_path / "out.safetensors", 12, exact=False, mxfp8=False)
    for key, expected in VECTORS.items():
        if key.split(".")[0] in ("plain", "delayed_max", "current"):
            assert_same_bits(key, tensors[key], expected)
