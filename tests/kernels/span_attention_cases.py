"""Attention in spans equals attention under a mask; test_triton_kernels.py runs this with TRITON_INTERPRET=1."""

from typing import Any

import pytest
import torch
from bits import assert_same_bits
from fewer import every
from kernels.test_composed_attention import by_definition
from kernels.test_gated_attention import setting
from torch import Tensor

from te_models.config.attention import Heads
from te_models.kernels import gated_attention_triton, span_attention_triton
from te_models.kernels.attention_parts import split_heads
from te_models.kernels.gated_attention import attention_core
from te_models.kernels.sdpa import attention_mask
from te_models.kernels.span_attention_triton import spans

# batch, query heads, key heads, tokens, channels, window, lengths of the documents of each row
CASES: list[tuple[int, int, int, int, int, int | None, list[list[int]] | None]] = [
    (2, 2, 1, 70, 16, None, [[1, 33, 36], [64, 6]]),
    (1, 1, 1, 33, 24, 5, None),  # channels that are no power of two
    (2, 1, 1, 64, 16, 9, [[20, 44], [64]]),
    (1, 1, 1, 1, 16, None, [[1]]),
    (1, 1, 1, 65, 16, 64, None),
    (3, 1, 1, 40, 16, 1, [[40], [13, 27], [39, 1]]),  # every query sees itself alone
]
OWN_BLOCKS = {
    name: dict(getattr(span_attention_triton, name))
    for name in ("FORWARD", "GRAD_QUERY", "GRAD_KEY")
}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
DTYPE, GROW = (torch.bfloat16, 4) if ON_GPU else (torch.float32, 1)
# BF16 rounds each probability, each gradient of a score and each result by at most 2^-9; RoPE rounds q and k again.
BOUND = 4 * 2**-9 if ON_GPU else 1e-5


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let short rows have several blocks, on a CPU."""
    torch.manual_seed(0)
    for name, block in (
        ("FORWARD", (32, 16, 4, 1)),
        ("GRAD_QUERY", (32, 16, 4, 1)),
        ("GRAD_KEY", (16, 32, 4, 1)),
    ):
        if not ON_GPU:
            monkeypatch.setattr(span_attention_triton, name, {64: block})


def document_ids(lengths: list[list[int]] | None) -> Tensor | None:
    """int64 [B, S], or None."""
    if lengths is None:
        return None
    rows = [torch.arange(len(row)).repeat_interleave(torch.tensor(row) * GROW) for row in lengths]
    return torch.stack(rows).to(DEVICE)


def distance(name: str, found: Tensor, expected: Tensor) -> None:
    """Compare norms, relative to the expected."""
    found, expected = found.detach().double(), expected.detach().double()
    assert found.shape == expected.shape
    gap = float((found - expected).norm() / expected.norm())
    assert gap < BOUND, f"{name}: {gap:.2g} off, {BOUND:.2g} allowed"


@pytest.mark.parametrize(
    ("case", "sunk", "cap"), every(2, CASES, [False, True], [None, 1.5]), ids=str
)
def test_output_and_gradients_are_those_by_definition(
    case: tuple[Any, ...], sunk: bool, cap: float | None
) -> None:
    """In FP64, with sinks and a cap of the logits and without; on a GPU with four times the tokens and channels."""
    batch, heads, shared, seq, dim, window, lengths = case
    seq, dim, window = seq * GROW, dim * GROW, window and window * GROW
    ids = document_ids(lengths)
    mask = attention_mask(seq, window, None, ids, DEVICE)
    projection = torch.randn(batch, seq, heads + 2 * shared, dim, dtype=DTYPE, device=DEVICE)
    inputs = [t.transpose(1, 2).detach() for t in projection.split([heads, shared, shared], 2)]
    inputs += [torch.randn(heads, dtype=DTYPE, device=DEVICE)] * sunk
    leaves = [t.requires_grad_() for t in inputs]
    out = spans(seq, window, ids, DEVICE)(*leaves[:3], sinks=leaves[3] if sunk else None, cap=cap)
    dy = (
        out.detach() if sunk else torch.randn_like(out)
    )  # a sink's gradient is then a sum of one sign
    found = (out, *torch.autograd.grad(out, leaves, dy))
    exact = [t.detach().double().requires_grad_() for t in inputs]
    wanted = by_definition(
        *exact[:3], mask=mask, scale=dim**-0.5, cap=cap, sinks=exact[3] if sunk else None
    )
    expected = (wanted, *torch.autograd.grad(wanted, exact, dy.double()))
    for name, one, other in zip(
        ("output", "dq", "dk", "dv", "dsinks"), found, expected, strict=False
    ):
        if (
            name in ("output", "dv") or sunk or (seq > 1 and window != 1)
        ):  # of one key the scores have no gradient
            distance(name, one, other)


@pytest.mark.parametrize(("window", "lengths"), [(None, None), (7, [[20, 13], [33]])])
def test_heads_of_512_channels(
    window: int | None, lengths: list[list[int]] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 4's, causal, in windows and packed, with the blocks that run on a GPU: finite, and those in FP64."""
    for name, block in OWN_BLOCKS.items():
        monkeypatch.setattr(span_attention_triton, name, block)
    seq, window = 33 * GROW, window and window * GROW
    ids = document_ids(lengths)
    mask = attention_mask(seq, window, None, ids, DEVICE)
    shapes = [(2, 2, seq, 512), (2, 1, seq, 512), (2, 1, seq, 512)]
    dtype = torch.bfloat16 if ON_GPU else torch.float16  # the interpreter multiplies no BF16
    inputs = [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]
    inputs += [torch.randn(2, device=DEVICE).to(dtype)]
    leaves = [t.requires_grad_() for t in inputs]
    how = dict(scale=0.05, sinks=leaves[3])
    q, k, v, _ = leaves
    out = spans(seq, window, ids, DEVICE)(q, k, v, **how)
    dy = out.detach()
    found = (out, *torch.autograd.grad(out, leaves, dy))
    exact = [t.detach().double().requires_grad_() for t in inputs]
    wanted = by_definition(*exact[:3], mask=mask, scale=0.05, cap=None, sinks=exact[3])
    expected = (wanted, *torch.autograd.grad(wanted, exact, dy.double()))
    for name, one, other in zip(
        ("output", "dq", "dk", "dv", "dsinks"), found, expected, strict=True
    ):
        assert one.isfinite().all(), name
        other = other.detach()
        gap = float((one.detach().double() - other).norm() / other.norm())
        assert gap < (4 * 2**-9 if ON_GPU else 4 * 2**-11), f"{name}: {gap:.2g} off"


