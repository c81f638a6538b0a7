"""Optimizer state as plain tensors, so that it is saved without a pickle and restored bit for bit.

torchao's quantized moments are tensor subclasses; they become dicts of the plain tensors inside them.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def pack(value: Any) -> Any:
    """Return a state's value as a plain tensor, a number or a dict of plain tensors."""
    if is_traceable_wrapper_subclass(value) and not isinstance(value, DTensor):
        names, _ = value.__tensor_flatten__()
        return {name: getattr(value, name) for name in names}  # the subclass names its tensors as strings
    return value


def unpack(value: Any, name: str, parameter: Tensor, group: dict[str, Any]) -> Any:
    """Undo `pack` for the state `name` of `parameter`; the result is on the parameter's device.

    The step count stays on the CPU unless the optimizer is fused, as in torch.optim.
    """
    if isinstance(value, dict):
        moved = {key: tensor.to(parameter.device, copy=True) for key, tensor in value.items()}
        return importlib.import_module("te_models.optim.lowbit").moment(moved, name, parameter)
    if isinstance(value, Tensor):
        on_cpu = name == "step" and not group.get("fused")
        return value.to("cpu" if on_cpu else parameter.device, copy=True)
    return value


def state_bytes(state: Any) -> int:
    """Return the size in bytes of all tensors in a nested state."""
    if isinstance(state, Tensor):
        return state.numel() * state.element_size()
    members = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ()
    return sum(map(state_bytes, members))
