"""RoPE, attention and gate as one operation equal the three written out; gated_attention_cases.py has its kernels."""

from typing import Any

import pytest
import torch

from te_models.config.attention import Heads
from te_models.engine import emulated
from te_models.kernels import elementwise
from te_models.kernels.dispatch import PLAIN as PLAIN_KERNELS
from te_models.kernels.dispatch import get_kernels
from te_models.kernels.gated_attention import attention_core, split_heads
from te_models.kernels.sdpa import causal_attention

LAYOUTS = {
    "elementwise": Heads(4, 4, 8, "elementwise"),
    "grouped": Heads(4, 2, 8, "elementwise"),
    "headwise": Heads(6, 3, 4, "headwise"),
    "none": Heads(4, 1, 16, "none"),
    "no power of two": Heads(2, 1, 12, "elementwise"),
    "no power of two, headwise": Heads(3, 1, 20, "headwise"),
    "no power of two, no gate": Heads(2, 1, 24, "none"),
}
BATCH, SEQ, PADDING = 2, 6, 4  # whole groups of four rows


def projection(heads: Heads, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """[N, Q] with rows, and for a headwise gate columns, that only fill up."""
    gate = {"elementwise": heads.query * heads.dim, "headwise": 32, "none": 0}[heads.gate]
    return torch.randn(
        BATCH * SEQ + PADDING, (heads.query + 2 * heads.key) * heads.dim + gate, dtype=dtype
    )


def tables(dim: int, dtype: torch.dtype, per_row: bool) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.rand(*((BATCH, SEQ) if per_row else (SEQ,)), dim // 2) * 6
    angle = torch.cat((angle, angle), dim=-1).to(dtype)
    return angle.cos(), angle.sin()


def written_out(qkvg: torch.Tensor, cos: Any, sin: Any, heads: Heads) -> torch.Tensor:
    q, k, v, gate = split_heads(heads, qkvg[: BATCH * SEQ], BATCH)
    if cos is not None:
        q, k = elementwise.rope(q, cos, sin), elementwise.rope(k, cos, sin)
    out = causal_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)
    return (out if gate is None else elementwise.gate(out, gate)).reshape(BATCH * SEQ, -1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("table", ["by position", "by row", "no rope"])
def test_output_and_gradient_are_those_written_out(layout: str, table: str) -> None:
    heads = LAYOUTS[layout]
    cos, sin = (
        (None, None) if table == "no rope" else tables(heads.dim, torch.float32, table == "by row")
    )
    qkvg = projection(heads, torch.float32)
    one, other = qkvg.clone().requires_grad_(), qkvg.clone().requires_grad_()
    mine = attention_core(one * 1.0, cos, sin, BATCH, SEQ, heads)
    theirs = written_out(other, cos, sin, heads)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    dy = torch.randn_like(mine)
    mine.backward(dy)
    theirs.backward(dy)
    assert one.grad is not None and other.grad is not None
    torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-6)
    assert not one.grad[BATCH * SEQ :].any()


def test_rope_is_in_place_without_a_copy_of_the_projection() -> None:
    heads = LAYOUTS["grouped"]
    qkvg, (cos, sin) = projection(heads, torch.float32), tables(heads.dim, torch.float32, False)
    before = qkvg.clone()
    attention_core(qkvg, cos, sin, BATCH, SEQ, heads)
    turned = heads.query * heads.dim + heads.key * heads.dim
    assert not torch.equal(qkvg[: BATCH * SEQ, :turned], before[: BATCH * SEQ, :turned])
    assert torch.equal(qkvg[:, turned:], before[:, turned:])


def test_a_gpu_whose_cudnn_has_no_such_attention_does_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    kernels = get_kernels(emulated, torch.device("cuda"), compile=None, fused=True)
    assert kernels == PLAIN_KERNELS
    assert (
        get_kernels(emulated, torch.device("cpu"), compile=None, fused=True).attention is not None
    )