def test_the_gradients_are_the_same_in_every_run() -> None:
    inputs = [
        torch.randn(1, 2, 40 * GROW, 16, device=DEVICE, dtype=DTYPE, requires_grad=True)
        for _ in range(3)
    ]
    attention = spans(40 * GROW, 9, None, DEVICE)
    runs = [torch.autograd.grad(attention(*inputs).square().sum(), inputs) for _ in range(2)]
    for name, *both in zip("qkv", *runs, strict=True):
        assert_same_bits(name, *both)


def test_attention_as_one_operation() -> None:
    """RoPE, attention in spans with sinks and the gate equal the three written out in FP64."""
    heads, seq = Heads(2, 1, 16, "elementwise"), 40 * GROW
    ids = document_ids([[30, 10], [40]])
    angle = torch.rand(2, seq, 8, device=DEVICE).repeat(1, 1, 2)
    cos, sin = angle.cos().to(DTYPE), angle.sin().to(DTYPE)
    qkvg = torch.randn(2 * seq, 6 * 16, device=DEVICE, dtype=DTYPE)
    one, other = qkvg.clone().requires_grad_(), qkvg.double().requires_grad_()
    operations = gated_attention_triton.TRITON._replace(fp8=None)
    sinks = torch.tensor([0.5, 2.0], device=DEVICE, requires_grad=True)
    seen = spans(seq, 7, ids, DEVICE)
    own = setting(2, seq, heads, cos, sin, ops=operations, spans=seen)
    mine = attention_core(one * 1.0, own, sinks=sinks)
    q, k, v, gate = split_heads(heads, other, 2)
    q, k = (
        t * cos[:, :, None] + torch.cat((-t[..., 8:], t[..., :8]), -1) * sin[:, :, None]
        for t in (q, k)
    )
    mask = attention_mask(seq, 7, None, ids, DEVICE)
    turned = [t.transpose(1, 2) for t in (q, k, v)]
    exact = sinks.detach().double().requires_grad_()
    mixed = by_definition(*turned, mask=mask, scale=16**-0.5, cap=None, sinks=exact)
    theirs = (mixed.transpose(1, 2) * torch.sigmoid(gate)).reshape(2 * seq, -1)
    dy = (
        mine.detach()
    )  # a sink's gradient is then a sum of one sign, whose rounding is relative to it
    distance("output", mine, theirs)
    found = torch.autograd.grad(mine, [one, sinks], dy)
    expected = torch.autograd.grad(theirs, [other, exact], dy.double())
    for name, *both in zip(("gradient", "dsinks"), found, expected, strict=True):
        distance(name, *both)
