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
# In this order, since a command may use the folders of earlier ones.
RUNS = {
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
    """Run the commands, print their output, and write commands and output to `out` as JSON."""
    environment = {**os.environ, "COLUMNS": "100", "PYTHONPATH": str(ROOT)}
    # With --only the other runs keep the output that they have in the file.
    runs = json.loads(out.read_text()) if only else {}
    with tempfile.TemporaryDirectory() as folder:
        for name in only or RUNS:
            arguments = shlex.split(RUNS[name])[1:]  # without "te-models"
            process = subprocess.run(
                [sys.executable, "-m", "te_models", *arguments],
                cwd=folder,
                capture_output=True,
                text=True,
                env=environment,
                check=True,
            )
            print(process.stdout, flush=True)
            lines = [line.rstrip() for line in process.stdout.splitlines()]
            runs[name] = {"command": RUNS[name], "output": lines}
    out.write_text(json.dumps(runs, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
