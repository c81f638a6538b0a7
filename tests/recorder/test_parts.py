"""Input, weight and output gradient of single te modules, whichever function of the engine casts them."""

from typing import Any

import pytest
import torch
from recorded_counts import LARGEST, block_scales, reference
from torch import Tensor

from te_models.config.recipe import get_recipe
from te_models.engine import get_engine
from te_models.recorder.layout import INDEX, OPERANDS, RecordedTensor
from te_models.recorder.table import Observer, Table

ENGINES = [
    pytest.param(("emulated", "cpu"), id="emulated"),
    pytest.param(("native", "cuda"), id="native", marks=pytest.mark.gpu),
]
ROWS = [32, 0, 96, 128]  # of the experts
IN, OUT = 256, 128


def recorded(
    module: Any, te: Any, recipe: Any, x: Tensor, dy: Tensor, rows: list[int] | None
) -> tuple[Table, list[str], dict[str, Tensor]]:
    """Return the table of the third of three steps, its tensors' names, and the scales that `delayed` cast with."""
    experts: list[int | None] = [None] if rows is None else list(range(len(rows)))
    tensors = [RecordedTensor("linear", part, expert) for expert in experts for part in OPERANDS]
    table = Table(tensors, [True] * len(tensors), x.device)
    observers: list[Any] = []
    for expert in experts:
        places = [(table.rows[RecordedTensor("linear", part, expert)], part) for part in OPERANDS]
        observers.append(tuple(Observer(table, row, part) for row, part in places))
    te.set_observers(module, observers)
    scales = {}
    for _ in range(3):
        scales = delayed_scales(module, experts)
        table.begin()
        with te.autocast(enabled=True, recipe=recipe):
            y = module(x) if rows is None else module(x, rows)
        y.backward(dy)
    te.set_observers(module, None)
    return table, [tensor.name for tensor in tensors], scales


def delayed_scales(module: Any, experts: list[int | None]) -> dict[str, Tensor]:
    """Return the scales of the coming cast of each tensor, where they are known before it."""
    forward, backward = (module.fp8_meta.get(f"scaling_{way}") for way in ("fwd", "bwd"))
    if not hasattr(forward, "scale"):
        return {}
    scales = {}
    for gemm, expert in enumerate(experts):
        own = (*forward.scale[3 * gemm :][:2], backward.scale[2 * gemm])
        for part, scale in zip(OPERANDS, own, strict=True):
            scales[RecordedTensor("linear", part, expert).name] = scale.clone()
    return scales


def operands(module: Any, x: Tensor, dy: Tensor, rows: list[int] | None) -> dict[str, Tensor]:
    """Return the values of each tensor before its cast."""
    if rows is None:
        return {
            "linear.input": x,
            "linear.weight": module.weight,
            "linear.grad_output": dy,
        }
    values = {}
    for expert, (part, gradient) in enumerate(zip(x.split(rows), dy.split(rows), strict=True)):
        values[f"linear.experts.{expert}.input"] = part
        values[f"linear.experts.{expert}.weight"] = getattr(module, f"weight{expert}")
        values[f"linear.experts.{expert}.grad_output"] = gradient
    return values


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("name", ["delayed", "current", "blockwise"])
@pytest.mark.parametrize("place", ENGINES)
def test_all_parts_have_the_counts_of_their_values(
    name: str, grouped: bool, biased: bool, place: tuple[str, str]
) -> None:
    """Transformer Engine casts gradients of a linear with a bias, and all rows of experts, by functions of its C++."""
    engine, device = place
    te = get_engine(engine, device)[0]
    torch.manual_seed(5)
    options = dict(bias=biased, params_dtype=torch.bfloat16, device=device)
    rows = ROWS if grouped else None
    if rows is None:
        module = te.Linear(IN, OUT, **options)
    else:
        module = te.GroupedLinear(len(rows), IN, OUT, **options)
    history = {"amax_history_len": 8} if name == "delayed" else {}
    recipe = get_recipe(name, **history).build(te)
    x = torch.randn(sum(ROWS), IN, device=device).bfloat16()
    dy = torch.randn(sum(ROWS), OUT, device=device).bfloat16() * 1e-3
    x[0, 0] = 0.0
    x.requires_grad_()
    table, names, scales = recorded(module, te, recipe, x, dy, rows)
    values = table.end()[0].cpu()
    sources = operands(module, x, dy, rows)
    assert set(names) == set(sources)
    for tensor, fields in zip(names, values.tolist(), strict=True):
        source = sources[tensor].detach().cpu().double()
        found = dict(zip(INDEX, fields, strict=True))
        if not source.numel():
            assert found["elements"] == 0
            continue
        wide = tensor.endswith("grad_output") and name != "blockwise"
        form = 8 if wide else 7
        if name == "delayed":
            factors = torch.full_like(source, scales[tensor].double().item())
        elif name == "current":
            amax = source.float().abs().max()
            factors = torch.full_like(source, (LARGEST[form] / amax).item())
        else:
            block = (128, 128) if tensor.endswith("weight") else (1, 128)
            factors = block_scales(source, form, block)
        expected = reference(source, form, factors)
        # Kernels sum in FP32, and round a difference once where FP64 has it exactly.
        noise = expected.pop("noise")
        noise_error = 1e-6 + 2.0**-23 * (expected["signal"] / noise) ** 0.5
        assert found["noise"] == pytest.approx(noise, rel=max(noise_error, 1e-5)), tensor
        assert {field: found[field] for field in expected} == pytest.approx(expected, rel=1e-5), (
            tensor
        )
