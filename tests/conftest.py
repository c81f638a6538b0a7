"""Shared by all tests: one seed, one thread, a clean engine, and the reason why a GPU test is skipped."""

import functools
import gc
import importlib.metadata
import multiprocessing.forkserver
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import hypothesis
import interpreter
import places
import plain_numbers
import pytest
import ranks  # noqa: F401  sets what the server of processes imports
import seeds
import torch
from small_model import small  # noqa: F401  a fixture

import te_models.engine.emulated as emulated
from te_models.data import chat_template, python_docstrings
from te_models.training import plots

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start
if capability := os.environ.get(
    "ATEN_CPU_CAPABILITY"
):  # which the cache of compiled kernels does not tell apart
    os.environ.setdefault(
        "TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), f"inductor-{capability}")
    )
with suppress(
    OSError
):  # in memory, where there is room: a disk takes milliseconds for each of 100,000 files
    if shutil.disk_usage("/dev/shm").free > 8 * 2**30:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")
hypothesis.settings.register_profile(
    "busy", deadline=None, max_examples=50
)  # a busy machine is no failure
hypothesis.settings.load_profile("busy")
if (
    "PYTEST_XDIST_WORKER" in os.environ
):  # the whole suite needs it: let it import while the first tests run
    multiprocessing.forkserver.ensure_running()
gc.disable()  # until all tests are collected: what is imported stays, and looking for garbage in it took 5 s
torch.set_num_threads(1)  # tensors are small: a second thread only waits
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # so a shell starts what it runs in the background
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # of this process and of those that tests start


@pytest.fixture(autouse=True)
def fresh_state():
    """Every test starts from the same seed and with an empty registry of scales."""
    torch.manual_seed(0)
    emulated.FP8GlobalStateManager.reset()
    yield
    emulated.FP8GlobalStateManager.reset()


@pytest.fixture(autouse=True, scope="module")
def freed() -> Iterator[None]:
    """Several workers share a GPU: none keeps the memory of tests that are over."""
    yield
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True, scope="session")
def plain_sums() -> Iterator[None]:
    """Outside tests/engine FP8 products and norms are plain ones."""
    with plain_numbers.plain():
        yield


@pytest.fixture(autouse=True, scope="session")
def interpreted() -> Iterator[None]:
    """Kernels in Triton's interpreter, where it runs, without work that it repeats."""
    if interpreter.INTERPRETED:
        yield from interpreter.faster()
    else:
        yield


DRAWN = ("test_plots", "test_metrics", "test_docs", "test_bench")


@pytest.fixture(autouse=True)
def plain_plots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing the plot of a run takes as long as a short run itself: only tests that look at plots have them drawn."""
    if request.path.stem not in DRAWN and request.node.get_closest_marker("drawn") is None:
        monkeypatch.setattr(plots, "save_figure", lambda figure, path: path.touch())


@pytest.fixture(autouse=True, scope="session")
def parsed_once() -> Iterator[None]:
    """Parsing Python's own sources takes seconds: a process does it once."""
    with pytest.MonkeyPatch.context() as patch:
        read_pairs = python_docstrings.read_pairs
        parsed = functools.cache(lambda source: tuple(read_pairs(source)))
        patch.setattr(python_docstrings, "read_pairs", parsed)
        yield


_shared_process = functools.lru_cache(maxsize=8)(
    lambda source, owner, start=chat_template._Process: start(source)
)


@pytest.fixture(autouse=True)
def shared_templates(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting the process of a chat template takes longer than most tests with one: those of equal source share it."""
    if request.path.stem != "test_chat_template":
        monkeypatch.setattr(
            chat_template, "_Process", lambda source: _shared_process(source, os.getpid())
        )


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


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory that is empty but for the folder texts/."""
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    for name in ("text", "more"):
        Path(f"texts/{name}.txt").write_text(f"hello {name}, " * 400)


# They come first, so that no worker of `make test` or `make test-slow` is left with one of them at the end: files of
# more than 4 seconds, roughly in the order of their seconds in both.
LONGEST = (
    "test_triton_kernels", "test_hf_families", "test_random_pairs", "test_parallel", "test_kinds", "test_memory_plan",
    "test_resume", "test_adapters", "test_accumulation_graph", "test_commands", "test_lora_experts", "test_lora_run",
    "test_lora_files", "test_examples", "test_modeling", "test_recompute", "test_export", "test_parameter_owners",
    "test_offload", "test_lora_base", "test_peft_methods", "test_smallest_change", "test_state_of_its_step",
    "test_fsdp_gather", "test_cuda_graph", "test_trainer", "test_random_tunings", "test_experts", "test_guard",
    "test_layering", "test_serve", "test_replay", "test_tensor_parallel", "test_last_step", "test_region",
    "test_advice", "test_expert_parallel", "test_kept_on_a_gpu", "test_multimodal", "test_optim", "test_crafted",
    "test_recorder", "test_http_server", "test_record_report", "test_hf_experts", "test_hf_nested", "test_gpus",
    "test_dynamic_compile", "test_training_data", "test_chat_template", "test_data_preview", "test_rope",
    "test_checkpoint_choice", "test_precision", "test_extensions", "test_primary_weights", "test_quantized",
    "test_golden_grouped", "test_calibration", "test_decode_loop", "test_te_modules",
)  # fmt: skip
ORDER = {name: place for place, name in enumerate(LONGEST)}


def pytest_collection_finish() -> None:
    gc.freeze()  # half a million objects, which stay: looking at them again and again took a tenth of the time
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: ORDER.get(item.path.stem, len(ORDER)))
    # torch.randn's code for AVX2 rounds its logarithm and cosine otherwise than the code for other CPUs.
    if seeds.OFFSET or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        skip = pytest.mark.skip(
            reason="torch.randn draws other numbers than those that a GPU's results were recorded for"
        )
        for item in items:
            if "recorded" in item.keywords:
                item.add_marker(skip)
    if not (places.ON_GPU or places.DRY_RUN):
        skip = pytest.mark.skip(
            reason="needs a CUDA device with Transformer Engine: run `make test-gpu` on one"
        )
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)
