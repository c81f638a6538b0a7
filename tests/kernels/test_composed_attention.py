"""Attention with capped logits and with sinks, against autograd through its definition."""

import pytest
import torch
from torch import Tensor

from te_models.kernels.composed_attention import composed_attention
from te_models.kernels.sdpa import attention_mask, causal_attention


def by_definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """With a column of sinks beside the scores, which leaves the softmax again."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    scores = q @ k.mT * scale
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    if mask is None:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is None:
        return scores.softmax(-1) @ v
    column = sinks[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1] @ v


def masks(kind: str) -> Tensor | None:
    real = torch.ones(2, 9, dtype=torch.bool)
    real[1, :3] = False
    documents = torch.tensor([[0] * 4 + [1] * 5, [0] * 9])
    window, real, documents = {
        "causal": (None, None, None),
        "window": (4, None, None),
        "padding": (None, real, None),
        "documents": (3, None, documents),
    }[kind]
    return attention_mask(9, window, real, documents, torch.device("cpu"))


@pytest.mark.parametrize("kind", ["causal", "window", "padding", "documents"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize(("cap", "with_sinks"), [(1.5, False), (None, True), (1.5, True)])
def test_outputs_and_gradients(
    heads: tuple[int, int], kind: str, cap: float | None, with_sinks: bool
) -> None:
    torch.manual_seed(1)
    q, k, v = (
        torch.randn(2, 9, count, 5).transpose(1, 2).requires_grad_()
        for count in (heads[0], heads[1], heads[1])
    )
    sinks = torch.linspace(-2, 3, heads[0]).requires_grad_() if with_sinks else None
    inputs = (q, k, v) if sinks is None else (q, k, v, sinks)
    out = composed_attention(q, k, v, masks(kind), 0.7, cap, sinks)
    expected = by_definition(q, k, v, masks(kind), 0.7, cap, sinks)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)
    slope = torch.randn_like(out)
    found, wanted = (torch.autograd.grad(y, inputs, slope) for y in (out, expected))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_a_wide_cap_is_no_cap_and_a_mask_may_be_added() -> None:
    q, k, v = (torch.randn(2, heads, 6, 8) for heads in (4, 2, 2))
    torch.testing.assert_close(
        composed_attention(q, k, v, None, 8**-0.5, 1e4),
        causal_attention(q, k, v),
        atol=1e-5,
        rtol=0,
    )
    seen = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    added = torch.zeros(2, 1, 6, 6).masked_fill(~seen, float("-inf"))
    assert torch.equal(
        composed_attention(q, k, v, added, 0.3, 2.0), composed_attention(q, k, v, seen, 0.3, 2.0)
    )


def test_without_a_mask_the_queries_are_those_of_the_last_keys() -> None:
    """As in a step with a cache; the last query sees all keys."""
    q, k, v = (torch.randn(2, heads, 6, 8) for heads in (4, 2, 2))
    for how in ((2.0, None), (None, torch.randn(4))):
        whole = composed_attention(q, k, v, None, 0.3, *how)
        for count in (1, 2):
            newest = composed_attention(q[:, :, -count:], k, v, None, 0.3, *how)
            torch.testing.assert_close(newest, whole[:, :, -count:])


def test_scores_exist_for_one_row_at_a_time() -> None:
    """Autograd saves only q, k and v, at any length."""
    saved: list[Tensor] = []
    q, k, v = (torch.randn(3, 2, 33, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = composed_attention(q, k, v, None, 0.3, 2.0)
    assert out.dtype == torch.bfloat16 and [t.data_ptr() for t in saved] == [
        t.data_ptr() for t in (q, k, v)
    ]
