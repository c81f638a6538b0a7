"""Properties of every quantizer on any tensor (hypothesis)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bits import assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import te_models.engine.emulated as te
from te_models.engine.emulated import numerics
from te_models.engine.emulated.numerics import DType

E4M3, E5M2 = DType.kFloat8E4M3, DType.kFloat8E5M2
MAX = {E4M3: 448.0, E5M2: 57344.0}
# Half a step at the top of a binade, relative: 3, 2 and 1 mantissa bits; NVFP4 adds the rounding of its E4M3 scale.
ROUNDING = {E4M3: 2.0**-4, E5M2: 2.0**-3}
finite = st.floats(-(2.0**100), 2.0**100, width=32)
fast = settings(max_examples=30, deadline=None)


@st.composite
def tensors(draw: st.DrawFn, step: int = 32) -> Tensor:
    """A tensor of a random shape (multiples of `step`), magnitude and spread, with zeros."""
    m, k = step * draw(st.integers(1, 3)), step * draw(st.integers(1, 6))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    spread, centre = draw(st.floats(0, 12)), draw(st.floats(-40, 40))
    x = torch.randn(m, k, generator=g) * torch.exp2(torch.randn(m, k, generator=g) * spread + centre).clamp(1e-37, 1e37)
    x[torch.rand(m, k, generator=g) < draw(st.floats(0, 0.5))] = 0
    return x.to(draw(st.sampled_from([torch.bfloat16, torch.float32])))


def makers() -> dict[str, Any]:
    return {
        "current": te.Float8CurrentScalingQuantizer,
        "current_pow2": lambda d: te.Float8CurrentScalingQuantizer(d, force_pow_2_scales=True),
        "block1": lambda d: te.Float8BlockQuantizer(d, rowwise=True, columnwise=True, block_scaling_dim=1),
        "block2": lambda d: te.Float8BlockQuantizer(d, rowwise=True, columnwise=True),
        "block1_fp32": lambda d: te.Float8BlockQuantizer(
            d, rowwise=True, columnwise=True, block_scaling_dim=1, force_pow_2_scales=False
        ),
        "mxfp8": te.MXFP8Quantizer,
    }


both = pytest.mark.parametrize("dtype", [E4M3, E5M2])
every = pytest.mark.parametrize("name", makers())


@both
@fast
@given(a=finite, b=finite, scale=st.floats(2.0**-20, 2.0**20, width=32))
def test_the_cast_is_monotone_and_odd(dtype: DType, a: float, b: float, scale: float) -> None:
    low, high = sorted((a, b))
    x = torch.tensor([low, high, -low, -high])
    values = numerics.decode_fp8(numerics.cast_fp8(x, torch.tensor([scale]), dtype), dtype)
    assert values[0] <= values[1]
    assert values[2] == -values[0] and values[3] == -values[1]
    assert values.abs().max() <= MAX[dtype]


@both
@fast
@given(code=st.integers(0, 255))
def test_the_cast_inverts_decoding(dtype: DType, code: int) -> None:
    codes = torch.tensor([code], dtype=torch.uint8)
    values = numerics.decode_fp8(codes, dtype)
    if values.isfinite():
        assert_same_bits("result", numerics.cast_fp8(values, torch.ones(1), dtype), codes)


@both
@every
@fast
@given(x=tensors())
def test_error_is_half_a_step_of_the_largest_neighbor(name: str, dtype: DType, x: Tensor) -> None:
    """Each value is within a relative rounding error, or within half the smallest subnormal of its block."""
    t = makers()[name](dtype)(x)
    for columnwise in (False, True):
        values, scale, _ = t.operand(columnwise)
        values = (values if scale is None else values * scale).double()
        exact = x.double()
        tiny = exact.abs().max() if name.startswith("current") else block_maximum(exact, name, columnwise)
        # The scale brings the block's maximum to at least half of the format's (power-of-two scales round down).
        floor = tiny * 2 * {E4M3: 2.0**-9, E5M2: 2.0**-16}[dtype] / MAX[dtype]
        assert ((values - exact).abs() <= exact.abs() * ROUNDING[dtype] * 1.0001 + floor + 1e-44).all()


def block_maximum(x: Tensor, name: str, columnwise: bool) -> Tensor:
    size = 32 if name == "mxfp8" else 128
    block = (size, size) if name == "block2" else (size, 1) if columnwise else (1, size)
    m, k = x.shape
    largest = numerics.split_blocks(x.abs(), block).amax((1, 3))
    return largest.repeat_interleave(block[0], 0)[:m].repeat_interleave(block[1], 1)[:, :k]


@both
@every
@fast
@given(x=tensors())
def test_negation_flips_signs_only(name: str, dtype: DType, x: Tensor) -> None:
    q = makers()[name](dtype)
    assert_same_bits("q(-x).dequantize()", q(-x).dequantize(), -q(x).dequantize())


@both
@pytest.mark.parametrize("name", ["current_pow2", "block1", "block2", "mxfp8"])
@fast
@given(x=tensors(), shift=st.integers(-10, 10))
def test_power_of_two_scales_commute_with_powers_of_two(name: str, dtype: DType, x: Tensor, shift: int) -> None:
    x = (x.float() + 1e-20).to(x.dtype)
    q = makers()[name](dtype)
    a, b = q(x), q(x * 2.0**shift)
    codes = ("_data",) if name == "current_pow2" else ("_rowwise_data", "_columnwise_data")
    assert all(torch.equal(getattr(a, c), getattr(b, c)) for c in codes)
    scales = [t.operand(False).scale if name == "current_pow2" else t.operand(False).values for t in (a, b)]
    torch.testing.assert_close(scales[0] * 2.0**shift, scales[1], rtol=0, atol=0)


@both
@pytest.mark.parametrize("name", ["current_pow2", "block1", "block2"])
@fast
@given(x=tensors())
def test_forced_powers_of_two_are_powers_of_two(name: str, dtype: DType, x: Tensor) -> None:
    t = makers()[name](dtype)(x)
    scales = (
        t._scale_inv
        if name == "current_pow2"
        else torch.cat([t._rowwise_scale_inv.flatten(), t._columnwise_scale_inv.flatten()])
    )
    mantissa, _ = torch.frexp(scales[scales > 0])
    assert (mantissa == 0.5).all()


@both
@every
@fast
@given(x=tensors())
def test_requantizing_changes_nothing_with_power_of_two_scales(name: str, dtype: DType, x: Tensor) -> None:
    """Values of the grid are their own quantization, where the scale does not move."""
    q = makers()[name](dtype)
    once = q(x).dequantize(dtype=torch.float32)
    twice = q(once).dequantize(dtype=torch.float32)
    if name in ("current_pow2", "block1", "block2"):
        # A maximum that rounds up to the next power of two may take the next scale, which is coarser.
        assert ((twice - once).abs() <= once.abs() * ROUNDING[dtype] + once.abs().max() * 2.0**-9).all()
    if name == "mxfp8":
        assert_same_bits("twice", twice, once)


@both
@every
@fast
@given(x=tensors())
def test_the_columnwise_copy_is_the_rowwise_copy_of_the_transpose(name: str, dtype: DType, x: Tensor) -> None:
    q = makers()[name](dtype)
    a, b = q(x).operand(True), q(x.t().contiguous()).operand(False)
    assert_same_bits("a.values", a.values, b.values.t())


@fast
@given(x=tensors(16))
def test_nvfp4_error(x: Tensor) -> None:
    t = te.NVFP4Quantizer()(x)
    values, scale, _ = t.operand(False)
    exact = x.double()
    largest = block_maximum_16(exact)
    error = (values.double() * scale.double() - exact).abs()
    # Half a step of E2M1 is 1/6 of the maximum of the block; the E4M3 scale adds 1/16, and can underflow.
    assert (error <= largest * (1 / 6 + 1 / 16) + exact.abs().max() / 2688 * 2.0**-10 * 6.1).all()


def block_maximum_16(x: Tensor) -> Tensor:
    return x.abs().unflatten(1, (-1, 16)).amax(2).repeat_interleave(16, 1)
