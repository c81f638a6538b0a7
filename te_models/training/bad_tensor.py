"""The search for the tensor that broke a step, in a second run of its forward and backward passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from te_models.causal_lm import CausalLM
from te_models.distributed.control import Ranks
from te_models.distributed.dtensor import local
from te_models.fp8.scaling_state import gemms_of
from te_models.recorder.layout import OPERANDS, RecordedTensor
from te_models.recorder.quantized import is_quantized
from te_models.training.recording import experts_of, linear_name, quantizing_modules

OUTPUT = "output"  # beside OPERANDS: the product of finite operands


class Watcher:
    """The observer of an operand's casts that looks for values that are not finite, before and after."""

    # As of te_models.recorder.table.Observer: it wants no counts from kernels, and values that are computed once more.
    counts = None
    wants_values = True

    def __init__(self, bad_tensors: BadTensors, tensor: RecordedTensor) -> None:
        self.bad_tensors = bad_tensors
        self.tensor = tensor

    def __call__(self, source: Tensor | None, quantized: Any, scale: Tensor | None = None) -> None:
        """Look at both sides of a cast."""
        self.bad_tensors.note(self.tensor, source, quantized)


class BadTensors:
    """Watches the te.Linears of a model, and notes the first tensor with a NaN or an infinity.

    Each te.Linear's input and weight, its product, and the gradient of its output are looked at in the order in which
    they are computed, before and after a cast. The host waits for each.

    Attributes:
        first: the first bad tensor of this process; None if there is none.
        place: the number of calls of te modules, forward or backward, until then: all processes make the same calls.
    """

    def __init__(self, model: CausalLM) -> None:
        self.model = model
        self.first: RecordedTensor | None = None
        self.place = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what runs inside."""
        te = self.model.te
        with ExitStack() as stack:
            for name, module in quantizing_modules(self.model):
                before, at_product, after = self._hooks(name, module)
                stack.enter_context(module.register_forward_pre_hook(before))
                # First of all: the gradient is of the product itself, whatever other hooks make of it.
                stack.enter_context(module.register_forward_hook(at_product, prepend=True))
                stack.enter_context(module.register_forward_hook(after))
                te.set_observers(module, self._observers(name, module))
                stack.callback(te.set_observers, module, None)
            yield

    def note(self, tensor: RecordedTensor, *values: object) -> None:
        """Note a tensor if it is the first whose values are not all finite."""
        if self.first is None and not all(map(finite, values)):
            self.first = tensor

    def _observers(self, name: str, module: nn.Module) -> list[Any]:
        """Return what to call with both sides of each operand's casts, for each GEMM."""
        return [
            tuple(Watcher(self, RecordedTensor(linear_name(name), o, expert)) for o in OPERANDS)
            for expert in experts_of(self.model, name, module)
        ]

    def _hooks(self, name: str, module: nn.Module) -> tuple[Callable[..., None], ...]:
        """Return hooks for before a te module's forward pass, for its product, and for what it returns."""
        experts = experts_of(self.model, name, module)

        def named(operand: str, expert: int | None) -> RecordedTensor:
            return RecordedTensor(linear_name(name), operand, expert)

        def by_expert(value: Tensor, rows: list[int] | None) -> list[Any]:
            # [rows of all experts, F] -> [rows of the expert, F] for each
            return [value] if rows is None else list(value.split(rows))

        # Without a graph: a recompute looks at nothing, and has to save what the first pass saved.
        @torch.no_grad()
        def before(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            if self.first is not None or in_backward():
                return
            self.place += 1
            parts = by_expert(inputs[0], rows_of(inputs))
            for expert, x in zip(experts, parts, strict=True):
                self.note(named("input", expert), x)
            for expert, weight in zip(experts, weights_of(module), strict=True):
                self.note(named("weight", expert), weight)

        def at_product(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            result = output[0] if isinstance(output, tuple) else output
            rows = rows_of(inputs)
            if result.requires_grad and self.first is None and not in_backward():
                result.register_hook(lambda gradient: at_gradient(gradient, rows))

        @torch.no_grad()
        def after(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            if self.first is not None or in_backward():
                return
            result = output[0] if isinstance(output, tuple) else output
            for expert, y in zip(experts, by_expert(result, rows_of(inputs)), strict=True):
                self.note(named(OUTPUT, expert), y)

        def at_gradient(gradient: Tensor, rows: list[int] | None) -> None:
            if self.first is None:
                self.place += 1
                # [..., F] -> [rows, F]: the rows of one expert after the rows of another
                flat = gradient.reshape(-1, gradient.shape[-1]) if rows else gradient
                for expert, dy in zip(experts, by_expert(flat, rows), strict=True):
                    self.note(named("grad_output", expert), dy)

        return before, at_product, after


def finite(value: object) -> bool:
    """Return whether all values of a tensor, perhaps a quantized one, are finite; True for None."""
    if value is None:
        return True
    if is_quantized(value):
        value = value.dequantize(dtype=torch.float32)  # type: ignore[attr-defined]
    assert isinstance(value, Tensor)
    return bool(value.isfinite().all())


def rows_of(inputs: tuple[Any, ...]) -> list[int] | None:
    """Return the rows of each expert among the arguments of a te.GroupedLinear; None for a te.Linear."""
    # The second argument of a te.Linear is is_first_microbatch, and of a te.GroupedLinear m_splits.
    if len(inputs) < 2 or isinstance(inputs[1], bool | type(None)):
        return None
    rows = inputs[1]
    return rows.tolist() if isinstance(rows, Tensor) else list(rows)


def weights_of(module: Any) -> list[Tensor]:
    """Return this rank's part of the weight of each GEMM of a te module."""
    if hasattr(module, "weight"):
        return [local(module.weight)]
    return [local(getattr(module, f"weight{gemm}")) for gemm in range(gemms_of(module))]


def in_backward() -> bool:
    """Return whether autograd's backward pass runs, in which a forward pass is a recompute."""
    return torch._C._current_graph_task_id() != -1


def first_of_all(watched: BadTensors, ranks: Ranks) -> RecordedTensor | None:
    """Return the first bad tensor of all ranks, of several in one call the lowest rank's; all ranks call it.

    A rank that holds no bad weight itself still gets what another's experts made of it, a few calls later.
    """
    first = watched.first
    named: list[Any] = []
    if first is not None:
        named = [watched.place, first.linear, first.operand, first.expert]
    bad = [entry for entry in ranks.gather(named) if entry]
    if not bad:
        return None
    _, linear, operand, expert = min(bad, key=_order)
    return RecordedTensor(linear, operand, expert)


def _order(entry: list[Any]) -> tuple[int, int]:
    """Return the place of a bad tensor in a step: its call, and of the call's tensors which."""
    call, _, operand, _ = entry
    operands = (*OPERANDS, OUTPUT)
    return call, operands.index(operand)
