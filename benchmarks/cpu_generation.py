"""Tokens that gated-nano writes on a CPU, greedy, by recipe: per second of one thread, and on two threads of a machine
whose cores another process keeps busy.

    python benchmarks/cpu_generation.py --out benchmarks/results/generation_cpu.json

Recipes take turns within one run; the table gives medians and ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

RECIPES = ("bf16", "delayed", "current")
TOKENS, ROUNDS = 64, 7
BUSY = "import torch; torch.set_num_threads({}); a = torch.randn(2000, 2000)\nwhile True: a @ a"


def rates(threads: int, beside: int = 0) -> dict[str, float]:
    """Return tokens per second by recipe, of CPU time with one thread, else of wall time.

    Args:
        beside: threads of another process that multiplies matrices meanwhile.
    """
    import torch

    from te_models import CausalLM

    torch.set_num_threads(threads)
    models = {
        name: CausalLM.from_pretrained("gated-nano", recipe=name, device="cpu").eval()
        for name in RECIPES
    }
    ids, clock = torch.arange(1, 13)[None], time.process_time if threads == 1 else time.perf_counter
    found: dict[str, list[float]] = {name: [] for name in RECIPES}
    busy = subprocess.Popen([sys.executable, "-c", BUSY.format(beside)]) if beside else None
    try:
        for turn in range(ROUNDS + 1):
            for name, model in models.items():
                begun = clock()
                model.generate(ids, max_new_tokens=TOKENS, eos_token_id=None)
                if turn:  # the first quantizes the weights
                    found[name].append(TOKENS / (clock() - begun))
    finally:
        if busy is not None:
            busy.kill()
            busy.wait()
    return {name: round(statistics.median(speeds), 1) for name, speeds in found.items()}


def cpu_name() -> str:
    """Return the CPU's name, "" where the system does not tell."""
    known = Path("/proc/cpuinfo")
    lines = known.read_text().splitlines() if known.is_file() else []
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), "")


def main() -> None:
    """Measure, print, and write to --out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    from te_models.inspect.environment import environment

    cores = os.cpu_count() or 1
    one, shared = rates(1), rates(2, beside=cores)
    result = dict(
        environment=environment() | {"cpu": cpu_name(), "cores": str(cores)}, tokens=TOKENS, rounds=ROUNDS,
        alone=one, beside_work=shared,
    )  # fmt: skip
    print(json.dumps(result, indent=1))
    if out:
        out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
