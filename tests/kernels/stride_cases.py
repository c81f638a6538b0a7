"""Triton kernels on gradients and inputs of any strides, in heads of any size, and beyond 2**31 elements.

test_triton_kernels.py runs this in Triton's interpreter and on a GPU. The reference is written out in FP64 here.
"""

import math
from collections.abc import Callable

import pytest
import torch
from fewer import every
from kernels.test_gated_attention import setting
from torch import Tensor

from te_models.config.attention import Heads
from te_models.kernels import (
    embedding_triton,
    flash_4,
    gate_triton,
    gated_attention_triton,
    handover_triton,
    head_copy_triton,
    lm_head,
    lm_head_triton,
    norm_fp8_triton,
)
from te_models.kernels.attention_parts import Rotation, split_heads
from te_models.kernels.gated_attention import attention_core
from te_models.kernels.handover import CastScale
from te_models.kernels.span_attention_triton import Spans, spans

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
# BF16 rounds each probability, each gradient of a score and each result by at most 2^-9; RoPE rounds q and k again.
BOUND = 4 * 2**-9 if ON_GPU else 1e-5
TOKENS, WINDOW, DOCUMENTS = 36, 9, [[22, 14], [1, 35]]
SIZES = [80, 2, 32, 64, 128, 192, 256, 112, 96]  # the first is not slow
GATES = ["elementwise", "headwise", "none"]


