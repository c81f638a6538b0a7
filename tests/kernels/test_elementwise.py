"""Elementwise operations against autograd and transformers' activations."""

import pytest
import torch
import torch.nn.functional as F
from typed import gradient

from te_models.config import fields
from te_models.kernels.elementwise import (
    ACTIVATIONS,
    causal_conv,
    clamped_swiglu,
    clamped_swiglu_backward,
    cross_entropy,
    delta_gates,
    gated_conv,
    mlp_activation,
    mlp_activation_backward,
    rounded,
    scaled_logits,
    silu_gate,
    softplus_gate,
)
from te_models.kernels.lm_head import loss_and_gradient, with_scaled_logits


def test_every_activation_of_the_config_is_there() -> None:
    assert set(ACTIVATIONS) == set(fields.ACTIVATIONS)


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


def test_the_edges_of_the_clamp_have_a_slope() -> None:
    """As torch.clamp's, which transformers takes: at the limit itself gradients pass, one step beyond none do."""
    limit = 1.5
    beyond = torch.nextafter(torch.tensor(limit), torch.tensor(9.0)).item()
    edges = torch.tensor([-beyond, -limit, -0.5, 0.0, 0.5, limit, beyond])
    gate, up = torch.cartesian_prod(edges, edges).unbind(1)
    x = torch.stack((gate, up), dim=1).requires_grad_()  # [49, 2]
    own_gate, own_up = x.double().chunk(2, dim=-1)
    own_gate = own_gate.clamp(max=limit)
    y = (own_up.clamp(-limit, limit) + 1) * own_gate * torch.sigmoid(1.702 * own_gate)
    torch.testing.assert_close(clamped_swiglu(x, limit, 1.702), y.float())
    dy = torch.full_like(y, 2.0)
    found = clamped_swiglu_backward(dy.float(), x, limit, 1.702)
    expected = torch.autograd.grad(y, x, dy)[0]
    torch.testing.assert_close(found, expected)
    assert torch.equal(found == 0, expected == 0)


def test_clamped_swiglu_rounds_once() -> None:
    x = (torch.randn(400, 32) * 2).bfloat16()
    gate, up = x.double().chunk(2, dim=-1)
    gate = gate.clamp(max=1.5)
    exact = (up.clamp(-1.5, 1.5) + 1) * gate * torch.sigmoid(1.702 * gate)
    error = (clamped_swiglu(x, 1.5, 1.702).double() - exact).abs()
    assert (error <= exact.abs() * 2.0**-8 * 1.01).all()


def test_the_gate_of_linear_attention_rounds_once() -> None:
    x, z = (torch.randn(400, 32) * 2).bfloat16(), (torch.randn(400, 32) * 2).bfloat16()
    exact = x.double() * z.double() * torch.sigmoid(z.double())
    error = (silu_gate(x, z).double() - exact).abs()
    assert (error <= exact.abs() * 2.0**-8 * 1.01).all()


@pytest.mark.parametrize("taps", [1, 4])
@pytest.mark.parametrize("tailed", [False, True])
def test_a_convolution_in_bf16_rounds_once(taps: int, tailed: bool) -> None:
    """By its definition in FP64, with documents and with a tail of earlier tokens."""
    x, weight = torch.randn(2, 9, 6).bfloat16(), torch.randn(6, 1, taps).bfloat16()
    documents = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2], [5] * 9])
    tail = torch.randn(2, taps - 1, 6).bfloat16() if tailed else None
    found = causal_conv(x, tail, weight, None if tailed else documents)
    for row in range(2):
        for place in range(9):
            total = torch.zeros(6).double()
            for back in range(taps):
                tap = weight[:, 0, taps - 1 - back].double()
                earlier = place - back
                if earlier >= 0 and (tailed or documents[row, earlier] == documents[row, place]):
                    total += x[row, earlier].double() * tap
                elif earlier < 0 and tail is not None:
                    total += tail[row, earlier].double() * tap
            exact = total * torch.sigmoid(total)
            error = (found[row, place].double() - exact).abs()
            assert (error <= exact.abs() * 2.0**-8 * 1.01 + 1e-6).all()


