"""Rows to experts and back in Triton: the plain operations' bits, and sums in FP64.

Run by test_triton_kernels.py in Triton's interpreter and on a GPU.
"""

import pytest
import torch

from te_models.kernels import expert_rows, expert_rows_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (
    [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]
)  # the interpreter cuts BF16 off


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "k", "width"), [(1, 1, 8), (7, 3, 72), (20, 2, 2100)])
def test_rows_go_to_experts_and_back(tokens: int, k: int, width: int, dtype: torch.dtype) -> None:
    """With rows of padding, which no token has, and a token of padding, which has no row."""
    g = torch.Generator().manual_seed(width)
    count = tokens * k + 5
    places = torch.randperm(count, generator=g)[: tokens * k].view(tokens, k)
    places[0] = count if tokens > 1 else places[0]
    token = torch.full((count + 1,), tokens).scatter(
        0, places.flatten(), torch.arange(tokens).repeat_interleave(k)
    )
    token, places = token[:count].to(DEVICE), places.to(DEVICE)
    x, rows = (torch.randn(n, width, generator=g).to(DEVICE, dtype) for n in (tokens, count))
    factor, weights = (
        torch.rand(count, generator=g).to(DEVICE),
        torch.rand(tokens, k, generator=g).to(DEVICE),
    )

    for by in (None, factor):
        found, wanted = (
            made.gather(x, token, by, None)[0]
            for made in (expert_rows_triton.TRITON, expert_rows.PLAIN)
        )
        assert torch.equal(found, wanted)
        assert (found[token == tokens] == 0).all()
    for by in (None, weights):
        found, wanted = (
            made.total(rows, places, by) for made in (expert_rows_triton.TRITON, expert_rows.PLAIN)
        )
        assert torch.equal(found, wanted)
    padded = torch.cat((x, x.new_zeros(1, width))).double()
    dots = (padded[token] * rows.double()).sum(1)
    for made in (expert_rows_triton.TRITON, expert_rows.PLAIN):
        found = made.gather(x, token, factor, rows)[1]
        torch.testing.assert_close(found.double(), dots, rtol=0, atol=width * 2.0**-22)
