"""The gradient of kernels/embedding_triton.py against a sum in FP64.

Run by test_triton_kernels.py in Triton's interpreter and on a GPU.
"""

import pytest
import torch
from fewer import every
from torch import nn

from te_models.kernels import embedding_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter cuts BF16 off where a GPU rounds it.
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8 if DEVICE == "cuda" else 2.0**-7}


@pytest.mark.parametrize(
    ("tokens", "columns", "dtype"),
    every(3, ["few", "one", "each", "runs of 8"], [24, 512, 700], ROUNDING),
)
def test_each_token_gets_the_sum_of_its_rows(tokens: str, columns: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(columns)
    ids = {
        "few": torch.randint(0, 5, (61,), generator=g),
        "one": torch.full((50,), 6),
        "each": torch.randperm(40, generator=g),
        "runs of 8": torch.arange(48) // 8,
    }[tokens]
    dy = torch.randn(len(ids), columns, generator=g).to(dtype)
    wanted = torch.zeros(40, columns, dtype=torch.float64).index_add_(0, ids, dy.double())
    size = torch.zeros(40, columns, dtype=torch.float64).index_add_(0, ids, dy.double().abs())
    found = embedding_triton.gradient(dy.to(DEVICE), ids.to(DEVICE), 40)
    assert found.dtype == dtype
    error = (found.cpu().double() - wanted).abs()
    assert (error <= ROUNDING[dtype] * wanted.abs() + 1e-6 * size).all()
    assert (found.cpu()[size.sum(1) == 0] == 0).all()


def test_a_module_is_the_same_through_it() -> None:
    module, ids = (
        nn.Embedding(11, 48, device=DEVICE),
        torch.tensor([[1, 4, 4], [10, 1, 1]], device=DEVICE),
    )
    out = embedding_triton.embedding(module, ids)
    assert torch.equal(out, module(ids)) and out.grad_fn is not None
    dy = torch.randn_like(out)
    (wanted,) = torch.autograd.grad(module(ids), module.weight, dy)
    (found,) = torch.autograd.grad(out, module.weight, dy)
    torch.testing.assert_close(found, wanted)
    with torch.no_grad():
        assert embedding_triton.embedding(module, ids).grad_fn is None