def test_padding_neither_decays_nor_writes() -> None:
    logits, real = torch.randn(2, 5, 6), torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]]).bool()
    a_log, dt_bias = torch.randn(3), torch.randn(3)
    g, beta = delta_gates(logits, a_log, dt_bias, real)
    own_g, own_beta = delta_gates(logits, a_log, dt_bias, None)
    b, a = logits.double().chunk(2, dim=-1)
    torch.testing.assert_close(own_beta.double(), 1 / (1 + (-b).exp()), rtol=1e-5, atol=0)
    rate = a_log.double().exp() * torch.log1p((a + dt_bias.double()).exp())
    torch.testing.assert_close(own_g.double(), -rate, rtol=1e-5, atol=1e-7)
    assert torch.equal(g, own_g * real[..., None]) and torch.equal(beta, own_beta * real[..., None])
    assert not g[~real].any() and not beta[~real].any() and g[real].all() and beta[real].all()


def test_a_factor_is_rounded_to_the_dtype() -> None:
    """sqrt(3072) is 55.5 in BF16, as Gemma multiplies its embeddings."""
    assert rounded(3072**0.5, torch.bfloat16) == 55.5
    assert rounded(3072**0.5, torch.float32) == torch.tensor(3072**0.5).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cap", [2.0, 30.0])
def test_the_slope_of_a_cap(dtype: torch.dtype, cap: float) -> None:
    """Of the capped logits as they are rounded: in FP64 the slope is 1 - (final / cap)^2, small where they saturate."""
    logits, targets = (torch.randn(9, 20) * 1.5 * cap).to(dtype), torch.randint(0, 20, (9,))
    count = torch.tensor(9)
    final = scaled_logits(logits, 2.0, cap)
    exact = final.double().requires_grad_()
    F.cross_entropy(exact, targets).backward()
    expected = gradient(exact) * (1 - (final.double() / cap).square()) / 2.0
    _, slope = with_scaled_logits(loss_and_gradient, 2.0, cap)(logits, targets, count, True)
    # The kernel's own gradient is rounded to the dtype, and the product again.
    bound = 3 * 2.0**-9 if dtype == torch.bfloat16 else 1e-5
    error = (slope.double() - expected).abs()
    assert (error <= bound * expected.abs() + 1e-9).all()


def test_a_loss_without_targets_is_zero() -> None:
    logits = torch.randn(5, 9, requires_grad=True)
    loss = cross_entropy(logits, torch.full((5,), -100))
    loss.backward()
    assert loss == 0 and not logits.grad.any()
    targets = torch.tensor([3, -100, 8, -100, 0])
    torch.testing.assert_close(cross_entropy(logits, targets), F.cross_entropy(logits, targets))


@pytest.mark.parametrize(
    "taps, biased, told", [(3, False, False), (4, True, True), (1, True, False)]
)
def test_the_gated_convolution_is_that_of_pytorch(taps: int, biased: bool, told: bool) -> None:
    """In FP64, of each document by itself, and of a text in two pieces."""
    parts, weight = torch.randn(2, 11, 15, dtype=torch.float64), torch.randn(5, 1, taps).double()
    bias = torch.randn(5).double() if biased else None
    lengths = (4, 1, 6) if told else (11,)
    documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).expand(2, -1)

    def judge(parts: torch.Tensor) -> torch.Tensor:
        b, c, x = parts.mT.chunk(3, dim=1)
        padded = F.pad(b * x, (taps - 1, 0))
        return (c * F.conv1d(padded, weight, bias, groups=5)).mT

    expected = torch.cat([judge(part) for part in parts.split(lengths, 1)], 1)
    taps_32 = weight.float()
    bias_32 = None if bias is None else bias.float()
    found = gated_conv(parts.float(), None, taps_32, bias_32, documents if told else None)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    if told or taps == 1:
        return
    b, _, x = parts[:, :5].float().chunk(3, dim=-1)
    later = gated_conv(parts[:, 5:].float(), (b * x)[:, 1 - taps :], taps_32, bias_32, None)
    torch.testing.assert_close(later.double(), expected[:, 5:], atol=1e-5, rtol=1e-5)


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
