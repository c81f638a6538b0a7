"""Elementwise operations against autograd and transformers' activations."""

import pytest
import torch
import torch.nn.functional as F

from te_models.config import model
from te_models.kernels.elementwise import (
    ACTIVATIONS,
    clamped_swiglu,
    clamped_swiglu_backward,
    mlp_activation,
    mlp_activation_backward,
    scaled_logits,
    softplus_gate,
)
from te_models.kernels.lm_head import loss_and_gradient, with_scaled_logits


def test_every_activation_of_the_config_is_there() -> None:
    assert set(ACTIVATIONS) == set(model.ACTIVATIONS)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_and_their_gradients(name: str, gated: bool) -> None:
    activations = pytest.importorskip("transformers.activations")
    x = torch.randn(7, 12, dtype=torch.float64, requires_grad=True)
    y = mlp_activation(x, name, gated)
    reference = activations.ACT2FN[name]
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(y, reference(gate) * up if gated else reference(x))
    dy = torch.randn_like(y)
    torch.testing.assert_close(
        mlp_activation_backward(dy, x, name, gated), torch.autograd.grad(y, x, dy)[0]
    )


def test_clamped_swiglu_and_its_gradient() -> None:
    """That of gpt-oss in transformers, which interleaves gate and up; a third of the values are beyond the limit."""
    modeling = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    config = modeling.GptOssConfig(
        hidden_size=4, intermediate_size=6, num_local_experts=1, swiglu_limit=1.0
    )
    x = torch.randn(50, 12, requires_grad=True)
    y = modeling.GptOssExperts(config)._apply_gate(
        x.unflatten(1, (2, 6)).transpose(1, 2).flatten(1)
    )
    torch.testing.assert_close(clamped_swiglu(x, 1.0, 1.702), y)
    dy = torch.randn_like(y)
    torch.testing.assert_close(
        clamped_swiglu_backward(dy, x, 1.0, 1.702), torch.autograd.grad(y, x, dy)[0]
    )


def test_the_softplus_gate() -> None:
    x, logits = torch.randn(4, 3, 8), torch.randn(4, 3, 1)
    torch.testing.assert_close(softplus_gate(x, logits), x * torch.log1p(logits.exp()))


@pytest.mark.parametrize("divisor, cap", [(1.0, None), (3.0, None), (1.0, 2.0), (3.0, 2.0)])
def test_the_loss_of_scaled_logits(divisor: float, cap: float | None) -> None:
    logits, targets = torch.randn(9, 20, dtype=torch.float64) * 4, torch.randint(0, 20, (9,))
    targets[::4] = -100
    own = logits.clone().requires_grad_()
    expected = F.cross_entropy(scaled_logits(own, divisor, cap), targets)
    expected.backward()
    kernel = with_scaled_logits(loss_and_gradient, divisor, cap)
    loss, slope = kernel(logits, targets, (targets != -100).sum(), True)
    torch.testing.assert_close(loss.double(), expected.detach(), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(slope, own.grad, atol=1e-7, rtol=1e-5)
    assert kernel(logits, targets, (targets != -100).sum(), False)[1] is None
