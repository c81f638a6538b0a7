"""Processes for tests of several ranks. They are forked from one that has imported torch, which takes seconds."""

from __future__ import annotations

import multiprocessing
import subprocess
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import seeds  # noqa: F401  processes of a test move their seeds too
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

multiprocessing.set_forkserver_preload(
    [
        "torch.distributed.tensor",
        "torch._dynamo",
        "einops._torch_specific",
        "te_models.causal_lm",
        "te_models.engine.emulated",
        "pytest",
    ]
)


def run_ranks(function: Callable[[int, str], Any], folder: Path, ranks: int, backend: str = "gloo") -> None:
    """Run `function(rank, folder)` in each of `ranks` processes, which share a process group.

    If one fails, the test fails with the traceback of the rank that failed first, as that rank saw it.
    """
    try:
        mp.start_processes(_run, (function, str(folder), ranks, backend), nprocs=ranks, start_method="forkserver")  # type: ignore[attr-defined]
    except mp.ProcessException as error:
        failures = sorted(folder.glob("failure-*"), key=lambda path: path.stat().st_mtime_ns)
        pytest.fail(failures[0].read_text() if failures else str(error), pytrace=False)


def run_process(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; if it fails, the test fails with what the command printed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    if done.returncode:
        pytest.fail(f"exit code {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}", pytrace=False)
    return done


def _run(rank: int, function: Callable[[int, str], Any], folder: str, ranks: int, backend: str) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/init", rank=rank, world_size=ranks)
    try:
        function(rank, folder)
    except BaseException:
        Path(folder, f"failure-{rank}").write_text(f"rank {rank} of {ranks}\n{traceback.format_exc()}")
        raise
    finally:
        dist.destroy_process_group()
