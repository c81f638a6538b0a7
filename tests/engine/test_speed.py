"""The emulated engine is fast enough to train with on a CPU."""

import os
import runpy
from pathlib import Path

import pytest

BENCHMARK = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "engine_cpu.py"))


@pytest.mark.skipif(
    os.environ.get("ATEN_CPU_CAPABILITY") == "default",
    reason="without vector instructions casts take longer, and nn.Linear does not",
)
@pytest.mark.slow
def test_linear_takes_at_most_three_times_nn_linear() -> None:
    """1024 x 1024, 512 rows, forward and backward, BF16 parameters; in turns, the best of 25, for a busy machine."""
    best = {
        name: times[0] for name, times in BENCHMARK["timed"](BENCHMARK["passes"](1024, 1024, 512), rounds=25).items()
    }
    ratios = {name: seconds / best["fp32"] for name, seconds in best.items()}
    too_slow = {name: round(ratio, 2) for name, ratio in ratios.items() if ratio > 3}
    assert not too_slow
