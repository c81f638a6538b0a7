"""FP8 of many matrices at once, against the emulated engine's cast of each: the same bits.

Run by test_triton_kernels.py in Triton's interpreter and on a GPU.
"""

from __future__ import annotations

import pytest
import torch

from te_models.engine.emulated.numerics import FP8_MAX, DType, scale_from_amax
from te_models.engine.emulated.quantizers import Float8CurrentScalingQuantizer
from te_models.kernels import expert_cast_triton
from te_models.kernels.expert_cast_triton import FP8Matrices, Matrices

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def cast(given: Matrices, e5m2: bool) -> FP8Matrices:
    largest = FP8_MAX[DType.kFloat8E5M2 if e5m2 else DType.kFloat8E4M3]
    return expert_cast_triton.cast(given, e5m2, lambda amax: scale_from_amax(amax, largest))


def check(found: FP8Matrices, given: list[torch.Tensor], e5m2: bool) -> None:
    quantizer = Float8CurrentScalingQuantizer(DType.kFloat8E5M2 if e5m2 else DType.kFloat8E4M3, torch.device(DEVICE))
    rows = [len(x) for x in given]
    parts = zip(found.data.split(rows), found.transposed.split(rows), found.scale_inv, given, strict=True)
    for data, transposed, inverse, x in parts:
        if not len(x):
            continue
        wanted = quantizer(x)
        assert torch.equal(data, wanted._data.view(torch.uint8))
        assert torch.equal(transposed.reshape(x.shape[1], len(x)), data.t())
        assert torch.equal(inverse, wanted._scale_inv) and inverse.data_ptr() % 16 == 0


@pytest.mark.parametrize("e5m2", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [([16, 0, 80, 64, 128, 0], 48), ([4], 16), ([0, 0], 16)])
def test_experts(rows: list[int], columns: int, e5m2: bool) -> None:
    """Empty ones, one of zeros only, and magnitudes that differ by powers of ten."""
    g = torch.Generator().manual_seed(columns)
    x = torch.randn(sum(rows), columns, generator=g).bfloat16().to(DEVICE)
    parts = list(x.split(rows))
    for number, part in enumerate(parts):
        part.mul_(0 if number == 3 else 10.0**number)
    check(cast(Matrices.of_rows(x, rows), e5m2), parts, e5m2)


def test_weights() -> None:
    weights = [torch.randn(72, 40, device=DEVICE).mul_(2.0**number).bfloat16() for number in range(5)]
    check(cast(Matrices.of_weights(weights), False), weights, False)
