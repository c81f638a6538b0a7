"""Kimi Delta Attention against a recurrence in FP64, and the call of the package that has kernels for it."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recurrences import assert_close, assert_same_recurrence, single
from torch import Tensor

from te_models.kernels.elementwise import channel_gates
from te_models.kernels.kda import by_linear_attention, chunked, recurrent

HEADS, WIDTH = 3, 6


def inputs(length: int) -> dict[str, Tensor]:
    """Draw FP64 inputs of two rows: decays from nearly none to nearly all within a token."""
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    q, k, v = draw(3, 2, length, HEADS, WIDTH).double()
    g = -F.softplus(draw(2, length, HEADS, WIDTH).double() * 4)
    return dict(q=q, k=k, v=v, g=g, beta=draw(2, length, HEADS).double().sigmoid())


def judge(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the outputs and the last state in FP64 by the rule, written with matrices."""
    rows, length, heads, width = q.shape
    states = torch.zeros(rows, heads, width, width).double() if state is None else state
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    outputs = []
    for step in range(length):
        key, value, strength = k[:, step], v[:, step], beta[:, step, :, None, None]
        decayed = torch.diag_embed(g[:, step].exp()) @ states
        forgotten = torch.eye(width).double() - strength * key[..., :, None] * key[..., None, :]
        states = forgotten @ decayed + strength * key[..., :, None] * value[..., None, :]
        outputs.append((q[:, step, :, None] @ states)[:, :, 0] * width**-0.5)
    return torch.stack(outputs, 1), states


@pytest.mark.parametrize("length, size", [(1, 4), (4, 4), (23, 16), (70, 64)])
def test_chunks_and_tokens_are_the_recurrence(length: int, size: int) -> None:
    """Outputs, the last state and all gradients, within 1e-5 of FP64."""
    exact = inputs(length)
    before = torch.randn(2, HEADS, WIDTH, WIDTH, dtype=torch.float64)
    for compute in (functools.partial(chunked, size=size), recurrent):
        assert_same_recurrence(compute, judge, exact, before)


LENGTHS = (3, 1, 9, 10)


@pytest.mark.parametrize("size", [4, 16])
def test_documents_are_those_alone(size: int) -> None:
    exact = inputs(sum(LENGTHS))
    documents = torch.tensor((5, 2, 9, 3)).repeat_interleave(torch.tensor(LENGTHS)).expand(2, -1)
    found, _ = chunked(**single(exact), documents=documents, size=size)
    begin = 0
    for length in LENGTHS:
        own = {name: tensor[:, begin : begin + length] for name, tensor in exact.items()}
        assert_close(found[:, begin : begin + length], judge(**own)[0])
        begin += length


def rows_of_fla(**given: Any) -> Any:
    """Stand in for flash-linear-attention's chunk_kda and fused_recurrent_kda, by their documentation."""
    assert given.pop("use_qk_l2norm_in_kernel")
    keeps = given.pop("output_final_state")
    out, state = recurrent(**given | {"state": given.pop("initial_state")})
    return out, state if keeps else None


@pytest.mark.parametrize("told", [False, True], ids=["one text", "documents"])
def test_the_package_gets_what_it_documents(told: bool) -> None:
    own = single(inputs(23))
    documents = torch.tensor((0, 1, 1, 2)).repeat_interleave(torch.tensor(LENGTHS)).expand(2, -1)
    state = None if told else torch.randn(2, HEADS, WIDTH, WIDTH)
    kernels = functools.partial(by_linear_attention, rows_of_fla, rows_of_fla)
    expected, last = chunked(**own, state=state, documents=documents if told else None)
    found, after = kernels(**own, state=state, documents=documents if told else None)
    assert_close(found, expected.double())
    if state is None:
        assert after is None
    else:
        assert_close(after, last.double())


@pytest.mark.parametrize("bound", [None, 5.0])
def test_the_gates_are_those_of_the_paper(bound: float | None) -> None:
    f, b = torch.randn(2, 7, HEADS * WIDTH) * 3, torch.randn(2, 7, HEADS)
    a_log, dt_bias = torch.randn(HEADS), torch.randn(HEADS * WIDTH)
    real = torch.arange(7) < torch.tensor((4, 7))[:, None]
    logits = (f.double() + dt_bias.double()).view(2, 7, HEADS, WIDTH)
    rates = a_log.double().exp()[:, None]
    expected = (
        -rates * F.softplus(logits) if bound is None else -bound * torch.sigmoid(rates * logits)
    )
    g, beta = channel_gates(f, b, a_log, dt_bias, real, bound=bound)
    assert_close(g, expected * real[..., None, None])
    assert_close(beta, b.double().sigmoid() * real[..., None])
