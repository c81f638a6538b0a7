"""Run `make finetune` and save its output.

    python benchmarks/make_finetune.py --out benchmarks/results/make_finetune_cpu.json

In a fresh clone the time includes the installation.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import click

ROOT = Path(__file__).parent.parent


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(out: Path) -> None:
    """Run, time and write."""
    installed = (ROOT / ".venv/.installed").exists()
    begun = time.perf_counter()
    done = subprocess.run(
        ["make", "finetune"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "100"},
    )
    seconds = time.perf_counter() - begun
    print(done.stdout, done.stderr, sep="\n")
    document = dict(
        seconds=round(seconds),
        installed_before=installed,
        cores=os.cpu_count(),
        output=done.stdout.splitlines(),
    )
    out.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
