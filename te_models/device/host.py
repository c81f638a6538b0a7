"""Checks of where a tensor lies that cost the host of a GPU little."""

import torch
from torch import Tensor


def device_type(x: Tensor) -> str:
    """Return `x.device.type`, but ten times as fast on the host of a GPU."""
    if x.is_cuda:
        return "cuda"
    if x.is_cpu:
        return "cpu"
    return x.device.type


def on_host(x: Tensor) -> bool:
    """Return whether NumPy may work on x: it is on a CPU, and no compiler or mode records the operations of torch."""
    return (
        x.is_cpu and not torch.compiler.is_compiling() and not torch._C._len_torch_dispatch_stack()
    )
