"""Norms of many tensors in two kernels (optim/norms_triton.py) against sums in FP64.

Run by tests/kernels/test_triton_kernels.py in Triton's interpreter and on a GPU.
"""

import pytest
import torch
from fewer import every
from torch import Tensor

pytest.importorskip("triton")

from te_models.optim import norms_triton
from te_models.optim.norms_triton import tensor_norms

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, FP32 = torch.bfloat16, torch.float32
BLOCK = norms_triton.BLOCK
SIZES = [1, 16, 100, BLOCK, BLOCK + 8, 3 * BLOCK + 5]
# An element's square is rounded once and then in fewer than 62 sums: at most 31 in a thread, 5 in a warp and 3 between
# warps, as many levels at most for the blocks. The root halves relative errors, and is rounded once.
BOUND = (63 / 2 + 1) * 2.0**-24


def tensors(sizes: list[int], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = []
    for place, size in enumerate(sizes):
        values.append((torch.randn(size, generator=generator) * 10.0**-place).to(DEVICE, dtype))
    return values


def assert_norms(found: Tensor, of: list[Tensor]) -> None:
    right = torch.stack([tensor.double().norm() for tensor in of])
    torch.testing.assert_close(found.double(), right, rtol=BOUND, atol=0)


@pytest.mark.parametrize(("dtype", "shift"), every(2, [BF16, FP32], [0, 1]))
def test_norms_are_of_each_tensor(dtype: torch.dtype, shift: int) -> None:
    """`shift` makes tensors that begin at odd addresses."""
    values = [tensor[shift:] for tensor in tensors([size + shift for size in SIZES], dtype)]
    assert_norms(tensor_norms(values), values)


def test_dtypes_gaps_and_nothing() -> None:
    """BF16 beside FP32, a transposed matrix, a slice of one, and a shard without rows, in any order."""
    bf16 = tensors([48, 300], BF16)
    matrix = tensors([64 * 40], FP32)[0].view(64, 40)
    values = [bf16[0], matrix.t(), matrix[:, :8], bf16[1].new_empty(0, 7), bf16[1]]
    assert_norms(tensor_norms(values), values)
    assert tensor_norms([bf16[0].new_empty(0)]).tolist() == [0.0]


def test_tensors_may_move_and_be_left_out() -> None:
    """Tables belong to sizes, so other tensors of the same sizes, and fewer of them, have their own norms."""
    kept = []
    for seed in range(3):
        values = tensors([64, 300, 64], FP32, seed)
        kept.append(values)  # so that the next ones are elsewhere
        assert_norms(tensor_norms(values), values)
        assert_norms(tensor_norms(values[1:]), values[1:])


def test_more_blocks_than_are_added_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms_triton, "SUMS", 4)
    values = tensors([9 * BLOCK + 1, 5], BF16)
    assert_norms(tensor_norms(values), values)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_norm_of_what_is_not_finite_is_not(bad: float) -> None:
    values = tensors([BLOCK + 9, 20], BF16)
    values[0][-1] = bad
    norms = tensor_norms(values)
    assert not norms[0].isfinite()
    assert_norms(norms[1:], values[1:])
