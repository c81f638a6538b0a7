"""Tune random small models in random ways, and compare what becomes of them with the models that were trained.

    python -m benchmarks.random_tunings --first 1000 --count 300

Each case is a line: its number, "equal", what was refused, or how it failed. With TRL and datasets installed, some
cases are TRL's. tests/random_tunings.py draws and judges; a number repeats its case.
"""

import argparse
import collections
import os
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))


def main() -> int:
    """Run the cases; return 1 if one failed."""
    import importlib.util

    import torch
    from random_tunings import draw, judge

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=1000, help="Number of the first case.")
    parser.add_argument("--count", type=int, default=300, help="Number of cases.")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="Begin no case later.")
    given = parser.parse_args()
    torch.set_num_threads(1)
    trl = all(importlib.util.find_spec(name) for name in ("trl", "datasets"))
    counts: collections.Counter[str] = collections.Counter()
    begun = time.monotonic()
    for number in range(given.first, given.first + given.count):
        if time.monotonic() - begun > given.seconds:
            break
        folder = Path(tempfile.mkdtemp(prefix="tuning-"))
        try:
            refused = judge(draw(number, trl), folder)
            kind = "refused" if refused else "equal"
            said = "; ".join(f"{name}: {line}" for name, line in refused.items())
        except Exception as error:
            kind, said = "failed", str(error)
            if not isinstance(error, AssertionError):
                said = f"{draw(number, trl).describe()}\n{traceback.format_exc()}"
        counts[kind] += 1
        print(number, kind, said, flush=True)
        shutil.rmtree(folder, ignore_errors=True)
    print(dict(counts), f"{time.monotonic() - begun:.0f} s")
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
