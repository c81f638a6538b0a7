"""The kernels that write the next te.Linear's FP8, in Triton's interpreter: chosen before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("handover_cases.py")
COMMAND = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(CASES)]


def run(environment: dict[str, str]) -> None:
    done = subprocess.run(COMMAND, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


def test_kernels_on_the_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton's interpreter runs these on a CPU: pip install triton")
    run({"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.gpu
def test_kernels_on_a_gpu() -> None:
    run({})
