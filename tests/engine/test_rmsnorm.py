"""te.RMSNorm: arithmetic, dtypes, options. Golden vectors: test_golden.py. The update flag: test_delayed_scaling.py."""

from typing import Any

import pytest
import torch
from bits import assert_same_bits
from torch import nn

import te_models.engine.emulated as te

BF16 = torch.bfloat16


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("shape", [(48,), (4, 16, 48), (3, 0, 48)])
def test_against_fp64(zero_centered: bool, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    m = te.RMSNorm(48, eps=1e-3, zero_centered_gamma=zero_centered, dtype=torch.float32)
    nn.init.normal_(m.weight, 0.0 if zero_centered else 1.0, 0.3)
    x = torch.randn(shape, requires_grad=True)
    g = torch.randn(shape)
    y = m(x)
    y.backward(g)
    x64, w64 = (t.detach().double().requires_grad_() for t in (x, m.weight))
    y64 = (
        x64
        * torch.rsqrt(x64.square().mean(-1, keepdim=True) + 1e-3)
        * (w64 + 1 if zero_centered else w64)
    )
    y64.backward(g.double())
    for got, expected in ((y, y64), (x.grad, x64.grad), (m.weight.grad, w64.grad)):
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("weight", "x", "autocast", "expected"),
    [
        (torch.float32, BF16, None, torch.float32),
        (BF16, torch.float32, None, BF16),
        (BF16, BF16, None, BF16),
        (torch.float32, torch.float32, BF16, BF16),
    ],
)
def test_output_dtype(
    weight: torch.dtype, x: torch.dtype, autocast: torch.dtype | None, expected: torch.dtype
) -> None:
    m = te.RMSNorm(32, dtype=weight)
    inp = torch.randn(4, 32, dtype=x, requires_grad=True)
    with torch.autocast("cpu", autocast or BF16, enabled=autocast is not None):
        y = m(inp)
    y.sum().backward()
    assert y.dtype == expected and inp.grad.dtype == x and m.weight.grad.dtype == weight


def test_parameters_and_state() -> None:
    assert (te.RMSNorm(8).weight == 1).all() and (
        te.RMSNorm(8, zero_centered_gamma=True).weight == 0
    ).all()
    assert te.RMSNorm((2, 4)).weight.shape == (2, 4)
    state = te.RMSNorm(8).state_dict()
    assert list(state) == ["weight", "_extra_state"] and state["_extra_state"].numel() == 0
    te.RMSNorm(8).load_state_dict(state)
    with pytest.raises(RuntimeError, match="Refusing to load pickled"):
        te.RMSNorm(8).load_state_dict(state | {"_extra_state": torch.ones(1, dtype=torch.uint8)})


def test_several_trailing_dimensions() -> None:
    m, flat = te.RMSNorm((4, 8)), te.RMSNorm(32)
    x = torch.randn(3, 5, 4, 8)
    assert_same_bits("m(x).reshape(3, 5, 32)", m(x).reshape(3, 5, 32), flat(x.reshape(3, 5, 32)))


def test_meta_then_reset() -> None:
    m = te.RMSNorm(8, device="meta", dtype=BF16)
    assert m.weight.is_meta
    m.reset_parameters()
    assert m.weight.device.type == "cpu" and m.weight.dtype == BF16


@pytest.mark.parametrize(
    ("arguments", "error"),
    [({}, ValueError), ({"normalized_shape": 8, "elementwise_affine": True}, TypeError)],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        te.RMSNorm(**arguments)


def test_bad_shape() -> None:
    message = (
        r"Input tensor \(shape=\(4, 8\)\) and weight tensor \(shape=\(16,\)\) are not compatible"
    )
    with pytest.raises(ValueError, match=message):
        te.RMSNorm(16)(torch.ones(4, 8))


def test_deprecated_names_still_work() -> None:
    with pytest.warns(DeprecationWarning):
        assert te.RMSNorm(hidden_size=8, params_dtype=BF16).weight.dtype == BF16
