"""Run the commands of the fine-tuning guide and save what they print.

python -m benchmarks.guide_runs --out benchmarks/results/guide_runs_cpu.json
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[1]
TASK = "--data python-docstrings --recipe current"
RUNS = {  # in this order: each may use the folders of those before
    "full": f"te-models finetune --model gated-nano {TASK} --steps 60 --learning-rate 1e-3 --out runs/docs",
    "slow": f"te-models finetune --model gated-nano {TASK} --steps 60 --sample-tokens 0 --out runs/slow",
    "evaluate": "te-models evaluate --model runs/docs --data python-docstrings --recipes bf16,current,delayed",
    "lora": f"te-models finetune --model gated-nano {TASK} --lora 16 --learning-rate 1e-2 --steps 40 --merge "
    "--sample-tokens 0 --out runs/adapted",
}  # fmt: skip


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option(
    "--only", type=click.Choice(list(RUNS)), multiple=True, help="Repeat these; default: all."
)
def main(out: Path, only: tuple[str, ...]) -> None:
    """Run and write."""
    environment = {**os.environ, "COLUMNS": "100", "PYTHONPATH": str(ROOT)}
    found = json.loads(out.read_text()) if only else {}
    with tempfile.TemporaryDirectory() as folder:
        for name in only or RUNS:
            words = [sys.executable, "-m", "te_models", *shlex.split(RUNS[name])[1:]]
            done = subprocess.run(
                words, cwd=folder, capture_output=True, text=True, env=environment, check=True
            )
            print(done.stdout, flush=True)
            found[name] = dict(
                command=RUNS[name], output=[line.rstrip() for line in done.stdout.splitlines()]
            )
    out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
