"""The kernels of kernels/residual_norm_triton.py against FP64, within what rounding explains.

Run by test_triton_kernels.py in Triton's interpreter and on a GPU.
"""

import itertools
import math

import pytest
import torch
from fewer import every
from torch import Tensor

from te_models.kernels import residual_norm_triton
from te_models.kernels.residual_norm_triton import RowTiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter cuts off where a GPU rounds to BF16.
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16
UNIT = torch.finfo(DTYPE).eps / 2  # the largest relative error of one rounding
SMALLEST = torch.finfo(DTYPE).smallest_normal * torch.finfo(DTYPE).eps
# A sum of FP32 numbers adds at most this many one after the other: chunks of a row, the tree over one of them, rows
# and parts of the weight's gradient, and a few roundings of products.
FP32 = 64 * 2.0**-24
EPS = 0.01
# Widths that are whole chunks and not.
WIDTHS = [1000, 2560, 2880, 3584]
ROWS = [33, 1, 7, 16]
# Several rows at a time, fewer programs than rows, and rows that are loaded ahead.
SMALL = RowTiles(rows=4, chunk=256, warps=4, programs=3, stages=3)


class Case:
    """Random rows of different sizes, and the norm and its gradients in FP64."""

    def __init__(self, rows: int, columns: int, zero_centered: bool, add: bool) -> None:
        g = torch.Generator().manual_seed(rows + columns)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=g)

        # So small that eps counts, to so large that it does not.
        sizes = torch.logspace(-3, 1, rows)[:, None]
        self.x = (random(rows, columns) * sizes).to(DTYPE).to(DEVICE)
        self.delta = None
        if add:
            self.delta = (random(rows, columns) * sizes).to(DTYPE).to(DEVICE)
        self.weight = (random(columns) / 4 + (not zero_centered)).to(DTYPE).to(DEVICE)
        self.dy = random(rows, columns).to(DTYPE).to(DEVICE)
        self.dtotal = random(rows, columns).to(DTYPE).to(DEVICE) if add else None
        self.zero_centered = zero_centered

        self.total = self.x if self.delta is None else self.x + self.delta
        total = self.total.double()
        gamma = self.weight.double() + zero_centered
        self.rstd = (total.square().mean(1) + EPS).rsqrt()
        self.unit = total * self.rstd[:, None]
        self.y = self.unit * gamma
        self.slope = self.dy.double() * gamma
        share = (self.slope * self.unit).mean(1, keepdim=True)
        self.dx = self.rstd[:, None] * (self.slope - self.unit * share)
        if self.dtotal is not None:
            self.dx = self.dx + self.dtotal.double()
        self.dweight = (self.dy.double() * self.unit).sum(0)

    def forward(self, tiles: RowTiles | None = None) -> tuple[Tensor, Tensor, Tensor]:
        return residual_norm_triton.forward(
            self.x, self.delta, self.weight, EPS, self.zero_centered, tiles
        )

    def backward(self, tiles: RowTiles | None = None) -> tuple[Tensor, Tensor]:
        return residual_norm_triton.backward(
            self.dy,
            self.total,
            self.dtotal,
            self.weight,
            self.rstd.float(),
            self.zero_centered,
            tiles,
        )


def close(found: Tensor, wanted: Tensor, size: Tensor) -> None:
    """`found` is `wanted` rounded once, of FP32 numbers whose parts are no larger than `size`."""
    allowed = UNIT * wanted.abs() + FP32 * size + SMALLEST
    assert found.dtype == DTYPE and found.is_contiguous()
    assert ((found.double() - wanted).abs() <= allowed).all()


SHAPES = list(itertools.product(WIDTHS, ROWS))
# The last has more parts of the weight's gradient than are added at a time.
CASES = [
    *every(32, SHAPES, [False, True], [False, True], [None, SMALL], rest=2),
    pytest.param((1000, 70), False, True, SMALL),
]
cases = pytest.mark.parametrize(("shape", "zero_centered", "add", "tiles"), CASES)


@cases
def test_the_norm(
    shape: tuple[int, int], zero_centered: bool, add: bool, tiles: RowTiles | None
) -> None:
    columns, rows = shape
    case = Case(rows, columns, zero_centered, add)
    y, total, rstd = case.forward(tiles)
    assert torch.equal(total, case.total)
    assert rstd.dtype == torch.float32
    torch.testing.assert_close(rstd.double(), case.rstd, rtol=FP32, atol=0)
    close(y, case.y, case.y.abs())


@cases
def test_the_gradients(
    shape: tuple[int, int], zero_centered: bool, add: bool, tiles: RowTiles | None
) -> None:
    columns, rows = shape
    case = Case(rows, columns, zero_centered, add)
    dx, dweight = case.backward(tiles)
    shared = (case.slope * case.unit).abs().mean(1, keepdim=True)
    size = case.rstd[:, None] * (case.slope.abs() + case.unit.abs() * shared)
    if case.dtotal is not None:
        size = size + case.dtotal.double().abs()
    close(dx, case.dx, size)
    close(dweight, case.dweight, (case.dy.double() * case.unit).abs().sum(0))
    for one, other in zip(case.backward(tiles), (dx, dweight), strict=True):
        assert torch.equal(one, other)


def test_memory_behind_the_last_row_is_not_read() -> None:
    """Whatever it holds: programs hold four rows at a time here, and load others ahead."""
    case = Case(7, 1000, False, True)
    wanted = *case.forward(SMALL), *case.backward(SMALL)
    for name in ("x", "delta", "dy", "total", "dtotal"):
        memory = torch.full((16, 1000), math.nan, dtype=DTYPE, device=DEVICE)
        memory[:7] = getattr(case, name)
        setattr(case, name, memory[:7])
    for found, one in zip((*case.forward(SMALL), *case.backward(SMALL)), wanted, strict=True):
        assert torch.equal(found, one)


def test_rows_and_gradients_may_be_views() -> None:
    case = Case(7, 1000, True, True)
    wanted = *case.forward(), *case.backward()
    for name in ("x", "delta", "dy", "dtotal"):
        value = getattr(case, name)
        setattr(case, name, value.t().contiguous().t())
        assert not getattr(case, name).is_contiguous()
    for found, one in zip((*case.forward(), *case.backward()), wanted, strict=True):
        assert torch.equal(found, one)
