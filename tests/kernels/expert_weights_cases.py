"""FP8 of the weights of all experts, against the emulated engine's cast of each: the same bits.

Run by test_triton_kernels.py in Triton's interpreter and on a GPU.
"""

import pytest
import torch

from te_models.kernels import expert_weights_triton
from te_models.kernels.expert_scales_triton import Delayed
from te_models.kernels.expert_weights_triton import EqualMatrices, cast_equal, cast_equal_transposed
from te_models.kernels.grouped_linear_triton import Locations
from te_models.numerics.formats import DType
from te_models.numerics.quantizers import Float8CurrentScalingQuantizer, Float8Quantizer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Rows, columns and experts; tiles and runs of values that are not full, and whole ones.
SHAPES = [(48, 80, 3), (136, 72, 5), (4, 4, 2), (256, 128, 3)]


def weights_of(rows: int, columns: int, count: int) -> tuple[list[torch.Tensor], EqualMatrices]:
    """Weights in memory of their own, whose magnitudes differ by powers of ten, and the kernels' operand."""
    torch.manual_seed(rows)
    made = [
        (torch.randn(rows, columns) * 10.0 ** (2 * e)).bfloat16().to(DEVICE) for e in range(count)
    ]
    made[1][0, 0] = 0.0
    at = Locations.of(made)
    assert at is not None
    return made, EqualMatrices(made[0], at.places)


@pytest.mark.parametrize(("rows", "columns", "count"), SHAPES)
def test_by_the_largest_magnitude_of_each(
    rows: int, columns: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_weights_triton, "VALUES", 1024)
    made, given = weights_of(rows, columns, count)
    made[0].zero_()
    data, turned, inverse, scale = cast_equal(given, transpose=True)
    assert turned is not None
    quantizer = Float8CurrentScalingQuantizer(DType.kFloat8E4M3, DEVICE)
    for e, weight in enumerate(made):
        wanted = quantizer(weight)
        own = slice(e * rows, e * rows + rows)
        assert torch.equal(data[own], wanted._data.view(torch.uint8))
        assert torch.equal(turned.view(-1, columns, rows)[e], data[own].t())
        assert torch.equal(inverse[e], wanted._scale_inv.squeeze())
        assert torch.equal(1 / scale[e], inverse[e])


@pytest.mark.parametrize(("rows", "columns", "count"), SHAPES)
def test_by_delayed_scales(rows: int, columns: int, count: int) -> None:
    """Which saturate some values, lie apart from each other, and whose amaxes only rise."""
    made, given = weights_of(rows, columns, count)
    scales = torch.full((3 * count,), 100.0, device=DEVICE)
    amaxes = torch.zeros_like(scales)
    amaxes[3] = 1e30
    delayed = Delayed(scales[::3], amaxes[::3])
    data, none, inverse, scale = cast_equal(given, delayed, transpose=False)
    assert none is None and torch.equal(scale, delayed.scale)
    for e, weight in enumerate(made):
        own = slice(e * rows, e * rows + rows)
        quantizer = Float8Quantizer(
            delayed.scale[e : e + 1].clone(), torch.zeros(1, device=DEVICE), DType.kFloat8E4M3
        )
        wanted = quantizer(weight)
        assert torch.equal(data[own], wanted._data.view(torch.uint8))
        assert torch.equal(inverse[e], wanted._scale_inv.squeeze())
        assert amaxes[3 * e] == (1e30 if e == 1 else weight.abs().max().float())
    assert not amaxes[1::3].any() and not amaxes[2::3].any()
    turned = cast_equal_transposed(given, scale).view(count, columns, rows)
    assert torch.equal(turned, data.view(count, rows, columns).transpose(1, 2))
