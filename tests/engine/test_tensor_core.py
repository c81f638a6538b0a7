"""The arithmetic of Hopper's tensor cores, against a reference in Python's own integers."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import te_models.engine.emulated as te
from te_models.engine.emulated import tensor_core
from te_models.engine.emulated.tensor_core import Factor

FORMATS = {"e4m3": (torch.float8_e4m3fn, -6, 3), "e5m2": (torch.float8_e5m2, -14, 2)}


def split(x: Fraction, floor: int) -> int:
    """The exponent of a value of a format whose smallest normal exponent is `floor`."""
    exponent = floor
    while abs(x) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    return exponent


def cut(x: Fraction, unit: Fraction) -> Fraction:
    """x towards zero, to a multiple of unit."""
    return (abs(x) // unit) * unit * (1 if x >= 0 else -1)


def reference(a: list[float], b: list[float], floors: tuple[int, int], promote: bool) -> float:
    """One element of the product, term by term."""
    accumulator, total = Fraction(0), torch.tensor(0.0)
    for start in range(0, len(a), 32):
        pairs = [
            (Fraction(x), Fraction(y))
            for x, y in zip(a[start : start + 32], b[start : start + 32], strict=True)
        ]
        exponents = [split(x, floors[0]) + split(y, floors[1]) for x, y in pairs if x and y]
        exponents += [split(accumulator, -126)] if accumulator else []
        if exponents:
            unit = Fraction(2) ** (max(exponents) - 13)
            accumulator = sum((cut(x * y, unit) for x, y in pairs), cut(accumulator, unit))
            if accumulator:
                accumulator = cut(accumulator, Fraction(2) ** (split(accumulator, -126) - 13))
        if promote and (start + 32) % 128 == 0:
            total, accumulator = total + float(accumulator), Fraction(0)
    return (total + float(accumulator)).item()


def hopper_matmul(a: Tensor, b: Tensor, floors: tuple[int, int], promote: bool) -> Tensor:
    return tensor_core.tensor_core_matmul(Factor.of(a, floors[0]), Factor.of(b, floors[1]), promote)


def values(shape: tuple[int, int], name: str, spread: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp2(
        torch.randn(shape, generator=generator) * spread
    )
    return x.clamp(-448, 448).to(FORMATS[name][0]).float()


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(list(FORMATS)), st.sampled_from(list(FORMATS)), st.sampled_from([1, 16, 32, 96, 128, 272]),
    st.booleans(), st.floats(0, 6), st.integers(0, 1000),
)  # fmt: skip
def test_every_bit_of_the_reference(
    fa: str, fb: str, k: int, promote: bool, spread: float, seed: int
) -> None:
    a, b = values((2, k), fa, spread, seed), values((3, k), fb, spread, seed + 1)
    floors = FORMATS[fa][1], FORMATS[fb][1]
    got = hopper_matmul(a, b, floors, promote)
    padded = [torch.nn.functional.pad(t, (0, -k % 32)).tolist() for t in (a, b)]
    assert got.tolist() == [
        [reference(x, y, floors, promote) for y in padded[1]] for x in padded[0]
    ]


@pytest.mark.parametrize("size", ["_OUTPUTS", "_PRODUCTS"])
def test_tiles_change_no_bit(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = values((7, 96), "e4m3", 2.0, 1), values((3, 96), "e5m2", 2.0, 2)
    floors = FORMATS["e4m3"][1], FORMATS["e5m2"][1]
    whole = hopper_matmul(a, b, floors, promote=True)
    monkeypatch.setattr(
        tensor_core, size, 2 * 3 * (tensor_core.INSTRUCTION_K if size == "_PRODUCTS" else 1)
    )
    assert torch.equal(hopper_matmul(a, b, floors, promote=True), whole)


def test_zeros_and_nothing_give_zero() -> None:
    assert hopper_matmul(torch.zeros(2, 64), torch.ones(3, 64), (-6, -6), True).eq(0).all()
    assert hopper_matmul(torch.zeros(0, 64), torch.ones(3, 64), (-6, -6), True).shape == (0, 3)


def test_nan_stays_nan() -> None:
    a = torch.ones(2, 32)
    a[0, 3] = torch.nan
    out = hopper_matmul(a, torch.ones(1, 32), (-6, -6), False)
    assert out[0].isnan().all() and out[1].item() == 32.0


@pytest.mark.parametrize(
    "recipe",
    [te.recipe.DelayedScaling, te.recipe.Float8CurrentScaling, te.recipe.Float8BlockScaling],
)
def test_the_limit_decides_and_both_ways_are_close(recipe: type) -> None:
    module = te.Linear(256, 128, bias=False, params_dtype=torch.bfloat16, device="cpu")
    x = torch.randn(64, 256, dtype=torch.bfloat16)
    outs = []
    for limit in (0, float("inf"), 64 * 128 * 256, 64 * 128 * 256 - 1):
        with torch.no_grad(), te.exact_gemm(limit), te.autocast(enabled=True, recipe=recipe()):
            outs.append(module(x).float())
    fp32, exact, at_limit, below = outs
    assert (
        torch.equal(exact, at_limit) and torch.equal(fp32, below) and not torch.equal(fp32, exact)
    )
    assert (fp32 - exact).norm() / exact.norm() < 1.5e-3


def test_a_small_product_in_one_run_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of all rows and columns would take as long as the arithmetic of a small product."""
    a, b = values((16, 64), "e4m3", 2.0, 0), values((24, 64), "e4m3", 2.0, 1)
    wanted = hopper_matmul(a, b, (-6, -6), True)
    seen = []
    monkeypatch.setattr(Factor, "of_rows", lambda *_: seen.append("rows"))
    monkeypatch.setattr(tensor_core, "_runs", lambda *_: seen.append("runs"))
    assert torch.equal(hopper_matmul(a, b, (-6, -6), True), wanted)
    assert not seen
