"""The head and its loss as one operation: cross_entropy's loss and gradients, and no logits."""

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bits import assert_same_bits
from torch.utils._python_dispatch import TorchDispatchMode

from te_models import CausalLM
from te_models.kernels.elementwise import cross_entropy
from te_models.kernels.lm_head import LossKernel, linear_cross_entropy, loss_and_gradient

DTYPES = {torch.float64: 1e-6, torch.float32: 1e-6, torch.bfloat16: 2**-8}


def inputs(
    dtype: torch.dtype, rows: int = 37, size: int = 16, vocabulary: int = 50
) -> list[torch.Tensor]:
    x, weight = torch.randn(rows, size, dtype=dtype), torch.randn(vocabulary, size, dtype=dtype)
    targets = torch.randint(0, vocabulary, (rows,))
    targets[::5] = -100
    return [x.requires_grad_(), weight.requires_grad_(), targets]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [1, 8, 37, 100, None])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_loss_and_gradients_are_those_of_the_two_operations(
    dtype: torch.dtype, chunk: int | None, scale: float
) -> None:
    x, weight, targets = inputs(dtype)
    loss = linear_cross_entropy(x, weight, targets, chunk)
    mine = torch.autograd.grad(loss * scale, (x, weight))
    expected = cross_entropy(F.linear(x, weight), targets)
    theirs = torch.autograd.grad(expected * scale, (x, weight))
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected.float(), rtol=DTYPES[dtype], atol=0)
    for one, other in zip(mine, theirs, strict=True):
        assert one.dtype == dtype
        assert (one - other).double().norm() <= 2 * DTYPES[dtype] * other.double().norm()


@pytest.mark.parametrize("retain", [False, True])
def test_the_losss_factor_is_not_rounded(retain: bool) -> None:
    """1/3 is 0.334 in BF16, which would make every gradient 0.2 % too large."""
    x, weight, targets = inputs(torch.bfloat16)
    loss, factor = linear_cross_entropy(x, weight, targets), torch.tensor(1 / 3)
    whole = torch.autograd.grad(loss, (x, weight), retain_graph=True)
    third = torch.autograd.grad(loss * factor, (x, weight), retain_graph=retain)
    for one, other in zip(third, whole, strict=True):
        assert_same_bits("one", one, (other.float() * factor).bfloat16())


@pytest.mark.parametrize("chunk", [1, 16])
def test_the_gradient_of_the_weight_is_summed_in_fp32(chunk: int) -> None:
    """BF16 stops adding once a sum is 256 times its addend; here 1,024 chunks add up, and then are rounded once."""
    rows = 1024 * chunk
    x, weight = torch.ones(rows, 4).bfloat16(), torch.zeros(6, 4).bfloat16().requires_grad_()
    targets = torch.zeros(rows, dtype=torch.int64)
    (found,) = torch.autograd.grad(linear_cross_entropy(x, weight, targets, chunk), weight)
    # Of equal logits each probability is 1/6.
    expected = torch.full((6, 4), 1 / 6).double()
    expected[0] -= 1
    # The gradient of the logits is rounded to BF16, and the sum again.
    assert ((found.double() - expected).abs() <= 2 * 2.0**-9 * expected.abs()).all()


def test_chunks_share_the_count_of_all_targets() -> None:
    """Also where one has none."""
    x, weight, targets = inputs(torch.float64)
    targets[:8] = -100
    targets[8:15] = -100
    loss = linear_cross_entropy(x, weight, targets, 8)
    expected = F.cross_entropy(F.linear(x, weight), targets)
    torch.testing.assert_close(loss.double(), expected, atol=1e-6, rtol=1e-6)


def test_no_target_counts() -> None:
    x, weight, targets = inputs(torch.float32)
    loss = linear_cross_entropy(x, weight, targets.fill_(-100))
    loss.backward()
    assert loss == 0
    assert not x.grad.any() and not weight.grad.any()


