"""FP8 of many matrices at once, against the emulated engine's cast of each: the same bits.

Run by test_triton_kernels.py in Triton's interpreter and on a GPU.
"""

import pytest
import torch

from te_models.kernels import expert_cast_triton
from te_models.kernels.expert_cast_triton import FP8Matrices, Matrices, cast
from te_models.kernels.groups import LINE, Groups
from te_models.numerics.formats import DType
from te_models.numerics.quantizers import Float8CurrentScalingQuantizer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def used(groups: Groups, columns: int, device: torch.device) -> torch.Tensor:
    """Memory in which something was before."""
    return torch.full((columns, groups.aligned.most), 255, dtype=torch.uint8, device=device)


@pytest.fixture(autouse=True)
def _used_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_cast_triton, "room_for_transposed_rows", used)


def check(found: FP8Matrices, given: list[torch.Tensor], e5m2: bool) -> None:
    quantizer = Float8CurrentScalingQuantizer(
        DType.kFloat8E5M2 if e5m2 else DType.kFloat8E4M3, torch.device(DEVICE)
    )
    rows = [len(x) for x in given]
    lines = [-(-count // LINE) * LINE for count in rows]  # of the transposed copy
    assert found.transposed is not None
    turned = found.transposed[:, : sum(lines)].split(lines, dim=1)
    parts = zip(found.data.split(rows), turned, found.scale_inv, given, strict=True)
    for data, transposed, inverse, x in parts:
        if not len(x):
            assert inverse == 1  # products of no rows are zeros, not NaN
            continue
        wanted = quantizer(x)
        assert torch.equal(data, wanted._data.view(torch.uint8))
        assert torch.equal(transposed[:, : len(x)], data.t())
        assert not transposed[:, len(x) :].any()
        assert torch.equal(inverse, wanted._scale_inv.squeeze())


@pytest.mark.parametrize("e5m2", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns"), [([16, 0, 80, 64, 128, 0], 48), ([4], 16), ([0, 0], 16)]
)
def test_experts(rows: list[int], columns: int, e5m2: bool) -> None:
    """Empty ones, one of zeros only, and magnitudes that differ by powers of ten."""
    g = torch.Generator().manual_seed(columns)
    x = torch.randn(sum(rows), columns, generator=g).bfloat16().to(DEVICE)
    parts = list(x.split(rows))
    for number, part in enumerate(parts):
        part.mul_(0 if number == 3 else 10.0**number)
    check(
        cast(
            Matrices(x, Groups.of(rows, x.device)),
            torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn,
        ),
        parts,
        e5m2,
    )


@pytest.mark.filterwarnings("ignore:overflow")  # of the interpreter
def test_scales_of_every_magnitude() -> None:
    """From amaxes whose quotient overflows to infinity, subnormal ones among them."""
    values = torch.tensor(
        [0.0, 1e-45, 1e-40, 1.3e-36, 1e-30, 1.0, 448.0, 3e38, torch.inf], device=DEVICE
    )
    x = values[:, None, None].expand(-1, 4, 16).reshape(-1, 16).contiguous()
    check(
        cast(Matrices(x, Groups.equal(len(values), 4, x.device)), torch.float8_e4m3fn),
        list(x.split(4)),
        False,
    )
