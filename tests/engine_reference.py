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
# By name, of an FP8 type and a device.
QUANTIZERS: dict[str, Callable[..., Any]] = {
    "delayed": lambda d, at="cpu": te.Float8Quantizer(
        torch.tensor([3.0], device=at), torch.zeros(1, device=at), d
    ),
    "current": te.Float8CurrentScalingQuantizer,
    "current_pow2": lambda d: te.Float8CurrentScalingQuantizer(
        d, force_pow_2_scales=True, amax_epsilon=0.125
    ),
    "block1": lambda d, at="cpu": te.Float8BlockQuantizer(
        d, rowwise=True, columnwise=True, block_scaling_dim=1
    ),
    "block2": lambda d: te.Float8BlockQuantizer(d, rowwise=True, columnwise=True),
    "block1_fp32": lambda d: te.Float8BlockQuantizer(
        d,
        rowwise=True,
        columnwise=True,
        block_scaling_dim=1,
        force_pow_2_scales=False,
        amax_epsilon=1e-3,
    ),
    "block2_fp32": lambda d, at: te.Float8BlockQuantizer(
        d, rowwise=True, columnwise=True, force_pow_2_scales=False
    ),
    "mxfp8": lambda d, at="cpu": te.MXFP8Quantizer(d),
    "mxfp8_2d": lambda d: te.MXFP8Quantizer(d, with_2d_quantization=True),
    "nvfp4": lambda d, at="cpu": te.NVFP4Quantizer(),
    "nvfp4_2d": lambda d, at="cpu": te.NVFP4Quantizer(with_2d_quantization=True),
}


def relative(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def run(
    m: te.Linear, recipe: R.Recipe | None, x: Tensor, g: Tensor | None = None, **options: Any
) -> Any:
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
