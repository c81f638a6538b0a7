"""The Triton kernels against the plain functions, on the Triton interpreter.

It has to be chosen before Triton is imported, so the cases of fused_cases.py run in a process of their own.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from ranks import run_process

pytest.importorskip("triton", "3.7", reason="the interpreter of Triton 3.7 or newer runs these on a CPU")


def test_kernels_on_the_interpreter() -> None:
    cases = Path(__file__).with_name("fused_cases.py")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(cases)]
    run_process(command, env=os.environ | {"TRITON_INTERPRET": "1"})
