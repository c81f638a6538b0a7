"""Kernels in Triton: in its interpreter, which is chosen before Triton is imported, and on a GPU."""

import os
import sys
from pathlib import Path

import pytest
import torch
from ranks import run_process

from te_models.engine import emulated
from te_models.kernels.dispatch import PLAIN, get_kernels

TESTS = Path(__file__).parents[1]
CASES = sorted(TESTS.rglob("*_cases.py"))
ON_A_GPU = [path for path in CASES if path.parent.name in ("kernels", "optim")]


def run(environment: dict[str, str], cases: list[Path], *options: str) -> None:
    """Run the files of cases in one process."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        *options,
        *map(str, cases),
    ]
    run_process(command, env=os.environ | environment)


@pytest.mark.parametrize("cases", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_on_the_interpreter(cases: str) -> None:
    pytest.importorskip(
        "triton", "3.7", reason="the interpreter of Triton 3.7 or newer runs these on a CPU"
    )
    run({"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}, CASES, "-m", cases)


@pytest.mark.gpu
@pytest.mark.parametrize("cases", [pytest.param(path, id=path.stem) for path in ON_A_GPU])
def test_on_a_gpu(cases: Path) -> None:
    """One process per file, so that a slow or a broken one is known by its name."""
    run({}, [cases])


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
