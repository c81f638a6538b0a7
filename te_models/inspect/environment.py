"""The machine and versions of a measurement, which every result file records."""

import datetime
import platform
import subprocess
import sys

import torch

from te_models.training.run_file import versions


def environment() -> dict[str, str]:
    """Return date, GPU with driver or CPU, and package versions of this process."""
    facts = {"date": datetime.date.today().isoformat(), **versions()}
    if torch.cuda.is_available():
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        facts["gpu"] = torch.cuda.get_device_name()
        facts["driver"] = subprocess.run(
            query, capture_output=True, text=True, check=True
        ).stdout.split()[0]
    else:
        facts["cpu"] = platform.processor() or platform.machine()
    return facts


def require_gpu() -> None:
    """End this script with one line if there is no GPU to measure on."""
    if not torch.cuda.is_available():
        sys.exit(
            "this benchmark measures a GPU, and PyTorch finds none here: run it on a machine with one"
        )
