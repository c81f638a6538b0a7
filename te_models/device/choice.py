"""Resolve the name of a device that this machine has."""

import contextlib

import torch

from te_models.errors import UsageError

KINDS = ("cpu", "cuda", "meta")


def choose_device(device: torch.device | str | None = None) -> torch.device:
    """Return the device with this name; None gives the first CUDA device if there is one, else the CPU."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parsed = None
    # PyTorch's message for an unknown name lists two dozen kinds of devices.
    with contextlib.suppress(RuntimeError):
        parsed = torch.device(device)
    if parsed is None or parsed.type not in KINDS:
        raise UsageError(f"device {str(device)!r} is not supported: give cpu, cuda or cuda:N")
    if parsed.type != "cuda":
        return parsed
    reason = "PyTorch sees no GPU" if torch.version.cuda else "this build of PyTorch has no CUDA"
    missing = f"device {str(device)!r} is not available"
    last = torch.cuda.device_count() - 1
    if not torch.cuda.is_available():
        raise UsageError(f"{missing}, because {reason}: leave it out, or give cpu")
    if (parsed.index or 0) > last:
        raise UsageError(f"{missing}: there are cuda:0 to cuda:{last}")
    return parsed


def computing_device(device: torch.device) -> torch.device:
    """Return a device that computes: for the meta device, on which models are only planned, the default one."""
    return choose_device() if device.type == "meta" else device


def runs_triton(device: torch.device) -> bool:
    """Return whether Triton's kernels run on this device: a GPU of the Ampere generation or a newer one."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
