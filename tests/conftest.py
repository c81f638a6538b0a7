"""Shared by all tests: one seed, one thread, a clean engine, and the reason why a GPU test is skipped."""

import importlib.metadata
import multiprocessing.forkserver
import os
import tempfile
from collections.abc import Callable, Iterator

import hypothesis
import places
import pytest
import ranks  # noqa: F401  sets what the server of processes imports
import seeds
import torch
from small_model import small  # noqa: F401  a fixture

import te_models.engine.emulated as emulated

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start
if capability := os.environ.get("ATEN_CPU_CAPABILITY"):  # which the cache of compiled kernels does not tell apart
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), f"inductor-{capability}"))
hypothesis.settings.register_profile("busy", deadline=None, max_examples=50)  # a busy machine is no failure
hypothesis.settings.load_profile("busy")
if "PYTEST_XDIST_WORKER" in os.environ:  # the whole suite needs it: let it import while the first tests run
    multiprocessing.forkserver.ensure_running()
torch.set_num_threads(1)  # tensors are small: a second thread only waits


@pytest.fixture(autouse=True)
def fresh_state():
    """Every test starts from the same seed and with an empty registry of scales."""
    torch.manual_seed(0)
    emulated.FP8GlobalStateManager.reset()
    yield
    emulated.FP8GlobalStateManager.reset()


@pytest.fixture(autouse=True, scope="session")
def plain_gemms() -> Iterator[None]:
    """Outside tests/engine FP8 products are plain ones: emulating tensor cores takes most of a tiny model's time."""
    with emulated.exact_gemm(0):
        yield


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str | None], None]:
    """`pretend(package, version)` has it installed in that version; None: not at all."""
    real = importlib.metadata.version

    def pretend(package: str, version: str | None) -> None:
        def found(name: str) -> str:
            if name == package and version is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return version or "" if name == package else real(name)

        monkeypatch.setattr(importlib.metadata, "version", found)

    return pretend


# They come first, so that no worker of `make test` is left with one of them at the end.
LONGEST = (
    "test_parallel.py",
    "test_trainer.py",
    "test_examples.py",
    "test_triton_kernels.py",
    "test_tensor_parallel.py",
)
LONGEST += ("test_hf_families.py", "test_lora_files.py", "test_modeling.py", "test_commands.py", "test_crafted.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)
    # torch.randn's code for AVX2 rounds its logarithm and cosine otherwise than the code for other CPUs.
    if seeds.OFFSET or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        skip = pytest.mark.skip(
            reason="torch.randn draws other numbers than those that a GPU's results were recorded for"
        )
        for item in items:
            if "recorded" in item.keywords:
                item.add_marker(skip)
    if not (places.ON_GPU or places.DRY_RUN):
        skip = pytest.mark.skip(reason="needs a CUDA device with Transformer Engine: run `make test-gpu` on one")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)
