"""Observers of Transformer Engine's quantizers, on stand-ins with its methods."""

import copy
from typing import Any

import torch

from te_models.engine.native_observers import observe_quantizer, set_observers
from te_models.numerics.formats import DType
from te_models.numerics.quantizers import Float8CurrentScalingQuantizer
from te_models.recorder.layout import INDEX, OPERANDS, RecordedTensor
from te_models.recorder.table import Observer, Table


class Quantizer:
    """The Python side of a quantizer of Transformer Engine, whose class decides what C++ does with it."""

    def __init__(self) -> None:
        self.inner = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, columnwise=False)

    def quantize_impl(self, tensor: torch.Tensor) -> Any:
        return self.inner(tensor)

    def update_quantized(self, src: torch.Tensor, dst: Any, *, noop_flag: Any = None) -> Any:
        return self.inner.update_quantized(src, dst)

    def __call__(self, tensor: torch.Tensor) -> Any:
        return self.quantize_impl(tensor)


class Linear(torch.nn.Module):
    """A te.Linear that makes its quantizers in its first forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.quantizers: dict[str, list[Quantizer]] = {"scaling_fwd": [], "scaling_bwd": []}

    def _get_quantizers(self) -> list[Quantizer]:
        if not self.quantizers["scaling_fwd"]:
            self.quantizers["scaling_fwd"] = [Quantizer() for _ in range(3)]
            self.quantizers["scaling_bwd"] = [Quantizer() for _ in range(2)]
        return self.quantizers["scaling_fwd"]

    def forward(self, x: torch.Tensor) -> Any:
        return self._get_quantizers()[0](x)


def table_and_observers() -> tuple[Table, list[Any]]:
    table = Table([RecordedTensor("linear", o) for o in OPERANDS], [True] * 3, torch.device("cpu"))
    return table, [tuple(Observer(table, row, o) for row, o in enumerate(OPERANDS))]


def counted(table: Table, row: int = 0) -> float:
    return table.values[row, INDEX["elements"]].item()


def test_quantizers_of_the_first_forward_pass_are_observed() -> None:
    table, observers = table_and_observers()
    linear = Linear()
    set_observers(linear, observers)
    set_observers(linear, observers)  # before each recorded step
    table.begin()
    linear(torch.ones(16, 16))
    assert counted(table) == 256
    set_observers(linear, None)
    linear(torch.ones(16, 16))
    assert counted(table) == 256 and "_get_quantizers" not in vars(linear)


def test_a_stored_weight_is_counted_when_it_is_written() -> None:
    table, observers = table_and_observers()
    quantizer = Quantizer()
    weight = quantizer(torch.ones(16, 16))
    observe_quantizer(quantizer, observers[0][1])
    table.begin()
    quantizer.update_quantized(torch.ones(16, 16), weight, noop_flag=None)
    assert counted(table, 1) == 256
    observe_quantizer(quantizer, None)
    assert set(vars(quantizer)) == {"inner"}


def test_a_separate_copy_is_not_observed() -> None:
    table, observers = table_and_observers()
    linear = Linear()
    set_observers(linear, observers)
    linear(torch.ones(16, 16))
    twin = copy.deepcopy(linear)
    set_observers(twin, None)  # as te_models.engine.native.separate_copy does
    table.begin()
    twin(torch.ones(16, 16))
    assert counted(table) == 0
