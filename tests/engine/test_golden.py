"""The emulated engine against Transformer Engine 2.20.2 on an H200: tests/golden/README.md."""

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
pytestmark = pytest.mark.recorded
HELD_OUT = json.loads(
    (GOLDEN / "held_out_digests.json").read_text()
)  # seed -> tensor -> digest, of the same H200


def capture(
    path: Path, seed: int, exact: bool = True, mxfp8: bool = True
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of capture.py on the emulated engine."""
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
    return capture(tmp_path_factory.mktemp("golden") / "out.safetensors", 12, mxfp8=False)[0]


def test_every_case_runs_with_another_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors, metadata = capture(tmp_path / "out.safetensors", 3)
    errors = [key for key in json.loads(metadata["meta"]) if key.endswith(".error")]
    assert not errors
    assert {"q_mxfp8_e4m3._rowwise_data", "q_mxfp8_e5m2._columnwise_scale_inv"} <= tensors.keys()
    assert "checkpointing changes nothing" in capsys.readouterr().out


def unpadded(key: str, tensor: Tensor) -> Tensor:
    """Scales of 128x128 blocks have 3 columns padded to 4 (rowwise) or 2 padded to 4 (columnwise)."""
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


def recorded(key: str, tensor: Tensor) -> str:
    return digest(unpadded(key, tensor))[:32]


def test_digests(captured: dict[str, Tensor]) -> None:
    assert [
        key for key, expected in DIGESTS.items() if recorded(key, captured[key]) != expected
    ] == []


@pytest.mark.parametrize("seed", every(len(HELD_OUT), sorted(HELD_OUT)))
def test_seeds_that_the_engine_was_not_written_with(seed: str, tmp_path: Path) -> None:
    got, _ = capture(tmp_path / "out.safetensors", int(seed), mxfp8=False)
    assert got.keys() == HELD_OUT[seed].keys()
    assert [
        key for key, expected in HELD_OUT[seed].items() if recorded(key, got[key]) != expected
    ] == []


def test_small_products_are_exact_without_being_asked(tmp_path: Path) -> None:
    """The chained layers, where a BF16 step of the first moves FP8 codes and amaxes of the second."""
    got, _ = capture(tmp_path / "out.safetensors", 12, exact=False, mxfp8=False)
    for key in (key for key in VECTORS if key.split(".")[0] in ("plain", "delayed_max", "current")):
        assert_same_bits(key, got[key], VECTORS[key])
