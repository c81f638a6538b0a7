"""Processes for tests of several ranks. They are forked from one that has imported torch, which takes seconds."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    """`function(rank, folder)` in each of `ranks` processes, which share a process group."""
    mp.start_processes(_run, (function, str(folder), ranks, backend), nprocs=ranks, start_method="forkserver")  # type: ignore[attr-defined]


def _run(rank: int, function: Callable[[int, str], Any], folder: str, ranks: int, backend: str) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/init", rank=rank, world_size=ranks)
    try:
        function(rank, folder)
    finally:
        dist.destroy_process_group()
