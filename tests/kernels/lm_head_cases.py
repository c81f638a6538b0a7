"""The loss of kernels/lm_head_triton.py, against lm_head.loss_and_gradient computed in FP64.

Run by test_triton_kernels.py in Triton's interpreter and on a GPU.
"""

import pytest
import torch
from fewer import every
from torch import Tensor

from te_models.kernels import lm_head, lm_head_triton
from te_models.kernels.lm_head import linear_cross_entropy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The rounding of a gradient. Triton's interpreter cuts BF16 off where a GPU rounds it.
ROUNDING = {
    torch.float32: 2.0**-19,  # of the exponential: 2**-24 times the exponent
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8 if DEVICE == "cuda" else 2.0**-7,
}
NUMPY = pytest.mark.filterwarnings(
    "ignore:.* encountered in subtract:RuntimeWarning"
)  # infinities are meant
VOCABULARIES = [
    3,
    288,
    1000,
    2048,
    4097,
    32000,
]  # less than a step, one step, several, parts of them
IGNORED = -100


def inputs(
    vocabulary: int, dtype: torch.dtype = torch.bfloat16, rows: int = 5
) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(vocabulary)
    logits = 4 * torch.randn(rows, vocabulary, generator=g)
    targets = torch.randint(0, vocabulary, (rows,), generator=g)
    targets[0], targets[1], targets[2] = 0, vocabulary - 1, IGNORED
    return (
        logits.to(dtype).to(DEVICE),
        targets.to(DEVICE),
        (targets != IGNORED).sum().clamp(min=1).to(DEVICE),
    )


