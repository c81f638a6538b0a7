"""Helpers of the engine tests: recipes, inputs, a search-based rounding, a training step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import te_models.engine.emulated as te
from te_models.engine.emulated import recipe as R

BF16 = torch.bfloat16
RECIPES: dict[str, Callable[[], R.Recipe]] = {
    "delayed": lambda: R.DelayedScaling(amax_history_len=4),
    "current": R.Float8CurrentScaling,
    "block": R.Float8BlockScaling,
    "mxfp8": R.MXFP8BlockScaling,
    "nvfp4": R.NVFP4BlockScaling,
}


def relative(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def run(m: te.Linear, recipe: R.Recipe | None, x: Tensor, g: Tensor | None = None, **options: Any) -> Any:
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = m(x, **options)
    if g is not None:
        y.backward(g)
    return y


def wide(m: int, k: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    """Rows over many magnitudes, with zeros of both signs, subnormals and values at the edge of E4M3."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=g) * torch.logspace(-9, 9, m, base=2)[:, None]
    x[0, :7] = torch.tensor([0.0, -0.0, 448.0, 449.0, 464.0, 465.0, 1e4])
    x[min(1, m - 1)] = 0
    x[-1, 0] = 1e-40
    return x.to(dtype)


def nearest(values: Tensor, grid: Tensor) -> Tensor:
    """Indices of the nearest entries of an ascending grid; a tie goes to the even index. In FP64."""
    values, grid = values.double(), grid.double()
    upper = torch.searchsorted(grid, values).clamp(1, len(grid) - 1)
    lower = upper - 1
    below, above = values - grid[lower], grid[upper] - values
    even = torch.where(lower % 2 == 0, lower, upper)
    return torch.where(below < above, lower, torch.where(above < below, upper, even))
