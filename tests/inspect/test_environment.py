"""Benchmarks of a GPU end with one line where there is none."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
OUT = ["--out", "out.json"]
ARGUMENTS = {
    "attention_kernels": OUT,
    "checkpoint_grid": ["run", *OUT],
    "decode_attention": OUT,
    "decode_tiles": OUT,
    "delta_rule_kernels": OUT,
    "delta_rule_tuning": OUT,
    "engine_gpu": ["out.json"],
    "engine_parity": OUT,
    "expert_products": [],
    "expert_profile": [],
    "fused_families": OUT,
    "head_casts": OUT,
    "memory_breakdown": OUT,
    "no_speed_up": OUT,
    "profile_step": ["gated-nano", "delayed"],
    "recorder_cost": ["gated-nano", "delayed"],
    "span_attention": OUT,
    "split_k": ["bits", *OUT],
    "stored_base": ["speed", *OUT],
    "two_trees": ["--before", "elsewhere", *OUT],
    "whole_step": ["speed", "gated-nano", "bf16"],
}


def test_these_are_all_that_need_one() -> None:
    found = {
        path.stem
        for path in (ROOT / "benchmarks").glob("*.py")
        if re.search(r'device="cuda"|require_gpu\(\)', path.read_text())
    }
    assert found == ARGUMENTS.keys()


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
@pytest.mark.parametrize("name", ARGUMENTS)
def test_without_a_gpu_a_benchmark_ends_with_a_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *ARGUMENTS[name]])
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    with pytest.raises(SystemExit, match="this benchmark measures a GPU"):
        runpy.run_path(str(ROOT / "benchmarks" / f"{name}.py"), run_name="__main__")
    assert not list(tmp_path.iterdir())
