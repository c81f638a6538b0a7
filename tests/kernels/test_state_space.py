"""The state space of Mamba 2 against a recurrence in FP64, and the calls of packages that have kernels for it."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from recurrences import assert_close, assert_same_recurrence, single
from torch import Tensor

from te_models.kernels.elementwise import gated_norm, time_steps
from te_models.kernels.state_space import (
    _KernelsWithoutData,
    by_linear_attention,
    by_mamba,
    chunked,
    recurrent,
)

HEADS, WIDTH, GROUPS, STATE = 6, 5, 3, 4


def inputs(length: int, seed: int = 0) -> dict[str, Tensor]:
    """Draw FP64 inputs of two rows: decays from nearly none to nearly all within a token."""
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(seed))
    return dict(
        x=draw(2, length, HEADS, WIDTH).double(),
        dt=F.softplus(draw(2, length, HEADS).double() * 2 - 1),
        a=-draw(HEADS).double().exp(),
        b=draw(2, length, GROUPS, STATE).double(),
        c=draw(2, length, GROUPS, STATE).double(),
        d=draw(HEADS).double(),
    )


def judge(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the outputs and the last state in FP64, token by token and head by head."""
    rows, length, heads, width = x.shape
    states = torch.zeros(rows, heads, width, b.shape[3]).double() if state is None else state
    outputs = []
    for step in range(length):
        own = []
        for head in range(heads):
            group = head * b.shape[2] // heads
            decay = (dt[:, step, head] * a[head]).exp()[:, None, None]
            write = dt[:, step, head, None] * x[:, step, head]
            state = decay * states[:, head] + write[:, :, None] * b[:, step, group, None, :]
            own.append(state)
        states = torch.stack(own, 1)
        read = c[:, step].repeat_interleave(heads // c.shape[2], 1)
        outputs.append((states @ read[..., None])[..., 0] + d[:, None] * x[:, step])
    return torch.stack(outputs, 1), states


@pytest.mark.parametrize("length, size", [(1, 4), (4, 4), (23, 8), (70, 64)])
def test_chunks_and_tokens_are_the_recurrence(length: int, size: int) -> None:
    """Outputs, the last state and all gradients, within 1e-5 of FP64."""
    exact = inputs(length)
    before = torch.randn(2, HEADS, WIDTH, STATE, dtype=torch.float64)
    for compute in (functools.partial(chunked, size=size), recurrent):
        assert_same_recurrence(compute, judge, exact, before)


LENGTHS = (3, 1, 9, 10)


@pytest.mark.parametrize("size", [4, 64])
def test_documents_are_those_alone(size: int) -> None:
    exact = inputs(sum(LENGTHS))
    documents = torch.tensor((5, 2, 9, 3)).repeat_interleave(torch.tensor(LENGTHS)).expand(2, -1)
    found, _ = chunked(**single(exact), documents=documents, size=size)
    begin = 0
    for length in LENGTHS:
        own = {
            name: tensor[:, begin : begin + length] if tensor.dim() > 1 else tensor
            for name, tensor in exact.items()
        }
        assert_close(found[:, begin : begin + length], judge(**own)[0])
        begin += length


def scan_of_mamba(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **options: Any) -> Any:
    """Stand in for mamba_ssm's mamba_chunk_scan_combined, by its documentation."""
    assert options["chunk_size"] == 256 and options["D"].dtype == torch.float32
    told = options["seq_idx"]
    assert told is None or (told.dtype == torch.int32 and told.is_contiguous())
    out, state = chunked(x, dt, A, B, C, options["D"], options["initial_states"], told)
    return (out, state) if options["return_final_states"] else out


def scan_of_fla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float, **options: Any) -> Any:
    """Stand in for flash-linear-attention's chunk_simple_gla, by its documentation: a state [K, V] per head."""
    before = options["initial_state"]
    state = torch.zeros(*q.shape[::2], q.shape[3], v.shape[3]) if before is None else before
    outputs = []
    for step in range(q.shape[1]):
        state = (
            state * g[:, step, :, None, None].exp() + k[:, step, :, :, None] * v[:, step, :, None]
        )
        outputs.append(scale * (q[:, step, :, None] @ state)[:, :, 0])
    return torch.stack(outputs, 1), state if options["output_final_state"] else None


@pytest.mark.parametrize("told", [False, True], ids=["one text", "documents"])
@pytest.mark.parametrize(
    "kernels",
    [
        functools.partial(by_mamba, scan_of_mamba),
        functools.partial(by_linear_attention, scan_of_fla, scan_of_fla),
    ],
    ids=["mamba-ssm", "flash-linear-attention"],
)
def test_packages_get_what_they_document(kernels: Any, told: bool) -> None:
    own = single(inputs(23))
    documents = torch.tensor((0, 1, 1, 2)).repeat_interleave(torch.tensor(LENGTHS)).expand(2, -1)
    state = None if told else torch.randn(2, HEADS, WIDTH, STATE)
    expected, last = chunked(**own, state=state, documents=documents if told else None)
    found, after = kernels(**own, state=state, documents=documents if told else None)
    assert_close(found, expected.double())
    if state is None:
        assert after is None
    else:
        assert_close(after, last.double())
        one = {name: t[:, :1] if t.dim() > 1 else t for name, t in own.items()}
        with torch.no_grad():
            found, after = kernels(**one, state=state, documents=None)
        expected, last = recurrent(**one, state=state)
        assert_close(found, expected.double())
        assert_close(after, last.double())


def test_time_steps_have_bounds_and_are_zero_at_padding() -> None:
    logits, bias = torch.randn(2, 7, 3) * 4, torch.randn(3)
    real = torch.arange(7) < torch.tensor((4, 7))[:, None]
    expected = F.softplus(logits.double() + bias.double()).clamp(0.1, 2.0) * real[..., None]
    found = time_steps(logits, bias, real, low=0.1, high=2.0)
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-6)
    assert {0.0, 2.0} <= set(found.flatten().tolist())


@pytest.mark.parametrize("before_gate", [False, True])
def test_the_gated_norm_is_one_of_groups(before_gate: bool) -> None:
    x, z, weight = torch.randn(9, 12), torch.randn(9, 12), torch.randn(12)
    opening = F.silu(z.double())
    values = x.double() if before_gate else x.double() * opening
    parts = [
        F.rms_norm(part, (4,), weight=own, eps=1e-5)
        for part, own in zip(values.split(4, 1), weight.double().split(4), strict=True)
    ]
    expected = torch.cat(parts, 1) * (opening if before_gate else 1.0)
    found = gated_norm(x, z, weight, groups=3, eps=1e-5, before_gate=before_gate)
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-5)


def test_kernels_without_data_in_a_recompute() -> None:
    """A recompute gives each saved tensor once, as the plan of a GPU's memory under full recompute found."""
    given = [value.to("meta", torch.bfloat16).requires_grad_() for value in inputs(8).values()]
    out = torch.utils.checkpoint.checkpoint(_KernelsWithoutData.apply, *given, use_reentrant=False)
    found = torch.autograd.grad(out, given, torch.empty_like(out))
    assert [one.shape for one in found] == [one.shape for one in given]
