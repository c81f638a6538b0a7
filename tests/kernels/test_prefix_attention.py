"""Causal attention of the last queries of a row to all of its keys, beside all queries' attention."""

from typing import Any

import pytest
import torch
from torch import Tensor

from te_models.kernels import prefix_attention as prefix
from te_models.kernels.prefix_attention import prefix_attention
from te_models.kernels.sdpa import causal_attention, gradient_like


def inputs(
    batch: int, heads: int, key_heads: int, keys: int, size: int, device: str, dtype: torch.dtype
) -> list[Tensor]:
    """Return q, k and v of whole rows [B, heads, keys, size]: views of [B, keys, heads, size], as a model has them."""
    torch.manual_seed(0)
    shapes = [(batch, keys, count, size) for count in (heads, key_heads, key_heads)]
    return [torch.randn(shape, device=device, dtype=dtype).transpose(1, 2) for shape in shapes]


def errors(actual: list[Tensor], exact: list[Tensor]) -> list[float]:
    """Return the relative errors of the output and the gradients of q, k and v."""
    pairs = zip(actual, exact, strict=True)
    return [float((one.double() - other).norm() / other.norm()) for one, other in pairs]


def results(q: Tensor, k: Tensor, v: Tensor, queries: int) -> list[Tensor]:
    """Return attention of the last queries, and the gradients of a sum of it with fixed factors."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    last = leaves[0][:, :, -queries:]
    if q.dtype == torch.float64:
        # The reference: attention of all queries, of which the last ones count.
        out = causal_attention(*leaves)[:, :, -queries:]
    else:
        out = prefix_attention(last, leaves[1], leaves[2])
    torch.manual_seed(1)
    slope = torch.randn(out.transpose(1, 2).shape, dtype=torch.float64).transpose(1, 2)
    slope = slope.to(torch.bfloat16).to(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, slope)]


@pytest.mark.parametrize(("queries", "keys"), [(8, 8), (5, 21), (16, 64)])
def test_last_queries_see_what_they_see_among_all(queries: int, keys: int) -> None:
    q, k, v = inputs(2, 4, 2, keys, 8, "cpu", torch.float32)
    exact = results(q.double(), k.double(), v.double(), queries)
    assert max(errors(results(q, k, v, queries), exact)) < 1e-5


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
    q, k, v = inputs(batch, heads, key_heads, keys, size, "cuda", torch.bfloat16)
    exact = [x.cpu().double() for x in (q, k, v)]
    actual = [x.cpu() for x in results(q, k, v, queries)]
    assert max(errors(actual, results(*exact, queries=queries))) < 2**-7


def piece_results(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Return attention of the first and the last quarter of a row, and its gradients, as context parallelism has it.

    Both pieces have calls of cuDNN with equal shapes and strides; their gradients are parts of one tensor.
    """
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    piece = q.shape[2] // 4
    queries = leaves[0].chunk(4, dim=2)
    if q.dtype == torch.float64:
        every = causal_attention(*leaves).chunk(4, dim=2)
        out = torch.cat((every[0], every[3]), dim=2)
    else:
        first = prefix_attention(queries[0], leaves[1][:, :, :piece], leaves[2][:, :, :piece])
        last = prefix_attention(queries[3], leaves[1], leaves[2])
        out = torch.cat((first, last), dim=2)
    torch.manual_seed(1)
    slope = torch.randn(out.transpose(1, 2).shape, dtype=torch.float64).transpose(1, 2)
    slope = slope.to(torch.bfloat16).to(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, slope)]


def like_cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> list[Any]:
    """Return what cuDNN's attention returns: its output has the order of the strides of q."""
    wide = [x.float().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v)]
    scores = q.float() @ wide[0].mT * scale
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
    out = torch.empty_like(q).copy_(scores.softmax(-1) @ wide[1])
    return [out, scores.logsumexp(-1), *[None] * 6]


def like_cudnn_backward(
    slope: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    log_sum: Tensor,
    random: object,
    causal: bool,
    scale: float,
) -> list[Tensor]:
    """Return the gradients of q, k and v, as a graph that was made for the strides of `like_cudnn`'s output."""
    assert out.stride() == slope.stride() == torch.empty_like(q).stride()
    groups = (k.shape[1], q.shape[1] // k.shape[1])
    wide = [x.float().repeat_interleave(groups[1], 1) for x in (k, v)]
    scores = q.float() @ wide[0].mT * scale
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
    shares = (scores - log_sum[..., None]).exp()
    slope = slope.float()
    change = slope @ wide[1].mT - (slope * out.float()).sum(-1, keepdim=True)
    dscores = shares * change * scale
    dk = (dscores.mT @ q.float()).unflatten(1, groups).sum(2)
    dv = (shares.mT @ slope).unflatten(1, groups).sum(2)
    return [(dscores @ wide[0]).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)]


def test_two_parts_have_the_strides_that_cudnn_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "on_gpu", lambda _: True)
    monkeypatch.setattr(prefix, "suits_cudnn", lambda *_: True)
    monkeypatch.setattr(prefix, "_cudnn", like_cudnn)
    monkeypatch.setattr(prefix, "_cudnn_backward", like_cudnn_backward)
    q, k, v = inputs(2, 4, 2, 64, 8, "cpu", torch.bfloat16)
    exact = piece_results(q.double(), k.double(), v.double())
    assert max(errors(piece_results(q, k, v), exact)) < 2**-7


def test_a_gradient_gets_the_strides_of_an_output() -> None:
    out = torch.zeros(2, 5, 3, 4).transpose(1, 2)
    gradient = torch.randn(2, 6, 5, 4)[:, :3]
    same = gradient_like(gradient, out.stride())
    assert same.stride() == out.stride() and torch.equal(same, gradient)
    # The stride of a dimension of size 1 is of no importance, and copying costs time.
    alone = out[:1].as_strided((1, 3, 5, 4), (7, 4, 12, 1))
    assert gradient_like(alone, out.stride()) is alone


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "key_heads", "size"), [(4, 2, 128), (1, 4, 64)])
def test_pieces_of_rows_on_a_gpu(batch: int, key_heads: int, size: int) -> None:
    """Both pieces have causal parts with equal shapes, for which PyTorch keeps one graph of cuDNN's backward."""
    q, k, v = inputs(batch, 4, key_heads, 2048, size, "cuda", torch.bfloat16)
    exact = [x.cpu().double() for x in (q, k, v)]
    actual = [x.cpu() for x in piece_results(q, k, v)]
    assert max(errors(actual, piece_results(*exact))) < 2**-7
