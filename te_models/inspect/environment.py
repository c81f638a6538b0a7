"""The machine and versions of a measurement, which every result file records."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import subprocess

import torch


def environment() -> dict[str, str]:
    """Return date, GPU with driver or CPU, and package versions of this process."""
    found = {"date": datetime.date.today().isoformat(), "python": platform.python_version(), "torch": torch.__version__}
    for package in ("transformer-engine", "torchao", "triton"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found["gpu"] = torch.cuda.get_device_name()
        found["driver"] = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    else:
        found["cpu"] = platform.processor() or platform.machine()
    return found
