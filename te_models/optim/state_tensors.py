"""Optimizer state as plain tensors, so that it is saved without a pickle and comes back in every bit.

torchao keeps quantized moments as tensor subclasses of several tensors; those become dicts of theirs.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def pack(value: Any) -> Any:
    """A plain tensor, number or dict of plain tensors in place of a state's value."""
    if is_traceable_wrapper_subclass(value) and not isinstance(value, DTensor):
        names, _ = value.__tensor_flatten__()
        return {name: getattr(value, name) for name in names}
    return value


def unpack(value: Any, name: str, parameter: Tensor, group: dict[str, Any]) -> Any:
    """What `pack` was given for the state `name` of `parameter`, on the parameter's device.

    A count of steps stays on the CPU unless the optimizer is fused, as torch.optim keeps it.
    """
    if isinstance(value, dict):
        moved = {key: tensor.to(parameter.device, copy=True) for key, tensor in value.items()}
        return importlib.import_module("te_models.optim.lowbit").moment(moved, name, parameter)
    if isinstance(value, Tensor):
        counts = name == "step" and not group.get("fused")
        return value.to("cpu" if counts else parameter.device, copy=True)
    return value


def state_bytes(state: Any) -> int:
    """Bytes of all tensors in a nested state."""
    if isinstance(state, Tensor):
        return state.numel() * state.element_size()
    members = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ()
    return sum(map(state_bytes, members))
