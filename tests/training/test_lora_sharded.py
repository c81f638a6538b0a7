"""benchmarks/lora_sharded.py, whose full size needs several GPUs, from its plan to its result, on two CPU processes."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

import te_models

ROOT = Path(te_models.__file__).parents[1]


@pytest.mark.slow
def test_adapters_over_divided_fp8_weights_are_measured(tmp_path: Path) -> None:
    out = tmp_path / "lora.json"
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    command = [*launch, "benchmarks/lora_sharded.py", "--tiny", "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    found = json.loads(out.read_text())
    assert (found["gpus"], found["recipe"], found["fp8_params"]) == (2, "current", True)
    assert len(found["losses"]) == len(found["seconds"]) == 8
    # Random weights know nothing of 256 tokens.
    assert abs(found["losses"][0] - math.log(256)) < 0.3
    assert found["trained"] < found["parameters"] and found["tokens_per_second"] > 0
