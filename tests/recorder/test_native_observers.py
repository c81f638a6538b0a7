"""Observers of Transformer Engine's quantizers, on stand-ins with its methods."""

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from te_models.engine.native_observers import (
    experts_observer,
    give_observer,
    install,
    observe,
    observe_quantizer,
    set_observers,
)
from te_models.numerics.formats import DType
from te_models.numerics.nvfp4 import NVFP4Quantizer
from te_models.numerics.quantizers import Float8CurrentScalingQuantizer, MXFP8Quantizer
from te_models.recorder.layout import INDEX, OPERANDS, RecordedTensor
from te_models.recorder.quantized import cast_of
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
        self._fp8_workspaces: dict[str, Any] = {}

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


@pytest.mark.parametrize("every_step", [False, True])
def test_values_that_a_kernel_keeps_are_computed_for_the_count(every_step: bool) -> None:
    """Not where each step is recorded: then the data alone are counted, and SQNR stays unknown."""
    names = [RecordedTensor("linear", o) for o in OPERANDS]
    table = Table(names, [True] * 3, torch.device("cpu"), every_step=every_step)
    linear = Linear()
    set_observers(linear, [tuple(Observer(table, row, o) for row, o in enumerate(OPERANDS))])
    quantizer = Quantizer()
    give_observer(quantizer, linear, "scaling_fwd", 0)
    values = torch.linspace(-3, 3, 256).view(16, 16)
    quantized = quantizer(values)
    computed = []

    def compute() -> torch.Tensor:
        computed.append(True)
        return values

    observe(quantizer, quantized, compute)  # no step is recorded
    assert not computed
    table.begin()
    observe(quantizer, quantized, compute)
    assert counted(table) == 256 and bool(computed) != every_step
    signal = table.values[0, INDEX["signal"]].item()
    assert math.isnan(signal) if every_step else signal == pytest.approx(values.square().sum())


@pytest.mark.parametrize("name", ["weight", "weight0"])
def test_a_cached_weight_is_counted_in_each_step(name: str) -> None:
    """Transformer Engine's tensors copy their quantizer, and the copy renews the cache in the steps that follow."""
    table, observers = table_and_observers()
    linear = Linear()
    set_observers(linear, observers)
    table.begin()
    weight = linear._get_quantizers()[1](torch.ones(16, 16))
    assert counted(table, 1) == 256
    weight._quantizer = Quantizer()  # a copy, with the methods of its class
    linear._fp8_workspaces[name] = weight
    for _ in range(2):
        table.begin()
        linear._get_quantizers()
        weight._quantizer.update_quantized(torch.ones(16, 16), weight)
        assert counted(table, 1) == 256
    set_observers(linear, None)
    assert set(vars(weight._quantizer)) == {"inner"}


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


def test_all_experts_of_a_grouped_linear_are_counted_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a kernel casts without quantizers; experts of other ranks have the rows before and after."""
    names = [RecordedTensor("grouped", o, expert) for expert in range(4) for o in OPERANDS]
    table = Table([RecordedTensor("linear", "input"), *names], [True] * 13, torch.device("cpu"))
    held = [
        tuple(Observer(table, table.rows[RecordedTensor("grouped", o, e)], o) for o in OPERANDS)
        for e in (2, 3)
    ]
    module = Linear()
    assert experts_observer(module, 0) is None  # before anybody records
    set_observers(module, held)
    dy = experts_observer(module, 2)
    assert dy is not None and dy.counts is None  # no kernels on a CPU
    pytest.importorskip("triton")
    monkeypatch.setattr(table, "kernels", True)
    assert dy.counts is None  # no step is recorded
    table.begin()
    counts = dy.counts
    assert counts.stride == 3 and counts.fields.data_ptr() == table.parts[9].data_ptr()
    assert counts.codes.data_ptr() == table.codes[9:].data_ptr()
    weight = experts_observer(module, 1)
    assert weight is not None and weight.counts is not None
    table.first_micro_batch = False
    assert weight.counts is None and dy.counts is not None
    x = torch.ones(2, requires_grad=True)
    inputs = experts_observer(module, 0)
    assert inputs is not None and inputs.counts is not None
    found = []
    x.register_hook(lambda grad: found.append((inputs.counts, dy.counts)))
    x.sum().backward()
    # A recompute in backward counts no input again; gradients are there only then.
    assert found[0][0] is None and found[0][1] is not None
    set_observers(module, None)
    assert experts_observer(module, 0) is None


def extension() -> SimpleNamespace:
    """Transformer Engine's C++ extension, whose functions cast without a method of the quantizer."""

    def bgrad_quantize(grad: torch.Tensor, quantizer: Any) -> list[Any]:
        return [grad.sum(0), grad if quantizer is None else quantizer.inner(grad)]

    def split_quantize(
        tensor: torch.Tensor, sizes: Any, quantizers: Any, disable_bulk_allocation: bool = False
    ) -> list[Any]:
        parts = tensor.split(list(sizes))
        return [one.inner(part) for one, part in zip(quantizers, parts, strict=True)]

    return SimpleNamespace(bgrad_quantize=bgrad_quantize, split_quantize=split_quantize)


