"""Recurrences of linear attention and state spaces, compared with a judge in FP64."""

from collections.abc import Callable

import torch
from torch import Tensor

# Inputs by name, and perhaps `state` -> outputs, and the state after the last token.
Recurrence = Callable[..., tuple[Tensor, Tensor]]


def single(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the inputs in FP32."""
    return {name: tensor.float() for name, tensor in values.items()}


def assert_close(actual: Tensor, expected: Tensor, bound: float = 1e-5) -> None:
    """Compare a tensor with one in FP64: the norm of the difference is at most `bound` of its norm."""
    assert (actual.double() - expected).norm() <= bound * expected.norm()


def assert_same_recurrence(
    compute: Recurrence, judge: Recurrence, inputs: dict[str, Tensor], before: Tensor
) -> None:
    """Compare outputs, the last state and all gradients of `compute` in FP32 with the judge's, after a state."""
    exact = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
    expected, expected_state = judge(**exact, state=before)
    weights = torch.randn_like(expected)
    total = (expected * weights).sum() + expected_state.sum()
    slopes = torch.autograd.grad(total, [*exact.values()])

    rounded = {name: tensor.requires_grad_() for name, tensor in single(inputs).items()}
    out, state = compute(**rounded, state=before.float())
    assert_close(out, expected)
    assert_close(state, expected_state)
    total = (out * weights.float()).sum() + state.sum()
    gradients = torch.autograd.grad(total, [*rounded.values()])
    for gradient, slope in zip(gradients, slopes, strict=True):
        assert_close(gradient, slope)
