"""Causal attention of the last queries of a row to all of its keys, beside all queries' attention."""

import pytest
import torch
from torch import Tensor

from te_models.kernels.prefix_attention import prefix_attention
from te_models.kernels.sdpa import causal_attention


def made(
    batch: int, heads: int, key_heads: int, keys: int, size: int, device: str, dtype: torch.dtype
) -> list[Tensor]:
    """Return q, k and v of whole rows [B, heads, keys, size], as a model has them: views of tokens first."""
    torch.manual_seed(0)
    shapes = [(batch, keys, count, size) for count in (heads, key_heads, key_heads)]
    return [torch.randn(shape, device=device, dtype=dtype).transpose(1, 2) for shape in shapes]


def errors(found: list[Tensor], wanted: list[Tensor]) -> list[float]:
    """Return the relative errors of the output and the gradients of q, k and v."""
    pairs = zip(found, wanted, strict=True)
    return [float((one.double() - other).norm() / other.norm()) for one, other in pairs]


def results(q: Tensor, k: Tensor, v: Tensor, queries: int) -> list[Tensor]:
    """Return attention of the last queries, and the gradients of a sum of it with fixed factors."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    last = leaves[0][:, :, -queries:]
    if (
        q.dtype == torch.float64
    ):  # the judge: attention of all queries, of which the last ones count
        out = causal_attention(*leaves)[:, :, -queries:]
    else:
        out = prefix_attention(last, leaves[1], leaves[2])
    torch.manual_seed(1)
    slope = torch.randn(out.transpose(1, 2).shape, dtype=torch.float64).transpose(1, 2)
    slope = slope.to(torch.bfloat16).to(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, slope)]


@pytest.mark.parametrize(("queries", "keys"), [(8, 8), (5, 21), (16, 64)])
def test_last_queries_see_what_they_see_among_all(queries: int, keys: int) -> None:
    q, k, v = made(2, 4, 2, keys, 8, "cpu", torch.float32)
    wanted = results(q.double(), k.double(), v.double(), queries)
    assert max(errors(results(q, k, v, queries), wanted)) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("batch", "heads", "key_heads", "queries", "keys", "size"),
    [
        (2, 4, 2, 256, 640, 64),
        (1, 8, 8, 300, 1000, 128),
        (1, 4, 1, 512, 4096, 128),
        (2, 4, 2, 200, 333, 96),
        (1, 4, 2, 256, 1024, 256),
    ],
)
def test_on_a_gpu_in_bf16(
    batch: int, heads: int, key_heads: int, queries: int, keys: int, size: int
) -> None:
    """Outputs, gradients and what kernels save in BF16 are rounded, each by 2^-9 at most."""
    q, k, v = made(batch, heads, key_heads, keys, size, "cuda", torch.bfloat16)
    exact = [x.cpu().double() for x in (q, k, v)]
    found = [x.cpu() for x in results(q, k, v, queries)]
    assert max(errors(found, results(*exact, queries))) < 2**-7
