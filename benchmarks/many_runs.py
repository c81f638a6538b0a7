"""Runs of the command line, several at a time on each GPU, for studies of many small models.

A study names its runs and their options; a run that is not finished when the time is up is named as missing, and its
study can be called again with the same folder, where finished runs are kept.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

import torch

from te_models.training.metrics import read_metrics
from te_models.training.plots import smooth

FILE_BYTES = range(1_000, 200_000)
POINTS = 100  # of each curve in the results


def write_corpus(file: Path, size: int) -> int:
    """Write Python sources and documentation found on this machine as JSON Lines, about `size` bytes; return them.

    The files of the standard library and of all installed packages, in an order that is the same on every machine that
    has them.
    """
    written = 0
    with file.open("w") as out:
        for path in _sources():
            text = path.read_text(errors="ignore")
            if len(text) not in FILE_BYTES:
                continue
            written += out.write(json.dumps({"text": text}) + "\n")
            if written >= size:
                break
    return written


def _sources() -> Iterator[Path]:
    roots = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")}
    for root in sorted(roots):
        for pattern in ("*.py", "*.rst", "*.md"):
            yield from sorted(root.rglob(pattern))


def run_all(
    runs: Mapping[str, Sequence[str]], folder: Path, per_gpu: int, minutes: float
) -> dict[str, list[dict[str, Any]]]:
    """Run `te-models pretrain` with the options of each run; return the rows of its metrics by its name.

    Args:
        runs: name -> options of the command line.
        folder: has a folder for each run, which is kept; a finished run is not repeated.
        per_gpu: runs at a time on each GPU; on a machine without any, runs at a time.
        minutes: no run starts after this time, and those under way are stopped at twice of it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    places: Queue[str] = Queue()
    numbers = [str(number) for number in range(max(1, torch.cuda.device_count()))]
    # A caller may have left some of the GPUs to others.
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(numbers)).split(",")
    for _ in range(per_gpu):
        for device in devices:
            places.put(device)
    end = time.monotonic() + 60 * minutes

    def run(name: str) -> None:
        out = folder / name
        if (out / "done").exists() or time.monotonic() > end:
            return
        shutil.rmtree(out, ignore_errors=True)  # of a run that was cut off
        device = places.get()
        try:
            command = [sys.executable, "-m", "te_models", "pretrain", *runs[name]]
            command += ["--out", str(out)]
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": device}
            with (folder / f"{name}.log").open("w") as log:
                left = max(1.0, end + 60 * minutes - time.monotonic())
                code = subprocess.run(
                    command, env=environment, stdout=log, stderr=log, timeout=left
                ).returncode
            if out.exists():
                (out / "done").write_text(str(code))
        except subprocess.TimeoutExpired:
            pass
        finally:
            places.put(device)

    with ThreadPoolExecutor(per_gpu * len(devices)) as pool:
        list(pool.map(run, runs))
    found = {}
    for name in runs:
        if (folder / name / "done").exists():
            found[name] = read_metrics(folder / name / "metrics.jsonl")
    return found


def summary(rows: Sequence[Mapping[str, Any]], steps: int) -> dict[str, Any]:
    """Return what became of a run of `steps`: final and held-out loss, spikes, the first step that diverged, a curve.

    A spike is a loss above the smoothed curve before it by half of a nat; a run has diverged from the first step on
    after which its smoothed loss stays above its lowest by one nat, or is not finite.
    """
    losses = [float(row["loss"]) for row in rows if "loss" in row]
    held_out = [float(row["eval_loss"]) for row in rows if "eval_loss" in row]
    finite = [loss for loss in losses if math.isfinite(loss)]
    curve = smooth(finite)
    spikes = sum(loss > before + 0.5 for loss, before in zip(finite[1:], curve[:-1], strict=True))
    diverged = None
    lowest = math.inf
    for step, loss in enumerate(curve, 1):
        lowest = min(lowest, loss)
        if loss <= lowest + 1.0:
            diverged = None
        elif diverged is None:
            diverged = step
    if diverged is None and len(finite) < steps:
        diverged = len(finite) + 1
    every = max(1, len(curve) // POINTS)
    return {
        "steps": len(losses),
        "loss": round(sum(finite[-20:]) / max(1, len(finite[-20:])), 4),
        "held_out": round(held_out[-1], 4) if held_out else None,
        "spikes": int(spikes),
        "diverged": diverged,
        "curve": [round(loss, 3) for loss in curve[::every]],
    }
