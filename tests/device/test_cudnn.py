"""One cuDNN per process: which one is loaded is read from the process's memory map."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from te_models.device import cudnn
from te_models.engine import engine_module
from te_models.kernels.sdpa import suits_cudnn

TORCHS = "7f00-7f01 r-xp 0 0:1 2 /venv/nvidia/cudnn/lib/libcudnn{}.so.9"
SYSTEMS = "7f02-7f03 r-xp 0 0:1 3 /lib/x86_64-linux-gnu/libcudnn{}.so.9.14.0"
OTHER = "7f04-7f05 r-xp 0 0:1 4 /venv/nvidia/cublas/lib/libcublas.so.13"


@pytest.fixture
def maps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    lines = [OTHER]
    monkeypatch.setattr(Path, "read_text", lambda self: "\n".join(lines))
    cudnn._is_sound.cache_clear()
    yield lines
    cudnn._is_sound.cache_clear()


def test_folders_and_versions_are_found(maps: list[str]) -> None:
    assert cudnn.loaded_cudnns() == {}
    maps += [TORCHS.format(""), TORCHS.format("_graph"), SYSTEMS.format("_engines_precompiled")]
    assert set(cudnn.loaded_cudnns().values()) == {"9"}
    assert len(cudnn.loaded_cudnns()) == 2


def test_attention_avoids_a_mixed_cudnn_and_logs_it_once(maps: list[str]) -> None:
    maps += [TORCHS.format(""), TORCHS.format("_graph")]
    assert suits_cudnn(333, 64, torch.bfloat16)
    cudnn._is_sound.cache_clear()
    maps.append(SYSTEMS.format("_graph"))
    with pytest.warns(UserWarning, match="two versions of cuDNN"):
        assert not suits_cudnn(333, 64, torch.bfloat16)
    assert not suits_cudnn(384, 64, torch.bfloat16)


def test_every_part_of_torchs_cudnn_is_loaded(
    maps: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("libcudnn.so.9", "libcudnn_graph.so.9", "libcudnn_graph.so.8", "libcublas.so.13"):
        (tmp_path / name).touch()
    loaded: list[str] = []
    monkeypatch.setattr(cudnn, "find_spec", lambda name: name)
    monkeypatch.setattr("ctypes.CDLL", lambda path, mode: loaded.append(Path(path).name))
    monkeypatch.delenv("CUDNN_HOME", raising=False)
    maps.append(f"7f-80 r-xp 0 0:1 2 {tmp_path}/libcudnn.so.9")
    cudnn.load_torchs_cudnn()
    assert loaded == ["libcudnn.so.9", "libcudnn_graph.so.9"]
    monkeypatch.delenv("CUDNN_HOME")
    maps.append(SYSTEMS.format(""))  # too late: nothing can be mended any more
    cudnn.load_torchs_cudnn()
    assert len(loaded) == 2


def test_cudnn_is_avoided_where_it_is_wrong_or_not_deterministic(maps: list[str]) -> None:
    assert suits_cudnn(384, 128, torch.bfloat16, masked=True)
    assert not suits_cudnn(192, 128, torch.bfloat16, masked=True)
    torch.use_deterministic_algorithms(True)
    try:
        assert not suits_cudnn(384, 128, torch.bfloat16)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
def test_the_native_engine_brings_no_second_cudnn() -> None:
    engine_module("native")
    q = torch.randn(1, 4, 333, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    assert len(cudnn.loaded_cudnns()) == 1
