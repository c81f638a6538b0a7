"""Kernels in Triton: in its interpreter, which is chosen before Triton is imported, and on a GPU."""

import os
import sys
from pathlib import Path

import pytest
import torch
from ranks import run_process

from te_models.engine import emulated
from te_models.kernels.dispatch import PLAIN, get_kernels


def run(environment: dict[str, str], where: str, *options: str) -> None:
    """Run all cases below the folder tests/`where` in one process."""
    files = sorted(map(str, (Path(__file__).parents[1] / where).rglob("*_cases.py")))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        *options,
        *files,
    ]
    run_process(command, env=os.environ | environment)


@pytest.mark.parametrize("cases", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_on_the_interpreter(cases: str) -> None:
    pytest.importorskip(
        "triton", "3.7", reason="the interpreter of Triton 3.7 or newer runs these on a CPU"
    )
    run({"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}, "", "-m", cases)


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["kernels", "optim"])
def test_on_a_gpu(where: str) -> None:
    run({}, where)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_gpu_runs_it_where_fused(
    monkeypatch: pytest.MonkeyPatch, compile: bool, fused: bool, device: str
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    kernels = get_kernels(
        emulated, torch.device(device), compile="default" if compile else None, fused=fused
    )
    assert ("triton" in kernels.embedding.__module__) == (fused and device == "cuda")
    found = kernels.loss_and_gradient
    where = (
        "te_models.kernels.lm_head_triton"
        if fused and device == "cuda"
        else PLAIN.loss_and_gradient.__module__
    )
    assert found.__module__ == where
    assert (found is PLAIN.loss_and_gradient) == (device == "cpu" or not (fused or compile))