def in_fp64(logits: Tensor, targets: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and gradient written out."""
    log = logits.double().log_softmax(-1)
    counted = (targets != IGNORED).double()[:, None] / count
    hit = torch.nn.functional.one_hot(targets.clamp(min=0), logits.shape[1]).double()
    return -(log * hit * counted).sum(), (log.exp() - hit) * counted


def check(logits: Tensor, targets: Tensor, count: Tensor) -> None:
    """Loss and gradient are those of FP64 and as near to it as the plain function's;
    the gradient lies over the logits."""
    loss, slope = in_fp64(logits, targets, count)
    plain = lm_head.loss_and_gradient(logits, targets, count, True)
    before = logits.clone()
    alone, nothing = lm_head_triton.loss_and_gradient(logits, targets, count, False)
    assert nothing is None and torch.equal(logits, before)
    found, dlogits = lm_head_triton.loss_and_gradient(logits, targets, count, True)
    assert dlogits is logits and dlogits.dtype == before.dtype
    assert found.dtype == torch.float32 and found.shape == () and torch.equal(found, alone)
    torch.testing.assert_close(found.double(), loss, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found, plain[0], rtol=1e-6, atol=1e-7)
    # Below a dtype's normal numbers one rounding is half of its smallest one; what is 1 - 1 in FP32 has FP32's error.
    tiny = torch.finfo(logits.dtype).smallest_normal * torch.finfo(logits.dtype).eps
    torch.testing.assert_close(
        dlogits.double(), slope, rtol=1.01 * ROUNDING[logits.dtype], atol=max(tiny, 2e-7 / count)
    )
    assert not dlogits[targets == IGNORED].any()


@pytest.mark.parametrize(("vocabulary", "dtype"), every(3, VOCABULARIES, ROUNDING))
def test_loss_and_gradient(vocabulary: int, dtype: torch.dtype) -> None:
    check(*inputs(vocabulary, dtype))


@pytest.mark.parametrize("vocabulary", every(2, [70_001, 70_000]))
def test_a_vocabulary_of_large_steps(vocabulary: int) -> None:
    check(*inputs(vocabulary, rows=3))


@NUMPY
@pytest.mark.parametrize(
    ("order", "size"), every(3, ["rising", "falling", "mixed"], [1e4, -1e4, 1e30])
)
def test_large_logits(order: str, size: float) -> None:
    """The largest comes last, first or anywhere: what was summed up before is scaled down."""
    logits, targets, count = inputs(4097, torch.float32)
    if order != "mixed":
        logits = logits.sort(descending=order == "falling").values
    check(logits + size if abs(size) < 1e30 else logits * size, targets, count)


def test_a_logit_of_minus_infinity_has_no_probability() -> None:
    logits, targets, count = inputs(4097, torch.float32)
    logits[:, 7:3000] = float("-inf")
    targets[targets.ge(7) & targets.lt(3000)] = 1
    loss, slope = in_fp64(logits.clamp(min=-1e30), targets, count)
    found, dlogits = lm_head_triton.loss_and_gradient(logits, targets, count, True)
    torch.testing.assert_close(found.double(), loss, rtol=1e-6, atol=0)
    assert dlogits is not None and not dlogits[:, 7:3000].any()
    torch.testing.assert_close(dlogits.double(), slope, rtol=2.0**-19, atol=1e-7)


def test_no_target_counts() -> None:
    logits, targets, count = inputs(1000)
    check(logits, targets.fill_(IGNORED), torch.ones_like(count))


@NUMPY
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("column", [0, 4000])
def test_a_value_that_is_not_finite_shows_in_the_loss(wrong: float, column: int) -> None:
    logits, targets, count = inputs(4097)
    logits[3, column] = wrong
    assert lm_head.loss_and_gradient(logits, targets, count, False)[0].isnan()
    found, dlogits = lm_head_triton.loss_and_gradient(logits, targets, count, True)
    assert dlogits is not None
    assert found.isnan() and dlogits[3].isnan().any()
    assert dlogits[[0, 1, 2, 4]].isfinite().all()


def test_a_row_that_does_not_count_may_be_anything() -> None:
    logits, targets, count = inputs(4097)
    wanted = lm_head_triton.loss_and_gradient(logits.clone(), targets, count, False)[0]
    logits[2] = float("nan")
    found, dlogits = lm_head_triton.loss_and_gradient(logits, targets, count, True)
    assert dlogits is not None
    assert torch.equal(found, wanted) and not dlogits[2].any()


@pytest.mark.parametrize("target", [-1, 288, 10**9])
def test_a_target_that_is_no_column_makes_the_loss_nan(target: int) -> None:
    logits, targets, count = inputs(288)
    targets[4] = target
    assert lm_head_triton.loss_and_gradient(logits, targets, count, False)[0].isnan()


@pytest.mark.parametrize("factor", [1.0, 0.3, 0.0])
def test_multiply(factor: float) -> None:
    tensors = [inputs(vocabulary)[0] for vocabulary in (3, 32000)]
    wanted = [(tensor.float() * factor).to(tensor.dtype) for tensor in tensors]
    lm_head_triton.multiply(tensors, torch.tensor(factor, device=DEVICE))
    for found, product in zip(tensors, wanted, strict=True):
        torch.testing.assert_close(
            found.float(), product.float(), rtol=ROUNDING[torch.bfloat16], atol=0
        )


@pytest.mark.parametrize("factors", [(1.0, 1.0), (0.5, 4.0), (0.5, 1.0, 0.5)])
def test_several_backwards_through_one_graph(factors: tuple[float, ...]) -> None:
    """The last alone, after which the graph is gone, may write over what the loss keeps."""
    g = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 16, generator=g).to(DEVICE).requires_grad_() for n in (24, 40))
    targets = torch.randint(0, 40, (24,), generator=g).to(DEVICE)
    loss = linear_cross_entropy(x, weight, targets, multiply=lm_head_triton.multiply)
    plain = torch.autograd.grad(linear_cross_entropy(x, weight, targets), (x, weight))
    for number, factor in enumerate(factors, 1):
        loss.backward(torch.tensor(factor, device=DEVICE), retain_graph=number < len(factors))
    for leaf, slope in zip((x, weight), plain, strict=True):
        torch.testing.assert_close(leaf.grad, slope * sum(factors))