@pytest.mark.parametrize("frozen", [None, 0, 1])
def test_a_retained_graph_gives_the_same_gradients_again(frozen: int | None) -> None:
    leaves = inputs(torch.float32)
    wanted = [
        leaf.requires_grad_(number != frozen)
        for number, leaf in enumerate(leaves[:2])
        if number != frozen
    ]
    loss = linear_cross_entropy(*leaves) * 0.25
    first, again = (torch.autograd.grad(loss, wanted, retain_graph=True) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    doubled = torch.autograd.grad(loss, wanted, torch.tensor(2.0))
    assert all(torch.equal(2 * one, other) for one, other in zip(first, doubled, strict=True))


@pytest.mark.parametrize("frozen", [None, 0, 1])
def test_a_retained_graph_is_not_overwritten_by_a_product_in_place(frozen: int | None) -> None:
    """A kernel multiplies the saved gradients in place, but only in their last backward."""

    def multiply(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
        for tensor in tensors:
            tensor.mul_(factor)

    leaves = inputs(torch.float32)
    for number, leaf in enumerate(leaves[:2]):
        leaf.requires_grad_(number != frozen)
    wanted = [leaf for leaf in leaves[:2] if leaf.requires_grad]
    plain = torch.autograd.grad(linear_cross_entropy(*leaves) * 0.25, wanted)
    loss = linear_cross_entropy(*leaves, multiply=multiply) * 0.25
    for retain in (True, True, False):
        for one, other in zip(
            torch.autograd.grad(loss, wanted, retain_graph=retain), plain, strict=True
        ):
            assert torch.equal(one, other)


def over_the_logits(
    logits: torch.Tensor, targets: torch.Tensor, count: torch.Tensor, gradient: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Write the gradient over the logits, as kernels/lm_head_triton.py does."""
    loss, slope = loss_and_gradient(logits, targets, count, gradient)
    return loss, None if slope is None else logits.copy_(slope)


@pytest.mark.parametrize("chunk", [8, None])
def test_a_kernel_may_write_over_the_logits(chunk: int | None) -> None:
    x, weight, targets = inputs(torch.float32)
    plain, other = (
        linear_cross_entropy(x, weight, targets, chunk, k)
        for k in (loss_and_gradient, over_the_logits)
    )
    assert_same_bits("plain", plain, other)
    for one, two in zip(
        *(torch.autograd.grad(loss, (x, weight)) for loss in (plain, other)), strict=True
    ):
        assert_same_bits("one", one, two)


@pytest.mark.parametrize("kernel", [loss_and_gradient, over_the_logits])
def test_one_chunk_of_logits_exists_at_a_time(kernel: LossKernel) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def watched(logits: torch.Tensor, *arguments: Any) -> Any:
        assert not any(reference() is not None for reference in alive)
        loss, slope = kernel(logits, *arguments)
        alive.extend(weakref.ref(tensor) for tensor in (logits, slope) if tensor is not None)
        return loss, slope

    linear_cross_entropy(*inputs(torch.float32), chunk=8, kernel=watched)
    assert len(alive) == 2 * 5


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.elements = max(
            [
                self.elements,
                *(t.numel() for t in torch.utils._pytree.tree_leaves(out) if torch.is_tensor(t)),
            ]
        )
        return out


def test_the_logits_never_exist() -> None:
    x, weight, targets = inputs(torch.bfloat16, rows=256, vocabulary=300)
    with Largest() as seen:
        linear_cross_entropy(x, weight, targets, chunk=16).backward()
    assert seen.elements <= 300 * 16


@pytest.mark.parametrize("recipe", ["bf16", "current", "mxfp8"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"tie_word_embeddings": True}, {"lm_head": "fp8", "num_layers_at_end_in_bf16": 0}],
    ids=str,
)
def test_the_model_without_logits(recipe: str, fields: dict[str, object]) -> None:
    model = CausalLM.from_preset(
        "gated-nano", recipe=recipe, num_hidden_layers=3, vocab_size=96, **fields
    )
    ids = torch.randint(0, 96, (3, 7))  # 21 rows: padded to the alignment
    grads = []
    for wanted in (True, False):
        out = model(ids, labels=ids, return_logits=wanted)
        assert (out.logits is not None) == wanted
        grads.append((out.loss.detach(), torch.autograd.grad(out.loss, list(model.parameters()))))
    torch.testing.assert_close(grads[0][0], grads[1][0], rtol=1e-6, atol=0)
    for one, other in zip(grads[0][1], grads[1][1], strict=True):
        assert (one - other).float().norm() <= 0.02 * other.float().norm()


@pytest.mark.parametrize("training", [True, False])
def test_an_evaluation_computes_no_gradient(training: bool) -> None:
    asked = []

    def kernel(
        logits: torch.Tensor, targets: torch.Tensor, count: torch.Tensor, gradient: bool
    ) -> Any:
        asked.append(gradient)
        return loss_and_gradient(logits, targets, count, gradient)

    with torch.set_grad_enabled(training):
        loss = linear_cross_entropy(*inputs(torch.float32), chunk=8, kernel=kernel)
    assert set(asked) == {training} and loss.requires_grad == training
