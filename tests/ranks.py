"""Processes for tests of several ranks. Those on a CPU are forked from one that has imported torch, which takes
seconds."""

import gc
import multiprocessing
import multiprocessing.forkserver
import os
import socket
import subprocess
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import plain_numbers
import pytest
import seeds  # noqa: F401  processes of a test move their seeds too
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.testing._internal.distributed.fake_pg import FakeStore

from te_models.garbage import collect_rarely

multiprocessing.set_forkserver_preload(
    [
        "torch.distributed.tensor",
        "torch._dynamo",
        "einops._torch_specific",
        "te_models.causal_lm",
        "pytest",
    ]
    + ["te_models.engine.emulated", "te_models.data.corpus_chunks", "te_models.training.launch"]
    + ["te_models.training.lora_run"]  # imports peft, and that transformers: 2 s in each process
)


def run_ranks(
    function: Callable[[int, str], Any],
    folder: Path,
    ranks: int,
    backend: str | None = "gloo",
    exact: bool = False,
    gpus: bool = False,
) -> None:
    """Run `function(rank, folder)` in each of `ranks` processes, which share a process group.

    Without a backend the function makes the group itself, from the variables that torchrun sets, and in the store that
    this process serves, as torchrun does; `gpus` says that it is of GPUs. `exact` emulates a GPU's sums in FP8 products
    and norms, which takes most of a tiny model's time. If a rank fails, the test fails with the traceback of the one
    that failed first, as that rank saw it.
    """
    store = (
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        if backend is None
        else None
    )
    arguments = (function, str(folder), ranks, backend, store.port if store else 0, exact)
    # The server's imports ask CUDA for its devices, after which no fork of it can use one.
    method = "spawn" if gpus or backend == "nccl" else "forkserver"
    try:
        mp.start_processes(_run, arguments, nprocs=ranks, start_method=method)
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        failures = sorted(folder.glob("failure-*"), key=lambda path: path.stat().st_mtime_ns)
        said = failures[0].read_text() if failures else str(error)
        for path in failures:
            path.unlink()
        pytest.fail(said, pytrace=False)


@contextmanager
def as_one_of(ranks: int) -> Iterator[None]:
    """Inside, this process is the first of so many, of which there are no others: nothing is sent."""
    store = FakeStore()
    dist.init_process_group("fake", store=store, rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_once(function: Callable[[], None]) -> None:
    """Run the function in a process of its own, without a group; if it does not end well, the test fails."""
    mp.start_processes(_alone, (function,), nprocs=1, start_method="forkserver")


def _alone(_: int, function: Callable[[], None]) -> None:
    function()


def run_process(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; if it fails, the test fails with what the command printed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    if done.returncode:
        pytest.fail(
            f"exit code {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}",
            pytrace=False,
        )
    return done


def _run(
    rank: int,
    function: Callable[[int, str], Any],
    folder: str,
    ranks: int,
    backend: str | None,
    port: int,
    exact: bool,
) -> None:
    gc.freeze()  # what the server of processes imported is no garbage
    collect_rarely()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = socket.if_indextoname(
        1
    )  # the loopback: no name of a host is looked up
    if backend == "nccl":
        torch.cuda.set_device(rank)
    if backend is None:
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    else:
        dist.init_process_group(
            backend, init_method=f"file://{folder}/init", rank=rank, world_size=ranks
        )
    try:
        with nullcontext() if exact else plain_numbers.plain():
            function(rank, folder)
    except BaseException:
        Path(folder, f"failure-{rank}").write_text(
            f"rank {rank} of {ranks}\n{traceback.format_exc()}"
        )
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