def test_a_gradient_cast_with_its_bias_gradient_is_counted_once() -> None:
    table, observers = table_and_observers()
    tex = extension()
    install(tex)
    quantizer = Quantizer()
    grad = torch.full((16, 16), 3.0)
    tex.bgrad_quantize(grad, quantizer)  # nobody looks
    observe_quantizer(quantizer, observers[0][2])
    table.begin()
    bias, quantized = tex.bgrad_quantize(grad, quantizer)
    assert torch.equal(bias, grad.sum(0))
    assert torch.equal(quantized.dequantize(), grad)
    assert counted(table, 2) == 256
    assert table.values[2, INDEX["amax"]] == 3 and table.values[2, INDEX["signal"]] == 9 * 256
    assert tex.bgrad_quantize(grad, None)[1] is grad  # of a linear in BF16
    observe_quantizer(quantizer, None)
    tex.bgrad_quantize(grad, quantizer)
    assert counted(table, 2) == 256


def test_the_rows_of_each_expert_are_counted() -> None:
    table = Table(
        [RecordedTensor("x", "input", e) for e in range(3)], [True] * 3, torch.device("cpu")
    )
    tex = extension()
    install(tex)
    quantizers = [Quantizer() for _ in range(3)]
    for row, quantizer in enumerate(quantizers):
        observe_quantizer(quantizer, Observer(table, row, "input"))  # type: ignore[arg-type]
    table.begin()
    x = torch.arange(24.0).reshape(6, 4)
    results = tex.split_quantize(x, [4, 0, 2], quantizers, disable_bulk_allocation=True)
    assert [len(result._data) for result in results] == [4, 0, 2]
    assert table.values[:, INDEX["elements"]].tolist() == [16, 0, 8]
    assert table.values[:, INDEX["amax"]].tolist() == [15, 0, 23]


@pytest.mark.parametrize("form", ["mxfp8", "nvfp4"])
def test_scales_in_the_order_of_tiles_are_read_by_rows(form: str) -> None:
    """On Blackwell a cast writes the scales of blocks as a GEMM reads them."""
    torch.manual_seed(0)
    x = (torch.randn(160, 320) * torch.logspace(-3, 3, 320)).bfloat16()
    if form == "mxfp8":
        storage: Any = MXFP8Quantizer(DType.kFloat8E4M3, columnwise=False)(x)
    else:
        storage = NVFP4Quantizer(columnwise=False)(x)
    wanted = cast_of(storage)
    scales = storage._rowwise_scale_inv
    rows, blocks = scales.shape
    in_tiles = torch.empty(rows * blocks, dtype=scales.dtype)
    for row in range(rows):
        for block in range(blocks):
            # The documented layout of cuBLAS: tiles of 128 x 4 in rows, each of 512 bytes.
            tile = row // 128 * (blocks // 4) + block // 4
            in_tile = row % 32 * 16 + row % 128 // 32 * 4 + block % 4
            in_tiles[512 * tile + in_tile] = scales[row, block]
    storage._rowwise_scale_inv = in_tiles.reshape(rows, blocks)
    storage._with_gemm_swizzled_scales = True
    found = cast_of(storage)
    assert wanted is not None and found is not None
    assert torch.equal(found.inverse, wanted.inverse)
    assert wanted.inverse.unique().numel() > 10
