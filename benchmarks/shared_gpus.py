"""GPUs that several processes share: which there are, and NVIDIA's MPS, by which kernels of all run at once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

VISIBLE = "CUDA_VISIBLE_DEVICES"


@contextmanager
def variables(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables of the environment in the block, for programs that start there; None: without it."""
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def shared_gpus(folder: Path) -> Iterator[dict[str, str]]:
    """Start NVIDIA's MPS, by which kernels of several processes run on a GPU at once.

    Yields the variables with which a process takes part; none where MPS is not there or does not work.
    """
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        yield {}
        return
    taking_part = {}
    for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):
        directory = folder.absolute() / name.lower()
        directory.mkdir(exist_ok=True)
        taking_part[name] = str(directory)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}  # a daemon holds a pipe
    # It numbers the GPUs of its clients by its own view, which has to be of all.
    with variables({**taking_part, VISIBLE: None}):
        started = subprocess.run([control, "-d"], timeout=20, **quiet).returncode == 0
    try:
        yield taking_part if started and _can_share(taking_part) else {}
    finally:
        with variables(taking_part), suppress(subprocess.SubprocessError):
            subprocess.run([control], input=b"quit -t 5\n", timeout=20, **quiet)


def _can_share(taking_part: Mapping[str, str]) -> bool:
    """Return whether a process on each GPU can compute through MPS, all at the same time."""
    probe = [sys.executable, "-c", "import torch; torch.ones(9, device='cuda').sum().item()"]
    processes = []
    for device in gpus():
        with variables({**taking_part, VISIBLE: device}):
            processes.append(subprocess.Popen(probe))
    end = time.monotonic() + 60
    try:
        return not any(process.wait(max(0.1, end - time.monotonic())) for process in processes)
    except subprocess.TimeoutExpired:
        return False
    finally:
        for process in processes:
            process.kill()


def gpus() -> list[str]:
    """Return the GPUs that this process may use; without any, one place on the CPU."""
    numbers = [str(number) for number in range(max(1, torch.cuda.device_count()))]
    return os.environ.get(VISIBLE, ",".join(numbers)).split(",")
