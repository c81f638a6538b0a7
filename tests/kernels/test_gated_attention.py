"""RoPE, attention and gate as one operation equal the three written out; gated_attention_cases.py has its kernels."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from te_models.config.attention import Heads
from te_models.engine import emulated
from te_models.kernels import elementwise
from te_models.kernels.attention_parts import PLAIN, Operations, Rotation, split_heads
from te_models.kernels.dispatch import PLAIN as PLAIN_KERNELS
from te_models.kernels.dispatch import get_kernels
from te_models.kernels.gated_attention import AttentionSetting, attention_core
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


def setting(
    batch: int, seq: int, heads: Heads, cos: Any, sin: Any, **options: Any
) -> AttentionSetting:
    """A setting whose queries and keys turn by the same tables."""
    turn = None if cos is None else Rotation(cos, sin)
    return AttentionSetting(batch, batch * seq, heads, turn, turn, **options)


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
    mine = attention_core(one * 1.0, setting(BATCH, SEQ, heads, cos, sin))
    theirs = written_out(other, cos, sin, heads)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    dy = torch.randn_like(mine)
    mine.backward(dy)
    theirs.backward(dy)
    assert one.grad is not None and other.grad is not None
    torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-6)
    assert not one.grad[BATCH * SEQ :].any()


@dataclass(frozen=True)
class Kind:
    """What happens to queries and keys of some family."""

    heads: Heads
    norm: str = "head"  # "all_heads" or "none"
    zero_centered: bool = False
    rotated: float | None = 1.0  # share of the channels; None: no RoPE
    interleaved: bool = False
    query_scale: bool = False
    scale: float | None = None
    softplus: bool = False
    per_row: bool = False  # positions that differ from row to row

    @property
    def together(self) -> bool:
        """Whether all heads have one norm."""
        return self.norm == "all_heads"

    def weights(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """The weights of both norms."""
        if self.norm == "none":
            return None, None
        sizes = (self.heads.q_size, self.heads.kv_size) if self.together else (self.heads.dim,) * 2
        torch.manual_seed(2)
        q, k = (torch.randn(size, dtype=torch.float64) for size in sizes)
        return q.to(dtype), k.to(dtype)

    def rotation(self, dtype: torch.dtype) -> Rotation | None:
        """The tables of the positions."""
        if self.rotated is None:
            return None
        torch.manual_seed(3)
        size = int(self.heads.dim * self.rotated)
        return Rotation(*tables(size, dtype, self.per_row), self.interleaved)

    def scales(self, dtype: torch.dtype) -> Tensor:
        """The factor of each query."""
        return (
            1 + torch.arange(SEQ, dtype=dtype) / 8
            if self.query_scale
            else torch.ones(SEQ, dtype=dtype)
        )


EPS = 1e-3
KINDS = {
    "Qwen3": Kind(LAYOUTS["grouped"]),
    "Qwen3.5": Kind(Heads(4, 2, 16, "elementwise"), zero_centered=True, rotated=0.25),
    "Gemma": Kind(Heads(2, 1, 24, "none"), zero_centered=True, scale=0.3, per_row=True),
    "GLM": Kind(Heads(2, 1, 16, "none"), norm="none", rotated=0.5, interleaved=True),
    "GLM-4.5": Kind(Heads(2, 1, 20, "elementwise"), rotated=0.4, interleaved=True),
    "OLMo 2": Kind(Heads(3, 1, 12, "none"), norm="all_heads"),
    "OLMo 2, without RoPE": Kind(Heads(4, 2, 8, "elementwise"), norm="all_heads", rotated=None),
    "OLMo 2, partial": Kind(Heads(2, 2, 16, "none"), norm="all_heads", rotated=0.5, per_row=True),
    "SmolLM3's layers without RoPE": Kind(Heads(2, 1, 12, "none"), rotated=None),
    "Ministral 3": Kind(Heads(2, 1, 16, "none"), norm="none", query_scale=True),
    "scaled queries without RoPE": Kind(
        Heads(2, 1, 12, "none"), norm="none", rotated=None, query_scale=True
    ),
    "Laguna": Kind(Heads(4, 2, 12, "elementwise"), softplus=True),
    "Laguna, headwise": Kind(Heads(3, 1, 8, "headwise"), softplus=True, rotated=0.5),
}


def by_definition(qkvg: Tensor, kind: Kind, weights: Sequence[Tensor | None]) -> Tensor:
    """Attention in FP64, query by query, of qkvg [N, Q]."""
    heads = kind.heads
    q, k, v, gate = split_heads(heads, qkvg[: BATCH * SEQ], BATCH)
    turn = kind.rotation(torch.float64)
    turned = []
    for x, weight in zip((q, k), weights, strict=True):
        if weight is not None:
            flat = x.flatten(2) if kind.together else x
            flat = flat / (flat.square().mean(-1, keepdim=True) + EPS).sqrt()
            x = (flat * (weight + kind.zero_centered)).view_as(x)
        turned.append(
            x if turn is None else torch.stack([pair_by_pair(x, turn, i) for i in range(SEQ)], 1)
        )
    q, k = turned
    q = q * kind.scales(torch.float64)[None, :, None, None]
    scale = heads.dim**-0.5 if kind.scale is None else kind.scale
    group = heads.query // heads.key
    rows = []
    for i in range(SEQ):
        keys, values = (t[:, : i + 1].repeat_interleave(group, 2) for t in (k, v))
        weight = (torch.einsum("bah,bsah->bas", q[:, i], keys) * scale).softmax(-1)
        rows.append(torch.einsum("bas,bsah->bah", weight, values))
    out = torch.stack(rows, 1)
    if gate is not None:
        out = out * (torch.log1p(gate.exp()) if kind.softplus else 1 / (1 + (-gate).exp()))
    return out.reshape(BATCH * SEQ, -1)


def pair_by_pair(x: Tensor, turn: Rotation, place: int) -> Tensor:
    """x [B, heads, H] at a place, turned as complex numbers."""
    x = x[:, place]
    size = turn.cos.shape[-1]
    cos, sin = (t[..., place, : size // 2] for t in (turn.cos, turn.sin))
    angle = torch.complex(cos, sin)
    angle = angle[:, None] if angle.dim() == 2 else angle
    channels = range(0, size, 2) if turn.interleaved else range(size // 2)
    out = list(x.unbind(-1))
    for pair, first in enumerate(channels):
        second = first + (1 if turn.interleaved else size // 2)
        turned = torch.complex(x[..., first], x[..., second]) * angle[..., pair]
        out[first], out[second] = turned.real, turned.imag
    return torch.stack(out, -1)


def check(name: str, ops: Operations, dtype: torch.dtype) -> None:
    """Output and every gradient equal those in FP64 by definition."""
    kind = KINDS[name]
    torch.manual_seed(0)
    qkvg = projection(kind.heads)
    turn = kind.rotation(dtype)
    scales = kind.scales(dtype)[:, None]
    query_turn = turn
    if turn is None and kind.query_scale:
        query_turn = Rotation(scales.expand(-1, kind.heads.dim), torch.zeros(SEQ, kind.heads.dim))
    elif turn is not None:
        query_turn = turn._replace(cos=turn.cos * scales, sin=turn.sin * scales)
    own = AttentionSetting(
        BATCH, BATCH * SEQ, kind.heads, query_turn, turn, eps=EPS, zero_centered=kind.zero_centered,
        scale=kind.scale, softplus=kind.softplus, ops=ops,
    )  # fmt: skip
    inputs = [qkvg.to(dtype), *(w for w in kind.weights(dtype) if w is not None)]
    leaves = [x.clone().requires_grad_() for x in inputs]
    q_weight, k_weight = leaves[1:] or (None, None)
    mine = attention_core(leaves[0] * 1.0, own, q_weight=q_weight, k_weight=k_weight)
    exact = [x.double().requires_grad_() for x in inputs]
    theirs = by_definition(exact[0], kind, exact[1:] or [None, None])
    dy = torch.randn_like(theirs)
    found = [mine, *torch.autograd.grad(mine, leaves, dy.to(dtype))]
    wanted = [theirs, *torch.autograd.grad(theirs, exact, dy)]
    for part, one, other in zip(
        ("output", "qkvg", "q_norm", "k_norm"), found, wanted, strict=False
    ):
        gap = float(((one.double() - other).norm() / other.norm()).detach())
        assert gap < 2e-6, f"{name}, {part}: {gap:.2g} off"  # FP32 rounds to 6e-8; sums of 48 terms


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_query_and_key_equals_fp64(kind: str) -> None:
    check(kind, PLAIN, torch.float32)


def test_rope_is_in_place_without_a_copy_of_the_projection() -> None:
    heads = LAYOUTS["grouped"]
    qkvg, (cos, sin) = projection(heads, torch.float32), tables(heads.dim, torch.float32, False)
    before = qkvg.clone()
    attention_core(qkvg, setting(BATCH, SEQ, heads, cos, sin))
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
