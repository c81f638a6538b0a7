"""Optimizer state as plain tensors, so that it is saved without a pickle and restored bit for bit.

torchao's quantized moments are tensor subclasses; they become dicts of the plain tensors inside them.
"""

import importlib
import math
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from te_models.distributed.dtensor import local
from te_models.errors import CheckpointError, UsageError
from te_models.files.tensors import all_finite

Group = dict[str, Any]  # of parameters, under "params", and the options of their updates
# The state of one tensor, or of a whole optimizer: tensors, numbers, and dicts of these.
State = dict[str, Any]
Options = dict[str, Any]  # of an optimizer

# Values under these names, or in dicts under them, are counts, squares or scales.
_NOT_NEGATIVE = frozenset({"step", "exp_avg_sq", "scale", "scales", "scale_inv"})


@runtime_checkable
class Stateful(Protocol):
    """An optimizer that describes its state, so that saved state is checked before anything live is written."""

    def expected_state(self, view: Tensor, group: Group) -> State:
        """Return the state of the tensor `view` after a step, as a template for `check_values`."""
        ...


def pack(value: Any) -> Any:
    """Return a state's value as a plain tensor, a number or a dict of plain tensors."""
    if is_traceable_wrapper_subclass(value) and not isinstance(value, DTensor):
        names, _ = value.__tensor_flatten__()
        # The subclass names its tensors as strings.
        return {name: getattr(value, name) for name in names}
    return value


def unpack(value: Any, name: str, parameter: Tensor, group: Group) -> Any:
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


def like(view: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor without values, with the shape and dtype of `view` where no other is given."""
    return torch.empty(shape or view.shape, dtype=dtype or view.dtype, device="meta")


def scalar() -> Tensor:
    """Return an FP32 scalar without a value, such as a step count of torch.optim."""
    return torch.empty((), dtype=torch.float32, device="meta")


def bytes_in(value: Any) -> int:
    """Return the bytes of the tensors in a value of a state, in a template of one, or in a list of these."""
    if isinstance(value, dict):
        return sum(bytes_in(member) for member in value.values())
    if isinstance(value, list):
        return sum(bytes_in(member) for member in value)
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


# Elements of the tensor in whose place an optimizer that does not run on meta steps for real.
TRIAL = 2**16


def state_after_step(optimizer: torch.optim.Optimizer, view: Tensor, group: Group) -> State:
    """Return the state that an optimizer keeps of a tensor on meta after a step, as tensors on meta.

    An optimizer that does not describe it takes a step on meta. Where that fails, it takes one on a smaller tensor on
    the CPU, and what has the size of that tensor, or a part of it, is scaled by the elements.
    """
    if isinstance(optimizer, Stateful):
        return optimizer.expected_state(view, group)
    kind: Any = type(optimizer)
    options = {name: value for name, value in group.items() if name in optimizer.defaults}
    error: Exception | None = None
    for trial in (torch.empty_like(view, device="meta"), _smaller(view)):
        parameter = nn.Parameter(trial)
        parameter.grad = torch.zeros_like(trial)
        stepped = kind([{**options, "params": [parameter]}])
        try:
            stepped.step()
        except Exception as raised:  # whatever an optimizer of someone else's raises on meta
            error = raised
            continue
        share = view.numel() / max(1, trial.numel())
        values = stepped.state[parameter]
        return {name: _scaled(pack(value), share) for name, value in values.items()}
    raise UsageError(
        f"the state of optimizer {kind.__name__} cannot be planned: give it `expected_state`, as "
        f"te_models.optim.adamw.AdamW has, or mend its step ({error})"
    ) from error


def _smaller(view: Tensor) -> Tensor:
    """Return zeros on the CPU with the dimensions of `view`, of which the longest are halved down to TRIAL elements."""
    shape = list(view.shape)
    while math.prod(shape) > TRIAL:
        longest = shape.index(max(shape))
        shape[longest] = -(-shape[longest] // 2)
    return torch.zeros(shape, dtype=view.dtype)


def _scaled(value: Any, share: float) -> Any:
    """Return a value of a state on meta, whose tensors have `share` times the elements; single numbers stay."""
    if isinstance(value, dict):
        return {name: _scaled(member, share) for name, member in value.items()}
    if not isinstance(value, Tensor):
        return value
    count = value.numel() if value.numel() <= 1 else round(value.numel() * share)
    return torch.empty(count, dtype=value.dtype, device="meta")


def check_values(saved: object, expected: Any, place: str) -> None:
    """Compare one value of saved state with a template, before anything live is written.

    Args:
        saved: a tensor, a whole number, or a dict of these.
        expected: a tensor of the right shape and dtype, `int`, or a dict of these.
        place: names the value in errors.
    """
    if isinstance(expected, dict) and isinstance(saved, dict) and saved.keys() == expected.keys():
        for name, value in expected.items():
            check_values(saved[name], value, f"{place}.{name}")
    elif mistake := _mistake(saved, expected, _NOT_NEGATIVE.isdisjoint(place.split("."))):
        raise CheckpointError(f"the optimizer's state at {place} {mistake}")


def _mistake(saved: object, expected: Any, negative: bool) -> str:
    """Return the mistake in a value, "" if there is none; with `negative` it may be below zero."""
    if isinstance(expected, dict):
        return f"must have {', '.join(map(str, expected)) or 'no values'}"
    if expected is int:
        return "" if type(saved) is int and 0 <= saved < 2**62 else "is not a count"
    if (
        not isinstance(saved, Tensor)
        or saved.shape != expected.shape
        or saved.dtype != expected.dtype
    ):
        if isinstance(saved, Tensor):
            shape = f"{saved.dtype} {list(saved.shape)}"
        else:
            shape = type(saved).__name__
        return f"is {shape} where {expected.dtype} {list(expected.shape)} belongs"
    values = local(saved)
    if all_finite(values) and (negative or not _has_negative(values)):
        return ""
    return "has values that are not finite, or negative squares or scales"


def _has_negative(values: Tensor) -> bool:
    """Return whether a number is below zero; of FP8, whether one has the sign bit."""
    if not values.is_floating_point() or not values.numel():
        return False
    # FP8 has no minimum; as int8, its numbers with the sign bit are the negative ones.
    comparable = values.view(torch.int8) if values.itemsize == 1 else values
    return bool(comparable.amin() < 0)