def attend(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, window: int) -> Tensor:
    """Attention [B, S, A, H] in FP64, query by query: over its own document, at most `window` keys, itself included."""
    rows = []
    for row in range(len(q)):
        found = []
        for i in range(q.shape[1]):
            seen = [
                j
                for j in range(max(0, i - window + 1), i + 1)
                if documents[row, j] == documents[row, i]
            ]
            group = q.shape[2] // k.shape[2]
            keys, values = (t[row, seen].repeat_interleave(group, 1) for t in (k, v))
            weights = (
                torch.einsum("ah,jah->aj", q[row, i], keys) / math.sqrt(q.shape[-1])
            ).softmax(-1)
            found.append(torch.einsum("aj,jah->ah", weights, values))
        rows.append(torch.stack(found))
    return torch.stack(rows)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of [B, S, A, H], pair by pair: channels i and i + H / 2."""
    half = x.shape[-1] // 2
    one, two, c, s = x[..., :half], x[..., half:], cos[..., None, :half], sin[..., None, :half]
    return torch.cat((one * c - two * s, two * c + one * s), -1)


def distance(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference, relative to the expected."""
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(("size", "gate"), every(len(SIZES) + len(GATES), SIZES, GATES, rest=2))
def test_attention_in_spans_serves_heads_of_any_size(size: int, gate: str) -> None:
    """RoPE, attention over documents in a window, and the gate, in one operation and in FP64; dy is one number."""
    torch.manual_seed(size)
    heads = Heads(2, 1, size, gate)
    gates = {"elementwise": 2 * size, "headwise": 32, "none": 0}[gate]
    documents = torch.stack(
        [torch.arange(2).repeat_interleave(torch.tensor(row)) for row in DOCUMENTS]
    )
    angle = torch.rand(2, TOKENS, size // 2, device=DEVICE).repeat(1, 1, 2) * 6
    cos, sin = angle.cos().to(DTYPE), angle.sin().to(DTYPE)
    qkvg = torch.randn(2 * TOKENS, 4 * size + gates, device=DEVICE, dtype=DTYPE)
    one, other = qkvg.clone().requires_grad_(), qkvg.cpu().double().requires_grad_()
    operations = gated_attention_triton.TRITON._replace(fp8=None)
    seen = spans(TOKENS, WINDOW, documents.to(DEVICE), DEVICE)
    mine = attention_core(
        one * 1.0, setting(2, TOKENS, heads, cos, sin, ops=operations, spans=seen)
    )
    q, k, v, logits = split_heads(heads, other, 2)
    q, k = (rotate(t, cos.cpu().double(), sin.cpu().double()) for t in (q, k))
    mixed = attend(q, k, v, documents, WINDOW)
    theirs = (mixed if logits is None else mixed * torch.sigmoid(logits)).reshape(2 * TOKENS, -1)
    mine.sum().backward()
    theirs.sum().backward()
    assert one.grad is not None and other.grad is not None
    assert distance(mine.cpu(), theirs) < BOUND and distance(one.grad.cpu(), other.grad) < BOUND


def views(rows: int, columns: int) -> list[Tensor]:
    """Matrices whose rows do not follow each other: part of wider ones, one row for all, every second row, columns."""
    generator = torch.Generator().manual_seed(rows)
    wide = torch.randn(2 * rows, 2 * columns, generator=generator).bfloat16().to(DEVICE)
    found = [
        wide[:rows, 16 : 16 + columns],
        wide[:1, :columns].expand(rows, columns),
        wide[::2, :columns],
    ]
    return [*found, wide.flatten()[: rows * columns].view(columns, rows).t()]


def place() -> CastScale:
    """A scale, an amax, and E4M3."""
    return CastScale(torch.full((1,), 3.0, device=DEVICE), torch.zeros(1, device=DEVICE), False)


Operation = Callable[[Tensor], list[Tensor | None]]
WEIGHT = torch.linspace(0.5, 1.5, 64).bfloat16().to(DEVICE)
OTHER = torch.linspace(-1, 1, 32 * 64).view(32, 64).bfloat16().to(DEVICE)
FP8: dict[str, Operation] = {
    "cast": lambda x: list(handover_triton.cast(x, *place())),
    "swiglu": lambda x: list(handover_triton.activate(x, *place())),
    "dswiglu of dy": lambda x: list(
        handover_triton.activate_backward(x, torch.cat((OTHER, x), 1), *place())
    ),
    "dswiglu": lambda x: list(
        handover_triton.activate_backward(OTHER[:, :32].contiguous(), x, *place())
    ),
    "norm": lambda x: [*(found := norm_fp8_triton.norm(x, None, WEIGHT, 1e-5, False, *place()))[0], *found[1:]],
    "norm of a sum": lambda x: [
        *(found := norm_fp8_triton.norm(x, x.roll(1), WEIGHT, 1e-5, False, *place()))[0], *found[1:]
    ],
    "norm with a delta": lambda x: [
        *(found := norm_fp8_triton.norm(OTHER, x, WEIGHT, 1e-5, False, *place()))[0], *found[1:]
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", FP8)
def test_fp8_of_a_view_is_that_of_a_copy(name: str) -> None:
    for x in views(32, 64):
        assert not x.is_contiguous()
        for found, wanted in zip(FP8[name](x), FP8[name](x.contiguous()), strict=True):
            assert torch.equal(found, wanted) and found.is_contiguous()


def test_attention_in_spans_takes_any_strides() -> None:
    """q, k and v transposed or one for all, and gradients of one number, of one row, and transposed."""
    torch.manual_seed(0)
    square = torch.randn(16, 40, 2, 1, dtype=DTYPE, device=DEVICE).permute(
        3, 2, 1, 0
    )  # [1, 2, 40, 16]
    for made in (
        square,
        square[:, :1].expand(1, 2, 40, 16),
        square[..., :1, :].expand(1, 2, 40, 16),
    ):
        q = made.detach().requires_grad_()
        plain = made.detach().contiguous().requires_grad_()
        attention = spans(40, 9, None, DEVICE)
        out, same = attention(q, q, q), attention(plain, plain, plain)
        assert torch.equal(out, same)
        for dy in (
            torch.ones_like(out[..., :1]).expand_as(out),
            torch.randn_like(out[:, :1]).expand_as(out),
            square,
        ):
            (found,) = torch.autograd.grad(out, q, dy, retain_graph=True)
            (wanted,) = torch.autograd.grad(same, plain, dy.contiguous(), retain_graph=True)
            assert distance(found, wanted) < 1e-6


def test_the_tables_of_rope_may_be_views() -> None:
    """Of a longer context, and one row for all rows of the batch."""
    x = torch.randn(2, 4, 3, 24, device=DEVICE, dtype=DTYPE)
    long = torch.rand(9, 64, device=DEVICE).to(DTYPE)
    cos, sin = long[2:6, :24], long.flip(0)[2:6, 8:32].clone()
    wanted, found = torch.empty_like(x), torch.empty_like(x)
    whole = Rotation(cos.contiguous(), sin.contiguous())
    gated_attention_triton.rotate(x, wanted, whole, False)
    for tables in (
        (cos, sin),
        (cos[None], sin[None]),
        (cos.expand(2, 4, 24), sin[None].repeat(2, 1, 1)),
    ):
        gated_attention_triton.rotate(x, found, Rotation(*tables), False)
        assert torch.equal(found, wanted)


def test_an_embedding_takes_the_gradient_of_a_sum() -> None:
    module = torch.nn.Embedding(20, 24, device=DEVICE)
    ids = torch.tensor([[3, 3, 0, 19], [5, 3, 19, 2]], device=DEVICE)
    embedding_triton.embedding(module, ids).sum().backward()
    assert module.weight.grad is not None
    assert torch.equal(
        module.weight.grad,
        torch.bincount(ids.flatten(), minlength=20)[:, None].expand(20, 24).float(),
    )


def test_the_loss_takes_any_input() -> None:
    """The gradient of a transposed x, which `multiply` scales in place."""
    weight = torch.linspace(-1, 1, 30 * 16, device=DEVICE).view(30, 16).to(DTYPE)
    kernels = (lm_head_triton.loss_and_gradient, lm_head_triton.multiply)
    results = []
    for x in (
        torch.linspace(-1, 1, 16 * 12, device=DEVICE).view(16, 12).to(DTYPE).t() for _ in range(2)
    ):
        leaf = (x.contiguous() if results else x).detach().requires_grad_()
        loss = lm_head.linear_cross_entropy(
            leaf, weight, torch.arange(12, device=DEVICE), 5, *kernels
        )
        (loss * 3).backward()
        results.append(leaf.grad)
    assert results[0] is not None and results[1] is not None
    assert distance(results[0], results[1]) < BOUND and results[0].abs().sum() > 0


def far(heads: int, size: int) -> Tensor:
    """BF16 [1, 4, heads, size] whose heads are 2**30 elements apart, so that 2 * stride is no int32.

    Memory that is never touched takes none on a CPU; a GPU takes all of its 4 GiB.
    """
    step = 2**30
    memory = torch.empty((heads - 1) * step + 4 * size, dtype=torch.bfloat16, device=DEVICE)
    return memory.as_strided((1, 4, heads, size), (4 * size, size, step, 1))


def test_a_head_may_be_beyond_two_billion_elements() -> None:
    x, near = far(3, 16), torch.randn(1, 4, 3, 16).bfloat16().to(DEVICE)
    x.copy_(near)
    found, wanted = torch.empty_like(near), torch.empty_like(near)
    head_copy_triton.copy(x, found)
    assert torch.equal(found, near)
    cos = torch.ones(4, 16, dtype=torch.bfloat16, device=DEVICE)
    for source, out in ((x, found), (near, wanted)):
        gated_attention_triton.rotate(source, out, Rotation(cos, cos), False)
    assert torch.equal(found, wanted)
    gate = gate_triton.gate
    assert torch.equal(gate(x, x, False), gate(near, near, False))
    slopes = [torch.empty_like(near) for _ in range(2)]
    backward = gate_triton.gate_backward
    assert torch.equal(
        backward(x, x, x, slopes[0], False), backward(near, near, near, slopes[1], False)
    )
    assert torch.equal(*slopes)


def test_fp8_of_a_head_beyond_two_billion_elements() -> None:
    x, near = far(3, 16), torch.randn(1, 4, 3, 16).bfloat16().to(DEVICE)
    x.copy_(near)
    cos, fp8 = (
        torch.ones(4, 16, dtype=torch.bfloat16, device=DEVICE),
        gated_attention_triton.TRITON.fp8,
    )
    assert fp8 is not None
    outs = []
    for source in (x, near):
        outs.append([fp8.new(4, 48, DEVICE) for _ in range(3)])
        fp8.rotate(outs[-1][0], place(), 0, source, Rotation(cos, cos), False)
        fp8.gate(outs[-1][1], place(), 0, source, source, False)
        fp8.gate_backward(outs[-1][2], place(), 0, source, source, source, False)
    for one, other in zip(*outs, strict=True):
        assert torch.equal(one.data, other.data) and torch.equal(one.transposed, other.transposed)


def test_spans_of_a_head_beyond_two_billion_elements() -> None:
    x, near = far(3, 16).transpose(1, 2), torch.randn(1, 3, 4, 16).bfloat16().to(DEVICE)
    x.copy_(near)
    attention = spans(4, None, None, DEVICE)
    out, sums = attention.forward(near, near, near)
    assert all(map(torch.equal, attention.forward(x, x, x), (out, sums)))
    *wanted, none = attention.backward(near, near, near, near, out, sums)
    assert none is None  # there are no sinks
    assert all(map(torch.equal, attention.backward(x, x, x, x, out, sums), wanted))


@pytest.mark.skipif(not ON_GPU, reason="takes 26 GiB: 128 heads of 262,144 tokens in BF16 are 8")
@pytest.mark.parametrize("flash", [False, True], ids=["spans", "FlashAttention-4"])
def test_a_row_of_four_billion_elements(flash: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """128 heads x 262,144 tokens, head by head in memory; of two heads the output and gradients are those alone."""
    if flash and not flash_4.has_heads(128):
        pytest.skip("flash-attn-4 is not installed, or this is no Hopper")
    if not flash:
        monkeypatch.setattr(flash_4, "suits", lambda q: False)
    free, _ = torch.cuda.mem_get_info()
    if free < 30 * 2**30:
        pytest.skip(f"needs 30 GiB, and {free / 2**30:.0f} are free")
    q = torch.randn(1, 128, 262144, 128, dtype=torch.bfloat16, device=DEVICE)
    k, v = (torch.randn(1, 4, 262144, 128, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    attention = spans(262144, 256, None, DEVICE)
    out, sums = attention.forward(q, k, v)
    dq, dk, *_ = attention.backward(q, q, k, v, out, sums)
    for head in (0, 127):
        group = slice(head // 32, head // 32 + 1)
        own = q[:, head : head + 1].clone()
        alone, own_sums = attention.forward(own, k[:, group], v[:, group])
        assert torch.equal(out[:, head], alone[:, 0])
        single = attention.backward(own, own, k[:, group], v[:, group], alone, own_sums)[0]
        if flash:  # whose order of additions varies from run to run
            difference = dq[:, head].float() - single[:, 0].float()
            assert difference.norm() < 2**-8 * single.float().norm()
        else:
            assert torch.equal(dq[:, head], single[:, 0])
    assert dk.isfinite().all()


def test_more_rows_and_heads_than_a_second_dimension_of_a_grid_has() -> None:
    """On a GPU 70,000 rows of one head; in the interpreter, which has no such limit, a few."""
    rows = 70_000 if ON_GPU else 3
    x = torch.randn(rows, 1, 4, 16, device=DEVICE, dtype=DTYPE)
    attention: Spans = spans(4, None, None, DEVICE)
    out, sums = attention.forward(x, x, x)
    grads = attention.backward(x, x, x, x, out, sums)[:3]
    last, last_sums = attention.forward(x[-2:], x[-2:], x[-2:])
    assert torch.equal(out[-2:], last)
    assert all(
        map(
            torch.equal,
            (g[-2:] for g in grads),
            attention.backward(*[x[-2:]] * 4, last, last_sums)[:3],
        )
    )
