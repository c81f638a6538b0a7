"""The fixtures of all tests, and the tests that this machine cannot run.

conftest.py registers this file in processes that run tests; it imports PyTorch.
"""

import functools
import gc
import importlib.metadata
import multiprocessing.forkserver
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import interpreter
import places
import plain_numbers
import pytest
import ranks  # noqa: F401  sets what the server of processes imports
import seeds
import torch
from small_model import small  # noqa: F401  a fixture
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import te_models.engine.emulated as emulated
from te_models.data import chat_template, python_docstrings
from te_models.garbage import collect_rarely
from te_models.planning.memory_estimate import Memory
from te_models.planning.memory_plan import MemoryPlan, plan_memory
from te_models.training import plots, preflight, report

if (
    "PYTEST_XDIST_WORKER" in os.environ
):  # the whole suite needs it: let it import while the first tests run
    multiprocessing.forkserver.ensure_running()
torch.set_num_threads(1)  # tensors are small: a second thread only waits


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


@pytest.fixture(autouse=True, scope="module")
def imported() -> Iterator[None]:
    """Keep what the tests of a file import out of later searches for cycles, as what is imported at collection.

    Modules of transformers, peft and accelerate are imported where they are first used. With their objects each later
    search of all objects took 0.16 s instead of 0.05 s, and accelerate asks for one whenever it frees memory.
    """
    before = len(sys.modules)
    yield
    if len(sys.modules) > before + 100:
        gc.collect()  # garbage is not to stay
        gc.freeze()


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
PLANNED = ("test_preflight",)


@pytest.fixture(autouse=True)
def plain_plots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing the plot of a run takes as long as a short run itself: only tests that look at plots have them drawn."""
    if request.path.stem not in DRAWN and request.node.get_closest_marker("drawn") is None:
        monkeypatch.setattr(report, "plot_run", lambda path, *curves: path.touch())
        monkeypatch.setattr(plots, "save_figure", lambda figure, path: path.touch())


class SmallPlan(MemoryPlan):
    """A plan of a run that needs next to no memory."""

    moments = [Memory(moment="loss", weights=2**20)]


def plan_small(*shape: Any, **options: Any) -> SmallPlan:
    """Return the plan of a run, with all that is refused refused, without measuring a step on meta."""
    plan = plan_memory(*shape, **options)
    return SmallPlan(plan.config, plan.recipe, plan.training)


@pytest.fixture(autouse=True)
def small_runs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning the memory of a run takes as long as a few of its steps: only tests of that check have it planned."""
    if request.path.stem not in PLANNED:
        monkeypatch.setattr(preflight, "plan_memory", plan_small)


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
def any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Print plans without the search for the largest batches, nine tenths of their time; tests/planning has it."""
    monkeypatch.setattr(MemoryPlan, "largest_batch", lambda plan, gigabytes: 1)


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


def pytest_collection_finish() -> None:
    # Searches for cycles took an eighth of the time of tests that build models.
    collect_rarely()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
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


@pytest.fixture
def lone_rank(tmp_path: Path) -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    address = f"file://{tmp_path}/rendezvous"
    torch.distributed.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()
